//! Arrays of zarr version 2: the `.zarray` file and the names of chunks.
//!
//! An array is a directory with a description and one file per chunk of a regular grid. A chunk file holds all elements of
//! a chunk in row-major order, also where the chunk reaches beyond the array: there the content does not matter but the
//! size does. Chunk `[i, j]` is called `i.j`; the only chunk of an array without axes is called `0`.
//!
//! Version 2 and not 3, because it has complex numbers and because all files of an array lie in one directory; Orbax and
//! TensorStore read either.
//!
//! Own code, because a description is one small JSON object: `zarrs_metadata` (0.7) knows every codec and chunk grid of versions
//! 2 and 3, but neither Orbax's choice among them nor the size of a chunk's file.

use ckfs_tensor::{DType, PerAxis};

use super::read::keys::Keys;
use crate::npy;

/// Name of the description.
pub const ZARRAY: &str = ".zarray";

/// The code of a type, or `None` for those that the format can hold only one element to a byte.
pub fn code(dtype: DType) -> Option<&'static str> {
    npy::code(dtype).or_else(|| dtype.element_bytes().map(|_| dtype.name()))
}

/// The `.zarray` of an uncompressed array, or `None` as [`code`].
pub fn zarray(dtype: DType, shape: &[u64], chunk: &[u64]) -> Option<String> {
    let code = code(dtype)?;
    Some(format!(
        "{{\"chunks\":{chunk:?},\"compressor\":null,\"dimension_separator\":\".\",\"dtype\":\"{code}\",\
         \"fill_value\":null,\"filters\":null,\"order\":\"C\",\"shape\":{shape:?},\"zarr_format\":2}}"
    ))
}

/// Name of the chunk with these numbers.
pub fn chunk_name(numbers: &[u64]) -> String {
    Keys::DOTS.name(numbers)
}

/// The numbers of the chunk with this name in an array of `rank` axes; `None` for any other spelling.
pub fn chunk_numbers(name: &[u8], rank: usize) -> Option<PerAxis> {
    Keys::DOTS.numbers(std::str::from_utf8(name).ok()?, rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_names_have_one_spelling() {
        for numbers in [&[][..], &[0], &[3], &[0, 12, 5]] {
            let name = chunk_name(numbers);
            assert_eq!(chunk_numbers(name.as_bytes(), numbers.len()).unwrap().as_slice(), numbers);
        }
        for (name, rank) in [
            ("", 1),
            ("01", 1),
            ("0.", 1),
            ("0.0", 1),
            ("0", 2),
            ("1", 0),
            ("+1", 1),
            ("0..0", 3),
            ("99999999999999999999", 1),
        ] {
            assert_eq!(chunk_numbers(name.as_bytes(), rank), None, "{name}");
        }
    }

    #[test]
    fn descriptions_are_json() {
        let text = zarray(DType::BF16, &[6, 4], &[3, 4]).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["dtype"], "bfloat16");
        assert_eq!(value["shape"], serde_json::json!([6, 4]));
        assert_eq!(value["chunks"], serde_json::json!([3, 4]));
        assert_eq!(zarray(DType::F4, &[2], &[2]), None);
        assert!(zarray(DType::F32, &[], &[]).unwrap().contains("\"shape\":[]"));
    }
}
