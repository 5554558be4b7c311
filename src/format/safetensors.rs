//! The safetensors header, read and written.
//!
//! A file is `length: u64 LE`, `length` bytes of JSON, then data:
//!
//! ```text
//! {"__metadata__": {"format": "pt"}, "name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
//! ```
//!
//! The law: offsets count from the end of the JSON; sorted by offset the tensors follow each other without hole or overlap
//! from 0 to the end of the file; each has exactly the bytes that shape and dtype need. White space may surround the JSON,
//! which writers use to align the data. Unknown members of a tensor are skipped; an unknown dtype is refused, as its tensors
//! could not be cut.
//!
//! [`Header`] holds a parsed header in a few flat arrays (about 40 bytes per tensor besides its name), in order of data.
//! [`write_header`] makes a header whose data starts at a multiple of a given alignment.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};
use smallvec::SmallVec;

use crate::tensor::DType;

/// Longest JSON that readers of the format accept, in bytes.
pub const JSON_BYTES_MAX: u64 = 100_000_000;

/// Length of the number before the JSON, in bytes.
pub const PREFIX_BYTES: u64 = 8;

/// Most axes of a tensor. The format has no limit; no published tensor comes near this one.
pub const RANK_MAX: usize = 8;

/// Alignment of the data in written files, in bytes: a page, so that data can be mapped, lent and read directly.
pub const DATA_ALIGNMENT: u64 = 4096;

/// Where the data of large files begins at the earliest, in bytes. Who maps a file to see its header causes the kernel to read what
/// `read_ahead_kb` says, by default 1 MiB of a mount, and as much again for who comes into the last quarter of that, to which
/// spaces after the JSON count as well. So with the data here the least is read that nobody wants.
pub const LARGE_DATA_START: u64 = 768 << 10;

/// From so many bytes of data on a file is large.
pub const LARGE_DATA_BYTES: u64 = 16 << 20;

const METADATA: &str = "__metadata__";

/// Problems of one header that are listed; a broken writer gets all its tensors wrong, and nobody reads 150 000 lines.
const PROBLEMS_MAX: usize = 20;

/// What is wrong with a header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not even room for the length.
    #[error("file of {found} bytes: expected at least {PREFIX_BYTES}")]
    TooShort {
        /// Length of the file.
        found: u64,
    },
    /// The header is longer than the format allows.
    #[error("header length: expected at most {JSON_BYTES_MAX} bytes, found {found}")]
    TooLong {
        /// Length as given.
        found: u64,
    },
    /// The header reaches beyond the end of the file.
    #[error("header of {expected} bytes in a file of {found} bytes: the file is truncated or not safetensors")]
    Truncated {
        /// Length of number and JSON together.
        expected: u64,
        /// Length of the file.
        found: u64,
    },
    /// Not the JSON that a header must be.
    #[error("header: {message}")]
    Json {
        /// What the parser says, with line and column.
        message: String,
    },
    /// A tensor is described twice.
    #[error("tensor {tensor:?}: described twice")]
    DuplicateTensor {
        /// Its name.
        tensor: String,
    },
    /// No such element type.
    #[error("tensor {tensor:?}: unknown dtype {found:?}")]
    UnknownDType {
        /// Its name.
        tensor: String,
        /// Code as given.
        found: String,
    },
    /// More axes than supported.
    #[error("tensor {tensor:?}: expected at most {RANK_MAX} axes, found {found}")]
    Rank {
        /// Its name.
        tensor: String,
        /// Number of axes.
        found: usize,
    },
    /// The number of bytes overflows, or elements below a byte do not fill whole bytes.
    #[error("tensor {tensor:?}: {dtype} of shape {shape:?} is not a number of whole bytes that fits 64 bits")]
    Size {
        /// Its name.
        tensor: String,
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// Offsets and shape disagree.
    #[error("tensor {tensor:?}: {dtype} of shape {shape:?}: expected {expected} bytes, found offsets {start}..{end}")]
    Bytes {
        /// Its name.
        tensor: String,
        /// Its element type.
        dtype: DType,
        /// Its shape.
        shape: Vec<u64>,
        /// Bytes that shape and dtype need.
        expected: u64,
        /// First offset.
        start: u64,
        /// Second offset.
        end: u64,
    },
    /// A hole or an overlap before a tensor.
    #[error("tensor {tensor:?}: expected its data to start at offset {expected}, found {found}")]
    NotContiguous {
        /// Its name.
        tensor: String,
        /// Where the previous tensor ends.
        expected: u64,
        /// Where this one starts.
        found: u64,
    },
    /// The tensors do not end where the file ends.
    #[error("data: expected {expected} bytes by the header, found {found} bytes in the file")]
    End {
        /// End of the last tensor.
        expected: u64,
        /// Bytes after the header.
        found: u64,
    },
    /// A name that the format reserves.
    #[error("tensor {tensor:?}: the name is reserved")]
    ReservedName {
        /// Its name.
        tensor: String,
    },
    /// A limit of 32 or 64 bits.
    #[error("header: {what} overflows")]
    Overflow {
        /// What is too large.
        what: &'static str,
    },
}

