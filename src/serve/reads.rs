//! Threads that open and read files of a volume, for requests that wait for the result.
//!
//! A request is watched as those of the kernel are: if its source gives no answer in time, another thread answers it with an error,
//! and the thread that waits is replaced.

use std::{
    io,
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use ckfs_service::{Handlers, Pending, Refuse, Requests, WaitingThreads, Watchdog};
use ckfs_source::{
    Replied,
    digest::{Digester, KnownDigest},
};
use ckfs_sync::{Buffer, BufferPool, Sizing};
use ckfs_volume::{FsError, Handle, Ino, RequestKind, Upkeep};
use futures_util::{FutureExt, future::BoxFuture};
use lru::LruCache;
use nix::errno::Errno;
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Bytes of a chunk for a client that takes them fast, and for one that does not.
pub(super) const CHUNK_BYTES_MAX: usize = 512 << 10;
/// As above.
pub(super) const CHUNK_BYTES_MIN: usize = 32 << 10;

/// Once the chunks that clients have not taken are as large together, further ones are small.
const TAKEN_BYTES_MAX: usize = 128 << 20;

/// Unused memory for chunks.
const SPARE_BYTES_MAX: usize = 16 << 20;

/// Time after which memory that was not used is freed.
const TRIM_PERIOD: Duration = Duration::from_secs(3);

/// More bytes than a file has that is made at each open.
const MADE_BYTES_MAX: usize = 1 << 30;

/// Files whose ids are remembered.
const BLOB_IDS: NonZeroUsize = NonZeroUsize::new(1 << 16).expect("not zero");

/// Most threads beyond the usual ones while those wait for storage.
const EXTRA_MAX: usize = 64;

/// Where the result of a request goes.
struct ResultSender<T>(oneshot::Sender<io::Result<T>>);

impl<T: Send + 'static> Refuse for ResultSender<T> {
    fn refuse(self: Box<Self>, errno: i32) {
        // A client that has gone away needs no answer.
        let _ = self.0.send(Err(io::Error::from_raw_os_error(errno)));
    }
}

/// A result that another thread makes.
pub(super) type AwaitedRead<T> = BoxFuture<'static, io::Result<T>>;

/// A chunk on its way to a client. Its memory is used again.
struct ChunkBuffer(Buffer<Vec<u8>>);

impl AsRef<[u8]> for ChunkBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// An open file. Closed when it is dropped.
pub(super) struct OpenedServed {
    fs: Arc<dyn Upkeep>,
    ino: Ino,
    handle: Handle,
}

impl OpenedServed {
    fn open(fs: &Arc<dyn Upkeep>, ino: Ino) -> Result<Self, FsError> {
        // Nothing is materialized for it: only the kernel reads materialized files.
        let opened = fs.open_uncached(ino)?;
        Ok(Self { fs: Arc::clone(fs), ino, handle: opened.handle })
    }

    /// All bytes of a file that is made at each open.
    fn made(&self) -> Result<Vec<u8>, FsError> {
        let mut made = Err(FsError::Io);
        let read = self.fs.read(self.ino, self.handle, 0, MADE_BYTES_MAX, &mut |served| {
            made = served.to_vec().map_err(|_| FsError::Io);
            Replied::new()
        });
        read.map_err(|failure| failure.error).and(made)
    }
}

impl Drop for OpenedServed {
    fn drop(&mut self) {
        let start = Instant::now();
        self.fs.release(self.ino, self.handle);
        self.fs.metrics().record(RequestKind::Release, start.elapsed(), false);
    }
}

/// The threads, and memory for what they read.
struct ReadThreads {
    waiting: WaitingThreads,
    usual: usize,
    /// Jobs that ended.
    passed: AtomicU64,
    buffers: BufferPool<Vec<u8>>,
    last: Mutex<LastLook>,
}

/// What the last look found.
struct LastLook {
    passed: u64,
    trimmed: Instant,
}

impl ReadThreads {
    fn new(usual: usize) -> Self {
        let sizing = Sizing { memory_len: usize::next_power_of_two, lengths_max: 2 };
        Self {
            waiting: WaitingThreads::new("ckfs-serve", usual),
            usual,
            passed: AtomicU64::new(0),
            buffers: BufferPool::new(sizing, SPARE_BYTES_MAX, Arc::default()),
            last: Mutex::new(LastLook { passed: 0, trimmed: Instant::now() }),
        }
    }
}

impl Handlers for ReadThreads {
    fn tend(&self, is_waiting: &dyn Fn() -> bool) -> bool {
        let (queued, passed) = (self.waiting.queued(), self.passed.load(Ordering::Relaxed));
        let mut last = self.last.lock();
        let seen = std::mem::replace(&mut last.passed, passed);
        if queued > 0 && seen == passed && is_waiting() {
            self.waiting.change_extra(|extra| (extra + self.usual).min(EXTRA_MAX));
        } else if queued == 0 {
            self.waiting.change_extra(|_| 0);
        }
        if last.trimmed.elapsed() >= TRIM_PERIOD {
            last.trimmed = Instant::now();
            self.buffers.trim();
        }
        queued > 0 || seen != passed
    }

