//! Remote objects as a source: a wrapper over the local source of the cache's sparse files.
//!
//! Every access first makes its bytes present and guards their segments; then the local path does the rest, with maps, kernel-only
//! buffers and advice. Where the cache has no room, the bytes are read past it.
//!
//! Files that are local, such as those of an adapter, are passed through.

use std::{
    convert::Infallible,
    fs::File,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ckfs_sync::{Helpers, processors};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    super::{
        ByteSpan, ComparedFiles, FetchPart, FileFetch, FileId, Health, KernelBytes, LocalFiles, Maps, Opened, Pin,
        ReadFailure, RemoteSource, Replied, Source, SourceError, SourceIo, WaitRegistry, digest::Compared,
    },
    cache::{
        BLOCK_BYTES, CacheLimit, Guards,
        geometry::{blocks_of, place},
    },
    counters::RemoteCounters,
    digest,
    error::{Failure, RemoteError},
    fetcher::merged,
    handle::{Remote, is_late},
    object::FetchError,
    share,
};

/// Segments that were not used for this time may be evicted by other processes.
const IDLE_MS: u64 = 60_000;
/// Bytes ahead of a sequential reader: some requests of each thread that fetches.
const AHEAD_BYTES: u64 = 256 << 20;
/// Files whose digests are compared at a time where a command waits for all.
const SETTLERS_MAX: usize = 8;
static SETTLERS: Helpers = Helpers::new("ckfs-settle", || SETTLERS_MAX);
/// Most bytes that a command brings beyond those that it reads, so that objects are complete and can be compared.
const REST_BYTES_MAX: u64 = 16 << 20;
/// Time between two notes that the entries are in use, and looks whether other processes have dropped wrong bytes.
const TOUCH_PERIOD: Duration = Duration::from_secs(30);

/// Remote objects and local files as one source.
pub struct RemoteFiles {
    local: LocalFiles,
    /// For each file, the remote object; `None` of a local file.
    remote: Vec<Option<Remote>>,
    counters: Arc<RemoteCounters>,
    /// When the entries were last noted to be in use.
    touched: Mutex<Instant>,
    /// Snapshots that need no further work.
    published: Mutex<Vec<PathBuf>>,
    /// What is left of [`REST_BYTES_MAX`].
    rest_bytes: AtomicU64,
}

/// Pins open files; a file's id is its position in `files`. Copies of remote objects are read through what fetches them.
/// `compared` is where blobs are noted that have the digest of their name.
///
/// # Errors
/// The first file whose attributes cannot be read.
///
/// # Panics
/// If there are more than `u32::MAX` files.
pub fn pin_files(
    files: Vec<Opened>,
    io: SourceIo,
    fetches: Arc<WaitRegistry>,
    compared: Option<&Arc<ComparedFiles>>,
) -> Result<Arc<dyn Source>, SourceError> {
    let remote: Vec<Option<Remote>> = files.iter().map(|file| file.remote.clone()).collect();
    let local = LocalFiles::pin(files, io, fetches, compared)?;
    let counters = remote.iter().flatten().next().map(|first| Arc::clone(first.fetcher.cache().counters()));
    Ok(match counters {
        Some(counters) => Arc::new(RemoteFiles::new(local, remote, counters)),
        None => Arc::new(local),
    })
}

impl RemoteFiles {
    /// A source of files that are open. `local` has them in the same order; where `remote` has an object, the file is its sparse file.
    ///
    /// # Panics
    /// If the lists differ in length.
    pub fn new(local: LocalFiles, remote: Vec<Option<Remote>>, counters: Arc<RemoteCounters>) -> Self {
        assert_eq!(local.file_count(), remote.len(), "files of the local source");
        let (touched, published) = (Mutex::new(Instant::now()), Mutex::default());
        for (place, remote) in remote.iter().enumerate() {
            let Some(remote) = remote else { continue };
            digest::compare_when_whole(remote);
            let _ = remote.object.digest.health.set((Arc::clone(&local.health), FileId::at(place)));
        }
        let rest_bytes = AtomicU64::new(REST_BYTES_MAX);
        Self { local, remote, counters, touched, published, rest_bytes }
    }

