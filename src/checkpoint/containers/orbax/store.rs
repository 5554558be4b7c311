//! The stored values: which arrays have which keys, and where the bytes of each are.
//!
//! Two stores have the same keys, `<array>/zarr.json` and `<array>/c/0/1`: an OCDBT database, and a directory for each array.
//! The name of an array may have slashes itself, so that a key belongs to the longest name that it begins with.

use std::{collections::HashMap, sync::Arc};

use ckfs_format::ocdbt::{self, KeyRange, Manifest, NodeRef, Walk};
use ckfs_source::{ByteSpan, FileId};
use ckfs_tensor::to_usize;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::{coded::CodedBytes, item::no_arrays};
use crate::{
    problem::Problem,
    tree::{FileTree, below},
};

/// Longest manifest or node, in bytes.
const BLOCK_BYTES_MAX: u64 = 256 << 20;

/// Most bytes of values that are stored in nodes. They stay in memory, since no file holds them as they are.
const INLINE_BYTES_MAX: u64 = 256 << 20;

/// Most values of one checkpoint.
const VALUES_MAX: u64 = 16 << 20;

/// Greatest depth of directories in an array's directory.
const DEPTH_MAX: usize = 16;

/// Files that reads will need. Their ids are in the order in which they were met.
#[derive(Debug, Default)]
pub(super) struct Files {
    pub(super) paths: Vec<String>,
    ids: HashMap<String, FileId>,
}

impl Files {
    /// The id of a file.
    pub(super) fn id(&mut self, path: &str) -> FileId {
        if let Some(id) = self.ids.get(path) {
            return *id;
        }
        let id = FileId::at(self.paths.len());
        self.paths.push(path.to_owned());
        self.ids.insert(path.to_owned(), id);
        id
    }
}

/// One stored value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoreValue {
    /// The key below the array's name.
    pub(super) key: String,
    /// The file with its bytes.
    pub(super) path: Arc<str>,
    /// Where in it they are; `None` for all of a file whose length is not known yet.
    pub(super) bytes: Option<CodedBytes>,
}

impl StoreValue {
    /// Reads the whole value.
    pub(super) fn read(&self, tree: &dyn FileTree) -> Result<Vec<u8>, Problem> {
        match &self.bytes {
            None => Ok(tree.description(&self.path)?.unwrap_or_default()),
            Some(CodedBytes::Inline(bytes)) => Ok(bytes.to_vec()),
            Some(CodedBytes::Span(span)) => read_block(tree, &self.path, span.start(), span.len()),
        }
    }
}

/// The problem of more than a checkpoint may have.
fn too_many(what: &str, limit: u64, found: u64) -> Problem {
    Problem::of_file(what, format_args!("expected at most {limit}, found {found}"))
}

/// Reads a span whose length a file states, after it was compared with the length of the file.
fn read_block(tree: &dyn FileTree, path: &str, start: u64, len: u64) -> Result<Vec<u8>, Problem> {
    if len > BLOCK_BYTES_MAX {
        return Err(too_many("bytes of a block", BLOCK_BYTES_MAX, len));
    }
    if let Some(file_bytes) = tree.len_bytes(path)?
        && start.checked_add(len).is_none_or(|end| end > file_bytes)
    {
        let (file, end) = (tree.shown(path), start.saturating_add(len));
        let what = format!("bytes {start}..{end} are outside the file of {file_bytes} bytes");
        return Err(Problem::of_file(file.display(), what));
    }
    let mut bytes = vec![0; to_usize(len)];
    tree.read(path, start, &mut bytes)?;
    Ok(bytes)
}

/// The names of arrays, to find the one that a key belongs to.
pub(super) struct Names<'a> {
    numbers: HashMap<&'a str, usize>,
    wanted: &'a [bool],
}

impl<'a> Names<'a> {
    /// These names, of which only those are looked up whose number is `wanted`.
    pub(super) fn new(names: &'a [String], wanted: &'a [bool]) -> Self {
        Self { numbers: names.iter().map(String::as_str).zip(0..).collect(), wanted }
    }

