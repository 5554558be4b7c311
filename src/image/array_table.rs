//! The directories of an Orbax checkpoint's arrays, computed by arithmetic. A view of thousands of arrays for hundreds of
//! devices has as many chunk files as the product of both numbers; the table has no row for any of them.
//!
//! The order of node numbers: the directory of all arrays, its two metadata files, then for each array its directory, its
//! description and its chunks in row-major order of the grid, then the directories above arrays whose names have slashes, and last the
//! files that go with a whole training state.

use std::borrow::Cow;

use ckfs_format::{
    orbax::read::{ARRAY_METADATAS, SHARDING, STRINGS},
    zarr::write::ZARRAY,
};
use ckfs_plan::{Plan, PlannedTensor, SELF_WORD};
use ckfs_tensor::to_usize;
use rayon::prelude::*;

use super::{
    array_paths::{ArrayPaths, last, with_paths},
    chunk_grid::{CHUNK_BYTES_MAX, ChunkGrid, holds},
    name_tree::NAME_BYTES_MAX,
};

/// Names of the metadata files, sorted.
pub(super) const METADATA_FILES: [&str; 2] = ["_CHECKPOINT_METADATA", "_METADATA"];

/// Number of the first array's directory.
const FIRST_ARRAY: u64 = 1 + METADATA_FILES.len() as u64;

/// Nodes of an array before its chunks: its directory and its description.
const BEFORE_CHUNKS: u64 = 2;

#[derive(Clone, Copy, Debug)]
struct ArrayRow {
    name_start: u32,
    name_len: u32,
    tensor: u32,
    first: u64,
}

/// Type of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArrayNode {
    /// The directory of all arrays.
    Root,
    /// One of [`METADATA_FILES`].
    Metadata(usize),
    /// A directory above arrays, by number.
    Above(usize),
    /// The directory of an array, by number.
    Directory(usize),
    /// The description of an array.
    Description(usize),
    /// A chunk of an array.
    Chunk(usize, u64),
    /// One of the files beside the arrays, by number.
    Beside(usize),
    /// The directory of those of [`ARRAY_METADATAS`].
    ArrayMetadatas,
}

/// The arrays, sorted by name.
#[derive(Debug)]
pub(super) struct ArrayTable {
    rows: Vec<ArrayRow>,
    names: String,
    paths: ArrayPaths,
    /// Nodes before the directories above arrays.
    len: u64,
    /// Paths of files beside the arrays. Their nodes are the last, after that of [`ARRAY_METADATAS`].
    beside: Vec<String>,
}

fn number(n: usize) -> u32 {
    u32::try_from(n).expect("fewer than 2^32 arrays and bytes of names")
}

/// The chunk grid of a tensor.
pub(super) fn grid(plan: &Plan, tensor: &PlannedTensor) -> ChunkGrid {
    let shape = tensor.view.shape();
    let parts = plan.spec(tensor).grid(shape.rank(), &plan.mesh);
    ChunkGrid::new(tensor.view.dtype(), shape, &parts, plan.chunk_bytes_max.unwrap_or(CHUNK_BYTES_MAX))
}

/// Names of files beside the arrays, here or as Orbax looks for them.
const RESERVED: [&str; 8] = [
    "_METADATA",
    "_CHECKPOINT_METADATA",
    SHARDING,
    STRINGS,
    ARRAY_METADATAS,
    "commit_success.txt",
    "manifest.ocdbt",
    "ocdbt.process_0",
];

/// The name of a tensor's array, and the name where that one is no path.
///
/// # Errors
/// Why the format cannot hold the tensor.
fn array_names(plan: &Plan, tensor: &PlannedTensor) -> Result<(String, String), String> {
    let dtype = tensor.view.dtype();
    if !holds(dtype) {
        return Err(format!("{}: the format can hold {dtype} only one element to a byte", tensor.name));
    }
    let name = plan.keys(tensor).join(".");
    // TensorStore, Orbax's storage library, treats it as a slash.
    if name.contains('\\') {
        return Err(format!("{}: the array's directory would have a name with a backslash", tensor.name));
    }
    // As a file, or as the directory above an array.
    if RESERVED.contains(&name.split('/').next().unwrap_or(&name)) {
        return Err(format!("{}: the format has a file of its own of this name", tensor.name));
    }
    Ok((name, plan.escaped_keys(tensor).join(".")))
}

