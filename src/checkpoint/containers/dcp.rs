//! Directories of `torch.distributed.checkpoint`, of both kinds: `.metadata` with `*.distcp` files, whose segments are archives
//! of `torch.save`, and safetensors files that say where their tensors are in the whole.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    path::Path,
    sync::Arc,
};

use ckfs_format::{
    dcp::{
        read::{DcpChunk, DcpObject, DcpState, DcpTensor, FILES_OF_SHARDS, SHARDING_INFO},
        write::DcpSegment,
    },
    safetensors::Header,
    torch::{
        megatron,
        read::{OpenedArchive, SavedTensor},
        state::TorchTensor,
    },
};
use ckfs_source::FileId;
use ckfs_tensor::{PerAxis, mosaic::row_major};
use serde_json::{Map, Value as Json};

use super::super::{
    archive::{self, ArchiveSpan},
    container::{Container, Contents, DCP_METADATA, LeftOut, SavedArguments},
    folder::{Folder, PinnedFiles},
    foreign,
    json::JSON_FILE_BYTES_MAX,
    mosaic::{MosaicBuilder, StoredBox},
    prefix::is_optimizer_state,
    problem::{Expected, Problem, Problems},
    table::TensorTable,
};

/// Longest `.metadata` that is read, in bytes: that of 10^7 chunks is shorter.
const METADATA_BYTES_MAX: u64 = 16 * JSON_FILE_BYTES_MAX;

/// Most bytes of what is no tensor, which stay in memory: settings of optimizers, states of data loaders.
const OBJECTS_BYTES_MAX: u64 = 256 << 20;

/// Where Megatron-Core puts the arguments of the training, and what is the same on all ranks.
const COMMON: &str = "common.pt";
/// Where it says in which format the rest is.
const FORMAT: &str = "metadata.json";
/// Their name there, and in `.metadata`.
const ARGUMENTS: &str = "args";
/// Where Megatron-Bridge puts the configuration of its run, and its member with the model's.
const RUN_CONFIG: (&str, &str) = ("run_config.yaml", "model:");

/// Chooses the weight files of a classic directory: all that `.metadata` may name.
pub(crate) fn choose(folder: &mut Folder) {
    folder.choose(|path| path.ends_with(".distcp"));
}

/// Whether a header says where its tensors are in the whole ones.
pub(crate) fn is_sharded(header: &Header) -> bool {
    header.metadata().iter().any(|(key, _)| key == SHARDING_INFO)
}

/// Reads a directory of safetensors files, or one file `alone`.
pub(crate) fn read_safetensors(
    files: &PinnedFiles<'_>,
    headers: &[(FileId, Header)],
    alone: bool,
    problems: &mut Problems,
) -> Contents {
    let named = headers.iter().map(|(id, header)| (files.path(*id), header));
    let state = DcpState::of_safetensors(named).map_err(|error| Problem::of_file(SHARDING_INFO, error));
    let state = problems.taken(state).unwrap_or_default();
    if alone && state.has_parts {
        let directory = files.source.path(FileId(0)).parent().unwrap_or(Path::new("."));
        let message = format!(
            "one of several files that hold parts of the same tensors (DCP_SHARDING_INFO); give the directory {}",
            directory.display()
        );
        problems.of_file(files.path(FileId(0)), message);
        return Contents::new(Container::Dcp, TensorTable::default());
    }
    // Files that all hold every tensor whole are of use one by one.
    let counts = !alone && (state.has_parts || state.lacks_shapes);
    if counts && let Err(message) = count_files(files, headers) {
        problems.of_file(SHARDING_INFO, message);
    }
    let mut builder = MosaicBuilder::new(files.source, problems);
    for tensor in &state.tensors {
        // Replicas of a part are the same part: torch too reads one of them.
        let mut parts = HashSet::with_capacity(tensor.chunks.len());
        let chunks = tensor.chunks.iter().filter(|chunk| parts.insert((&chunk.offsets, &chunk.sizes)));
        let boxes: Vec<StoredBox> = chunks
            .map(|chunk| {
                let (file, _) = headers[chunk.segment.file as usize];
                stored(file, chunk.segment.offset, chunk, row_major(&chunk.sizes))
            })
            .collect();
        builder.add(&tensor.name, tensor.dtype, &tensor.shape, boxes, None);
    }
    let mut contents = Contents::new(Container::Dcp, builder.finish());
    contents.are_ranks = true;
    let is_counted = headers.iter().flat_map(|(_, header)| header.metadata()).any(|(key, _)| key == FILES_OF_SHARDS);
    contents.uncounted = (!alone && !is_counted && state.lacks_shapes).then_some(headers.len());
    contents
}

