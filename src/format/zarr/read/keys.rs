//! How descriptions say that chunks are named.

use serde_json::{Map, Value};

use super::{
    codec::{check_known, shortened, wrong},
    error::MetadataError,
};

/// How chunks are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    /// Between the numbers: `.` or `/`.
    pub(super) separator: char,
    /// Whether a name begins with `c`.
    pub(super) has_head: bool,
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
                let found = format_args!("{:?}", shortened(encoding));
                Err(MetadataError::unsupported("chunk key encoding", found, ": expected \"default\" or \"v2\""))
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
