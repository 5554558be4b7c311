//! Descriptions of arrays: `.zarray` of version 2, `zarr.json` of version 3.

use ckfs_tensor::{DType, PerAxis, RANK_MAX, Shape};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    super::super::json::{self, JsonForm},
    codec::{
        ArrayBytes, Codecs, Packing, ShardCodec, check_known, extents, named, refused, shortened, unsupported,
        unsupported_codec, wrong,
    },
    keys::Keys,
    value::{self, ElementBytes},
};
use crate::FormatError;
use crate::safetensors::tensor_bytes;

pub use super::super::write::ZARRAY;

/// Name of the description of version 3.
pub const ZARR_JSON: &str = "zarr.json";

/// Longest description, in bytes. Attributes may be long; what is read here is not.
pub const METADATA_BYTES_MAX: usize = 4 << 20;

/// Most bytes of a decoded chunk.
const CHUNK_BYTES_MAX: u64 = 1 << 40;

/// A zarr array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// Extents in elements.
    pub shape: Shape,
    /// Type of its elements.
    pub dtype: DType,
    /// Shape of a chunk, in elements. At the ends of the array, chunks reach beyond it.
    pub chunk: PerAxis,
    /// One element, little-endian: what chunks hold that are not there.
    pub fill: ElementBytes,
    /// How a chunk is stored.
    pub codecs: Codecs,
    pub(super) keys: Keys,
}

#[derive(Deserialize)]
struct Version2 {
    zarr_format: u64,
    shape: Vec<u64>,
    chunks: Vec<u64>,
    dtype: Value,
    compressor: Value,
    fill_value: Value,
    order: String,
    filters: Value,
    dimension_separator: Option<String>,
}

#[derive(Deserialize)]
struct Version3 {
    zarr_format: u64,
    node_type: String,
    shape: Vec<u64>,
    data_type: Value,
    chunk_grid: Value,
    chunk_key_encoding: Value,
    fill_value: Value,
    codecs: Vec<Value>,
    #[serde(default)]
    storage_transformers: Vec<Value>,
    #[serde(default, rename = "attributes")]
    _attributes: serde::de::IgnoredAny,
    #[serde(default, rename = "dimension_names")]
    _dimension_names: serde::de::IgnoredAny,
    #[serde(flatten)]
    others: Map<String, Value>,
}

fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, FormatError> {
    let (limit, found) = (METADATA_BYTES_MAX, bytes.len());
    if found > limit {
        return Err(refused(format_args!("a description of {found} bytes: expected at most {limit}")));
    }
    json::parse(bytes, JsonForm::Rows).map_err(refused)
}

impl Array {
    /// Reads a [`ZARRAY`].
    ///
    /// # Errors
    /// [`FormatError`], the first fault that is met.
    pub fn parse_v2(bytes: &[u8]) -> Result<Self, FormatError> {
        let Version2 { zarr_format, shape, chunks, dtype, compressor, fill_value, order, filters, dimension_separator } =
            parse(bytes)?;
        if zarr_format != 2 {
            return Err(wrong("zarr_format", 2, zarr_format));
        }
        if filters.as_array().map_or(!filters.is_null(), |all| !all.is_empty()) {
            return Err(unsupported("filters", shortened(&filters.to_string()), ""));
        }
        let (dtype, is_big_endian) = value::dtype_v2(&dtype)?;
        let (shape, chunk) = shapes(&shape, &chunks, dtype, "chunks")?;
        let mut codecs = Codecs::elements(is_big_endian);
        codecs.packings = compressor_v2(&compressor)?;
        codecs.order = match order.as_str() {
            "C" => None,
            "F" => Some((0..chunk.len() as u64).rev().collect()).filter(|_| chunk.len() > 1),
            found => return Err(wrong("order", "\"C\" or \"F\"", format!("{found:?}"))),
        };
        let keys = Keys::version_2(dimension_separator.as_deref().unwrap_or("."))?;
        Ok(Self { fill: value::fill(&fill_value, dtype)?, shape, dtype, chunk, codecs, keys })
    }

