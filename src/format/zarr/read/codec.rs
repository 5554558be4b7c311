//! Chains of codecs: how a chunk becomes bytes.

use std::fmt::Display;

use crate::FormatError;

use ckfs_tensor::{DType, PerAxis, RANK_MAX, to_usize};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Most shards within each other.
const NESTING_MAX: usize = 4;

/// Most codecs of one chain.
const CODECS_MAX: usize = 16;

/// What is wrong with a chunk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("zarr {0}")]
pub struct ChunkError(pub(super) String);

/// What is wrong with the description of an array.
pub(super) fn refused(problem: impl Display) -> FormatError {
    FormatError(format!("zarr: {problem}"))
}

/// Valid, but not read here. The advice is empty or begins with a colon.
pub(super) fn unsupported(what: &str, found: impl Display, advice: &str) -> FormatError {
    refused(format_args!("{what} {found} is not supported{advice}"))
}

impl ChunkError {
    /// That the decoded chunk has another length than its shape needs, before or after a codec.
    pub(super) fn length(stage: &str, expected: u64, found: u64) -> Self {
        Self(format!("chunk: {stage}: expected {expected} bytes, found {found}"))
    }

    /// That the system has not as much memory as the decoded chunk takes.
    pub fn memory(bytes: u64) -> Self {
        Self(format!("chunk: its shape needs {bytes} bytes of memory, which the system does not have"))
    }

    pub(super) fn checksum(what: &str, expected: u32, found: u32) -> Self {
        Self(format!("chunk: {what}: expected CRC-32C {expected:08x}, found {found:08x}: the chunk is damaged"))
    }

    /// That a codec cannot decode it.
    pub(super) fn codec(codec: &str, message: impl Display) -> Self {
        Self(format!("chunk: {codec}: {message}"))
    }
}

/// What is done to the bytes of a chunk after its elements are in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Frames of zstd.
    Zstd,
    /// Members of gzip.
    Gzip,
    /// A CRC-32C after the bytes.
    Crc32c,
}

/// How the elements of a chunk become bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArrayBytes {
    /// One after the other.
    Elements {
        /// Whether the highest byte of an element is the first.
        is_big_endian: bool,
    },
    /// As smaller chunks.
    Shard(Box<ShardCodec>),
}

/// A shard: smaller chunks in one file, and an index that says where they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardCodec {
    /// Shape of an inner chunk, in the order of axes in which the shard is stored. Divides the shard's.
    pub chunk: PerAxis,
    /// Number of inner chunks along each axis.
    pub grid: PerAxis,
    /// How an inner chunk is stored.
    pub codecs: Codecs,
    /// Whether the numbers of the index have their highest byte first.
    pub(super) index_is_big_endian: bool,
    /// Whether the index has a CRC-32C.
    pub(super) index_has_checksum: bool,
    /// Whether the index is at the start of the shard, else at its end.
    pub(super) index_is_first: bool,
}

/// How a chunk is stored: first its axes are put in another order, then its elements become bytes, then those are packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Codecs {
    /// For each axis as stored, the number of the axis in the array; `None` for the same order.
    pub order: Option<PerAxis>,
    /// How elements become bytes.
    pub bytes: ArrayBytes,
    /// What is done to the bytes, first to last.
    pub packings: Vec<Packing>,
}

impl Codecs {
    /// How many times the elements of a chunk are in memory at once while it is decoded: for stages that need memory of their own.
    pub fn copies(&self) -> u64 {
        let turned = u64::from(self.order.is_some());
        // The bytes between two packings may be as many as two chunks.
        let between = if self.packings.len() > 1 { 2 } else { 0 };
        let inner = match &self.bytes {
            ArrayBytes::Shard(_) => 1,
            ArrayBytes::Elements { .. } => 0,
        };
        1 + turned + between + inner
    }
}

/// The name and settings of an extension point.
pub(super) fn named(value: &Value, member: &'static str) -> Result<(String, Map<String, Value>), FormatError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Whole {
        name: String,
        #[serde(default)]
        configuration: Map<String, Value>,
    }
    if let Value::String(name) = value {
        return Ok((name.clone(), Map::new()));
    }
    let found = Whole::deserialize(value).map(|Whole { name, configuration }| (name, configuration));
    found.map_err(|_| wrong(member, "a name and its configuration", value))
}

pub(super) fn wrong(member: &'static str, expected: impl Display, found: impl Display) -> FormatError {
    refused(format_args!("{member}: expected {expected}, found {}", shortened(&found.to_string())))
}

/// A value as a message shows it: its first hundred characters.
pub(super) fn shortened(text: &str) -> String {
    let end = text.char_indices().nth(100).map_or(text.len(), |(at, _)| at);
    if end < text.len() { format!("{}…", text[..end].escape_debug()) } else { text.to_owned() }
}

