//! Orbax checkpoints: of `CheckpointManager` or of one step, of one process or many, in an OCDBT database or in directories.
//!
//! ```text
//! item.rs          which directory holds the arrays; unfinished ones never
//! store.rs         which keys there are, and where the bytes of each are: OCDBT, or a directory for each array
//! array.rs         from the chunks of an array to the boxes that cover it
//! coded.rs         chunks that must be decoded, and the decoded files that show them
//! chunk_source.rs  the source with these files; decoder.rs decodes into what chunk_pool.rs holds, ahead.rs tells what comes next
//! ```
//!
//! A tensor is called as its keys in the tree, joined by dots, as Orbax itself stores it. Only the model is read: what a training
//! state has besides, above all the state of the optimizer, is listed, and costs nothing until it is requested.

mod ahead;
mod array;
mod chunk_pool;
mod chunk_source;
mod coded;
mod decoder;
mod item;
mod store;

use std::{collections::BTreeMap, sync::Arc};

use array::{ArrayBox, ToLayOut};
pub(crate) use chunk_source::ChunkSource;
use ckfs_format::{
    orbax::{
        read::{
            ARRAY_METADATAS, Leaf, LeafKind, METADATA, PROCESS_METADATA, SHARDING, STRINGS, Tree, TreeKey, random_keys,
        },
        write::{JAX_ARRAY, SCALAR, array_metadatas},
    },
    zarr::read::{Array, ZARR_JSON, ZARRAY},
};
use ckfs_source::Source;
use ckfs_tensor::{DType, Element, Shape};
pub(crate) use coded::DecodedFile;
pub(crate) use item::{is_item, is_orbax};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde_json::{Map, Value};
use store::{Files, StoreValue};

use super::super::{
    container::{Container, Contents, LeftOut},
    mosaic::MosaicBuilder,
    problem::{Problem, Problems},
    tree::{FileTree, below},
};

/// Members of a training state that are not the model.
const STATE: [&str; 7] = ["opt_state", "opt_states", "optimizer", "optimizer_state", "step", "steps", "rng"];

/// The member of a training state that is the model.
const MODEL: &str = "params";

/// A tensor of an Orbax checkpoint.
#[derive(Clone, Debug)]
struct OrbaxTensor {
    name: String,
    dtype: DType,
    shape: Shape,
    /// One element, little-endian, for indices that no box covers; `None` if every index is covered.
    fill: Option<Vec<u8>>,
    boxes: Vec<ArrayBox>,
}

/// What an Orbax checkpoint holds.
#[derive(Debug, Default)]
pub(crate) struct OrbaxContents {
    /// Directory of the arrays, relative to the checkpoint.
    #[cfg(test)]
    item: String,
    /// The files that reads need, in the order of their ids.
    pub(crate) paths: Vec<String>,
    tensors: Vec<OrbaxTensor>,
    /// All but the table.
    rest: Contents,
}

impl OrbaxContents {
    /// The contents with the table. `files` begins with the files of [`OrbaxContents::paths`].
    pub(crate) fn contents(&mut self, files: &Arc<dyn Source>, problems: &mut Problems) -> Contents {
        let contents = std::mem::take(&mut self.rest);
        let source = ChunkSource::looked_at(files, &contents.decoded, problems);
        let mut builder = MosaicBuilder::new(&source, problems);
        for OrbaxTensor { name, dtype, shape, fill, boxes } in &self.tensors {
            let fill = fill.as_ref().and_then(|fill| Element::from_bytes(*dtype, fill));
            let boxes = boxes.iter().map(|part| part.stored(files.file_count()));
            builder.add(name, *dtype, shape.extents(), boxes, fill);
        }
        Contents { table: builder.finish(), ..contents }
    }
}

#[cfg(test)]
impl OrbaxContents {
    /// The source of the tensors, over one that begins with the files of [`OrbaxContents::paths`].
    fn source(&mut self, files: Arc<dyn Source>) -> Arc<dyn Source> {
        ChunkSource::over(files, &std::mem::take(&mut self.rest.decoded).into())
    }
}

/// The leaves of an item.
struct Leaves {
    names: Vec<String>,
    wanted: Vec<bool>,
    uses_zarr3: bool,
    stores_fill_values: bool,
    /// What is left out and what the names do not tell, with nothing else.
    rest: Contents,
}

