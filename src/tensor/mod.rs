//! The algebra of views, and the kernels that carry it out. Pure: no I/O, no serialization, no threads.

pub mod convert;
pub mod decode;
pub mod dtype;
mod float;
pub mod gather;
mod kernel;
mod transpose;

pub use convert::{convert_row, convert_scalar};
pub use decode::{BlockScale, Decode, Program, Step, TensorId};
pub use dtype::{DType, Unit};
pub use gather::{Gather, Loop, fill, gather};
