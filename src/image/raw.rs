//! Raw files: nothing but a view's elements.

use super::{FileImage, ImageError};
use crate::tensor::View;

/// A file of a view's elements in row-major order, little-endian.
///
/// # Errors
/// [`ImageError::PartialByte`].
pub fn raw(name: &str, view: View) -> Result<FileImage, ImageError> {
    let mut image = FileImage::default();
    image.push_view(name, view)?;
    Ok(image)
}
