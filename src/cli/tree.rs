//! Walks over a volume.

use std::{collections::HashMap, fs::File, ops::ControlFlow, os::unix::fs::FileExt, path::Path};

use anyhow::{Context, anyhow, bail, ensure};
use ckfs_config::{Devices, nearest};
use ckfs_plan::{Pattern, PatternError};
use ckfs_source::{Replied, Served};
use ckfs_volume::{Attr, FileSystem, FsError, Ino, NodeKind, Volume, follow};

/// A file or directory, with its path relative to the root of the mount.
#[derive(Clone, Debug)]
pub(super) struct PathNode {
    /// Path, without a leading slash.
    pub(super) path: String,
    /// Its attributes.
    pub(super) attr: Attr,
}

/// Names of the entries of a directory, in order.
pub(super) fn entries(volume: &Volume, directory: Ino) -> Result<Vec<(String, Ino)>, FsError> {
    let mut entries = Vec::new();
    volume.read_dir(directory, 0, &mut |entry| {
        entries.push((String::from_utf8_lossy(entry.name).into_owned(), entry.ino));
        ControlFlow::Continue(())
    })?;
    Ok(entries)
}

/// Calls `each` with every node but the root. A directory comes before its entries.
pub(super) fn walk(volume: &Volume, each: &mut dyn FnMut(PathNode) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut pending = vec![(String::new(), Ino::ROOT)];
    while let Some((path, directory)) = pending.pop() {
        let mut directories = Vec::new();
        for (name, ino) in entries(volume, directory).with_context(|| path.clone())? {
            let path = if path.is_empty() { name } else { format!("{path}/{name}") };
            let attr = volume.attr(ino).with_context(|| path.clone())?;
            if attr.kind == NodeKind::Directory {
                directories.push((path.clone(), ino));
            }
            each(PathNode { path, attr })?;
        }
        pending.extend(directories.into_iter().rev());
    }
    Ok(())
}

/// The nodes that `keep` and `--only` select, in the order of [`walk`].
///
/// # Errors
/// If there is nothing to `verb` among them but directories. The message names the path that was perhaps meant.
pub(super) fn select(
    volume: &Volume,
    only: &[String],
    verb: &str,
    keep: &dyn Fn(&PathNode) -> bool,
) -> anyhow::Result<Vec<PathNode>> {
    let patterns = patterns(only)?;
    let mut nodes = Vec::new();
    walk(volume, &mut |node| {
        if keep(&node) && wanted(&patterns, &node.path) {
            nodes.push(node);
        }
        Ok(())
    })?;
    if nodes.iter().all(|node| node.attr.kind == NodeKind::Directory) {
        bail!("nothing to {verb}: {}", no_match(volume, only));
    }
    Ok(nodes)
}

/// Bytes of all these files together.
pub(super) fn total_bytes<'a>(nodes: impl IntoIterator<Item = &'a PathNode>) -> u64 {
    let files = nodes.into_iter().filter(|node| node.attr.kind == NodeKind::File);
    files.map(|node| node.attr.size_bytes).fold(0, u64::saturating_add)
}

/// The patterns of `--only`.
pub(super) fn patterns(texts: &[String]) -> Result<Vec<Pattern>, PatternError> {
    texts.iter().map(|text| Pattern::parse(text.trim_end_matches('/'))).collect()
}

/// Whether `--only` selects a path: without patterns, or if a pattern matches it or a directory above it.
pub(super) fn wanted(patterns: &[Pattern], path: &str) -> bool {
    let above = path.char_indices().filter(|(_, c)| *c == '/').map(|(at, _)| &path[..at]);
    patterns.is_empty() || above.chain([path]).any(|prefix| patterns.iter().any(|pattern| pattern.matches(prefix)))
}

