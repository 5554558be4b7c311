//! Requests until they are answered: an answer is sent once, by the handler or by the thread that ends long waits.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use ckfs_source::{ReadFailure, Replied, Served};
use ckfs_volume::{FileSystem, FsError, Handle, Ino, RequestKind, Upkeep};
use tracing::error;

use super::{
    table::{Client, Refuse, Requests, Ticket},
    waiting_threads::Handlers,
};

/// The message of a panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// The place of a reply until it is sent.
pub struct ReplySlot<R>(Place<R>);

enum Place<R> {
    /// Only the handler can send it.
    Own(Option<R>),
    /// Another thread sends it if the handler takes too long.
    Waiting(Ticket),
}

impl<R: 'static> ReplySlot<R> {
    /// The reply, to be sent; none if it was sent before.
    pub fn take(&mut self) -> Option<R> {
        match &mut self.0 {
            Place::Own(reply) => reply.take(),
            Place::Waiting(ticket) => {
                let reply: Box<dyn Any> = ticket.take()?;
                reply.downcast().ok().map(|reply| *reply)
            }
        }
    }

    /// Puts back a reply that was taken and not sent. From now on only the handler can send it.
    pub fn put_back(&mut self, reply: R) {
        self.0 = Place::Own(Some(reply));
    }

    /// From now on only the handler can send the reply, unless it was sent before.
    pub fn keep(&mut self) {
        if let Some(reply) = self.take() {
            self.put_back(reply);
        }
    }

    /// The reply, if only the handler can send it.
    pub fn as_mut(&mut self) -> Option<&mut R> {
        match &mut self.0 {
            Place::Own(reply) => reply.as_mut(),
            Place::Waiting(_) => None,
        }
    }

    /// Whether another thread has sent it.
    fn expired(&self) -> bool {
        match &self.0 {
            Place::Own(_) => false,
            Place::Waiting(ticket) => ticket.expired(),
        }
    }
}

/// An unanswered request. Its drop answers with EIO.
pub struct Pending<R: Refuse> {
    fs: Arc<dyn Upkeep>,
    op: RequestKind,
    ino: Ino,
    start: Instant,
    slot: ReplySlot<R>,
    failed: bool,
    /// The threads that handle requests, if one of them stands in for those that take requests.
    elsewhere: Option<Arc<dyn Handlers>>,
}

impl<R: Refuse> Pending<R> {
    /// A request that only its handler answers.
    pub fn new(fs: &Arc<dyn Upkeep>, op: RequestKind, ino: Ino, reply: R) -> Self {
        Self::with_slot(fs, op, ino, Instant::now(), ReplySlot(Place::Own(Some(reply))))
    }

    /// A request that another thread answers if the handler takes too long, or if the client is killed.
    pub fn waiting(
        fs: &Arc<dyn Upkeep>,
        op: RequestKind,
        ino: Ino,
        requests: &Arc<Requests>,
        client: Client,
        reply: R,
    ) -> Self {
        let start = Instant::now();
        let ticket = requests.add((op, ino), start, client, Box::new(reply));
        Self::with_slot(fs, op, ino, start, ReplySlot(Place::Waiting(ticket)))
    }

    fn with_slot(fs: &Arc<dyn Upkeep>, op: RequestKind, ino: Ino, start: Instant, slot: ReplySlot<R>) -> Self {
        fs.metrics().in_flight.fetch_add(1, Ordering::Relaxed);
        Self { fs: Arc::clone(fs), op, ino, start, slot, failed: false, elsewhere: None }
    }

    /// Notes that one of `handlers` handles it from now on that stands in for those that take requests.
    pub fn note_elsewhere(&mut self, handlers: Arc<dyn Handlers>) {
        if let Place::Waiting(ticket) = &self.slot.0
            && ticket.note_elsewhere()
        {
            self.elsewhere = Some(handlers);
        }
    }

    /// Runs `body`, which may answer: it takes the reply out of its slot to send it. An error of `body` is answered here, and a
    /// panic is answered with EIO.
    pub fn attempt<T>(&mut self, body: impl FnOnce(&mut ReplySlot<R>) -> Result<T, FsError>) -> Option<T> {
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
            Box::new(reply).refuse(errno);
        }
    }
}

impl<R: Refuse> Drop for Pending<R> {
    fn drop(&mut self) {
        if let Some(reply) = self.slot.take() {
            error!(op = self.op.name(), ino = self.ino.0, "request was left unanswered");
            self.failed = true;
            Box::new(reply).refuse(libc::EIO);
        } else if self.slot.expired() {
            // The thread that answered it has counted it.
            if let Some(handlers) = &self.elsewhere {
                handlers.stand_ins().iter().for_each(|threads| threads.note_stuck(false));
            }
            return;
        }
        let metrics = self.fs.metrics();
        metrics.in_flight.fetch_sub(1, Ordering::Relaxed);
        metrics.record(self.op, self.start.elapsed(), self.failed);
    }
}

/// As [`FileSystem::read`], but an answer that ends before the file does is an error and is not passed on: the kernel would fill it
/// with zeros, or pass it on where it caches no pages; a client of the network would take it for the end.
///
/// # Errors
/// As [`FileSystem::read`]; and [`FsError::Io`] for such an answer.
pub fn read_whole(
    fs: &(impl FileSystem + ?Sized),
    ino: Ino,
    handle: Handle,
    offset: u64,
    len: usize,
    reply: &mut dyn FnMut(Served<'_>) -> Replied,
) -> Result<Replied, ReadFailure<FsError>> {
    let mut verdict = Ok(());
    let replied = fs.read(ino, handle, offset, len, &mut |bytes| {
        verdict = check_length(fs, (ino, handle), offset, len, bytes.len());
        if verdict.is_ok() { reply(bytes) } else { Replied::new() }
    })?;
    verdict?;
    Ok(replied)
}

fn check_length(
    fs: &(impl FileSystem + ?Sized),
    (ino, handle): (Ino, Handle),
    offset: u64,
    asked: usize,
    answered: usize,
) -> Result<(), FsError> {
    if answered == asked {
        return Ok(());
    }
    if answered < asked {
        let end = offset.saturating_add(answered as u64);
        if end >= fs.open_len_bytes(ino, handle)? {
            return Ok(());
        }
    }
    error!(ino = ino.0, offset, "file system answered a read of {asked} bytes with {answered} bytes");
    Err(FsError::Io)
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
