//! Local files: opened once, pinned, mapped where that is safe.
//!
//! A file is identified by device, inode, size, modification and status change time, all read from the open file. So `fstat`
//! tells in 0.2 us whether the file is still the same. The status change time makes this strict: a new hard link or changed
//! permissions also poison the file. The kernel keeps no other trace of an edit whose author set the modification time back.
//!
//! Two kinds of edits are not detected. One is an edit within the same clock tick as the pinning of the file (some milliseconds, on
//! kernels before 6.13). The other is an edit through a writable mapping of a page that was already dirty.
//!
//! Each file has up to three mappings, made when first needed: one for the kernel, and two guarded ones to read from
//! (see [`guard`] for why they must differ from the first). Through the second guarded one the kernel reads blocks of 2 MiB as huge
//! pages, and nothing ahead of a page. Mapped pages count as resident memory of this process although they
//! belong to the page cache; `ResidentWindow` keeps that count small. Network file systems are read with `pread`, since their
//! mapped pages fail too easily.

mod advice;
mod compare;
pub mod guard;
mod identity;
mod map;
mod pinned;
mod watch;
mod window;

use std::{fs::File, io, os::unix::fs::FileExt, path::PathBuf, sync::Arc};

use nix::sys::stat::{FileStat, fstat, stat};

pub use pinned::SourceIo;
pub use watch::{DirectoryWatch, Woken, is_on_network};

use super::{
    ByteSpan, ComparedFiles, FetchPart, FileId, FoundFile, Health, KernelBytes, Maps, Opened, Pin, ReadFailure,
    Replied, Source, SourceError,
    digest::Compared,
    root_dir::{Revalidate, check_open_file_limit},
    stall::{WaitRegistry, WaitTarget},
};
use compare::Comparisons;
use map::FileMaps;
use pinned::Pinned;
use window::ResidentWindow;

/// Parts of at least this many bytes are requested before the first of them is read, so that storage works on all of them.
const ADVISED_BYTES_MIN: u64 = 2 << 20;

/// Local files as a source.
pub struct LocalFiles {
    files: Vec<Arc<Pinned>>,
    comparisons: Comparisons,
    maps: Vec<FileMaps>,
    window: ResidentWindow,
    pub(super) health: Arc<Health>,
}

impl LocalFiles {
    /// Opens and pins files, wherever their paths lead; a file's id is its position in `paths`.
    ///
    /// # Errors
    /// The first file that cannot be opened or is not a regular file.
    ///
    /// # Panics
    /// If there are more than `u32::MAX` paths.
    pub fn open(paths: &[PathBuf], io: SourceIo) -> Result<Self, SourceError> {
        check_open_file_limit(paths.len())?;
        let open = |path: &PathBuf| {
            FoundFile::named(path).map_err(|error| SourceError::io(path.as_path(), "open", error))?.open(None)
        };
        let files = paths.iter().map(open).collect::<Result<_, _>>()?;
        Self::pin(files, io, Arc::default(), None)
    }

    /// Pins files that are open; a file's id is its position in `files`. `fetches` notes the waits for storage from now on.
    /// Blobs that `compared` knows are not compared with their digest again.
    ///
    /// # Errors
    /// The first file whose attributes cannot be read.
    ///
    /// # Panics
    /// If there are more than `u32::MAX` files.
    #[allow(clippy::needless_pass_by_value, reason = "the files share it from now on")]
    pub fn pin(
        files: Vec<Opened>,
        io: SourceIo,
        fetches: Arc<WaitRegistry>,
        compared: Option<&Arc<ComparedFiles>>,
    ) -> Result<Self, SourceError> {
        assert!(u32::try_from(files.len()).is_ok(), "{} files", files.len());
        let pin = |file: Opened| {
            let _pinning = fetches.begin_path(&file.path, "stat");
            Pinned::new(file, io).map(Arc::new)
        };
        let files: Vec<Arc<Pinned>> = files.into_iter().map(pin).collect::<Result<_, _>>()?;
        let health = Arc::new(Health::new(files.iter().map(|file| file.pin.path.clone()), Arc::clone(&fetches)));
        let maps = files.iter().map(|file| file.maps()).collect();
        let comparisons = Comparisons::new(&files, &health, compared);
        comparisons.compare_small(&fetches)?;
        Ok(Self { files, comparisons, maps, window: ResidentWindow::usual(), health })
    }

