//! Why a repository cannot be opened: one error if its contents cannot be examined, or the list of all problems with
//! its contents.

use std::{
    collections::HashMap,
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use ckfs_source::{
    SourceError,
    remote::{RemoteError, url_schemes},
};
use ckfs_tensor::DType;

use super::{
    options::{Accepted, OpenOptions},
    printable::printable,
    weight_name::{WeightName, of_any_rank},
};

/// Most bytes of all files together. Sums of sizes derived from them then fit 64 bits.
pub(super) const BYTES_MAX: u64 = 1 << 58;

/// Most problems that are kept. The others are counted.
const PROBLEMS_MAX: usize = 1_000;

/// The tensors that a file should hold: the first of them and how many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// The first one.
    pub first: String,
    /// How many there are.
    pub count: usize,
}

impl Expected {
    /// Counts one more tensor.
    pub(super) fn add(&mut self, name: &str) {
        if self.count == 0 {
            name.clone_into(&mut self.first);
        }
        self.count += 1;
    }

    /// A warning about them, if there are any.
    pub(super) fn warning(&self, what: &str) -> Option<String> {
        (self.count > 0).then(|| format!("{self}: {what}"))
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            0 => formatter.write_str("no tensor"),
            1 => write!(formatter, "tensor {:?}", self.first),
            count => write!(formatter, "{count} tensors, the first of them {:?}", self.first),
        }
    }
}

/// Why a repository could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A remote service does not list the source.
    #[error("{0}")]
    Remote(RemoteError),
    /// Neither a path nor a name.
    #[error("{source_name}: no such file or directory, and not an org/name[@revision] either")]
    NotFound {
        /// The requested source.
        source_name: String,
    },
    /// A name that the cache does not have.
    #[error(
        "{source_name}: not found\n  directory {source_name}: no\n  cache {}: no{}{advice}",
        looked_in.display(),
        near.as_ref().map_or_else(String::new, |near| format!("; it has `{near}`"))
    )]
    NotInCache {
        /// The requested source.
        source_name: String,
        /// Where it would be.
        looked_in: PathBuf,
        /// The name in the cache that differs in the case of letters only.
        near: Option<String>,
        /// The Hub's reply or why no request was made, and what would fetch it: lines that begin with two spaces, or nothing.
        advice: String,
    },
    /// The directory of the hub's cache is unknown.
    #[error("{source_name}: no such directory, and no hub cache: neither HF_HOME nor HOME is set{advice}")]
    NoHome {
        /// The requested source.
        source_name: String,
        /// As in [`CheckpointError::NotInCache`].
        advice: String,
    },
    /// The cache has the repository, but not this revision.
    #[error("{found}{advice}")]
    NoRevision {
        /// What there is, in words.
        found: String,
        /// As in [`CheckpointError::NotInCache`].
        advice: String,
    },
    /// The directory cannot be listed.
    #[error("cannot list {}: {error}", root.display())]
    Listing {
        /// The directory.
        root: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// What is given as a run is no directory of steps.
    #[error(
        "{run}: expected the directory of a run, which holds a directory for each step (100, step-100, checkpoint-100, iter_0000100, global_step_100), found {found}"
    )]
    NoSteps {
        /// The source.
        run: String,
        /// What it is.
        found: String,
    },
    /// No safetensors in the directory.
    #[error("{}: no *.safetensors here{}{}", root.display(), elsewhere(subdirectories), advice(found.as_deref()))]
    NoWeights {
        /// The directory.
        root: PathBuf,
        /// Subdirectories with safetensors.
        subdirectories: Vec<String>,
        /// What the directory is, where that is known.
        found: Option<String>,
    },
    /// Several files of `torch.save`, none of them the usual one.
    #[error("{0}")]
    SeveralFiles(String),
    /// A source that is not clear, or not read.
    #[error("{0}")]
    Refused(String),
    /// A file cannot be opened.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The contents are wrong.
    #[error("{}", list_problems(label, problems, *more))]
    Problems {
        /// The opened repository.
        label: String,
        /// The problems, at least one.
        problems: Vec<Problem>,
        /// Number of problems beyond those listed.
        more: usize,
    },
}

