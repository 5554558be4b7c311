//! The directories of an Orbax checkpoint's arrays, computed by arithmetic. A view of thousands of arrays for hundreds of
//! devices has as many chunk files as the product of both numbers; the table has no row for any of them.
//!
//! The order of node numbers: the tree of names, whose leaves are the arrays' directories, and the files that are in no array's; then
//! for each array its description and its chunks in row-major order of the grid.
//!
//! Orbax joins the keys of an array by dots, and stores it at the path that comes out: `params.mlp/linear.w` is `linear.w` in the
//! directory `params.mlp`.

use std::collections::HashSet;

use ckfs_format::orbax::read::{ARRAY_METADATAS, SHARDING, STRINGS};
use ckfs_plan::{Plan, PlannedTensor, SELF_WORD};
use rayon::prelude::*;

use super::{
    chunk_grid::{CHUNK_BYTES_MAX, ChunkGrid, holds},
    name_tree::{BELOW, NAME_BYTES_MAX, NameNode, NameTree, name_node},
};

/// Names of the metadata files.
const METADATA_FILES: [&str; 2] = ["_CHECKPOINT_METADATA", "_METADATA"];

/// An array.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrayRow {
    /// Its directory in the tree of names.
    pub(super) node: u32,
    /// The tensor that it shows, by its number in the plan.
    pub(super) tensor: u32,
    /// Number of its description, which those of its chunks follow.
    pub(super) first: u64,
}

/// Type of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArrayNode {
    /// The directory of all arrays, or one above some.
    Above,
    /// The directory of an array, by number.
    Directory(usize),
    /// A file of an array: its description, then its chunks.
    Part(usize, u64),
    /// One of [`METADATA_FILES`].
    Metadata(usize),
    /// One of the files that go with a whole training state, by number.
    Beside(usize),
}

/// The arrays, sorted by name.
#[derive(Debug)]
pub(super) struct ArrayTable {
    pub(super) rows: Vec<ArrayRow>,
    pub(super) names: NameTree,
    /// The number of directories in each node of the names.
    pub(super) directories: Vec<u32>,
    /// Number of nodes.
    pub(super) len: u64,
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
    pub(super) fn new(plan: &Plan, beside: &[String]) -> Result<Self, String> {
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
        let name_of = |index: &usize| &plan.tensors[*index].name;
        let last_bytes = |name: &str| name.rsplit('/').next().map_or(0, str::len);
        if let Some((name, index)) = arrays.iter().find(|(name, _)| last_bytes(name) > NAME_BYTES_MAX) {
            let (name_bytes, reason) = (last_bytes(name), "the array's directory would have a name of");
            return Err(format!(
                "{}: {reason} {name_bytes} bytes, at most {NAME_BYTES_MAX} are possible",
                name_of(index)
            ));
        }
        let paths = arrays.iter().map(|(name, _)| name.as_str());
        let paths = paths.chain(METADATA_FILES).chain(beside.iter().map(String::as_str));
        let leaves = paths.zip(0..).map(|(path, number)| (path.replace('/', BELOW), number));
        let mut clash = None;
        let names = NameTree::of(leaves.collect(), &mut |path, [_, second]| {
            let name = arrays.get(second as usize).map_or(&path, |(_, index)| name_of(index));
            clash.get_or_insert_with(|| format!("{name}: another tensor has the keys {path}"));
        });
        let chunks: Vec<u64> = arrays.par_iter().map(|(_, index)| grid(plan, &plan.tensors[*index]).count()).collect();
        let table = Self::with_chunks(names, arrays.iter().map(|(_, index)| number(*index)).zip(chunks));
        clash.map_or(Ok(table), Err)
    }

    /// A tree of names whose first leaves are arrays, of these tensors and with so many chunks.
    fn with_chunks(names: NameTree, arrays: impl Iterator<Item = (u32, u64)>) -> Self {
        let mut table = Self { rows: Vec::new(), directories: Vec::new(), len: names.len(), names };
        for (tensor, chunks) in arrays {
            table.rows.push(ArrayRow { node: 0, tensor, first: table.len });
            table.len += 1 + chunks;
        }
        table.directories = vec![0; name_node(table.names.len()) as usize];
        for node in 1..name_node(table.names.len()) {
            let is_directory = match table.names.node(node) {
                NameNode::Directory(_) => true,
                NameNode::Leaf(leaf) => table.rows.get_mut(leaf as usize).map(|row| row.node = node).is_some(),
            };
            table.directories[table.names.parent(node) as usize] += u32::from(is_directory);
        }
        table
    }

