//! Adapters merged into the tensors of a checkpoint: `W + factor * (B @ A)`, and tensors that an adapter replaces; averages.
//!
//! The arithmetic is f32, in this order: the products of a row of `B` and a column of `A` are added from the first to the last; the
//! sum is multiplied by the factor; the product is added to the weight. Each of these operations rounds to f32, and the result is
//! rounded once to the type in which it is shown. An average is the sum of its terms, each a tensor times its weight, added from the
//! first to the last, rounded in the same way. [`Merge::view`] is the only place that says so.

use ckfs_tensor::{DType, Keep, TensorId, View, ViewError};
use hashbrown::{HashMap, HashSet};

/// A product of two matrices and a number.
#[derive(Clone, Debug)]
pub struct ScaledProduct {
    /// The left factor, `B`: `[out, rank]`, as it is stored.
    pub left: View,
    /// The right factor, `A`: `[rank, in]`, as it is stored.
    pub right: View,
    /// The number.
    pub factor: f32,
    /// Whether the weight is `[in, out]`.
    pub is_transposed: bool,
}

/// What an adapter makes of one tensor.
#[derive(Clone, Debug, Default)]
pub struct Merge {
    /// The adapter's tensor that replaces it, as it is stored.
    pub replaced_by: Option<View>,
    /// What is added to it.
    pub added: Option<ScaledProduct>,
    /// The terms of the average that it is, if it is one: tensors as they are stored, with their weights.
    pub terms: Vec<(View, f32)>,
}

impl Merge {
    /// The merged tensor, in the type `dtype`.
    ///
    /// # Errors
    /// [`ViewError`] if the shapes do not fit, or something is not stored as floats.
    pub fn view(&self, base: View, dtype: DType) -> Result<View, ViewError> {
        let term = |(view, weight): &(View, f32)| view.cast(DType::F32)?.multiply(*weight, false, Keep::F32);
        if let Some((first, terms)) = self.terms.split_first() {
            let sum = |sum: View, next| sum.add_view(&term(next)?, Keep::F32);
            return terms.iter().try_fold(term(first)?, sum)?.cast(dtype);
        }
        let base = self.replaced_by.clone().unwrap_or(base);
        let Some(ScaledProduct { left, right, factor, is_transposed }) = &self.added else { return base.cast(dtype) };
        let added = View::matrix_product(left, right)?.multiply(*factor, false, Keep::F32)?;
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
        let is_used = |merge: &&Merge| {
            let product = merge.added.as_ref().map(|product| &product.left);
            let mut found = false;
            for view in [product, merge.replaced_by.as_ref()].into_iter().flatten() {
                view.for_each_stored(&mut |id| found |= used.contains(&id));
            }
            found
        };
        self.0.values().filter(is_used).count()
    }
}
