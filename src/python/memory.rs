//! Memory of Python objects that threads write to.
#![allow(unsafe_code)]

use std::{ops::Range, ptr::NonNull, slice, sync::Arc};

use ckfs_read::LoadTarget;
use pyo3::{buffer::PyBuffer, exceptions::PyBufferError, prelude::*};

/// An exported buffer: writable bytes, one after the other. The exporter keeps the memory where it is until this is dropped.
#[derive(Debug)]
pub(super) struct LentBuffer(PyBuffer<u8>);

impl LentBuffer {
    /// The buffer of an object.
    ///
    /// # Errors
    /// It is no contiguous, writable buffer of `len` bytes.
    pub(super) fn new(object: &Bound<'_, PyAny>, len: u64) -> PyResult<Arc<Self>> {
        let buffer = PyBuffer::<u8>::get(object)?;
        if buffer.readonly() || !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("expected a writable, contiguous buffer"));
        }
        if buffer.len_bytes() as u64 != len {
            let found = buffer.len_bytes();
            return Err(PyBufferError::new_err(format!("expected a buffer of {len} bytes, found {found}")));
        }
        Ok(Arc::new(Self(buffer)))
    }

    /// Where its memory is.
    pub(super) fn addresses(&self) -> Range<usize> {
        let start = self.0.buf_ptr().addr();
        start..start + self.0.len_bytes()
    }

    /// Its memory in parts, which do not overlap. They must follow each other.
    ///
    /// # Panics
    /// If a part begins before the end of the last one, or leaves the buffer.
    pub(super) fn parts(self: &Arc<Self>, ranges: &[Range<usize>]) -> Vec<LentPart> {
        let start = NonNull::new(self.0.buf_ptr().cast::<u8>()).unwrap_or(NonNull::dangling());
        let mut end = 0;
        let part = |range: &Range<usize>| {
            assert!(end <= range.start && range.start <= range.end && range.end <= self.0.len_bytes(), "{range:?}");
            end = range.end;
            // SAFETY: the part begins inside the buffer, or at its end, as just asserted.
            let start = unsafe { start.add(range.start) };
            LentPart { start, len: range.end - range.start, _buffer: Arc::clone(self) }
        };
        ranges.iter().map(part).collect()
    }
}

/// A part of a buffer. It keeps the buffer exported.
#[derive(Debug)]
pub(super) struct LentPart {
    start: NonNull<u8>,
    len: usize,
    _buffer: Arc<LentBuffer>,
}

// SAFETY: the bytes belong to this part alone, as far as this program goes, and the buffer stays exported as long as it exists. The
// buffer is released with the interpreter attached, by whatever thread drops it last.
unsafe impl Send for LentPart {}

impl LoadTarget for LentPart {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `start` and `len` are a part of a writable buffer, which the exporter neither moves nor frees before the part is
        // dropped. No other part has these bytes. Python code of another thread may read or write them meanwhile, as it may while
        // numpy fills an array: it then finds any bytes, and what is made here is not read back.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}
