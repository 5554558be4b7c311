//! Requests until they are answered: an answer is sent once, by the handler or by the thread that ends long waits.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use ckfs_volume::{FileSystem, FsError, Ino, RequestKind};
use fuser::{
    Errno, INodeNo, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr,
};
use tracing::error;

use super::super::requests::{Client, Overflow, Requests, Ticket};

pub(super) fn ino(ino: INodeNo) -> Ino {
    Ino(ino.0)
}

/// The message of a panic.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// A reply that can say that the request failed.
pub(super) trait Refuse {
    fn refuse(self, errno: i32);
}

macro_rules! refuse {
    ($($reply:ty),*) => {
        $(impl Refuse for $reply {
            fn refuse(self, errno: i32) {
                self.error(Errno::from_i32(errno));
            }
        })*
    };
}

refuse!(
    ReplyAttr,
    ReplyBmap,
    ReplyCreate,
    ReplyData,
    ReplyDirectory,
    ReplyDirectoryPlus,
    ReplyEmpty,
    ReplyEntry,
    ReplyIoctl,
    ReplyLock,
    ReplyLseek,
    ReplyOpen,
    ReplyPoll,
    ReplyStatfs,
    ReplyWrite,
    ReplyXattr
);

/// The place of a reply until it is sent.
pub(super) enum ReplySlot<R> {
    /// Only the handler can send it.
    Own(Option<R>),
    /// Another thread sends it if the handler takes too long.
    Waiting(Ticket<R>),
}

impl<R> ReplySlot<R> {
    pub(super) fn take(&mut self) -> Option<R> {
        match self {
            Self::Own(reply) => reply.take(),
            Self::Waiting(ticket) => ticket.take(),
        }
    }

    /// The reply, if only the handler can send it.
    pub(super) fn as_mut(&mut self) -> Option<&mut R> {
        match self {
            Self::Own(reply) => reply.as_mut(),
            Self::Waiting(_) => None,
        }
    }

    /// Whether another thread has sent it.
    fn expired(&self) -> bool {
        match self {
            Self::Own(_) => false,
            Self::Waiting(ticket) => ticket.expired(),
        }
    }
}

/// An unanswered request. Its drop answers with EIO.
pub(super) struct Pending<R: Refuse> {
    fs: Arc<dyn FileSystem>,
    op: RequestKind,
    ino: INodeNo,
    start: Instant,
    slot: ReplySlot<R>,
    failed: bool,
    /// The overflow whose thread handles it, unless it is one of fuser's threads.
    aside: Option<Arc<Overflow>>,
}

impl<R: Refuse> Pending<R> {
    pub(super) fn new(fs: &Arc<dyn FileSystem>, op: RequestKind, ino: INodeNo, reply: R) -> Self {
        Self::with_slot(fs, op, ino, Instant::now(), ReplySlot::Own(Some(reply)))
    }

    /// A request that another thread answers if the handler takes too long, or if the client is killed.
    pub(super) fn waiting(
        fs: &Arc<dyn FileSystem>,
        op: RequestKind,
        node: INodeNo,
        requests: &Arc<Requests<R>>,
        client: Client,
        reply: R,
    ) -> Self {
        let start = Instant::now();
        Self::with_slot(fs, op, node, start, ReplySlot::Waiting(requests.add(ino(node), start, client, reply)))
    }

    fn with_slot(fs: &Arc<dyn FileSystem>, op: RequestKind, ino: INodeNo, start: Instant, slot: ReplySlot<R>) -> Self {
        fs.metrics().in_flight.fetch_add(1, Ordering::Relaxed);
        Self { fs: Arc::clone(fs), op, ino, start, slot, failed: false, aside: None }
    }

    /// Notes that a thread of the overflow handles it from now on.
    pub(super) fn set_aside(&mut self, overflow: &Arc<Overflow>) {
        if let ReplySlot::Waiting(ticket) = &self.slot
            && ticket.set_aside()
        {
            self.aside = Some(Arc::clone(overflow));
        }
    }

    /// Runs `body`, which may answer: it takes the reply out of its slot to send it. An error of `body` is answered here, and a
    /// panic is answered with EIO.
    pub(super) fn attempt<T>(&mut self, body: impl FnOnce(&mut ReplySlot<R>) -> Result<T, FsError>) -> Option<T> {
        let slot = &mut self.slot;
        let result = catch_unwind(AssertUnwindSafe(|| body(slot))).unwrap_or_else(|panic| {
            let (op, ino, cause) = (self.op.name(), self.ino.0, panic_text(panic.as_ref()));
            self.fs.metrics().note_panic(&format!("{op} of inode {ino}"), cause);
            error!(op, ino, "request handler panicked: {cause}");
            Err(FsError::Io)
        });
        result.inspect_err(|failure| self.refuse(failure.errno())).ok()
    }

    fn refuse(&mut self, errno: i32) {
        self.failed = true;
        if let Some(reply) = self.slot.take() {
            reply.refuse(errno);
        }
    }
}

impl<R: Refuse> Drop for Pending<R> {
    fn drop(&mut self) {
        if let Some(reply) = self.slot.take() {
            error!(op = self.op.name(), ino = self.ino.0, "request was left unanswered");
            self.failed = true;
            reply.refuse(libc::EIO);
        } else if self.slot.expired() {
            // The thread that answered it has counted it.
            if let Some(overflow) = &self.aside {
                overflow.unmark_stuck();
            }
            return;
        }
        let metrics = self.fs.metrics();
        metrics.in_flight.fetch_sub(1, Ordering::Relaxed);
        metrics.record(self.op, self.start.elapsed(), self.failed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_messages_are_kept() {
        let text = |panic: fn()| panic_text(catch_unwind(panic).unwrap_err().as_ref()).to_owned();
        assert_eq!(text(|| panic!("plain")), "plain");
        assert_eq!(text(|| panic!("number {}", 7)), "number 7");
        assert_eq!(text(|| std::panic::panic_any(7)), "no message");
    }
}
