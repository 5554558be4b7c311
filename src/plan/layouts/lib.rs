//! The layouts and model families in the program, as data.
//!
//! A layout is a directory with a table `layout.toml` and a file of rules for each model family. The build finds them: a new
//! directory is a new layout, in messages and help, too. What the rules mean is the business of the layer of plans.

use std::{collections::BTreeMap, sync::LazyLock};

use serde::Deserialize;

include!(concat!(env!("OUT_DIR"), "/directories.rs"));

/// A layout in the program.
#[derive(Debug, PartialEq, Eq)]
pub struct EmbeddedLayout {
    /// Its name.
    pub name: String,
    /// Parameters that its name implies.
    pub params: BTreeMap<String, String>,
    /// Its families: name, with that of the directory before it, and text of the file.
    pub files: &'static [(&'static str, &'static str)],
    /// What holds for all names of its directory.
    pub traits: LayoutTraits,
}

/// What holds for a directory of layouts as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LayoutTraits {
    /// Whether a model without a file of its own has the names of transformers' modules, which need no rules.
    pub by_modules: bool,
    /// Leaves of which every checkpoint of this layout has one, if such a checkpoint can be made back to a repository.
    pub anchors: Vec<String>,
    /// Whether a requested dtype does not spare what the model's own code keeps in float32.
    pub casts_f32: bool,
    /// Whether its tensors are those of a loaded model, in float32 where the model's own code keeps them so.
    pub is_loaded: bool,
    /// Key of the dictionary that holds all tensors in formats of trees.
    pub tree_root: Option<String>,
    /// Why its tensors cannot be quantized, and what to do instead, if it is not that its rules make floats.
    pub not_quantized: Option<String>,
}

/// The file `layout.toml`.
#[derive(Debug, Deserialize)]
struct LayoutTable {
    /// The layouts, each with the parameters that its name implies.
    names: BTreeMap<String, BTreeMap<String, String>>,
    #[serde(flatten)]
    traits: LayoutTraits,
}

static LAYOUTS: LazyLock<Vec<EmbeddedLayout>> = LazyLock::new(|| {
    let mut found = Vec::new();
    for (table, files) in DIRECTORIES {
        let LayoutTable { names, traits } =
            toml::from_str(table).expect("the embedded table is well-formed, which a test shows");
        let layout = |(name, params)| EmbeddedLayout { name, params, files, traits: traits.clone() };
        found.extend(names.into_iter().map(layout));
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
});

/// All layouts, in the order of their names.
pub fn embedded_layouts() -> &'static [EmbeddedLayout] {
    &LAYOUTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_well_formed_and_names_are_distinct() {
        let names: Vec<&str> = embedded_layouts().iter().map(|layout| layout.name.as_str()).collect();
        let mut distinct = names.clone();
        distinct.dedup();
        assert!(names.len() >= DIRECTORIES.len() && names == distinct, "{names:?}");
        assert!(embedded_layouts().iter().all(|layout| !layout.files.is_empty()));
    }
}