/// The node at a path of the mount; links are followed.
///
/// # Errors
/// If nothing is there. The message names the nearest directory and its entries.
pub(super) fn find(volume: &Volume, path: &str) -> anyhow::Result<PathNode> {
    let lookup = |at: &[(String, Attr)], directory: &Attr, name: &str| {
        let found = volume.lookup(directory.ino, name.as_bytes());
        found.map_err(|error| {
            if error == FsError::NotFound { absent(volume, path, at, directory.ino, name) } else { error.into() }
        })
    };
    let found = volume.attr(Ino::ROOT).map_err(anyhow::Error::from);
    let found = found.and_then(|root| follow(volume, root, path, lookup));
    // What is absent is told with its path.
    let found = found.map_err(|error| if error.is::<FsError>() { error.context(path.to_owned()) } else { error });
    found.map(|(path, attr)| PathNode { path, attr })
}

/// The file at a path of the mount, as [`find`].
///
/// # Errors
/// The same; and what is there is a directory. The message names its entries.
pub(super) fn find_file(volume: &Volume, path: &str) -> anyhow::Result<PathNode> {
    let node = find(volume, path)?;
    if node.attr.kind == NodeKind::Directory {
        let names: Vec<_> = entries(volume, node.attr.ino)?.into_iter().map(|(name, _)| name).collect();
        bail!("{path}: is a directory; it has: {}", shown(&names));
    }
    Ok(node)
}

/// Most names of a directory that an error lists.
const NAMES_SHOWN: usize = 12;

fn absent(volume: &Volume, path: &str, at: &[(String, Attr)], directory: Ino, component: &str) -> anyhow::Error {
    let names: Vec<String> = entries(volume, directory).unwrap_or_default().into_iter().map(|(name, _)| name).collect();
    let parts: Vec<&str> = at.iter().map(|(name, _)| name.as_str()).collect();
    let place = if parts.is_empty() { "the root".to_owned() } else { parts.join("/") };
    let number = |name: &str| name.strip_prefix("dev")?.parse::<u64>().ok();
    let devices: Vec<u64> = names.iter().filter_map(|name| number(name)).collect();
    if let (Some(_), Some(least), Some(most)) = (number(component), devices.iter().min(), devices.iter().max()) {
        let count = devices.len();
        return anyhow!("{path}: {place} has no {component}: {count} devices, dev{least} to dev{most}");
    }
    if let Some(near) = nearest_path(volume, path).or_else(|| below(volume, path)) {
        return anyhow!("{path}: {place} has no {component:?}; did you mean `{near}`?");
    }
    anyhow!("{path}: {place} has no {component:?}; it has: {}", shown(&names))
}