    /// The array of a key, and the rest of the key. `None` if it belongs to none that is wanted.
    fn find<'k>(&self, key: &'k str) -> Option<(usize, &'k str)> {
        let found = key.rmatch_indices('/').find_map(|(at, _)| Some((*self.numbers.get(&key[..at])?, &key[at + 1..])));
        found.filter(|(number, _)| self.wanted[*number])
    }
}

/// Whether an item is an OCDBT database.
pub(super) fn is_database(tree: &dyn FileTree, item: &str) -> Result<bool, Problem> {
    Ok(tree.len_bytes(&below(item, ocdbt::MANIFEST))?.is_some())
}

/// The manifest that lists the versions.
fn manifest(tree: &dyn FileTree, item: &str) -> Result<Manifest, Problem> {
    let read = |name: &str| {
        let path = below(item, name);
        let len = tree.len_bytes(&path)?.unwrap_or(0);
        Ok::<_, Problem>((read_block(tree, &path, 0, len)?, path))
    };
    let damaged = |path: &str, error| Problem::of_file(tree.shown(path).display(), error);
    let (bytes, path) = read(ocdbt::MANIFEST)?;
    let manifest = Manifest::parse(&bytes).map_err(|error| damaged(&path, error))?;
    if manifest.latest.is_some() {
        return Ok(manifest);
    }
    let entries = tree.list(item)?;
    let newest = entries.iter().filter_map(|entry| ocdbt::numbered_generation(&entry.name)).max();
    let Some(generation) = newest else {
        return Err(no_arrays(tree, item, "manifest.ocdbt without any numbered manifest"));
    };
    let (bytes, path) = read(&ocdbt::numbered_name(generation))?;
    manifest.parse_numbered(&bytes, generation).map_err(|error| damaged(&path, error))
}

/// Receives a key, the file of the node that has it, and its value.
type Found<'f> = dyn FnMut(&[u8], &Arc<str>, ocdbt::NodeValue<'_>) -> Result<(), Problem> + 'f;

/// Calls `found` for each key of the ranges in the newest version of a database, with the file of the node that has it.
fn walk(tree: &dyn FileTree, item: &str, ranges: Vec<KeyRange>, found: &mut Found<'_>) -> Result<(), Problem> {
    let manifest = manifest(tree, item)?;
    let Some(version) = &manifest.latest else { return Ok(()) };
    let mut walk = Walk::new(version, ranges);
    loop {
        let nodes = walk.take_wanted();
        if nodes.is_empty() {
            return Ok(());
        }
        // All of one level at once, but not more than fit memory: a node has some MiB at most.
        for nodes in nodes.chunks(256) {
            let path = |node: &NodeRef| below(item, &node.location.path);
            let read = |node: &NodeRef| read_block(tree, &path(node), node.location.offset, node.location.len_bytes);
            let blocks: Vec<Vec<u8>> = nodes.par_iter().map(read).collect::<Result<_, _>>()?;
            for (node, bytes) in nodes.iter().zip(blocks) {
                let file: Arc<str> = path(node).into();
                let mut result = Ok(());
                let walked = walk.read(node, &bytes, &mut |key, value| {
                    if result.is_ok() {
                        result = found(key, &file, value);
                    }
                });
                walked.map_err(|error| Problem::of_file(tree.shown(&file).display(), error))?;
                result?;
            }
        }
    }
}

/// The names of all arrays of a database, from the keys of their descriptions.
pub(super) fn names_in_database(tree: &dyn FileTree, item: &str) -> Result<Vec<String>, Problem> {
    let mut names = Vec::new();
    walk(tree, item, vec![KeyRange::all()], &mut |key, _, _| {
        let name = std::str::from_utf8(key).ok().and_then(described);
        names.extend(name.map(str::to_owned));
        Ok(())
    })?;
    Ok(names)
}

/// The array that a key of a description names.
fn described(key: &str) -> Option<&str> {
    let (name, last) = key.rsplit_once('/')?;
    matches!(last, ckfs_format::zarr::read::ZARR_JSON | ckfs_format::zarr::read::ZARRAY).then_some(name)
}

