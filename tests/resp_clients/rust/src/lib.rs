//! Writes replies of redis-rs as the scenario expects them.

use redis::Value;

/// Writes a reply.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Int(number) => number.to_string(),
        Value::BulkString(text) => format!("{:?}", String::from_utf8_lossy(text)),
        Value::Array(elements) => format!("[{}]", elements.iter().map(shown).collect::<Vec<_>>().join(",")),
        other => format!("{other:?}"),
    }
}
