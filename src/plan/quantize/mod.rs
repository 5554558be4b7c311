//! What is quantized on read, and as what.
//!
//! Linear layers of attention and of MLPs, and experts. A family's data says which of its matrices are none of these (`plain`); of
//! what a family does not know, the rules of converters decide, by words of names that `families/generic.toml` lists. The user
//! narrows both by patterns.

mod choice;
mod config;
mod encode;
mod kept;

pub use self::choice::{Chosen, Kind, Left};
pub(crate) use self::{
    choice::{WeightChoice, module},
    config::{HF_QUANT_CONFIG, quantization_file},
    encode::{Quantizer, with_codes},
    kept::kept,
};
