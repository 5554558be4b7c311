//! `orbax/`: an Orbax checkpoint, arrays of zarr version 2, uncompressed, whose chunks are the devices' shards.
//!
//! Readers read whole chunks: where the chunk grid is the device grid, each device's bytes are read once, and no other
//! bytes.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    sync::{Arc, OnceLock},
    time::UNIX_EPOCH,
};

use ckfs_checkpoint::Container;
use ckfs_format::orbax::{
    read::{SHARDING, TreeKey},
    write::{self as orbax, MetadataPlace},
};
use ckfs_plan::{Plan, PlannedTensor, Problem};

use super::{
    array_table::{ArrayNode, ArrayTable, grid},
    file_image::ImageError,
    generated_records::{GeneratedFile, GeneratedRecords, written_starts},
    input::FormatInput,
    output::{
        DerivedFrom, Directory, FileContent, FormatFiles, Omission, OmittedFormat, OutputFormat, Subtree, SubtreeNode,
        text_file,
    },
};

/// The only item of a step.
const ITEM: &str = "items";

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Orbax;

impl Orbax {
    fn lacking(reason: String) -> OmittedFormat {
        OmittedFormat { format: Orbax.name(), omission: Omission::Empty, reason }
    }
}

impl OutputFormat for Orbax {
    fn name(&self) -> &'static str {
        "orbax"
    }

    fn unavailable(&self, plan: &Plan) -> Option<OmittedFormat> {
        ArrayTable::new(plan, Vec::new()).err().map(Self::lacking)
    }

    fn layout(&self, input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
        let beside = input.objects(Container::Orbax).map(|(path, _)| path.clone()).collect();
        let table = match ArrayTable::new(&input.plan, beside) {
            Ok(table) => Arc::new(table),
            Err(reason) => return Ok(Self::lacking(reason).into()),
        };
        let metadata = |place| Arc::from(checkpoint_metadata(input, place).into_bytes());
        let arrays =
            Arrays { input: Arc::clone(input), table, item: metadata(MetadataPlace::Item), tree: OnceLock::new() };
        let step: Arc<[u8]> = metadata(MetadataPlace::Step { item: ITEM });
        let directory = Directory::with(self.name(), |directory| {
            if let Some(directory) = directory.directory("0") {
                directory.file("_CHECKPOINT_METADATA", text_file(step, DerivedFrom::Tensors));
                directory.subtree(ITEM, arrays);
            }
        });
        Ok(directory.into())
    }
}

/// A `_CHECKPOINT_METADATA`; its time is that of the newest source file.
fn checkpoint_metadata(input: &FormatInput, place: MetadataPlace) -> String {
    // Times before 1970 and after 2554 are written as 1970.
    let since = input.modified().duration_since(UNIX_EPOCH).unwrap_or_default();
    let nanoseconds = u64::try_from(since.as_nanos()).unwrap_or(0);
    orbax::checkpoint_metadata(place, input.plan.is_scanned(), nanoseconds)
}

/// The arrays of a step.
struct Arrays {
    input: Arc<FormatInput>,
    table: Arc<ArrayTable>,
    /// Their `_CHECKPOINT_METADATA`.
    item: Arc<[u8]>,
    tree: OnceLock<Arc<GeneratedFile>>,
}

impl Arrays {
    fn tensor(&self, array: usize) -> &PlannedTensor {
        &self.input.plan.tensors[self.table.tensor(array) as usize]
    }

    /// What the tree in the source has that the names of arrays do not tell. A program then restores them into its own tree, as
    /// from the source.
    fn saved(&self) -> Saved {
        let tree = self.input.checkpoint.saved_tree();
        let keys = |array| {
            let keys = tree.keys.get(&self.tensor(array).name)?;
            // Another name, such as one with an escaped character, has other keys.
            (joined(keys) == self.table.name(array)).then(|| (array, keys.clone()))
        };
        let is_scalar = |array: &usize| {
            let tensor = self.tensor(*array);
            tensor.view.shape().rank() == 0 && tree.scalars.contains(&tensor.name)
        };
        let arrays = || 0..self.table.arrays();
        // Without the file of shardings, arrays of jax could be restored with a target alone.
        let are_sharded = self.input.objects(Container::Orbax).any(|(path, _)| path == SHARDING);
        Saved {
            jax_arrays: arrays()
                .filter(|array| are_sharded && tree.jax_arrays.contains(&self.tensor(*array).name))
                .collect(),
            keys: arrays().filter_map(keys).collect(),
            scalars: arrays().filter(is_scalar).collect(),
            empty: if self.input.is_whole() { tree.empty.clone() } else { Vec::new() },
        }
    }
}

