//! The values of labels that are fixed.

/// What goes wrong with Redis: the values of `kind` in `redis_errors_total`.
pub const REDIS_ERRORS: &[&str] = &[
    "timeout",
    "disconnected",
    "readonly",
    "unwritable",
    "open_slot",
    "loading",
    "busy",
    "oom",
    "noscript",
    "stale",
    "lost",
    "forbidden",
    "other",
];
