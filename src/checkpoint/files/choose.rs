//! The choice of a directory's weight files: those that the index names, or else those that their names indicate.

use std::collections::{BTreeMap, BTreeSet};

use ckfs_host::RelativePath;

use super::super::{
    file::{FileRole, IgnoreReason},
    folder::Folder,
    foreign,
    index::Index,
    listing::Listed,
    problem::{CheckpointError, Expected, Problem, Problems, list_or_none, shortened},
    weight_name::{WeightName, of_any_rank, variant_of_index},
};
pub(crate) use super::{
    listing::{CONFIG, quoted, warn_of_weights},
    weight_name::{INDEX_SUFFIX, TORCH_INDEX_SUFFIX, at_top, is_safetensors},
};

pub(crate) fn is_second_copy(path: &str) -> bool {
    path.starts_with("consolidated")
}

/// The files that an index describes: how its name ends, its usual name, and the names of the files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Indexed {
    pub(crate) suffix: &'static str,
    pub(crate) usual: &'static str,
    pub(crate) is_weights: fn(&str) -> bool,
}

/// The flags that choose one of these variants; `None` if there is none.
pub(crate) fn variant_flags(variants: BTreeSet<&str>) -> Option<String> {
    let flags: Vec<String> = variants.into_iter().map(|variant| format!("--variant {variant}")).collect();
    (!flags.is_empty()).then(|| flags.join(" or "))
}

/// Finds unreadable files that decide the content of the repository: weights, an index or the configuration.
pub(crate) fn find_unreadable(files: &[Listed], problems: &mut Problems) {
    let indexed = files.iter().any(|file| at_top(&file.path) && file.path.ends_with(INDEX_SUFFIX));
    for file in files.iter().filter(|file| at_top(&file.path)) {
        let FileRole::Ignored(reason) = file.role else { continue };
        // Files left out with a warning count as absent.
        if reason == IgnoreReason::LeavesRepository {
            continue;
        }
        let name = file.path.as_str();
        // An index names the weights that it needs.
        let weights = is_safetensors(name) && !is_second_copy(name) && !indexed;
        if weights || name == CONFIG || (name.ends_with(INDEX_SUFFIX) && !is_second_copy(name)) {
            problems.of_file(name, format_args!("cannot be read as a file: {reason}"));
        }
    }
}

/// The file that transformers prefers to an index.
pub(crate) const SINGLE: &str = "model.safetensors";

/// The role of unused safetensors. Those of a subdirectory are another model's, such as a layer behind a text encoder, and belong to
/// the repository as any other file does. The others are ignored, and `otherwise` is the reason if their path does not give one.
fn beside(path: &str, otherwise: IgnoreReason) -> FileRole {
    if !at_top(path) {
        FileRole::Other
    } else if is_second_copy(path) {
        FileRole::Ignored(IgnoreReason::SecondCopy)
    } else {
        FileRole::Ignored(otherwise)
    }
}

/// What a weight file shares with the others of its set: the stem and the variant.
fn variant_key(path: &str) -> Option<(&str, Option<&str>)> {
    WeightName::of(path).map(|name| (name.stem, name.variant))
}

/// Stem and total of a whole numbered set that an index does not name.
fn other_set(index: &Index<'_>, files: &[Listed]) -> Option<(String, String)> {
    let named: BTreeSet<&str> = index.files.iter().map(String::as_str).collect();
    let mut sets: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for file in files.iter().filter(|file| file.role == FileRole::Other && !named.contains(file.path.as_str())) {
        if let Some(WeightName { stem, variant: None, number: Some((_, total)), .. }) = WeightName::of(&file.path) {
            *sets.entry((stem, total)).or_default() += 1;
        }
    }
    let ((stem, total), _) = sets.into_iter().find(|((_, total), found)| total.parse() == Ok(*found))?;
    Some((stem.to_owned(), total.to_owned()))
}

