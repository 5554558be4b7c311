//! Commands do not wait forever for storage without an answer: this process ends with an error then.

use std::{io, path::Path, sync::Arc};

use ckfs_config::MountSettings;
use ckfs_service::{WaitWatch, wait_registry, watch};
use ckfs_source::{Wait, WaitRegistry};

use super::output::error_text;

/// Ends this process with an error when a fetch stalls.
fn ending(fetches: &Arc<WaitRegistry>) -> io::Result<WaitWatch> {
    let note = |_: Option<(&Wait, &str)>| {};
    watch(fetches, note, |message| {
        ckfs_host::tell(&format!("{}\n", error_text(message)));
        std::process::exit(1);
    })
}

/// Ends this process with an error when a fetch stalls, from now on.
///
/// # Errors
/// As [`watch`].
pub(super) fn end_on_stall(fetches: &Arc<WaitRegistry>) -> io::Result<()> {
    // The thread runs to the end of the process.
    std::mem::forget(ending(fetches)?);
    Ok(())
}

/// Calls `work`, which looks at `path`. If the path gives no answer within the time limit of the settings, this process ends
/// with an error that names it. Without a thread to watch it, which the system may refuse, `work` takes its time.
pub(super) fn within<T>(settings: &MountSettings, path: &Path, action: &'static str, work: impl FnOnce() -> T) -> T {
    let fetches = wait_registry(settings);
    let _watch = ending(&fetches);
    let _looking = fetches.begin_path(path, action);
    work()
}