    fn remote(&self, file: FileId) -> Option<&Remote> {
        self.remote.get(file.index())?.as_ref()
    }

    /// The object whose bytes are brought for these spans. `None` of a local file, and where the local source refuses.
    fn brought(&self, file: FileId, spans: &[ByteSpan]) -> Option<&Remote> {
        let len = self.local.pin(file).len_bytes;
        let is_read = spans.iter().all(|span| span.end() <= len) && self.health().usable(file).is_ok();
        self.remote(file).filter(|_| is_read)
    }

    /// Makes spans present for a reader. Returns guards that keep them.
    fn ready<'a>(remote: &'a Remote, spans: &[ByteSpan]) -> Result<Guards<'a>, FetchError> {
        Self::note_served(remote);
        remote.ready(spans, None)
    }

    /// The error of a read, which poisons the file if its object has changed.
    fn error(&self, file: FileId, span: ByteSpan, error: &RemoteError) -> SourceError {
        let path = Arc::clone(&self.local.pin(file).path);
        let Failure::Changed { expected, found } = &error.failure else {
            return SourceError::remote(path, span, error);
        };
        let flaw = format!("changed since it was listed: expected version {expected}, found {found}");
        self.health().condemn(file, SourceError::Lost { file: path, flaw })
    }

    /// Reads past the cache.
    fn uncached(&self, file: FileId, remote: &Remote, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError> {
        let spans: Vec<ByteSpan> = parts.iter().filter_map(FetchPart::span).collect();
        if let Some(error) = remote.object.take_recent_timeout(&spans) {
            return Err(self.error(file, bounding(&spans), &error));
        }
        let deadline = remote.deadline();
        let read = remote.read_uncached(parts, deadline).map_err(|(span, error)| (span, Arc::new(error)));
        let late = read.as_ref().err().map(|(_, error)| error).filter(|error| is_late(error, deadline));
        remote.object.record_result(&spans, late);
        read.map_err(|(span, error)| self.error(file, span, &error))
    }

    /// Runs `work` on a buffer of a span in which the bytes of `parts` are right.
    fn with_buffer(
        &self,
        file: FileId,
        remote: &Remote,
        span: ByteSpan,
        parts: &[ByteSpan],
        work: &mut dyn FnMut(&[u8]),
    ) -> Result<(), SourceError> {
        let mut buffer = vec![0; place(span.len())];
        let mut rest: &mut [u8] = &mut buffer;
        let mut at = span.start();
        let mut targets = Vec::with_capacity(parts.len());
        for part in parts {
            let skipped = rest.split_off_mut(..place(part.start() - at));
            let target = rest.split_off_mut(..place(part.len()));
            let (Some(_), Some(target)) = (skipped, target) else { continue };
            targets.push(FetchPart { start: part.start(), target });
            at = part.end();
        }
        self.uncached(file, remote, &mut targets)?;
        work(&buffer);
        Ok(())
    }

    /// Notes that a reader gets bytes of an object.
    fn note_served(remote: &Remote) {
        if remote.object.digest.note_served() {
            digest::begin(remote);
        }
    }

    /// Brings the rest of an object of which little is missing, so that it can be compared.
    fn bring_rest(&self, remote: &Remote) {
        let (object, entry) = (&remote.object, &remote.object.entry);
        if !digest::is_open(object) || entry.is_whole() {
            return;
        }
        let all = 0..entry.block_count();
        let Ok(absent) = entry.absent(&all) else { return };
        let bytes: u64 = absent.iter().map(|blocks| entry.span_of(blocks).len()).sum();
        let rest = |left: u64| left.checked_sub(bytes);
        if self.rest_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, rest).is_err() {
            return;
        }
        if let Err(failure) = remote.fetcher.fetch(&[(Arc::clone(object), vec![all])], 0, remote.deadline()) {
            tracing::debug!("{}: its rest does not come: {failure}", object.name.display());
        }
    }

    /// Makes the snapshots of the shared cache that have all of their files now.
    fn publish(&self) -> Vec<PathBuf> {
        let mut done = self.published.lock();
        share::publish(self.remote.iter().flatten().map(|remote| &*remote.object), &mut done)
    }

    fn counted<T>(&self, result: Result<T, SourceError>) -> Result<T, SourceError> {
        result.inspect_err(|_| RemoteCounters::add(&self.counters.failed_reads, 1))
    }
}

