//! Adapters merged into the tensors of a checkpoint: `W + factor * (B @ A)`, and tensors that an adapter replaces.
//!
//! The arithmetic is f32, in this order: the products of a row of `B` and a column of `A` are added from the first to the last; the
//! sum is multiplied by the factor; the product is added to the weight. Each of these operations rounds to f32, and the result is
//! rounded once to the type in which it is shown. [`Merge::view`] is the only place that says so.

use ckfs_tensor::{DType, Keep, SourceTensor, TensorId, View, ViewError};
use hashbrown::{HashMap, HashSet};

/// A product of two matrices and a number.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaledProduct {
    /// The left factor, `B`: `[out, rank]`.
    pub left: SourceTensor,
    /// The right factor, `A`: `[rank, in]`.
    pub right: SourceTensor,
    /// The number.
    pub factor: f32,
    /// Whether the weight is `[in, out]`.
    pub is_transposed: bool,
}

/// What an adapter makes of one tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Merge {
    /// The adapter's tensor that replaces it.
    pub replaced_by: Option<SourceTensor>,
    /// What is added to it.
    pub added: Option<ScaledProduct>,
}

impl Merge {
    /// The merged tensor, in the type `dtype`.
    ///
    /// # Errors
    /// [`ViewError`] if the shapes do not fit, or something is not stored as floats.
    pub fn view(&self, base: View, dtype: DType) -> Result<View, ViewError> {
        let base = self.replaced_by.clone().map_or(base, View::source);
        let Some(ScaledProduct { left, right, factor, is_transposed }) = &self.added else { return base.cast(dtype) };
        let added = View::matrix_product(left.clone(), right.clone())?.multiply(*factor, false, Keep::F32)?;
        let added = if *is_transposed { added.reverse_axes() } else { added };
        base.cast(DType::F32)?.add_view(&added, Keep::F32)?.cast(dtype)
    }
}

/// What an adapter makes of the tensors of a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct Merges(HashMap<TensorId, Merge>);

impl Merges {
    /// What is made of each of these tensors.
    pub fn new(of: impl IntoIterator<Item = (TensorId, Merge)>) -> Self {
        Self(of.into_iter().collect())
    }

    /// What is made of a tensor, if anything.
    pub fn of(&self, id: TensorId) -> Option<&Merge> {
        self.0.get(&id)
    }

    /// Number of tensors for which something of the adapter is in `used`.
    pub fn count_of(&self, used: &HashSet<TensorId>) -> usize {
        let sources = |merge: &Merge| {
            let product = merge.added.as_ref().map(|product| product.left.id);
            [product, merge.replaced_by.as_ref().map(|source| source.id)]
        };
        self.0.values().filter(|merge| sources(merge).into_iter().flatten().any(|id| used.contains(&id))).count()
    }
}
