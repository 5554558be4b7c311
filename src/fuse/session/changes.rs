//! Makes the kernel drop what it keeps of files whose source has changed, and of files that it reads by itself from now on.
//!
//! The kernel's call for this waits for each page that is being read, and the reader of that page waits for a thread that answers
//! requests. So the call is made in its own thread, for which no other thread waits. It ends, since every request is
//! answered in bounded time or ended with the connection. When the session ends no further
//! call is begun.

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
};

use ckfs_volume::{Ino, Upkeep};
use fuser::{INodeNo, Notifier};
use parking_lot::Mutex;

/// The way to the kernel, until the session ends.
#[derive(Clone, Debug)]
pub(super) struct Changes {
    notifier: Arc<Mutex<Option<Notifier>>>,
}

impl Changes {
    /// Starts the thread, to which `fs` reports changes.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(super) fn start(fs: &Arc<dyn Upkeep>, notifier: Notifier) -> io::Result<Self> {
        let changes = Self { notifier: Arc::new(Mutex::new(Some(notifier))) };
        // One that waits is enough: the files are requested when it is received.
        let (tell, told) = mpsc::sync_channel::<()>(1);
        let (working, files) = (changes.clone(), Arc::downgrade(fs));
        thread::Builder::new().name("ckfs-changes".to_owned()).spawn(move || {
            while told.recv().is_ok() {
                let Some(fs) = files.upgrade() else { return };
                let changed = fs.changed_files();
                drop(fs);
                if !working.drop_pages(&changed) {
                    return;
                }
            }
        })?;
        fs.on_change(Some(Box::new(move || {
            // Full: one waits. Without a receiver the session has ended.
            let _ = tell.try_send(());
        })));
        Ok(changes)
    }

    /// Begins no further call. To be called when the session ends, which it would otherwise keep open.
    pub(super) fn end(&self) {
        self.notifier.lock().take();
    }

    /// Drops the pages of files; whether the session goes on.
    fn drop_pages(&self, files: &[Ino]) -> bool {
        for ino in files {
            let Some(notifier) = self.notifier.lock().clone() else {
                return false;
            };
            // From the first byte, and no length: to the end. The kernel may not know the file any more.
            if let Err(error) = notifier.inval_inode(INodeNo(ino.0), 0, 0) {
                tracing::debug!(ino = ino.0, "cannot drop cached pages: {error}");
            }
        }
        true
    }
}
