//! From the stored values of an array to the boxes that cover it.
//!
//! A chunk whose bytes are its elements is a box with strides in its file. Any other is decoded whole, and is then a box in a
//! decoded file. A shard is as many boxes as it has inner chunks, if these can be read apart.

use std::{
    collections::{BTreeMap, HashSet},
    fmt::Display,
    ops::Range,
    sync::Arc,
};

use ckfs_format::zarr::read::{Array, ChunkError, ShardCodec, ZARR_JSON, ZARRAY};
use ckfs_source::{ByteSpan, FileId};
use ckfs_tensor::{PerAxis, mosaic::row_major, to_usize, unravel};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::{
    coded::{CodedArray, CodedBytes, CodedChunk, DecodedFile},
    store::{Files, StoreValue},
};
use crate::{mosaic::StoredBox, problem::Problem, tree::FileTree};

/// Keys that are no chunks: descriptions and attributes.
const DESCRIPTIONS: [&str; 4] = [ZARR_JSON, ZARRAY, ".zattrs", ".zmetadata"];

/// What tensorstore leaves behind when a writer is stopped.
const LOCK: &str = ".__lock";

/// A box of an array, and where its elements are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ArrayBox {
    /// Whether its file is one of the decoded ones, which have numbers of their own.
    is_decoded: bool,
    place: StoredBox,
}

impl ArrayBox {
    /// The box in a source that has the decoded files after so many `others`.
    pub(super) fn stored(&self, others: usize) -> StoredBox {
        let first = if self.is_decoded { others } else { 0 };
        StoredBox { file: FileId::at(first + self.place.file.index()), ..self.place.clone() }
    }
}

/// How the chunks of an array, or the inner chunks of its shards, become boxes. Numbers are for each of the array's axes.
struct Form {
    is_inner: bool,
    extents: PerAxis,
    /// Elements from one index to the next in the stored file; `None` if stored bytes are not the elements.
    plain: Option<PerAxis>,
    /// The same in a decoded file.
    decoded: PerAxis,
}

/// Numbers given for each axis as the array is stored, for each of its own axes.
fn in_own_axes(array: &Array, stored: &[u64]) -> PerAxis {
    let Some(order) = &array.codecs.order else { return PerAxis::from_slice(stored) };
    let mut own = PerAxis::from_elem(0, stored.len());
    for (axis, number) in order.iter().zip(stored) {
        own[to_usize(*axis)] = *number;
    }
    own
}

impl Form {
    fn of(array: &Array) -> Self {
        // A decoded chunk is in the order of the array's own axes, an inner one in that of the shard's.
        let whole = |plain| {
            let (extents, decoded) = (array.chunk.clone(), row_major(&array.chunk));
            Self { is_inner: false, extents, plain, decoded }
        };
        let Some(sharding) = array.sharding() else { return whole(array.codecs.plain(array.dtype, &array.chunk)) };
        let plain = sharding.codecs.plain(array.dtype, &sharding.chunk);
        if plain.is_none() && sharding.grid.iter().all(|count| *count == 1) {
            // The index of each shard need not be read before the chunk is.
            return whole(None);
        }
        let own = |stored: PerAxis| in_own_axes(array, &stored);
        let (extents, decoded) = (own(sharding.chunk.clone()), own(row_major(&sharding.chunk)));
        Self { is_inner: true, extents, plain: plain.map(own), decoded }
    }
}

/// A value that is a chunk of the grid.
struct Chunk<'a> {
    numbers: PerAxis,
    value: &'a StoreValue,
    bytes: CodedBytes,
    /// The spans of inner chunks, relative to the shard.
    inner: Vec<Option<Range<u64>>>,
}

/// What is needed to lay out an array.
pub(super) struct ToLayOut<'a> {
    pub(super) tree: &'a dyn FileTree,
    pub(super) name: &'a str,
    pub(super) array: Array,
    pub(super) values: &'a [StoreValue],
    /// Whether the writer stores chunks of the fill value too.
    pub(super) stores_fill_values: bool,
}

