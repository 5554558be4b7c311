//! GGUF files of llama.cpp: one file, or a numbered set.
//!
//! Blocks of codes are shown decoded to f32, as a decoded file for each tensor (`blocks.rs`); what is stored in a type of its own is
//! shown as it is. Of the architectures in `families.toml`, tensors have the names and the layouts of the model's repository, and the
//! metadata becomes its `config.json` (`names.rs`). Other models have their stored names.

mod names;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use ckfs_format::gguf::{BlockType, Gguf, GgufError, GgufTensor, StoredAs};
use ckfs_source::{ByteSpan, FileId, Source};
use ckfs_tensor::{DType, PerAxis, to_usize};
use names::{Change, Model};

use super::{
    super::{
        choose::at_top,
        container::{Container, Contents, LeftOut},
        file::{FileRole, IgnoreReason},
        folder::{Folder, PinnedFiles},
        mosaic::{MosaicBuilder, StoredBox},
        problem::{BYTES_MAX, CheckpointError, Problem, Problems},
        weight_name::WeightName,
    },
    blocks::BlockTensor,
    orbax::{ChunkSource, DecodedFile},
};

/// Longest header.
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// Most experts, and most heads, of a tensor.
const PARTS_MAX: u64 = 1 << 16;
/// Bytes of a file that are read at first. Vocabularies take a few megabytes.
const READ_BYTES: u64 = 1 << 20;
/// Factors of the rotary embedding, which a repository has in its configuration.
const ROTARY: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];
/// Files that are beside a model and no part of it.
const BESIDE: [&str; 2] = ["mmproj", "imatrix"];

/// The name of the set that a file is of: without its number and `.gguf`.
pub(crate) fn set_of(path: &str) -> Option<&str> {
    let stem = path.strip_suffix(".gguf")?;
    let number = WeightName::of(path)?.number;
    let before = number.and_then(|(number, total)| stem.strip_suffix(&format!("-{number}-of-{total}")));
    Some(before.unwrap_or(stem))
}

/// The directory and the set of a file of this machine that is one of a numbered set.
pub(crate) fn part_of_set(path: &Path) -> Option<(PathBuf, String)> {
    let name = path.file_name()?.to_str()?;
    let set = set_of(name).filter(|set| name != format!("{set}.gguf"))?;
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    Some((directory.unwrap_or_else(|| Path::new(".")).to_owned(), set.to_owned()))
}

/// Chooses the weight files of a directory.
///
/// # Errors
/// Several sets, and no word that tells which one is meant.
pub(crate) fn choose(folder: &mut Folder) -> Result<(), CheckpointError> {
    let is_candidate = |path: &str| at_top(path) && !BESIDE.iter().any(|word| path.contains(word));
    let files = folder.files.iter().filter(|file| file.role == FileRole::Other && is_candidate(&file.path));
    let sets: BTreeSet<String> = files.filter_map(|file| set_of(&file.path).map(str::to_owned)).collect();
    let is_asked = |set: &str| {
        let Some(word) = &folder.variant else { return true };
        set.strip_suffix(word.as_str()).is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_']))
    };
    let asked: Vec<&String> = sets.iter().filter(|set| is_asked(set)).collect();
    let [chosen] = asked[..] else {
        let found = sets.iter().map(|set| format!("{set}.gguf")).collect::<Vec<_>>().join(", ");
        let what = "expected the files of one model; --variant chooses by how a name ends, as Q4_K_M in model-Q4_K_M.gguf";
        return Err(CheckpointError::SeveralFiles(format!("{}: {what}: {found}", folder.located.path.display())));
    };
    let chosen = chosen.clone();
    folder.choose(|path| at_top(path) && set_of(path) == Some(&chosen));
    for file in folder.files.iter_mut().filter(|file| file.role == FileRole::Other && file.path.ends_with(".gguf")) {
        file.role = FileRole::Ignored(IgnoreReason::OtherSet);
    }
    Ok(())
}

