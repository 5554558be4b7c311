//! A file of rows that is generated when its length is first requested.

use std::{
    fmt,
    sync::{Arc, OnceLock},
};

use super::{
    file_image::ImageError,
    output::{FileContent, VirtualFile},
    rows::{RowFile, Rows},
};

/// A lazy file of rows.
pub(super) struct LazyRows<F> {
    rows: OnceLock<Arc<RowFile>>,
    make: F,
}

impl<F> fmt::Debug for LazyRows<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LazyRows").field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl<R: Rows + 'static, F: Fn() -> R> LazyRows<F> {
    /// A file of the rows that `make` generates.
    pub(super) fn new(make: F) -> Self {
        Self { rows: OnceLock::new(), make }
    }

    /// The rows.
    pub(super) fn rows(&self) -> &Arc<RowFile> {
        self.rows.get_or_init(|| Arc::new(RowFile::new((self.make)())))
    }
}

impl<R: Rows + 'static, F: Fn() -> R + Send + Sync> VirtualFile for LazyRows<F> {
    fn len_bytes(&self) -> u64 {
        self.rows().len_bytes()
    }

    fn content(&self) -> Result<FileContent, ImageError> {
        Ok(FileContent::Rows(Arc::clone(self.rows())))
    }
}
