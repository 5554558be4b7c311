//! A file of rows that is generated when its length is first requested.

use std::sync::{Arc, OnceLock};

use super::{
    file_image::ImageError,
    generated_records::{GeneratedFile, GeneratedRecords},
    output::{FileContent, VirtualFile},
};

/// A lazy file of rows.
pub(super) struct LazyRecords<F> {
    rows: OnceLock<Arc<GeneratedFile>>,
    make: F,
}

impl<R: GeneratedRecords + 'static, F: Fn() -> R> LazyRecords<F> {
    /// A file of the rows that `make` generates.
    pub(super) fn new(make: F) -> Self {
        Self { rows: OnceLock::new(), make }
    }

    /// The rows.
    pub(super) fn rows(&self) -> &Arc<GeneratedFile> {
        self.rows.get_or_init(|| Arc::new(GeneratedFile::new((self.make)())))
    }
}

impl<R: GeneratedRecords + 'static, F: Fn() -> R + Send + Sync> VirtualFile for LazyRecords<F> {
    fn len_bytes(&self) -> u64 {
        self.rows().len_bytes()
    }

    fn content(&self) -> Result<FileContent, ImageError> {
        Ok(FileContent::Generated(Arc::clone(self.rows())))
    }
}
