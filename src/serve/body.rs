//! Bodies of replies. The chunks of a file are read when the client has taken those before, so a slow client holds little memory.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::{
    connections::BusyMark,
    reads::{AwaitedRead, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, OpenedServed, ServedReads},
};

/// A client that takes a chunk within this time gets larger ones, which are read while the one before is sent.
const FAST: Duration = Duration::from_millis(50);

/// A client that takes longer for a chunk gets small ones.
const SLOW: Duration = Duration::from_millis(500);

/// A part of a file.
pub(super) struct FilePart {
    reads: Arc<ServedReads>,
    file: Arc<OpenedServed>,
    /// The next byte to be read, and the end.
    next: u64,
    end: u64,
    /// Bytes that were not passed on yet.
    left: u64,
    chunk_bytes: usize,
    waiting: Option<AwaitedRead<Bytes>>,
    passed: Option<Instant>,
}

impl FilePart {
    /// The bytes from `start` to before `end`, which the file has.
    pub(super) fn new(reads: &Arc<ServedReads>, file: OpenedServed, start: u64, end: u64) -> Self {
        Self {
            reads: Arc::clone(reads),
            file: Arc::new(file),
            next: start,
            end,
            left: end - start,
            chunk_bytes: CHUNK_BYTES_MIN * 4,
            waiting: None,
            passed: None,
        }
    }

    /// Begins to read the next chunk, which ends at a multiple of its length, so that no tile is needed twice.
    fn begin(&mut self) {
        if self.waiting.is_some() || self.next == self.end {
            return;
        }
        let chunk = self.reads.chunk_bytes(self.chunk_bytes) as u64;
        let end = self.end.min((self.next / chunk + 1) * chunk);
        let len = usize::try_from(end - self.next).expect("a chunk is as long at most");
        self.waiting = Some(self.reads.read(&self.file, self.next, len));
        self.next = end;
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        if let Some(taken) = self.passed.take().map(|passed| passed.elapsed()) {
            if taken < FAST {
                self.chunk_bytes = (self.chunk_bytes * 2).min(CHUNK_BYTES_MAX);
            } else if taken > SLOW {
                self.chunk_bytes = CHUNK_BYTES_MIN;
            }
        }
        self.begin();
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(None) };
        let chunk = ready!(waiting.as_mut().poll(context));
        self.waiting = None;
        let chunk = chunk.map_err(|refusal| io::Error::from_raw_os_error(refusal.errno))?;
        self.left -= chunk.len() as u64;
        self.passed = Some(Instant::now());
        if self.chunk_bytes == CHUNK_BYTES_MAX {
            self.begin();
        }
        Poll::Ready(Some(Ok(chunk)))
    }
}

/// Makes the parts of a text one after the other; none at its end. An error ends the connection.
pub(super) type TextParts = Box<dyn FnMut() -> Option<io::Result<Bytes>> + Send>;

enum Content {
    Memory(Option<Bytes>),
    File(FilePart),
    Parts(TextParts),
}

/// The body of a reply.
pub(super) struct ReplyBody {
    content: Content,
    /// The connection is in use as long as there is one.
    _busy: Option<BusyMark>,
}

impl ReplyBody {
    /// No bytes.
    pub(super) const fn empty() -> Self {
        Self { content: Content::Memory(None), _busy: None }
    }

    /// These bytes.
    pub(super) fn of(bytes: impl Into<Bytes>) -> Self {
        Self { content: Content::Memory(Some(bytes.into()).filter(|bytes| !bytes.is_empty())), _busy: None }
    }

    /// A part of a file.
    pub(super) const fn of_file(part: FilePart) -> Self {
        Self { content: Content::File(part), _busy: None }
    }

    /// A text whose length is not known yet.
    pub(super) fn of_parts(parts: TextParts) -> Self {
        Self { content: Content::Parts(parts), _busy: None }
    }

    /// The same; the connection counts as in use until it is sent.
    pub(super) fn marked(self, busy: BusyMark) -> Self {
        Self { _busy: Some(busy), ..self }
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let chunk = match &mut self.content {
            Content::Memory(bytes) => bytes.take().map(Ok),
            Content::File(part) => ready!(part.poll(context)),
            Content::Parts(parts) => parts(),
        };
        Poll::Ready(chunk.map(|chunk| chunk.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Memory(bytes) => bytes.is_none(),
            Content::File(part) => part.left == 0,
            Content::Parts(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Memory(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Content::File(part) => SizeHint::with_exact(part.left),
            Content::Parts(_) => SizeHint::default(),
        }
    }
}