/// Compares the number of files with what they say of it, or with the numbers in their names.
fn count_files(files: &PinnedFiles<'_>, headers: &[(FileId, Header)]) -> Result<(), String> {
    let said = headers.iter().flat_map(|(_, header)| header.metadata()).find(|(key, _)| key == FILES_OF_SHARDS);
    if let Some(count) = said.and_then(|(_, count)| count.parse::<usize>().ok()) {
        let found = headers.iter().filter(|(_, header)| is_sharded(header)).count();
        let names: Vec<&str> = headers.iter().map(|(id, _)| files.path(*id)).take(4).collect();
        let hint = "open a directory that holds the files of all ranks";
        return if found == count {
            Ok(())
        } else {
            Err(format!("expected {count} files of shards, found {found} ({}): {hint}", names.join(", ")))
        };
    }
    // As torch names them: `shard-00003-model-00001-of-00001.safetensors`.
    let rank = |path: &str| path.strip_prefix("shard-")?.split_once("-model-")?.0.parse().ok();
    let ranks: BTreeSet<u64> = headers.iter().filter_map(|(id, _)| rank(files.path(*id))).collect();
    let Some(last) = ranks.last() else { return Ok(()) };
    let missing = (1..*last).find(|rank| !ranks.contains(rank));
    missing.map_or(Ok(()), |rank| Err(format!("expected files of ranks 1 to {last}, found none of rank {rank}")))
}

fn stored(file: FileId, start: u64, chunk: &DcpChunk, strides: PerAxis) -> StoredBox {
    let (origin, extents) = (PerAxis::from_slice(&chunk.offsets), PerAxis::from_slice(&chunk.sizes));
    StoredBox { file, start, origin, extents, strides }
}

/// Takes the optimizer's state out, unless there is nothing else. Its bytes are never looked at.
fn take_training_state(state: &mut DcpState) -> Vec<LeftOut> {
    let (training, model): (Vec<_>, Vec<_>) =
        std::mem::take(&mut state.tensors).into_iter().partition(|tensor| is_optimizer_state(&tensor.name));
    if model.is_empty() {
        state.tensors = training;
        return Vec::new();
    }
    state.tensors = model;
    training.into_iter().map(|tensor| LeftOut::of_optimizer(tensor.name, tensor.dtype, &tensor.shape)).collect()
}

