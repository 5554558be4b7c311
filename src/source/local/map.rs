//! The maps of a local file: one for the kernel, and guarded ones to read from; see [`super::guard`] for why they differ.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use memmap2::{Advice, MmapRaw};
use smallvec::SmallVec;

use super::{
    super::{ByteSpan, kernel_bytes::KernelBytes, page_size::allocation_page_bytes, span::memory_len},
    advice::{self, BLOCK_BYTES},
    guard::{self, Faulted, GuardedMap},
};

/// The maps of one file, made when first needed.
pub(super) struct FileMaps {
    file: Arc<File>,
    path: Arc<Path>,
    /// Length to map in bytes; 0 where the file is read instead.
    len: usize,
    /// `None` inside where mapping failed; the file is read with `pread` then.
    kernel_map: OnceLock<Option<MmapRaw>>,
    guarded_map: OnceLock<Option<GuardedMap>>,
    /// A guarded map through which the kernel reads blocks as huge pages, and nothing ahead of a page. So it serves only bytes that
    /// are cached. `None` inside where the kernel would not.
    block_map: OnceLock<Option<GuardedMap>>,
    /// Whether pages were touched since they were last dropped.
    touched: AtomicBool,
    /// Whether the kernel tells which mapped pages are in memory. It does not for files of other users.
    tells_resident: bool,
}

impl FileMaps {
    /// The maps of a file of `len` bytes; 0 if it must not be mapped.
    pub(super) fn new(file: Arc<File>, path: Arc<Path>, len: usize, tells_resident: bool) -> Self {
        let (kernel_map, guarded_map, block_map) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Self { file, path, len, kernel_map, guarded_map, block_map, touched: AtomicBool::new(false), tells_resident }
    }

    fn block_map(&self) -> Option<&MmapRaw> {
        let make = || {
            let map = GuardedMap::new(&self.file, self.len).ok()?;
            // With the second advice alone the kernel reads one small page at a time.
            let is_advised = |advice| map.map.advise(advice).is_ok();
            (is_advised(Advice::HugePage) && is_advised(Advice::Random)).then_some(map)
        };
        let blocks = allocation_page_bytes() == BLOCK_BYTES;
        self.block_map
            .get_or_init(|| (blocks && self.len > 0 && self.tells_resident).then(make)?)
            .as_ref()
            .map(|map| &map.map)
    }

    fn kernel_map(&self) -> Option<&MmapRaw> {
        let make = || {
            let map = memmap2::MmapOptions::new().len(self.len).map_raw_read_only(&*self.file)?;
            if self.tells_resident {
                // Pages that are not in memory are requested before they are mapped, and no others: the kernel's read-ahead would
                // continue behind each block, beyond what is needed.
                let _ = map.advise(Advice::Random);
            }
            Ok(map)
        };
        self.made(&self.kernel_map, make)
    }

    fn guarded_map(&self) -> Option<&GuardedMap> {
        self.made(&self.guarded_map, || GuardedMap::new(&self.file, self.len))
    }

