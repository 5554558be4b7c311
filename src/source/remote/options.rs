//! Settings of remote sources.

use std::{env, path::PathBuf, sync::Arc, time::Duration};

use super::super::waits::Waits;

/// Settings of remote sources.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// Directory of the disk cache; `None` takes `$XDG_CACHE_HOME/ckfs`, else `~/.cache/ckfs`.
    pub cache_dir: Option<PathBuf>,
    /// Most bytes of the disk cache; `None` is half of its file system, of which 5 % stay free. A number leaves 1 % free, and
    /// at most 1 GiB.
    pub cache_disk_bytes: Option<u64>,
    /// Longest wait of one read for its bytes, and longest time in which a service may bring nothing while a source is opened.
    pub timeout: Duration,
    /// Uses the network for nothing: what the cache lacks is an error.
    pub offline: bool,
    /// Accepts `http://` for other hosts than this one.
    pub allow_http: bool,
    /// Places complete, verified files of the Hub into the cache of its own client.
    pub shares: bool,
    /// Shows what is waited for.
    pub waits: Arc<Waits>,
}

impl RemoteOptions {
    /// The default of [`RemoteOptions::timeout`].
    pub const TIMEOUT: Duration = Duration::from_mins(1);
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self {
            cache_dir: None,
            cache_disk_bytes: None,
            timeout: Self::TIMEOUT,
            offline: false,
            allow_http: false,
            shares: false,
            waits: Arc::default(),
        }
    }
}

/// The default directory: `$XDG_CACHE_HOME/ckfs`, else `~/.cache/ckfs`. `None` without these variables.
pub fn default_directory() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let absolute = |path: &PathBuf| path.is_absolute();
    let of_cache = variable("XDG_CACHE_HOME").filter(absolute).map(|dir| dir.join("ckfs"));
    of_cache.or_else(|| Some(variable("HOME").filter(absolute)?.join(".cache/ckfs")))
}