fn header(source: &dyn Source, file: FileId) -> Result<Gguf, Problem> {
    let (file_bytes, mut len) = (source.len_bytes(file), READ_BYTES);
    let name = source.path(file).display();
    loop {
        let mut bytes = vec![0; to_usize(len.min(file_bytes))];
        source.read_into(file, 0, &mut bytes)?;
        match Gguf::parse(&bytes, file_bytes) {
            Ok(header) => return Ok(header),
            Err(GgufError::Short) if len < HEADER_BYTES_MAX => len *= 4,
            Err(error @ (GgufError::Short | GgufError::Invalid(_))) => return Err(Problem::of_file(name, error)),
        }
    }
}

/// A tensor, and where its elements are.
struct Placed<'a> {
    tensor: &'a GgufTensor,
    dtype: DType,
    file: FileId,
    start: u64,
}

/// Reads the files of a model. `has_companion` if configuration and tokenizer come from another repository.
pub(crate) fn read(
    files: &PinnedFiles<'_>,
    source: &Arc<dyn Source>,
    has_companion: bool,
    problems: &mut Problems,
) -> Contents {
    let mut headers: Vec<(FileId, Gguf)> = Vec::new();
    for file in files.ids() {
        match header(files.source, file) {
            Ok(header) => headers.push((file, header)),
            Err(problem) => problems.push(problem),
        }
    }
    let is_first = |header: &&(FileId, Gguf)| header.1.count("split.no").unwrap_or(0) == 0;
    let Some((first, meta)) = headers.iter().find(is_first) else { return Contents::default() };
    let tensors = || headers.iter().flat_map(|(file, header)| header.tensors.iter().map(|tensor| (*file, tensor)));
    for (key, found) in [("split.count", headers.len()), ("split.tensors.count", tensors().count())] {
        let expected = meta.count(key).filter(|expected| *expected > 0 && *expected != found as u64);
        if let Some(expected) = expected {
            problems.of_file(files.path(*first), format_args!("{key}: expected {expected}, found {found}"));
        }
    }
    let model = Model::of(meta).and_then(|model| {
        let is_unknown = |name: &&str| model.name(name).is_none() && !ROTARY.contains(name);
        match tensors().map(|(_, tensor)| tensor.name.as_str()).find(is_unknown) {
            Some(name) => Err(format!("the GGUF tensor {name} has no name in a repository here")),
            None => Ok(model),
        }
    });
    let mut decoded = Vec::new();
    let placed: Vec<Placed<'_>> = tensors().map(|(file, tensor)| place(file, tensor, model.as_ref().ok(), &mut decoded, source)).collect();
    let decoded: Arc<[DecodedFile]> = decoded.into();
    let looked_at: &dyn Source = &ChunkSource::new(Arc::clone(source), Arc::clone(&decoded));
    let bytes = (source.file_count()..looked_at.file_count()).map(|file| looked_at.len_bytes(FileId::at(file)));
    if bytes.fold(0, u64::saturating_add) > BYTES_MAX {
        problems.push(Problem::TooManyBytes);
    }
    let mut builder = MosaicBuilder::new(looked_at, problems);
    let (mut left_out, mut warnings) = (Vec::new(), Vec::new());
    for placed in &placed {
        let named = model.as_ref().map(|model| model.name(&placed.tensor.name));
        match named {
            Err(_) => add(&mut builder, placed, &placed.tensor.name, &Change::Nothing),
            Ok(Some((name, change))) => add(&mut builder, placed, &name, &change),
            Ok(None) => left_out.push(placed.tensor.name.clone()),
        }
    }
    let table = builder.finish();
    if !left_out.is_empty() && !has_companion {
        let names = left_out.join(", ");
        warnings.push(format!("{names}: factors of the rotary embedding, which config.json lacks: --config-from MODEL has them"));
    }
    let has_tokenizer = ["tokenizer.json", "tokenizer.model"].iter().any(|path| files.find(path).is_some());
    if model.is_ok() && !has_companion && !has_tokenizer {
        warnings.push("hf/ has no tokenizer: that of a GGUF file is not taken over, --config-from MODEL gives the model's".to_owned());
    }
    let of_rotary = |name| LeftOut { name, kind: "factors of the rotary embedding".to_owned() };
    let is_tied = tensors().all(|(_, tensor)| tensor.name != "output.weight");
    Contents {
        left_out: left_out.into_iter().map(of_rotary).collect(),
        config: model.as_ref().ok().map(|model| model.config(is_tied)),
        unnamed: model.err(),
        decoded: decoded.to_vec(),
        warnings,
        ..Contents::new(Container::Gguf, table)
    }
}

