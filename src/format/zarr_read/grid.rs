//! The grid of chunks and their names.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::{
    codec::{check_known, shortened, wrong},
    error::MetadataError,
    metadata::Array,
};
use crate::tensor::PerAxis;

/// How chunks are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    /// Between the numbers: `.` or `/`.
    separator: char,
    /// Whether a name begins with `c`.
    has_head: bool,
}

impl Keys {
    pub(super) fn version_2(separator: &str) -> Result<Self, MetadataError> {
        Ok(Self { separator: parse_separator(separator)?, has_head: false })
    }

    pub(super) fn version_3(encoding: &str, configuration: &Map<String, Value>) -> Result<Self, MetadataError> {
        check_known(configuration, "chunk_key_encoding", &["separator"])?;
        let separator = |default| match configuration.get("separator") {
            None => parse_separator(default),
            Some(Value::String(separator)) => parse_separator(separator),
            Some(found) => Err(wrong("separator", "\".\" or \"/\"", found)),
        };
        match encoding {
            "default" => Ok(Self { separator: separator("/")?, has_head: true }),
            "v2" => Ok(Self { separator: separator(".")?, has_head: false }),
            _ => {
                let found = format!("{:?}", shortened(encoding));
                let advice = ": expected \"default\" or \"v2\"";
                Err(MetadataError::Unsupported { what: "chunk key encoding", found, advice })
            }
        }
    }
}

fn parse_separator(text: &str) -> Result<char, MetadataError> {
    match text {
        "." => Ok('.'),
        "/" => Ok('/'),
        _ => Err(wrong("separator", "\".\" or \"/\"", format!("{text:?}"))),
    }
}

impl Array {
    /// Number of chunks along each axis.
    pub fn grid(&self) -> PerAxis {
        self.shape.extents().iter().zip(&self.chunk).map(|(extent, chunk)| extent.div_ceil(*chunk)).collect()
    }

    /// Name of the chunk with these numbers, below the array's own name and a `/`.
    pub fn key(&self, numbers: &[u64]) -> String {
        let Keys { separator, has_head } = self.keys;
        let mut key = String::from(if has_head { "c" } else { "" });
        for number in numbers {
            if !key.is_empty() {
                key.push(separator);
            }
            // Writing to a string cannot fail.
            let _ = write!(key, "{number}");
        }
        if key.is_empty() { "0".to_owned() } else { key }
    }

    /// The numbers of the chunk of this name; `None` for any other spelling and for a chunk outside the grid.
    pub fn numbers(&self, key: &str) -> Option<PerAxis> {
        let rank = self.shape.rank();
        if rank == 0 {
            return (key == self.key(&[])).then(PerAxis::new);
        }
        let Keys { separator, has_head } = self.keys;
        let words = if has_head { key.strip_prefix('c')?.strip_prefix(separator)? } else { key };
        let number = |word: &str| {
            let is_canonical =
                word.bytes().all(|byte| byte.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
            is_canonical.then(|| word.parse().ok()).flatten()
        };
        let numbers: PerAxis = words.split(separator).map(number).collect::<Option<_>>()?;
        let is_inside = numbers.len() == rank && numbers.iter().zip(&self.grid()).all(|(number, count)| number < count);
        is_inside.then_some(numbers)
    }
}
