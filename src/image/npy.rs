//! `.npy` files: a header whose elements start on a page, then the elements.
//!
//! numpy asks for a multiple of 64 only. A page keeps the elements that one request of the kernel covers inside one tile of
//! a transformed view, and lets a mapped array begin where a device can take it without a copy.

use super::{FileImage, ImageError};
use crate::{
    format::npy,
    tensor::{DType, Shape, View},
};

/// Where the elements start.
const ALIGNMENT: usize = 4096;

/// A `.npy` file of a view's elements.
///
/// # Errors
/// [`ImageError::PartialByte`].
pub fn npy(name: &str, view: View) -> Result<FileImage, ImageError> {
    let mut elements = FileImage::default();
    elements.push_view(name, view.clone())?;
    let mut image = FileImage::of_bytes(npy::header(view.dtype(), view.shape().extents(), ALIGNMENT));
    image.push_view(name, view)?;
    Ok(image)
}

/// Length of the file that [`npy()`] lays out for elements of this type and shape.
///
/// # Panics
/// If the elements do not fill whole bytes.
pub fn npy_len(dtype: DType, shape: &Shape) -> u64 {
    npy::header(dtype, shape.extents(), ALIGNMENT).len() as u64
        + dtype.bytes_of(shape.elements()).expect("a plan's shards are whole bytes")
}
