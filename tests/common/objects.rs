//! A service that holds objects in memory, with latency and faults on request; and a source over it.

use std::{
    ops::ControlFlow,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ckfs::source::{
    ByteSpan, FoundFile, Source, SourceIo, pin_files,
    remote::{
        Content, Failure, Hedging, Objects, RemoteError, RemoteFile, RemoteOptions, RemoteRepository, RemoteTree, Sink,
        cache::Cache,
    },
};

/// What goes wrong with a request.
#[derive(Clone, Debug)]
pub enum Mishap {
    /// The reply ends after this number of bytes.
    CutAfter(u64),
    /// The attempt fails like this.
    Fails(Failure),
    /// No reply comes until the attempt ends.
    Hangs,
}

/// Objects in memory.
#[derive(Debug, Default)]
pub struct MemoryObjects {
    contents: Vec<(String, Vec<u8>)>,
    /// Names the service.
    origin: String,
    /// The next requests have these.
    pub mishaps: Mutex<Vec<Mishap>>,
    pub latency: Mutex<Duration>,
    pub requests: AtomicU64,
    pub bytes: AtomicU64,
    /// Requests under way, and the most there were at a time.
    pub running: AtomicU64,
    pub running_most: AtomicU64,
    /// Requested spans.
    pub spans: Mutex<Vec<(String, ByteSpan)>>,
}

impl MemoryObjects {
    pub fn new<N: Into<String>>(contents: impl IntoIterator<Item = (N, Vec<u8>)>) -> Arc<Self> {
        let contents = contents.into_iter().map(|(name, bytes)| (name.into(), bytes)).collect();
        Arc::new(Self { contents, ..Self::default() })
    }

    /// Objects of a service with this name.
    pub fn of_origin<N: Into<String>>(origin: &str, contents: impl IntoIterator<Item = (N, Vec<u8>)>) -> Arc<Self> {
        let contents = contents.into_iter().map(|(name, bytes)| (name.into(), bytes)).collect();
        Arc::new(Self { contents, origin: origin.to_owned(), ..Self::default() })
    }

    /// The repository of all objects, of a version.
    pub fn repository(self: &Arc<Self>, version: &str) -> RemoteRepository {
        let file = |(name, bytes): &(String, Vec<u8>)| RemoteFile {
            path: name.clone(),
            key: name.clone(),
            size_bytes: bytes.len() as u64,
            content: Content::Version { object: format!("mem://{name}"), version: version.to_owned() },
            etag: Some(version.to_owned()),
            modified_seconds: Some(1),
        };
        RemoteRepository {
            label: "mem://all".into(),
            url: "mem://all".into(),
            revision: None,
            files: self.contents.iter().map(file).collect(),
            objects: Arc::clone(self) as Arc<dyn Objects>,
        }
    }

    /// A source of all objects, in their order.
    pub fn source(self: &Arc<Self>, cache: &Arc<Cache>, timeout: Duration) -> Arc<dyn Source> {
        source_of(self.repository("1"), cache, timeout)
    }
}

pub fn source_of(repository: RemoteRepository, cache: &Arc<Cache>, timeout: Duration) -> Arc<dyn Source> {
    let options = RemoteOptions { timeout, ..RemoteOptions::default() };
    let count = repository.files.len();
    let tree = RemoteTree::open(repository, cache, &options).unwrap();
    let open = |place| FoundFile::cached(tree.remote(place).unwrap()).unwrap().open(None).unwrap();
    pin_files((0..count).map(open).collect(), SourceIo::Auto, Arc::default(), None).unwrap()
}

/// A cache in a directory, by default with a bound that no test reaches: without one the cache would leave a 20th of the disk free,
/// and would keep nothing on a disk that is nearly full.
pub fn cache(dir: &Path, cap_bytes: Option<u64>) -> Arc<Cache> {
    Cache::open(dir, cap_bytes.or(Some(64 << 30)), Arc::default()).unwrap()
}

impl Objects for MemoryObjects {
    fn host(&self) -> &'static str {
        "memory"
    }

    fn origin(&self) -> &str {
        &self.origin
    }

    fn read(
        &self,
        file: &RemoteFile,
        span: ByteSpan,
        until: Instant,
        _: &Hedging,
        sink: &mut Sink<'_>,
    ) -> Result<(), RemoteError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.spans.lock().unwrap().push((file.key.clone(), span));
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.running_most.fetch_max(running, Ordering::SeqCst);
        thread::sleep(*self.latency.lock().unwrap());
        self.running.fetch_sub(1, Ordering::SeqCst);
        let (_, bytes) = self.contents.iter().find(|(name, _)| *name == file.key).unwrap();
        let mut bytes = &bytes[usize::try_from(span.start()).unwrap()..usize::try_from(span.end()).unwrap()];
        let failed = |failure| RemoteError::new(failure, "memory", &file.key, "as asked for").of_span(span);
        let mishap = self.mishaps.lock().unwrap().pop();
        let mut result = Ok(());
        match mishap {
            Some(Mishap::Fails(failure)) => return Err(failed(failure)),
            Some(Mishap::Hangs) => {
                thread::sleep(until.saturating_duration_since(Instant::now()));
                return Err(failed(Failure::Transient));
            }
            Some(Mishap::CutAfter(len)) => {
                bytes = &bytes[..bytes.len().min(usize::try_from(len).unwrap())];
                result = Err(failed(Failure::Transient));
            }
            None => {}
        }
        for part in bytes.chunks(60_001) {
            self.bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
            if let ControlFlow::Break(()) = sink(part) {
                return Ok(());
            }
        }
        result
    }
}
