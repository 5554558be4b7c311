//! The choice of a directory's weight files: those that the index names, or else those that their names indicate.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::super::{
    file::{FileRole, IgnoreReason},
    foreign,
    index::{Index, stays_inside},
    listing::{Listed, Opening},
    problem::{CheckpointError, Expected, Problem, Problems},
};

/// The configuration of a model.
pub(in crate::checkpoint) const CONFIG: &str = "config.json";

/// How the names of indexes end.
pub(in crate::checkpoint) const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// How the names of indexes of files of `torch.save` end.
pub(in crate::checkpoint) const TORCH_INDEX_SUFFIX: &str = ".bin.index.json";

/// A path for a message. Characters that control a terminal are escaped.
pub(in crate::checkpoint) fn quoted(path: &Path) -> String {
    format!("{:?}", path.to_string_lossy())
}

/// The remedy for weights that a link takes from outside the repository.
pub(in crate::checkpoint) fn warn_of_weights(path: &str, target: &Path) -> String {
    format!(
        "{path:?}: symbolic link to {}, outside the repository: its tensors are shown to those that may read the target; \
         --follow-symlinks accepts such links",
        quoted(target)
    )
}

/// Leaves out files that links take from outside the repository, except weights. The content of weights distinguishes
/// them from other files.
pub(in crate::checkpoint) fn leave_out_links(
    files: &mut [Listed],
    warnings: &mut Vec<String>,
    left_out: impl Fn(&Listed) -> bool,
) {
    for file in files {
        let Some(target) = file.outside().map(Path::to_owned).filter(|_| left_out(file)) else { continue };
        let decides = file.path == CONFIG || (at_top(&file.path) && file.path.ends_with(INDEX_SUFFIX));
        let as_if = if decides { ", as if it were not there" } else { "" };
        warnings.push(format!(
            "{:?}: left out{as_if}: symbolic link to {}, outside the repository; --follow-symlinks reads it",
            file.path,
            quoted(&target)
        ));
        file.role = FileRole::Ignored(IgnoreReason::LeavesRepository);
        file.state = Opening::Nothing;
        file.size_bytes = 0;
    }
}

pub(in crate::checkpoint) fn is_safetensors(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "safetensors")
}

pub(in crate::checkpoint) fn at_top(path: &str) -> bool {
    !path.contains('/')
}

pub(in crate::checkpoint) fn is_second_copy(path: &str) -> bool {
    path.starts_with("consolidated")
}

/// The index: `model.safetensors.index.json`, or the only other one.
pub(in crate::checkpoint) fn choose_index(root: &Path, files: &[Listed]) -> Result<Option<String>, CheckpointError> {
    const USUAL: &str = "model.safetensors.index.json";
    let mut indexes: Vec<&str> = files
        .iter()
        .filter(|file| file.role == FileRole::Other && at_top(&file.path))
        .map(|file| file.path.as_str())
        .filter(|path| path.ends_with(INDEX_SUFFIX))
        .collect();
    if indexes.contains(&USUAL) {
        return Ok(Some(USUAL.to_owned()));
    }
    let has_others = files.iter().any(|file| {
        at_top(&file.path) && is_safetensors(&file.path) && !is_second_copy(&file.path) && file.role == FileRole::Other
    });
    if has_others || indexes.len() > 1 {
        // The index of a second copy does not describe the first copy.
        indexes.retain(|path| !is_second_copy(path));
    }
    match indexes[..] {
        [] => Ok(None),
        [only] => Ok(Some(only.to_owned())),
        _ => Err(CheckpointError::SeveralIndexes {
            root: root.to_path_buf(),
            indexes: indexes.into_iter().map(str::to_owned).collect(),
        }),
    }
}

/// Finds unreadable files that decide the content of the repository: weights, an index or the configuration.
pub(in crate::checkpoint) fn find_unreadable(files: &[Listed], problems: &mut Problems) {
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
            problems.push(Problem::NoFile { file: name.to_owned(), found: reason });
        }
    }
}

/// The file that transformers prefers to an index.
pub(in crate::checkpoint) const SINGLE: &str = "model.safetensors";

