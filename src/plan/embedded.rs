//! The layouts in the program, as the plan uses them. Each is a set of layout files, one per model family.

use std::{collections::BTreeMap, ops::Deref, sync::Arc};

use ckfs_checkpoint::Checkpoint;
use ckfs_config::did_you_mean;
use ckfs_layouts::{EmbeddedLayout, embedded_layouts};
use parking_lot::Mutex;

use super::{
    layout_file::LayoutFile,
    member::model_types,
    problem::{PlanError, Problem},
};

/// A layout in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedded(pub(super) &'static EmbeddedLayout);

impl Deref for Embedded {
    type Target = EmbeddedLayout;

    fn deref(&self) -> &EmbeddedLayout {
        self.0
    }
}

/// Name of the parameter that chooses the file.
pub(super) const FAMILY: &str = "family";

/// The files that were asked for, by label: each is read once, also where each step of a run is planned.
static FILES: Mutex<BTreeMap<&str, Arc<LayoutFile>>> = Mutex::new(BTreeMap::new());

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
    /// # Panics
    /// Never: a test reads all files.
    pub fn family(self, name: &str) -> Option<Arc<LayoutFile>> {
        let (label, text) =
            self.0.files.iter().find(|(label, _)| *label == name || label.rsplit('/').next() == Some(name))?;
        let read = || {
            let file = LayoutFile::parse(&format!("{label}.toml"), text);
            Arc::new(file.expect("the file is in the program, and a test reads it").embedded())
        };
        Some(Arc::clone(FILES.lock().entry(*label).or_insert_with(read)))
    }

    /// The file for the model that `config.json` names, if there is one.
    pub(super) fn file_of(self, checkpoint: &Checkpoint) -> Option<Arc<LayoutFile>> {
        let is_of = |file: &LayoutFile, wanted: &str| file.model_types.iter().any(|known| known == wanted);
        let files = || self.families().filter_map(|label| self.family(label));
        model_types(checkpoint).find_map(|wanted| files().find(|file| is_of(file, wanted)))
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
            return self.family(&name).ok_or_else(|| problem(unknown()).into());
        }
        let types: Vec<&str> = model_types(checkpoint).collect();
        if let Some(file) = self.file_of(checkpoint) {
            return Ok(file);
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
                let file = embedded.family(label).unwrap();
                assert_eq!(file.name, label);
                // The layouts for FSDP2 cut axis 0 of each tensor; the others name their axes.
                assert_eq!(file.logical, !matches!(embedded.name.as_str(), "torchtitan" | "transformers"));
                for model_type in &file.model_types {
                    assert!(seen.insert(model_type.clone()), "{model_type} is claimed twice");
                }
            }
        }
    }
}
