//! The reference decoder: each element of a chunk by definition, one at a time.
//!
//! It follows an index through shards and orders of axes down to the bytes of the element. It shares the description of the codecs
//! with the fast decoder, and no code that decodes: libraries are used as streams here, CRC-32C is computed bit by bit. So both do
//! not contain the same error.

use std::io::Read;

use ckfs_tensor::{DType, PerAxis, to_usize};

use super::{
    codec::{ArrayBytes, ChunkError, Codecs, Packing, ShardCodec},
    metadata::Array,
};

/// A chunk or an inner chunk, unpacked.
enum Unpacked<'a> {
    /// Its elements in stored order.
    Elements(Vec<u8>, bool),
    /// Its inner chunks in stored order; those that are missing hold the fill value.
    Inner(Vec<Option<(Unpacked<'a>, &'a Codecs)>>, &'a ShardCodec),
}

impl Array {
    /// As [`Array::decode`], or as [`Array::decode_inner`] if `is_inner`, but slowly and by other means.
    ///
    /// # Errors
    /// [`ChunkError`].
    ///
    /// # Panics
    /// If `is_inner` and the array has no shards.
    pub fn decode_by_definition(&self, is_inner: bool, stored: &[u8]) -> Result<Vec<u8>, ChunkError> {
        let (codecs, shape) = if is_inner {
            let sharding = self.sharding().expect("the caller has asked for shards");
            (&sharding.codecs, &sharding.chunk)
        } else {
            (&self.codecs, &self.chunk)
        };
        let unpacked = unpack(codecs, shape, self.fill.len(), stored)?;
        // A complex element is two numbers.
        let number_bytes = if self.dtype == DType::C64 { 4 } else { self.fill.len() };
        let count: u64 = shape.iter().product();
        let mut bytes = Vec::new();
        for number in 0..count {
            let mut rest = number;
            let mut index = PerAxis::from_elem(0, shape.len());
            for axis in (0..shape.len()).rev() {
                index[axis] = rest % shape[axis];
                rest /= shape[axis];
            }
            bytes.extend(element(&unpacked, codecs, shape, &index, &self.fill, number_bytes));
        }
        Ok(bytes)
    }
}

/// The bytes of one element, little-endian.
fn element(
    unpacked: &Unpacked<'_>,
    codecs: &Codecs,
    shape: &[u64],
    index: &[u64],
    fill: &[u8],
    number_bytes: usize,
) -> Vec<u8> {
    // The index and the shape in the order in which the chunk is stored.
    let order: Vec<usize> = match &codecs.order {
        Some(order) => order.iter().map(|axis| to_usize(*axis)).collect(),
        None => (0..shape.len()).collect(),
    };
    let index: Vec<u64> = order.iter().map(|axis| index[*axis]).collect();
    let shape: Vec<u64> = order.iter().map(|axis| shape[*axis]).collect();
    let place =
        |index: &[u64], shape: &[u64]| index.iter().zip(shape).fold(0, |place, (at, extent)| place * extent + at);
    match unpacked {
        Unpacked::Elements(bytes, is_big_endian) => {
            let start = to_usize(place(&index, &shape)) * fill.len();
            let mut found = bytes[start..start + fill.len()].to_vec();
            if *is_big_endian {
                found.chunks_mut(number_bytes).for_each(<[u8]>::reverse);
            }
            found
        }
        Unpacked::Inner(inner, sharding) => {
            let chunk: Vec<u64> = index.iter().zip(&sharding.chunk).map(|(at, extent)| at / extent).collect();
            let inside: Vec<u64> = index.iter().zip(&sharding.chunk).map(|(at, extent)| at % extent).collect();
            match &inner[to_usize(place(&chunk, &sharding.grid))] {
                None => fill.to_vec(),
                Some((unpacked, codecs)) => element(unpacked, codecs, &sharding.chunk, &inside, fill, number_bytes),
            }
        }
    }
}

fn unpack<'a>(codecs: &'a Codecs, shape: &[u64], unit: usize, stored: &[u8]) -> Result<Unpacked<'a>, ChunkError> {
    let mut bytes = stored.to_vec();
    for packing in codecs.packings.iter().rev() {
        bytes = undo(*packing, &bytes)?;
    }
    match &codecs.bytes {
        ArrayBytes::Elements { is_big_endian } => {
            let expected = shape.iter().product::<u64>() * unit as u64;
            if bytes.len() as u64 != expected {
                return Err(ChunkError::length("elements", expected, bytes.len() as u64));
            }
            Ok(Unpacked::Elements(bytes, *is_big_endian))
        }
        ArrayBytes::Shard(sharding) => {
            let count = to_usize(sharding.grid.iter().product());
            let index_bytes = 16 * count + if sharding.index_has_checksum { 4 } else { 0 };
            let Some(data) = bytes.len().checked_sub(index_bytes) else {
                return Err(ChunkError::length("index of a shard", index_bytes as u64, bytes.len() as u64));
            };
            let index = if sharding.index_is_first { &bytes[..index_bytes] } else { &bytes[data..] };
            let index = if sharding.index_has_checksum { checked(index)? } else { index };
            let number = |at: usize| {
                let mut digits = index[8 * at..8 * at + 8].to_vec();
                if sharding.index_is_big_endian {
                    digits.reverse();
                }
                digits.iter().rev().fold(0_u64, |number, digit| number << 8 | u64::from(*digit))
            };
            let mut inner = Vec::with_capacity(count);
            for chunk in 0..count {
                let (offset, len) = (number(2 * chunk), number(2 * chunk + 1));
                if offset == u64::MAX && len == u64::MAX {
                    inner.push(None);
                    continue;
                }
                let part = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
                let part = part.and_then(|(offset, len)| bytes.get(offset..offset.checked_add(len)?));
                let part = part.ok_or_else(|| ChunkError::length("inner chunk", len, bytes.len() as u64))?;
                inner.push(Some((unpack(&sharding.codecs, &sharding.chunk, unit, part)?, &sharding.codecs)));
            }
            Ok(Unpacked::Inner(inner, sharding))
        }
    }
}

fn undo(packing: Packing, bytes: &[u8]) -> Result<Vec<u8>, ChunkError> {
    let mut found = Vec::new();
    let read = |codec: &'static str, decoder: &mut dyn Read, found: &mut Vec<u8>| {
        let read = decoder.read_to_end(found);
        read.map(drop).map_err(|error| ChunkError::codec(codec, error))
    };
    match packing {
        Packing::Crc32c => return Ok(checked(bytes)?.to_vec()),
        Packing::Gzip => read("gzip", &mut flate2::read::MultiGzDecoder::new(bytes), &mut found)?,
        Packing::Zstd => {
            let decoder = zstd::stream::read::Decoder::new(bytes);
            let mut decoder = decoder.map_err(|error| ChunkError::codec("zstd", error))?;
            read("zstd", &mut decoder, &mut found)?;
        }
    }
    Ok(found)
}

/// The bytes before a CRC-32C that is right, computed bit by bit.
fn checked(bytes: &[u8]) -> Result<&[u8], ChunkError> {
    let Some(end) = bytes.len().checked_sub(4) else { return Err(ChunkError::length("crc32c", 4, bytes.len() as u64)) };
    let mut sum = u32::MAX;
    for byte in &bytes[..end] {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ 0x82f6_3b78 } else { sum >> 1 };
        }
    }
    let expected = bytes[end..].iter().rev().fold(0_u32, |number, digit| number << 8 | u32::from(*digit));
    if expected == !sum { Ok(&bytes[..end]) } else { Err(ChunkError::checksum("chunk", expected, !sum)) }
}
