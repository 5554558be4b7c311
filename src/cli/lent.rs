//! Copies of bytes that may lie in a mapped source file.
//!
//! What a volume's reads hand out may be lent memory, which must not be loaded from: a page that is gone would end the
//! process. The kernel copies it instead, through a file in memory, and reports such a page as an error.

use std::{fs::File, io, os::unix::fs::FileExt};

use nix::sys::memfd::{MFdFlags, memfd_create};

/// Copies by way of the kernel.
#[derive(Debug)]
pub(super) struct Copier {
    file: File,
}

impl Copier {
    /// A copier, for one thread.
    ///
    /// # Errors
    /// The system has no such file to give.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { file: memfd_create(c"ckfs", MFdFlags::MFD_CLOEXEC)?.into() })
    }

    /// A copy of `bytes`.
    ///
    /// # Errors
    /// A page of them is gone.
    pub(super) fn copy(&self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        self.file.write_all_at(bytes, 0)?;
        let mut copy = vec![0; bytes.len()];
        self.file.read_exact_at(&mut copy, 0)?;
        Ok(copy)
    }
}