impl CheckpointError {
    /// The error of a repository of which one file tells that it cannot be opened.
    pub(super) fn of_file(label: impl fmt::Display, file: impl fmt::Display, what: impl fmt::Display) -> Self {
        Self::Problems { label: label.to_string(), problems: vec![Problem::of_file(file, what)], more: 0 }
    }

    /// The error of an address of this scheme.
    pub(super) fn of_scheme(source: &str, scheme: &str) -> Self {
        let known = url_schemes();
        Self::Refused(format!(
            "{source}: {scheme}:// is not known; give a path, org/name, hf://, {known} (or http:// of this machine)"
        ))
    }

    /// A text for each problem.
    pub fn texts(&self) -> Vec<String> {
        let Self::Problems { label, problems, .. } = self else { return vec![self.to_string()] };
        problems.iter().map(|problem| list_problems(label, std::slice::from_ref(problem), 0)).collect()
    }

    /// The file or directory that could not be read, if one could not, and the system's error.
    #[expect(clippy::wildcard_enum_match_arm, reason = "other errors are about what was read")]
    pub fn unreadable(&self) -> Option<(&Path, &io::Error)> {
        fn of_source(error: &SourceError) -> Option<(&Path, &io::Error)> {
            if let SourceError::Io { file, error, .. } = error { Some((file, error)) } else { None }
        }
        match self {
            Self::Listing { root, error } => Some((root, error)),
            Self::Source(error) => of_source(error),
            Self::Problems { problems, .. } => problems
                .iter()
                .find_map(|problem| if let Problem::Unreadable(error) = problem { of_source(error) } else { None }),
            _ => None,
        }
    }

    /// The error with what brings a name that the hub's cache lacks. `more` has lines that begin with two spaces.
    #[must_use]
    pub(super) fn with_advice(mut self, more: &str) -> Self {
        if let Self::NotInCache { advice, .. } | Self::NoHome { advice, .. } | Self::NoRevision { advice, .. } =
            &mut self
        {
            more.clone_into(advice);
        }
        self
    }
}

/// One problem with a repository's contents.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Problem {
    /// Bytes could not be read.
    #[error(transparent)]
    Unreadable(#[from] SourceError),
    /// The index names a file that is not there.
    #[error("{index}: names {file:?} for {what}")]
    MissingFile {
        /// The index.
        index: String,
        /// The file.
        file: String,
        /// Tensors that it should hold, and what is found at its path.
        what: String,
    },
    /// The index names a tensor that no file has.
    #[error("tensor {tensor:?}: expected in {file} by the index, found in no file")]
    NotInFile {
        /// The tensor.
        tensor: String,
        /// The file in the index.
        file: String,
    },
    /// A weight file has a tensor that the index does not name.
    #[error("tensor {tensor:?}: found in {file}, not named by the index")]
    NotInIndex {
        /// The tensor.
        tensor: String,
        /// The weight file.
        file: String,
    },
    /// Two weight files have a tensor of one name.
    #[error("tensor {tensor:?}: found in {first} and again in {second}")]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// One file.
        first: String,
        /// The other.
        second: String,
    },
    /// Numbered files are incomplete, and no index lists them.
    #[error("{text}")]
    IncompleteSet {
        /// One of the files.
        first: String,
        /// What is missing, in words.
        text: String,
    },
    /// A checkpoint of Orbax that its saver has not finished.
    #[error(
        "{}: an unfinished Orbax checkpoint: {reason}; --allow-unfinished reads what is there, if all chunks are",
        directory.display()
    )]
    Unfinished {
        /// The directory.
        directory: Arc<Path>,
        /// How it is known, and what to do.
        reason: &'static str,
    },
    /// A step of Orbax without arrays, in words.
    #[error("{0}")]
    NoArrays(String),
    /// A tensor is not what it must be.
    #[error("tensor {tensor:?}{what}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong, after its name.
        what: String,
    },
    /// More bytes than computations of sizes can handle.
    #[error("all files or tensors together have more than {} bytes", BYTES_MAX)]
    TooManyBytes,
    /// More tensors or names than 32 bits can number.
    #[error("the names of all tensors together are longer than 4 GiB")]
    TooLarge,
    /// Anything else, in words.
    #[error("{0}")]
    Other(String),
}

