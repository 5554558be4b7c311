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
use ckfs_source::ByteSpan;
use ckfs_tensor::{PerAxis, mosaic::row_major, to_usize, unravel};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::{
    coded::{CodedArray, CodedBytes, CodedChunk, DecodedFile},
    store::{Bytes, FileNumber, Files, StoreValue},
};
use crate::{problem::Problem, tree::FileTree};

/// Keys that are no chunks: descriptions and attributes.
const DESCRIPTIONS: [&str; 4] = [ZARR_JSON, ZARRAY, ".zattrs", ".zmetadata"];

/// What tensorstore leaves behind when a writer is stopped.
const LOCK: &str = ".__lock";

/// The file of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BoxFile {
    /// A pinned file.
    Own(FileNumber),
    /// A decoded file.
    Decoded(u32),
}

/// A box of an array, and where its elements are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ArrayBox {
    pub(super) file: BoxFile,
    /// First byte of the first element.
    pub(super) start: u64,
    /// First index along each axis.
    pub(super) origin: PerAxis,
    /// Elements along each axis.
    pub(super) extents: PerAxis,
    /// Elements in the file from one index to the next, for each axis.
    pub(super) strides: PerAxis,
}

/// How the chunks of an array become boxes.
enum Form {
    /// A box in the stored file, with these strides.
    Affine(PerAxis),
    /// A decoded box.
    Whole,
    /// A box for each inner chunk of a shard.
    Inner {
        /// Shape of an inner chunk in the array's axes.
        extents: PerAxis,
        /// Elements from one index to the next, in the array's axes.
        strides: PerAxis,
        /// Whether the stored bytes are the elements.
        is_plain: bool,
    },
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
        let Some(sharding) = array.sharding() else {
            return array.codecs.plain(array.dtype, &array.chunk).map_or(Self::Whole, Self::Affine);
        };
        let plain = sharding.codecs.plain(array.dtype, &sharding.chunk);
        if plain.is_none() && sharding.grid.iter().all(|count| *count == 1) {
            // The index of each shard need not be read before the chunk is.
            return Self::Whole;
        }
        let is_plain = plain.is_some();
        let strides = plain.unwrap_or_else(|| row_major(&sharding.chunk));
        Self::Inner { extents: in_own_axes(array, &sharding.chunk), strides: in_own_axes(array, &strides), is_plain }
    }
}