/// Bounding span of spans, which are not empty.
fn bounding(spans: &[ByteSpan]) -> ByteSpan {
    let start = spans.iter().map(|span| span.start()).min().unwrap_or(0);
    let end = spans.iter().map(|span| span.end()).max().unwrap_or(start);
    ByteSpan::new(start, end).expect("the least start is at most the greatest end")
}

impl Source for RemoteFiles {
    fn file_count(&self) -> usize {
        self.local.file_count()
    }

    fn pin(&self, file: FileId) -> &Pin {
        self.local.pin(file)
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        self.local.check(file)
    }

    fn check_path(&self, file: FileId) -> Result<(), SourceError> {
        self.local.check_path(file)
    }

    fn fetch(&self, file: FileId, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError> {
        let spans: Option<SmallVec<[ByteSpan; 4]>> = parts.iter().map(FetchPart::span).collect();
        let brought = spans.and_then(|spans| Some((self.brought(file, &spans)?, spans)));
        let Some((remote, spans)) = brought else { return self.local.fetch(file, parts) };
        let result = match Self::ready(remote, &spans) {
            Ok(_guards) => self.local.fetch(file, parts),
            Err(FetchError::NoRoom | FetchError::Cache(_)) => self.uncached(file, remote, parts),
            Err(FetchError::Remote(_, error)) => Err(self.error(file, bounding(&spans), &error)),
        };
        self.counted(result)
    }

    fn fetch_files(&self, files: &mut [FileFetch<'_, '_>]) -> Result<(), (FileId, SourceError)> {
        // First all of them together, so that requests for several files are under way at a time. Each then finds its bytes.
        let demand = |FileFetch { file, parts }: &FileFetch<'_, '_>| {
            let spans: Option<Vec<ByteSpan>> = parts.iter().map(FetchPart::span).collect();
            let spans = spans?;
            let remote = self.brought(*file, &spans)?;
            Some((remote, (Arc::clone(&remote.object), Remote::blocks(&spans))))
        };
        let (remotes, demands): (Vec<&Remote>, Vec<_>) = files.iter().filter_map(demand).unzip();
        if let Some(first) = remotes.first().filter(|_| demands.len() > 1) {
            let gap = first.object.service.gap_bytes() / BLOCK_BYTES;
            if let Err(FetchError::Remote(name, error)) = first.fetcher.fetch(&demands, gap, first.deadline()) {
                let is_named = |fetch: &&FileFetch<'_, '_>| {
                    self.remote(fetch.file).is_some_and(|remote| Arc::ptr_eq(&remote.object.name, &name))
                };
                if let Some(file) = files.iter().find(is_named).map(|fetch| fetch.file) {
                    let span = error.span.unwrap_or(ByteSpan::EMPTY);
                    return self.counted(Err(self.error(file, span, &error))).map_err(|error| (file, error));
                }
            }
        }
        files
            .iter_mut()
            .try_for_each(|FileFetch { file, parts }| self.fetch(*file, parts).map_err(|error| (*file, error)))
    }

    fn gap_bytes(&self) -> u64 {
        if self.remote.iter().any(Option::is_some) { BLOCK_BYTES } else { self.local.gap_bytes() }
    }

    fn health(&self) -> &Health {
        self.local.health()
    }

    fn maps(&self) -> Option<&dyn Maps> {
        Some(self)
    }

    fn backing(&self, file: FileId) -> Option<Arc<File>> {
        if let Some(remote) = self.remote(file) {
            let entry = &remote.object.entry;
            if digest::is_open(&remote.object) {
                // The kernel would keep wrong bytes: it gets the file once they were compared.
                Self::note_served(remote);
                return None;
            }
            // The kernel will read the file without asking: its blocks must stay.
            if !(entry.is_whole() && entry.keep().unwrap_or(false)) {
                return None;
            }
        }
        self.local.backing(file)
    }

    fn is_used(&self, file: FileId) -> bool {
        self.remote(file).map_or_else(|| self.local.is_used(file), |remote| remote.object.digest.is_served())
    }

    fn note_right(&self, file: FileId) {
        if self.remote(file).is_none() {
            self.local.note_right(file);
        }
    }

    fn compare(&self, file: FileId) -> Result<Compared, SourceError> {
        let Some(remote) = self.remote(file) else { return self.local.compare(file) };
        self.health().usable(file)?;
        self.bring_rest(remote);
        digest::settle(remote).map_err(|error| self.health().condemn(file, error))
    }

    fn remote(&self) -> Option<&dyn RemoteSource> {
        self.remote.iter().any(Option::is_some).then_some(self)
    }
}

impl RemoteSource for RemoteFiles {
    fn counters(&self) -> &RemoteCounters {
        &self.counters
    }