/// Everything found wrong with one header, at least one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderErrors {
    /// The problems, in order of the file; at most 20.
    pub problems: Vec<HeaderError>,
    /// Problems beyond those listed.
    pub more: usize,
}

impl fmt::Display for HeaderErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, problem) in self.problems.iter().enumerate() {
            if place > 0 {
                f.write_str("; ")?;
            }
            problem.fmt(f)?;
        }
        if self.more > 0 { write!(f, "; and {} more", self.more) } else { Ok(()) }
    }
}

impl std::error::Error for HeaderErrors {}

impl From<HeaderError> for HeaderErrors {
    fn from(problem: HeaderError) -> Self {
        Self { problems: vec![problem], more: 0 }
    }
}

#[derive(Default)]
struct Problems(Vec<HeaderError>, usize);

impl Problems {
    fn push(&mut self, problem: HeaderError) {
        if self.0.len() < PROBLEMS_MAX { self.0.push(problem) } else { self.1 += 1 }
    }

    fn finish<T>(self, value: T) -> Result<T, HeaderErrors> {
        if self.0.is_empty() { Ok(value) } else { Err(HeaderErrors { problems: self.0, more: self.1 }) }
    }
}

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
    rows: Vec<Row>,
    metadata: Vec<(String, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
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
    /// [`HeaderError::TooShort`] (decided by `file_bytes`), [`HeaderError::TooLong`] or [`HeaderError::Truncated`].
    pub fn json_bytes(prefix: [u8; 8], file_bytes: u64) -> Result<u64, HeaderError> {
        if file_bytes < PREFIX_BYTES {
            return Err(HeaderError::TooShort { found: file_bytes });
        }
        let len = u64::from_le_bytes(prefix);
        if len > JSON_BYTES_MAX {
            return Err(HeaderError::TooLong { found: len });
        }
        if len > file_bytes - PREFIX_BYTES {
            return Err(HeaderError::Truncated { expected: PREFIX_BYTES + len, found: file_bytes });
        }
        Ok(len)
    }

    /// Parses the JSON of a file that is `file_bytes` long.
    ///
    /// # Errors
    /// Everything wrong with it. Where the text is not JSON of the right form, that is the only error.
    pub fn parse(json: &[u8], file_bytes: u64) -> Result<Self, HeaderErrors> {
        let json_failed = |message: String| HeaderError::Json { message };
        let text = std::str::from_utf8(json).map_err(|error| json_failed(error.to_string()))?;
        let draft: Draft = serde_json::from_str(text).map_err(|error| json_failed(error.to_string()))?;
        let data_start = PREFIX_BYTES + json.len() as u64;
        let data_bytes = file_bytes
            .checked_sub(data_start)
            .ok_or(HeaderError::Truncated { expected: data_start, found: file_bytes })?;
        draft.check(data_start, data_bytes)
    }

    /// Parses a whole file in memory, or the start of one if `file_bytes` is larger than `bytes`.
    ///
    /// # Errors
    /// As [`Header::json_bytes`] and [`Header::parse`].
    pub fn parse_file(bytes: &[u8], file_bytes: u64) -> Result<Self, HeaderErrors> {
        let found = (bytes.len() as u64).min(file_bytes);
        let prefix = *bytes.first_chunk::<8>().ok_or(HeaderError::TooShort { found })?;
        let len = Self::json_bytes(prefix, file_bytes)?;
        let rest = usize::try_from(len).ok().and_then(|len| bytes[prefix.len()..].get(..len));
        Self::parse(rest.ok_or(HeaderError::Truncated { expected: PREFIX_BYTES + len, found })?, file_bytes)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no tensors, which the format allows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Bytes of all names together.
    pub fn names_bytes(&self) -> usize {
        self.names.len()
    }

    /// Number of axes of all tensors together.
    pub fn extents_len(&self) -> usize {
        self.extents.len()
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

    /// Takes the `__metadata__` member out.
    pub fn into_metadata(self) -> Vec<(String, String)> {
        self.metadata
    }
}

/// A header as written: right as JSON, not yet checked.
#[derive(Default)]
struct Draft {
    header: Header,
    /// Row numbers whose dtype is unknown, with the code.
    unknown: Vec<(usize, String)>,
    /// Rows of too many axes, with their number.
    ranks: Vec<(usize, usize)>,
}

impl Draft {
    fn name(&self, row: usize) -> String {
        let (start, end) = self.header.rows[row].name;
        self.header.names[start as usize..end as usize].to_owned()
    }

    /// Turns offsets into places in the file and sorts by them.
    fn check(mut self, data_start: u64, data_bytes: u64) -> Result<Header, HeaderErrors> {
        let mut problems = Problems::default();
        self.find_duplicates(&mut problems);
        for (row, found) in &self.unknown {
            problems.push(HeaderError::UnknownDType { tensor: self.name(*row), found: found.clone() });
        }
        for (row, found) in &self.ranks {
            problems.push(HeaderError::Rank { tensor: self.name(*row), found: *found });
        }
        let bad = |row: usize| {
            self.unknown.binary_search_by_key(&row, |bad| bad.0).is_ok()
                || self.ranks.binary_search_by_key(&row, |bad| bad.0).is_ok()
        };
        for row in (0..self.header.rows.len()).filter(|row| !bad(*row)) {
            self.check_bytes(row, &mut problems);
        }
        let header = &mut self.header;
        // Stable, and by both ends, so that tensors without elements stand before the tensor that starts at the same place.
        header.rows.sort_by_key(|row| (row.start, row.end));
        let mut end = 0;
        for row in &mut header.rows {
            if row.start != end {
                let tensor = header.names[row.name.0 as usize..row.name.1 as usize].to_owned();
                problems.push(HeaderError::NotContiguous { tensor, expected: end, found: row.start });
            }
            end = row.end;
            // Cannot overflow unless a problem was found: the last end is compared with the length of the file.
            row.start = row.start.wrapping_add(data_start);
            row.end = row.end.wrapping_add(data_start);
        }
        if end != data_bytes {
            problems.push(HeaderError::End { expected: end, found: data_bytes });
        }
        problems.finish(self.header)
    }

    fn check_bytes(&self, row: usize, problems: &mut Problems) {
        let Row { start, end, extents, rank, dtype, .. } = self.header.rows[row];
        let shape = &self.header.extents[extents as usize..][..usize::from(rank)];
        let Some(expected) = tensor_bytes(dtype, shape) else {
            problems.push(HeaderError::Size { tensor: self.name(row), dtype, shape: shape.to_vec() });
            return;
        };
        if end.checked_sub(start) != Some(expected) {
            let (tensor, shape) = (self.name(row), shape.to_vec());
            problems.push(HeaderError::Bytes { tensor, dtype, shape, expected, start, end });
        }
    }

    fn find_duplicates(&self, problems: &mut Problems) {
        let header = &self.header;
        let mut names: Vec<&str> =
            header.rows.iter().map(|row| &header.names[row.name.0 as usize..row.name.1 as usize]).collect();
        names.sort_unstable();
        for pair in names.windows(2) {
            if pair[0] == pair[1] {
                problems.push(HeaderError::DuplicateTensor { tensor: pair[0].to_owned() });
            }
        }
    }

    fn push(&mut self, name: &str, raw: &RawTensor<'_>) -> Result<(), HeaderError> {
        let header = &mut self.header;
        let narrow = |value: usize, what| u32::try_from(value).map_err(|_| HeaderError::Overflow { what });
        let name_start = narrow(header.names.len(), "length of all names")?;
        header.names.push_str(name);
        let name_end = narrow(header.names.len(), "length of all names")?;
        let extents = narrow(header.extents.len(), "number of all extents")?;
        let row = header.rows.len();
        let rank = u8::try_from(raw.shape.len()).ok().filter(|rank| usize::from(*rank) <= RANK_MAX);
        match rank {
            Some(_) => header.extents.extend_from_slice(&raw.shape),
            None => self.ranks.push((row, raw.shape.len())),
        }
        let dtype = DType::from_code(&raw.dtype);
        if dtype.is_none() {
            self.unknown.push((row, raw.dtype.as_ref().to_owned()));
        }
        let [start, end] = raw.data_offsets;
        header.rows.push(Row {
            start,
            end,
            name: (name_start, name_end),
            extents,
            // Rows that are wrong in one of these are listed above, and `check` refuses the header for them.
            rank: rank.unwrap_or(0),
            dtype: dtype.unwrap_or(DType::U8),
        });
        Ok(())
    }
}

/// Bytes of a tensor, or `None` if elements below a byte do not fill whole bytes or the number overflows.
pub fn tensor_bytes(dtype: DType, shape: &[u64]) -> Option<u64> {
    let elements = shape.iter().try_fold(1_u64, |product, extent| product.checked_mul(*extent))?;
    dtype.bytes_of(elements)
}

#[derive(Deserialize)]
struct RawTensor<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: SmallVec<[u64; RANK_MAX]>,
    data_offsets: [u64; 2],
}

/// A string that is borrowed from the text where it has no escapes.
#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// An ordered map of strings that refuses a repeated key.
struct Strings(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Strings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of strings to strings")
            }

            fn visit_unit<E>(self) -> Result<Strings, E> {
                Ok(Strings(Vec::new()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strings, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry::<String, String>()? {
                    pairs.push(pair);
                }
                let mut keys: Vec<&str> = pairs.iter().map(|pair| pair.0.as_str()).collect();
                keys.sort_unstable();
                match keys.windows(2).find(|pair| pair[0] == pair[1]) {
                    Some(pair) => Err(A::Error::custom(format_args!("{METADATA}: {:?} given twice", pair[0]))),
                    None => Ok(Strings(pairs)),
                }
            }
        }
        deserializer.deserialize_any(Visit)
    }
}

