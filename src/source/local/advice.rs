//! Advice to the kernel about pages of files that will be read.
#![allow(unsafe_code)]

use std::{fs::File, os::fd::AsRawFd};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::{super::ByteSpan, guard};

/// Bytes of one call of the advice. The kernel accepts no more than its read-ahead at a time, which is seldom less than this.
const ADVISED_BYTES: usize = 128 << 10;
/// A check of the page cache samples the first 128 KiB of each 2 MiB. Pages come and go in runs, and a check of each page takes
/// longer than some reads.
pub(super) const SAMPLED_BYTES: usize = 2 << 20;
const SAMPLE_BYTES: u64 = 128 << 10;

/// Number of the system call `cachestat`, the same on all architectures.
const CACHESTAT: libc::c_long = 451;

/// Whether the page cache has all of `start..end`. False where the kernel (before 6.5) or the file system cannot tell. A read that
/// does not wait would tell too, but starts its own read-ahead.
pub(super) fn is_cached(file: &File, start: u64, end: u64) -> bool {
    let range = [start, end - start];
    // Pages that are cached, then four other numbers of pages.
    let mut found = [0u64; 5];
    // SAFETY: the kernel reads two numbers and writes five.
    let told = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0) };
    let page_bytes = guard::page_bytes() as u64;
    told == 0 && found[0] >= end.div_ceil(page_bytes) - start / page_bytes
}

/// Starts reading a span into the page cache, unless all of it is cached.
pub(super) fn will_need(file: &File, span: ByteSpan) {
    for start in (span.start()..span.end()).step_by(SAMPLED_BYTES) {
        let end = span.end().min(start + SAMPLED_BYTES as u64);
        if !is_cached(file, start, end.min(start + SAMPLE_BYTES)) {
            need(file, start, end);
        }
    }
}

/// Starts reading `start..end` into the page cache. The kernel may refuse the advice; nothing depends on it.
fn need(file: &File, start: u64, end: u64) {
    for start in (start..end).step_by(ADVISED_BYTES) {
        let len = (ADVISED_BYTES as u64).min(end - start);
        let (Ok(start), Ok(len)) = (i64::try_from(start), i64::try_from(len)) else { return };
        let _ = posix_fadvise(file, start, len, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
    }
}