    /// Reads a [`ZARR_JSON`] of an array.
    ///
    /// # Errors
    /// [`FormatError`], the first fault that is met.
    pub fn parse_v3(bytes: &[u8]) -> Result<Self, FormatError> {
        let found: Version3 = parse(bytes)?;
        if found.zarr_format != 3 {
            return Err(wrong("zarr_format", 3, found.zarr_format));
        }
        if found.node_type != "array" {
            return Err(wrong("node_type", "\"array\"", format!("{:?}", found.node_type)));
        }
        let may_be_passed_over = |value: &Value| value.get("must_understand") == Some(&Value::Bool(false));
        if let Some((name, _)) = found.others.iter().find(|(_, value)| !may_be_passed_over(value)) {
            return Err(unsupported("member", format_args!("{:?}", shortened(name)), ""));
        }
        if let Some(transformer) = found.storage_transformers.first() {
            let found = shortened(&transformer.to_string());
            return Err(unsupported("storage transformer", found, ""));
        }
        let dtype = value::dtype_v3(&found.data_type)?;
        let (grid, configuration) = named(&found.chunk_grid, "chunk_grid")?;
        if grid != "regular" {
            let found = format_args!("{:?}", shortened(&grid));
            return Err(unsupported("chunk grid", found, ": expected \"regular\""));
        }
        check_known(&configuration, "chunk_grid", &["chunk_shape"])?;
        let chunk = extents(configuration.get("chunk_shape"), "chunk_shape")?;
        let (shape, chunk) = shapes(&found.shape, &chunk, dtype, "chunk_shape")?;
        let codecs = Codecs::parse(&found.codecs, dtype, &chunk, 0)?;
        let (encoding, configuration) = named(&found.chunk_key_encoding, "chunk_key_encoding")?;
        let keys = Keys::version_3(&encoding, &configuration)?;
        Ok(Self { fill: value::fill(&found.fill_value, dtype)?, shape, dtype, chunk, codecs, keys })
    }

    /// Bytes of a decoded chunk.
    ///
    /// # Panics
    /// Never for an array that was parsed: its chunks have at most 1 TiB.
    pub fn chunk_bytes(&self) -> u64 {
        tensor_bytes(self.dtype, &self.chunk).expect("checked when the description was read")
    }

    /// If this array is stored as shards: how. A shard may have its axes in another order, see [`Codecs::order`].
    pub fn sharding(&self) -> Option<&ShardCodec> {
        match &self.codecs.bytes {
            ArrayBytes::Shard(sharding) => Some(sharding),
            ArrayBytes::Elements { .. } => None,
        }
    }

    /// Number of chunks along each axis.
    pub fn grid(&self) -> PerAxis {
        self.shape.extents().iter().zip(&self.chunk).map(|(extent, chunk)| extent.div_ceil(*chunk)).collect()
    }

    /// Name of the chunk with these numbers, below the array's own name and a `/`.
    pub fn key(&self, numbers: &[u64]) -> String {
        self.keys.name(numbers)
    }

    /// The numbers of the chunk of this name; `None` for any other spelling and for a chunk outside the grid.
    pub fn numbers(&self, key: &str) -> Option<PerAxis> {
        let numbers = self.keys.numbers(key, self.shape.rank())?;
        numbers.iter().zip(&self.grid()).all(|(number, count)| number < count).then_some(numbers)
    }
}

impl ShardCodec {
    /// Bytes of a decoded inner chunk.
    ///
    /// # Panics
    /// Never for one that was parsed: the inner chunks divide the chunk, which has at most 1 TiB.
    pub fn chunk_bytes(&self, dtype: DType) -> u64 {
        tensor_bytes(dtype, &self.chunk).expect("checked when the description was read")
    }
}

/// The shapes of an array and of its chunks, checked against each other.
fn shapes(shape: &[u64], chunk: &[u64], dtype: DType, member: &'static str) -> Result<(Shape, PerAxis), FormatError> {
    if shape.len() > RANK_MAX {
        return Err(wrong("shape", format!("at most {RANK_MAX} axes"), shape.len()));
    }
    let shape = Shape::try_new(shape).map_err(|error| wrong("shape", "elements that 64 bits can count", error))?;
    if chunk.len() != shape.rank() || chunk.contains(&0) {
        let expected = format!("{} extents of at least 1", shape.rank());
        return Err(wrong(member, expected, format!("{chunk:?}")));
    }
    // Whether elements or chunks are counted, 64 bits must do.
    let bytes = tensor_bytes(dtype, chunk).filter(|bytes| *bytes <= CHUNK_BYTES_MAX);
    bytes.ok_or_else(|| wrong(member, format!("chunks of at most {CHUNK_BYTES_MAX} bytes"), format!("{chunk:?}")))?;
    Ok((shape, PerAxis::from_slice(chunk)))
}

fn compressor_v2(compressor: &Value) -> Result<Vec<Packing>, FormatError> {
    let Value::Object(settings) = compressor else {
        let wrong = wrong("compressor", "null or a compressor", compressor);
        return if compressor.is_null() { Ok(Vec::new()) } else { Err(wrong) };
    };
    let packing = match settings.get("id").and_then(Value::as_str) {
        Some("zstd") => Packing::Zstd,
        Some("gzip") => Packing::Gzip,
        Some(name) => return Err(unsupported_codec(name)),
        None => return Err(wrong("compressor", "an id", compressor)),
    };
    check_known(settings, "compressor", &["id", "level", "checksum"])?;
    Ok(vec![packing])
}