/// A value that is a chunk of the grid.
struct Chunk<'a> {
    numbers: PerAxis,
    value: &'a StoreValue,
    /// Its bytes in the file; `None` if they are in a node.
    span: Option<ByteSpan>,
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
        let is_inner = matches!(form, Form::Inner { .. });
        let name = self.name.to_owned();
        let mut boxes = Boxes {
            coded: Arc::new(CodedArray { name, array: self.array, is_inner }),
            by_file: BTreeMap::new(),
            list: Vec::with_capacity(chunks.len()),
        };
        for chunk in &chunks {
            boxes.add(&form, chunk, files.number(&chunk.value.path));
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
        let (span, stored_bytes) = self.place(value)?;
        if let Form::Affine(_) = form {
            self.check_length(value, &value.key, self.array.chunk_bytes(), stored_bytes)?;
        }
        let inner = match (form, self.array.sharding()) {
            (Form::Inner { is_plain, .. }, Some(sharding)) => {
                self.inner_spans(value, sharding, *is_plain, span, stored_bytes)?
            }
            (Form::Affine(_) | Form::Whole | Form::Inner { .. }, _) => Vec::new(),
        };
        Ok(Some(Chunk { numbers, value, span, inner }))
    }

    /// The span of a value in its file, if it is in one, and its length.
    fn place(&self, value: &StoreValue) -> Result<(Option<ByteSpan>, u64), Problem> {
        if let Bytes::Inline(bytes) = &value.bytes {
            return Ok((None, bytes.len() as u64));
        }
        let len_bytes = self.tree.len_bytes(&value.path)?.unwrap_or(0);
        let whole = ByteSpan::of_len(0, len_bytes).expect("a file's end fits 64 bits");
        let span = match &value.bytes {
            Bytes::Span(span) => *span,
            Bytes::File | Bytes::Inline(_) => whole,
        };
        if !whole.contains(span) {
            let (start, end) = (span.start(), span.end());
            let what = format!("bytes {start}..{end} are outside the file of {len_bytes} bytes");
            return Err(self.in_chunk(value, &value.key, what));
        }
        Ok((Some(span), span.len()))
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
        span: Option<ByteSpan>,
        stored_bytes: u64,
    ) -> Result<Vec<Option<Range<u64>>>, Problem> {
        let damaged = |error: ChunkError| self.in_chunk(value, &value.key, error);
        let at = sharding.index_span(stored_bytes).map_err(damaged)?;
        let index = match (&value.bytes, span) {
            (Bytes::Inline(bytes), _) => bytes[to_usize(at.start)..to_usize(at.end)].to_vec(),
            (Bytes::File | Bytes::Span(_), span) => {
                let start = span.map_or(0, ByteSpan::start);
                let mut index = vec![0; to_usize(at.end - at.start)];
                self.tree.read(&value.path, start + at.start, &mut index)?;
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
    by_file: BTreeMap<FileNumber, Vec<(CodedChunk, usize)>>,
    list: Vec<ArrayBox>,
}

impl Boxes {
    fn add(&mut self, form: &Form, chunk: &Chunk<'_>, file: FileNumber) {
        let coded = Arc::clone(&self.coded);
        let array = &coded.array;
        let shape = array.shape.extents();
        let origin: PerAxis = chunk.numbers.iter().zip(&array.chunk).map(|(number, extent)| number * extent).collect();
        let number = chunk.numbers.iter().zip(&array.grid()).fold(0, |number, (at, count)| number * count + at);
        let bounded = |origin: &PerAxis, extents: &PerAxis| -> Option<PerAxis> {
            let fits = |((origin, extent), whole): ((&u64, &u64), &u64)| {
                whole.checked_sub(*origin).filter(|left| *left > 0).map(|left| left.min(*extent))
            };
            origin.iter().zip(extents).zip(shape).map(fits).collect()
        };
        match (form, chunk.span) {
            (Form::Affine(strides), Some(span)) => {
                let Some(extents) = bounded(&origin, &array.chunk) else { return };
                let (file, strides) = (BoxFile::Own(file), strides.clone());
                self.list.push(ArrayBox { file, start: span.start(), origin, extents, strides });
            }
            // A decoded chunk is in the order of the array's own axes.
            (Form::Affine(_) | Form::Whole, _) => {
                let Some(extents) = bounded(&origin, &array.chunk) else { return };
                self.add_coded(file, chunk, (number, 0), None, (origin, extents, None));
            }
            (Form::Inner { extents: inner_extents, strides, is_plain }, _) => {
                let grid = array.sharding().map(|sharding| sharding.grid.clone()).unwrap_or_default();
                for (inner, span) in (0_u32..).zip(&chunk.inner) {
                    let Some(range) = span else { continue };
                    let numbers = in_own_axes(array, &unravel(inner.into(), &grid));
                    let at = origin.iter().zip(&numbers).zip(inner_extents).map(|((o, n), e)| o + n * e).collect();
                    let Some(extents) = bounded(&at, inner_extents) else { continue };
                    if let Some(span) = chunk.span.filter(|_| *is_plain) {
                        self.list.push(ArrayBox {
                            file: BoxFile::Own(file),
                            start: span.start() + range.start,
                            origin: at,
                            extents,
                            strides: strides.clone(),
                        });
                    } else {
                        // A decoded inner chunk is in the order of axes of the shard.
                        let sharding = array.sharding().map(|sharding| row_major(&sharding.chunk));
                        let strides = sharding.map(|strides| in_own_axes(array, &strides));
                        self.add_coded(file, chunk, (number, inner), Some(range), (at, extents, strides));
                    }
                }
            }
        }
    }

    /// Adds a box in a decoded file, of which file and first byte are not known yet.
    fn add_coded(
        &mut self,
        file: FileNumber,
        chunk: &Chunk<'_>,
        (number, inner): (u64, u32),
        range: Option<&Range<u64>>,
        (origin, extents, strides): (PerAxis, PerAxis, Option<PerAxis>),
    ) {
        let bytes = match (chunk.span, &chunk.value.bytes) {
            (None, Bytes::Inline(bytes)) => CodedBytes::Inline(match range {
                Some(range) => bytes[to_usize(range.start)..to_usize(range.end)].into(),
                None => Arc::clone(bytes),
            }),
            (span, _) => {
                let whole = span.expect("what is not in a node is in a file");
                let part = range.and_then(|range| ByteSpan::new(range.start, range.end));
                CodedBytes::Span(part.and_then(|part| whole.slice(part)).unwrap_or(whole))
            }
        };
        let strides = strides.unwrap_or_else(|| row_major(&self.coded.array.chunk));
        let of_file = self.by_file.entry(file).or_default();
        of_file.push((CodedChunk { number, inner, bytes }, self.list.len()));
        self.list.push(ArrayBox { file: BoxFile::Decoded(0), start: 0, origin, extents, strides });
    }

    /// Puts the coded chunks of each file in order, and gives their boxes places.
    fn finish(mut self, decoded: &mut Vec<DecodedFile>) -> Result<Vec<ArrayBox>, Problem> {
        let chunk_bytes = self.coded.chunk_bytes();
        for (stored_in, mut chunks) in self.by_file {
            chunks.sort_by_key(|(chunk, _)| match &chunk.bytes {
                CodedBytes::Span(span) => (span.start(), chunk.number, chunk.inner),
                CodedBytes::Inline(_) => (0, chunk.number, chunk.inner),
            });
            let number = u32::try_from(decoded.len()).expect("arrays and files are fewer than 32 bits count");
            let (chunks, boxes): (Vec<_>, Vec<usize>) = chunks.into_iter().unzip();
            let count = chunks.len();
            let file = DecodedFile::new(Arc::clone(&self.coded), stored_in, chunks).ok_or_else(|| {
                let (array, most) = (&self.coded.name, u64::MAX);
                Problem::Other(format!(
                    "array {array}: {count} chunks of {chunk_bytes} bytes in one file: expected at most {most} bytes decoded"
                ))
            })?;
            for (at, place) in boxes.into_iter().zip(0..) {
                let placed = &mut self.list[at];
                // Within the length of the file, which 64 bits count.
                (placed.file, placed.start) = (BoxFile::Decoded(number), place * chunk_bytes);
            }
            decoded.push(file);
        }
        Ok(self.list)
    }
}
