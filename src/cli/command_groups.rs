//! The groups of commands in the help and in the manual pages.

/// The commands by what they are for, as `ckfs --help` lists them.
pub(super) const COMMAND_GROUPS: [(&str, &[&str]); 5] = [
    ("Mount", &["mount", "run", "umount", "status", "restart", "serve"]),
    ("Look", &["plan", "explain", "cat"]),
    ("Move", &["export", "fetch", "cache"]),
    ("Trust", &["verify", "sums"]),
    ("Host", &["doctor", "metrics", "demo", "completions", "man", "help"]),
];