/// Reads a classic directory.
pub(crate) fn read(files: &PinnedFiles<'_>, training_state: bool, problems: &mut Problems) -> Contents {
    let state = metadata(files).map_err(|message| Problem::of_file(DCP_METADATA, message));
    let mut state = problems.taken(state).unwrap_or_default();
    let training = if training_state { Vec::new() } else { take_training_state(&mut state) };
    let ids = file_ids(files, &state, training_state, problems);
    let arguments = arguments(files, &state, &ids);
    let objects = if training_state { objects(files, &state, &ids, problems) } else { BTreeMap::new() };
    // The archives of all chunks whose files are there, in the order of tensors and chunks.
    let chunks = state.tensors.iter().flat_map(|tensor| &tensor.chunks);
    let items: Vec<ArchiveSpan> = chunks.filter_map(|chunk| span_of(&chunk.segment, &ids)).collect();
    let read = archive::read_items(files.source, &items);
    let mut builder = MosaicBuilder::new(files.source, problems);
    let mut read = items.iter().zip(read);
    for tensor in &state.tensors {
        let mut boxes = Vec::with_capacity(tensor.chunks.len());
        for chunk in tensor.chunks.iter().filter(|chunk| ids[chunk.segment.file as usize].is_some()) {
            let (item, found) = read.next().expect("each chunk of a file that is there is an item");
            let part = found.and_then(|found| box_of(tensor, chunk, item, &found.tensors)).map_err(|message| {
                let message = format_args!("tensor {:?}, chunk at {:?}: {message}", tensor.name, chunk.offsets);
                Problem::of_file(files.source.path(item.file).display(), message)
            });
            boxes.extend(builder.problems().taken(part));
        }
        // Chunks that are reported already are not missing besides.
        if boxes.len() == tensor.chunks.len() {
            builder.add(&tensor.name, tensor.dtype, &tensor.shape, boxes, None);
        }
    }
    let mut contents = Contents::new(Container::Dcp, builder.finish());
    let not_read = state.objects.into_iter().filter(|object| !objects.contains_key(&object.name));
    let left_out = not_read.map(|object| LeftOut { name: object.name, kind: "object".to_owned() });
    contents.left_out = left_out.chain(training).collect();
    contents.tree.objects = objects;
    let companions = [COMMON, FORMAT].map(|name| Some((name.to_owned(), files.find(name)?)));
    if let ([Some(common), Some(format)], true) = (companions, training_state) {
        contents.tree.companions = vec![common, format];
    }
    match arguments {
        Ok(arguments) => contents.tree.arguments = arguments.map(Box::new),
        Err(message) => contents.warnings.push(message),
    }
    contents
}

/// The stored bytes of what is no tensor.
fn objects(
    files: &PinnedFiles<'_>,
    state: &DcpState,
    ids: &[Option<FileId>],
    problems: &mut Problems,
) -> BTreeMap<String, Arc<[u8]>> {
    let bytes = state.objects.iter().map(|object| object.segment.len).fold(0, u64::saturating_add);
    if bytes > OBJECTS_BYTES_MAX {
        let message = format!(
            "{} members are no tensors and have {bytes} bytes together, at most {OBJECTS_BYTES_MAX} pass; without \
             --training-state the tensors of the model are shown",
            state.objects.len()
        );
        problems.of_file(DCP_METADATA, message);
        return BTreeMap::new();
    }
    let mut objects = BTreeMap::new();
    for DcpObject { name, segment } in &state.objects {
        let Some(span) = span_of(segment, ids) else { continue };
        match span.read(files.source) {
            Ok(bytes) => _ = objects.insert(name.clone(), bytes.into()),
            Err(message) => {
                problems.of_file(files.source.path(span.file).display(), format!("member {name:?}: {message}"));
            }
        }
    }
    objects
}

/// The arguments of a training that Megatron-Core or Megatron-Bridge has saved.
fn arguments(
    files: &PinnedFiles<'_>,
    state: &DcpState,
    ids: &[Option<FileId>],
) -> Result<Option<SavedArguments>, String> {
    let common = files.find(COMMON).map(|file| (ArchiveSpan::whole(files.source, file), COMMON.to_owned(), true));
    // Megatron-FSDP has no file of its own for them.
    let object = || {
        let DcpObject { segment, .. } = state.objects.iter().find(|object| object.name == ARGUMENTS)?;
        Some((span_of(segment, ids)?, format!("{}, {ARGUMENTS}", state.files[segment.file as usize]), false))
    };
    if let Some((span, name, has_members)) = common.or_else(object) {
        let of = |opened: &OpenedArchive| {
            let root = opened.pickle.root();
            let found = if has_members { opened.pickle.item(root, ARGUMENTS) } else { Some(root) };
            found.map(|id| megatron::saved_arguments(&opened.pickle, id))
        };
        // Whatever else is saved beside them is not looked at, and nothing is ever run.
        let read = archive::read_opened(files.source, &[span], |_, _| true, &|_, opened| Ok(of(opened)));
        let unread =
            |message| format!("{name}: what the arguments of the training say of the tensors is not known: {message}");
        let found = read.into_iter().next().expect("one archive was read").map_err(unread)?;
        if let Some(values) = found.filter(|found| !found.is_empty()) {
            return Ok(Some(SavedArguments { file: name, values }));
        }
    }
    let (name, member) = RUN_CONFIG;
    let Some(id) = files.find(name) else { return Ok(None) };
    let text = files.source.read_whole(id, JSON_FILE_BYTES_MAX)?;
    let values = members_of(&String::from_utf8_lossy(&text), member);
    Ok(Some(SavedArguments { file: name.to_owned(), values }))
}

