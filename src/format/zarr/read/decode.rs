//! From the stored bytes of a chunk to its elements.

use std::{
    borrow::Cow,
    io::{BufRead, Read},
    ops::Range,
};

use ckfs_tensor::{DType, PerAxis, to_usize};

use super::{
    codec::{ArrayBytes, ChunkError, Codecs, Packing, ShardCodec, stored_shape, strides},
    metadata::Array,
};
use crate::safetensors::tensor_bytes;

const CHECKSUM_BYTES: usize = 4;

/// Offset and length of an inner chunk, in bytes.
const INDEX_ENTRY_BYTES: u64 = 16;

/// Offset and length of an inner chunk that is not there.
const MISSING: u64 = u64::MAX;

/// What packed bytes may have beyond those of the elements, in bytes: checksums, headers, and what incompressible data grows by.
const PACKED_SLACK_BYTES: usize = 64 << 10;

impl Array {
    /// Decodes a chunk, or a whole shard, of which `stored` are all bytes: its elements in row-major order of the array's axes,
    /// little-endian.
    ///
    /// # Errors
    /// [`ChunkError`]. `target` has then any content.
    ///
    /// # Panics
    /// If `target` has not exactly [`Array::chunk_bytes`] bytes.
    pub fn decode(&self, stored: &[u8], target: &mut [u8]) -> Result<(), ChunkError> {
        assert_eq!(target.len() as u64, self.chunk_bytes(), "room for one chunk");
        self.codecs.decode(self.dtype, &self.fill, &self.chunk, stored, target)
    }

    /// Decodes one inner chunk of a shard, of which `stored` are all bytes: its elements in row-major order of the axes **as the
    /// shard stores them** ([`Codecs::order`] of the array's codecs), little-endian.
    ///
    /// # Errors
    /// [`ChunkError`]. `target` has then any content.
    ///
    /// # Panics
    /// If the array has no shards, or `target` has not exactly the bytes of an inner chunk.
    pub fn decode_inner(&self, stored: &[u8], target: &mut [u8]) -> Result<(), ChunkError> {
        let sharding = self.sharding().expect("the caller has asked for shards");
        assert_eq!(Some(target.len() as u64), tensor_bytes(self.dtype, &sharding.chunk), "room for one inner chunk");
        sharding.codecs.decode(self.dtype, &self.fill, &sharding.chunk, stored, target)
    }

    /// Fills `target` with elements that are not stored.
    ///
    /// # Panics
    /// If `target` has not a whole number of elements.
    pub fn fill(&self, target: &mut [u8]) {
        assert!(target.len().is_multiple_of(self.fill.len()), "whole elements");
        fill(target, &self.fill);
    }
}

fn fill(target: &mut [u8], element: &[u8]) {
    match element.first() {
        Some(first) if element.iter().all(|byte| byte == first) => target.fill(*first),
        Some(_) | None => target.chunks_exact_mut(element.len()).for_each(|place| place.copy_from_slice(element)),
    }
}

fn check_length(stage: &'static str, expected: usize, found: usize) -> Result<(), ChunkError> {
    let (expected, found) = (expected as u64, found as u64);
    if expected == found { Ok(()) } else { Err(ChunkError::length(stage, expected, found)) }
}

impl Codecs {
    /// Whether [`Codecs::decode_stream`] decodes chunks: one packing, zstd, of elements in the order of the array's axes.
    pub fn can_stream(&self) -> bool {
        self.order.is_none() && self.packings == [Packing::Zstd] && matches!(self.bytes, ArrayBytes::Elements { .. })
    }

    /// Decodes a chunk while its stored bytes are read, so that these are never in memory together.
    ///
    /// # Errors
    /// [`ChunkError`], also if `stored` fails. `target` has then any content.
    ///
    /// # Panics
    /// If [`Codecs::can_stream`] is false.
    pub fn decode_stream(&self, dtype: DType, stored: impl BufRead, target: &mut [u8]) -> Result<(), ChunkError> {
        assert!(self.can_stream(), "one packing, which is zstd");
        let decoder =
            zstd::stream::read::Decoder::with_buffer(stored).map_err(|error| ChunkError::codec("zstd", error))?;
        read_exactly("zstd", decoder, target)?;
        if self.bytes == (ArrayBytes::Elements { is_big_endian: true }) {
            swap(dtype, target);
        }
        Ok(())
    }

