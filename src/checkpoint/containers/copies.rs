//! Tensors of which several files hold copies, tensors that the index does not name, and variants of whole sets: which of them
//! are the model's.
//!
//! An index gives each name to one file. Engines read every tensor of every file that the index names, in the order of the files'
//! names, so that the last copy stays. Where both mean the same copy, it is taken. Else the user decides.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use ckfs_source::{Duplicates, FileId};
use rayon::slice::ParallelSliceMut;

use super::super::{
    index::Index,
    problem::{Expected, Problem, Problems},
    weight_name::{WeightName, is_number},
};

/// A tensor of a file.
pub(crate) type Row<'a> = (&'a str, FileId);

/// What is left out of the files.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    /// Tensors that are no part of the model, by file.
    dropped: HashMap<FileId, HashSet<String>>,
    /// Files that are variants of others, none of whose tensors are.
    pub(crate) variants: BTreeSet<FileId>,
    /// Names whose copy is another than that of the index.
    pub(crate) decided: HashSet<String>,
    /// What the user should know.
    pub(crate) warnings: Vec<String>,
}

impl Copies {
    /// Whether a tensor of a file is the model's.
    pub(crate) fn keeps(&self, file: FileId, name: &str) -> bool {
        !self.variants.contains(&file) && self.dropped.get(&file).is_none_or(|names| !names.contains(name))
    }

    /// The files that hold more than is shown.
    pub(crate) fn files(&self) -> impl Iterator<Item = FileId> {
        self.dropped.keys().copied()
    }

    fn drop(&mut self, file: FileId, name: &str) {
        self.dropped.entry(file).or_default().insert(name.to_owned());
    }
}

/// Chooses among copies, and without an index among variants. Rows are of the weight files, whose ids are in the natural order of
/// their paths.
pub(crate) fn choose<'p>(
    mut rows: Vec<Row<'_>>,
    path: &dyn Fn(FileId) -> &'p str,
    index: Option<&Index<'_>>,
    rule: Option<Duplicates>,
    problems: &mut Problems,
) -> Copies {
    let mut copies = Copies::default();
    if index.is_none() {
        copies.variants = variants(&rows, path);
        rows.retain(|(_, file)| !copies.variants.contains(file));
    }
    rows.par_sort_unstable();
    let named: HashMap<&str, &str> = index.map_or_else(HashMap::new, |index| {
        index.tensors.iter().map(|(name, file)| (&**name, index.files[*file as usize].as_str())).collect()
    });
    let mut of_index = Expected::default();
    let mut of_last = Expected::default();
    for found in rows.chunk_by(|left, right| left.0 == right.0) {
        let [(name, first), .., (_, last)] = found else { continue };
        let indexed = named.get(name).and_then(|file| found.iter().find(|(_, id)| path(*id) == *file));
        let indexed = indexed.map(|(_, id)| *id);
        let kept = match (rule, indexed) {
            (Some(Duplicates::Refuse), _) => None,
            (Some(Duplicates::Last), _) => Some(*last),
            (Some(Duplicates::Index), indexed) => indexed,
            (None, indexed) => indexed.filter(|id| id == last),
        };
        if let Some(kept) = kept {
            if indexed.is_some_and(|id| id == kept) { of_index.add(name) } else { of_last.add(name) }
        } else {
            let (tensor, first, second) = ((*name).to_owned(), path(*first).to_owned(), path(*last).to_owned());
            problems.push(Problem::Duplicate { tensor, first, second });
        }
        let kept = kept.unwrap_or(*last);
        if indexed.is_none_or(|id| id != kept) {
            copies.decided.insert((*name).to_owned());
        }
        for (_, file) in found.iter().filter(|(_, file)| *file != kept) {
            copies.drop(*file, name);
        }
    }
    let by_index = "several files have a copy; taken from the file that the index names (--duplicates)";
    let by_order = "several files have a copy; taken from the last of the files (--duplicates last)";
    copies.warnings.extend(of_index.warning(by_index).into_iter().chain(of_last.warning(by_order)));
    if index.is_some() {
        leave_out_unnamed(&rows, &named, rule, problems, &mut copies);
    }
    copies
}

