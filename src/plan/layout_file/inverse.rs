//! The inverse of a layout: its rules resolved against a checkpoint that has the leaves.
//!
//! A rule gives the view of a leaf over tensors of the repository. Here these tensors do not exist: they are *targets*,
//! whose names and shapes the rule gives too. Variables that ask the repository have another definition in the file's
//! table `[inverse]`, where `exists`, `shape` and `count` ask about leaves. Products and sums have the constants that
//! undo them. The views of leaves are then inverted by [`super::super::inverse`].

use std::{cell::RefCell, collections::BTreeMap};

use ckfs_checkpoint::Checkpoint;

use super::{
    super::{mesh::Mesh, problem::Problem, values::Values},
    Allowed, LayoutFile, Resolved,
    scope::Scope,
    targets::{Inverse, StoredNames, Target, Targets},
};

impl LayoutFile {
    /// The leaves that a checkpoint of this layout has, as views over targets, and the targets.
    ///
    /// # Errors
    /// Everything wrong, at once: absent members of the configuration, rules without an inverse, unknown parameters.
    pub(crate) fn resolve_inverse(
        &self,
        checkpoint: &Checkpoint,
        names: &StoredNames,
        mesh: &Mesh,
        set: &BTreeMap<String, String>,
    ) -> Result<(Resolved, Vec<Target>), Vec<Problem>> {
        let inverse = Inverse { names, targets: RefCell::new(Targets::default()) };
        let scope = Scope::new(self, checkpoint, mesh, set, Some(&inverse));
        let values = Values::new(checkpoint, super::super::values::ValueRequest::default(), &[], None);
        let resolved = self.run(&scope, &values, Allowed::default())?;
        drop(scope);
        Ok((resolved, inverse.targets.into_inner().into_list()))
    }
}