    /// Decodes a chunk of this shape into exactly as many bytes as it needs.
    pub(super) fn decode(
        &self,
        dtype: DType,
        fill_element: &[u8],
        chunk: &[u64],
        stored: &[u8],
        target: &mut [u8],
    ) -> Result<(), ChunkError> {
        let Some(order) = &self.order else {
            return self.decode_stored(dtype, fill_element, chunk, stored, target);
        };
        let mut turned = vec![0; target.len()];
        self.decode_stored(dtype, fill_element, &stored_shape(Some(order), chunk), stored, &mut turned)?;
        let unit = fill_element.len();
        let (from, to) = (strides(Some(order), chunk, unit as u64), strides(None, chunk, unit as u64));
        copy_box(chunk, unit, (&turned, &from, 0), (target, &to, 0));
        Ok(())
    }

    /// Decodes into the order of axes in which the chunk is stored.
    fn decode_stored(
        &self,
        dtype: DType,
        fill_element: &[u8],
        shape: &[u64],
        stored: &[u8],
        target: &mut [u8],
    ) -> Result<(), ChunkError> {
        match &self.bytes {
            ArrayBytes::Shard(sharding) => sharding.decode(dtype, fill_element, shape, stored, target),
            ArrayBytes::Elements { is_big_endian } => {
                unpack(&self.packings, stored, target)?;
                if *is_big_endian {
                    swap(dtype, target);
                }
                Ok(())
            }
        }
    }
}

/// Reverses the bytes of each number.
fn swap(dtype: DType, bytes: &mut [u8]) {
    // A complex element is two numbers.
    let number_bytes = if dtype == DType::C64 { 4 } else { to_usize(dtype.element_bytes().unwrap_or(1)) };
    bytes.chunks_exact_mut(number_bytes).for_each(<[u8]>::reverse);
}

/// Undoes the packings, the last first. The first's input has exactly the length of `target`; those of the others are not known.
fn unpack(packings: &[Packing], stored: &[u8], target: &mut [u8]) -> Result<(), ChunkError> {
    let Some((first, others)) = packings.split_first() else {
        check_length("stored elements", target.len(), stored.len())?;
        target.copy_from_slice(stored);
        return Ok(());
    };
    let mut bytes = Cow::Borrowed(stored);
    let limit = target.len().saturating_mul(2).saturating_add(PACKED_SLACK_BYTES);
    for packing in others.iter().rev() {
        bytes = match (packing, bytes) {
            (Packing::Crc32c, Cow::Borrowed(bytes)) => Cow::Borrowed(check_crc(bytes, "chunk")?),
            (Packing::Crc32c, Cow::Owned(bytes)) => Cow::Owned(check_crc(&bytes, "chunk")?.to_vec()),
            (Packing::Zstd, bytes) => {
                let decoder = zstd::stream::read::Decoder::with_buffer(&*bytes)
                    .map_err(|error| ChunkError::codec("zstd", error))?;
                Cow::Owned(read_to_end("zstd", decoder, limit)?)
            }
            (Packing::Gzip, bytes) => {
                Cow::Owned(read_to_end("gzip", flate2::read::MultiGzDecoder::new(&*bytes), limit)?)
            }
        };
    }
    match first {
        Packing::Crc32c => {
            let bytes = check_crc(&bytes, "chunk")?;
            check_length("elements before crc32c", target.len(), bytes.len())?;
            target.copy_from_slice(bytes);
            Ok(())
        }
        Packing::Zstd => {
            let decoded =
                zstd::bulk::decompress_to_buffer(&bytes, target).map_err(|error| ChunkError::codec("zstd", error))?;
            check_length("elements after zstd", target.len(), decoded)
        }
        Packing::Gzip => read_exactly("gzip", flate2::read::MultiGzDecoder::new(&*bytes), target),
    }
}

