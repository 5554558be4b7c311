//! The thread that watches requests. It answers requests whose storage gives no answer and those of programs that are being
//! killed, and it makes sure that a thread reads requests meanwhile.

use std::{
    io,
    sync::{Arc, Weak, atomic::Ordering},
    thread,
    time::Duration,
};

use ckfs_volume::{FileSystem, RequestKind};
use fuser::{Errno, ReplyData, ReplyOpen};

use super::{
    client::is_killed,
    spare::{Overflow, Readers},
    table::{Expired, Requests},
};

/// Time between two turns while there are requests, and otherwise.
const BUSY_PERIOD: Duration = Duration::from_millis(50);
const IDLE_PERIOD: Duration = Duration::from_millis(500);
/// How long a client waits until it is checked for signals: nearly all answers come sooner.
const CLIENT_AGE: Duration = Duration::from_millis(100);
/// Least number of turns within the time that a request may wait.
const LOOKS: u32 = 8;

/// What the thread watches.
pub(crate) struct Lookout {
    pub(crate) fs: Arc<dyn FileSystem>,
    pub(crate) reads: Arc<Requests<ReplyData>>,
    pub(crate) opens: Arc<Requests<ReplyOpen>>,
    pub(crate) readers: Arc<Readers>,
    pub(crate) overflow: Arc<Overflow>,
}

/// A reply to a request that may wait.
trait GiveUp {
    const OP: RequestKind;
    fn give_up(self, errno: Errno);
}

impl GiveUp for ReplyData {
    const OP: RequestKind = RequestKind::Read;

    fn give_up(self, errno: Errno) {
        self.error(errno);
    }
}

impl GiveUp for ReplyOpen {
    const OP: RequestKind = RequestKind::Open;

    fn give_up(self, errno: Errno) {
        self.error(errno);
    }
}

impl Lookout {
    /// Starts the thread, which ends some time after the last other reference is gone.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn start(self: &Arc<Self>) -> io::Result<()> {
        let lookout = Arc::downgrade(self);
        thread::Builder::new().name("ckfs-lookout".to_owned()).spawn(move || watch(&lookout)).map(drop)
    }

    /// One turn. Returns the time until the next.
    fn look(&self) -> Duration {
        self.fs.note_stalls();
        let patience = self.fs.patience();
        self.expire(&self.reads, patience);
        self.expire(&self.opens, patience);
        self.abandon(&self.reads);
        self.abandon(&self.opens);
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
            for expired in requests.expire(ino, patience) {
                let ino = expired.ino;
                self.answer(expired, Errno::EIO);
                self.fs.note_given_up(R::OP, ino);
            }
        }
    }

    /// Answers the requests of clients that are being killed, whatever they wait for: until then a client cannot end.
    fn abandon<R: GiveUp>(&self, requests: &Requests<R>) {
        let mut clients = requests.late_clients(CLIENT_AGE);
        clients.retain(|client| is_killed(*client));
        if clients.is_empty() {
            return;
        }
        for abandoned in requests.abandon(&clients) {
            tracing::debug!(ino = abandoned.ino.0, op = R::OP.name(), "the client is killed; its request is given up");
            self.answer(abandoned, Errno::EINTR);
        }
    }

    fn answer<R: GiveUp>(&self, request: Expired<R>, errno: Errno) {
        let Expired { since, aside, reply, .. } = request;
        if aside {
            self.overflow.mark_stuck();
        }
        reply.give_up(errno);
        let metrics = self.fs.metrics();
        metrics.in_flight.fetch_sub(1, Ordering::Relaxed);
        metrics.record(R::OP, since.elapsed(), true);
    }
}

fn watch(lookout: &Weak<Lookout>) {
    while let Some(lookout) = lookout.upgrade() {
        let period = lookout.look();
        drop(lookout);
        thread::sleep(period);
    }
}