impl ArrayTable {
    /// The arrays of a plan's bundle.
    ///
    /// # Errors
    /// Why the format cannot hold the bundle.
    pub(super) fn new(plan: &Plan, beside: Vec<String>) -> Result<Self, String> {
        let bundled = plan.tensors.par_iter().enumerate().filter(|(_, tensor)| plan.is_bundled(tensor));
        let named: Vec<_> = bundled.map(|(index, tensor)| Ok((array_names(plan, tensor)?, index))).collect();
        let named: Result<Vec<_>, String> = named.into_iter().collect();
        let (names, indices): (Vec<_>, Vec<_>) = named?.into_iter().unzip();
        let mut arrays: Vec<(String, usize)> = with_paths(names).into_iter().zip(indices).collect();
        arrays.par_sort();
        // Names that start with a name and a dot sort after it, and after names that continue with a character below the dot.
        let is_prefix = |at: usize, arrays: &[(String, usize)]| {
            let stem = format!("{}.", arrays[at].0);
            let after = arrays.partition_point(|(name, _)| *name < stem);
            arrays.get(after).is_some_and(|(name, _)| name.starts_with(&stem))
        };
        let prefixes: Vec<usize> = (0..arrays.len()).into_par_iter().filter(|at| is_prefix(*at, &arrays)).collect();
        for at in prefixes {
            arrays[at].0.push('.');
            arrays[at].0.push_str(SELF_WORD);
        }
        arrays.par_sort();
        let names_bytes: usize = arrays.iter().map(|(name, _)| name.len()).sum();
        if u32::try_from(names_bytes).is_err() {
            return Err(format!("the names have {names_bytes} bytes together, fewer than 2^32 are possible"));
        }
        let paths = ArrayPaths::new(arrays.iter().map(|(name, _)| name.as_str()));
        let (rows, names) = (Vec::with_capacity(arrays.len()), String::new());
        let mut table = Self { rows, names, paths, len: FIRST_ARRAY, beside };
        let chunks = arrays.par_iter().map(|(_, index)| grid(plan, &plan.tensors[*index]).count());
        let chunks: Vec<u64> = chunks.collect();
        for ((name, index), chunks) in arrays.iter().zip(chunks) {
            let tensor = &plan.tensors[*index];
            let name_bytes = last(name).len();
            if name_bytes > NAME_BYTES_MAX {
                let reason = "the array's directory would have a name of";
                return Err(format!(
                    "{}: {reason} {name_bytes} bytes, at most {NAME_BYTES_MAX} are possible",
                    tensor.name
                ));
            }
            let start = number(table.names.len());
            if table.rows.last().is_some_and(|last| table.names[last.name_start as usize..] == **name) {
                return Err(format!("{}: another tensor has the keys {name}", tensor.name));
            }
            table.names.push_str(name);
            let row =
                ArrayRow { name_start: start, name_len: number(name.len()), tensor: number(*index), first: table.len };
            table.rows.push(row);
            table.len += BEFORE_CHUNKS + chunks;
        }
        Ok(table)
    }

    /// Arrays with these names and without tensors.
    #[cfg(test)]
    pub(super) fn of_names(names: &[&str]) -> Self {
        let paths = ArrayPaths::default();
        let mut table = Self { rows: Vec::new(), names: String::new(), paths, len: FIRST_ARRAY, beside: Vec::new() };
        for name in names {
            let (name_start, name_len) = (number(table.names.len()), number(name.len()));
            table.rows.push(ArrayRow { name_start, name_len, tensor: 0, first: table.len });
            table.names.push_str(name);
            table.len += BEFORE_CHUNKS;
        }
        table
    }

