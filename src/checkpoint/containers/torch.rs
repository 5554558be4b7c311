//! Files of `torch.save`: a `.pt`, `.pth` or `.bin` file, or a repository whose weights are in such files.

use std::collections::BTreeSet;

use ckfs_format::torch::{
    read::{OpenedArchive, SavedTensor},
    state::{TorchTensor, is_allowed},
};
use ckfs_source::{Duplicates, FileId};

use super::super::{
    archive::{self, ArchiveSpan},
    choose::{Indexed, TORCH_INDEX_SUFFIX, at_top, variant_flags},
    container::{Container, Contents, LeftOut, is_torch},
    copies,
    file::{FileRole, IgnoreReason},
    folder::{Folder, PinnedFiles},
    foreign,
    index::Index,
    mosaic::{MosaicBuilder, StoredBox},
    prefix::is_optimizer_state,
    problem::{CheckpointError, Problems},
    weight_name::WeightName,
};

/// Files that training programs write beside weights: no state of a model.
const COMPANIONS: [&str; 5] = ["training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"];

/// What several files of `consolidated.*.pth` are.
const LLAMA: &str =
    "a first release of Llama, cut for tensor parallelism: use the Hugging Face repository of the model";

/// Name of a tensor that is saved alone.
const UNNAMED: &str = "tensor";

/// The index of files of torch.
pub(crate) const INDEX: Indexed =
    Indexed { suffix: TORCH_INDEX_SUFFIX, usual: "pytorch_model.bin.index.json", is_weights: is_torch };

/// Chooses the weight files of a directory.
pub(crate) fn choose(folder: &mut Folder, index: Option<&(&str, Index<'_>)>) -> Result<(), CheckpointError> {
    if let Some((name, index)) = index {
        folder.choose_indexed(name, index, is_torch);
        return Ok(());
    }
    folder.choose_variant(is_torch)?;
    let is_companion = |path: &str| COMPANIONS.contains(&path) || path.starts_with("rng_state");
    let is_candidate = |path: &str| at_top(path) && is_torch(path) && !is_companion(path);
    let candidates = folder.files.iter().filter(|file| file.role == FileRole::Other && is_candidate(&file.path));
    let candidates: Vec<&str> = candidates.map(|file| file.path.as_str()).collect();
    let mut set: Vec<&str> = candidates.iter().copied().filter(|path| path.starts_with("pytorch_model")).collect();
    if set.is_empty() {
        set = one_set(&candidates);
    }
    let chosen: Vec<String> = match (&candidates[..], &set[..]) {
        ([only], _) | (_, [only]) => vec![(*only).to_owned()],
        (_, [_, ..]) => set.iter().map(|path| (*path).to_owned()).collect(),
        _ => {
            let (root, files) = (folder.located.path.display(), candidates.join(", "));
            let is_part = |stem: &str| stem.starts_with("consolidated.") && stem.ends_with('.');
            let is_llama = candidates.iter().any(|path| path.strip_suffix("pth").is_some_and(is_part));
            let variants = candidates.iter().filter_map(|path| WeightName::of(path)?.variant).collect();
            let found = match variant_flags(variants) {
                _ if is_llama => LLAMA.to_owned(),
                Some(flags) => format!("several files of torch.save; give one of them, or {flags}"),
                None => "several files of torch.save and no pytorch_model.bin; give one of them".to_owned(),
            };
            return Err(CheckpointError::SeveralFiles(format!("{root}: {found}: {files}")));
        }
    };
    folder.choose(|path| chosen.iter().any(|chosen| chosen == path));
    folder.give_role(&FileRole::Ignored(IgnoreReason::OtherSet), is_candidate);
    Ok(())
}

/// These files, if all of them are one numbered set or variants of one.
fn one_set<'a>(paths: &[&'a str]) -> Vec<&'a str> {
    let names: Option<Vec<WeightName<'_>>> = paths.iter().map(|path| WeightName::of(path)).collect();
    let names = names.unwrap_or_default();
    let stems: BTreeSet<&str> = names.iter().map(|name| name.stem).collect();
    // Of other names, those of a user's own files, nobody knows what a word after a dot means.
    let has_plain = names.iter().any(|name| name.variant.is_none() && name.stem.ends_with("model"));
    let are_numbered = names.iter().all(|name| name.number.is_some());
    let is_set = stems.len() == 1 && !stems.contains("") && (are_numbered || has_plain);
    if is_set { paths.to_vec() } else { Vec::new() }
}

/// Reads the weight files, and compares them with the index.
pub(crate) fn read(
    files: &PinnedFiles<'_>,
    index: Option<&(&str, Index<'_>)>,
    (training_state, duplicates): (bool, Option<Duplicates>),
    problems: &mut Problems,
) -> Contents {
    let items: Vec<ArchiveSpan> = files.ids().map(|file| ArchiveSpan::whole(files.source, file)).collect();
    let contents = |_: usize, opened: &OpenedArchive| opened.contents().map_err(|error| error.to_string());
    let read = archive::read_opened(files.source, &items, is_allowed, &contents);
    let path = |id: FileId| files.path(id);
    let found = items.iter().zip(&read).filter_map(|(item, found)| Some((item.file, found.as_ref().ok()?)));
    let rows =
        found.flat_map(|(file, found)| found.tensors.iter().map(move |saved| (saved.tensor.name.as_str(), file)));
    let rows = rows.filter(|(name, _)| training_state || !is_optimizer_state(name)).collect();
    let copies = copies::choose(rows, &path, index.map(|(_, index)| index), duplicates, problems);
    let mut builder = MosaicBuilder::new(files.source, problems);
    let mut left_out = Vec::new();
    let mut broken = BTreeSet::new();
    for (item, found) in items.iter().zip(read) {
        if copies.variants.contains(&item.file) {
            continue;
        }
        let found = match found {
            Ok(found) => found,
            Err(message) => {
                let file = files.path(item.file).to_owned();
                let message = foreign::refused_file(files.source, item.file, &file).unwrap_or(message);
                broken.insert(file.clone());
                builder.problems().of_file(file, message);
                continue;
            }
        };
        let is_model = |saved: &SavedTensor| !is_optimizer_state(&saved.tensor.name);
        let selects = !training_state && index.is_none() && found.tensors.iter().any(is_model);
        for saved in found.tensors {
            let TorchTensor { name, dtype, shape, .. } = &saved.tensor;
            if selects && !is_model(&saved) {
                left_out.push(LeftOut::of_optimizer(name.clone(), *dtype, shape));
                continue;
            }
            if !copies.keeps(item.file, name) {
                continue;
            }
            let name = if name.is_empty() { UNNAMED } else { name };
            builder.add(name, *dtype, shape, [StoredBox::saved(item.file, &saved)], None);
        }
        left_out.extend(found.others.into_iter().map(|(name, kind)| LeftOut { name, kind }));
    }
    let table = builder.finish();
    if let Some((name, index)) = index
        && !files.agree_with_index(index, &table)
    {
        files.compare_with_index(name, index, (&table, &copies.decided), &broken, problems);
    }
    let mut contents = Contents { left_out, ..Contents::new(Container::Torch, table) };
    contents.take(copies);
    contents
}
