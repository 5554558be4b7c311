//! What the inverse of a layout makes: the sources of its rules, as tensors that are still to be expressed by leaves.

use std::cell::RefCell;

use ckfs_tensor::{DType, Shape, SourceTensor, TensorId, View};

use super::super::{
    expr::EvalError,
    numbered::{Numbered, number_of},
};

/// The dtype of targets in the views of rules. A rule that leaves a result in f32 is known by the difference.
const TARGET_DTYPE: DType = DType::BF16;

/// Why an extent has no value; `None` if the rule does not give it.
pub(super) type NoExtent = Option<EvalError>;

/// The names under which a checkpoint stores the leaves of a layout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredNames {
    /// Begins every stored name.
    pub(crate) prefix: String,
    /// Begins most leaves, and is not stored.
    pub(crate) dropped: String,
    /// Ends every stored name.
    pub(crate) suffix: String,
}

impl StoredNames {
    /// The stored name of a leaf.
    pub(crate) fn of(&self, leaf: &str) -> String {
        format!("{}{}{}", self.prefix, leaf.strip_prefix(self.dropped.as_str()).unwrap_or(leaf), self.suffix)
    }
}

/// The tensors that the inverse makes: their shapes by their names in the rules. In the views of rules the number of one is its id.
pub(crate) type Targets = Numbered<String, Shape>;

impl Inverse<'_> {
    /// The target of a name as a rule sees it.
    ///
    /// # Errors
    /// An extent without a value, or another shape than a rule before gave.
    pub(super) fn view(&self, name: String, extents: Vec<Result<u64, NoExtent>>) -> Result<View, EvalError> {
        let no_shape = || EvalError::new(format!("the rule does not give the shape of {name}"), "");
        let extents = extents.into_iter().collect::<Result<Vec<u64>, _>>();
        let extents = extents.map_err(|error| error.unwrap_or_else(no_shape))?;
        let shape = Shape::try_new(&extents)?;
        let mut targets = self.targets.borrow_mut();
        if let Some(known) = targets.get(&name).filter(|known| **known != shape) {
            let text = format!("shape: expected one shape for a tensor, found {known} and {shape} for {name}");
            return Err(EvalError::new(text, "shape"));
        }
        let number = number_of(&mut targets, name, |_| shape.clone());
        Ok(View::source(SourceTensor { id: TensorId(number), dtype: TARGET_DTYPE, shape }))
    }
}

/// The side of a scope that differs for the inverse of a layout.
#[derive(Debug)]
pub(super) struct Inverse<'a> {
    /// Where the checkpoint stores leaves.
    pub(super) names: &'a StoredNames,
    /// The sources that rules have named so far.
    pub(super) targets: RefCell<Targets>,
}
