//! The members of a header's JSON, in order and each as often as it comes.

use std::{fmt, marker::PhantomData, sync::LazyLock};

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
    // By their codes, which are the crate's.
    static ALL: LazyLock<Vec<(Dtype, DType)>> = LazyLock::new(|| {
        let pair = |own: &DType| Some((serde_json::from_value(own.code().into()).ok()?, *own));
        DType::ALL.iter().filter_map(pair).collect()
    });
    ALL.iter().find(|(of, _)| *of == dtype).map(|(_, own)| *own)
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