/// The first of some names, and how many more there are.
pub fn first_names(names: &[impl AsRef<str>], shown: usize) -> String {
    let first = names.iter().take(shown).map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
    if names.len() > shown { format!("{first} and {} more", names.len() - shown) } else { first }
}

/// Names, of which some are enough.
pub(super) fn shortened(names: &[String]) -> String {
    first_names(names, 6)
}

pub(super) fn list_or_none(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn elsewhere(subdirectories: &[String]) -> String {
    if subdirectories.is_empty() {
        String::new()
    } else {
        format!("; open one of the subdirectories that have some: {}", subdirectories.join(", "))
    }
}

fn advice(found: Option<&str>) -> String {
    found.map_or_else(String::new, |found| format!(": {found}"))
}

fn list_problems(label: &str, problems: &[Problem], more: usize) -> String {
    const SHOWN: usize = 30;
    if let ([only], 0) = (problems, more) {
        let text = only.to_string();
        // The problem may name the same directory.
        let prefix = format!("{label}: ");
        let prefix = if text.starts_with(&prefix) { "" } else { &prefix };
        return format!("{prefix}{}", printable(&text));
    }
    let lines = lines(problems);
    let mut text = format!("{label}: {} problems", problems.len() + more);
    for (line, _) in lines.iter().take(SHOWN) {
        text.push_str("\n  ");
        text.push_str(&printable(line));
    }
    match lines.iter().skip(SHOWN).map(|(_, count)| count).sum::<usize>() + more {
        0 => text,
        rest => format!("{text}\n  and {rest} more"),
    }
}

/// A text for each problem, in order of the first of each, and how many problems it tells. Many tensors with the same problem
/// share one: their texts differ only in the tensor's name and in numbers, as files of a set do.
fn lines(problems: &[Problem]) -> Vec<(String, usize)> {
    /// Fewer are listed one by one.
    const MANY: usize = 4;
    const NAMED: usize = 3;
    let key = |problem: &Problem, text: &str| {
        let what = text.strip_prefix(&format!("tensor {:?}", problem.tensor()?))?;
        let words = what.split(|letter: char| letter.is_ascii_digit()).filter(|word| !word.is_empty());
        Some(words.collect::<Vec<_>>().join("*"))
    };
    let texts: Vec<String> = problems.iter().map(Problem::to_string).collect();
    let keys: Vec<Option<String>> = problems.iter().zip(&texts).map(|(problem, text)| key(problem, text)).collect();
    let mut alike: HashMap<&str, Vec<&Problem>> = HashMap::new();
    for (key, problem) in keys.iter().zip(problems) {
        if let Some(key) = key {
            alike.entry(key).or_default().push(problem);
        }
    }
    let mut lines = Vec::new();
    for ((text, key), problem) in texts.into_iter().zip(&keys).zip(problems) {
        let same = key.as_deref().and_then(|key| alike.get(key)).filter(|same| same.len() >= MANY);
        let Some(same) = same else {
            lines.push((text, 1));
            continue;
        };
        // The first of them tells of all.
        if !std::ptr::eq(same[0], problem) {
            continue;
        }
        // One left over is as long as its name.
        let named = if same.len() - 1 == NAMED + 1 { NAMED + 1 } else { NAMED };
        let names = same[1..].iter().take(named).filter_map(|problem| problem.tensor());
        let names: Vec<String> = names.map(|name| format!("{name:?}")).collect();
        let rest = same.len() - 1 - names.len();
        let rest = if rest == 0 { String::new() } else { format!(" and {rest} others") };
        lines.push((format!("{text}; the same of {} more: {}{rest}", same.len() - 1, names.join(", ")), same.len()));
    }
    lines
}

impl Problem {
    /// What is wrong with a file.
    pub(super) fn of_file(file: impl fmt::Display, what: impl fmt::Display) -> Self {
        Self::Other(format!("{file}: {what}"))
    }

    /// A stored tensor contradicts the configuration, the index or its companions.
    pub(super) fn of_tensor(tensor: &str, expected: impl fmt::Display, found: impl fmt::Display) -> Self {
        Self::Tensor { tensor: tensor.to_owned(), what: format!(": expected {expected}, found {found}") }
    }

    /// What is wrong with the shape of a tensor or its boxes.
    pub(super) fn of_shape(tensor: &str, dtype: DType, shape: &[u64], fault: impl fmt::Display) -> Self {
        Self::Tensor { tensor: tensor.to_owned(), what: format!(" of {dtype} {shape:?}: {fault}") }
    }

    /// The tensor with whose name the message begins.
    fn tensor(&self) -> Option<&str> {
        let (Self::NotInFile { tensor, .. }
        | Self::NotInIndex { tensor, .. }
        | Self::Duplicate { tensor, .. }
        | Self::Tensor { tensor, .. }) = self
        else {
            return None;
        };
        Some(tensor)
    }

    /// Whether several files hold a tensor.
    pub const fn is_of_copies(&self) -> bool {
        matches!(self, Self::Duplicate { .. })
    }

    /// The variants, as in `model.fp16.safetensors`, that two files with the same tensor are of.
    pub fn variants(&self) -> Vec<&str> {
        let Self::Duplicate { first, second, .. } = self else { return Vec::new() };
        let names = [first, second].map(|path| WeightName::of(path));
        match names {
            [Some(first), Some(second)] if first.stem == second.stem && first.variant != second.variant => {
                [first.variant, second.variant].into_iter().flatten().collect()
            }
            _ => Vec::new(),
        }
    }

    /// Whether the copies of a tensor are in files of several ranks, by their names: then each is a part of it.
    pub fn is_of_ranks(&self) -> bool {
        let Self::Duplicate { first, second, .. } = self else { return false };
        of_any_rank(first).is_some_and(|set| of_any_rank(second) == Some(set))
    }

    /// Whether the index and the files disagree about the tensors that there are.
    pub fn is_of_index(&self) -> bool {
        // The metadata of torch.distributed.checkpoint is an index of another kind, which describes parts of tensors.
        let is_json = |index: &str| Path::new(index).extension().is_some_and(|extension| extension == "json");
        matches!(self, Self::NotInFile { .. } | Self::NotInIndex { .. })
            || matches!(self, Self::MissingFile { index, .. } if is_json(index))
    }
}

/// Problems in the order in which they are found.
#[derive(Default)]
pub(super) struct Problems {
    list: Vec<Problem>,
    more: usize,
    allow_missing: Accepted,
    /// Tensors that are accepted although the index does not name them.
    pub(super) allow_unmapped: Accepted,
    /// Tensors that were accepted although no file has them.
    pub(super) missing: Expected,
    /// Those that were accepted although the index does not name them.
    unmapped: Expected,
}

impl Problems {
    /// No problems yet, of which some will be accepted.
    pub(super) fn accepting(options: &OpenOptions) -> Self {
        let (allow_missing, allow_unmapped) = (options.allow_missing.clone(), options.allow_unmapped.clone());
        Self { allow_missing, allow_unmapped, ..Self::default() }
    }

    pub(super) fn push(&mut self, problem: Problem) {
        if let Problem::NotInFile { tensor, .. } = &problem
            && self.allow_missing.accepts(tensor)
        {
            self.missing.add(tensor);
        } else if let Problem::NotInIndex { tensor, .. } = &problem
            && self.allow_unmapped.accepts(tensor)
        {
            self.unmapped.add(tensor);
        } else if self.list.len() < PROBLEMS_MAX {
            self.list.push(problem);
        } else {
            self.more += 1;
        }
    }

    /// What was made; why it was not is a problem.
    pub(super) fn taken<T>(&mut self, made: Result<T, impl Into<Problem>>) -> Option<T> {
        made.map_err(|problem| self.push(problem.into())).ok()
    }

    /// What was made; `None` if the names or numbers of its tensors are too large.
    pub(super) fn or_too_large<T: Default>(&mut self, made: Option<T>) -> T {
        self.taken(made.ok_or(Problem::TooLarge)).unwrap_or_default()
    }

    /// Adds what is wrong with a file.
    pub(super) fn of_file(&mut self, file: impl fmt::Display, what: impl fmt::Display) {
        self.push(Problem::of_file(file, what));
    }

    /// Accepts that all of these tensors are missing, or none of them. Returns whether it does.
    pub(super) fn accept_missing<'a>(&mut self, names: impl Iterator<Item = &'a str> + Clone) -> bool {
        let all = names.clone().all(|name| self.allow_missing.accepts(name));
        if all {
            names.for_each(|name| self.missing.add(name));
        }
        all
    }

    /// Warnings of what was accepted.
    pub(super) fn warnings(&self) -> impl Iterator<Item = String> {
        let missing = self.missing.warning("named by the index, found in no file, left out (--allow-missing)");
        let unmapped = self.unmapped.warning("not named by the index, shown nevertheless (--allow-unmapped)");
        missing.into_iter().chain(unmapped)
    }

    pub(super) fn append(&mut self, other: Self) {
        self.extend(other.list);
        self.more += other.more;
    }

    /// The same problems of a repository in the cache of the Hub's client: what its files lack is one problem, with the
    /// commands that bring them. `found` of its weight files are there, and `has` knows all files.
    pub(super) fn of_download(mut self, label: &str, repo: &str, found: usize, has: impl Fn(&str) -> bool) -> Self {
        /// No set has more files.
        const FILES_MAX: u64 = 100_000;
        let lacking = |problem: &Problem| {
            if let Problem::MissingFile { file, .. } = problem {
                return Some(vec![file.clone()]);
            }
            let Problem::IncompleteSet { first, .. } = problem else { return None };
            let (number, total) = WeightName::of(first)?.number?;
            let at = first.rfind(total).and_then(|end| first[..end].rfind(number))?;
            let (before, after) = (&first[..at], &first[at + number.len()..]);
            let name = |of: u64| format!("{before}{of:0width$}{after}", width = number.len());
            let start = u64::from(!has(&name(0)));
            let end = total.parse::<u64>().unwrap_or(FILES_MAX).min(FILES_MAX);
            Some((start..=end).map(name).filter(|name| !has(name)).collect())
        };
        let missing: Vec<String> = self.list.iter().filter_map(lacking).flatten().collect();
        if !missing.is_empty() {
            self.list.retain(|problem| lacking(problem).is_none());
            let (all, missing) = (found + missing.len(), shortened(&missing));
            let message = format!(
                "the Hugging Face cache has {found} of the {all} weight files of {label} (missing: {missing}): the download is not finished; \
                 run `hf download {repo}`, or `ckfs fetch {repo}`, or leave out --offline"
            );
            self.list.insert(0, Problem::Other(message));
        }
        self
    }

    /// Number of problems so far.
    pub(super) fn count(&self) -> usize {
        self.list.len() + self.more
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn refuse(self, label: &str) -> Result<(), CheckpointError> {
        if self.list.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Problems { label: label.to_owned(), problems: self.list, more: self.more })
    }
}

