//! stub
use super::Program;
/// stub
pub fn convert_scalar(_program: &Program, _scale: &[u8], _source: &[u8], _first: u64, _target: &mut [u8]) {}
