//! One local file as it was when it was opened.

use std::{
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use nix::{
    sys::{
        stat::{FileStat, fstat},
        statfs::fstatfs,
    },
    unistd::geteuid,
};

use super::{
    super::{ByteSpan, ContentName, Opened, Pin, SourceError, digest::KnownDigest, root_dir::Revalidate},
    identity::Identity,
    map::FileMaps,
};

/// How local files are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceIo {
    /// Mapped, except on network file systems.
    #[default]
    Auto,
    /// Mapped.
    Mmap,
    /// With `pread`.
    Pread,
}

/// File systems, by the magic number of `statfs`, on which a mapped page may fail for reasons other than truncation, or
/// whose files change without the kernel knowing. The C libraries disagree on the number's type; this one holds them all.
pub(super) const REMOTE_MAGIC: [i128; 12] = [
    0x6969,      // NFS
    0x6573_5546, // FUSE
    0x0BD0_0BD0, // Lustre
    0x517B,      // SMB
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x0102_1997, // 9p
    0x00C3_6400, // Ceph
    0x4750_4653, // GPFS
    0x5346_414F, // AFS
    0x1983_0326, // BeeGFS
    0x6163_6673, // ACFS
];

/// File systems that may give a file its modification time as the time of its last change of state.
const SETS_TIMES_MAGIC: [i128; 4] = [
    0x6573_5546, // FUSE
    0xE0F5_E1E2, // EROFS
    0x4D44,      // FAT
    0x2011_BAB0, // exFAT
];

/// A file, opened once.
#[derive(Debug)]
pub(super) struct Pinned {
    pub(super) pin: Pin,
    pub(super) file: Arc<File>,
    pub(super) identity: Identity,
    pub(super) revalidate: Revalidate,
    pub(super) mapped: bool,
    /// Whether it is on a network file system.
    pub(super) is_remote: bool,
    /// The digest that the Hub's cache names it by.
    pub(super) digest: Option<KnownDigest>,
}

impl Pinned {
    pub(super) fn new(opened: Opened, io: SourceIo) -> Result<Self, SourceError> {
        let Opened { path, file, gates, revalidate, remote, digest } = opened;
        let identity = Identity::of(&fstat(&file).map_err(|errno| SourceError::io(Arc::clone(&path), "stat", errno))?);
        let file_system = fstatfs(&file).ok().map(|fs| i128::from(fs.filesystem_type().0));
        let is_remote = file_system.is_some_and(|magic| REMOTE_MAGIC.contains(&magic));
        let mapped = match io {
            SourceIo::Mmap => true,
            SourceIo::Pread => false,
            SourceIo::Auto => file_system.is_some() && !is_remote,
        };
        let seconds = remote.as_ref().and_then(|remote| remote.object.file.modified_seconds);
        let modified = seconds.map_or_else(|| identity.modified(), |seconds| UNIX_EPOCH + Duration::from_secs(seconds));
        let content = match (&remote, &digest) {
            (Some(remote), _) => ContentName::of_object(&remote.object.file.content),
            (None, Some(digest)) => ContentName::of_digest(digest),
            (None, None) => {
                let may_copy = file_system.is_none_or(|magic| SETS_TIMES_MAGIC.contains(&magic));
                identity.content_name(may_copy, !may_copy && is_remote)
            }
        };
        let pin = Pin { path, len_bytes: identity.size_bytes, modified, content, gates };
        Ok(Self { pin, file, identity, revalidate, mapped, is_remote, digest })
    }

    pub(super) fn maps(&self) -> FileMaps {
        let len = usize::try_from(self.identity.size_bytes).ok().filter(|_| self.mapped);
        let user = geteuid();
        let tells = user.is_root() || self.file.metadata().is_ok_and(|found| found.uid() == user.as_raw());
        FileMaps::new(Arc::clone(&self.file), Arc::clone(&self.pin.path), len.unwrap_or(0), tells)
    }

    pub(super) fn difference(&self, found: nix::Result<FileStat>) -> Result<Option<SourceError>, SourceError> {
        let stat = found.map_err(|errno| self.io("stat", errno))?;
        let mut found = Identity::of(&stat);
        if matches!(self.revalidate, Revalidate::Cached) {
            // The times of a file of the cache change as blocks come.
            found = found.with_times_of(&self.identity);
        }
        let changed = |what| SourceError::Lost {
            file: self.pin.path.clone(),
            flaw: format!("changed since it was opened: {what}"),
        };
        Ok(self.identity.difference(&found).map(changed))
    }

    pub(super) fn io(&self, action: impl Into<String>, error: impl Into<io::Error>) -> SourceError {
        SourceError::io(Arc::clone(&self.pin.path), action, error)
    }

    /// The span, if it is inside the file.
    pub(super) fn bounded(&self, span: ByteSpan) -> Result<ByteSpan, SourceError> {
        let len_bytes = self.identity.size_bytes;
        if span.end() <= len_bytes {
            Ok(span)
        } else {
            Err(SourceError::out_of_bounds(&self.pin.path, span, len_bytes))
        }
    }
}
