//! Files of `torch.save`: a `.pt`, `.pth` or `.bin` file, or a repository whose weights are in such files.

use super::super::{
    archive::{self, ArchiveSpan},
    choose::{TORCH_INDEX_SUFFIX, at_top, choose_indexed},
    container::{Container, Contents, LeftOut, is_torch},
    file::{FileRole, IgnoreReason},
    folder::{Folder, PinnedFiles},
    foreign,
    header::WeightFiles,
    index::Index,
    mosaic::{Missing, MosaicBuilder, StoredBox},
    prefix::is_optimizer_state,
    problem::{CheckpointError, Problem, Problems},
    safetensors::unusable,
};
use crate::{source::FileId, tensor::PerAxis};

/// Files that training programs write beside weights: no state of a model.
const COMPANIONS: [&str; 5] = ["training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"];

/// Name of a tensor that is saved by itself.
const UNNAMED: &str = "tensor";

/// The name and the text of the index, if there is one.
pub(in crate::checkpoint) fn index_text(folder: &mut Folder) -> Result<Option<(String, Vec<u8>)>, CheckpointError> {
    let is_index = |path: &str| at_top(path) && path.ends_with(TORCH_INDEX_SUFFIX);
    let found = folder.files.iter().filter(|file| file.role == FileRole::Other && is_index(&file.path));
    let names: Vec<String> = found.map(|file| file.path.clone()).collect();
    let usual = names.iter().find(|name| name.as_str() == "pytorch_model.bin.index.json");
    let name = match (usual, &names[..]) {
        (Some(name), _) | (None, [name]) => name.clone(),
        (None, []) => return Ok(None),
        (None, [..]) => {
            return Err(CheckpointError::SeveralIndexes { root: folder.located.path.clone(), indexes: names });
        }
    };
    match folder.read(&name)?.unwrap_or_else(|| Err("not there".into())) {
        Ok(text) => Ok(Some((name, text))),
        Err(message) => Err(unusable(folder, name, message)),
    }
}

/// Chooses the weight files of a directory.
pub(in crate::checkpoint) fn choose(
    folder: &mut Folder,
    index: Option<&(&str, Index<'_>)>,
) -> Result<(), CheckpointError> {
    if let Some((name, index)) = index {
        choose_indexed(name, index, &mut folder.files, &is_torch, &mut folder.problems);
        return Ok(());
    }
    let is_companion = |path: &str| COMPANIONS.contains(&path) || path.starts_with("rng_state");
    let is_candidate = |path: &str| at_top(path) && is_torch(path) && !is_companion(path);
    let candidates = folder.files.iter().filter(|file| file.role == FileRole::Other && is_candidate(&file.path));
    let candidates: Vec<&str> = candidates.map(|file| file.path.as_str()).collect();
    let set: Vec<&str> = candidates.iter().copied().filter(|path| path.starts_with("pytorch_model")).collect();
    let chosen: Vec<String> = match (&candidates[..], &set[..]) {
        ([only], _) | (_, [only]) => vec![(*only).to_owned()],
        (_, [_, ..]) => set.iter().map(|path| (*path).to_owned()).collect(),
        _ => {
            let (root, found) = (folder.located.path.clone(), foreign::of_torch_files(&candidates));
            let files = candidates.iter().map(|path| (*path).to_owned()).collect();
            return Err(CheckpointError::SeveralFiles { root, files, found });
        }
    };
    folder.choose(|path| chosen.iter().any(|chosen| chosen == path));
    for file in folder.files.iter_mut().filter(|file| file.role == FileRole::Other && is_candidate(&file.path)) {
        file.role = FileRole::Ignored(IgnoreReason::OtherSet);
    }
    Ok(())
}

/// Reads the weight files, and compares them with the index.
pub(in crate::checkpoint) fn read(
    files: &PinnedFiles<'_>,
    index: Option<&(&str, Index<'_>)>,
    training_state: bool,
    problems: &mut Problems,
) -> Contents {
    let items: Vec<ArchiveSpan> =
        files.ids().map(|file| ArchiveSpan { file, start: 0, len: files.source.len_bytes(file) }).collect();
    let read = archive::read_items(files.source, &items);
    let mut builder = MosaicBuilder::new(files.source, problems);
    let mut left_out = Vec::new();
    let mut broken = std::collections::BTreeSet::new();
    for (item, found) in items.iter().zip(read) {
        let found = match found {
            Ok(found) => found,
            Err(message) => {
                let file = files.path(item.file).to_owned();
                let message = foreign::refused_file(files.source, item.file, &file).unwrap_or(message);
                broken.insert(file.clone());
                builder.problems().push(Problem::Container { file, message });
                continue;
            }
        };
        let is_model = |saved: &archive::Saved| !is_optimizer_state(&saved.name);
        let selects = !training_state && index.is_none() && found.tensors.iter().any(is_model);
        for saved in found.tensors {
            if selects && !is_model(&saved) {
                let kind = format!("{} {:?} of the optimizer (--training-state shows it)", saved.dtype, saved.shape);
                left_out.push(LeftOut { name: saved.name, kind });
                continue;
            }
            let name = if saved.name.is_empty() { UNNAMED } else { &saved.name };
            builder.add(name, saved.dtype, &saved.shape, [whole(item.file, &saved)], Missing::Refused);
        }
        left_out.extend(found.others.into_iter().map(|(name, kind)| LeftOut { name, kind }));
    }
    let table = builder.finish();
    if let Some((name, index)) = index {
        let weights = WeightFiles { files: files.files, weights: files.weights };
        weights.compare_with_index(name, index, &table, &broken, problems);
    }
    Contents { left_out, ..Contents::new(Container::Torch, table) }
}

/// The box that a saved tensor is.
fn whole(file: FileId, saved: &archive::Saved) -> StoredBox {
    let per_axis = |numbers: &[u64]| PerAxis::from_slice(numbers);
    let origin = PerAxis::from_elem(0, saved.shape.len());
    StoredBox { file, start: saved.start, origin, extents: per_axis(&saved.shape), strides: per_axis(&saved.strides) }
}
