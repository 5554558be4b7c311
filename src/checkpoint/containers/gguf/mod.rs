//! GGUF files of llama.cpp: one file, or a numbered set.
//!
//! Blocks of codes are shown decoded to f32, as a decoded file for each tensor (`blocks.rs`); what is stored in a type of its own is
//! shown as it is. Of the architectures in `families.toml`, tensors have the names and the layouts of the model's repository, and the
//! metadata becomes its `config.json` (`names.rs`). Other models have their stored names.

mod names;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use ckfs_format::gguf::{BlockType, Gguf, GgufError, GgufTensor, StoredAs};
use ckfs_source::{ByteSpan, FileId, Source};
use ckfs_tensor::DType;
use names::GgufModel;
pub use names::{GgufChange, GgufFamily, GgufKey, GgufTables, GgufTarget, GgufTokenizer};

use super::{
    super::{
        choose::at_top,
        container::{Container, Contents, LeftOut},
        file::{FileRole, IgnoreReason},
        folder::{Folder, PinnedFiles},
        mosaic::{MosaicBuilder, StoredBox},
        problem::{CheckpointError, Problem, Problems},
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
        let what =
            "expected the files of one model; --variant chooses by how a name ends, as Q4_K_M in model-Q4_K_M.gguf";
        return Err(CheckpointError::SeveralFiles(format!("{}: {what}: {found}", folder.located.path.display())));
    };
    let chosen = chosen.clone();
    folder.choose(|path| at_top(path) && set_of(path) == Some(&chosen));
    folder.give_role(&FileRole::Ignored(IgnoreReason::OtherSet), |path| set_of(path).is_some());
    Ok(())
}

fn header(files: &PinnedFiles<'_>, file: FileId) -> Result<Gguf, Problem> {
    let source = files.source;
    let (file_bytes, mut len) = (source.len_bytes(file), READ_BYTES);
    loop {
        match Gguf::parse(&source.read_bytes(file, 0, len.min(file_bytes))?, file_bytes) {
            Ok(header) => return Ok(header),
            Err(GgufError::Short) if len < HEADER_BYTES_MAX => len *= 4,
            Err(error @ (GgufError::Short | GgufError::Invalid(_))) => {
                return Err(Problem::of_file(files.path(file), format_args!("a GGUF file of llama.cpp: {error}")));
            }
        }
    }
}

