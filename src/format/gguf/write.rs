//! Writing headers, as the `gguf` package does.

use super::read::ALIGNMENT;

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// A number.
    U32(u32),
    /// A number.
    I32(i32),
    /// A number.
    F32(f32),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// Texts.
    Texts(Vec<String>),
    /// Numbers.
    I32s(Vec<i32>),
    /// Numbers.
    F32s(Vec<f32>),
}

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenTensor {
    /// Its name.
    pub name: String,
    /// Extents, row-major.
    pub shape: Vec<u64>,
    /// Number of its type in ggml.
    pub code: u32,
    /// Bytes that it takes.
    pub bytes: u64,
}

/// Keys with values, in the order in which each was set first, as Python's dictionaries have them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufPairs(Vec<(String, GgufValue)>);

impl GgufPairs {
    /// Sets the value of a key. An empty text is no value, and neither is an empty array.
    pub fn set(&mut self, key: impl Into<String>, value: GgufValue) {
        let is_empty = match &value {
            GgufValue::Text(text) => text.is_empty(),
            GgufValue::Texts(texts) => texts.is_empty(),
            GgufValue::I32s(numbers) => numbers.is_empty(),
            GgufValue::F32s(numbers) => numbers.is_empty(),
            GgufValue::U32(_) | GgufValue::I32(_) | GgufValue::F32(_) | GgufValue::Bool(_) => false,
        };
        if is_empty {
            return;
        }
        let key = key.into();
        match self.0.iter_mut().find(|(known, _)| *known == key) {
            Some((_, found)) => *found = value,
            None => self.0.push((key, value)),
        }
    }
}

/// Bytes after so many that fill the last unit of the alignment.
pub const fn gguf_padding(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT) - bytes
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The start of an array.
fn array(out: &mut Vec<u8>, kind: u32, len: usize) {
    out.extend([9u32, kind].map(u32::to_le_bytes).as_flattened());
    out.extend((len as u64).to_le_bytes());
}

fn value(out: &mut Vec<u8>, value: &GgufValue) {
    match value {
        GgufValue::U32(number) => out.extend([4, *number].map(u32::to_le_bytes).as_flattened()),
        GgufValue::I32(number) => out.extend([5u32.to_le_bytes(), number.to_le_bytes()].as_flattened()),
        GgufValue::F32(number) => out.extend([6u32.to_le_bytes(), number.to_le_bytes()].as_flattened()),
        GgufValue::Bool(value) => out.extend([7, 0, 0, 0, u8::from(*value)]),
        GgufValue::Text(found) => {
            out.extend(8u32.to_le_bytes());
            text(out, found);
        }
        GgufValue::Texts(texts) => {
            array(out, 8, texts.len());
            for found in texts {
                text(out, found);
            }
        }
        GgufValue::I32s(numbers) => {
            array(out, 5, numbers.len());
            out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
        GgufValue::F32s(numbers) => {
            array(out, 6, numbers.len());
            out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        }
    }
}

/// The header of a file of version 3 with these tensors, one after the other, and the padding before the first of them.
pub fn gguf_header(pairs: &GgufPairs, tensors: &[WrittenTensor]) -> Vec<u8> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend([tensors.len() as u64, pairs.0.len() as u64].map(u64::to_le_bytes).as_flattened());
    for (key, found) in &pairs.0 {
        text(&mut out, key);
        value(&mut out, found);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        text(&mut out, &tensor.name);
        out.extend(u32::try_from(tensor.shape.len()).unwrap_or(u32::MAX).to_le_bytes());
        out.extend(tensor.shape.iter().rev().flat_map(|extent| extent.to_le_bytes()));
        out.extend(tensor.code.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += tensor.bytes + gguf_padding(tensor.bytes);
    }
    out.resize(out.len().next_multiple_of(ckfs_tensor::to_usize(ALIGNMENT)), 0);
    out
}

#[cfg(test)]
mod tests {
    use super::{super::Gguf, *};

    #[test]
    fn what_is_written_is_read() {
        let mut pairs = GgufPairs::default();
        pairs.set("a", GgufValue::U32(7));
        pairs.set("b", GgufValue::Text("x".to_owned()));
        pairs.set("c", GgufValue::Texts(Vec::new()));
        pairs.set("d", GgufValue::I32s(vec![1, -2]));
        pairs.set("e", GgufValue::F32s(vec![0.5]));
        pairs.set("f", GgufValue::Bool(true));
        pairs.set("g", GgufValue::Texts(vec!["é".to_owned()]));
        pairs.set("a", GgufValue::F32(1.5));
        let tensor = |name: &str, shape: &[u64], code, bytes| WrittenTensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            code,
            bytes,
        };
        let mut bytes =
            gguf_header(&pairs, &[tensor("w", &[3, 32], 8, 102), tensor("v", &[5], 0, 20), tensor("u", &[1], 0, 4)]);
        let first = bytes.len() as u64;
        assert!(first.is_multiple_of(32));
        bytes.resize(bytes.len() + 128 + 32 + 4, 0);
        let header = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        let values = ["a", "b", "d", "e", "f"].map(|key| header.values[key].to_string());
        assert_eq!(values, ["1.5", "\"x\"", "[1,-2]", "[0.5]", "true"]);
        assert_eq!((header.lengths["g"], header.lengths.get("c")), (1, None));
        let starts: Vec<u64> = header.tensors.iter().map(|tensor| tensor.start - first).collect();
        assert_eq!((starts, &header.tensors[0].shape[..]), (vec![0, 128, 160], &[3, 32][..]));
    }
}
