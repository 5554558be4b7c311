//! Where the disk cache is, unless the user says it.

use std::{env, path::PathBuf};

/// The default directory: `$XDG_CACHE_HOME/ckfs`, else `~/.cache/ckfs`. `None` without these variables.
pub fn default_directory() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let absolute = |path: &PathBuf| path.is_absolute();
    let of_cache = variable("XDG_CACHE_HOME").filter(absolute).map(|dir| dir.join("ckfs"));
    of_cache.or_else(|| Some(variable("HOME").filter(absolute)?.join(".cache/ckfs")))
}
