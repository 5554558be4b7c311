//! How a repository's weights are quantized, for the reader: by which schemes, and what no scheme decodes.

use std::fmt;

use serde_json::Value;

use super::super::scheme::{Found, Summary, Unsupported};

/// How a repository's weights are quantized.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantization {
    /// The schemes that decode them, in the order of the closed list.
    pub schemes: Vec<Summary>,
    /// What stays as it is stored, because no scheme decodes it.
    pub unsupported: Vec<Unsupported>,
    /// Whether the configuration says that scales stored as floats are powers of two (`scale_fmt` `ue8m0`).
    pub has_powers_of_two: bool,
}

impl Quantization {
    /// What was found, under this `quantization_config`.
    pub(crate) fn of(found: &Found, config: Option<&Value>) -> Self {
        let has_powers_of_two = config.and_then(|config| config["scale_fmt"].as_str()) == Some("ue8m0");
        Self { schemes: found.schemes.clone(), unsupported: found.unsupported.clone(), has_powers_of_two }
    }

    /// Whether nothing is quantized, as far as configuration and tensors tell.
    pub const fn is_none(&self) -> bool {
        self.schemes.is_empty() && self.unsupported.is_empty()
    }

    /// What stands in the way of decoding, if something does.
    pub fn undecodable(&self) -> Option<&Unsupported> {
        self.unsupported.first()
    }

    /// Whether some tensors are stored by the scheme of this name.
    pub fn has(&self, scheme: &str) -> bool {
        self.schemes.iter().any(|summary| summary.scheme == scheme)
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("not quantized");
        }
        let schemes = self.schemes.iter().map(|summary| summary.text.clone());
        let texts: Vec<String> = schemes.chain(self.unsupported.iter().map(ToString::to_string)).collect();
        f.write_str(&texts.join("; "))
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codes.len() {
            0 => write!(f, "{}, not decoded", self.method),
            1 => write!(f, "{}, not decoded: 1 tensor", self.method),
            tensors => write!(f, "{}, not decoded: {tensors} tensors", self.method),
        }
    }
}