/// The place of a tensor: in its file, or in a decoded file of its own.
fn place<'a>(
    file: FileId,
    tensor: &'a GgufTensor,
    model: Option<&Model<'_>>,
    decoded: &mut Vec<DecodedFile>,
    source: &Arc<dyn Source>,
) -> Placed<'a> {
    let is_one_more = model.is_some_and(|model| model.is_one_more(&tensor.name));
    let of = match tensor.stored {
        StoredAs::Blocks(of) => of,
        StoredAs::Elements(dtype) => match BlockType::of_elements(dtype).filter(|_| is_one_more) {
            Some(of) => of,
            None => return Placed { tensor, dtype, file, start: tensor.start },
        },
    };
    let span = ByteSpan::of_len(tensor.start, tensor.bytes).expect("the header's places are in its file");
    let number = FileId::at(source.file_count() + decoded.len());
    decoded.push(DecodedFile::of_blocks(BlockTensor { name: tensor.name.clone(), of, file, span, is_one_more }));
    Placed { tensor, dtype: DType::F32, file: number, start: 0 }
}

/// Adds a tensor under the names that it has.
fn add(builder: &mut MosaicBuilder<'_>, placed: &Placed<'_>, name: &str, change: &Change) {
    let Placed { tensor, dtype, file, start } = placed;
    let shape = tensor.shape.as_slice();
    let element = dtype.bits() / 8;
    let whole = |shape: &[u64], first: u64| {
        StoredBox::row_major(*file, start + first * element, &vec![0; shape.len()], shape)
    };
    match (change, shape) {
        (Change::Nothing, _) => builder.add(name, *dtype, shape, [whole(shape, 0)], None),
        (Change::Unsqueezed, _) => {
            let mut shape = shape.to_vec();
            if shape.len() == 1 {
                shape.insert(0, 1);
            }
            builder.add(name, *dtype, &shape, [whole(&shape, 0)], None);
        }
        (Change::Experts, [experts @ 0..=PARTS_MAX, of_one @ ..]) => {
            let elements: u64 = of_one.iter().product();
            for expert in 0..*experts {
                let name = name.replace("{e}", &expert.to_string());
                builder.add(&name, *dtype, of_one, [whole(of_one, expert * elements)], None);
            }
        }
        (Change::Heads(heads @ 1..=PARTS_MAX), [rows, columns @ ..]) if rows.is_multiple_of(2 * heads) => {
            let (half, row) = (rows / heads / 2, columns.iter().product::<u64>());
            // Stored are pairs of rows, one of each half of a head.
            let halves = (0..2 * heads).map(|at| {
                let (head, of_pair) = (at / 2, at % 2);
                let (mut origin, mut extents) = (PerAxis::from_elem(0, shape.len()), PerAxis::from_slice(shape));
                (origin[0], extents[0]) = (at * half, half);
                let mut part = StoredBox::row_major(*file, start + (2 * half * head + of_pair) * row * element, &origin, &extents);
                part.strides[0] = 2 * row;
                part
            });
            builder.add(name, *dtype, shape, halves, None);
        }
        (Change::Experts | Change::Heads(_), _) => {
            let what = format_args!("{}: {shape:?} does not divide as {name} does ({change:?})", tensor.name);
            builder.problems().push(Problem::Other(what.to_string()));
        }
    }
}
