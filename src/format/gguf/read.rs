//! The header of a GGUF file, of version 2 or 3 and little-endian:
//!
//! ```text
//! "GGUF"  u32 version  u64 tensors  u64 pairs
//! pairs    string key, u32 type, value
//! tensors  string name, u32 axes, u64 extents (the last axis first), u32 type, u64 offset
//! padding to the alignment, then the bytes of tensors at these offsets
//! ```

use std::collections::BTreeMap;

use ckfs_tensor::DType;
use serde_json::{Number, Value};

use super::BlockType;

/// Axes of a tensor of ggml.
const AXES_MAX: u32 = 4;
/// Arrays within arrays.
const DEPTH_MAX: u32 = 4;
/// Longest array whose numbers are kept: those of layers. Vocabularies are only counted.
const KEPT_MAX: u64 = 4096;
/// Alignment unless the file says otherwise.
pub(super) const ALIGNMENT: u64 = 32;

/// Why a header is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// The bytes end before the header does: more of the file is needed.
    #[error("the header goes on after these bytes")]
    Short,
    /// What is wrong.
    #[error("{0}")]
    Invalid(String),
}

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StoredAs {
    /// Elements of a type of their own.
    Elements(DType),
    /// Blocks that are decoded to f32.
    Blocks(&'static BlockType),
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Extents, row-major.
    pub shape: Vec<u64>,
    /// How it is stored.
    pub stored: StoredAs,
    /// First byte in the file.
    pub start: u64,
    /// Stored bytes.
    pub bytes: u64,
}

/// A header.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gguf {
    /// Values by key: numbers, truth values, texts, and arrays of at most 4096 numbers.
    pub values: BTreeMap<String, Value>,
    /// Lengths of all arrays, by key.
    pub lengths: BTreeMap<String, u64>,
    /// In the order of the header.
    pub tensors: Vec<GgufTensor>,
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file_bytes: u64,
}

fn invalid<T>(text: String) -> Result<T, GgufError> {
    Err(GgufError::Invalid(text))
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: u64) -> Result<&'a [u8], GgufError> {
        let end = (self.at as u64).checked_add(len).filter(|end| *end <= self.file_bytes);
        let Some(end) = end else {
            let left = self.file_bytes - self.at as u64;
            return invalid(format!(
                "byte {} of the header: expected {len} bytes, found {left} until the end",
                self.at
            ));
        };
        let found = usize::try_from(end).ok().and_then(|end| self.bytes.get(self.at..end));
        let found = found.ok_or(GgufError::Short)?;
        self.at += found.len();
        Ok(found)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        Ok(self.take(N as u64)?.try_into().expect("as many bytes as were requested"))
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        self.number().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        self.number().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<&'a str, GgufError> {
        let (at, len) = (self.at, self.u64()?);
        let text = std::str::from_utf8(self.take(len)?);
        text.map_err(|_| GgufError::Invalid(format!("byte {at} of the header: expected a text in UTF-8")))
    }

    /// A value, unless it is an array that is only counted, and the length of an array.
    fn value(&mut self, kind: u32, depth: u32) -> Result<(Option<Value>, Option<u64>), GgufError> {
        let float = |value: f64| Number::from_f64(value).map_or(Value::Null, Value::Number);
        let value = match kind {
            0 => Value::from(u8::from_le_bytes(self.number()?)),
            1 => Value::from(i8::from_le_bytes(self.number()?)),
            2 => Value::from(u16::from_le_bytes(self.number()?)),
            3 => Value::from(i16::from_le_bytes(self.number()?)),
            4 => Value::from(self.u32()?),
            5 => Value::from(i32::from_le_bytes(self.number()?)),
            6 => float(f32::from_le_bytes(self.number()?).into()),
            7 => Value::from(self.number::<1>()? != [0]),
            8 => Value::from(self.text()?),
            9 => return self.array(depth),
            10 => Value::from(self.u64()?),
            11 => Value::from(i64::from_le_bytes(self.number()?)),
            12 => float(f64::from_le_bytes(self.number()?)),
            _ => return invalid(format!("byte {} of the header: {kind} is no type of a value", self.at)),
        };
        Ok((Some(value), None))
    }

    fn array(&mut self, depth: u32) -> Result<(Option<Value>, Option<u64>), GgufError> {
        if depth == DEPTH_MAX {
            return invalid(format!("byte {} of the header: arrays nested deeper than {DEPTH_MAX}", self.at));
        }
        let (kind, count) = (self.u32()?, self.u64()?);
        let keeps = count <= KEPT_MAX && !matches!(kind, 8 | 9);
        let mut kept = Vec::new();
        for _ in 0..count {
            let (value, _) = self.value(kind, depth + 1)?;
            kept.extend(value.filter(|_| keeps));
        }
        Ok((keeps.then_some(Value::Array(kept)), Some(count)))
    }
}