    /// With these files beside the arrays.
    #[cfg(test)]
    fn with_beside(self, beside: &[&str]) -> Self {
        Self { beside: beside.iter().map(|path| (*path).to_owned()).collect(), ..self }
    }

    /// Number of nodes.
    pub(super) fn len(&self) -> u64 {
        self.first_beside() + self.beside.len() as u64
    }

    /// Number of the directory [`ARRAY_METADATAS`], if there is one.
    fn array_metadatas(&self) -> u64 {
        self.len + self.paths.directories.len() as u64
    }

    fn has_array_metadatas(&self) -> bool {
        self.beside.iter().any(|path| path.contains('/'))
    }

    /// Number of the first file beside the arrays.
    fn first_beside(&self) -> u64 {
        self.array_metadatas() + u64::from(self.has_array_metadatas())
    }

    /// The directory of a file beside the arrays, and its name there.
    fn beside(&self, file: usize) -> (ArrayNode, &str) {
        match self.beside[file].split_once('/') {
            Some((_, name)) => (ArrayNode::ArrayMetadatas, name),
            None => (ArrayNode::Root, &self.beside[file]),
        }
    }

    /// The files beside the arrays that are in a directory, and their directory in that of all arrays.
    fn all_beside(&self, directory: ArrayNode) -> impl Iterator<Item = (&str, ArrayNode)> {
        let all = (0..self.beside.len()).map(|file| (self.beside(file), ArrayNode::Beside(file)));
        let inside = all.filter(move |((parent, _), _)| *parent == directory).map(|((_, name), node)| (name, node));
        let has_below = directory == ArrayNode::Root && self.has_array_metadatas();
        let below = has_below.then_some((ARRAY_METADATAS, ArrayNode::ArrayMetadatas));
        inside.chain(below)
    }

    /// The path of a file beside the arrays.
    pub(super) fn beside_path(&self, file: usize) -> &str {
        &self.beside[file]
    }

    /// Number of arrays.
    pub(super) fn arrays(&self) -> usize {
        self.rows.len()
    }

    /// Type of a node.
    pub(super) fn node(&self, at: u64) -> ArrayNode {
        if at == 0 {
            return ArrayNode::Root;
        }
        if at < FIRST_ARRAY {
            return ArrayNode::Metadata(to_usize(at - 1));
        }
        if at >= self.first_beside() {
            return ArrayNode::Beside(to_usize(at - self.first_beside()));
        }
        if at >= self.array_metadatas() {
            return ArrayNode::ArrayMetadatas;
        }
        if at >= self.len {
            return ArrayNode::Above(to_usize(at - self.len));
        }
        let array = self.rows.partition_point(|row| row.first <= at) - 1;
        match at - self.rows[array].first {
            0 => ArrayNode::Directory(array),
            1 => ArrayNode::Description(array),
            chunk => ArrayNode::Chunk(array, chunk - BEFORE_CHUNKS),
        }
    }

    /// Number of a node.
    pub(super) fn number(&self, node: ArrayNode) -> u64 {
        match node {
            ArrayNode::Root => 0,
            ArrayNode::Metadata(file) => 1 + file as u64,
            ArrayNode::Above(directory) => self.len + directory as u64,
            ArrayNode::Directory(array) => self.rows[array].first,
            ArrayNode::Description(array) => self.rows[array].first + 1,
            ArrayNode::Chunk(array, chunk) => self.rows[array].first + BEFORE_CHUNKS + chunk,
            ArrayNode::ArrayMetadatas => self.array_metadatas(),
            ArrayNode::Beside(file) => self.first_beside() + file as u64,
        }
    }

    /// Name of an array: its keys with dots between them. With slashes it is a path.
    pub(super) fn name(&self, array: usize) -> &str {
        let row = self.rows[array];
        &self.names[row.name_start as usize..(row.name_start + row.name_len) as usize]
    }

