//! The report of a plan: as text for `ckfs plan` and `.ckfs/plan.txt`, and as JSON.

mod amounts;
mod effects;
mod json;
mod text;

pub use amounts::{human_bytes, reads_text};
pub use effects::bytes_per_device;
pub use json::{Report, ViewReport};
pub use text::{source_text, text, view_text};