    fn stand_ins(&self) -> Vec<&WaitingThreads> {
        vec![&self.waiting]
    }
}

/// Opens and reads files of a file system.
pub(super) struct ServedReads {
    pub(super) fs: Arc<dyn Upkeep>,
    threads: Arc<ReadThreads>,
    requests: Arc<Requests>,
    pub(super) watchdog: Arc<Watchdog>,
    /// Ids of small files, by their versions.
    blob_ids: Mutex<LruCache<String, String>>,
}

impl ServedReads {
    /// Reads of `fs` by `threads` threads.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(super) fn new(fs: Arc<dyn Upkeep>, threads: usize) -> io::Result<Self> {
        let threads = Arc::new(ReadThreads::new(threads.max(1)));
        let requests = Arc::default();
        let watchdog = Watchdog::start(&fs, &requests, Arc::<ReadThreads>::clone(&threads))?;
        Ok(Self { fs, threads, requests, watchdog, blob_ids: Mutex::new(LruCache::new(BLOB_IDS)) })
    }

    /// Opens a file. Fails if a source of it has changed.
    pub(super) fn open(&self, ino: Ino) -> AwaitedRead<OpenedServed> {
        let fs = Arc::clone(&self.fs);
        self.run(RequestKind::Open, ino, move || OpenedServed::open(&fs, ino))
    }

    /// Reads `len` bytes at `offset`, which the file has.
    pub(super) fn read(&self, file: &Arc<OpenedServed>, offset: u64, len: usize) -> AwaitedRead<Bytes> {
        let (file, buffers) = (Arc::clone(file), self.threads.buffers.clone());
        self.run(RequestKind::Read, file.ino, move || {
            let mut buffer = buffers.take(len);
            file.fs.read_into(file.ino, file.handle, offset, &mut buffer)?;
            Ok(Bytes::from_owner(ChunkBuffer(buffer)))
        })
    }

    /// The bytes of a file that is made at each open, as they are now. Waits for no storage.
    ///
    /// # Errors
    /// It is none, or is of a step that is gone.
    pub(super) fn made_now(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        OpenedServed::open(&self.fs, ino)?.made()
    }

    /// The same, by another thread.
    pub(super) fn made(&self, ino: Ino) -> AwaitedRead<Bytes> {
        let fs = Arc::clone(&self.fs);
        self.run(RequestKind::Read, ino, move || Ok(OpenedServed::open(&fs, ino)?.made()?.into()))
    }

    /// The id that git gives the bytes of a small file, whose version is `version`; that itself if they cannot be read.
    pub(super) async fn blob_id(&self, version: String, ino: Ino, size_bytes: u64) -> String {
        if let Some(id) = self.blob_ids.lock().get(&version) {
            return id.clone();
        }
        let fs = Arc::clone(&self.fs);
        let hashed = self.run(RequestKind::Read, ino, move || {
            let file = OpenedServed::open(&fs, ino)?;
            let mut digest = Digester::new(&KnownDigest::GitBlob(String::new()), size_bytes);
            let mut buffer = vec![0; CHUNK_BYTES_MAX];
            for start in (0..size_bytes).step_by(CHUNK_BYTES_MAX) {
                let left = usize::try_from(size_bytes - start).unwrap_or(CHUNK_BYTES_MAX);
                let part = &mut buffer[..left.min(CHUNK_BYTES_MAX)];
                fs.read_into(ino, file.handle, start, part)?;
                digest.update(part);
            }
            Ok(digest.finish())
        });
        let Ok(id) = hashed.await else { return version };
        self.blob_ids.lock().put(version, id.clone());
        id
    }

    /// The length of a chunk for a client that may have one of `wanted` bytes.
    pub(super) fn chunk_bytes(&self, wanted: usize) -> usize {
        if self.threads.buffers.taken_bytes() < TAKEN_BYTES_MAX { wanted } else { wanted.min(CHUNK_BYTES_MIN) }
    }

    /// Has another thread do `work`, watched.
    fn run<T: Send + 'static>(
        &self,
        op: RequestKind,
        ino: Ino,
        work: impl FnOnce() -> Result<T, FsError> + Send + 'static,
    ) -> AwaitedRead<T> {
        let (sender, receiver) = oneshot::channel();
        let mut pending = Pending::waiting(&self.fs, op, ino, &self.requests, None, ResultSender(sender));
        let handlers: Arc<dyn Handlers> = Arc::<ReadThreads>::clone(&self.threads);
        let threads = Arc::clone(&self.threads);
        self.threads.waiting.submit(move || {
            pending.note_elsewhere(handlers);
            pending.attempt(|slot| {
                let done = work()?;
                if let Some(ResultSender(sender)) = slot.take() {
                    let _ = sender.send(Ok(done));
                }
                Ok(())
            });
            drop(pending);
            threads.passed.fetch_add(1, Ordering::Relaxed);
        });
        // What is lost is as a failed read.
        receiver.map(|result| result.unwrap_or_else(|_| Err(Errno::EIO.into()))).boxed()
    }
}
