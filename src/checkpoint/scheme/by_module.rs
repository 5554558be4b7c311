//! Rows of which the configuration says module by module whether a weight is stored so.

use serde_json::{Value as Json, json};

use super::{
    findings::SchemeFindings,
    quantization_config::{QuantizationConfig, Sharing},
    row::{CodesCandidate, FirstTensor, ModuleAnswer, ModuleConfig, SchemeRow},
    stored::Stored,
};

/// What [`SchemeRow::says`] is compared with.
#[derive(Debug)]
struct ByModule<'a> {
    config: QuantizationConfig<'a>,
    rows: &'static [SchemeRow],
}

/// Reads the configuration, if it is of a library that says of each module how it is quantized.
#[allow(clippy::unnecessary_wraps, reason = "as the reader of each scheme")]
pub(super) fn read<'a>(
    rows: &'static [SchemeRow],
    stored: &Stored<'a>,
    _: &mut SchemeFindings<'_>,
) -> Option<Box<dyn ModuleConfig + 'a>> {
    Some(Box::new(ByModule { config: QuantizationConfig::read(stored), rows }))
}

impl ModuleConfig for ByModule<'_> {
    fn may(&self, row: usize) -> bool {
        let row = &self.rows[row];
        row.is_of(self.config.library()) && row.says.is_some_and(|says| self.config.may_say(says))
    }

    fn of(&self, stored: &Stored<'_>, at: &CodesCandidate<'_>) -> ModuleAnswer {
        let row = &self.rows[at.row];
        let told = self.config.of(at.stem);
        // A head that was quantized although the configuration takes it out is what its codes and scales say.
        let is_stored_so = || self.config.takes_out(at.stem) && row.is_complete(stored, at.stem);
        match row.codes.group {
            Some(group) if row.says == Some(&told) || is_stored_so() => {
                ModuleAnswer::Stored(at.row, Sharing::Group(group))
            }
            _ => ModuleAnswer::Nothing,
        }
    }

    fn details(&self, _: &FirstTensor) -> Vec<(&'static str, Json)> {
        vec![("group", json!(self.rows[0].codes.group))]
    }
}