/// Settings that are not among `known` are refused: they may change what the bytes mean.
pub(super) fn check_known(
    configuration: &Map<String, Value>,
    member: &'static str,
    known: &[&str],
) -> Result<(), FormatError> {
    match configuration.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(found) => Err(wrong(member, format!("settings among {known:?}"), format!("{found:?}"))),
    }
}

pub(super) fn extents(value: Option<&Value>, member: &'static str) -> Result<PerAxis, FormatError> {
    let numbers = value.and_then(Value::as_array).and_then(|all| all.iter().map(Value::as_u64).collect());
    let numbers: PerAxis =
        numbers.ok_or_else(|| wrong(member, "a list of whole numbers", value.unwrap_or(&Value::Null)))?;
    if numbers.len() > RANK_MAX {
        return Err(wrong(member, format!("at most {RANK_MAX} axes"), numbers.len()));
    }
    Ok(numbers)
}

impl Codecs {
    /// Elements in order, little-endian, not packed.
    pub(super) fn elements(is_big_endian: bool) -> Self {
        Self { order: None, bytes: ArrayBytes::Elements { is_big_endian }, packings: Vec::new() }
    }

    /// Reads the codecs of chunks of this shape.
    pub(super) fn parse(list: &[Value], dtype: DType, chunk: &[u64], depth: usize) -> Result<Self, FormatError> {
        const MEMBER: &str = "codecs";
        if list.len() > CODECS_MAX {
            return Err(wrong(MEMBER, format!("at most {CODECS_MAX} codecs"), list.len()));
        }
        let mut order: Option<PerAxis> = None;
        let mut bytes = None;
        let mut packings = Vec::new();
        for codec in list {
            let (name, configuration) = named(codec, MEMBER)?;
            let packing = match name.as_str() {
                "transpose" if bytes.is_none() => {
                    let next = parse_order(&configuration, chunk.len())?;
                    let composed = match &order {
                        Some(before) => next.iter().map(|axis| before[to_usize(*axis)]).collect(),
                        None => next,
                    };
                    order = Some(composed);
                    continue;
                }
                "bytes" if bytes.is_none() => {
                    bytes = Some(ArrayBytes::Elements { is_big_endian: parse_endian(&configuration, dtype)? });
                    continue;
                }
                "sharding_indexed" if bytes.is_none() => {
                    let stored = stored_shape(order.as_deref(), chunk);
                    let sharding = ShardCodec::parse(&configuration, dtype, &stored, depth)?;
                    bytes = Some(ArrayBytes::Shard(Box::new(sharding)));
                    continue;
                }
                "zstd" => (Packing::Zstd, &["level", "checksum"][..]),
                "gzip" => (Packing::Gzip, &["level"][..]),
                "crc32c" => (Packing::Crc32c, &[][..]),
                "transpose" | "bytes" | "sharding_indexed" => {
                    return Err(wrong(MEMBER, "one codec from elements to bytes, after those of elements", name));
                }
                _ => return Err(unsupported_codec(&name)),
            };
            let (packing, known) = packing;
            check_known(&configuration, MEMBER, known)?;
            match bytes {
                None => return Err(wrong(MEMBER, "\"bytes\" before a codec of bytes", name)),
                // An index at the end of a shard could not be found, and no range of it read.
                Some(ArrayBytes::Shard(_)) => {
                    return Err(unsupported("a codec after sharding_indexed,", name, ""));
                }
                Some(ArrayBytes::Elements { .. }) => packings.push(packing),
            }
        }
        let bytes = bytes.ok_or_else(|| wrong(MEMBER, "a codec from elements to bytes", "none"))?;
        let is_identity = |order: &PerAxis| order.iter().enumerate().all(|(axis, of)| *of == axis as u64);
        Ok(Self { order: order.filter(|order| !is_identity(order)), bytes, packings })
    }

    /// If the chunk's bytes are its elements, little-endian and not packed: for each axis of the array, the number of elements
    /// from one index to the next. `None` if the chunk must be decoded or is a shard.
    pub fn plain(&self, dtype: DType, chunk: &[u64]) -> Option<PerAxis> {
        let ArrayBytes::Elements { is_big_endian } = self.bytes else { return None };
        if !self.packings.is_empty() || (is_big_endian && dtype.element_bytes() != Some(1)) {
            return None;
        }
        Some(strides(self.order.as_deref(), chunk, 1))
    }
}

pub(super) fn unsupported_codec(name: &str) -> FormatError {
    let advice = match name {
        "blosc" => ": Orbax never writes it; write the checkpoint with zstd, or without compression",
        _ => ": expected one of transpose, bytes, sharding_indexed, zstd, gzip, crc32c",
    };
    unsupported("codec", format_args!("{:?}", shortened(name)), advice)
}