impl Extend<Problem> for Problems {
    fn extend<I: IntoIterator<Item = Problem>>(&mut self, more: I) {
        more.into_iter().for_each(|problem| self.push(problem));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn twice(tensor: &str, part: usize) -> Problem {
        let file = |rank: usize| format!("model-{part:05}-TP-{rank:03}.safetensors");
        Problem::Duplicate { tensor: tensor.to_owned(), first: file(0), second: file(7) }
    }

    #[test]
    fn many_tensors_with_the_same_problem_share_a_line() {
        let mut problems: Vec<Problem> =
            (0..40).map(|layer| twice(&format!("layers.{layer}.w"), 1 + layer / 20)).collect();
        let lost = |tensor: &str| Problem::NotInFile { tensor: tensor.to_owned(), file: "a".to_owned() };
        problems.extend([lost("x"), Problem::TooLarge, lost("y"), lost("z")]);
        assert_eq!(
            list_problems("repo", &problems, 2),
            "repo: 46 problems\n  \
             tensor \"layers.0.w\": found in model-00001-TP-000.safetensors and again in model-00001-TP-007.safetensors; the same of 39 \
             more: \"layers.1.w\", \"layers.2.w\", \"layers.3.w\" and 36 others\n  \
             tensor \"x\": expected in a by the index, found in no file\n  \
             the names of all tensors together are longer than 4 GiB\n  \
             tensor \"y\": expected in a by the index, found in no file\n  \
             tensor \"z\": expected in a by the index, found in no file\n  \
             and 2 more"
        );
    }
}