impl Folder {
    /// The index of the variant that is requested, or else the usual one, or the only other one. The index of a variant counts where there are no
    /// files of the same name without one.
    pub(crate) fn choose_index(&self, of: Indexed) -> Result<Option<String>, CheckpointError> {
        let free = self.files.iter().filter(|file| file.role == FileRole::Other && at_top(&file.path));
        let top = || free.clone().map(|file| &*file.path);
        let mut indexes: Vec<(&str, Option<&str>)> =
            top().filter_map(|path| Some((path, variant_of_index(path, of.suffix)?))).collect();
        if let Some(variant) = self.variant.as_deref() {
            indexes.retain(|(_, own)| *own == Some(variant));
        } else if indexes.iter().any(|(path, _)| *path == of.usual) {
            return Ok(Some(of.usual.to_owned()));
        } else {
            let weights = || top().filter(|path| (of.is_weights)(path) && !is_second_copy(path));
            if weights().next().is_some() || indexes.len() > 1 {
                // The index of a second copy does not describe the first copy.
                indexes.retain(|(path, _)| !is_second_copy(path));
            }
            let is_plain = |index: &str| {
                let stem = index.split_once('.').map_or(index, |(stem, _)| stem);
                weights().filter_map(WeightName::of).any(|name| name.variant.is_none() && name.stem == stem)
            };
            if indexes.iter().any(|(_, own)| own.is_none()) {
                indexes.retain(|(_, own)| own.is_none());
            } else {
                indexes.retain(|(path, _)| !is_plain(path));
            }
        }
        match indexes[..] {
            [] => Ok(None),
            [(only, _)] => Ok(Some(only.to_owned())),
            _ => {
                let variants: BTreeSet<&str> = indexes.iter().filter_map(|(_, variant)| *variant).collect();
                let advice = variant_flags(variants).map_or_else(String::new, |flags| format!("; choose with {flags}"));
                let (root, usual) = (self.located.path.display(), of.usual);
                let indexes = indexes.into_iter().map(|(path, _)| path).collect::<Vec<_>>().join(", ");
                Err(CheckpointError::Refused(format!("{root}: several indexes and no {usual}: {indexes}{advice}")))
            }
        }
    }

    /// Leaves out the weights of other variants than the one that is requested, if one is.
    ///
    /// # Errors
    /// There are none of this variant; the error lists those that there are.
    pub(crate) fn choose_variant(&mut self, is_weights: fn(&str) -> bool) -> Result<(), CheckpointError> {
        let Some(variant) = &self.variant else { return Ok(()) };
        let usable = |file: &Listed| file.role == FileRole::Other && at_top(&file.path) && is_weights(&file.path);
        let variant_of = |file: &Listed| WeightName::of(&file.path)?.variant.map(str::to_owned);
        let found: BTreeSet<String> = self.files.iter().filter(|file| usable(file)).filter_map(variant_of).collect();
        if !found.contains(variant) {
            let (root, found) = (self.located.path.display(), list_or_none(&found.into_iter().collect::<Vec<_>>()));
            let message = format!("{root}: no weights of the variant {variant:?}; there are: {found}");
            return Err(CheckpointError::Refused(message));
        }
        for file in self.files.iter_mut().filter(|file| usable(file)) {
            if variant_of(file).as_ref() != Some(variant) {
                file.role = FileRole::Ignored(IgnoreReason::OtherVariant);
            }
        }
        Ok(())
    }

    /// Chooses `model.safetensors` if an index names other files, as transformers does, and warns. The files of the index
    /// stay in the repository as other files. An index that is refused decides nothing. Returns whether it did.
    pub(crate) fn choose_single(&mut self, name: &str, index: &Index<'_>) -> bool {
        let files = &mut self.files;
        let is_there = |file: &Listed| file.path == SINGLE && file.role == FileRole::Other;
        let named: BTreeSet<&str> = index.files.iter().map(String::as_str).filter(|path| *path != SINGLE).collect();
        let usable = |path: &&str| {
            let ignored = |file: &Listed| file.path == **path && file.role != FileRole::Other;
            RelativePath::parse(path).is_ok() && is_safetensors(path) && !files.iter().any(ignored)
        };
        if named.is_empty() || index.tensors.is_empty() || !files.iter().any(is_there) || !named.iter().all(usable) {
            return false;
        }
        for file in files.iter_mut().filter(|file| file.role == FileRole::Other && is_safetensors(&file.path)) {
            if file.path == SINGLE {
                file.role = FileRole::Weights;
            } else if !named.contains(file.path.as_str()) {
                file.role = beside(&file.path, IgnoreReason::OtherSet);
            }
        }
        let count = named.len();
        self.warnings.push(format!(
        "{SINGLE} and {name} are both there: tensors come from {SINGLE}, as in transformers; hf/ keeps the {count} files that \
         the index names as they are; remove what is not meant"
    ));
        true
    }