impl ToLayOut<'_> {
    /// The boxes of the array, and whether indices are left that none covers: they hold the fill value. Adds the files that chunks need.
    ///
    /// # Errors
    /// All problems with the chunks.
    pub(super) fn lay_out(
        self,
        files: &mut Files,
        decoded: &mut Vec<DecodedFile>,
    ) -> Result<(Vec<ArrayBox>, bool), Vec<Problem>> {
        let form = Form::of(&self.array);
        let found: Vec<_> = self.values.par_iter().map(|value| self.chunk(&form, value)).collect();
        let (mut chunks, mut problems) = (Vec::with_capacity(found.len()), Vec::new());
        for found in found {
            match found {
                Ok(chunk) => chunks.extend(chunk),
                Err(problem) => problems.push(problem),
            }
        }
        let missing = self.missing(&chunks);
        let mut has_holes = missing.is_some();
        let missing_inner = chunks.iter().find(|chunk| chunk.inner.iter().any(Option::is_none));
        has_holes |= missing_inner.is_some();
        if self.stores_fill_values {
            problems.extend(missing.or_else(|| missing_inner.map(|chunk| self.missing_inner(chunk))));
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        let name = self.name.to_owned();
        let mut boxes = Boxes {
            coded: Arc::new(CodedArray { name, array: self.array, is_inner: form.is_inner }),
            by_file: BTreeMap::new(),
            list: Vec::with_capacity(chunks.len()),
        };
        for chunk in &chunks {
            boxes.add(&form, chunk, files.id(&chunk.value.path));
        }
        let boxes = boxes.finish(decoded).map_err(|problem| vec![problem])?;
        Ok((boxes, has_holes))
    }

    /// The place of a value in the grid. `None` if it is no chunk and need not be one.
    fn chunk<'v>(&self, form: &Form, value: &'v StoreValue) -> Result<Option<Chunk<'v>>, Problem> {
        let Some(numbers) = self.array.numbers(&value.key) else {
            if DESCRIPTIONS.contains(&value.key.as_str()) || value.key.ends_with(LOCK) {
                return Ok(None);
            }
            let grid = self.array.grid();
            return Err(
                self.problem(format_args!(": {:?} is stored, which is no chunk of its grid {grid:?}", value.key))
            );
        };
        let bytes = self.place(value)?;
        let sharding = self.array.sharding().filter(|_| form.is_inner);
        if form.plain.is_some() && sharding.is_none() {
            self.check_length(value, &value.key, self.array.chunk_bytes(), bytes.len())?;
        }
        let inner = sharding.map(|sharding| self.inner_spans(value, sharding, form.plain.is_some(), &bytes));
        Ok(Some(Chunk { numbers, value, bytes, inner: inner.transpose()?.unwrap_or_default() }))
    }

    /// Where the bytes of a value are.
    fn place(&self, value: &StoreValue) -> Result<CodedBytes, Problem> {
        let span = match &value.bytes {
            Some(inline @ CodedBytes::Inline(_)) => return Ok(inline.clone()),
            Some(CodedBytes::Span(span)) => Some(*span),
            None => None,
        };
        let len_bytes = self.tree.len_bytes(&value.path)?.unwrap_or(0);
        let whole = ByteSpan::of_len(0, len_bytes).expect("a file's end fits 64 bits");
        let span = span.unwrap_or(whole);
        if !whole.contains(span) {
            let (start, end) = (span.start(), span.end());
            let what = format!("bytes {start}..{end} are outside the file of {len_bytes} bytes");
            return Err(self.in_chunk(value, &value.key, what));
        }
        Ok(CodedBytes::Span(span))
    }

    fn check_length(&self, value: &StoreValue, chunk: &str, expected: u64, found: u64) -> Result<(), Problem> {
        let what = || format!("expected {expected} bytes, found {found}");
        if expected == found { Ok(()) } else { Err(self.in_chunk(value, chunk, what())) }
    }

    /// What is wrong with the array, after its name.
    fn problem(&self, what: impl Display) -> Problem {
        Problem::Other(format!("array {}{what}", self.name))
    }

    /// What is wrong with a chunk of a value.
    fn in_chunk(&self, value: &StoreValue, chunk: &str, what: impl Display) -> Problem {
        let file = self.tree.shown(&value.path);
        self.problem(format_args!(", chunk {chunk}, {}: {what}", file.display()))
    }

    fn inner_spans(
        &self,
        value: &StoreValue,
        sharding: &ShardCodec,
        is_plain: bool,
        bytes: &CodedBytes,
    ) -> Result<Vec<Option<Range<u64>>>, Problem> {
        let stored_bytes = bytes.len();
        let damaged = |error: ChunkError| self.in_chunk(value, &value.key, error);
        let at = sharding.index_span(stored_bytes).map_err(damaged)?;
        let index = match bytes {
            CodedBytes::Inline(bytes) => bytes[to_usize(at.start)..to_usize(at.end)].to_vec(),
            CodedBytes::Span(span) => {
                let mut index = vec![0; to_usize(at.end - at.start)];
                self.tree.read(&value.path, span.start() + at.start, &mut index)?;
                index
            }
        };
        let spans = sharding.inner_spans(&index, stored_bytes).map_err(damaged)?;
        if is_plain {
            let expected = sharding.chunk_bytes(self.array.dtype);
            for (number, span) in spans.iter().enumerate() {
                let Some(span) = span else { continue };
                let chunk = || format!("{}, inner chunk {number}", value.key);
                self.check_length(value, &chunk(), expected, span.end - span.start)?;
            }
        }
        Ok(spans)
    }

    /// The problem of chunks that are not stored, if there are any.
    fn missing(&self, chunks: &[Chunk<'_>]) -> Option<Problem> {
        let grid = self.array.grid();
        let of: u64 = grid.iter().product();
        let missing = of.checked_sub(chunks.len() as u64).filter(|missing| *missing > 0)?;
        let stored: HashSet<&PerAxis> = chunks.iter().map(|chunk| &chunk.numbers).collect();
        let first = (0..of).map(|number| unravel(number, &grid)).find(|numbers| !stored.contains(numbers));
        let first = first.map_or_else(String::new, |numbers| self.array.key(&numbers));
        Some(self.lost(missing, of, &first))
    }

    fn lost(&self, missing: u64, of: u64, first: &str) -> Problem {
        self.problem(format_args!(
            ": {missing} of {of} chunks are missing, the first is {first}: the writer stores chunks of the fill value too, so that they are \
             lost"
        ))
    }

    /// The problem of a shard that lacks inner chunks.
    fn missing_inner(&self, chunk: &Chunk<'_>) -> Problem {
        let missing = chunk.inner.iter().filter(|span| span.is_none()).count() as u64;
        let number = chunk.inner.iter().position(Option::is_none).unwrap_or(0);
        let first = format!("{}, inner chunk {number}", chunk.value.key);
        self.lost(missing, chunk.inner.len() as u64, &first)
    }
}

