//! The algebra of views, and the kernels that execute it. Pure: no I/O, no serialization, no threads.
//!
//! A [`View`] defines a virtual tensor; [`View::lower`] gives its [`Tiling`], the strided copies that fill it; the kernels
//! execute those. Nothing else exists at read time: no code walks the tree, and no operator has a reader of its own.
//!
//! ```
//! use ckfs_tensor::{DType, Shape, SourceTensor, TensorId, View};
//!
//! let shape = Shape::try_new(&[6, 4]).unwrap();
//! let q_proj = |id| View::source(SourceTensor { id: TensorId(id), dtype: DType::BF16, shape: shape.clone() });
//! let kernel = View::stack(1, &[q_proj(0).reverse_axes(), q_proj(1).reverse_axes()]).unwrap();
//! assert_eq!(kernel.shape().extents(), [4, 2, 6]); // [in, layers, out]
//! assert_eq!(kernel.lower().unwrap().pieces().len(), 2);
//! ```

mod block_decode;
mod combine;
pub mod convert;
pub mod cover;
pub mod decode;
mod dot;
pub mod dtype;
pub mod element;
pub mod encode;
mod exponential;
mod field;
mod float;
pub mod gather;
mod kernel;
mod lower;
pub mod mosaic;
pub mod pages;
mod part;
mod product;
pub mod shape;
pub mod span;
pub mod strided_indices;
pub mod tiling;
mod transpose;
pub mod view;
mod view_text;

pub use convert::convert_row;
pub use cover::CoverFault;
pub use decode::{
    BitOrder, Bits, Decode, Digit, Field, IndexMap, Load, Operand, Operation, Program, SourceTensor, Step, TensorId,
    Term, Terms, Value, block_index,
};
pub use dtype::{DType, Unit};
pub use element::Element;
pub use encode::{Band, Bands, EncodedPart, Encoder, ExponentRule, MatrixFactor, Uncodable, greatest_magnitude};
pub use field::Window;
pub use gather::{Gather, Loop, Stores, fill, gather};
pub use mosaic::{Mosaic, MosaicBox, Mosaics, NewBox};
pub use pages::{ByteRuns, Reads, reads};
pub use shape::{PerAxis, RANK_MAX, Region, Shape, ViewError, to_usize, unravel};
pub use span::{Need, needs};
pub use strided_indices::StridedIndices;
pub use tiling::{EncodedLeaf, Origin, PIECES_MAX, Piece, Tiling, TilingError, WorkSlice};
pub use view::{EncodedMatrices, Keep, Op, View};
