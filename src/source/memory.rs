//! Sources for tests: files in memory, and a wrapper that misbehaves.

use std::{
    fs::File,
    io,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use super::{Aspect, ByteSpan, FileId, Poison, Source, SourceError};

/// Files in memory.
#[derive(Debug, Default)]
pub struct MemoryFiles {
    files: Vec<MemoryFile>,
    poisoned: AtomicU64,
}

#[derive(Debug)]
struct MemoryFile {
    path: Arc<Path>,
    bytes: Vec<u8>,
    version: AtomicU64,
    poison: OnceLock<Poison>,
}

impl MemoryFiles {
    /// A source of named files; ids are their places in the list.
    pub fn new<N: AsRef<Path>>(files: impl IntoIterator<Item = (N, Vec<u8>)>) -> Self {
        let file = |(name, bytes): (N, Vec<u8>)| MemoryFile {
            path: Arc::from(name.as_ref()),
            bytes,
            version: AtomicU64::new(0),
            poison: OnceLock::new(),
        };
        Self { files: files.into_iter().map(file).collect(), poisoned: AtomicU64::new(0) }
    }

    /// Makes a file look changed, as by another process; noticed by the next check.
    pub fn touch(&self, file: FileId) {
        self.file(file).version.fetch_add(1, Ordering::Relaxed);
    }

    fn file(&self, file: FileId) -> &MemoryFile {
        &self.files[file.index()]
    }
}

impl MemoryFile {
    fn healthy(&self) -> Result<(), SourceError> {
        self.poison.get().map_or(Ok(()), |poison| Err(poison.error.clone()))
    }

    fn bytes(&self, span: ByteSpan) -> Result<&[u8], SourceError> {
        self.healthy()?;
        let bounds = usize::try_from(span.start()).ok().zip(usize::try_from(span.end()).ok());
        bounds.and_then(|(start, end)| self.bytes.get(start..end)).ok_or_else(|| SourceError::OutOfBounds {
            file: self.path.clone(),
            span,
            len_bytes: self.bytes.len() as u64,
        })
    }
}

impl Source for MemoryFiles {
    fn file_count(&self) -> usize {
        self.files.len()
    }

    fn len_bytes(&self, file: FileId) -> u64 {
        self.file(file).bytes.len() as u64
    }

    fn path(&self, file: FileId) -> &Path {
        &self.file(file).path
    }

    fn modified(&self, file: FileId) -> SystemTime {
        let _ = self.file(file);
        SystemTime::UNIX_EPOCH
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        let file = self.file(file);
        file.healthy()?;
        let version = file.version.load(Ordering::Relaxed);
        if version == 0 {
            return Ok(());
        }
        let error = SourceError::Changed {
            file: file.path.clone(),
            aspect: Aspect::Version,
            expected: 0,
            found: i128::from(version),
        };
        if file.poison.set(Poison { error: error.clone(), since: SystemTime::now() }).is_ok() {
            self.poisoned.fetch_add(1, Ordering::Relaxed);
            tracing::error!("{error}; every read that needs this file fails from now on");
        }
        file.healthy()
    }

    fn read_into(&self, file: FileId, start: u64, target: &mut [u8]) -> Result<(), SourceError> {
        let span = ByteSpan::of_len(start, target.len() as u64).unwrap_or(ByteSpan { start, end: u64::MAX });
        target.copy_from_slice(self.file(file).bytes(span)?);
        Ok(())
    }

    fn lend(&self, file: FileId, span: ByteSpan) -> Option<&[u8]> {
        self.file(file).bytes(span).ok()
    }

    fn with_map(&self, file: FileId, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>> {
        Some(self.file(file).bytes(span).map(work))
    }

    fn will_need(&self, file: FileId, _span: ByteSpan) {
        let _ = self.file(file);
    }

    fn backing(&self, file: FileId) -> Option<Arc<File>> {
        let _ = self.file(file);
        None
    }

    fn poisoned(&self) -> u64 {
        self.poisoned.load(Ordering::Relaxed)
    }

    fn poison(&self, file: FileId) -> Option<Poison> {
        self.file(file).poison.get().cloned()
    }
}

/// What a [`Faulty`] source does once its calls are used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Reads fail as by a broken device.
    Io,
    /// Reads go well, but every check says that the file has changed.
    Changed,
}

/// A wrapper that lets a number of reads pass and then misbehaves for good.
#[derive(Debug)]
pub struct Faulty<S> {
    inner: S,
    fault: Fault,
    calls_left: AtomicU64,
}

impl<S: Source> Faulty<S> {
    /// Lets `calls` reads pass ([`Source::read_into`], [`Source::with_map`] and [`Source::lend`] each count one, and
    /// [`Source::read_spans`] one per span).
    pub fn new(inner: S, fault: Fault, calls: u64) -> Self {
        Self { inner, fault, calls_left: AtomicU64::new(calls) }
    }

    /// Uses up one call; whether it may pass.
    fn spend(&self) -> bool {
        self.calls_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }

    fn fails(&self) -> bool {
        !self.spend() && self.fault == Fault::Io
    }

    fn error(&self, file: FileId) -> SourceError {
        SourceError::Io {
            file: Arc::from(self.inner.path(file)),
            action: "read".into(),
            error: Arc::new(io::Error::from_raw_os_error(libc::EIO)),
        }
    }
}

impl<S: Source> Source for Faulty<S> {
    fn file_count(&self) -> usize {
        self.inner.file_count()
    }

    fn len_bytes(&self, file: FileId) -> u64 {
        self.inner.len_bytes(file)
    }

    fn path(&self, file: FileId) -> &Path {
        self.inner.path(file)
    }

    fn modified(&self, file: FileId) -> SystemTime {
        self.inner.modified(file)
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        if self.fault == Fault::Changed && self.calls_left.load(Ordering::Relaxed) == 0 {
            return Err(SourceError::Changed {
                file: Arc::from(self.inner.path(file)),
                aspect: Aspect::Version,
                expected: 0,
                found: 1,
            });
        }
        self.inner.check(file)
    }

    fn read_into(&self, file: FileId, start: u64, target: &mut [u8]) -> Result<(), SourceError> {
        if self.fails() { Err(self.error(file)) } else { self.inner.read_into(file, start, target) }
    }

    fn lend(&self, file: FileId, span: ByteSpan) -> Option<&[u8]> {
        if self.fails() { None } else { self.inner.lend(file, span) }
    }

    fn with_map(&self, file: FileId, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>> {
        if self.fails() { Some(Err(self.error(file))) } else { self.inner.with_map(file, span, work) }
    }

    fn will_need(&self, file: FileId, span: ByteSpan) {
        self.inner.will_need(file, span);
    }

    fn backing(&self, file: FileId) -> Option<Arc<File>> {
        self.inner.backing(file)
    }

    fn poisoned(&self) -> u64 {
        self.inner.poisoned()
    }

    fn poison(&self, file: FileId) -> Option<Poison> {
        self.inner.poison(file)
    }
}
