//! Kernel-only buffers: bytes that only the kernel may read.
//!
//! The mapped pages of a truncated file are gone. A load from one would end this process with SIGBUS, while a system call
//! returns EFAULT. So bytes of such a map have a type of their own. Its only way to a `&[u8]` is `unsafe`; everything else
//! passes the address to a system call.
//!
//! [`Served`] is the result of a read: a kernel-only buffer, or bytes in memory of this process.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    marker::PhantomData,
    os::{fd::AsFd, unix::fs::FileExt},
    ptr,
};

use rustix::io::{retry_on_intr, write};

/// Mapped bytes of a file, for system calls only.
#[derive(Clone, Copy)]
pub struct KernelBytes<'a> {
    start: *const u8,
    len: usize,
    map: PhantomData<&'a [u8]>,
}

// SAFETY: the pointer is to a shared read-only mapping that lives for `'a`; nothing of this type is written or depends on a thread.
unsafe impl Send for KernelBytes<'_> {}
// SAFETY: as above.
unsafe impl Sync for KernelBytes<'_> {}

impl<'a> KernelBytes<'a> {
    /// No bytes.
    pub const EMPTY: Self = Self { start: ptr::null(), len: 0, map: PhantomData };

    /// The bytes `start..start + len` of this process.
    ///
    /// # Safety
    /// They are mapped readable for `'a`. Whether the file still has their pages does not matter.
    pub(super) const unsafe fn new(start: *const u8, len: usize) -> Self {
        Self { start, len, map: PhantomData }
    }

    /// Number of bytes.
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The bytes as a slice, for an interface that takes nothing else and passes it on to a system call.
    ///
    /// # Safety
    /// The caller passes the slice to a system call and does not read it in this process: a lost page would end the process.
    pub unsafe fn for_system_call(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: mapped and readable for `'a`, by the constructor's contract. The caller loads nothing from it, so that no load ever
        // meets a missing page or a change by another process.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Writes them to a descriptor, all of them.
    ///
    /// # Errors
    /// The error of the system call; EFAULT if a page is gone. Some of the bytes may have been written.
    pub fn write_to(self, target: &impl AsFd) -> io::Result<()> {
        // SAFETY: the slice is only passed to `write`, which returns an error where a page is gone.
        let mut rest = unsafe { self.for_system_call() };
        while !rest.is_empty() {
            match retry_on_intr(|| write(target, rest))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                got => rest = &rest[got..],
            }
        }
        Ok(())
    }

    /// Writes them to their place in a file, all of them.
    ///
    /// # Errors
    /// As [`Self::write_to`].
    pub fn write_all_at(self, target: &File, offset: u64) -> io::Result<()> {
        // SAFETY: the slice is only passed to `pwrite`.
        target.write_all_at(unsafe { self.for_system_call() }, offset)
    }
}

/// The result of a read.
#[derive(Clone, Copy)]
pub enum Served<'a> {
    /// Bytes in memory of this process.
    Memory(&'a [u8]),
    /// A kernel-only buffer: bytes of a mapped file.
    Kernel(KernelBytes<'a>),
}

impl Served<'_> {
    /// Number of bytes.
    pub const fn len(self) -> usize {
        match self {
            Self::Memory(bytes) => bytes.len(),
            Self::Kernel(bytes) => bytes.len(),
        }
    }

    /// Whether there is no byte.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The bytes for system calls. Both kinds use the same ones, so that both return the same errors.
    fn for_kernel(&self) -> KernelBytes<'_> {
        match self {
            // SAFETY: a live slice is readable for as long as it lives.
            Self::Memory(bytes) => unsafe { KernelBytes::new(bytes.as_ptr(), bytes.len()) },
            Self::Kernel(bytes) => *bytes,
        }
    }

    /// Writes them to a descriptor, all of them.
    ///
    /// # Errors
    /// As [`KernelBytes::write_to`].
    pub fn write_to(self, target: &impl AsFd) -> io::Result<()> {
        self.for_kernel().write_to(target)
    }

    /// Writes them to their place in a file, all of them.
    ///
    /// # Errors
    /// As [`KernelBytes::write_to`].
    pub fn write_all_at(self, target: &File, offset: u64) -> io::Result<()> {
        self.for_kernel().write_all_at(target, offset)
    }

    /// A copy in memory of this process. The kernel copies the bytes that it alone may read: slow, for tests and commands.
    ///
    /// # Errors
    /// A page is gone, or the system cannot create a file in memory.
    pub fn to_vec(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Memory(bytes) => Ok(bytes.to_vec()),
            Self::Kernel(bytes) => {
                let file = nix::sys::memfd::memfd_create(c"ckfs", nix::sys::memfd::MFdFlags::MFD_CLOEXEC)?;
                let file = File::from(file);
                bytes.write_all_at(&file, 0)?;
                let mut copy = vec![0; bytes.len()];
                file.read_exact_at(&mut copy, 0)?;
                Ok(copy)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn both_kinds_write_the_same_and_a_lost_page_is_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 10_000]).unwrap();
        let map = memmap2::MmapOptions::new().len(10_000).map_raw_read_only(&file).unwrap();
        // SAFETY: the map outlives the bytes.
        let mapped = Served::Kernel(unsafe { KernelBytes::new(map.as_ptr(), 10_000) });
        let memory = Served::Memory(&[7; 10_000]);
        for served in [mapped, memory] {
            assert_eq!((served.len(), served.is_empty()), (10_000, false));
            assert_eq!(served.to_vec().unwrap(), [7; 10_000]);
            let target = tempfile::tempfile().unwrap();
            served.write_all_at(&target, 5).unwrap();
            assert_eq!(target.metadata().unwrap().len(), 10_005);
            let (mut reader, writer) = io::pipe().unwrap();
            served.write_to(&writer).unwrap();
            drop(writer);
            let mut found = Vec::new();
            reader.read_to_end(&mut found).unwrap();
            assert_eq!(found, [7; 10_000]);
        }
        file.set_len(0).unwrap();
        let (_reader, writer) = io::pipe().unwrap();
        assert_eq!(mapped.write_to(&writer).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        assert_eq!(mapped.to_vec().unwrap_err().raw_os_error(), Some(libc::EFAULT));
        assert!(Served::Kernel(KernelBytes::EMPTY).to_vec().unwrap().is_empty());
    }
}
