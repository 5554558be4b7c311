//! The members of a header's JSON, in order and each as often as it comes.

use std::{fmt, marker::PhantomData};

use ckfs_tensor::DType;
use safetensors::{Dtype, tensor::TensorInfo};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};

use super::{super::json::Pairs, METADATA};

/// A header as written: JSON of the right form, not yet checked.
pub(super) struct Members<T> {
    pub(super) metadata: Vec<(String, String)>,
    pub(super) tensors: Vec<(String, T)>,
}

/// A tensor's description without members that the format does not know.
///
/// Those take the longer way, where the crate itself parses: what serde skips it does not check as JSON to the end.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Known {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl From<Known> for TensorInfo {
    fn from(known: Known) -> Self {
        let Known { dtype, shape, data_offsets } = known;
        Self { dtype, shape, data_offsets }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Members<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Visit<T> {
            type Value = Members<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensor names to descriptions")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<T>, A::Error> {
                let mut metadata = None;
                let mut tensors = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        if metadata.is_some() {
                            return Err(A::Error::duplicate_field(METADATA));
                        }
                        let strings = map.next_value::<Option<Pairs<String>>>();
                        let strings = strings.map_err(|error| A::Error::custom(format_args!("{METADATA}: {error}")))?;
                        metadata = Some(strings.map_or_else(Vec::new, |strings| strings.0));
                        continue;
                    }
                    let tensor = map.next_value::<T>();
                    let tensor = tensor.map_err(|error| A::Error::custom(format_args!("tensor {name:?}: {error}")))?;
                    tensors.push((name, tensor));
                }
                Ok(Members { metadata: metadata.unwrap_or_default(), tensors })
            }
        }
        deserializer.deserialize_map(Visit(PhantomData))
    }
}

/// The dtype of a tensor; `None` if a later version of the crate has one that ckfs does not know.
pub(super) fn dtype_of(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::BOOL => DType::Bool,
        Dtype::F4 => DType::F4,
        Dtype::F6_E2M3 => DType::F6E2M3,
        Dtype::F6_E3M2 => DType::F6E3M2,
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::F8_E5M2 => DType::F8E5M2,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::F8_E8M0 => DType::F8E8M0,
        Dtype::F8_E4M3FNUZ => DType::F8E4M3Fnuz,
        Dtype::F8_E5M2FNUZ => DType::F8E5M2Fnuz,
        Dtype::I16 => DType::I16,
        Dtype::U16 => DType::U16,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I32 => DType::I32,
        Dtype::U32 => DType::U32,
        Dtype::F32 => DType::F32,
        Dtype::C64 => DType::C64,
        Dtype::F64 => DType::F64,
        Dtype::I64 => DType::I64,
        Dtype::U64 => DType::U64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_are_those_of_the_crate() {
        for dtype in DType::ALL {
            let parsed: Dtype = serde_json::from_str(&format!("\"{}\"", dtype.code())).unwrap();
            assert_eq!(dtype_of(parsed), Some(*dtype));
        }
    }
}
