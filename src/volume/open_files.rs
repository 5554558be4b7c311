//! Open files, and the cached state of closed ones.

use std::sync::Arc;

use ckfs_image::GeneratedFile;
use ckfs_read::PreparedFile;
use ckfs_source::FileId;
use lru::LruCache;

use super::{Ino, materialize::FileEntry, tree::Live};

/// Most segments of closed files that stay cached with their tilings and tiles.
const REMEMBERED_SEGMENTS_MAX: usize = 200_000;
/// Most closed files that stay cached. The tiling of one view may take some megabytes.
const REMEMBERED_FILES_MAX: usize = 64;

/// An open file.
#[derive(Clone)]
pub(super) enum Open {
    Original(FileId),
    Bytes(Arc<[u8]>),
    Generated(Arc<GeneratedFile>),
    Live(Live),
    /// A file of tensors, and its entry if it may be materialized.
    Image(Arc<PreparedFile>, Option<Arc<FileEntry>>),
}

/// Prepared files, open or recently closed: a reopened file finds its tilings and tiles again.
#[derive(Debug)]
pub(super) struct PreparedFileCache {
    pub(super) files: LruCache<Ino, Arc<PreparedFile>>,
    pub(super) segments: usize,
}

impl PreparedFileCache {
    /// Removes the closed file that was opened longest ago, if the cache is over its limits. An open file stays: a second open
    /// would tile it a second time.
    pub(super) fn forget_one(&mut self) -> Option<Arc<PreparedFile>> {
        let many = self.files.len() > REMEMBERED_FILES_MAX || self.segments > REMEMBERED_SEGMENTS_MAX;
        let closed = |file: &Arc<PreparedFile>| Arc::strong_count(file) == 1;
        let (ino, _) = self.files.iter().rev().find(|(_, file)| many && closed(file))?;
        let old = self.files.pop(&ino.clone())?;
        self.segments -= old.image().segments().len();
        Some(old)
    }
}
