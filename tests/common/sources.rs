//! Sources for tests: files in memory, and a wrapper that counts fetches and misbehaves on request.

use std::{
    fs::File,
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::UNIX_EPOCH,
};

use ckfs::source::{
    ByteSpan, ContentName, FetchPart, FileId, Health, KernelBytes, Maps, Pin, ReadFailure, Replied, Source,
    SourceError, permission::AccessRules,
};

/// Files in memory, without maps.
pub struct MemoryFiles {
    files: Vec<(Pin, Vec<u8>, AtomicU64)>,
    health: Health,
}

impl MemoryFiles {
    /// A source of named files; a file's id is its index in the list.
    pub fn new<N: AsRef<Path>>(files: impl IntoIterator<Item = (N, Vec<u8>)>) -> Self {
        let pin = |name: &Path, len_bytes| Pin {
            path: Arc::from(name),
            len_bytes,
            modified: UNIX_EPOCH,
            content: ContentName::Anywhere(name.display().to_string()),
            gates: AccessRules::open(0, 0),
        };
        let file = |(name, bytes): (N, Vec<u8>)| (pin(name.as_ref(), bytes.len() as u64), bytes, AtomicU64::new(0));
        let files: Vec<_> = files.into_iter().map(file).collect();
        let health = Health::new(files.iter().map(|(pin, ..)| pin.path.clone()), Arc::default());
        Self { files, health }
    }

    /// The files of another source in their present state.
    pub fn copy_of(source: &dyn Source) -> Self {
        Self::new((0..source.file_count() as u32).map(FileId).map(|file| {
            let mut bytes = vec![0; source.len_bytes(file) as usize];
            source.read_into(file, 0, &mut bytes).unwrap();
            (source.path(file).to_owned(), bytes)
        }))
    }

    /// Makes a file look changed by another process; the next check notices it.
    pub fn touch(&self, file: FileId) {
        self.files[file.index()].2.fetch_add(1, Ordering::Relaxed);
    }
}

impl Source for MemoryFiles {
    fn file_count(&self) -> usize {
        self.files.len()
    }

    fn pin(&self, file: FileId) -> &Pin {
        &self.files[file.index()].0
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        self.health.usable(file)?;
        let (pin, _, version) = &self.files[file.index()];
        match version.load(Ordering::Relaxed) {
            0 => Ok(()),
            found => {
                let flaw = format!("changed since it was opened: version: expected 0, found {found}");
                Err(self.health.condemn(file, SourceError::Lost { file: pin.path.clone(), flaw }))
            }
        }
    }

    fn fetch(&self, file: FileId, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError> {
        self.health.usable(file)?;
        let (pin, bytes, _) = &self.files[file.index()];
        parts.iter_mut().try_for_each(|part| {
            let start = usize::try_from(part.start).unwrap_or(usize::MAX);
            let Some(found) = bytes.get(start..start.saturating_add(part.target.len())) else {
                let span = part.span().or(ByteSpan::new(part.start, u64::MAX)).unwrap();
                return Err(SourceError::out_of_bounds(&pin.path, span, pin.len_bytes));
            };
            part.target.copy_from_slice(found);
            Ok(())
        })
    }

    fn health(&self) -> &Health {
        &self.health
    }
}

/// Behaviour of a [`Watched`] source once its calls are used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Fetches and maps fail as if the device were broken.
    Io,
    /// Bytes are returned, but every check reports that the file has changed.
    Changed,
}

/// Counts of the fetches through a [`Watched`] source, without its maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Calls of [`Source::fetch`].
    pub calls: u64,
    /// Spans in all of them.
    pub spans: u64,
    /// Bytes of those spans.
    pub bytes: u64,
}

/// A wrapper that counts fetches; it lets a number of calls pass and then misbehaves permanently.
pub struct Watched {
    inner: Arc<dyn Source>,
    fault: Fault,
    calls_left: AtomicU64,
    calls: AtomicU64,
    spans: AtomicU64,
    bytes: AtomicU64,
}