impl Subtree for Arrays {
    fn nodes(&self) -> u64 {
        self.table.len()
    }

    fn node(&self, at: u64) -> SubtreeNode {
        let node = self.table.node(at);
        match node {
            ArrayNode::Root | ArrayNode::Above(_) | ArrayNode::Directory(_) | ArrayNode::ArrayMetadatas => {
                let inside = self.table.directories_in(node);
                SubtreeNode::Directory(u32::try_from(inside).expect("fewer tensors than 2^32"))
            }
            ArrayNode::Metadata(_) | ArrayNode::Description(_) | ArrayNode::Chunk(..) | ArrayNode::Beside(_) => {
                SubtreeNode::File
            }
        }
    }

    fn name(&self, at: u64) -> Cow<'_, str> {
        self.table.node_name(&self.input.plan, self.table.node(at))
    }

    fn parent(&self, at: u64) -> u64 {
        self.table.number(self.table.parent(self.table.node(at)))
    }

    fn child(&self, at: u64, name: &[u8]) -> Option<u64> {
        let child = self.table.child(&self.input.plan, self.table.node(at), name)?;
        Some(self.table.number(child))
    }

    fn list(&self, at: u64, from: u64, each: &mut dyn FnMut(&str, u64) -> bool) {
        let mut numbered = |name: &str, child| each(name, self.table.number(child));
        self.table.list(&self.input.plan, self.table.node(at), from, &mut numbered);
    }

    fn derived_from(&self, at: u64) -> DerivedFrom {
        match self.table.node(at) {
            ArrayNode::Root
            | ArrayNode::Above(_)
            | ArrayNode::Directory(_)
            | ArrayNode::ArrayMetadatas
            | ArrayNode::Metadata(_)
            | ArrayNode::Beside(_) => DerivedFrom::Tensors,
            ArrayNode::Description(array) | ArrayNode::Chunk(array, _) => DerivedFrom::Tensor(self.table.tensor(array)),
        }
    }

    fn is_read_once(&self) -> bool {
        true
    }

    fn content(&self, at: u64) -> Result<FileContent, ImageError> {
        let grid = |array| grid(&self.input.plan, self.tensor(array));
        Ok(match self.table.node(at) {
            ArrayNode::Root | ArrayNode::Above(_) | ArrayNode::Directory(_) | ArrayNode::ArrayMetadatas => {
                unreachable!("only files have contents")
            }
            ArrayNode::Beside(file) => {
                let objects = &self.input.checkpoint.saved_tree().objects;
                FileContent::Bytes(Arc::clone(&objects[self.table.beside_path(file)]))
            }
            ArrayNode::Metadata(0) => FileContent::Bytes(Arc::clone(&self.item)),
            ArrayNode::Metadata(_) => FileContent::Generated(Arc::clone(self.tree.get_or_init(|| {
                Arc::new(GeneratedFile::new(Arc::new(TreeMetadata::new(Arc::clone(&self.table), self.saved()))))
            }))),
            ArrayNode::Description(array) => {
                FileContent::Bytes(grid(array).zarray(&self.tensor(array).name)?.into_bytes().into())
            }
            ArrayNode::Chunk(array, chunk) => {
                let tensor = self.tensor(array);
                FileContent::Image(grid(array).chunk_image(&tensor.name, &tensor.view, chunk)?)
            }
        })
    }
}

/// Keys with dots between them.
fn joined(keys: &[TreeKey]) -> String {
    keys.iter().map(TreeKey::to_string).collect::<Vec<_>>().join(".")
}