    /// The tensor that an array shows, by its number in the plan.
    pub(super) fn tensor(&self, array: usize) -> u32 {
        self.rows[array].tensor
    }

    /// The directory of the array of this name. A name of a file has no slash.
    fn find(&self, name: &[u8]) -> Option<ArrayNode> {
        let at = self.rows.partition_point(|row| {
            let start = row.name_start as usize;
            self.names.as_bytes()[start..start + row.name_len as usize] < *name
        });
        (at < self.rows.len() && self.name(at).as_bytes() == name).then_some(ArrayNode::Directory(at))
    }

    /// Number of directories in one.
    pub(super) fn directories_in(&self, node: ArrayNode) -> usize {
        match node {
            ArrayNode::Root => {
                let above: usize = self.paths.directories.iter().map(|above| above.arrays.len()).sum();
                self.arrays() - above + self.paths.top.len() + usize::from(self.has_array_metadatas())
            }
            ArrayNode::Above(directory) => {
                let above = &self.paths.directories[directory];
                above.arrays.len() + above.directories.len()
            }
            ArrayNode::Metadata(_)
            | ArrayNode::Directory(_)
            | ArrayNode::Description(_)
            | ArrayNode::Chunk(..)
            | ArrayNode::Beside(_)
            | ArrayNode::ArrayMetadatas => 0,
        }
    }

    /// The child of a directory.
    pub(super) fn child(&self, plan: &Plan, parent: ArrayNode, name: &[u8]) -> Option<ArrayNode> {
        match parent {
            ArrayNode::Root => {
                let metadata = METADATA_FILES.iter().position(|file| file.as_bytes() == name);
                let above = || self.paths.find(None, name).map(ArrayNode::Above);
                let beside = || self.all_beside(parent).find(|(file, _)| file.as_bytes() == name).map(|(_, node)| node);
                metadata.map(ArrayNode::Metadata).or_else(|| self.find(name)).or_else(above).or_else(beside)
            }
            ArrayNode::ArrayMetadatas => {
                self.all_beside(parent).find(|(file, _)| file.as_bytes() == name).map(|(_, node)| node)
            }
            ArrayNode::Above(directory) => {
                let mut arrays = self.paths.directories[directory].arrays.iter().copied();
                let array = arrays.find(|array| last(self.name(*array)).as_bytes() == name);
                let above = || self.paths.find(Some(directory), name).map(ArrayNode::Above);
                array.map(ArrayNode::Directory).or_else(above)
            }
            ArrayNode::Directory(array) => {
                if name == ZARRAY.as_bytes() {
                    return Some(ArrayNode::Description(array));
                }
                let tensor = &plan.tensors[self.tensor(array) as usize];
                grid(plan, tensor).find(name).map(|chunk| ArrayNode::Chunk(array, chunk))
            }
            ArrayNode::Metadata(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) | ArrayNode::Beside(_) => None,
        }
    }

    /// The parent of a node inside the block; the root's is the root.
    pub(super) fn parent(&self, node: ArrayNode) -> ArrayNode {
        let above = |directory: Option<usize>| directory.map_or(ArrayNode::Root, ArrayNode::Above);
        match node {
            ArrayNode::Root | ArrayNode::Metadata(_) | ArrayNode::ArrayMetadatas => ArrayNode::Root,
            ArrayNode::Beside(file) => self.beside(file).0,
            ArrayNode::Above(directory) => above(self.paths.directories[directory].parent),
            ArrayNode::Directory(array) => above(self.paths.of_array(array)),
            ArrayNode::Description(array) | ArrayNode::Chunk(array, _) => ArrayNode::Directory(array),
        }
    }