impl<'de> Deserialize<'de> for Draft {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Draft;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensor names to descriptions")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Draft, A::Error> {
                let mut draft = Draft::default();
                let mut has_metadata = false;
                while let Some(Key(name)) = map.next_key::<Key<'de>>()? {
                    if name == METADATA {
                        if std::mem::replace(&mut has_metadata, true) {
                            return Err(A::Error::duplicate_field(METADATA));
                        }
                        draft.header.metadata = map.next_value::<Strings>()?.0;
                        continue;
                    }
                    let raw = map.next_value::<RawTensor<'de>>();
                    let raw = raw.map_err(|error| A::Error::custom(format_args!("tensor {name:?}: {error}")))?;
                    draft.push(&name, &raw).map_err(A::Error::custom)?;
                }
                Ok(draft)
            }
        }
        deserializer.deserialize_map(Visit)
    }
}

/// A header to be put before data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenHeader {
    /// Length, JSON and padding: everything before the data but `spaces`.
    pub bytes: Vec<u8>,
    /// Further spaces that belong to the header: none, unless it was made longer.
    pub spaces: u64,
    /// Length and JSON without padding.
    pub unpadded_bytes: u64,
    /// Bytes of all tensors together.
    pub data_bytes: u64,
}

/// Length of a header with its padding to a multiple of `alignment`.
///
/// # Errors
/// [`HeaderError::TooLong`].
pub fn padded_bytes(unpadded_bytes: u64, alignment: u64) -> Result<u64, HeaderError> {
    let padded = unpadded_bytes.next_multiple_of(alignment);
    let found = padded - PREFIX_BYTES;
    if found > JSON_BYTES_MAX { Err(HeaderError::TooLong { found }) } else { Ok(padded) }
}

