//! Memory for materialized files: reserved room in the engine's cache, and an unnamed file in memory that uses it, in huge
//! pages where the kernel supports them.
//!
//! The files belong to a private `tmpfs` that is mounted nowhere: it ends with the process, and no other process sees it.

use std::{fs::File, io, os::fd::OwnedFd};

use ckfs_read::{Engine, FileRoom};
use ckfs_source::page_size::{allocation_page_bytes, uses_huge_pages};
use parking_lot::Mutex;
use rustix::{
    fs::{Mode, OFlags, StatVfs, fstatvfs, openat},
    mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen},
};

/// Memory for files, as far as an engine's cache allows.
#[derive(Debug)]
pub(super) struct Memory {
    root: OwnedFd,
    /// Held while room is moved, so that no memory is without its reservation.
    moving: Mutex<()>,
}

impl Memory {
    /// Memory for as many bytes as may be reserved in the engine's cache.
    ///
    /// # Errors
    /// The system gives us no such file system, as it does only for root, or it holds no unnamed files.
    pub(super) fn new(engine: &Engine) -> io::Result<Self> {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let set = |key: &str, value: &str| fsconfig_set_string(&context, key, value);
        set("source", "ckfs")?;
        set("mode", "0700")?;
        set("size", &engine.reservable_bytes().max(allocation_page_bytes()).to_string())?;
        // Not required: a kernel may be built without huge pages.
        let _ = set("huge", if uses_huge_pages() { "always" } else { "never" });
        fsconfig_create(&context)?;
        let attributes =
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let memory = Self { root, moving: Mutex::default() };
        // Tests now, not at the first use, that unnamed files work there.
        memory.unnamed()?;
        Ok(memory)
    }

    /// A file of `len_bytes` bytes without content, and its room in the cache. To make room, the files that `drop_oldest` drops
    /// go first.
    ///
    /// # Errors
    /// There is no room, or no memory.
    pub(super) fn take(
        &self,
        engine: &Engine,
        len_bytes: u64,
        drop_oldest: &mut dyn FnMut() -> bool,
    ) -> io::Result<(File, FileRoom)> {
        let _moving = self.moving.lock();
        let room_bytes = usize::try_from(len_bytes.next_multiple_of(allocation_page_bytes() as u64))
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        let room = loop {
            self.note_dropped(engine);
            if let Some(room) = engine.reserve(room_bytes) {
                break room;
            }
            if !drop_oldest() {
                return Err(io::Error::other(format!("no room for {room_bytes} bytes in the cache")));
            }
        };
        let file = self.unnamed()?;
        file.set_len(len_bytes)?;
        Ok((file, room))
    }

    /// Memory of all files in bytes, including dropped ones that programs still map.
    pub(super) fn used_bytes(&self) -> u64 {
        let used = |stat: StatVfs| stat.f_blocks.saturating_sub(stat.f_bfree).saturating_mul(stat.f_frsize);
        fstatvfs(&self.root).map_or(0, used)
    }

    /// Measures the memory of dropped files that programs still map: the used bytes beyond the reserved ones.
    pub(super) fn measure(&self, engine: &Engine) {
        let _moving = self.moving.lock();
        self.note_dropped(engine);
    }

    fn note_dropped(&self, engine: &Engine) {
        let used = usize::try_from(self.used_bytes()).unwrap_or(usize::MAX);
        engine.set_dropped_bytes(used.saturating_sub(engine.held().materialized));
    }

    fn unnamed(&self) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        Ok(openat(&self.root, ".", flags, Mode::RUSR | Mode::WUSR)?.into())
    }
}
