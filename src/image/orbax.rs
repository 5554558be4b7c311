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
use ckfs_format::{
    orbax::{
        read::{SHARDING, TreeKey},
        write::{self as orbax, MetadataPlace},
    },
    zarr::write::ZARRAY,
};
use ckfs_plan::{Plan, PlannedTensor, Problem};

use super::{
    array_table::{ArrayNode, ArrayTable, grid},
    chunk_grid::ChunkGrid,
    file_image::ImageError,
    generated_records::{GeneratedFile, GeneratedRecords, written_starts},
    input::FormatInput,
    name_tree::name_node,
    output::{
        DerivedFrom, Directory, FileContent, FormatFiles, Omission, OmittedFormat, OutputFormat, Subtree, SubtreeNode,
        text_file,
    },
};

/// The only item of a step.
const ITEM: &str = "items";

/// See the module's documentation.
pub(super) const ORBAX: OutputFormat = OutputFormat { name: "orbax", unavailable, layout };

fn lacking(reason: String) -> OmittedFormat {
    OmittedFormat { format: ORBAX.name, omission: Omission::Empty, reason }
}

fn unavailable(plan: &Plan) -> Option<OmittedFormat> {
    ArrayTable::new(plan, &[]).err().map(lacking)
}

#[expect(clippy::unnecessary_wraps, reason = "other formats have problems")]
fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    let beside: Vec<String> = input.objects(Container::Orbax).map(|(path, _)| path.clone()).collect();
    let table = match ArrayTable::new(&input.plan, &beside) {
        Ok(table) => Arc::new(table),
        Err(reason) => return Ok((Directory::default(), Some(lacking(reason)))),
    };
    let metadata = |place| Arc::from(checkpoint_metadata(input, place).into_bytes());
    let arrays = Arrays { input: Arc::clone(input), table, item: metadata(MetadataPlace::Item), tree: OnceLock::new() };
    let step: Arc<[u8]> = metadata(MetadataPlace::Step { item: ITEM });
    let directory = Directory::with(ORBAX.name, |directory| {
        if let Some(directory) = directory.directory("0") {
            directory.file("_CHECKPOINT_METADATA", text_file(step, DerivedFrom::Tensors));
            directory.subtree(ITEM, arrays);
        }
    });
    Ok((directory, None))
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
        &self.input.plan.tensors[self.table.rows[array].tensor as usize]
    }

    fn grid(&self, array: usize) -> ChunkGrid {
        grid(&self.input.plan, self.tensor(array))
    }

    /// What the tree in the source has that the names of arrays do not tell. A program then restores them into its own tree, as
    /// from the source.
    fn saved(&self) -> Saved {
        let tree = &self.input.checkpoint.opened.contents.tree;
        let keys = |array| {
            let keys = tree.keys.get(&self.tensor(array).name)?;
            // Another name, such as one with an escaped character, has other keys.
            (joined(keys) == self.table.name(array)).then(|| (array, keys.clone()))
        };
        let is_scalar = |array: &usize| {
            let tensor = self.tensor(*array);
            tensor.view.shape().rank() == 0 && tree.scalars.contains(&tensor.name)
        };
        let arrays = || 0..self.table.rows.len();
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

/// The name of a file of an array: its description, then its chunks.
fn part_name(grid: &ChunkGrid, place: u64) -> String {
    place.checked_sub(1).map_or_else(|| ZARRAY.to_owned(), |chunk| grid.name(chunk))
}

impl Subtree for Arrays {
    fn nodes(&self) -> u64 {
        self.table.len
    }

    fn node(&self, at: u64) -> SubtreeNode {
        match self.table.node(at) {
            ArrayNode::Above | ArrayNode::Directory(_) => {
                SubtreeNode::Directory(self.table.directories[name_node(at) as usize])
            }
            ArrayNode::Part(..) | ArrayNode::Metadata(_) | ArrayNode::Beside(_) => SubtreeNode::File,
        }
    }

    fn name(&self, at: u64) -> Cow<'_, str> {
        if let ArrayNode::Part(array, place) = self.table.node(at) {
            return part_name(&self.grid(array), place).into();
        }
        self.table.names.name(name_node(at)).into()
    }

    fn parent(&self, at: u64) -> u64 {
        if let ArrayNode::Part(array, _) = self.table.node(at) {
            return self.table.rows[array].node.into();
        }
        self.table.names.parent(name_node(at)).into()
    }

    fn child(&self, at: u64, name: &[u8]) -> Option<u64> {
        match self.table.node(at) {
            ArrayNode::Above => self.table.names.child(name_node(at), name).map(u64::from),
            ArrayNode::Directory(array) => {
                let chunk = || self.grid(array).find(name).map(|chunk| chunk + 1);
                let place = if name == ZARRAY.as_bytes() { Some(0) } else { chunk() };
                place.map(|place| self.table.rows[array].first + place)
            }
            ArrayNode::Part(..) | ArrayNode::Metadata(_) | ArrayNode::Beside(_) => None,
        }
    }

    fn list(&self, at: u64, from: u64, each: &mut dyn FnMut(&str, u64) -> bool) {
        if let ArrayNode::Directory(array) = self.table.node(at) {
            let (grid, first) = (self.grid(array), self.table.rows[array].first);
            (from..=grid.count()).all(|place| each(&part_name(&grid, place), first + place));
        } else {
            self.table.names.list(name_node(at), from, each);
        }
    }

    fn derived_from(&self, at: u64) -> DerivedFrom {
        match self.table.node(at) {
            ArrayNode::Part(array, _) => DerivedFrom::Tensor(self.table.rows[array].tensor),
            ArrayNode::Above | ArrayNode::Directory(_) | ArrayNode::Metadata(_) | ArrayNode::Beside(_) => {
                DerivedFrom::Tensors
            }
        }
    }

    fn is_read_once(&self) -> bool {
        true
    }

    fn content(&self, at: u64) -> Result<FileContent, ImageError> {
        Ok(match self.table.node(at) {
            ArrayNode::Above | ArrayNode::Directory(_) => unreachable!("only files have contents"),
            ArrayNode::Beside(file) => {
                let (_, bytes) = self.input.objects(Container::Orbax).nth(file).expect("the table has these files");
                FileContent::Bytes(Arc::clone(bytes))
            }
            ArrayNode::Metadata(0) => FileContent::Bytes(Arc::clone(&self.item)),
            ArrayNode::Metadata(_) => FileContent::Generated(Arc::clone(self.tree.get_or_init(|| {
                Arc::new(GeneratedFile::new(Arc::new(TreeMetadata::new(Arc::clone(&self.table), self.saved()))))
            }))),
            ArrayNode::Part(array, 0) => {
                FileContent::Bytes(self.grid(array).zarray(&self.tensor(array).name)?.into_bytes().into())
            }
            ArrayNode::Part(array, place) => {
                let tensor = self.tensor(array);
                FileContent::Image(self.grid(array).chunk_image(&tensor.name, &tensor.view, place - 1)?)
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
        self.table.rows.len() + self.saved.empty.len()
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
                let leaf = if let Some(number) = array.checked_sub(self.table.rows.len()) {
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
                        None => orbax::tree_leaf(&words(&self.table.name(array)), value_type),
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
    use crate::{array_table::tests::of_names, generated_records::GeneratedFile};

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
            let file = GeneratedFile::new(Arc::new(TreeMetadata::new(Arc::new(of_names(names, &[])), saved)));
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