impl WrittenHeader {
    /// Makes the data begin at byte `start`, if the header is shorter than that and the format allows it.
    pub fn reach(&mut self, start: u64) {
        let json_bytes = start.saturating_sub(PREFIX_BYTES);
        if (self.bytes.len() as u64) < start && json_bytes <= JSON_BYTES_MAX {
            self.spaces = start - self.bytes.len() as u64;
            self.bytes[..8].copy_from_slice(&json_bytes.to_le_bytes());
        }
    }
}

/// Makes the header of a file that holds these tensors one after the other, in the order given.
///
/// The data starts at a multiple of `alignment` bytes, by spaces after the JSON. Names may be anything but repeated; an
/// empty `metadata` leaves the member out.
///
/// # Errors
/// A repeated or reserved name, a tensor that is not whole bytes, or a header beyond the format's limit.
///
/// # Panics
/// If `alignment` is 0.
pub fn write_header<'a>(
    tensors: impl IntoIterator<Item = (&'a str, DType, &'a [u64])>,
    metadata: &[(&str, &str)],
    alignment: u64,
) -> Result<WrittenHeader, HeaderErrors> {
    assert!(alignment > 0, "alignment is a number of bytes");
    let mut problems = Problems::default();
    let mut bytes = vec![0; 8];
    bytes.push(b'{');
    if !metadata.is_empty() {
        push_string(&mut bytes, METADATA);
        bytes.extend_from_slice(b":{");
        for (key, value) in metadata {
            push_string(&mut bytes, key);
            bytes.push(b':');
            push_string(&mut bytes, value);
            bytes.push(b',');
        }
        bytes.pop();
        bytes.extend_from_slice(b"},");
    }
    let mut names = Vec::new();
    let mut end = 0_u64;
    for (name, dtype, shape) in tensors {
        if is_reserved(name) {
            problems.push(HeaderError::ReservedName { tensor: name.to_owned() });
        }
        if shape.len() > RANK_MAX {
            problems.push(HeaderError::Rank { tensor: name.to_owned(), found: shape.len() });
        }
        let start = end;
        match tensor_bytes(dtype, shape).and_then(|bytes| start.checked_add(bytes)) {
            Some(next) => end = next,
            None => problems.push(HeaderError::Size { tensor: name.to_owned(), dtype, shape: shape.to_vec() }),
        }
        names.push(name);
        push_string(&mut bytes, name);
        bytes.extend_from_slice(b":{\"dtype\":\"");
        bytes.extend_from_slice(dtype.code().as_bytes());
        bytes.extend_from_slice(b"\",\"shape\":[");
        push_numbers(&mut bytes, shape);
        bytes.extend_from_slice(b"],\"data_offsets\":[");
        push_numbers(&mut bytes, &[start, end]);
        bytes.extend_from_slice(b"]},");
    }
    if bytes.last() == Some(&b',') {
        bytes.pop();
    }
    bytes.push(b'}');
    names.sort_unstable();
    for pair in names.windows(2).filter(|pair| pair[0] == pair[1]) {
        problems.push(HeaderError::DuplicateTensor { tensor: pair[0].to_owned() });
    }
    let unpadded_bytes = bytes.len() as u64;
    match padded_bytes(unpadded_bytes, alignment) {
        Ok(padded) => {
            bytes.resize(usize::try_from(padded).expect("the format's limit fits memory"), b' ');
            bytes[..8].copy_from_slice(&(padded - PREFIX_BYTES).to_le_bytes());
        }
        Err(problem) => problems.push(problem),
    }
    problems.finish(WrittenHeader { bytes, spaces: 0, unpadded_bytes, data_bytes: end })
}

