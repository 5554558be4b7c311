//! Headers to be put before data.

use ckfs_tensor::DType;
use serde::{Serialize, Serializer, ser::SerializeMap};

use super::{
    super::json::repeated, JSON_BYTES_MAX, METADATA, PREFIX_BYTES, RANK_MAX, error::HeaderErrors, tensor_bytes,
};

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

/// The description of a tensor.
#[derive(Serialize)]
struct Row<'a> {
    dtype: &'static str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}

/// Members of an object in this order.
struct Ordered<'a>(&'a [(&'a str, &'a str)]);

impl Serialize for Ordered<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}

/// Refuses the name that no tensor can have.
///
/// # Errors
/// The name is reserved.
pub fn check_name(name: &str) -> Result<(), HeaderErrors> {
    if name == METADATA { Err(HeaderErrors::of(name, "the name is reserved")) } else { Ok(()) }
}

/// Length of a header with its padding to a multiple of `alignment`.
///
/// # Errors
/// The header is longer than the format allows.
pub fn padded_bytes(unpadded_bytes: u64, alignment: u64) -> Result<u64, HeaderErrors> {
    let padded = unpadded_bytes.next_multiple_of(alignment);
    let found = padded - PREFIX_BYTES;
    if found > JSON_BYTES_MAX { Err(HeaderErrors::too_long(found)) } else { Ok(padded) }
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
    let mut problems = HeaderErrors::default();
    let mut bytes = vec![0; 8];
    let (mut names, mut end) = (Vec::new(), 0_u64);
    let mut json = serde_json::Serializer::new(&mut bytes);
    let written = json.serialize_map(None).and_then(|mut members| {
        if !metadata.is_empty() {
            members.serialize_entry(METADATA, &Ordered(metadata))?;
        }
        for (name, dtype, shape) in tensors {
            if let Err(problem) = check_name(name) {
                problems.push(problem);
            }
            if shape.len() > RANK_MAX {
                problems.push(HeaderErrors::rank(name, shape.len()));
            }
            let start = end;
            match tensor_bytes(dtype, shape).and_then(|bytes| start.checked_add(bytes)) {
                Some(next) => end = next,
                None => problems.push(HeaderErrors::size(name, dtype, shape)),
            }
            names.push(name);
            members.serialize_entry(name, &Row { dtype: dtype.code(), shape, data_offsets: [start, end] })?;
        }
        members.end()
    });
    written.expect("texts and numbers can be written to memory");
    for name in repeated(names) {
        problems.push(HeaderErrors::duplicate(name));
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
    // A colon, and a comma after it.
    if metadata.is_empty() { 0 } else { json_bytes(METADATA) + json_bytes(&Ordered(metadata)) + 2 }
}

/// Bytes that a tensor takes in the JSON of a header besides the digits of its extents and offsets: its name, its type, and
/// the comma after it.
pub fn tensor_row_bytes(name: &str, dtype: DType, rank: usize) -> u64 {
    let commas = rank.saturating_sub(1);
    json_bytes(name) + (r#",:{"dtype":"","shape":[],"data_offsets":[,]}"#.len() + dtype.code().len() + commas) as u64
}

/// Decimal digits of a number.
pub fn digits(number: u64) -> u64 {
    u64::from(number.checked_ilog10().unwrap_or(0)) + 1
}

/// Bytes of a value as JSON, without spaces.
fn json_bytes(value: &(impl Serialize + ?Sized)) -> u64 {
    serde_json::to_vec(value).expect("texts and numbers can be written to memory").len() as u64
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
