//! The thread that watches requests. It answers requests whose storage gives no answer, and it makes sure that a thread
//! reads requests meanwhile.

use std::{
    io,
    sync::{Arc, Weak, atomic::Ordering},
    thread,
    time::Duration,
};

use fuser::{Errno, ReplyData, ReplyOpen};

use super::{
    spare::{Overflow, Readers},
    table::{Expired, Requests},
};
use crate::volume::{FileSystem, RequestKind};

/// Time between two turns while there are requests, and otherwise.
const BUSY_PERIOD: Duration = Duration::from_millis(50);
const IDLE_PERIOD: Duration = Duration::from_secs(1);
/// Least number of turns within the time that a request may wait.
const LOOKS: u32 = 8;

/// What the thread watches.
pub(in crate::fuse) struct Lookout {
    pub(in crate::fuse) fs: Arc<dyn FileSystem>,
    pub(in crate::fuse) reads: Arc<Requests<ReplyData>>,
    pub(in crate::fuse) opens: Arc<Requests<ReplyOpen>>,
    pub(in crate::fuse) readers: Arc<Readers>,
    pub(in crate::fuse) overflow: Arc<Overflow>,
}

/// A reply to a request that may wait.
trait GiveUp {
    const OP: RequestKind;
    fn give_up(self);
}

impl GiveUp for ReplyData {
    const OP: RequestKind = RequestKind::Read;

    fn give_up(self) {
        self.error(Errno::EIO);
    }
}

impl GiveUp for ReplyOpen {
    const OP: RequestKind = RequestKind::Open;

    fn give_up(self) {
        self.error(Errno::EIO);
    }
}

impl Lookout {
    /// Starts the thread, which ends some time after the last other reference is gone.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(in crate::fuse) fn start(self: &Arc<Self>) -> io::Result<()> {
        let lookout = Arc::downgrade(self);
        thread::Builder::new().name("ckfs-lookout".to_owned()).spawn(move || watch(&lookout)).map(drop)
    }

    /// One turn. Returns the time until the next.
    fn look(&self) -> Duration {
        self.fs.note_stalls();
        let patience = self.fs.patience();
        self.expire(&self.reads, patience);
        self.expire(&self.opens, patience);
        let had_requests = self.readers.look(|| self.fs.is_waiting());
        let busy = had_requests || self.reads.any() || self.opens.any();
        let period = if busy { BUSY_PERIOD } else { IDLE_PERIOD };
        period.min(patience / LOOKS).max(Duration::from_millis(1))
    }

    /// Answers the requests that have waited for `patience` and whose file's source gives no answer. Other requests go on
    /// waiting: their bytes are being computed.
    fn expire<R: GiveUp>(&self, requests: &Requests<R>, patience: Duration) {
        for ino in requests.late(patience) {
            if !self.fs.is_stalled(ino) {
                continue;
            }
            for Expired { ino, since, aside, reply } in requests.expire(ino, patience) {
                if aside {
                    self.overflow.lose();
                }
                reply.give_up();
                self.fs.note_given_up(R::OP, ino);
                let metrics = self.fs.metrics();
                metrics.in_flight.fetch_sub(1, Ordering::Relaxed);
                metrics.record(R::OP, since.elapsed(), true);
            }
        }
    }
}

fn watch(lookout: &Weak<Lookout>) {
    while let Some(lookout) = lookout.upgrade() {
        let period = lookout.look();
        drop(lookout);
        thread::sleep(period);
    }
}
