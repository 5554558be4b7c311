//! Bodies of replies. The chunks of a file are read when the client has taken those before, so a slow client holds little memory.

use std::{
    io, iter,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
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

    /// The next chunk, and what follows it.
    async fn next(mut self) -> io::Result<Option<(Bytes, Self)>> {
        if let Some(taken) = self.passed.take().map(|passed| passed.elapsed()) {
            if taken < FAST {
                self.chunk_bytes = (self.chunk_bytes * 2).min(CHUNK_BYTES_MAX);
            } else if taken > SLOW {
                self.chunk_bytes = CHUNK_BYTES_MIN;
            }
        }
        self.begin();
        let Some(waiting) = self.waiting.take() else { return Ok(None) };
        let chunk = waiting.await?;
        self.passed = Some(Instant::now());
        if self.chunk_bytes == CHUNK_BYTES_MAX {
            self.begin();
        }
        Ok(Some((chunk, self)))
    }
}

/// Makes the parts of a text one after the other; none at its end. An error ends the connection.
pub(super) type TextParts = Box<dyn FnMut() -> Option<io::Result<Bytes>> + Send>;

/// The body of a reply.
pub(super) struct ReplyBody {
    chunks: BoxStream<'static, io::Result<Bytes>>,
    /// Bytes that were not passed on yet, if their number is known.
    left: Option<u64>,
    /// The connection is in use as long as there is one.
    _busy: Option<BusyMark>,
}

impl ReplyBody {
    /// No bytes.
    pub(super) fn empty() -> Self {
        Self::of(Bytes::new())
    }

    /// These bytes.
    pub(super) fn of(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let left = Some(bytes.len() as u64);
        let chunks = stream::iter((!bytes.is_empty()).then_some(Ok(bytes))).boxed();
        Self { chunks, left, _busy: None }
    }

    /// A part of a file.
    pub(super) fn of_file(part: FilePart) -> Self {
        let left = Some(part.end - part.next);
        Self { chunks: stream::try_unfold(part, FilePart::next).boxed(), left, _busy: None }
    }

    /// A text whose length is not known yet.
    pub(super) fn of_parts(parts: TextParts) -> Self {
        Self { chunks: stream::iter(iter::from_fn(parts)).boxed(), left: None, _busy: None }
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
        let chunk = ready!(self.chunks.poll_next_unpin(context));
        if let (Some(left), Some(Ok(chunk))) = (&mut self.left, &chunk) {
            *left -= chunk.len() as u64;
        }
        Poll::Ready(chunk.map(|chunk| chunk.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.left == Some(0)
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