impl Gguf {
    /// The header at the start of a file of `file_bytes` bytes, of which `bytes` are the first.
    ///
    /// # Errors
    /// [`GgufError::Short`] if `bytes` are not the whole header, or what is wrong.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Self, GgufError> {
        let mut cursor = Cursor { bytes, at: 0, file_bytes };
        if cursor.take(4)? != b"GGUF" {
            return invalid("expected a GGUF file, which begins with GGUF".to_owned());
        }
        match cursor.u32()? {
            2 | 3 => {}
            version if version.trailing_zeros() >= 16 => {
                return invalid("big-endian: expected the little-endian file of the model".to_owned());
            }
            version => return invalid(format!("expected GGUF of version 2 or 3, found {version}: convert it again")),
        }
        let (tensors, pairs) = (cursor.u64()?, cursor.u64()?);
        let mut header = Self::default();
        for _ in 0..pairs {
            let (key, kind) = (cursor.text()?, cursor.u32()?);
            let (value, length) = cursor.value(kind, 0)?;
            let is_new = !header.values.contains_key(key) && !header.lengths.contains_key(key);
            if !is_new {
                return invalid(format!("the key {key:?} is there twice"));
            }
            header.lengths.extend(length.map(|length| (key.to_owned(), length)));
            header.values.extend(value.map(|value| (key.to_owned(), value)));
        }
        let alignment = header.values.get("general.alignment").map_or(Some(ALIGNMENT), Value::as_u64);
        let Some(alignment) = alignment.filter(|alignment| alignment.is_power_of_two() && *alignment < 1 << 32) else {
            return invalid("general.alignment: expected a power of two".to_owned());
        };
        for _ in 0..tensors {
            header.tensors.push(tensor(&mut cursor)?);
        }
        let first = (cursor.at as u64).next_multiple_of(alignment);
        for tensor in &mut header.tensors {
            place(tensor, first, alignment, file_bytes).or_else(|what| invalid(format!("{}: {what}", tensor.name)))?;
        }
        header.refuse_overlaps()?;
        Ok(header)
    }

    fn refuse_overlaps(&self) -> Result<(), GgufError> {
        let mut places: Vec<&GgufTensor> = self.tensors.iter().filter(|tensor| tensor.bytes > 0).collect();
        places.sort_unstable_by_key(|tensor| tensor.start);
        match places.windows(2).find(|pair| pair[0].start + pair[0].bytes > pair[1].start) {
            Some(pair) => invalid(format!("{} and {} share bytes", pair[0].name, pair[1].name)),
            None => Ok(()),
        }
    }

    /// The value of a key as a number that is none below 0.
    pub fn count(&self, key: &str) -> Option<u64> {
        self.values.get(key)?.as_u64()
    }
}

/// A tensor whose start is still its offset, and whose bytes are not counted.
fn tensor(cursor: &mut Cursor<'_>) -> Result<GgufTensor, GgufError> {
    let (name, axes) = (cursor.text()?.to_owned(), cursor.u32()?);
    if axes > AXES_MAX {
        return invalid(format!("{name}: expected at most {AXES_MAX} axes, found {axes}"));
    }
    let mut shape = (0..axes).map(|_| cursor.u64()).collect::<Result<Vec<u64>, _>>()?;
    shape.reverse();
    let (code, start) = (cursor.u32()?, cursor.u64()?);
    Ok(GgufTensor {
        stored: stored_as(code).or_else(|what| invalid(format!("{name}: {what}")))?,
        name,
        shape,
        start,
        bytes: 0,
    })
}

fn stored_as(code: u32) -> Result<StoredAs, String> {
    /// Types of ggml that are not decoded, the way out, and why there is none.
    const NAMES: [(u32, &str); 3] = [(9, "Q8_1"), (15, "Q8_K"), (41, "Q1_0")];
    Ok(StoredAs::Elements(match code {
        0 => DType::F32,
        1 => DType::F16,
        24 => DType::I8,
        25 => DType::I16,
        26 => DType::I32,
        27 => DType::I64,
        28 => DType::F64,
        30 => DType::BF16,
        _ => {
            let name = NAMES.iter().find(|(other, _)| *other == code).map_or("", |(_, name)| name);
            let refused = || format!("the ggml type {code} {name} is not decoded: quantize the model to another type");
            return BlockType::of(code).map(StoredAs::Blocks).ok_or_else(refused);
        }
    }))
}

