//! The directories of an Orbax checkpoint's arrays, computed by arithmetic. A view of thousands of arrays for hundreds of
//! devices has as many chunk files as the product of both numbers; the table has no row for any of them.
//!
//! The order of node numbers: the directory of all arrays, its two metadata files, then for each array its directory, its
//! description and its chunks in row-major order of the grid, and last the directories above arrays whose names have slashes.

use std::borrow::Cow;

use ckfs_format::zarr::write::ZARRAY;
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
}

/// The arrays, sorted by name.
#[derive(Debug)]
pub(super) struct ArrayTable {
    rows: Vec<ArrayRow>,
    names: String,
    paths: ArrayPaths,
    /// Nodes before the directories above arrays.
    len: u64,
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
const RESERVED: [&str; 7] = [
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "_sharding",
    "array_metadatas",
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
    if RESERVED.contains(&name.as_str()) {
        return Err(format!("{}: the format has a file of its own of this name", tensor.name));
    }
    Ok((name, plan.escaped_keys(tensor).join(".")))
}

impl ArrayTable {
    /// The arrays of a plan's bundle.
    ///
    /// # Errors
    /// Why the format cannot hold the bundle.
    pub(super) fn new(plan: &Plan) -> Result<Self, String> {
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
        let mut table = Self { rows: Vec::with_capacity(arrays.len()), names: String::new(), paths, len: FIRST_ARRAY };
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
        let mut table = Self { rows: Vec::new(), names: String::new(), paths, len: FIRST_ARRAY };
        for name in names {
            let (name_start, name_len) = (number(table.names.len()), number(name.len()));
            table.rows.push(ArrayRow { name_start, name_len, tensor: 0, first: table.len });
            table.names.push_str(name);
            table.len += BEFORE_CHUNKS;
        }
        table
    }

    /// Number of nodes.
    pub(super) fn len(&self) -> u64 {
        self.len + self.paths.directories.len() as u64
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
                self.arrays() - above + self.paths.top.len()
            }
            ArrayNode::Above(directory) => {
                let above = &self.paths.directories[directory];
                above.arrays.len() + above.directories.len()
            }
            ArrayNode::Metadata(_) | ArrayNode::Directory(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) => 0,
        }
    }

    /// The child of a directory.
    pub(super) fn child(&self, plan: &Plan, parent: ArrayNode, name: &[u8]) -> Option<ArrayNode> {
        match parent {
            ArrayNode::Root => {
                let metadata = METADATA_FILES.iter().position(|file| file.as_bytes() == name);
                let above = || self.paths.find(None, name).map(ArrayNode::Above);
                metadata.map(ArrayNode::Metadata).or_else(|| self.find(name)).or_else(above)
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
            ArrayNode::Metadata(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) => None,
        }
    }

    /// The parent of a node inside the block; the root's is the root.
    pub(super) fn parent(&self, node: ArrayNode) -> ArrayNode {
        let above = |directory: Option<usize>| directory.map_or(ArrayNode::Root, ArrayNode::Above);
        match node {
            ArrayNode::Root | ArrayNode::Metadata(_) => ArrayNode::Root,
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
                let all = metadata.chain(arrays).chain(self.above(None));
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
            ArrayNode::Metadata(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) => {}
        }
    }
}