/// The first names of a list, those that differ in a number as one, and the count of the others.
pub(super) fn shown(names: &[String]) -> String {
    let groups = grouped(names);
    let (first, rest) = groups.split_at(groups.len().min(NAMES_SHOWN));
    let text = first.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
    match rest.iter().map(|(_, count)| count).sum::<usize>() {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

/// Names that differ only in their last number, as `dev{0-7}`, each with the number of its names; in the order of the first
/// of each.
fn grouped(names: &[String]) -> Vec<(String, usize)> {
    let mut groups: Vec<(&str, &str, Vec<u64>)> = Vec::new();
    let mut known: HashMap<(&str, &str), usize> = HashMap::new();
    for name in names {
        let end = name.rfind(|c: char| c.is_ascii_digit()).map_or(0, |at| at + 1);
        let start = name[..end].trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let digits = &name[start..end];
        let number = digits.parse().ok().filter(|number: &u64| number.to_string() == digits);
        match number {
            Some(number) => {
                let key = (&name[..start], &name[end..]);
                let group = *known.entry(key).or_insert(groups.len());
                match groups.get_mut(group) {
                    Some((_, _, numbers)) => numbers.push(number),
                    None => groups.push((key.0, key.1, vec![number])),
                }
            }
            // A number with leading zeros is a part of the name.
            None => groups.push((name, "", Vec::new())),
        }
    }
    let text = |(before, after, mut numbers): (&str, &str, Vec<u64>)| match numbers.as_slice() {
        [] => (before.to_owned(), 1),
        [only] => (format!("{before}{only}{after}"), 1),
        _ => {
            numbers.sort_unstable();
            let count = numbers.len();
            (format!("{before}{{{}}}{after}", Devices(numbers).text()), count)
        }
    };
    groups.into_iter().map(text).collect()
}

/// The path of the volume that a mistyped one most resembles, component by component. From a pattern on it stays as it is.
fn nearest_path(volume: &Volume, path: &str) -> Option<String> {
    let mut directory = Some(Ino::ROOT);
    let mut parts = Vec::new();
    let mut components = path.split('/').filter(|component| !component.is_empty());
    while let Some(component) = components.next() {
        if component.contains(['*', '?']) {
            parts.push(component.to_owned());
            parts.extend(components.map(str::to_owned));
            break;
        }
        let entries = entries(volume, directory?).ok()?;
        let name = nearest(component, entries.iter().map(|(name, _)| name.as_str()))?.to_owned();
        let (_, ino) = entries.into_iter().find(|(entry, _)| *entry == name)?;
        directory = (volume.attr(ino).ok()?.kind == NodeKind::Directory).then_some(ino);
        parts.push(name);
    }
    Some(parts.join("/")).filter(|near| near != path)
}

/// The path of the volume that ends in this one: a tensor's name is given without the directory of its device or format. Of
/// several it is the one under `full` with the layers stacked, or else the first.
fn below(volume: &Volume, path: &str) -> Option<String> {
    const WORDS: [&str; 2] = ["full", "scanned"];
    let end = format!("/{}", path.trim_matches('/'));
    let mut found: Option<(usize, String)> = None;
    // It ends with an error where enough is known.
    let _ = walk(volume, &mut |node| {
        let rank = node.path.split('/').filter(|word| WORDS.contains(word)).count();
        if node.path.ends_with(&end) && found.as_ref().is_none_or(|(best, _)| rank > *best) {
            found = Some((rank, node.path));
            ensure!(rank < WORDS.len());
        }
        Ok(())
    });
    found.map(|(_, path)| path)
}

/// That no file matches the patterns of `--only`, with the path that the first mistyped one most resembles.
fn no_match(volume: &Volume, only: &[String]) -> String {
    let near = only.iter().find_map(|path| nearest_path(volume, path));
    let near = near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
    let advice = patterns(only).unwrap_or_default().iter().find_map(Pattern::advice);
    let advice = advice.map_or_else(String::new, |advice| format!("; {advice}"));
    format!("no file matches {}{near}{advice}", only.join(", "))
}

/// An open file of a volume.
pub(super) struct OpenNode<'a> {
    volume: &'a Volume,
    ino: Ino,
    handle: ckfs_volume::Handle,
}

impl<'a> OpenNode<'a> {
    /// Opens a file.
    ///
    /// # Errors
    /// If the node is not a file, or one of its sources has changed.
    pub(super) fn open(volume: &'a Volume, node: &PathNode) -> anyhow::Result<Self> {
        let opened = volume.open(node.attr.ino).with_context(|| node.path.clone())?;
        Ok(Self { volume, ino: node.attr.ino, handle: opened.handle })
    }

    /// Reads as [`FileSystem::read`] does.
    ///
    /// # Errors
    /// If bytes could not be read.
    pub(super) fn read(&self, offset: u64, len: usize, reply: &mut dyn FnMut(Served<'_>)) -> Result<(), FsError> {
        let reply = &mut |bytes: Served<'_>| {
            reply(bytes);
            Replied::new()
        };
        self.volume.read(self.ino, self.handle, offset, len, reply).map(drop).map_err(|failure| failure.error)
    }

    /// Makes bytes as [`Volume::make`] does.
    ///
    /// # Errors
    /// If bytes could not be made.
    pub(super) fn make(&self, start: u64, target: &mut [u8]) -> Result<(), FsError> {
        self.volume.make(self.ino, self.handle, start, target)
    }
}

impl Drop for OpenNode<'_> {
    fn drop(&mut self) {
        self.volume.release(self.ino, self.handle);
    }
}

