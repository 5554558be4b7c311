//! Safetensors files: a Hugging Face repository, a single file, or the files of a directory of
//! `torch.distributed.checkpoint`, whose headers say where their tensors are in the whole ones.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use ckfs_format::safetensors::{Header, HeaderTensor};
use ckfs_source::{Duplicates, FileId};
use ckfs_tensor::DType;
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::super::{
    choose::{INDEX_SUFFIX, Indexed, is_safetensors},
    container::Contents,
    copies, dcp,
    folder::{Folder, PinnedFiles},
    foreign,
    header::{read_header, table_of},
    index::Index,
    problem::{CheckpointError, Problem, Problems},
};

/// The index of safetensors.
pub(crate) const INDEX: Indexed =
    Indexed { suffix: INDEX_SUFFIX, usual: "model.safetensors.index.json", is_weights: is_safetensors };

/// The name and the text of the index, if there is one.
pub(crate) fn index_text(folder: &mut Folder, of: Indexed) -> Result<Option<(String, Vec<u8>)>, CheckpointError> {
    let Some(name) = folder.choose_index(of)? else { return Ok(None) };
    match folder.read(&name)?.unwrap_or_else(|| Err("not there".into())) {
        Ok(text) => Ok(Some((name, text))),
        Err(message) => Err(CheckpointError::of_file(&folder.located.label, name, message)),
    }
}

/// Whether a file holds differences: bytes, each tensor with the digest of what it becomes.
fn is_delta(header: &Header) -> bool {
    let digests: HashSet<&str> = header.metadata().iter().map(|(name, _)| name.as_str()).collect();
    let is_difference = |tensor: HeaderTensor<'_>| {
        (tensor.dtype, tensor.shape.len()) == (DType::U8, 1) && digests.contains(tensor.name)
    };
    header.tensors().len() > 0 && header.tensors().all(is_difference)
}

/// Chooses the weight files. Returns the index if it decides them.
pub(crate) fn choose<'a>(
    folder: &mut Folder,
    index: Option<(&'a str, Index<'a>)>,
) -> Result<Option<(&'a str, Index<'a>)>, CheckpointError> {
    let is_single = |(name, index): &(&str, Index<'_>)| folder.variant.is_none() && folder.choose_single(name, index);
    if index.as_ref().is_some_and(is_single) {
        return Ok(None);
    }
    if let Some((name, named)) = &index {
        folder.choose_indexed(name, named, is_safetensors);
        return Ok(index);
    }
    folder.choose_variant(is_safetensors)?;
    // An unreadable file explains the absence of others.
    folder.choose_unindexed().or_else(|error| if folder.problems.is_empty() { Err(error) } else { Ok(()) })?;
    Ok(index)
}

/// Reads the headers of the weight files, and compares them with the index. `alone` if the checkpoint is a single file.
pub(crate) fn read(
    files: &PinnedFiles<'_>,
    index: Option<&(&str, Index<'_>)>,
    (duplicates, alone): (Option<Duplicates>, bool),
    problems: &mut Problems,
) -> Contents {
    let ids: Vec<_> = files.ids().collect();
    let read: Vec<_> = ids.clone().into_par_iter().map(|id| read_header(files.source, id, files.path(id))).collect();
    let mut headers = Vec::new();
    let mut broken = BTreeSet::new();
    for (id, result) in ids.into_iter().zip(read) {
        let file = files.path(id).to_owned();
        match result {
            Ok(header) => headers.push((id, header)),
            Err(problem) => {
                let foreign = foreign::refused_file(files.source, id, &file);
                let foreign = foreign.filter(|_| matches!(problem, Problem::Other(_)));
                problems.push(foreign.map_or(problem, |message| Problem::of_file(&file, message)));
                broken.insert(file);
            }
        }
    }
    for (id, _) in headers.iter().filter(|(_, header)| is_delta(header)) {
        let message = "compressed differences from another version's weights, with the digests of what they become: a published weight \
                       delta, and no weights; expected a whole repository";
        problems.of_file(files.path(*id), message);
    }
    let file_metadata = headers.iter().map(|(id, header)| (*id, header.metadata().to_vec()));
    let file_metadata: BTreeMap<_, _> = file_metadata.filter(|(_, metadata)| !metadata.is_empty()).collect();
    if headers.iter().any(|(_, header)| dcp::is_sharded(header)) {
        return Contents { file_metadata, ..dcp::read_safetensors(files, &headers, alone, problems) };
    }
    let path = |id: FileId| files.path(id);
    let mut contents = Contents { file_metadata, ..Contents::default() };
    if let Some((_, index)) = index {
        contents.table = table_of(&headers, &|_, _| true, problems);
        if files.agree_with_index(index, &contents.table) {
            return contents;
        }
    }
    let rows = headers.iter().flat_map(|(id, header)| header.tensors().map(move |tensor| (tensor.name, *id))).collect();
    let copies = copies::choose(rows, &path, index.map(|(_, index)| index), duplicates, problems);
    if index.is_none() || copies.files().chain(copies.variants.iter().copied()).next().is_some() {
        contents.table = table_of(&headers, &|id, name| copies.keeps(id, name), problems);
    }
    if let Some((name, index)) = index {
        files.compare_with_index(name, index, (&contents.table, &copies.decided), &broken, problems);
    }
    contents.take(copies);
    contents
}
