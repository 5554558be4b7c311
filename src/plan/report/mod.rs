//! The report of a plan: as a summary for `ckfs plan`, as text for `ckfs plan -v` and `.ckfs/plan.txt`, as JSON, and as a page.

mod advice;
mod effects;
mod html;
mod json;
mod summary;
mod text;

pub use effects::{bytes_per_device, human_bytes, percent, reads_text};
pub use html::html;
pub use json::{Report, ViewReport};
pub use summary::{SummaryRow, summary};
pub use text::{text, view_text};
