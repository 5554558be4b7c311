//! The meaning of names in a layout file's expressions: parameters, variables, loops, the configuration and the tensors.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use ckfs_checkpoint::Checkpoint;
use ckfs_tensor::TensorId;

use super::{
    super::{
        expr::{EvalError, ExprValue, NameScope},
        member::{config_members, config_value},
        mesh::Mesh,
        problem::Problem,
    },
    Alias, LayoutFile, Span,
    place::{mark, near},
    targets::Inverse,
};

/// Values of loops, by name, outermost first.
pub(super) type Bound = Vec<(Arc<str>, ExprValue)>;

/// The repository, and the values of parameters and variables.
pub(super) struct Scope<'a> {
    pub(super) file: &'a LayoutFile,
    pub(super) checkpoint: &'a Checkpoint,
    /// The same tensors under the names that the repository has for its experts, for a file of the user's.
    pub(super) stored: Option<&'a Checkpoint>,
    pub(super) mesh: &'a Mesh,
    /// The parameters that the user has set.
    pub(super) set: BTreeMap<String, ExprValue>,
    /// For the inverse of the layout: the checkpoint has the leaves, and the sources are to be made.
    pub(super) inverse: Option<&'a Inverse<'a>>,
    /// Evaluated values; `None` during the evaluation.
    known: RefCell<HashMap<String, Option<Result<ExprValue, EvalError>>>>,
}

impl<'a> Scope<'a> {
    pub(super) fn new(
        file: &'a LayoutFile,
        checkpoint: &'a Checkpoint,
        mesh: &'a Mesh,
        set: &BTreeMap<String, String>,
        inverse: Option<&'a Inverse<'a>>,
    ) -> Self {
        let set = set.iter().map(|(name, text)| (name.clone(), ExprValue::of_text(text))).collect();
        Self { file, checkpoint, stored: None, mesh, set, inverse, known: RefCell::default() }
    }

    /// The same scope for another mesh.
    pub(super) fn for_mesh<'b>(&'b self, mesh: &'b Mesh) -> Scope<'b> {
        Scope { mesh, set: self.set.clone(), known: RefCell::default(), ..*self }
    }

    /// The problem of a rule whose expression at `at` has no value, for the leaf `target`.
    pub(super) fn problem(&self, at: Span, target: &str, error: &EvalError) -> Problem {
        let near = near(error, self.mesh, &config_members(self.checkpoint));
        let near = near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
        self.file.refusal(mark(&self.file.text, at, error), target, format!("{error}{near}"))
    }

    pub(super) fn global(&self, name: &str) -> Result<ExprValue, EvalError> {
        if let Some(known) = self.known.borrow().get(name) {
            return known
                .clone()
                .unwrap_or_else(|| Err(EvalError::new(format!("{name:?} is defined by itself"), name)));
        }
        let inverse = self.inverse.and_then(|_| self.file.inverse.get(name));
        let definition = inverse.or_else(|| self.file.params.get(name)).or_else(|| self.file.vars.get(name));
        let Some(definition) = definition else { return Err(EvalError::no_name(name)) };
        let value = if let Some(value) = self.set.get(name) {
            Ok(value.clone())
        } else {
            self.known.borrow_mut().insert(name.to_owned(), None);
            let value = definition.it.eval(&Local { scope: self, bound: &[] });
            value.map_err(|error| error.within(name))
        };
        self.known.borrow_mut().insert(name.to_owned(), Some(value.clone()));
        value
    }

    /// The tensor of a name, or of the first alias of the name that the repository has.
    pub(super) fn find(&self, name: &str) -> Option<TensorId> {
        let in_one = |checkpoint: &Checkpoint| self.spellings(name).find_map(|name| checkpoint.find(&name));
        in_one(self.checkpoint).or_else(|| self.stored.and_then(in_one))
    }

    /// The names that the checkpoint may have for one in the rules: that under which it stores a leaf, or the name and its aliases.
    fn spellings(&self, name: &str) -> impl Iterator<Item = String> {
        let first = self.inverse.map_or_else(|| name.to_owned(), |inverse| inverse.names.of(name));
        let aliases = self.file.alias.iter().filter(|_| self.inverse.is_none());
        let others = aliases.flat_map(move |Alias { name: prefix, on_disk }| {
            let rest = name.strip_prefix(prefix.as_str());
            on_disk.iter().filter_map(move |other| rest.map(|rest| format!("{other}{rest}")))
        });
        std::iter::once(first).chain(others)
    }

    pub(super) fn count(&self, pattern: &str) -> u64 {
        let one = |pattern: String| -> u64 {
            let Some((before, after)) = pattern.split_once('*') else { return 0 };
            let numbers = self.checkpoint.table().with_prefix(before).filter_map(|id| {
                let middle = self.checkpoint.tensor(id).name.strip_prefix(before)?.strip_suffix(after)?;
                let digits = !middle.is_empty() && middle.bytes().all(|byte| byte.is_ascii_digit());
                if digits { middle.parse::<u64>().ok()?.checked_add(1) } else { None }
            });
            numbers.max().unwrap_or(0)
        };
        self.spellings(pattern).map(one).find(|count| *count > 0).unwrap_or(0)
    }
}

/// A scope with the values of loops and sources.
pub(super) struct Local<'a> {
    pub(super) scope: &'a Scope<'a>,
    pub(super) bound: &'a [(Arc<str>, ExprValue)],
}

impl NameScope for Local<'_> {
    fn name(&self, name: &str) -> Result<ExprValue, EvalError> {
        let bound = self.bound.iter().rev().find(|(bound, _)| **bound == *name);
        bound.map_or_else(|| self.scope.global(name), |(_, value)| Ok(value.clone()))
    }

    fn config(&self, path: &[String]) -> Option<ExprValue> {
        config_value(self.scope.checkpoint, path)
    }

    fn mesh(&self, axis: &str) -> Option<u64> {
        Some(self.scope.mesh.axes()[self.scope.mesh.find(axis)?].size)
    }

    fn shape(&self, tensor: &str) -> Option<Vec<u64>> {
        self.scope.find(tensor).map(|id| self.scope.checkpoint.tensor(id).shape.to_vec())
    }

    fn count(&self, pattern: &str) -> u64 {
        self.scope.count(pattern)
    }

    fn given(&self, parameter: &str) -> bool {
        self.scope.set.contains_key(parameter)
    }

    fn inverts(&self) -> bool {
        self.scope.inverse.is_some()
    }
}