fn read_to_end(codec: &'static str, decoder: impl Read, limit: usize) -> Result<Vec<u8>, ChunkError> {
    let mut bytes = Vec::new();
    let len =
        decoder.take(limit as u64 + 1).read_to_end(&mut bytes).map_err(|error| ChunkError::codec(codec, error))?;
    if len > limit {
        let message = format_args!("more than {limit} bytes: expected less for this chunk");
        return Err(ChunkError::codec(codec, message));
    }
    Ok(bytes)
}

fn read_exactly(codec: &'static str, mut decoder: impl Read, target: &mut [u8]) -> Result<(), ChunkError> {
    let expected = target.len() as u64;
    let mut rest = &mut *target;
    while !rest.is_empty() {
        let read = decoder.read(rest).map_err(|error| ChunkError::codec(codec, error))?;
        if read == 0 {
            let found = expected - rest.len() as u64;
            return Err(ChunkError::length(codec, expected, found));
        }
        rest = &mut rest[read..];
    }
    // Reading to the end checks the checksum there, and that there is no more.
    let more = decoder.read(&mut [0]).map_err(|error| ChunkError::codec(codec, error))? as u64;
    if more == 0 { Ok(()) } else { Err(ChunkError::length(codec, expected, expected + more)) }
}

/// The bytes before a CRC-32C that is right.
fn check_crc<'a>(bytes: &'a [u8], what: &'static str) -> Result<&'a [u8], ChunkError> {
    let split = bytes.split_last_chunk::<CHECKSUM_BYTES>();
    let short = || ChunkError::length("crc32c", CHECKSUM_BYTES as u64, bytes.len() as u64);
    let (covered, checksum) = split.ok_or_else(short)?;
    let (expected, found) = (u32::from_le_bytes(*checksum), crc32c::crc32c(covered));
    if expected == found { Ok(covered) } else { Err(ChunkError::checksum(what, expected, found)) }
}

impl ShardCodec {
    /// Number of inner chunks.
    fn count(&self) -> u64 {
        // No more than elements of the shard, which 64 bits count.
        self.grid.iter().product()
    }

    /// Bytes of the index.
    pub(crate) fn index_bytes(&self) -> u64 {
        let checksum = if self.index_has_checksum { CHECKSUM_BYTES as u64 } else { 0 };
        self.count().saturating_mul(INDEX_ENTRY_BYTES).saturating_add(checksum)
    }

    /// Where the index is in a shard of `shard_bytes` bytes.
    ///
    /// # Errors
    /// [`ChunkError`]: the shard has no room for it.
    pub fn index_span(&self, shard_bytes: u64) -> Result<Range<u64>, ChunkError> {
        let len = self.index_bytes();
        let rest = shard_bytes.checked_sub(len);
        let rest = rest.ok_or_else(|| ChunkError::length("index of a shard", len, shard_bytes))?;
        Ok(if self.index_is_first { 0..len } else { rest..shard_bytes })
    }

    /// Where each inner chunk is in a shard of `shard_bytes` bytes, in row-major order of their grid; `None` for one that is
    /// not there and holds the fill value. `index` are the bytes of [`ShardCodec::index_span`].
    ///
    /// # Errors
    /// [`ChunkError`]: the index is damaged, or points outside the data of the shard.
    pub fn inner_spans(&self, index: &[u8], shard_bytes: u64) -> Result<Vec<Option<Range<u64>>>, ChunkError> {
        let at = self.index_span(shard_bytes)?;
        check_length("index of a shard", to_usize(at.end - at.start), index.len())?;
        let numbers = if self.index_has_checksum { check_crc(index, "index of a shard")? } else { index };
        let (data_start, data_end) = if self.index_is_first { (at.end, shard_bytes) } else { (0, at.start) };
        let (entries, _) = numbers.as_chunks::<8>().0.as_chunks::<2>();
        let number = |bytes| {
            let number = u64::from_le_bytes(bytes);
            if self.index_is_big_endian { number.swap_bytes() } else { number }
        };
        let span = |(chunk, entry): (usize, &[[u8; 8]; 2])| {
            let (offset, len_bytes) = (number(entry[0]), number(entry[1]));
            if (offset, len_bytes) == (MISSING, MISSING) {
                return Ok(None);
            }
            let end = offset.checked_add(len_bytes).filter(|end| offset >= data_start && *end <= data_end);
            let outside = || {
                let place = format!("{len_bytes} bytes at {offset}");
                let data = format!("the data of the shard, bytes {data_start}..{data_end}");
                ChunkError(format!("shard: inner chunk {chunk}: {place} are not in {data}"))
            };
            end.map(|end| Some(offset..end)).ok_or_else(outside)
        };
        entries.iter().enumerate().map(span).collect()
    }