    /// With an index, exactly the files that it names are the weights. `is_weights` knows others that could be, by their names.
    pub(crate) fn choose_indexed(&mut self, name: &str, index: &Index<'_>, is_weights: fn(&str) -> bool) {
        let Self { files, problems, .. } = self;
        let mut expected = vec![Expected::default(); index.files.len()];
        for (tensor, file) in &index.tensors {
            expected[*file as usize].add(tensor);
        }
        if expected.is_empty() {
            problems.of_file(name, "names no tensor");
        }
        let other = other_set(index, files);
        let mut missing_files: Vec<String> = Vec::new();
        for (number, (path, tensors)) in index.files.iter().zip(expected).enumerate() {
            if let Err(flaw) = RelativePath::parse(path) {
                let what = format!("names {path:?} for {tensors}, which is not a path inside the repository: {flaw}");
                problems.of_file(name, what);
                continue;
            }
            let missing = |found: String| {
                let what = format!("{tensors}, which is {found}");
                Problem::MissingFile { index: name.to_owned(), file: path.clone(), what }
            };
            let of_file =
                index.tensors.iter().filter(|(_, file)| *file as usize == number).map(|(tensor, _)| &**tensor);
            match files.iter_mut().find(|file| file.path == *path) {
                None if problems.accept_missing(of_file) => {}
                None if other.is_some() => missing_files.push(path.clone()),
                None => problems.push(missing("not there".into())),
                Some(Listed { role: FileRole::Ignored(reason), .. }) => problems.push(missing(format!("a {reason}"))),
                Some(file) => file.role = FileRole::Weights,
            }
        }
        if let (Some((stem, total)), [first, ..]) = (other, &missing_files[..]) {
            let missing = missing_files.len();
            let what = format!(
                "names {missing} files that are not there (the first is {first:?}), and the whole set {stem}-*-of-{total}.safetensors is: the \
             index is that of another copy; remove it, or put its files in place of these"
            );
            problems.of_file(name, what);
        }
        let variants: BTreeSet<_> = index.files.iter().filter_map(|path| variant_key(path)).collect();
        let stems: BTreeSet<&str> = variants.iter().map(|(stem, _)| *stem).collect();
        let is_variant = |path: &str| {
            variant_key(path).is_some_and(|key| key.1.is_some() && stems.contains(key.0) && !variants.contains(&key))
        };
        let ranks: BTreeMap<String, &str> =
            index.files.iter().filter_map(|path| Some((of_any_rank(path)?, &**path))).collect();
        let mut parts: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for file in files.iter_mut().filter(|file| file.role == FileRole::Other && is_weights(&file.path)) {
            if let Some(named) = of_any_rank(&file.path).and_then(|set| ranks.get(&set)) {
                parts.entry(named).or_default().push(file.path.clone());
            }
            let reason = if is_variant(&file.path) { IgnoreReason::OtherVariant } else { IgnoreReason::NotInIndex };
            file.role = beside(&file.path, reason);
        }
        for (named, others) in parts {
            let others = shortened(&others);
            let what = format!(
                "names {named}, and not {others}: by their names each holds the part of one rank, and the part would be shown as the whole \
             tensor; join the parts with a program that knows how they were cut, or put these files elsewhere if the named one is whole"
            );
            problems.of_file(name, what);
        }
    }

    /// Without an index: the files of a variant that is requested, `model.safetensors` alone, or else `model-*`, or else all but second copies, or else these.
    pub(crate) fn choose_unindexed(&mut self) -> Result<(), CheckpointError> {
        let files = &mut self.files;
        let usable = |file: &Listed| file.role == FileRole::Other && is_safetensors(&file.path);
        let top: Vec<String> =
            files.iter().filter(|file| usable(file) && at_top(&file.path)).map(|file| file.path.clone()).collect();
        let tests: [fn(&str) -> bool; 4] = [
            |path| path == "model.safetensors",
            |path| path.starts_with("model-"),
            |path| !is_second_copy(path),
            |_| true,
        ];
        let Some(chosen) = tests.into_iter().find(|test| top.iter().any(|path| test(path))) else {
            let subdirectories = files.iter().filter(|file| usable(file)).filter_map(|file| file.path.rsplit_once('/'));
            let subdirectories: BTreeSet<String> = subdirectories.map(|(dir, _)| dir.to_owned()).collect();
            let subdirectories = subdirectories.into_iter().collect();
            return Err(CheckpointError::NoWeights {
                root: self.located.path.clone(),
                subdirectories,
                found: foreign::of_files(files),
            });
        };
        for file in files.iter_mut().filter(|file| usable(file)) {
            let is_variant = WeightName::of(&file.path).is_some_and(|name| name.variant.is_some());
            file.role = if at_top(&file.path) && chosen(&file.path) {
                FileRole::Weights
            } else {
                beside(&file.path, if is_variant { IgnoreReason::OtherVariant } else { IgnoreReason::OtherSet })
            };
        }
        Ok(())
    }
}
