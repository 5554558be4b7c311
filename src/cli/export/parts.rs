//! An export that several tasks make together, each on its own host: which files are whose, and when all are there.
//!
//! No task speaks to another. Each computes the same shares from the same plan, and finds out from what lies in the target whether
//! the others are complete. Files without tensors, and among them the indexes that make a checkpoint of the others, belong to no
//! share: a task that finds all shares complete writes them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    str::FromStr,
};

use anyhow::Context;
use ckfs_checkpoint::Checkpoint;
use ckfs_config::{ModelPart, value::SettingValue};
use ckfs_image::Segment;
use ckfs_service::identity;
use ckfs_source::FileId;
use ckfs_tensor::View;
use ckfs_volume::{NodeKind, Volume};

use super::super::tree::PathNode;

/// Most tasks.
const TASKS_MAX: usize = 1 << 16;

/// Which of how many tasks this one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExportTask {
    /// From 1.
    pub(super) number: usize,
    pub(super) of: usize,
}

/// What `--part` is in an export.
#[derive(Clone, Copy, Debug)]
pub(super) enum ExportPart {
    /// One of its tasks.
    Task(ExportTask),
    /// A part of the model.
    Model(ModelPart),
}

impl FromStr for ExportPart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') || text.starts_with(|letter: char| letter.is_ascii_digit()) {
            return text.parse().map(Self::Task);
        }
        ModelPart::from_word(text).map(Self::Model)
    }
}

impl FromStr for ExportTask {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(number, of)| Some((number.parse().ok()?, of.parse().ok()?)));
        let (number, of): (usize, usize) = parsed.ok_or("expected K/N, for example 2/8")?;
        if !(1..=TASKS_MAX).contains(&of) || number > of {
            return Err(format!("expected K/N with K from 1 to N and N at most {TASKS_MAX}; 0/N is N/N"));
        }
        Ok(Self { number: if number == 0 { of } else { number }, of })
    }
}

impl fmt::Display for ExportTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl ExportTask {
    /// All tasks of the same export.
    pub(super) fn all(self) -> impl Iterator<Item = Self> {
        (1..=self.of).map(move |number| Self { number, ..self })
    }

    /// What all tasks of an export have in common: the plan and the sources, which files, and in how many shares.
    pub(super) fn what(self, digest: &str, nodes: &[PathNode]) -> String {
        let of = format!("{digest} parts {}", self.of);
        identity::of_views(nodes.iter().map(|node| (node.path.as_str(), of.as_str())))
    }
}

/// Copies of source files of at most this many bytes belong to no share: configurations, tokenizers.
const SMALL_BYTES: u64 = 1 << 20;
/// The bytes that tasks may read beside those of one export, as a divisor of these.
const EXCESS_DIVISOR: u64 = 25;
/// The nodes of an export.
pub(super) struct Shares {
    parts: Vec<Vec<PathNode>>,
    /// What is written when all shares are complete; the indexes are the last of it.
    pub(super) last: Vec<PathNode>,
}

impl Shares {
    /// The nodes of a task.
    pub(super) fn of(&self, part: ExportTask) -> &[PathNode] {
        &self.parts[part.number - 1]
    }
}

/// Divides an export among tasks. All of them find the same shares.
pub(super) fn shares(volume: &Volume, nodes: &[PathNode], part: ExportTask) -> anyhow::Result<Shares> {
    let (mut files, mut last) = (Vec::new(), Vec::new());
    let mut users: BTreeMap<Shared, (u64, Vec<usize>)> = BTreeMap::new();
    let mut total_bytes = 0;
    for node in nodes {
        let reads = reads(volume, node)?;
        if reads.is_empty() {
            last.push(node.clone());
            continue;
        }
        for (shared, bytes) in reads {
            let (_, files_of) = users.entry(shared).or_insert_with(|| {
                total_bytes += bytes;
                (bytes, Vec::new())
            });
            files_of.push(files.len());
        }
        files.push(node.clone());
    }
    let users: Vec<_> = users.into_values().collect();
    let groups = groups(files.len(), users, part.of, total_bytes / EXCESS_DIVISOR);
    let mut parts = vec![Vec::new(); part.of];
    let sizes: Vec<u64> = files.iter().map(|node| node.attr.size_bytes).collect();
    for (file, number) in files.into_iter().zip(balanced(&groups, &sizes, part.of)) {
        parts[number].push(file);
    }
    // `.metadata`, `_CHECKPOINT_METADATA`, `manifest.ocdbt` and `*.index.json` make a checkpoint of what is there.
    let is_index = |node: &PathNode| {
        let name = node.path.rsplit('/').next().unwrap_or_default();
        name.starts_with(['.', '_']) || name.contains(".index.") || name.starts_with("manifest.")
    };
    last.sort_by_key(is_index);
    Ok(Shares { parts, last })
}

/// What two files may both need from the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Shared {
    /// A coded chunk, which is read as a whole.
    Chunk(FileId, u64),
    /// A view of a remote source, by its digest: one export fetches it once.
    View(u64),
    /// The bytes of the file of this inode alone.
    Own(u64),
}

