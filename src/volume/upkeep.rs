//! What keeps a file system alive while it is served: its counters, its sources that do not answer or have changed, and the files
//! that the kernel reads directly.

use std::{fs::File, io, sync::Arc, time::Duration};

use super::{
    file_system::{FileSystem, Handle, Ino},
    metrics::{Metrics, RequestKind},
};

/// Why the kernel reads no files directly.
#[derive(Debug, thiserror::Error)]
pub enum NoPassthrough {
    /// The mount does not want it.
    #[error("passthrough is switched off; leave no_passthrough out")]
    Off,
    /// The kernel is too old, or was built without it.
    #[error(
        "the kernel reads no files for a mount by itself, as Linux does since 6.9 (passthrough); use a newer kernel"
    )]
    NotOffered,
    /// The kernel refused a file of the kind.
    #[error("{}", refusal_text(.0))]
    Refused(io::Error),
}

/// What keeps the kernel from reading a file directly, and what would help.
fn refusal_text(error: &io::Error) -> String {
    let text = match error.raw_os_error() {
        Some(libc::EPERM) => {
            "the kernel reads files by itself for root with CAP_SYS_ADMIN only, and not in a user namespace; mount as root \
             of the host"
        }
        Some(libc::ELOOP) => {
            "the directory lies on a file system that is stacked on others (overlay, FUSE), of which the kernel reads no files \
             by itself; give one of ext4, xfs, btrfs or tmpfs"
        }
        _ => {
            return format!(
                "the kernel does not read its files by itself: {error}; give a directory of another file system"
            );
        }
    };
    text.to_owned()
}

/// Receives the result of a materialization: a file with the bytes, or nothing.
pub type WhenMaterialized = Box<dyn FnOnce(Option<Arc<File>>) + Send>;

/// Called when a source has changed. Returns at once.
pub type OnChange = Box<dyn Fn() + Send + Sync>;

/// The calls of a server that keeps a file system alive, beside those of [`FileSystem`] for its readers.
///
/// Apart from [`Volume`](super::Volume), file systems of tests that misbehave implement it.
pub trait Upkeep: FileSystem {
    /// The counters of requests.
    fn metrics(&self) -> &Metrics;

    /// How long a request may wait for storage that does not answer.
    fn stall_limit(&self) -> Duration {
        Duration::from_mins(1)
    }

    /// Finds the sources that do not answer. The caller repeats it several times within [`Upkeep::stall_limit`], and several
    /// times a second while there are requests.
    fn note_stalls(&self) {}

    /// Whether a thread has waited for storage for a while; the storage may be slow or not answer at all.
    fn is_waiting(&self) -> bool {
        false
    }

    /// Whether a file needs a source that does not answer.
    fn is_stalled(&self, ino: Ino) -> bool {
        let _ = ino;
        false
    }

    /// Called after an open or a read was answered with an error because of [`Upkeep::is_stalled`].
    fn note_given_up(&self, op: RequestKind, ino: Ino) {
        let _ = (op, ino);
    }

    /// Sets the function that is called when [`Upkeep::changed_files`] has files; `None` for none.
    fn on_change(&self, callback: Option<OnChange>) {
        drop(callback);
    }

    /// The files of which the kernel is to drop its cached pages: those that were opened and need a source that has changed, and those
    /// that the kernel reads directly from now on.
    fn changed_files(&self) -> Vec<Ino> {
        Vec::new()
    }

    /// A file like those on a disk that the kernel is to read directly, for a trial before [`Upkeep::started`]; `None` if there
    /// are none.
    fn trial(&self) -> Option<File> {
        None
    }

    /// Called once, before any request: whether the kernel may read files directly, as the trial showed if there was one.
    fn started(&self, passthrough: Result<(), NoPassthrough>) {
        drop(passthrough);
    }

    /// Called before any request where this process goes on with a mount that another one has served: the handles that it gave are
    /// below `first_handle`, and the kernel may have pages of any file.
    fn succeed(&self, first_handle: u64) {
        let _ = first_handle;
    }

    /// Materializes a file that was just opened; the kernel then reads it directly until it is closed. Calls `then`, at once or
    /// from another thread; drops it if the file system ends first.
    fn materialize(&self, ino: Ino, handle: Handle, then: WhenMaterialized) {
        let _ = (ino, handle);
        then(None);
    }
}
