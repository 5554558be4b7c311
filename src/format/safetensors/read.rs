//! Headers as a flat table.

use ckfs_host::parse_room::{JsonForm, ParseRoom};
use ckfs_tensor::DType;
use safetensors::tensor::{Metadata, TensorInfo};

use super::{
    super::json::repeated,
    JSON_BYTES_MAX, PREFIX_BYTES, RANK_MAX, diagnosis,
    error::HeaderErrors,
    members::{Known, Members, dtype_of},
};

/// One tensor of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Type of its elements.
    pub dtype: DType,
    /// Extents in elements, row-major; empty for a scalar.
    pub shape: &'a [u64],
    /// First byte of its data, from the start of the file.
    pub start: u64,
    /// One past the last byte of its data.
    pub end: u64,
}

/// A parsed header that obeys the format's law.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    names: String,
    extents: Vec<u64>,
    /// In order of data.
    rows: Vec<HeaderRow>,
    metadata: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HeaderRow {
    start: u64,
    end: u64,
    name: (u32, u32),
    extents: u32,
    rank: u8,
    dtype: DType,
}

impl Header {
    /// Length of a file's JSON in bytes, from its first 8 bytes and its length. The JSON lies inside the file.
    ///
    /// # Errors
    /// The file is too short by `file_bytes`, or the JSON is too long or reaches beyond the end of the file.
    pub fn json_bytes(prefix: [u8; 8], file_bytes: u64) -> Result<u64, HeaderErrors> {
        if file_bytes < PREFIX_BYTES {
            return Err(HeaderErrors::too_short(file_bytes));
        }
        let len = u64::from_le_bytes(prefix);
        if len > JSON_BYTES_MAX {
            return Err(HeaderErrors::too_long(len));
        }
        if len > file_bytes - PREFIX_BYTES {
            return Err(HeaderErrors::truncated(PREFIX_BYTES + len, file_bytes));
        }
        Ok(len)
    }

    /// Parses the JSON of a file that is `file_bytes` long.
    ///
    /// # Errors
    /// Everything wrong with it. Where the text is not JSON of the right form, that is the only error.
    pub fn parse(json: &[u8], file_bytes: u64) -> Result<Self, HeaderErrors> {
        let text = std::str::from_utf8(json).map_err(HeaderErrors::json)?;
        let data_start = PREFIX_BYTES + json.len() as u64;
        let data_bytes =
            file_bytes.checked_sub(data_start).ok_or_else(|| HeaderErrors::truncated(data_start, file_bytes))?;
        // Held while all rows are made of them.
        let _held = ParseRoom::of_process().hold_json(json, JsonForm::Rows).map_err(HeaderErrors::json)?;
        let known = serde_json::from_str::<Members<Known>>(text).ok();
        if let Some(Ok(header)) = known.map(|members| Self::of(members, data_start, data_bytes)) {
            return Ok(header);
        }
        let members = diagnosis::examine(text, data_bytes)?;
        Self::of(members, data_start, data_bytes)
    }

    /// The table of members that the crate accepts and that are not stricter refused; else one problem of several.
    fn of<T: Into<TensorInfo>>(members: Members<T>, data_start: u64, data_bytes: u64) -> Result<Self, HeaderErrors> {
        let Members { metadata, tensors } = members;
        let mut tensors: Vec<(String, TensorInfo)> =
            tensors.into_iter().map(|(name, tensor)| (name, tensor.into())).collect();
        // Stable, and by both ends, so that tensors without elements stand before the tensor that starts at the same place.
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        if let Some(name) = repeated(tensors.iter().map(|(name, _)| name)).first() {
            return Err(HeaderErrors::duplicate(name));
        }
        let mut header = Self { metadata, ..Self::default() };
        header.rows.reserve_exact(tensors.len());
        for (name, info) in &tensors {
            header.push(name, info, data_start)?;
        }
        let checked = Metadata::new(None, tensors).map_err(HeaderErrors::json)?;
        let expected = checked.data_len() as u64;
        if expected == data_bytes { Ok(header) } else { Err(HeaderErrors::end(expected, data_bytes)) }
    }

    fn push(&mut self, name: &str, info: &TensorInfo, data_start: u64) -> Result<(), HeaderErrors> {
        let narrow = |value: usize, what| u32::try_from(value).map_err(|_| HeaderErrors::overflow(what));
        let name_start = narrow(self.names.len(), "length of all names")?;
        self.names.push_str(name);
        let name_end = narrow(self.names.len(), "length of all names")?;
        let extents = narrow(self.extents.len(), "number of all extents")?;
        let rank = info.shape.len();
        let rank = u8::try_from(rank).ok().filter(|rank| usize::from(*rank) <= RANK_MAX);
        let rank = rank.ok_or_else(|| HeaderErrors::rank(name, info.shape.len()))?;
        self.extents.extend(info.shape.iter().map(|extent| *extent as u64));
        let dtype = dtype_of(info.dtype).ok_or_else(|| HeaderErrors::dtype(name, &info.dtype.to_string()))?;
        let place = |offset: usize| data_start.checked_add(offset as u64);
        let (Some(start), Some(end)) = (place(info.data_offsets.0), place(info.data_offsets.1)) else {
            return Err(HeaderErrors::overflow("an offset"));
        };
        self.rows.push(HeaderRow { start, end, name: (name_start, name_end), extents, rank, dtype });
        Ok(())
    }

    /// Parses a whole file in memory, or the start of one if `file_bytes` is larger than `bytes`.
    ///
    /// # Errors
    /// As [`Header::json_bytes`] and [`Header::parse`].
    pub fn parse_file(bytes: &[u8], file_bytes: u64) -> Result<Self, HeaderErrors> {
        let found = (bytes.len() as u64).min(file_bytes);
        let prefix = *bytes.first_chunk::<8>().ok_or_else(|| HeaderErrors::too_short(found))?;
        let len = Self::json_bytes(prefix, file_bytes)?;
        let rest = usize::try_from(len).ok().and_then(|len| bytes[prefix.len()..].get(..len));
        Self::parse(rest.ok_or_else(|| HeaderErrors::truncated(PREFIX_BYTES + len, found))?, file_bytes)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no tensors, which the format allows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All tensors, in order of their data.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = HeaderTensor<'_>> {
        self.rows.iter().map(|row| HeaderTensor {
            name: &self.names[row.name.0 as usize..row.name.1 as usize],
            dtype: row.dtype,
            shape: &self.extents[row.extents as usize..][..usize::from(row.rank)],
            start: row.start,
            end: row.end,
        })
    }

    /// The `__metadata__` member, in order; empty if there is none.
    pub fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }
}