/// The boxes of an array while they are made.
struct Boxes {
    coded: Arc<CodedArray>,
    /// The coded chunks of each file, each with the number of its box.
    by_file: BTreeMap<FileId, Vec<(CodedChunk, usize)>>,
    list: Vec<ArrayBox>,
}

impl Boxes {
    fn add(&mut self, form: &Form, chunk: &Chunk<'_>, file: FileId) {
        let coded = Arc::clone(&self.coded);
        let array = &coded.array;
        let origin: PerAxis = chunk.numbers.iter().zip(&array.chunk).map(|(number, extent)| number * extent).collect();
        let number = chunk.numbers.iter().zip(&array.grid()).fold(0, |number, (at, count)| number * count + at);
        let Some(sharding) = array.sharding().filter(|_| form.is_inner) else {
            return self.push(form, file, CodedChunk { number, inner: 0, bytes: chunk.bytes.clone() }, origin);
        };
        for (inner, span) in (0_u32..).zip(&chunk.inner) {
            let Some(range) = span else { continue };
            let numbers = in_own_axes(array, &unravel(inner.into(), &sharding.grid));
            let at = origin.iter().zip(&numbers).zip(&form.extents).map(|((o, n), e)| o + n * e).collect();
            self.push(form, file, CodedChunk { number, inner, bytes: chunk.bytes.part(range) }, at);
        }
    }

    /// Adds the part of a chunk that is inside the array: a box in its file, or one in a decoded file, of which file and first byte
    /// are not known yet.
    fn push(&mut self, form: &Form, file: FileId, chunk: CodedChunk, origin: PerAxis) {
        let inside = |((origin, extent), whole): ((&u64, &u64), &u64)| {
            whole.checked_sub(*origin).filter(|left| *left > 0).map(|left| left.min(*extent))
        };
        let extents = origin.iter().zip(&form.extents).zip(self.coded.array.shape.extents()).map(inside);
        let Some(extents) = extents.collect() else { return };
        let (is_decoded, start, strides) = if let (Some(strides), CodedBytes::Span(span)) = (&form.plain, &chunk.bytes)
        {
            (false, span.start(), strides.clone())
        } else {
            self.by_file.entry(file).or_default().push((chunk, self.list.len()));
            (true, 0, form.decoded.clone())
        };
        self.list.push(ArrayBox { is_decoded, place: StoredBox { file, start, origin, extents, strides } });
    }

    /// Puts the coded chunks of each file in order, and gives their boxes places.
    fn finish(mut self, decoded: &mut Vec<DecodedFile>) -> Result<Vec<ArrayBox>, Problem> {
        let chunk_bytes = self.coded.chunk_bytes();
        for (stored_in, mut chunks) in self.by_file {
            chunks.sort_by_key(|(CodedChunk { number, inner, bytes }, _)| {
                (bytes.span().map_or(0, ByteSpan::start), *number, *inner)
            });
            let (chunks, boxes): (Vec<_>, Vec<usize>) = chunks.into_iter().unzip();
            let count = chunks.len();
            let file = DecodedFile::new(Arc::clone(&self.coded), stored_in, chunks).ok_or_else(|| {
                let (array, most) = (&self.coded.name, u64::MAX);
                Problem::Other(format!(
                    "array {array}: {count} chunks of {chunk_bytes} bytes in one file: expected at most {most} bytes decoded"
                ))
            })?;
            for (at, place) in boxes.into_iter().zip(0..) {
                let placed = &mut self.list[at].place;
                // Within the length of the file, which 64 bits count.
                (placed.file, placed.start) = (FileId::at(decoded.len()), place * chunk_bytes);
            }
            decoded.push(file);
        }
        Ok(self.list)
    }
}