/// The values of the wanted arrays of a database, by number of name, each in the order of its keys.
pub(super) fn values_in_database(
    tree: &dyn FileTree,
    item: &str,
    names: &[String],
    wanted: &[bool],
) -> Result<Vec<Vec<StoreValue>>, Problem> {
    let mut values = vec![Vec::new(); names.len()];
    let finder = Names::new(names, wanted);
    let of_wanted = names.iter().zip(wanted).filter(|(_, wanted)| **wanted);
    let ranges = of_wanted.map(|(name, _)| KeyRange::prefix(format!("{name}/").as_bytes())).collect();
    let (mut inline_bytes, mut count) = (0, 0);
    let mut paths: HashMap<Arc<str>, Arc<str>> = HashMap::new();
    walk(tree, item, ranges, &mut |key, node_file, value| {
        // A key that is no text belongs to no array, whose names are text.
        let Some((number, rest)) = std::str::from_utf8(key).ok().and_then(|key| finder.find(key)) else {
            return Ok(());
        };
        count += 1;
        let (path, bytes) = match value {
            ocdbt::NodeValue::Inline(bytes) => {
                inline_bytes += bytes.len() as u64;
                (Arc::clone(node_file), CodedBytes::Inline(bytes.into()))
            }
            ocdbt::NodeValue::At(location) => {
                let path = paths.entry(Arc::clone(&location.path));
                let path = path.or_insert_with(|| below(item, &location.path).into());
                let span = ByteSpan::of_len(location.offset, location.len_bytes).expect("an end fits 63 bits");
                (Arc::clone(path), CodedBytes::Span(span))
            }
        };
        for (what, limit, found) in
            [("bytes of values inside nodes", INLINE_BYTES_MAX, inline_bytes), ("stored values", VALUES_MAX, count)]
        {
            if found > limit {
                return Err(too_many(what, limit, found));
            }
        }
        values[number].push(StoreValue { key: rest.to_owned(), path, bytes: Some(bytes) });
        Ok(())
    })?;
    Ok(values)
}

/// The names of all arrays that have directories of their own in the item.
pub(super) fn names_in_directories(tree: &dyn FileTree, item: &str) -> Result<Vec<String>, Problem> {
    let mut names = Vec::new();
    for entry in tree.list(item)?.into_iter().filter(|entry| entry.is_directory) {
        let inside = tree.list(&below(item, &entry.name))?;
        if inside.iter().any(|file| described(&format!("/{}", file.name)).is_some()) {
            names.push(entry.name);
        }
    }
    Ok(names)
}

/// The values of the wanted arrays, each in its directory, by number of name.
pub(super) fn values_in_directories(
    tree: &dyn FileTree,
    item: &str,
    names: &[String],
    wanted: &[bool],
) -> Result<Vec<Vec<StoreValue>>, Problem> {
    let finder = Names::new(names, wanted);
    let list = |(number, name): (usize, &String)| {
        let is_own = |path: &str| finder.find(path).is_some_and(|(of, _)| of == number);
        if wanted[number] { list_values(tree, item, name, &is_own) } else { Ok(Vec::new()) }
    };
    let numbered: Vec<(usize, &String)> = names.iter().enumerate().collect();
    numbered.par_iter().map(|named| list(*named)).collect()
}

/// The values in the directory of an array and in those inside, in the order of their paths.
fn list_values(
    tree: &dyn FileTree,
    item: &str,
    name: &str,
    is_own: &dyn Fn(&str) -> bool,
) -> Result<Vec<StoreValue>, Problem> {
    let mut values = Vec::new();
    let mut left = vec![(String::new(), true, 0)];
    while let Some((key, is_directory, depth)) = left.pop() {
        let path = if key.is_empty() { name.to_owned() } else { below(name, &key) };
        if is_directory {
            if depth > DEPTH_MAX {
                return Err(too_many("levels of directories in an array", DEPTH_MAX as u64, depth as u64));
            }
            let entries = tree.list(&below(item, &path))?.into_iter().rev();
            left.extend(entries.map(|entry| (below(&key, &entry.name), entry.is_directory, depth + 1)));
        } else if is_own(&path) {
            if values.len() as u64 >= VALUES_MAX {
                return Err(too_many("stored values", VALUES_MAX, values.len() as u64 + 1));
            }
            values.push(StoreValue { key, path: below(item, &path).into(), bytes: None });
        }
    }
    Ok(values)
}