/// Reads the descriptions of an Orbax checkpoint: of the model, or of the `whole_state`. With `allow_unfinished`, also of one that its
/// saver has not marked as finished.
///
/// # Errors
/// All problems with the checkpoint.
pub(crate) fn read(
    tree: &dyn FileTree,
    whole_state: bool,
    allow_unfinished: bool,
) -> Result<OrbaxContents, Vec<Problem>> {
    let one = |problem: Problem| vec![problem];
    let item = item::find(tree, allow_unfinished).map_err(one)?;
    let directory = item.directory.as_str();
    let is_database = store::is_database(tree, directory).map_err(one)?;
    let leaves = leaves(tree, directory, is_database, whole_state)?;
    let values = if is_database {
        store::values_in_database(tree, directory, &leaves.names, &leaves.wanted)
    } else {
        store::values_in_directories(tree, directory, &leaves.names, &leaves.wanted)
    };
    let values = values.map_err(one)?;
    let rows = leaves.names.iter().zip(&values).zip(&leaves.wanted);
    let rows: Vec<(&String, &Vec<StoreValue>)> = rows.filter(|(_, wanted)| **wanted).map(|(row, _)| row).collect();
    let arrays: Vec<_> = rows.par_iter().map(|(name, values)| describe(tree, &leaves, name, values)).collect();
    let (mut files, mut decoded, mut problems) = (Files::default(), Vec::new(), Vec::new());
    let mut tensors = Vec::with_capacity(rows.len());
    for ((name, values), array) in rows.into_iter().zip(arrays) {
        let array = match array {
            Ok(array) => array,
            Err(problem) => {
                problems.push(problem);
                continue;
            }
        };
        let (dtype, shape, fill) = (array.dtype, array.shape.clone(), array.fill.to_vec());
        // Of an unfinished checkpoint, a chunk that is not there is lost: nothing says that it holds one value.
        let stores_fill_values = leaves.stores_fill_values || item.is_unfinished.is_some();
        let to_lay_out = ToLayOut { tree, name, array, values, stores_fill_values };
        match to_lay_out.lay_out(&mut files, &mut decoded) {
            Ok((boxes, has_holes)) => {
                tensors.push(OrbaxTensor { name: name.clone(), dtype, shape, fill: has_holes.then_some(fill), boxes });
            }
            Err(found) => problems.extend(found),
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    let passed_over = item.unfinished.iter().map(|step| format!("step {step} is passed over"));
    let used = item.step.map(|step| format!("the latest finished step is {step}"));
    let mut rest = leaves.rest;
    if !item.unfinished.is_empty() {
        rest.warnings.extend(passed_over.chain(used));
    }
    rest.warnings.extend(item.is_unfinished.map(|reason| {
        let step = item.step.map_or_else(String::new, |step| format!("step {step}: "));
        format!("{step}unfinished, and read since --allow-unfinished says so: {reason}")
    }));
    Ok(OrbaxContents {
        #[cfg(test)]
        item: item.directory,
        paths: files.paths,
        tensors,
        rest: Contents { decoded, scan_layers: item.scan_layers.or(rest.scan_layers), ..rest },
    })
}

/// Whether the words between the dots of a leaf's name are its keys, all of them names.
fn is_told_by_name(leaf: &Leaf) -> bool {
    leaf.keys.iter().all(|key| matches!(key, TreeKey::Name(name) if !name.contains('.')))
}

fn left_out(name: String, reason: &str) -> LeftOut {
    LeftOut { name, kind: reason.to_owned() }
}

/// Why a leaf is left out of the model, by its first key.
fn not_of_the_model(first: &str, has_model: bool) -> Option<&'static str> {
    let is_state = if has_model { first != MODEL } else { STATE.contains(&first) };
    is_state.then_some("training state, not the model; --training-state shows it")
}

/// The leaves that the tree has, or, without a description of the tree, the arrays that are stored.
fn leaves(tree: &dyn FileTree, directory: &str, is_database: bool, whole_state: bool) -> Result<Leaves, Vec<Problem>> {
    let one = |problem: Problem| vec![problem];
    let path = below(directory, METADATA);
    let Some(bytes) = tree.description(&path).map_err(|error| one(error.into()))? else {
        let names = if is_database {
            store::names_in_database(tree, directory)
        } else {
            store::names_in_directories(tree, directory)
        };
        let names = names.map_err(one)?;
        let first = |name: &str| name.split('.').next().unwrap_or(name).to_owned();
        let has_model = names.iter().any(|name| first(name) == MODEL);
        let reasons: Vec<_> = names.iter().map(|name| not_of_the_model(&first(name), has_model)).collect();
        let left_out = names.iter().zip(&reasons).filter_map(|(name, reason)| Some(left_out(name.clone(), (*reason)?)));
        let left_out = if whole_state { Vec::new() } else { left_out.collect() };
        let wanted = reasons.iter().map(|reason| whole_state || reason.is_none()).collect();
        let rest = Contents { container: Container::Orbax, left_out, ..Contents::default() };
        return Ok(Leaves { names, wanted, uses_zarr3: true, stores_fill_values: false, rest });
    };
    let described = Tree::parse(&bytes);
    let described = described.map_err(|error| one(Problem::of_file(tree.shown(directory).display(), error)))?;
    let firsts: Vec<String> = described.leaves.iter().map(|leaf| leaf.keys[0].to_string()).collect();
    let has_model = firsts.iter().any(|first| first == MODEL);
    let (mut names, mut wanted, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    let mut rest = Contents { container: Container::Orbax, ..Contents::default() };
    let saved = &mut rest.tree;
    for (leaf, first) in described.leaves.iter().zip(&firsts) {
        let reason = not_of_the_model(first, has_model).filter(|_| !whole_state);
        let reason = reason.or(match leaf.kind {
            LeafKind::Text if !whole_state => Some("text, not an array"),
            LeafKind::Text | LeafKind::Array | LeafKind::Empty | LeafKind::Other(_) => None,
        });
        if whole_state && leaf.value_type == JAX_ARRAY {
            saved.jax_arrays.insert(leaf.name());
        }
        match &leaf.kind {
            LeafKind::Text if whole_state => {
                saved.empty.push((leaf.keys.clone(), leaf.value_type.clone()));
                continue;
            }
            LeafKind::Empty => {
                saved.empty.extend(reason.is_none().then(|| (leaf.keys.clone(), leaf.value_type.clone())));
                continue;
            }
            LeafKind::Array if leaf.value_type == SCALAR => saved.scalars.extend([leaf.name()]),
            LeafKind::Other(kind) if reason.is_none() => {
                let what = format!("leaf {}: stored as {kind:?}, expected an array", leaf.name());
                problems.push(Problem::Other(what));
            }
            LeafKind::Array | LeafKind::Text | LeafKind::Other(_) => {}
        }
        rest.left_out.extend(reason.map(|reason| left_out(leaf.name(), reason)));
        names.push(leaf.name());
        wanted.push(reason.is_none());
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    rest.scan_layers = described.custom.as_ref().and_then(|custom| custom.get("scan_layers")?.as_bool());
    let Tree { uses_zarr3, stores_fill_values, .. } = described;
    if whole_state {
        saved.objects = objects(tree, directory).map_err(one)?;
        let texts = described.leaves.iter().filter(|leaf| leaf.kind == LeafKind::Text);
        check_texts(saved.objects.get(STRINGS), texts)
            .map_err(|message| one(Problem::of_file(tree.shown(&below(directory, STRINGS)).display(), message)))?;
    }
    let untold = described.leaves.into_iter().filter(|leaf| !is_told_by_name(leaf));
    saved.keys = untold.map(|leaf| (leaf.name(), leaf.keys)).collect();
    Ok(Leaves { names, wanted, uses_zarr3, stores_fill_values, rest })
}

/// The files of an item that hold no arrays and go with the whole state: how arrays were sharded, texts, and which arrays are keys of
/// random numbers.
fn objects(tree: &dyn FileTree, directory: &str) -> Result<BTreeMap<String, Arc<[u8]>>, Problem> {
    let mut objects = BTreeMap::new();
    for name in [SHARDING, STRINGS] {
        if let Some(bytes) = tree.description(&below(directory, name))? {
            objects.insert(name.to_owned(), bytes.into());
        }
    }
    let processes = below(directory, ARRAY_METADATAS);
    let mut keys = BTreeMap::new();
    for entry in tree.list(&processes)? {
        let path = below(&processes, &entry.name);
        let Some(bytes) = tree.description(&path)? else { continue };
        let found = random_keys(&bytes).map_err(|error| Problem::of_file(tree.shown(&path).display(), error))?;
        keys.extend(found);
    }
    if !keys.is_empty() {
        objects.insert(PROCESS_METADATA.to_owned(), array_metadatas(keys.values()).into_bytes().into());
    }
    Ok(objects)
}

/// Checks that the file of texts has that of every leaf.
fn check_texts<'a>(texts: Option<&Arc<[u8]>>, mut leaves: impl Iterator<Item = &'a Leaf>) -> Result<(), String> {
    let found = texts.map(|bytes| serde_json::from_slice::<Map<String, Value>>(bytes)).transpose();
    let found = found.map_err(|error| error.to_string())?;
    let missing = leaves.find(|leaf| !found.as_ref().is_some_and(|texts| texts.contains_key(&leaf.name())));
    missing.map_or(Ok(()), |leaf| Err(format!("expected the text of {}, found none", leaf.name())))
}

/// The description of an array.
fn describe(tree: &dyn FileTree, leaves: &Leaves, name: &str, values: &[StoreValue]) -> Result<Array, Problem> {
    let of = |key: &str| values.iter().find(|value| value.key == key);
    let expected = if leaves.uses_zarr3 { ZARR_JSON } else { ZARRAY };
    let found = of(expected).or_else(|| of(ZARR_JSON)).or_else(|| of(ZARRAY));
    let found = found.ok_or_else(|| {
        Problem::Other(format!("array {name}: in _METADATA, but its description ({expected}) is missing"))
    })?;
    let bytes = found.read(tree)?;
    let parsed = if found.key == ZARR_JSON { Array::parse_v3(&bytes) } else { Array::parse_v2(&bytes) };
    parsed.map_err(|error| Problem::Other(format!("array {name}, {}: {error}", tree.shown(&found.path).display())))
}

#[cfg(test)]
mod tests;