/// What a file reads, with bytes; nothing if it has no tensors and is small.
fn reads(volume: &Volume, node: &PathNode) -> anyhow::Result<HashMap<Shared, u64>> {
    let mut reads = HashMap::new();
    if node.attr.kind != NodeKind::File {
        return Ok(reads);
    }
    let (checkpoint, own) = (volume.engine().checkpoint(), Shared::Own(node.attr.ino.0));
    let is_remote = checkpoint.source().remote().is_some();
    if let Some(image) = volume.image(node.attr.ino).with_context(|| node.path.clone())? {
        for (number, segment) in image.segments().iter().enumerate() {
            let Segment::View(view) = segment else { continue };
            let bytes = image.start_of(number + 1) - image.start_of(number);
            let coded = coded_chunks(checkpoint, view);
            reads.extend(coded.iter().map(|((file, start), bytes)| (Shared::Chunk(*file, *start), *bytes)));
            if coded.is_empty() && is_remote {
                let mut hasher = DefaultHasher::new();
                format!("{view:?}").hash(&mut hasher);
                reads.insert(Shared::View(hasher.finish()), bytes);
            } else if coded.is_empty() {
                *reads.entry(own).or_default() += bytes;
            }
        }
    } else if volume.original(node.attr.ino).is_some() && node.attr.size_bytes > SMALL_BYTES {
        reads.insert(own, node.attr.size_bytes);
    }
    Ok(reads)
}

/// The coded chunks that a view needs: file and place of the decoded bytes, and their number.
pub(super) fn coded_chunks(checkpoint: &Checkpoint, view: &View) -> BTreeMap<(FileId, u64), u64> {
    let mut coded = BTreeMap::new();
    view.for_each_stored(&mut |tensor| {
        let info = checkpoint.tensor(tensor);
        let (file, span) = (info.file(), info.span());
        if checkpoint.source().coded(file, span.start()).is_some() {
            coded.insert((file, span.start()), span.len());
        }
    });
    coded
}

/// A group for each file. Files that need the same bytes are in one group, unless all tasks together would read at most
/// `excess_bytes` more if each of its files were in another.
fn groups(files: usize, mut users: Vec<(u64, Vec<usize>)>, tasks: usize, mut excess_bytes: u64) -> Vec<usize> {
    let mut above: Vec<usize> = (0..files).collect();
    let root = |above: &[usize], mut file: usize| {
        while above[file] != file {
            file = above[file];
        }
        file
    };
    let cost = |(bytes, users): &(u64, Vec<usize>)| bytes.saturating_mul((users.len().min(tasks) - 1) as u64);
    users.sort_by_key(cost);
    for user in users {
        if let Some(left) = excess_bytes.checked_sub(cost(&user)) {
            excess_bytes = left;
            continue;
        }
        // Later ones cost more.
        excess_bytes = 0;
        for file in &user.1 {
            let (first, other) = (root(&above, user.1[0]), root(&above, *file));
            above[first.max(other)] = first.min(other);
        }
    }
    (0..files).map(|file| root(&above, file)).collect()
}

/// The number of the task, from 0, that writes each file: the largest group first, each to the task with the fewest bytes.
fn balanced(groups: &[usize], sizes: &[u64], tasks: usize) -> Vec<usize> {
    let mut bytes: BTreeMap<usize, u64> = BTreeMap::new();
    for (group, size) in groups.iter().zip(sizes) {
        *bytes.entry(*group).or_default() += size;
    }
    let mut order: Vec<(usize, u64)> = bytes.into_iter().collect();
    order.sort_by_key(|(group, bytes)| (std::cmp::Reverse(*bytes), *group));
    let mut loads: BTreeSet<(u64, usize)> = (0..tasks).map(|task| (0, task)).collect();
    let mut task_of = HashMap::new();
    for (group, bytes) in order {
        let Some((load, task)) = loads.pop_first() else { break };
        task_of.insert(group, task);
        loads.insert((load + bytes, task));
    }
    groups.iter().map(|group| task_of.get(group).copied().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_need_the_same_bytes_are_together_unless_it_costs_little() {
        // Files 0 and 2 need a large chunk, 1 and 3 another; all need a small one.
        let users = || vec![(1000, vec![0, 2]), (900, vec![1, 3]), (10, vec![0, 1, 2, 3]), (50, vec![4])];
        assert_eq!(groups(5, users(), 4, 0), [0, 0, 0, 0, 4]);
        assert_eq!(groups(5, users(), 4, 40), [0, 1, 0, 1, 4]);
        // Two tasks read a chunk twice at most.
        assert_eq!(groups(5, users(), 2, 10), [0, 1, 0, 1, 4]);
        assert_eq!(groups(5, users(), 1, 0), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn tasks_get_about_the_same_bytes() {
        assert_eq!(balanced(&[0, 1, 0, 3, 4], &[5, 9, 5, 8, 1], 2), [0, 1, 0, 1, 0]);
        assert_eq!(balanced(&[0, 1], &[1, 1], 4), [0, 1]);
    }

    #[test]
    fn tasks_are_counted_from_one_or_from_zero() {
        let part = |text: &str| text.parse::<ExportTask>().map(|part| part.to_string());
        assert_eq!(part("2/8"), Ok("2/8".to_owned()));
        assert_eq!((part("0/4"), part("4/4")), (Ok("4/4".to_owned()), Ok("4/4".to_owned())));
        for wrong in ["5/4", "1/0", "0/0", "1", "a/2", "-1/2", "1/2/3", "1/65537"] {
            assert!(part(wrong).unwrap_err().starts_with("expected K/N"), "{wrong}");
        }
    }
}
