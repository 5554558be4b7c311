//! The layouts in the program, as the plan uses them. Each is a set of layout files, one per model family.

use std::{collections::BTreeMap, ops::Deref, sync::Arc};

use ckfs_checkpoint::Checkpoint;
use ckfs_config::did_you_mean;
use ckfs_layouts::{EmbeddedLayout, embedded_layouts};

use super::{
    layout_file::LayoutFile,
    member::model_types,
    problem::{PlanError, Problem},
};

/// A layout in the program.
#[derive(Clone, Copy, Debug)]
pub struct Embedded(pub(super) &'static EmbeddedLayout);

impl Deref for Embedded {
    type Target = EmbeddedLayout;

    fn deref(&self) -> &EmbeddedLayout {
        self.0
    }
}

impl PartialEq for Embedded {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Embedded {}

/// Name of the parameter that chooses the file.
pub(super) const FAMILY: &str = "family";

impl Embedded {
    /// The layout of that name.
    pub fn find(name: &str) -> Option<Self> {
        Self::all().find(|embedded| embedded.name == name)
    }

    /// All embedded layouts.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        embedded_layouts().iter().map(Self)
    }

    /// Names of the families that the layout supports.
    pub fn families(self) -> impl Iterator<Item = &'static str> {
        self.0.files.iter().map(|(name, _)| *name)
    }

    /// The layout's file for one family.
    ///
    /// # Errors
    /// The file's problems. This is always an error in this program.
    pub fn family(self, name: &str) -> Option<Result<LayoutFile, PlanError>> {
        let (label, text) =
            self.0.files.iter().find(|(label, _)| *label == name || label.rsplit('/').next() == Some(name))?;
        Some(LayoutFile::parse(&format!("{label}.toml"), text).map(LayoutFile::embedded))
    }

    /// The file for the model that `config.json` names, if there is one.
    fn file_of(self, checkpoint: &Checkpoint) -> Result<Option<LayoutFile>, PlanError> {
        for wanted in model_types(checkpoint) {
            for (label, _) in self.files {
                let Some(file) = self.family(label) else { continue };
                let file = file?;
                if file.model_types().iter().any(|known| known == wanted) {
                    return Ok(Some(file));
                }
            }
        }
        Ok(None)
    }

    /// Whether the layout has a file for the model that `config.json` names.
    ///
    /// # Errors
    /// A file's problems. This is always an error in this program.
    pub(super) fn has_file(self, checkpoint: &Checkpoint) -> Result<bool, PlanError> {
        Ok(self.file_of(checkpoint)?.is_some())
    }

    /// The file for a repository: that of the family that the user set, or of the model that `config.json` names. Takes
    /// the parameter `family` from `set` and adds those that the layout's own name implies.
    ///
    /// # Errors
    /// The supported families, if the repository is of none of them.
    pub(super) fn choose(
        self,
        checkpoint: &Checkpoint,
        set: &mut BTreeMap<String, String>,
    ) -> Result<Arc<LayoutFile>, PlanError> {
        for (name, value) in &self.params {
            set.entry(name.clone()).or_insert_with(|| value.clone());
        }
        let wanted = set.remove(FAMILY);
        let known = || self.families().collect::<Vec<_>>().join(", ");
        let problem = |reason: String| Problem::File { file: format!("layout {}", self.name), reason };
        if let Some(name) = wanted {
            let short = || self.files.iter().map(|(label, _)| label.rsplit('/').next().unwrap_or(label));
            let unknown = || {
                let near = did_you_mean("family", &name, short());
                near.unwrap_or_else(|| format!("no family {name:?}; known: {}", known()))
            };
            let file = self.family(&name).ok_or_else(|| problem(unknown()))?;
            return file.map(Arc::new);
        }
        let types: Vec<&str> = model_types(checkpoint).collect();
        if let Some(file) = self.file_of(checkpoint)? {
            return Ok(Arc::new(file));
        }
        let reason = if types.is_empty() {
            format!("config.json names no model_type; choose a family by the parameter family: {}", known())
        } else {
            format!(
                "no family for model_type {}; known, and to be set by the parameter family: {}",
                types.join(", "),
                known()
            )
        };
        Err(problem(reason).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_loads_and_no_model_type_is_claimed_twice() {
        for embedded in Embedded::all() {
            let mut seen = std::collections::BTreeSet::new();
            for label in embedded.families() {
                let file = embedded.family(label).unwrap().unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(file.name(), label);
                // The layouts for FSDP2 cut axis 0 of each tensor; the others name their axes.
                assert_eq!(file.shards_logically(), !matches!(embedded.name.as_str(), "torchtitan" | "transformers"));
                for model_type in file.model_types() {
                    assert!(seen.insert(model_type.clone()), "{model_type} is claimed twice");
                }
            }
        }
    }
}
