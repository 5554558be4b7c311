//! The algebra of views, and the kernels that carry it out. Pure: no I/O, no serialization, no threads.

pub mod decode;
pub mod dtype;

pub use decode::{BlockScale, Decode, Program, Step, TensorId};
pub use dtype::{DType, Unit};