/// The words of a name as keys.
fn words(name: &str) -> Vec<TreeKey> {
    name.split('.').map(|word| TreeKey::Name(word.to_owned())).collect()
}

/// What a tree has that the names of arrays, which are known by their numbers, do not tell.
#[derive(Clone, Debug, Default)]
struct Saved {
    /// The keys on the way to an array, if they are not the words of its name.
    keys: HashMap<usize, Vec<TreeKey>>,
    /// Arrays that are single numbers.
    scalars: HashSet<usize>,
    /// Arrays of jax, whose shardings are known.
    jax_arrays: HashSet<usize>,
    /// The keys on the way to what is empty, and what it is.
    empty: Vec<(Vec<TreeKey>, String)>,
}

/// `_METADATA`, a group of rows for each array, and for each leaf that is empty.
#[derive(Debug)]
struct TreeMetadata {
    table: Arc<ArrayTable>,
    saved: Saved,
    starts: Vec<u64>,
}

impl TreeMetadata {
    fn new(table: Arc<ArrayTable>, saved: Saved) -> Self {
        let mut tree = Self { table, saved, starts: Vec::new() };
        tree.starts = written_starts(&tree, tree.leaves() + 2);
        tree
    }

    fn leaves(&self) -> usize {
        self.table.arrays() + self.saved.empty.len()
    }
}

impl GeneratedRecords for TreeMetadata {
    fn starts(&self) -> &[u64] {
        &self.starts
    }

    fn write(&self, group: usize, _block: usize, out: &mut Vec<u8>) {
        match group {
            0 => out.extend(orbax::TREE_BEGIN.as_bytes()),
            _ if group == self.leaves() + 1 => out.extend(orbax::TREE_END.as_bytes()),
            _ => {
                if group > 1 {
                    out.push(b',');
                }
                let array = group - 1;
                let leaf = if let Some(number) = array.checked_sub(self.table.arrays()) {
                    let (keys, value_type) = &self.saved.empty[number];
                    orbax::tree_leaf(keys, value_type)
                } else {
                    let value_type = if self.saved.scalars.contains(&array) {
                        orbax::SCALAR
                    } else if self.saved.jax_arrays.contains(&array) {
                        orbax::JAX_ARRAY
                    } else {
                        orbax::ARRAY
                    };
                    match self.saved.keys.get(&array) {
                        Some(keys) => orbax::tree_leaf(keys, value_type),
                        None => orbax::tree_leaf(&words(self.table.name(array)), value_type),
                    }
                };
                out.extend(leaf.as_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generated_records::GeneratedFile;

    #[test]
    fn the_tree_is_generated_in_parts() {
        for names in [&[][..], &["a.b"], &["a.b", "c", "it's.\"d\""]] {
            // The second array has one key, and something is empty.
            let place = vec![TreeKey::Place(5)];
            let empty = (words("e.f"), "Dict".to_owned());
            let saved = Saved {
                keys: HashMap::from([(1, place.clone())]),
                scalars: HashSet::from([2]),
                jax_arrays: HashSet::from([0]),
                empty: vec![empty.clone()],
            };
            let file = GeneratedFile::new(Arc::new(TreeMetadata::new(Arc::new(ArrayTable::of_names(names)), saved)));
            let leaf = |(at, name): (usize, &&str)| match at {
                0 => orbax::tree_leaf(&words(name), orbax::JAX_ARRAY),
                1 => orbax::tree_leaf(&place, orbax::ARRAY),
                2 => orbax::tree_leaf(&words(name), orbax::SCALAR),
                _ => unreachable!("three names"),
            };
            let leaves = names.iter().enumerate().map(leaf);
            let leaves: Vec<String> = leaves.chain([orbax::tree_leaf(&empty.0, &empty.1)]).collect();
            let whole = [orbax::TREE_BEGIN, &leaves.join(","), orbax::TREE_END].concat().into_bytes();
            assert_eq!(file.len_bytes(), whole.len() as u64);
            for start in 0..whole.len() {
                assert_eq!(file.read(start as u64, 50), &whole[start..whole.len().min(start + 50)]);
            }
        }
    }
}