/// Chooses `model.safetensors` if an index names other files, as transformers does, and warns. The files of the index
/// stay in the repository as other files. An index that is refused decides nothing.
pub(in crate::checkpoint) fn choose_single(name: &str, index: &Index<'_>, files: &mut [Listed]) -> Option<String> {
    let is_there = |file: &Listed| file.path == SINGLE && file.role == FileRole::Other;
    let named: BTreeSet<&str> = index.files.iter().map(String::as_str).filter(|path| *path != SINGLE).collect();
    let usable = |path: &&str| {
        let ignored = |file: &Listed| file.path == **path && file.role != FileRole::Other;
        stays_inside(path) && is_safetensors(path) && !files.iter().any(ignored)
    };
    if named.is_empty() || index.tensors.is_empty() || !files.iter().any(is_there) || !named.iter().all(usable) {
        return None;
    }
    for file in files.iter_mut().filter(|file| file.role == FileRole::Other && is_safetensors(&file.path)) {
        if file.path == SINGLE {
            file.role = FileRole::Weights;
        } else if !named.contains(file.path.as_str()) {
            file.role = FileRole::Ignored(beside(&file.path, IgnoreReason::OtherSet));
        }
    }
    let count = named.len();
    Some(format!(
        "{SINGLE} and {name} are both there: tensors come from {SINGLE}, as in transformers; hf/ keeps the {count} files that \
         the index names as they are; remove what is not meant"
    ))
}

/// The reason why unused safetensors are ignored. `otherwise` is the reason if their path does not give one.
pub(in crate::checkpoint) fn beside(path: &str, otherwise: IgnoreReason) -> IgnoreReason {
    if !at_top(path) {
        IgnoreReason::Subdirectory
    } else if is_second_copy(path) {
        IgnoreReason::SecondCopy
    } else {
        otherwise
    }
}

/// With an index, exactly the files that it names are the weights. `is_weights` knows others that could be, by their names.
pub(in crate::checkpoint) fn choose_indexed(
    name: &str,
    index: &Index<'_>,
    files: &mut [Listed],
    is_weights: &dyn Fn(&str) -> bool,
    problems: &mut Problems,
) {
    let mut expected = vec![Expected::default(); index.files.len()];
    for (tensor, file) in &index.tensors {
        expected[*file as usize].add(tensor);
    }
    if expected.is_empty() {
        problems.push(Problem::EmptyIndex { index: name.to_owned() });
    }
    let other = other_set(index, files);
    let mut missing_files: Vec<String> = Vec::new();
    for (number, (path, tensors)) in index.files.iter().zip(expected).enumerate() {
        if !stays_inside(path) {
            problems.push(Problem::OutsideRepository { index: name.to_owned(), path: path.clone(), tensors });
            continue;
        }
        let missing = |found: String| {
            let (index, file) = (name.to_owned(), path.clone());
            Problem::MissingFile { index, file, tensors, found }
        };
        let of_file = index.tensors.iter().filter(|(_, file)| *file as usize == number).map(|(tensor, _)| &**tensor);
        match files.iter_mut().find(|file| file.path == *path) {
            None if problems.accept_missing(of_file) => {}
            None if other.is_some() => missing_files.push(path.clone()),
            None => problems.push(missing("not there".into())),
            Some(Listed { role: FileRole::Ignored(reason), .. }) => problems.push(missing(format!("a {reason}"))),
            Some(file) => file.role = FileRole::Weights,
        }
    }
    if let (Some((stem, total)), [first, ..]) = (other, &missing_files[..]) {
        let (index, missing, first) = (name.to_owned(), missing_files.len(), first.clone());
        problems.push(Problem::IndexOfOtherSet { index, missing, first, stem, total });
    }
    for file in files.iter_mut().filter(|file| file.role == FileRole::Other && is_weights(&file.path)) {
        file.role = FileRole::Ignored(beside(&file.path, IgnoreReason::NotInIndex));
    }
}

/// Stem and total of a whole numbered set that an index does not name.
fn other_set(index: &Index<'_>, files: &[Listed]) -> Option<(String, String)> {
    let named: BTreeSet<&str> = index.files.iter().map(String::as_str).collect();
    let mut sets: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for file in files.iter().filter(|file| file.role == FileRole::Other && !named.contains(file.path.as_str())) {
        if let Some(set) = numbered(&file.path) {
            *sets.entry(set).or_default() += 1;
        }
    }
    let ((stem, total), _) = sets.into_iter().find(|((_, total), found)| total.parse() == Ok(*found))?;
    Some((stem.to_owned(), total.to_owned()))
}