/// Leaves out tensors that the index does not name, if its model has neither such a layer nor such a kind of tensor. The others
/// stay, and are refused later: the index may be incomplete.
fn leave_out_unnamed(
    rows: &[Row<'_>],
    named: &HashMap<&str, &str>,
    rule: Option<Duplicates>,
    problems: &Problems,
    copies: &mut Copies,
) {
    let unnamed = rows.iter().filter(|(name, _)| !named.contains_key(name) && !problems.allow_unmapped.accepts(name));
    let unnamed: Vec<&Row<'_>> = unnamed.collect();
    if unnamed.is_empty() || rule == Some(Duplicates::Refuse) {
        return;
    }
    let kinds: HashSet<String> = named.keys().map(|name| kind(name)).collect();
    let layers: HashSet<&str> = named.keys().filter_map(|name| layer(name)).collect();
    let is_foreign = |name: &str| layer(name).is_some_and(|own| !layers.contains(own)) && !kinds.contains(&kind(name));
    let mut left_out = Expected::default();
    for (name, file) in unnamed {
        if rule == Some(Duplicates::Index) || is_foreign(name) {
            left_out.add(name);
            copies.drop(*file, name);
        }
    }
    let what = "not named by the index, left out (--allow-unmapped shows what the index does not name)";
    copies.warnings.extend(left_out.warning(what));
}

/// The beginning of a name with its first number: `model.layers.7`.
fn layer(name: &str) -> Option<&str> {
    let mut end = 0;
    for word in name.split('.') {
        end += word.len();
        if is_number(word) {
            return Some(&name[..end]);
        }
        end += 1;
    }
    None
}

/// A name with its numbers replaced: that of all layers and experts.
fn kind(name: &str) -> String {
    let words = name.split('.').map(|word| if is_number(word) { "*" } else { word });
    words.collect::<Vec<_>>().join(".")
}

/// The files that are variants of other files which hold all of their tensors: `model.fp16.safetensors` beside
/// `model.safetensors`. Engines take a variant only on request.
fn variants<'p>(rows: &[Row<'_>], path: &dyn Fn(FileId) -> &'p str) -> BTreeSet<FileId> {
    /// The files of each variant.
    type Variants<'a> = BTreeMap<Option<&'a str>, BTreeSet<FileId>>;
    let mut sets: BTreeMap<(&str, &str), Variants<'_>> = BTreeMap::new();
    let files: BTreeSet<FileId> = rows.iter().map(|(_, file)| *file).collect();
    for file in files {
        let Some(WeightName { stem, variant, ending, .. }) = WeightName::of(path(file)) else { continue };
        sets.entry((stem, ending)).or_default().entry(variant).or_default().insert(file);
    }
    let mut found = BTreeSet::new();
    for mut variants in sets.into_values().filter(|variants| variants.len() > 1) {
        let Some(plain) = variants.remove(&None) else { continue };
        let names_of = |files: &BTreeSet<FileId>| -> HashSet<&str> {
            rows.iter().filter(|(_, file)| files.contains(file)).map(|(name, _)| *name).collect()
        };
        let own = names_of(&plain);
        found.extend(variants.into_values().filter(|files| names_of(files).is_subset(&own)).flatten());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATHS: [&str; 3] = ["model-1.safetensors", "model-2.safetensors", "model.fp16.safetensors"];

    fn path(id: FileId) -> &'static str {
        PATHS[id.index()]
    }

    /// The file whose copy of `a` is kept, or the number of problems.
    fn kept(index: Option<&str>, rule: Option<Duplicates>) -> Result<usize, usize> {
        let text = index.map(|file| format!(r#"{{"weight_map": {{"a": "{file}"}}}}"#));
        let index = text.as_ref().map(|text| Index::parse(text.as_bytes()).unwrap());
        let mut problems = Problems::default();
        let rows = vec![("a", FileId(1)), ("a", FileId(0))];
        let copies = choose(rows, &path, index.as_ref(), rule, &mut problems);
        if !problems.is_empty() {
            return Err(problems.count());
        }
        let kept: Vec<usize> = (0..2).filter(|id| copies.keeps(FileId(*id), "a")).map(|id| id as usize).collect();
        assert_eq!(kept.len(), 1);
        Ok(kept[0])
    }

    #[test]
    fn the_copy_is_that_of_index_and_engines_or_the_users_choice() {
        let (first, last) = (Some(PATHS[0]), Some(PATHS[1]));
        assert_eq!(kept(last, None), Ok(1));
        assert_eq!(kept(first, None), Err(1), "engines take the last copy");
        assert_eq!(kept(None, None), Err(1));
        for (rule, expected) in [
            (Duplicates::Index, [Ok(0), Ok(1), Err(1)]),
            (Duplicates::Last, [Ok(1), Ok(1), Ok(1)]),
            (Duplicates::Refuse, [Err(1), Err(1), Err(1)]),
        ] {
            assert_eq!([first, last, None].map(|index| kept(index, Some(rule))), expected, "{rule:?}");
        }
    }

    #[test]
    fn what_the_index_does_not_name_is_left_out_if_it_cannot_be_a_part() {
        let text = br#"{"weight_map": {"layers.0.a": "model-1.safetensors"}}"#;
        let index = Index::parse(text).unwrap();
        let rows = vec![
            ("layers.0.a", FileId(0)),
            ("layers.1.a", FileId(0)),
            ("layers.1.junk", FileId(0)),
            ("junk", FileId(0)),
        ];
        let copies = choose(rows, &path, Some(&index), None, &mut Problems::default());
        let kept: Vec<bool> =
            ["layers.0.a", "layers.1.a", "layers.1.junk", "junk"].map(|name| copies.keeps(FileId(0), name)).into();
        assert_eq!(kept, [true, true, false, true]);
        assert_eq!(copies.warnings.len(), 1);
        assert_eq!(copies.files().collect::<Vec<_>>(), [FileId(0)]);
    }

    #[test]
    fn a_variant_is_left_out_beside_all_of_its_tensors() {
        let names = ["model.safetensors", "model.fp16.safetensors", "model.part.safetensors"];
        let path = |id: FileId| names[id.index()];
        let rows = [("a", FileId(0)), ("b", FileId(0)), ("a", FileId(1)), ("c", FileId(2))];
        assert_eq!(variants(&rows, &path), BTreeSet::from([FileId(1)]));
    }
}
