//! How chunks are named.

use std::fmt::Write as _;

use ckfs_tensor::PerAxis;
use serde_json::{Map, Value};

use super::codec::{check_known, shortened, unsupported, wrong};
use crate::FormatError;

/// How chunks are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Keys {
    /// Between the numbers: `.` or `/`.
    separator: char,
    /// Whether a name begins with `c`.
    has_head: bool,
}

impl Keys {
    /// Those of version 2, unless its description says otherwise.
    pub(in super::super) const DOTS: Self = Self { separator: '.', has_head: false };

    /// Name of the chunk with these numbers.
    pub(in super::super) fn name(self, numbers: &[u64]) -> String {
        let mut name = String::from(if self.has_head { "c" } else { "" });
        for number in numbers {
            if !name.is_empty() {
                name.push(self.separator);
            }
            // Writing to a string cannot fail.
            let _ = write!(name, "{number}");
        }
        if name.is_empty() { "0".to_owned() } else { name }
    }

    /// The numbers of the chunk with this name, of an array of `rank` axes; `None` for any other spelling.
    pub(in super::super) fn numbers(self, name: &str, rank: usize) -> Option<PerAxis> {
        if rank == 0 {
            return (name == self.name(&[])).then(PerAxis::new);
        }
        let words = if self.has_head { name.strip_prefix('c')?.strip_prefix(self.separator)? } else { name };
        let number = |word: &str| {
            let is_canonical =
                word.bytes().all(|byte| byte.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
            word.parse().ok().filter(|_| is_canonical)
        };
        words.split(self.separator).map(number).collect::<Option<PerAxis>>().filter(|numbers| numbers.len() == rank)
    }

    pub(super) fn version_2(separator: &str) -> Result<Self, FormatError> {
        Ok(Self { separator: parse_separator(separator)?, has_head: false })
    }

    pub(super) fn version_3(encoding: &str, configuration: &Map<String, Value>) -> Result<Self, FormatError> {
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
                let found = format_args!("{:?}", shortened(encoding));
                Err(unsupported("chunk key encoding", found, ": expected \"default\" or \"v2\""))
            }
        }
    }
}

fn parse_separator(text: &str) -> Result<char, FormatError> {
    match text {
        "." => Ok('.'),
        "/" => Ok('/'),
        _ => Err(wrong("separator", "\".\" or \"/\"", format!("{text:?}"))),
    }
}