/// Without an index: `model.safetensors` alone, or else `model-*`, or else all but second copies, or else these.
pub(in crate::checkpoint) fn choose_unindexed(
    root: &Path,
    files: &mut [Listed],
    problems: &mut Problems,
) -> Result<(), CheckpointError> {
    let usable = |file: &Listed| file.role == FileRole::Other && is_safetensors(&file.path);
    let top: Vec<String> =
        files.iter().filter(|file| usable(file) && at_top(&file.path)).map(|file| file.path.clone()).collect();
    let tests: [fn(&str) -> bool; 4] =
        [|path| path == "model.safetensors", |path| path.starts_with("model-"), |path| !is_second_copy(path), |_| true];
    let Some(chosen) = tests.into_iter().find(|test| top.iter().any(|path| test(path))) else {
        let subdirectories = files.iter().filter(|file| usable(file)).filter_map(|file| file.path.rsplit_once('/'));
        let subdirectories: BTreeSet<String> = subdirectories.map(|(dir, _)| dir.to_owned()).collect();
        let subdirectories = subdirectories.into_iter().collect();
        return Err(CheckpointError::NoWeights {
            root: root.to_path_buf(),
            subdirectories,
            found: foreign::of_files(files),
        });
    };
    let mut sets: BTreeMap<(String, String), u64> = BTreeMap::new();
    for file in files.iter_mut().filter(|file| usable(file)) {
        file.role = if !at_top(&file.path) {
            FileRole::Ignored(IgnoreReason::Subdirectory)
        } else if chosen(&file.path) {
            if let Some((stem, total)) = numbered(&file.path) {
                *sets.entry((stem.to_owned(), total.to_owned())).or_default() += 1;
            }
            FileRole::Weights
        } else if is_second_copy(&file.path) {
            FileRole::Ignored(IgnoreReason::SecondCopy)
        } else {
            FileRole::Ignored(IgnoreReason::OtherSet)
        };
    }
    for ((stem, total), found) in sets {
        // A total beyond 64 bits exceeds every possible number of files.
        let expected = total.parse().unwrap_or(u64::MAX);
        if found < expected {
            problems.push(Problem::IncompleteSet { stem, total, expected, found });
        }
    }
    Ok(())
}

/// Stem and total of `stem-00001-of-00003.safetensors`.
pub(in crate::checkpoint) fn numbered(path: &str) -> Option<(&str, &str)> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (left, total) = path.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = left.rsplit_once('-')?;
    (digits(number) && digits(total)).then_some((stem, total))
}

/// Order of names in which numbers count as numbers: `layers-2` before `layers-10`.
pub fn natural(left: &str, right: &str) -> Ordering {
    let (mut a, mut b) = (left.as_bytes(), right.as_bytes());
    while let (Some(x), Some(y)) = (a.first(), b.first()) {
        let order = if x.is_ascii_digit() && y.is_ascii_digit() {
            let number = |bytes: &[u8]| bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let ((na, rest_a), (nb, rest_b)) = (a.split_at(number(a)), b.split_at(number(b)));
            (a, b) = (rest_a, rest_b);
            let significant = |digits: &'_ [u8]| digits.iter().take_while(|digit| **digit == b'0').count();
            let (na, nb) = (&na[significant(na)..], &nb[significant(nb)..]);
            na.len().cmp(&nb.len()).then(na.cmp(nb))
        } else {
            (a, b) = (&a[1..], &b[1..]);
            x.cmp(y)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    a.len().cmp(&b.len()).then_with(|| left.cmp(right))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let mut names =
            ["layers-10", "layers-9", "layers-010", "layers", "m-00002-of-00010", "m-00001-of-00010", "layers-9b"];
        names.sort_by(|left, right| natural(left, right));
        assert_eq!(
            names,
            ["layers", "layers-9", "layers-9b", "layers-010", "layers-10", "m-00001-of-00010", "m-00002-of-00010"]
        );
    }

    #[test]
    fn numbered_files() {
        assert_eq!(numbered("model-00001-of-00003.safetensors"), Some(("model", "00003")));
        assert_eq!(numbered("a-b-1-of-2.safetensors"), Some(("a-b", "2")));
        for other in ["model.safetensors", "model-1.safetensors", "model-x-of-3.safetensors", "1-of-2.safetensors"] {
            assert_eq!(numbered(other), None);
        }
    }
}