impl Watched {
    /// Lets `calls` of [`Source::fetch`], [`Maps::with`] and [`Maps::with_kernel_bytes`] pass.
    pub fn failing(inner: impl Source + 'static, fault: Fault, calls: u64) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            inner: Arc::new(inner),
            fault,
            calls_left: AtomicU64::new(calls),
            calls: zero(),
            spans: zero(),
            bytes: zero(),
        }
    }

    /// Counts only.
    pub fn new(inner: impl Source + 'static) -> Self {
        Self::failing(inner, Fault::Io, u64::MAX)
    }

    /// The counts so far.
    pub fn fetched(&self) -> Fetched {
        let reported = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Fetched { calls: reported(&self.calls), spans: reported(&self.spans), bytes: reported(&self.bytes) }
    }

    /// Uses up one call; returns whether it fails.
    fn fails(&self) -> bool {
        let left = self.calls_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        left.is_err() && self.fault == Fault::Io
    }

    fn error(&self, file: FileId) -> SourceError {
        let error = Arc::new(io::Error::from_raw_os_error(libc::EIO));
        SourceError::Io { file: self.inner.pin(file).path.clone(), action: "read".into(), error }
    }

    fn inner_maps(&self) -> &dyn Maps {
        self.inner.maps().expect("asked for only if there are some")
    }
}

impl Source for Watched {
    fn file_count(&self) -> usize {
        self.inner.file_count()
    }

    fn pin(&self, file: FileId) -> &Pin {
        self.inner.pin(file)
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        if self.fault == Fault::Changed && self.calls_left.load(Ordering::Relaxed) == 0 {
            let flaw = "changed since it was opened: version: expected 0, found 1".to_owned();
            return Err(SourceError::Lost { file: self.inner.pin(file).path.clone(), flaw });
        }
        self.inner.check(file)
    }

    fn fetch(&self, file: FileId, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError> {
        if self.fails() {
            return Err(self.error(file));
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.spans.fetch_add(parts.len() as u64, Ordering::Relaxed);
        self.bytes.fetch_add(parts.iter().map(|part| part.target.len() as u64).sum(), Ordering::Relaxed);
        self.inner.fetch(file, parts)
    }

    fn gap_bytes(&self) -> u64 {
        self.inner.gap_bytes()
    }

    fn health(&self) -> &Health {
        self.inner.health()
    }

    fn maps(&self) -> Option<&dyn Maps> {
        self.inner.maps().map(|_| self as &dyn Maps)
    }

    fn backing(&self, file: FileId) -> Option<Arc<File>> {
        self.inner.backing(file)
    }
}

impl Maps for Watched {
    fn is_mapped(&self, file: FileId) -> bool {
        self.inner_maps().is_mapped(file)
    }

    fn with(&self, file: FileId, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>> {
        if self.fails() { Some(Err(self.error(file))) } else { self.inner_maps().with(file, span, work) }
    }

    fn with_kernel_bytes(
        &self,
        file: FileId,
        span: ByteSpan,
        reply: &mut dyn FnMut(KernelBytes<'_>) -> Replied,
    ) -> Option<Result<Replied, ReadFailure<SourceError>>> {
        if self.fails() {
            Some(Err(self.error(file).into()))
        } else {
            self.inner_maps().with_kernel_bytes(file, span, reply)
        }
    }

    fn will_need(&self, file: FileId, span: ByteSpan) -> bool {
        self.inner_maps().will_need(file, span)
    }

    fn will_revisit(&self) {
        self.inner_maps().will_revisit();
    }

    fn trim(&self) {
        self.inner_maps().trim();
    }

    fn bound(&self, usual_bytes: u64, again_bytes: u64) {
        self.inner_maps().bound(usual_bytes, again_bytes);
    }
}