/// Where the elements of a stored tensor are.
struct Placed {
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
    let headers: Vec<(FileId, Gguf)> =
        files.ids().filter_map(|file| Some((file, problems.taken(header(files, file))?))).collect();
    let is_first = |header: &&(FileId, Gguf)| header.1.count("split.no").unwrap_or(0) == 0;
    let Some((first, meta)) = headers.iter().find(is_first) else {
        for (file, _) in &headers {
            problems.of_file(files.path(*file), "split.no: expected one file of number 0, which has the metadata");
        }
        return Contents::default();
    };
    let tensors = || headers.iter().flat_map(|(file, header)| header.tensors.iter().map(|tensor| (*file, tensor)));
    for (key, found) in [("split.count", headers.len()), ("split.tensors.count", tensors().count())] {
        let expected = meta.count(key).filter(|expected| *expected > 0 && *expected != found as u64);
        if let Some(expected) = expected {
            problems.of_file(files.path(*first), format_args!("{key}: expected {expected}, found {found}"));
        }
    }
    let model = GgufModel::of(meta).and_then(|model| {
        let is_unknown = |name: &&str| model.target(name).is_none() && !ROTARY.contains(name);
        match tensors().map(|(_, tensor)| tensor.name.as_str()).find(is_unknown) {
            Some(name) => Err(format!("the GGUF tensor {name} has no name in a repository here")),
            None => Ok(model),
        }
    });
    let (mut left_out, mut warnings, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
    let mut layout = Layout { first: source.file_count(), ..Layout::default() };
    for (file, tensor) in tensors() {
        let change = GgufChange::Nothing;
        let as_it_is = || GgufTarget { name: tensor.name.clone(), change, expert: None, is_one_more: false };
        let Some(target) = model.as_ref().map_or_else(|_| Some(as_it_is()), |model| model.target(&tensor.name)) else {
            left_out.push(tensor.name.clone());
            continue;
        };
        let laid_out = layout.push(target, (file, tensor));
        if laid_out.is_none() {
            wrong.push(&tensor.name);
        }
    }
    wrong.extend(layout.halves.values().map(|(_, (_, tensor))| &tensor.name));
    for name in wrong {
        let what = "expected a shape that divides as the metadata says, and a second tensor of the same form where two become one";
        problems.push(Problem::Other(format!("{name}: {what}")));
    }
    let Layout { decoded, shown, .. } = layout;
    let looked_at = ChunkSource::looked_at(source, &decoded, problems);
    let mut builder = MosaicBuilder::new(&looked_at, problems);
    for (name, dtype, shape, boxes) in shown {
        builder.add(&name, dtype, &shape, boxes, None);
    }
    let table = builder.finish();
    warnings.extend(model.as_ref().err().map(|reason| format!("{reason}: tensors have their stored names")));
    if !left_out.is_empty() && !has_companion {
        let names = left_out.join(", ");
        warnings.push(format!(
            "{names}: factors of the rotary embedding, which config.json lacks: --config-from MODEL has them"
        ));
    }
    let has_tokenizer = ["tokenizer.json", "tokenizer.model"].iter().any(|path| files.find(path).is_some());
    if model.is_ok() && !has_companion && !has_tokenizer {
        warnings.push(
            "hf/ has no tokenizer: that of a GGUF file is not taken over, --config-from MODEL gives the model's"
                .to_owned(),
        );
    }
    let of_rotary = |name| LeftOut { name, kind: "factors of the rotary embedding".to_owned() };
    let is_tied = tensors().all(|(_, tensor)| tensor.name != "output.weight");
    Contents {
        left_out: left_out.into_iter().map(of_rotary).collect(),
        config: model.as_ref().ok().map(|model| model.config(is_tied)),
        unnamed: model.err(),
        decoded,
        warnings,
        ..Contents::new(Container::Gguf, table)
    }
}

/// Where everything is.
#[derive(Default)]
struct Layout<'a> {
    /// Number of files before the decoded ones.
    first: usize,
    decoded: Vec<DecodedFile>,
    /// The tensors of the repository: name, type, shape and boxes.
    shown: Vec<(String, DType, Vec<u64>, Vec<StoredBox>)>,
    /// Stored tensors whose second half was not met yet, by the name of the whole.
    halves: BTreeMap<String, (usize, (FileId, &'a GgufTensor))>,
}

impl<'a> Layout<'a> {
    /// A decoded file of a stored tensor, perhaps with another, and the elements of their rows; `None` for integers.
    fn decode(
        &mut self,
        (file, tensor): (FileId, &GgufTensor),
        is_one_more: bool,
        other: Option<(FileId, &GgufTensor, u64)>,
    ) -> Option<Placed> {
        let of = match tensor.stored {
            StoredAs::Blocks(of) => of,
            StoredAs::Elements(dtype) => BlockType::of_elements(dtype)?,
        };
        let span = |tensor: &GgufTensor| ByteSpan::of_len(tensor.start, tensor.bytes).expect("inside its file");
        let other = other.map(|(file, other, row)| (file, span(other), row));
        let number = FileId::at(self.first + self.decoded.len());
        let blocks = BlockTensor { name: tensor.name.clone(), of, file, span: span(tensor), is_one_more, other };
        self.decoded.push(DecodedFile::of_blocks(blocks));
        Some(Placed { dtype: DType::F32, file: number, start: 0 })
    }

    /// The place of a tensor: in its file, or decoded.
    fn place(&mut self, (file, tensor): (FileId, &GgufTensor), is_one_more: bool) -> Option<Placed> {
        match tensor.stored {
            StoredAs::Elements(dtype) if !is_one_more => Some(Placed { dtype, file, start: tensor.start }),
            StoredAs::Elements(_) | StoredAs::Blocks(_) => self.decode((file, tensor), is_one_more, None),
        }
    }

    /// Adds a tensor under the names that it has; `None` if it is not as it must be.
    fn push(&mut self, target: GgufTarget, stored: (FileId, &'a GgufTensor)) -> Option<()> {
        let GgufTarget { name, change, is_one_more, .. } = target;
        if stored.1.bytes == 0 && change != GgufChange::Nothing {
            return None;
        }
        if let GgufChange::Alternating(number) | GgufChange::KeysAndValues(number) = change {
            let Some((first, half)) = self.halves.remove(&name) else {
                self.halves.insert(name, (number, stored));
                return Some(());
            };
            if first == number {
                return None;
            }
            let (first, second) = if number == 0 { (stored, half) } else { (half, stored) };
            let is_alternating = matches!(change, GgufChange::Alternating(_));
            return if is_alternating { self.alternate(name, first, second) } else { self.join(name, first, second) };
        }
        let placed = self.place(stored, is_one_more)?;
        let mut shape = stored.1.shape.clone();
        let boxes = match (&change, shape.as_slice()) {
            (GgufChange::Unsqueezed, [_]) => {
                shape.insert(0, 1);
                vec![placed.part(0, &shape)]
            }
            (GgufChange::Nothing | GgufChange::Unsqueezed, _) => vec![placed.part(0, &shape)],
            (GgufChange::Transposed, &[experts, rows, columns]) => {
                shape = vec![experts, columns, rows];
                let mut part = placed.part(0, &shape);
                (part.strides[1], part.strides[2]) = (1, columns);
                vec![part]
            }
            (GgufChange::Experts, [experts @ 0..=PARTS_MAX, of_one @ ..]) => {
                let elements: u64 = of_one.iter().product();
                self.shown.extend((0..*experts).map(|expert| {
                    let boxes = vec![placed.part(expert * elements, of_one)];
                    (name.replace("{e}", &expert.to_string()), placed.dtype, of_one.to_vec(), boxes)
                }));
                return Some(());
            }
            (GgufChange::Heads(heads @ 1..=PARTS_MAX), [rows, columns @ ..]) if rows.is_multiple_of(2 * heads) => {
                let (half, row) = (rows / heads / 2, columns.iter().product::<u64>());
                let extents = [&[half], columns].concat();
                // Stored are pairs of rows, one of each half of a head.
                let of_half = |at| {
                    let mut part = placed.part((at / 2 * 2 * half + at % 2) * row, &extents);
                    (part.origin[0], part.strides[0]) = (at * half, 2 * row);
                    part
                };
                (0..2 * heads).map(of_half).collect()
            }
            _ => return None,
        };
        self.shown.push((name, placed.dtype, shape, boxes));
        Some(())
    }

    /// Rows of two tensors `[experts, rows, columns]` alternate as columns: `[experts, columns, 2 * rows]`. Those of biases have no columns.
    fn alternate(
        &mut self,
        name: String,
        first: (FileId, &'a GgufTensor),
        (file, second): (FileId, &'a GgufTensor),
    ) -> Option<()> {
        let (experts, rows, columns) = match first.1.shape[..] {
            [experts, rows, columns] => (experts, rows, columns),
            [experts, rows] => (experts, rows, 1),
            _ => return None,
        };
        if first.1.shape != second.shape || first.1.stored != second.stored || columns == 0 {
            return None;
        }
        let placed = self.decode(first, false, Some((file, second, columns)))?;
        let shape = if first.1.shape.len() == 3 { vec![experts, columns, rows * 2] } else { vec![experts, rows * 2] };
        let mut part = placed.part(0, &shape);
        if let [_, middle, last] = &mut part.strides[..] {
            (*middle, *last) = (1, columns);
        }
        self.shown.push((name, placed.dtype, shape, vec![part]));
        Some(())
    }

    /// The factors of keys `[heads, rank, rows]` and of values `[heads, rows, rank]` become `[heads * rows of both, rank]`.
    fn join(&mut self, name: String, keys: (FileId, &'a GgufTensor), values: (FileId, &'a GgufTensor)) -> Option<()> {
        let (&[heads @ 0..=PARTS_MAX, rank, of_keys], &[others, of_values, same]) =
            (&keys.1.shape[..], &values.1.shape[..])
        else {
            return None;
        };
        if (heads, rank) != (others, same) {
            return None;
        }
        let (keys, values) = (self.decode(keys, false, None)?, self.decode(values, false, None)?);
        let boxes = (0..heads).flat_map(|head| {
            let mut key = keys.part(head * rank * of_keys, &[of_keys, rank]);
            (key.origin[0], key.strides[0], key.strides[1]) = (head * (of_keys + of_values), 1, of_keys);
            let mut value = values.part(head * rank * of_values, &[of_values, rank]);
            value.origin[0] = head * (of_keys + of_values) + of_keys;
            [key, value]
        });
        let (boxes, shape) = (boxes.collect(), vec![heads * (of_keys + of_values), rank]);
        self.shown.push((name, DType::F32, shape, boxes));
        Some(())
    }
}

impl Placed {
    /// A box of these extents in row-major order, from an element on.
    fn part(&self, element: u64, extents: &[u64]) -> StoredBox {
        let start = self.start + element * self.dtype.bits() / 8;
        StoredBox::row_major(self.file, start, &vec![0; extents.len()], extents)
    }
}
