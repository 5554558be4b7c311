//! Requests to the kernel for pages of files that will be read.
#![allow(unsafe_code)]

use std::{fs::File, io, os::fd::AsRawFd};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::{super::ByteSpan, guard};

/// Bytes of one call of the advice. The kernel accepts no more than its read-ahead at a time, which is seldom less than this.
const ADVISED_BYTES: usize = 128 << 10;
/// Bytes that are requested together: a huge page, where the system has huge pages of this size.
pub(super) const BLOCK_BYTES: usize = 2 << 20;
/// A check of the page cache samples the first 128 KiB of each block. Pages come and go in runs, and a check of each page takes
/// longer than some reads.
const SAMPLE_BYTES: u64 = 128 << 10;

/// Number of the system call `cachestat`, the same on all architectures.
const CACHESTAT: libc::c_long = 451;

/// Whether the page cache has all of `start..end`. `None` where the kernel (before 6.5) or the file system cannot tell; false where
/// it does not tell, since the file is another user's. A read that does not wait would tell too, but starts its own read-ahead.
fn tell_cached(file: &File, start: u64, end: u64) -> Option<bool> {
    let range = [start, end - start];
    // Pages that are cached, then four other numbers of pages.
    let mut found = [0u64; 5];
    // SAFETY: the kernel reads two numbers and writes five.
    let told = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0) };
    if told != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) {
        return Some(false);
    }
    let page_bytes = guard::page_bytes() as u64;
    (told == 0).then(|| found[0] >= end.div_ceil(page_bytes) - start / page_bytes)
}

/// Whether the page cache has the sample of part of a span.
fn is_sample_cached(file: &File, part: ByteSpan) -> Option<bool> {
    tell_cached(file, part.start(), part.end().min(part.start() + SAMPLE_BYTES))
}

/// Whether the page cache has a span, according to samples.
pub(super) fn is_cached(file: &File, span: ByteSpan) -> bool {
    span.split_at_multiples(BLOCK_BYTES as u64).all(|part| is_sample_cached(file, part) == Some(true))
}

/// Reads a span into the page cache, unless all of it is cached. Returns whether storage was asked.
///
/// `read_block` reads the [`BLOCK_BYTES`] from a multiple of that on, and waits for them; it returns false if it cannot. The kernel
/// then makes one huge page of them. To allocate, map, copy and free the same bytes as small pages costs the processor ten times
/// as much, and the kernel makes small pages of everything that it reads on advice. So the advice is for the ends of the span.
///
/// Where huge pages have another size there are no such blocks: a system with pages of 16 KiB would read 32 MiB for each.
///
/// A kernel that cannot tell what is cached is too old for `read_block`: before 5.18 it would read one page after the other.
pub(super) fn will_need(file: &File, span: ByteSpan, read_block: &mut dyn FnMut(u64) -> bool) -> bool {
    let mut asked = false;
    for part in span.split_at_multiples(BLOCK_BYTES as u64) {
        let cached = is_sample_cached(file, part);
        if cached == Some(true) {
            continue;
        }
        asked = true;
        if cached.is_none() || part.len() < BLOCK_BYTES as u64 || !read_block(part.start()) {
            need(file, part.start(), part.end());
        }
    }
    asked
}

/// Starts reading `start..end` into the page cache. The kernel may refuse the advice; nothing depends on it.
pub(super) fn need(file: &File, start: u64, end: u64) {
    for start in (start..end).step_by(ADVISED_BYTES) {
        let len = (ADVISED_BYTES as u64).min(end - start);
        let (Ok(start), Ok(len)) = (i64::try_from(start), i64::try_from(len)) else { return };
        let _ = posix_fadvise(file, start, len, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
    }
}