    fn ahead_bytes(&self) -> u64 {
        AHEAD_BYTES
    }

    fn prefetch(&self, file: FileId, spans: &[ByteSpan]) -> bool {
        let Some(remote) = self.remote(file) else { return true };
        let spans: Vec<ByteSpan> =
            spans.iter().copied().filter(|span| self.brought(file, &[*span]).is_some()).collect();
        let gap = if spans.len() > 1 { self.ahead_gap_bytes(file) / BLOCK_BYTES } else { 0 };
        remote.fetcher.prefetch(&remote.object, &Remote::blocks(&spans), gap)
    }

    fn cache_limit(&self) -> Option<(PathBuf, CacheLimit)> {
        let cache = self.remote.iter().flatten().next()?.fetcher.cache();
        // Memory keeps nothing for the next run.
        self.remote.iter().flatten().all(|remote| remote.object.entry.dir().is_some()).then_some(())?;
        Some((cache.objects()?.to_owned(), cache.limit().ok()?))
    }

    fn share(&self) -> Result<Vec<PathBuf>, SourceError> {
        let remote = self.remote.iter().enumerate();
        let files: Vec<_> = remote.filter_map(|(place, remote)| Some((FileId::at(place), remote.as_ref()?))).collect();
        let wrong = Mutex::new(Vec::new());
        // Digests are the work of one processor for each file.
        let most = processors().min(SETTLERS_MAX);
        let Ok(()) = SETTLERS.each(most, files, |(file, remote)| {
            wrong.lock().extend(digest::settle(remote).err().map(|error| (file, error)));
            Ok::<(), Infallible>(())
        });
        let mut wrong = wrong.into_inner();
        wrong.sort_by_key(|(file, _)| *file);
        let errors: Vec<SourceError> =
            wrong.into_iter().map(|(file, error)| self.health().condemn(file, error)).collect();
        errors.into_iter().next().map_or_else(|| Ok(self.publish()), Err)
    }

    fn ahead_jobs(&self) -> usize {
        self.remote.iter().flatten().next().map_or(0, |remote| remote.fetcher.ahead_jobs())
    }

    fn absent_spans(&self, file: FileId, spans: &[ByteSpan]) -> Vec<ByteSpan> {
        let Some(remote) = self.remote(file) else { return Vec::new() };
        let entry = &remote.object.entry;
        let ranges = merged(&Remote::blocks(spans), 0);
        let absent = entry.absent_of(&ranges).unwrap_or(ranges);
        absent.iter().map(|blocks| entry.span_of(blocks)).collect()
    }

