//! Unnamed files in memory, in huge pages where the kernel supports them.
//!
//! They belong to a private `tmpfs` that is mounted nowhere: it ends with the process, and no other process sees it.

use std::{fs::File, io, os::fd::OwnedFd};

use ckfs_source::page_size::{allocation_page_bytes, uses_huge_pages};
use rustix::{
    fs::{FallocateFlags, Mode, OFlags, StatVfs, fallocate, fstatvfs, openat},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen},
};

/// A file system in memory.
#[derive(Debug)]
pub(super) struct MemoryFiles {
    root: OwnedFd,
}

impl MemoryFiles {
    /// A file system for at most `bytes_max` bytes.
    ///
    /// # Errors
    /// The system gives us no such file system, as it does only for root, or it holds no unnamed files.
    pub(super) fn new(bytes_max: u64) -> io::Result<Self> {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let set = |key: &str, value: &str| fsconfig_set_string(&context, key, value);
        set("source", "ckfs")?;
        set("mode", "0700")?;
        set("size", &bytes_max.max(allocation_page_bytes() as u64).to_string())?;
        // Not required: a kernel may be built without huge pages.
        let _ = set("huge", if uses_huge_pages() { "always" } else { "never" });
        fsconfig_create(&context)?;
        let attributes =
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let files = Self { root: fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)? };
        // Tests now, not at the first use, that unnamed files work there.
        files.unnamed(0)?;
        Ok(files)
    }

    /// Memory of all files in bytes, including dropped ones that programs still map.
    pub(super) fn used_bytes(&self) -> u64 {
        let used = |stat: StatVfs| stat.f_blocks.saturating_sub(stat.f_bfree).saturating_mul(stat.f_frsize);
        fstatvfs(&self.root).map_or(0, used)
    }

    /// A new file of `bytes` bytes with all its memory allocated.
    ///
    /// # Errors
    /// There may be no memory, as dropped files may still be mapped.
    pub(super) fn unnamed(&self, bytes: u64) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let file = File::from(openat(&self.root, ".", flags, Mode::RUSR | Mode::WUSR)?);
        allocate(&file, bytes)?;
        Ok(file)
    }
}

/// Sets a file's length to `bytes` bytes and allocates all its memory.
///
/// # Errors
/// There is no memory.
pub(super) fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    let len = file.metadata()?.len();
    if bytes < len {
        file.set_len(bytes)?;
    } else if bytes > len {
        fallocate(file, FallocateFlags::empty(), len, bytes - len)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn files_grow_and_shrink_and_cut_bytes_are_zero_afterwards() {
        const SIZES: [u64; 7] = [0, 5 << 20, (1 << 20) + 3, (3 << 20) + 1, 3, 3, 1 << 20];
        let mut file = tempfile::tempfile().unwrap();
        for (before, after) in SIZES.into_iter().zip(SIZES.into_iter().skip(1)) {
            allocate(&file, after).unwrap();
            let mut bytes = Vec::new();
            std::io::Seek::rewind(&mut file).unwrap();
            file.read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes.len() as u64, after);
            let kept = usize::try_from(before.min(after)).unwrap();
            let (old, new) = bytes.split_at(kept);
            assert!(old.iter().all(|byte| *byte == 7) && new.iter().all(|byte| *byte == 0), "{before} to {after}");
            std::os::unix::fs::FileExt::write_all_at(&file, &vec![7; bytes.len()], 0).unwrap();
        }
    }
}