/// A file of a mount, or what a mount would serve.
pub(super) enum ServedFile<'a> {
    /// Bytes come from the engine.
    Engine(OpenNode<'a>),
    /// Bytes come from the file.
    Mount(File),
}

impl<'a> ServedFile<'a> {
    /// Opens the file of a node: in the mount, if there is one.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(super) fn open(volume: &'a Volume, mount: Option<&Path>, node: &PathNode) -> anyhow::Result<Self> {
        let Some(mount) = mount else {
            return Ok(Self::Engine(OpenNode::open(volume, node)?));
        };
        let path = mount.join(&node.path);
        Ok(Self::Mount(File::open(&path).with_context(|| path.display().to_string())?))
    }

    /// Its length, where that could differ from the node's.
    ///
    /// # Errors
    /// If the file has no attributes any more.
    pub(super) fn found_bytes(&self) -> std::io::Result<Option<u64>> {
        match self {
            Self::Engine(_) => Ok(None),
            Self::Mount(file) => Ok(Some(file.metadata()?.len())),
        }
    }

    /// Replaces the content of `bytes` by `len` bytes of the file.
    ///
    /// # Errors
    /// If they could not be read.
    pub(super) fn read(&self, start: u64, len: usize, bytes: &mut Vec<u8>) -> anyhow::Result<()> {
        match self {
            Self::Mount(file) => {
                bytes.resize(len, 0);
                file.read_exact_at(bytes, start)?;
            }
            Self::Engine(open) => {
                let mut copy = Ok(Vec::new());
                open.read(start, len, &mut |served| copy = served.to_vec())?;
                *bytes = copy?;
                if bytes.len() != len {
                    bail!("expected {len} bytes, found {}", bytes.len());
                }
            }
        }
        Ok(())
    }
}

/// The parts of a range of bytes: where each begins, and its length, which is `most_bytes` but for the last.
pub(super) fn parts(start: u64, end: u64, most_bytes: usize) -> impl Iterator<Item = (u64, usize)> {
    let len = move |at| usize::try_from(end - at).unwrap_or(usize::MAX).min(most_bytes);
    (start..end).step_by(most_bytes).map(move |at| (at, len(at)))
}

/// Reads spans of `chunk` bytes until `end`, and checks that each has the expected length.
///
/// # Errors
/// If bytes could not be read, or `sink` failed.
pub(super) fn stream(
    open: &OpenNode<'_>,
    path: &str,
    (start, end): (u64, u64),
    chunk_bytes: usize,
    sink: &mut dyn FnMut(Served<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for (at, len) in parts(start, end, chunk_bytes) {
        let mut result = Ok(());
        let mut came = 0;
        open.read(at, len, &mut |bytes| {
            came = bytes.len();
            result = sink(bytes);
        })
        .with_context(|| format!("{path}: bytes {at}..{}", at + len as u64))?;
        result?;
        if came != len {
            return Err(anyhow!("{path}: bytes {at}..{}: expected {len} bytes, found {came}", at + len as u64));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_grouped_and_cut() {
        let names = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let devices: Vec<String> = (0..1024).map(|device| format!("dev{device}")).chain(names("full hf")).collect();
        assert_eq!(shown(&devices), "dev{0-1023}, full, hf");
        assert_eq!(shown(&names("0 1 10 2 scanned")), "{0-2,10}, scanned");
        assert_eq!(shown(&names("dev0.npy dev1.npy m-01.x m-02.x é7")), "dev{0-1}.npy, m-01.x, m-02.x, é7");
        let letters: Vec<String> = ('a'..='z').map(String::from).collect();
        assert_eq!(shown(&letters), "a, b, c, d, e, f, g, h, i, j, k, l and 14 more");
        assert_eq!(shown(&[]), "");
    }
}