    fn ahead_gap_bytes(&self, file: FileId) -> u64 {
        self.remote(file).map_or(0, |remote| remote.object.service.planned_gap_bytes())
    }
}

impl Maps for RemoteFiles {
    fn is_mapped(&self, file: FileId) -> bool {
        // Where the cache has no room, exact spans cost less than what a map's window would.
        let has_room = |remote: &Remote| {
            let entry = &remote.object.entry;
            entry.is_whole() || !remote.fetcher.cache().space_of(entry).is_full()
        };
        let room = self.remote(file).is_none_or(has_room);
        room && self.local.is_mapped(file)
    }

    fn is_partial(&self, file: FileId, span: ByteSpan) -> bool {
        self.remote(file).is_some_and(|remote| !remote.object.entry.is_verified(&blocks_of(span)))
    }

    fn with(&self, file: FileId, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>> {
        self.with_parts(file, span, &[span], work)
    }

    fn with_parts(
        &self,
        file: FileId,
        span: ByteSpan,
        parts: &[ByteSpan],
        work: &mut dyn FnMut(&[u8]),
    ) -> Option<Result<(), SourceError>> {
        let Some(remote) = self.brought(file, &[span]) else { return self.local.with(file, span, work) };
        let result = match Self::ready(remote, parts) {
            Ok(_guards) => self.local.with(file, span, work)?,
            Err(FetchError::NoRoom | FetchError::Cache(_)) => self.with_buffer(file, remote, span, parts, work),
            Err(FetchError::Remote(_, error)) => Err(self.error(file, bounding(parts), &error)),
        };
        Some(self.counted(result))
    }

    fn with_kernel_bytes(
        &self,
        file: FileId,
        span: ByteSpan,
        reply: &mut dyn FnMut(KernelBytes<'_>) -> Replied,
    ) -> Option<Result<Replied, ReadFailure<SourceError>>> {
        let Some(remote) = self.brought(file, &[span]) else {
            return self.local.with_kernel_bytes(file, span, reply);
        };
        match Self::ready(remote, &[span]) {
            // The guards live until the kernel has copied the bytes.
            Ok(_guards) => self.local.with_kernel_bytes(file, span, reply),
            // The caller fetches.
            Err(FetchError::NoRoom | FetchError::Cache(_)) => None,
            Err(FetchError::Remote(_, error)) => {
                let failed: Result<(), SourceError> = self.counted(Err(self.error(file, span, &error)));
                failed.err().map(|error| Err(error.into()))
            }
        }
    }

    fn will_need(&self, file: FileId, span: ByteSpan) -> bool {
        let Some(remote) = self.brought(file, &[span]) else { return self.local.will_need(file, span) };
        let blocks = blocks_of(span);
        match remote.object.entry.absent(&blocks) {
            Ok(absent) if absent.is_empty() => self.local.will_need(file, span),
            Ok(_) => {
                remote.fetcher.prefetch(&remote.object, &[blocks], 0);
                true
            }
            Err(_) => false,
        }
    }

    fn will_revisit(&self) {
        self.local.will_revisit();
    }

    fn trim(&self) {
        self.local.trim();
        let Some(first) = self.remote.iter().flatten().next() else { return };
        let cache = first.fetcher.cache();
        cache.trim(IDLE_MS);
        let mut touched = self.touched.lock();
        let looks = touched.elapsed() >= TOUCH_PERIOD;
        if looks {
            *touched = Instant::now();
        }
        drop(touched);
        if looks {
            cache.touch();
        }
        for remote in self.remote.iter().flatten() {
            if looks {
                digest::look(&remote.object);
            }
            digest::begin(remote);
        }
        for made in self.publish() {
            tracing::info!("{}: complete for other programs", made.display());
        }
    }

    fn bound(&self, usual_bytes: u64, again_bytes: u64) {
        self.local.bound(usual_bytes, again_bytes);
    }
}