    fn decode(
        &self,
        dtype: DType,
        fill_element: &[u8],
        shard: &[u64],
        stored: &[u8],
        target: &mut [u8],
    ) -> Result<(), ChunkError> {
        let shard_bytes = stored.len() as u64;
        let place = |span: &Range<u64>| to_usize(span.start)..to_usize(span.end);
        let spans = self.inner_spans(&stored[place(&self.index_span(shard_bytes)?)], shard_bytes)?;
        // As Orbax writes: the inner chunk is the shard.
        if let [Some(only)] = spans.as_slice() {
            return self.codecs.decode(dtype, fill_element, shard, &stored[place(only)], target);
        }
        let element_bytes = fill_element.len();
        let row_major = |shape| strides(None, shape, element_bytes as u64);
        let (strides, inner_strides) = (row_major(shard), row_major(&self.chunk));
        let mut inner = vec![0; to_usize(self.chunk_bytes(dtype))];
        let mut numbers = PerAxis::from_elem(0, shard.len());
        for span in &spans {
            match span {
                Some(span) => self.codecs.decode(dtype, fill_element, &self.chunk, &stored[place(span)], &mut inner)?,
                None => fill(&mut inner, fill_element),
            }
            let start: u64 = numbers.iter().zip(&self.chunk).zip(&strides).map(|((n, c), stride)| n * c * stride).sum();
            copy_box(&self.chunk, element_bytes, (&inner, &inner_strides, 0), (target, &strides, start));
            advance(&mut numbers, &self.grid);
        }
        Ok(())
    }
}

/// The next numbers in row-major order; after the last, the first.
fn advance(numbers: &mut [u64], counts: &[u64]) {
    for (number, count) in numbers.iter_mut().zip(counts).rev() {
        *number += 1;
        if *number < *count {
            return;
        }
        *number = 0;
    }
}

/// Copies a box of this shape from one place to another. Each side has its bytes, its byte strides, and the byte where its first
/// element is.
fn copy_box(
    shape: &[u64],
    element_bytes: usize,
    (source, source_strides, source_start): (&[u8], &[u64], u64),
    (target, target_strides, target_start): (&mut [u8], &[u64], u64),
) {
    let Some((last, outer)) = shape.split_last() else {
        target[to_usize(target_start)..][..element_bytes]
            .copy_from_slice(&source[to_usize(source_start)..][..element_bytes]);
        return;
    };
    let (source_step, target_step) = (source_strides[outer.len()], target_strides[outer.len()]);
    let is_run = source_step == element_bytes as u64 && target_step == element_bytes as u64;
    let rows: u64 = outer.iter().product();
    let mut numbers = PerAxis::from_elem(0, outer.len());
    for _ in 0..rows {
        let at = |strides: &[u64], start: u64| {
            to_usize(start + numbers.iter().zip(strides).map(|(number, stride)| number * stride).sum::<u64>())
        };
        let (from, to) = (at(source_strides, source_start), at(target_strides, target_start));
        if is_run {
            let len = to_usize(*last) * element_bytes;
            target[to..to + len].copy_from_slice(&source[from..from + len]);
        } else {
            for number in 0..*last {
                let (from, to) = (from + to_usize(number * source_step), to + to_usize(number * target_step));
                target[to..to + element_bytes].copy_from_slice(&source[from..from + element_bytes]);
            }
        }
        advance(&mut numbers, outer);
    }
}
