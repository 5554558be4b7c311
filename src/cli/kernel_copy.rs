//! Copies of bytes that may lie in a mapped source file.
//!
//! The bytes that a volume's read returns may be for the kernel only. Then the kernel copies them, through a file in
//! memory that is kept from one copy to the next.

use std::{fs::File, io, os::unix::fs::FileExt};

use ckfs_source::Served;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Copies bytes through the kernel.
#[derive(Debug)]
pub(super) struct KernelCopier {
    file: File,
}

impl KernelCopier {
    /// A new copier, for one thread.
    ///
    /// # Errors
    /// The system cannot make a file in memory.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { file: memfd_create(c"ckfs", MFdFlags::MFD_CLOEXEC)?.into() })
    }

    /// A copy of `bytes`.
    ///
    /// # Errors
    /// A page of them is gone.
    pub(super) fn copy(&self, bytes: Served<'_>) -> io::Result<Vec<u8>> {
        if let Served::Memory(bytes) = bytes {
            return Ok(bytes.to_vec());
        }
        bytes.write_all_at(&self.file, 0)?;
        let mut copy = vec![0; bytes.len()];
        self.file.read_exact_at(&mut copy, 0)?;
        Ok(copy)
    }
}
