//! One constant element of a tensor.

use super::{DType, shape::to_usize};

/// One constant element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element {
    dtype: DType,
    /// Those of a unit, padded with zeros.
    pub(super) bytes: [u8; 8],
}

impl Element {
    /// Zero of a type; all types have zero as all bits clear, except the bare exponent `F8_E8M0`, where it is 2^-127.
    pub const fn zero(dtype: DType) -> Self {
        Self { dtype, bytes: [0; 8] }
    }

    /// The f32 value `value`.
    pub const fn f32(value: f32) -> Self {
        let b = value.to_le_bytes();
        Self { dtype: DType::F32, bytes: [b[0], b[1], b[2], b[3], 0, 0, 0, 0] }
    }

    /// An element of `dtype` with these little-endian bytes, or `None` if their number is not the element's width.
    pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Option<Self> {
        let width = usize::try_from(dtype.element_bytes()?).ok()?;
        (bytes.len() == width).then(|| {
            let mut padded = [0; 8];
            padded[..width].copy_from_slice(bytes);
            Self { dtype, bytes: padded }
        })
    }

    /// Element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Little-endian bytes of one unit of this element's type (see [`DType::unit`]).
    pub fn unit_bytes(&self) -> &[u8] {
        let bytes = to_usize(self.dtype.unit().bytes);
        &self.bytes[..bytes]
    }
}