    /// Type of a node.
    pub(super) fn node(&self, at: u64) -> ArrayNode {
        if at >= self.names.len() {
            let array = self.rows.partition_point(|row| row.first <= at) - 1;
            return ArrayNode::Part(array, at - self.rows[array].first);
        }
        let NameNode::Leaf(leaf) = self.names.node(name_node(at)) else { return ArrayNode::Above };
        match (leaf as usize).checked_sub(self.rows.len()) {
            None => ArrayNode::Directory(leaf as usize),
            Some(file) => file.checked_sub(METADATA_FILES.len()).map_or(ArrayNode::Metadata(file), ArrayNode::Beside),
        }
    }

    /// Name of an array: its keys with dots between them. With slashes it is a path.
    pub(super) fn name(&self, array: usize) -> String {
        self.names.path(self.rows[array].node)
    }
}

/// Whether an array can be stored at the path that its name is.
fn is_path(name: &str) -> bool {
    let fits = |part: &str| !matches!(part, "" | "." | "..") && part.len() <= NAME_BYTES_MAX;
    !name.contains('\0') && name.split('/').all(fits)
}

/// The names of arrays with those replaced by their escaped forms that are no paths, or would be inside another array.
pub(super) fn with_paths(names: Vec<(String, String)>) -> Vec<String> {
    let clashes = {
        let all: HashSet<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
        let is_inside = |name: &str| name.match_indices('/').any(|(at, _)| all.contains(&name[..at]));
        names.iter().map(|(name, _)| !is_path(name) || is_inside(name)).collect::<Vec<_>>()
    };
    names.into_iter().zip(clashes).map(|((name, escaped), clashes)| if clashes { escaped } else { name }).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Arrays with these names, without tensors, and files.
    pub(crate) fn of_names(names: &[&str], files: &[&str]) -> ArrayTable {
        let paths = names.iter().chain(&METADATA_FILES).chain(files).zip(0..);
        let leaves = paths.map(|(path, number)| (path.replace('/', BELOW), number));
        let tree = NameTree::of(leaves.collect(), &mut |path, _| panic!("{path} twice"));
        ArrayTable::with_chunks(tree, names.iter().map(|_| (0, 2)))
    }

    #[test]
    fn arrays_and_files_have_numbers_and_places() {
        let names = ["a", "b/c/d", "b/c/e", "b/f", "g"];
        for beside in [&[][..], &[SHARDING], &[SHARDING, STRINGS, "array_metadatas/process_0"]] {
            let table = of_names(&names, beside);
            let mut found: Vec<ArrayNode> = (0..table.len).map(|at| table.node(at)).collect();
            found.retain(|node| *node != ArrayNode::Above);
            let part = |array| move |place| ArrayNode::Part(array, place);
            let array = |array| [ArrayNode::Directory(array)].into_iter().chain((0..3).map(part(array)));
            let files = [ArrayNode::Metadata(0), ArrayNode::Metadata(1)].into_iter();
            let expected =
                (0..names.len()).flat_map(array).chain(files).chain((0..beside.len()).map(ArrayNode::Beside));
            assert!(expected.clone().all(|node| found.contains(&node)));
            assert_eq!(found.len(), expected.count());
            for (number, name) in names.iter().enumerate() {
                assert_eq!(table.name(number), *name);
                assert_eq!(table.node(table.rows[number].node.into()), ArrayNode::Directory(number));
            }
            let top: Vec<&str> = table.names.children(0).map(|at| table.names.name(at)).collect();
            let shown = beside.iter().map(|path| path.split('/').next().unwrap());
            let mut expected: Vec<&str> = ["a", "b", "g"].into_iter().chain(METADATA_FILES).chain(shown).collect();
            expected.sort_unstable();
            assert_eq!(top, expected);
        }
    }

    #[test]
    fn slashes_are_directories_where_they_can_be() {
        let rows: [(&[&str], &[&str]); 4] = [
            (&["a/b", "a/c.d", "e"], &["a/b", "a/c.d", "e"]),
            (&["a", "a/b", "a.b/c"], &["a", "a%2Fb", "a.b/c"]),
            (&["/a", "a//b", "../x", "x/..", "a/./b", "..."], &["%/a", "a%/%/b", "%", "%", "%", "..."]),
            (&["100%", "a\0"], &["100%", "%"]),
        ];
        for (names, expected) in rows {
            let escaped = |name: &str| match name {
                "a/b" => "a%2Fb",
                "/a" => "%/a",
                "a//b" => "a%/%/b",
                _ => "%",
            };
            let found = with_paths(names.iter().map(|name| ((*name).to_owned(), escaped(name).to_owned())).collect());
            assert_eq!(found, expected);
        }
    }
}
