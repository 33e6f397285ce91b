//! The replies to COMMAND: names, arities and arguments of the AW commands.

use bytes::BytesMut;

use super::reply::{self, Version};
use crate::protocol::resp::command::{Arguments, COMMANDS, Usage};

/// Replies what there is to know about the AW commands. `redis-cli` completes and explains them from COMMAND DOCS.
pub(super) fn command(arguments: Arguments<'_>, version: Version, out: &mut BytesMut) {
    let subcommand = arguments.get(1).unwrap_or_default().to_ascii_uppercase();
    let named: Vec<Option<&Usage>> = match arguments.count() {
        ..=2 => COMMANDS.iter().map(Some).collect(),
        _ => arguments.from(2).map(Usage::find).collect(),
    };
    match (&subcommand[..], arguments.count()) {
        (b"COUNT", 2) => reply::integer(out, COMMANDS.len() as u64),
        (b"LIST", 2) => {
            reply::array(out, COMMANDS.len());
            let listed = COMMANDS.iter().map(|usage| usage.name.to_ascii_lowercase());
            listed.for_each(|name| reply::bulk(out, name.as_bytes()));
        }
        (b"GETKEYS" | b"GETKEYSANDFLAGS", 3..) if named[0].is_some() => {
            reply::error(out, "ERR The command has no key arguments");
        }
        (b"GETKEYS" | b"GETKEYSANDFLAGS", 3..) => reply::error(out, "ERR Invalid command specified"),
        (b"DOCS", _) => {
            let known = named.into_iter().flatten();
            reply::map(out, version, known.clone().count());
            known.for_each(|usage| document(usage, version, out));
        }
        (b"" | b"INFO", _) => {
            reply::array(out, named.len());
            for usage in named {
                describe(usage, version, out);
            }
        }
        _ => reply::unknown_subcommand(out, arguments),
    }
}

/// Writes the entry of a command in the reply of COMMAND DOCS.
fn document(usage: &Usage, version: Version, out: &mut BytesMut) {
    reply::bulk(out, usage.name.to_ascii_lowercase().as_bytes());
    reply::map(out, version, 4);
    let since = env!("CARGO_PKG_VERSION");
    reply::pairs(out, &[("summary", usage.summary), ("since", since), ("group", "ackwheel")]);
    reply::bulk(out, b"arguments");
    reply::array(out, usize::from(!usage.arguments.is_empty()));
    if !usage.arguments.is_empty() {
        reply::map(out, version, 3);
        reply::pairs(out, &[("name", usage.arguments), ("type", "string"), ("display_text", usage.arguments)]);
    }
}

/// Writes the entry of a command in the reply of COMMAND INFO: its name and arity; no flags, keys and categories.
fn describe(usage: Option<&Usage>, version: Version, out: &mut BytesMut) {
    let Some(usage) = usage else { return reply::null(out, version) };
    reply::array(out, 10);
    reply::bulk(out, usage.name.to_ascii_lowercase().as_bytes());
    // A negative arity is the least number of arguments.
    let sign = if usage.arguments.is_empty() { "" } else { "-" };
    out.extend_from_slice(format!(":{sign}{}\r\n", usage.least).as_bytes());
    reply::set(out, version, 0);
    (0..3).for_each(|_| reply::integer(out, 0));
    (0..4).for_each(|_| reply::set(out, version, 0));
}