/// The shape in which a chunk of this shape is stored, whose axes are in this order.
pub(super) fn stored_shape(order: Option<&[u64]>, chunk: &[u64]) -> PerAxis {
    match order {
        Some(order) => order.iter().map(|axis| chunk[to_usize(*axis)]).collect(),
        None => PerAxis::from_slice(chunk),
    }
}

/// For each axis of a chunk that is stored in this order of axes, how far it is from one index to the next, where it is `unit` from
/// one element to the next. A chunk has at most 1 TiB.
pub(super) fn strides(order: Option<&[u64]>, chunk: &[u64], unit: u64) -> PerAxis {
    let (mut strides, mut stride) = (PerAxis::from_elem(unit, chunk.len()), unit);
    for place in (0..chunk.len()).rev() {
        let axis = order.map_or(place, |order| to_usize(order[place]));
        strides[axis] = stride;
        stride *= chunk[axis];
    }
    strides
}

fn parse_order(configuration: &Map<String, Value>, rank: usize) -> Result<PerAxis, FormatError> {
    const MEMBER: &str = "transpose";
    check_known(configuration, MEMBER, &["order"])?;
    let rank = rank as u64;
    let order = configuration.get("order");
    match order.and_then(Value::as_str) {
        Some("C") => return Ok((0..rank).collect()),
        Some("F") => return Ok((0..rank).rev().collect()),
        Some(_) | None => {}
    }
    let order = extents(order, MEMBER)?;
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if sorted.iter().copied().eq(0..rank) {
        Ok(order)
    } else {
        Err(wrong(MEMBER, format!("each of the {rank} axes once"), format!("{order:?}")))
    }
}

/// Whether elements have their highest byte first.
fn parse_endian(configuration: &Map<String, Value>, dtype: DType) -> Result<bool, FormatError> {
    check_known(configuration, "bytes", &["endian"])?;
    match configuration.get("endian") {
        Some(Value::String(endian)) if endian == "little" => Ok(false),
        Some(Value::String(endian)) if endian == "big" => Ok(true),
        // Elements of one byte have no order of bytes.
        None if dtype.bits() == 8 => Ok(false),
        found => {
            let found = found.map_or("none".to_owned(), Value::to_string);
            Err(wrong("bytes: endian", "\"little\" or \"big\"", found))
        }
    }
}

impl ShardCodec {
    fn parse(
        configuration: &Map<String, Value>,
        dtype: DType,
        shard: &[u64],
        depth: usize,
    ) -> Result<Self, FormatError> {
        const MEMBER: &str = "sharding_indexed";
        if depth == NESTING_MAX {
            return Err(wrong(MEMBER, format!("at most {NESTING_MAX} shards within each other"), "more"));
        }
        check_known(configuration, MEMBER, &["chunk_shape", "codecs", "index_codecs", "index_location"])?;
        let chunk = extents(configuration.get("chunk_shape"), "sharding_indexed: chunk_shape")?;
        let divides = |(extent, inner): (&u64, &u64)| *inner > 0 && extent.is_multiple_of(*inner);
        if chunk.len() != shard.len() || !shard.iter().zip(&chunk).all(divides) {
            let expected = format!("extents that divide those of the shard, {shard:?}");
            return Err(wrong("sharding_indexed: chunk_shape", expected, format!("{chunk:?}")));
        }
        let grid: PerAxis = shard.iter().zip(&chunk).map(|(extent, inner)| extent / inner).collect();
        let list = |member: &str| configuration.get(member).and_then(Value::as_array);
        let none = || wrong(MEMBER, "codecs and index_codecs", "none");
        let codecs = Codecs::parse(list("codecs").ok_or_else(none)?, dtype, &chunk, depth + 1)?;
        let index = Codecs::parse(list("index_codecs").ok_or_else(none)?, DType::U64, &[], depth + 1)?;
        let (ArrayBytes::Elements { is_big_endian }, [] | [Packing::Crc32c]) = (&index.bytes, &*index.packings) else {
            // The index must have a length that is known before it is read.
            let found = shortened(&configuration["index_codecs"].to_string());
            let advice = ": expected bytes, or bytes and crc32c";
            return Err(unsupported("index of shards with codecs", found, advice));
        };
        let index_is_first = match configuration.get("index_location") {
            None => false,
            Some(Value::String(place)) if place == "end" => false,
            Some(Value::String(place)) if place == "start" => true,
            Some(found) => return Err(wrong("index_location", "\"start\" or \"end\"", found)),
        };
        Ok(Self {
            chunk,
            grid,
            index_is_big_endian: *is_big_endian,
            index_has_checksum: !index.packings.is_empty(),
            index_is_first,
            codecs,
        })
    }
}