    /// A node's name; the root's parent names the root.
    pub(super) fn node_name(&self, plan: &Plan, node: ArrayNode) -> Cow<'_, str> {
        match node {
            ArrayNode::Root => "".into(),
            ArrayNode::Metadata(file) => METADATA_FILES[file].into(),
            ArrayNode::ArrayMetadatas => ARRAY_METADATAS.into(),
            ArrayNode::Beside(file) => self.beside(file).1.into(),
            ArrayNode::Above(directory) => self.paths.directories[directory].name().into(),
            ArrayNode::Directory(array) => last(self.name(array)).into(),
            ArrayNode::Description(_) => ZARRAY.into(),
            ArrayNode::Chunk(array, chunk) => grid(plan, &plan.tensors[self.tensor(array) as usize]).name(chunk).into(),
        }
    }

    /// The directories above arrays in one of these, or in that of all arrays.
    fn above(&self, directory: Option<usize>) -> impl Iterator<Item = (&str, ArrayNode)> {
        let inside = self.paths.inside(directory).iter();
        inside.map(|number| (self.paths.directories[*number].name(), ArrayNode::Above(*number)))
    }

    /// Calls `each` with a directory's children from entry number `from` on until it returns false; other nodes have none.
    pub(super) fn list(
        &self,
        plan: &Plan,
        parent: ArrayNode,
        from: u64,
        each: &mut dyn FnMut(&str, ArrayNode) -> bool,
    ) {
        match parent {
            ArrayNode::Root => {
                let metadata = METADATA_FILES.iter().enumerate().map(|(file, name)| (*name, ArrayNode::Metadata(file)));
                let arrays = (0..self.rows.len()).filter(|array| self.paths.of_array(*array).is_none());
                let arrays = arrays.map(|array| (self.name(array), ArrayNode::Directory(array)));
                let all = metadata.chain(arrays).chain(self.above(None)).chain(self.all_beside(parent));
                all.skip(to_usize(from)).all(|(name, node)| each(name, node));
            }
            ArrayNode::Above(directory) => {
                let arrays = self.paths.directories[directory].arrays.iter();
                let arrays = arrays.map(|array| (last(self.name(*array)), ArrayNode::Directory(*array)));
                let all = arrays.chain(self.above(Some(directory)));
                all.skip(to_usize(from)).all(|(name, node)| each(name, node));
            }
            ArrayNode::Directory(array) => {
                let grid = grid(plan, &plan.tensors[self.tensor(array) as usize]);
                let mut going = from > 0 || each(ZARRAY, ArrayNode::Description(array));
                let mut chunk = from.saturating_sub(1);
                while going && chunk < grid.count() {
                    going = each(&grid.name(chunk), ArrayNode::Chunk(array, chunk));
                    chunk += 1;
                }
            }
            ArrayNode::ArrayMetadatas => {
                self.all_beside(parent).skip(to_usize(from)).all(|(name, node)| each(name, node));
            }
            ArrayNode::Metadata(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) | ArrayNode::Beside(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_beside_the_arrays_have_numbers_and_places() {
        for beside in [&[][..], &[SHARDING], &[SHARDING, STRINGS, "array_metadatas/process_0"]] {
            let table = ArrayTable::of_names(&["a", "b"]).with_beside(beside);
            assert!((0..table.len()).all(|at| table.number(table.node(at)) == at));
            let names = |directory| table.all_beside(directory).map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
            let has_keys = beside.len() == 3;
            let top = beside.iter().filter(|path| !path.contains('/')).copied();
            let top: Vec<&str> = top.chain(has_keys.then_some(ARRAY_METADATAS)).collect();
            assert_eq!(names(ArrayNode::Root), top);
            assert_eq!(names(ArrayNode::ArrayMetadatas), if has_keys { vec!["process_0"] } else { Vec::new() });
            assert_eq!(table.directories_in(ArrayNode::Root), 2 + usize::from(has_keys));
            for (file, path) in beside.iter().enumerate() {
                assert_eq!(table.beside_path(file), *path);
                let parent = table.parent(ArrayNode::Beside(file));
                assert!(names(parent).iter().any(|name| path.ends_with(name.as_str())));
            }
        }
    }
}