/// Finds the place of a tensor in its file.
fn place(tensor: &mut GgufTensor, first: u64, alignment: u64, file_bytes: u64) -> Result<(), String> {
    let (elements, bytes, name) = match tensor.stored {
        StoredAs::Elements(dtype) => (1, dtype.bits() / 8, dtype.code()),
        StoredAs::Blocks(of) => (of.elements(), of.bytes(), of.name()),
    };
    let row = tensor.shape.last().copied().unwrap_or(1);
    if !row.is_multiple_of(elements) {
        return Err(format!("expected rows of whole blocks of {elements} elements of {name}, found {row} elements"));
    }
    let count = tensor.shape.iter().try_fold(1u64, |count, extent| count.checked_mul(*extent));
    let len = count.and_then(|count| (count / elements).checked_mul(bytes));
    // What it decodes to, perhaps with another, is counted in 64 bits, too.
    let len = len.filter(|_| count.is_some_and(|count| count.checked_mul(8).is_some()));
    if !tensor.start.is_multiple_of(alignment) {
        return Err(format!("expected an offset of a multiple of {alignment}, found {}", tensor.start));
    }
    let start = first.checked_add(tensor.start);
    let end = len.and_then(|len| start?.checked_add(len)).filter(|end| *end <= file_bytes);
    let (Some(len), Some(start), Some(_)) = (len, start, end) else {
        return Err(format!(
            "expected bytes in the file of {file_bytes}, found {name} {:?} at offset {} after byte {first}",
            tensor.shape, tensor.start
        ));
    };
    (tensor.start, tensor.bytes) = (start, len);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    /// A file with these pairs, and one tensor of this type and these extents, the last axis first.
    fn file(pairs: &[(&str, u32, Vec<u8>)], (code, extents, offset): (u32, &[u64], u64), data: usize) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(1u64.to_le_bytes());
        bytes.extend((pairs.len() as u64).to_le_bytes());
        for (key, kind, value) in pairs {
            bytes.extend([text(key), kind.to_le_bytes().to_vec(), value.clone()].concat());
        }
        bytes.extend(text("w"));
        bytes.extend(u32::try_from(extents.len()).unwrap().to_le_bytes());
        for extent in extents {
            bytes.extend(extent.to_le_bytes());
        }
        bytes.extend(code.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
        bytes
    }

    fn parsed(bytes: &[u8]) -> Result<Gguf, String> {
        Gguf::parse(bytes, bytes.len() as u64).map_err(|error| error.to_string())
    }

    #[test]
    fn headers_are_read() {
        let array = [4u32.to_le_bytes().to_vec(), 2u64.to_le_bytes().to_vec(), vec![7, 0, 0, 0, 8, 0, 0, 0]].concat();
        let words = [8u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec(), text("a")].concat();
        let pairs = [
            ("general.architecture", 8, text("llama")),
            ("n", 4, vec![5, 0, 0, 0]),
            ("heads", 9, array),
            ("tokens", 9, words),
        ];
        let bytes = file(&pairs, (12, &[256, 3], 0), 432);
        let header = parsed(&bytes).unwrap();
        assert_eq!(header.values["general.architecture"], "llama");
        assert_eq!((header.count("n"), header.values["heads"].to_string().as_str()), (Some(5), "[7,8]"));
        assert_eq!((header.lengths["tokens"], header.values.get("tokens")), (1, None));
        let [tensor] = &header.tensors[..] else { panic!() };
        assert_eq!((&tensor.shape[..], tensor.bytes, tensor.start + 432), (&[3, 256][..], 432, bytes.len() as u64));
        for len in 0..bytes.len() - 432 - 32 {
            assert_eq!(Gguf::parse(&bytes[..len], bytes.len() as u64), Err(GgufError::Short), "{len}");
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let plain = |tensor: (u32, &[u64], u64)| parsed(&file(&[], tensor, 64)).unwrap_err();
        for (found, expected) in [
            (plain((12, &[255], 0)), "w: expected rows of whole blocks of 256 elements of Q4_K, found 255"),
            (plain((0, &[17], 0)), "w: expected bytes in the file of"),
            (plain((0, &[u64::MAX, 2], 0)), "w: expected bytes in the file of"),
            (plain((0, &[1], u64::MAX - 31)), "w: expected bytes in the file of"),
            (plain((0, &[1], 4)), "w: expected an offset of a multiple of 32, found 4"),
            (plain((15, &[256], 0)), "w: the ggml type 15 Q8_K is not decoded"),
            (plain((0, &[1; 5], 0)), "w: expected at most 4 axes, found 5"),
            (parsed(b"GGUF\0\0\0\x03").unwrap_err(), "big-endian"),
            (parsed(b"GGUF\x01\0\0\0").unwrap_err(), "expected GGUF of version 2 or 3, found 1"),
        ] {
            assert!(found.starts_with(expected), "{found}");
        }
        let nested = (0..6).flat_map(|_| [9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat()).collect();
        for (pair, expected) in [
            (("x", 9, nested), "arrays nested deeper than 4"),
            (("x", 99, vec![]), "99 is no type of a value"),
            (("x", 8, u64::MAX.to_le_bytes().to_vec()), "expected 18446744073709551615 bytes"),
            (("general.alignment", 4, vec![3, 0, 0, 0]), "expected a power of two"),
        ] {
            let found = parsed(&file(&[pair], (0, &[1], 0), 64)).unwrap_err();
            assert!(found.contains(expected), "{found}");
        }
    }
}