    /// A map, made when it is first needed. That it cannot be made is told then.
    fn made<'m, M>(&self, map: &'m OnceLock<Option<M>>, make: impl FnOnce() -> io::Result<M>) -> Option<&'m M> {
        let made = || {
            let made = (self.len > 0).then(make)?.inspect_err(|error| {
                tracing::warn!("{}: cannot be mapped, will be read instead: {error}", self.path.display());
            });
            made.ok()
        };
        map.get_or_init(made).as_ref()
    }

    /// Whether the file can be mapped to read from it.
    pub(super) fn can(&self) -> bool {
        self.guarded_map().is_some()
    }

    pub(super) fn note_touched(&self) {
        // A store by every reader would move the cache line between processors.
        if !self.touched.load(Ordering::Relaxed) {
            self.touched.store(true, Ordering::Relaxed);
        }
    }

    /// Whether pages were touched since this was last called.
    pub(super) fn take_touched(&self) -> bool {
        self.touched.swap(false, Ordering::Relaxed)
    }

    pub(super) fn drop_resident(&self) {
        let guarded = [&self.guarded_map, &self.block_map].map(|map| Some(&map.get()?.as_ref()?.map));
        let kernel = self.kernel_map.get().and_then(Option::as_ref);
        for map in guarded.into_iter().chain([kernel]).flatten() {
            guard::drop_resident(map.as_ptr(), map.len());
        }
    }

    /// Reads the block at `start`, a multiple of its size, into the page cache as a huge page, or as small pages where the file
    /// system has no huge ones. The block lies in the file. Waits for storage. False if that is not possible here, or failed.
    pub(super) fn read_block(&self, start: u64) -> bool {
        let (Some(map), Ok(start)) = (self.block_map(), usize::try_from(start)) else { return false };
        let end = start + BLOCK_BYTES;
        assert!(end <= map.len(), "block {start}..{end} of a mapping of {} bytes", map.len());
        let read = fill(map.as_ptr(), start, end).is_ok();
        // A reader may need these bytes through another map, or not yet.
        guard::drop_resident(map.as_ptr().wrapping_add(start), end - start);
        read
    }

    /// Mapped bytes of a span inside the file, which are in memory. A system call with them does not wait for storage, except in
    /// the rare case that they leave memory at once.
    pub(super) fn kernel_bytes(&self, span: ByteSpan) -> Option<KernelBytes<'_>> {
        let map = self.kernel_map()?;
        let (start, len) = (usize::try_from(span.start()).ok()?, memory_len(span));
        assert!(start + len <= map.len(), "span {span} of a mapping of {} bytes", map.len());
        if !(self.tells_resident && is_resident(map, start, start + len)) {
            if self.tells_resident {
                advice::need(&self.file, span.start(), span.end());
            }
            fill(map.as_ptr(), start, start + len).ok()?;
        }
        // SAFETY: the span lies in the mapping (asserted above), which lives as long as `self`.
        Some(unsafe { KernelBytes::new(map.as_ptr().add(start), len) })
    }

    /// Runs `work` on the mapped bytes of a span inside the file; `None` if it cannot be mapped.
    pub(super) fn with(&self, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), Faulted>> {
        // The kernel continues to read where it meets the first page that it read together with others, up to 8 MiB. That is welcome
        // to a reader that has to wait, and wasted on one whose bytes were requested.
        let block_map = self.block_map.get().and_then(Option::as_ref).filter(|_| advice::is_cached(&self.file, span));
        let map = match block_map {
            Some(map) => map,
            None => self.guarded_map()?,
        };
        let start = usize::try_from(span.start()).ok()?;
        Some(map.with(start, start + memory_len(span), work))
    }
}

/// Whether all mapped pages of `start..end` are in memory and filled, according to the kernel.
fn is_resident(map: &MmapRaw, start: usize, end: usize) -> bool {
    let page_bytes = guard::page_bytes();
    let first = start / page_bytes * page_bytes;
    let mut pages: SmallVec<[u8; 260]> = SmallVec::from_elem(0, (end - first).div_ceil(page_bytes));
    // SAFETY: the pages lie in the mapping, which begins at a page, and the kernel writes one byte for each of them.
    let told = unsafe { libc::mincore(map.as_ptr().add(first).cast_mut().cast(), end - first, pages.as_mut_ptr()) };
    told == 0 && pages.iter().all(|page| page & 1 == 1)
}

/// Reads mapped pages into memory that are not there yet. Where the kernel cannot (before Linux 5.14), the first access does.
///
/// # Errors
/// A page is gone, or storage failed.
fn fill(map: *const u8, start: usize, end: usize) -> io::Result<()> {
    let first = start / guard::page_bytes() * guard::page_bytes();
    // SAFETY: the pages lie in the mapping, which begins at a page. The kernel reads them as a load would, but returns an error
    // where a load would raise a signal.
    let done = unsafe { libc::madvise(map.add(first).cast_mut().cast(), end - first, libc::MADV_POPULATE_READ) };
    let error = io::Error::last_os_error();
    if done == 0 || error.raw_os_error() == Some(libc::EINVAL) { Ok(()) } else { Err(error) }
}
