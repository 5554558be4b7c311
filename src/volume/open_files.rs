//! What is open, and what of it is remembered after it was closed.

use std::sync::Arc;

use lru::LruCache;

use super::{Ino, materialize::Entry};
use crate::{image::RowFile, read::OpenFile, source::FileId};

/// Segments of closed files that are remembered with their tilings and tiles.
const REMEMBERED_SEGMENTS_MAX: usize = 200_000;
/// Closed files that are remembered. The tiling of one view may take some megabytes.
const REMEMBERED_FILES_MAX: usize = 64;

/// An open file.
#[derive(Clone, Debug)]
pub(super) enum Open {
    Original(FileId),
    Bytes(Arc<[u8]>),
    Rows(Arc<RowFile>),
    /// Tensors, and what keeps the file if it is materialized at some time.
    Image(Arc<OpenFile>, Option<Arc<Entry>>),
}

/// Files made ready, open or lately closed: reopening finds tilings and tiles again.
#[derive(Debug)]
pub(super) struct Remembered {
    pub(super) files: LruCache<Ino, Arc<OpenFile>>,
    pub(super) segments: usize,
}

impl Remembered {
    /// Takes out the file that was opened longest ago and is closed, if there are more than should be remembered. One that is
    /// open stays: opened a second time, it would be tiled a second time too.
    pub(super) fn forget_one(&mut self) -> Option<Arc<OpenFile>> {
        let many = self.files.len() > REMEMBERED_FILES_MAX || self.segments > REMEMBERED_SEGMENTS_MAX;
        let closed = |file: &Arc<OpenFile>| Arc::strong_count(file) == 1;
        let (ino, _) = self.files.iter().rev().find(|(_, file)| many && closed(file))?;
        let old = self.files.pop(&ino.clone())?;
        self.segments -= old.image().segments().len();
        Some(old)
    }
}
