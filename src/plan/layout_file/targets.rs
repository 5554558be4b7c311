//! What the inverse of a layout makes: the sources of its rules, as tensors that are still to be expressed by leaves.

use std::{cell::RefCell, collections::HashMap};

use ckfs_tensor::{DType, Shape, SourceTensor, TensorId, View};

use super::super::expr::EvalError;

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

/// A tensor that the inverse makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its name in the rules.
    pub(crate) name: String,
    /// Its shape by the rules.
    pub(crate) shape: Shape,
}

/// All of them, by number. In the views of rules the number is the tensor's id.
#[derive(Debug, Default)]
pub(crate) struct Targets {
    pub(super) list: Vec<Target>,
    by_name: HashMap<String, u32>,
}

impl Targets {
    /// The target of a name as a rule sees it.
    ///
    /// # Errors
    /// An extent without a value, or another shape than a rule before gave.
    pub(super) fn view(&mut self, name: String, extents: Vec<Result<u64, NoExtent>>) -> Result<View, EvalError> {
        let no_shape = || EvalError::new(format!("the rule does not give the shape of {name}"), "");
        let extents = extents.into_iter().collect::<Result<Vec<u64>, _>>();
        let extents = extents.map_err(|error| error.unwrap_or_else(no_shape))?;
        let shape = Shape::try_new(&extents)?;
        let number = if let Some(number) = self.by_name.get(&name) {
            let known = &self.list[*number as usize].shape;
            if *known != shape {
                let text = format!("shape: expected one shape for a tensor, found {known} and {shape} for {name}");
                return Err(EvalError::new(text, "shape"));
            }
            *number
        } else {
            let number = u32::try_from(self.list.len()).map_err(|_| EvalError::range("targets"))?;
            self.list.push(Target { name: name.clone(), shape: shape.clone() });
            self.by_name.insert(name, number);
            number
        };
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