/// The members of a member of a document, where they are on lines of their own. Lists and mappings that fill further lines are
/// no values that are compared.
fn members_of(document: &str, member: &str) -> Map<String, Json> {
    let lines = document.lines().skip_while(|line| line.trim_end() != member).skip(1);
    let inside = lines.take_while(|line| line.starts_with([' ', '-', '#']) || line.trim().is_empty());
    let own = inside.filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with([' ', '-', '#'])));
    let members = own.filter_map(|line| line.split_once(':')).map(|(key, value)| {
        let value = match value.trim() {
            "" => Json::from("several lines"),
            word => serde_json::from_str(word).unwrap_or_else(|_| Json::from(word.trim_matches(['\'', '"']))),
        };
        (key.to_owned(), value)
    });
    members.collect()
}

fn metadata(files: &PinnedFiles<'_>) -> Result<DcpState, String> {
    let id = files.find(DCP_METADATA).ok_or_else(|| "not there".to_owned())?;
    let bytes = files.source.read_whole(id, METADATA_BYTES_MAX)?;
    let foreign = || foreign::refused_file(files.source, id, DCP_METADATA);
    DcpState::parse(&bytes).map_err(|error| foreign().unwrap_or_else(|| error.to_string()))
}

/// The ids of the files that the metadata names. Those that are not there are problems.
fn file_ids(
    files: &PinnedFiles<'_>,
    state: &DcpState,
    training_state: bool,
    problems: &mut Problems,
) -> Vec<Option<FileId>> {
    let by_path: HashMap<&str, FileId> = files.all().collect();
    let mut tensors = vec![Expected::default(); state.files.len()];
    for (tensor, chunk) in
        state.tensors.iter().flat_map(|tensor| tensor.chunks.iter().map(move |chunk| (tensor, chunk)))
    {
        tensors[chunk.segment.file as usize].add(&tensor.name);
    }
    for object in state.objects.iter().filter(|_| training_state) {
        tensors[object.segment.file as usize].add(&object.name);
    }
    let id = |(path, tensors): (&String, Expected)| {
        let found = by_path.get(path.as_str()).copied();
        // What holds only objects is not read without --training-state.
        if found.is_none() && tensors.count > 0 {
            let what = format!("{tensors}, which is not there");
            problems.push(Problem::MissingFile { index: DCP_METADATA.to_owned(), file: path.clone(), what });
        }
        found
    };
    state.files.iter().zip(tensors).map(id).collect()
}

/// A segment, if its file is there.
fn span_of(segment: &DcpSegment, ids: &[Option<FileId>]) -> Option<ArchiveSpan> {
    Some(ArchiveSpan { file: ids[segment.file as usize]?, start: segment.offset, len: segment.len })
}

/// Where the chunk's elements are, by the archive that holds it.
fn box_of(
    tensor: &DcpTensor,
    chunk: &DcpChunk,
    item: &ArchiveSpan,
    found: &[SavedTensor],
) -> Result<StoredBox, String> {
    let [saved] = found else { return Err(format!("expected an archive of one tensor, found {}", found.len())) };
    let TorchTensor { dtype, shape, strides, .. } = &saved.tensor;
    if (*dtype, shape) != (tensor.dtype, &chunk.sizes) {
        return Err(format!("expected {} {:?}, found {dtype} {shape:?}", tensor.dtype, chunk.sizes));
    }
    Ok(stored(item.file, item.start + saved.span().start, chunk, PerAxis::from_slice(strides)))
}
