//! The bound on mapped pages that stay resident.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{
        OnceLock,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

use ckfs_host::memory::machine_bytes;

use super::{super::ByteSpan, guard, map::FileMaps};

/// Bounds the mapped pages that stay resident.
///
/// Bytes touched through mappings are added up. When the sum reaches the window's size and the process holds more mapped pages
/// than that, all touched mappings drop their pages. Pages in use come back by a minor fault. So the process holds at
/// most two windows and the pages being read. A small working set that is read again and again stays.
///
/// Transposed tiles visit a few bytes of very many pages, and the next tile visits the same pages. Mapping them again each time
/// costs several times the transposing itself. Hence the window is wider while such tiles are made.
#[derive(Debug)]
pub(super) struct ResidentWindow {
    narrow_bytes: AtomicU64,
    wide_bytes: AtomicU64,
    touched_bytes: AtomicU64,
    drops: AtomicU64,
    /// [`ResidentWindow::revisits`] sets it and [`ResidentWindow::trim`] counts it down: above 0 the window is wide.
    revisits: AtomicU8,
}

impl ResidentWindow {
    /// Default size of the window in bytes.
    const BYTES: u64 = 160 << 20;

    /// Divisor of the machine's memory that gives the size of the window while pages are visited again and again. Its pages belong to
    /// the page cache, so that it costs only page tables, a 512th of it.
    const WIDE_DIVISOR: u64 = 4;

    /// A page fault in a file maps the cached pages around it too, aligned: `fault_around_bytes`, by default this many.
    const FAULT_AROUND_BYTES: u64 = 64 << 10;

    /// The default window on this machine.
    pub(super) fn usual() -> Self {
        let wide_bytes = machine_bytes().unwrap_or(0) / Self::WIDE_DIVISOR;
        Self {
            narrow_bytes: AtomicU64::new(Self::BYTES),
            wide_bytes: AtomicU64::new(wide_bytes.max(Self::BYTES)),
            touched_bytes: AtomicU64::new(0),
            drops: AtomicU64::new(0),
            revisits: AtomicU8::new(0),
        }
    }

    /// Sets both sizes.
    pub(super) fn bound(&self, narrow_bytes: u64, wide_bytes: u64) {
        self.narrow_bytes.store(narrow_bytes, Ordering::Relaxed);
        self.wide_bytes.store(wide_bytes.max(narrow_bytes), Ordering::Relaxed);
    }

    /// How often resident pages were dropped.
    pub(super) fn drops(&self) -> u64 {
        self.drops.load(Ordering::Relaxed)
    }

    fn size_bytes(&self) -> u64 {
        let wide = self.revisits.load(Ordering::Relaxed) > 0;
        if wide { &self.wide_bytes } else { &self.narrow_bytes }.load(Ordering::Relaxed)
    }

    pub(super) fn touch(&self, files: &[FileMaps], file: &FileMaps, span: ByteSpan) {
        let start = span.start() / Self::FAULT_AROUND_BYTES * Self::FAULT_AROUND_BYTES;
        let bytes = (span.end() - start).next_multiple_of(Self::FAULT_AROUND_BYTES);
        file.note_touched();
        let before = self.touched_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before + bytes < self.size_bytes() {
            return;
        }
        // One thread takes the sum; the others find a small one and continue.
        let sum = self.touched_bytes.swap(0, Ordering::Relaxed);
        if sum >= self.size_bytes() {
            self.shrink(files);
        }
    }

    pub(super) fn revisits(&self) {
        // A store by every tile of every thread would move the cache line between processors.
        if self.revisits.load(Ordering::Relaxed) < 2 {
            self.revisits.store(2, Ordering::Relaxed);
        }
    }

    /// Makes the window narrow again once no reader has returned to the pages between two calls.
    pub(super) fn trim(&self, files: &[FileMaps]) {
        let left = self.revisits.load(Ordering::Relaxed);
        if left > 0 {
            self.revisits.store(left - 1, Ordering::Relaxed);
            if left == 1 {
                self.shrink(files);
            }
        }
    }

    /// Drops the pages of all touched mappings, if there are more than a window of them.
    fn shrink(&self, files: &[FileMaps]) {
        if resident_shared_bytes().is_none_or(|resident| resident > self.size_bytes()) {
            self.drops.fetch_add(1, Ordering::Relaxed);
            for file in files.iter().filter(|file| file.take_touched()) {
                file.drop_resident();
            }
        }
    }
}

/// Mapped file pages of this process that are resident, from `/proc/self/statm` (third number, in pages).
fn resident_shared_bytes() -> Option<u64> {
    static STATM: OnceLock<Option<File>> = OnceLock::new();
    let file = STATM.get_or_init(|| File::open("/proc/self/statm").ok()).as_ref()?;
    let mut buffer = [0; 128];
    let len = file.read_at(&mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..len]).ok()?;
    text.split_ascii_whitespace().nth(2)?.parse::<u64>().ok()?.checked_mul(guard::page_bytes() as u64)
}