/// Length and JSON of a header without padding, from the bytes of its metadata and of its tensors' rows, each with the comma
/// after it.
pub fn unpadded_bytes(metadata_bytes: u64, rows_bytes: u64) -> u64 {
    // Braces around, and no comma after the last.
    PREFIX_BYTES + 2 + (metadata_bytes + rows_bytes).saturating_sub(1)
}

/// Bytes that metadata takes in the JSON of a header.
pub fn metadata_bytes(metadata: &[(&str, &str)]) -> u64 {
    let members: u64 = metadata.iter().map(|(key, value)| string_bytes(key) + string_bytes(value) + 2).sum();
    // A colon and braces, a comma after them, and none after the last member.
    if metadata.is_empty() { 0 } else { string_bytes(METADATA) + 4 + members - 1 }
}

/// Whether a tensor cannot have this name.
pub fn is_reserved(name: &str) -> bool {
    name == METADATA
}

/// Bytes that a tensor takes in the JSON of a header besides the digits of its extents and offsets: its name, its type, and
/// the comma after it.
pub fn tensor_row_bytes(name: &str, dtype: DType, rank: usize) -> u64 {
    let commas = rank.saturating_sub(1);
    string_bytes(name) + (r#",:{"dtype":"","shape":[],"data_offsets":[,]}"#.len() + dtype.code().len() + commas) as u64
}

/// Decimal digits of a number.
pub fn digits(number: u64) -> u64 {
    u64::from(number.checked_ilog10().unwrap_or(0)) + 1
}

fn string_bytes(text: &str) -> u64 {
    let mut bytes = Vec::new();
    push_string(&mut bytes, text);
    bytes.len() as u64
}

fn push_string(bytes: &mut Vec<u8>, text: &str) {
    let plain = |byte: u8| byte >= 0x20 && byte != b'"' && byte != b'\\';
    if text.bytes().all(plain) {
        bytes.push(b'"');
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(b'"');
    } else {
        serde_json::to_writer(bytes, text).expect("a string can be written to memory");
    }
}

/// Decimal numbers with commas between them.
fn push_numbers(bytes: &mut Vec<u8>, numbers: &[u64]) {
    for (place, number) in numbers.iter().enumerate() {
        if place > 0 {
            bytes.push(b',');
        }
        let mut digits = [0; 20];
        let mut rest = *number;
        let mut first = digits.len();
        loop {
            first -= 1;
            digits[first] = b'0' + (rest % 10).to_le_bytes()[0];
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        bytes.extend_from_slice(&digits[first..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_as_long_as_counted() {
        let tensors: [(&str, DType, &[u64]); 4] = [
            ("a", DType::F32, &[]),
            ("it's \"b\"\n", DType::BF16, &[3, 1000]),
            ("\u{e9}", DType::F8E4M3, &[0, 9]),
            ("d", DType::I64, &[99_999]),
        ];
        for metadata in [&[][..], &[("format", "pt")], &[("format", "pt"), ("k\"", "{\"a\": 1}")]] {
            for count in 0..=tensors.len() {
                let (mut rows, mut end) = (0, 0);
                for (name, dtype, shape) in &tensors[..count] {
                    let start = end;
                    end += tensor_bytes(*dtype, shape).unwrap();
                    let numbers = shape.iter().chain([&start, &end]).map(|number| digits(*number)).sum::<u64>();
                    rows += tensor_row_bytes(name, *dtype, shape.len()) + numbers;
                }
                let header = write_header(tensors[..count].iter().copied(), metadata, 8).unwrap();
                let counted = unpadded_bytes(metadata_bytes(metadata), rows);
                assert_eq!((counted, end), (header.unpadded_bytes, header.data_bytes), "{metadata:?}, {count}");
            }
        }
    }
}