    /// How often resident mapped pages were dropped.
    pub fn window_drops(&self) -> u64 {
        self.window.drops()
    }

    fn pinned(&self, file: FileId) -> &Pinned {
        &self.files[file.index()]
    }

    /// The file, unless it is poisoned or stalls.
    fn usable(&self, file: FileId) -> Result<&Pinned, SourceError> {
        self.health.usable(file).map(|()| self.pinned(file))
    }

    /// Poisons a file after a failed access, with the difference that `fstat` finds, or else with this flaw.
    fn poison_after(&self, file: FileId, flaw: String) -> SourceError {
        let pinned = self.pinned(file);
        match pinned.difference(fstat(&pinned.file)) {
            Ok(Some(changed)) => self.health.condemn(file, changed),
            Ok(None) | Err(_) => self.health.condemn(file, SourceError::Lost { file: pinned.pin.path.clone(), flaw }),
        }
    }

    /// Checks that the file is still identical to the pinned one.
    fn compare(&self, file: FileId, pinned: &Pinned, found: nix::Result<FileStat>) -> Result<(), SourceError> {
        match pinned.difference(found)? {
            None => Ok(()),
            Some(changed) => Err(self.health.condemn(file, changed)),
        }
    }

    /// Reads one part.
    fn read(&self, file: FileId, pinned: &Pinned, span: ByteSpan, target: &mut [u8]) -> Result<(), SourceError> {
        let fetching = self.health.fetches.begin(WaitTarget::Bytes(file, span));
        let (mut rest, mut at, piece_bytes) = (target, span.start(), self.health.fetches.piece_bytes());
        while !rest.is_empty() {
            // Each call that returns shows that storage answers, even if slowly.
            let len = rest.len().min(piece_bytes);
            match pinned.file.read_at(&mut rest[..len], at) {
                Ok(0) => {
                    let (expected, found) = (span.len(), at - span.start());
                    let flaw = format!("bytes {span}: expected {expected} bytes, found {found}");
                    return Err(self.poison_after(file, flaw));
                }
                Ok(got) => {
                    rest = &mut rest[got..];
                    at += got as u64;
                    if !rest.is_empty() {
                        fetching.advance();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(pinned.io(format!("read bytes {span}"), error)),
            }
        }
        Ok(())
    }
}

impl Source for LocalFiles {
    fn file_count(&self) -> usize {
        self.files.len()
    }

    fn pin(&self, file: FileId) -> &Pin {
        &self.pinned(file).pin
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        let pinned = self.usable(file)?;
        let _checking = self.health.fetches.begin(WaitTarget::Check(file));
        self.compare(file, pinned, fstat(&pinned.file))
    }

    fn check_path(&self, file: FileId) -> Result<(), SourceError> {
        self.check(file)?;
        let pinned = self.pinned(file);
        let _checking = self.health.fetches.begin(WaitTarget::Check(file));
        let found = match &pinned.revalidate {
            Revalidate::Named => stat(&*pinned.pin.path),
            Revalidate::Cached => return Ok(()),
            // Not by the path as a whole: a new link there may lead anywhere, also into our own mount.
            Revalidate::Beneath(root, below) => root.find_again(below),
        };
        self.compare(file, pinned, found)
    }

    fn fetch(&self, file: FileId, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError> {
        let pinned = self.usable(file)?;
        self.comparisons.note_used(file.index());
        let beyond = |start| ByteSpan::new(start, u64::MAX).expect("no start is above u64::MAX");
        for part in &*parts {
            let span = pinned.bounded(part.span().unwrap_or(beyond(part.start)))?;
            if span.len() >= ADVISED_BYTES_MIN {
                let _fetching = self.health.fetches.begin(WaitTarget::Mapped(file, span));
                advice::will_need(&pinned.file, span, &mut |_| false);
            }
        }
        parts.iter_mut().try_for_each(|part| {
            let span = part.span().unwrap_or(beyond(part.start));
            self.read(file, pinned, span, part.target)
        })
    }

    fn note_right(&self, file: FileId) {
        self.comparisons.note_right(file.index());
    }

    fn is_used(&self, file: FileId) -> bool {
        self.comparisons.is_used(file.index())
    }

    fn compare(&self, file: FileId) -> Result<Compared, SourceError> {
        let pinned = self.usable(file)?;
        if pinned.digest.is_none() {
            return Ok(Compared::Unknown);
        }
        let reading = self.health.fetches.begin(WaitTarget::Check(file));
        self.comparisons.compare(file.index(), &|| reading.advance())
    }

    fn health(&self) -> &Health {
        &self.health
    }

    fn maps(&self) -> Option<&dyn Maps> {
        Some(self)
    }

    fn backing(&self, file: FileId) -> Option<Arc<File>> {
        self.comparisons.note_used(file.index());
        self.usable(file).ok().map(|pinned| pinned.file.clone())
    }
}

impl Maps for LocalFiles {
    fn is_mapped(&self, file: FileId) -> bool {
        let pinned = self.pinned(file);
        pinned.mapped && (pinned.identity.size_bytes == 0 || self.maps[file.index()].can())
    }

    fn with(&self, file: FileId, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>> {
        let (pinned, maps) = (self.pinned(file), &self.maps[file.index()]);
        if !pinned.mapped {
            return None;
        }
        if let Err(error) = self.usable(file).and_then(|pinned| pinned.bounded(span)) {
            return Some(Err(error));
        }
        if span.is_empty() {
            work(&[]);
            return Some(Ok(()));
        }
        self.comparisons.note_used(file.index());
        let _fetching = self.health.fetches.begin(WaitTarget::Mapped(file, span));
        self.window.touch(&self.maps, maps, span);
        let done = maps.with(span, work)?;
        let flaw = || format!("bytes {span} could not be mapped: the file was truncated or its device failed");
        let fault = |_| self.poison_after(file, flaw());
        Some(done.map_err(fault))
    }

    fn with_kernel_bytes(
        &self,
        file: FileId,
        span: ByteSpan,
        reply: &mut dyn FnMut(KernelBytes<'_>) -> Replied,
    ) -> Option<Result<Replied, ReadFailure<SourceError>>> {
        let pinned = match self.usable(file) {
            Ok(pinned) => pinned,
            Err(error) => return Some(Err(error.into())),
        };
        if !pinned.mapped {
            return None;
        }
        self.comparisons.note_used(file.index());
        let checking = self.health.fetches.begin(WaitTarget::Check(file));
        if let Err(error) = self.compare(file, pinned, fstat(&pinned.file)) {
            return Some(Err(error.into()));
        }
        drop(checking);
        let fetching = self.health.fetches.begin(WaitTarget::Mapped(file, span));
        pinned.bounded(span).ok()?;
        let bytes = if span.is_empty() {
            KernelBytes::EMPTY
        } else {
            let maps = &self.maps[file.index()];
            self.window.touch(&self.maps, maps, span);
            maps.kernel_bytes(span)?
        };
        // The time that others take for the bytes says nothing about this file.
        drop(fetching);
        let replied = reply(bytes);
        let _checking = self.health.fetches.begin(WaitTarget::Check(file));
        Some(match self.compare(file, pinned, fstat(&pinned.file)) {
            Ok(()) => Ok(replied),
            Err(error) => Err(ReadFailure { error, replied: Some(replied) }),
        })
    }

    fn will_need(&self, file: FileId, span: ByteSpan) -> bool {
        let Ok(pinned) = self.usable(file) else { return false };
        let Ok(span) = pinned.bounded(span) else { return false };
        let _fetching = self.health.fetches.begin(WaitTarget::Mapped(file, span));
        let mut read_block = |block| self.maps[file.index()].read_block(block);
        advice::will_need(&pinned.file, span, &mut read_block)
    }

    fn will_revisit(&self) {
        self.window.revisits();
    }

    fn trim(&self) {
        self.window.trim(&self.maps);
        self.comparisons.step();
    }

    fn bound(&self, usual_bytes: u64, again_bytes: u64) {
        self.window.bound(usual_bytes, again_bytes);
    }
}
