//! The list of output formats, and the union of their files for a view.

use std::{fmt::Write, sync::Arc};

use ckfs_checkpoint::printable;
use ckfs_plan::{Plan, Problem};
use rayon::prelude::*;

use super::{
    dcp::DCP,
    gguf::GGUF,
    hf::HF,
    input::FormatInput,
    manifest::MANIFEST,
    npy::NPY,
    orbax::ORBAX,
    output::{DerivedFrom, Directory, Omission, OmittedFormat, OutputFormat, text_file},
    pt::PT,
    raw::RAW,
    safetensors::SAFETENSORS,
    sharded_state::SHARDED_STATE,
    universal::UNIVERSAL,
};

/// All output formats, in the order of reports.
pub const FORMATS: [OutputFormat; 11] =
    [RAW, NPY, SAFETENSORS, PT, DCP, ORBAX, HF, GGUF, SHARDED_STATE, UNIVERSAL, MANIFEST];

/// Name of the file that explains why a format's directory is otherwise empty.
const UNAVAILABLE: &str = "UNAVAILABLE.txt";

/// The files of all formats for a view, and what formats cannot show.
///
/// # Errors
/// All problems of all formats.
pub fn layout(input: &Arc<FormatInput>) -> Result<(Directory, Vec<OmittedFormat>), Vec<Problem>> {
    // Each by itself: the first two visit the names of all tensors, and the rest hardly any.
    let shown: Vec<_> = FORMATS.par_iter().with_max_len(1).map(|format| (format.layout)(input)).collect();
    let (mut all, mut lacking, mut problems) = (Directory::default(), Vec::new(), Vec::new());
    let mut is_refused = false;
    for result in shown {
        match result {
            Ok((mut directory, unavailable)) => {
                if let Some(found) = unavailable {
                    explain(&mut directory, &found);
                    lacking.push(found);
                }
                if let Err(name) = all.merge(directory, &|shown| shown) {
                    problems.push(Problem::File { file: name, reason: "two formats have this name".to_owned() });
                }
            }
            Err(found) => {
                is_refused = true;
                problems.extend(found);
            }
        }
    }
    if is_refused || !problems.is_empty() { Err(problems) } else { Ok((all, lacking)) }
}

/// Adds the reason to the directory of a format that cannot hold the view, so that no loader takes it for a checkpoint.
fn explain(directory: &mut Directory, OmittedFormat { format, omission, reason }: &OmittedFormat) {
    if *omission != Omission::Empty {
        return;
    }
    let reason = printable(reason);
    tracing::warn!("{format}/ is not available: {reason}");
    let text = format!("{format}/ is not available for this view: {reason}\n");
    if let Some(empty) = directory.directory(format) {
        empty.file(UNAVAILABLE, text_file(text.into_bytes().into(), DerivedFrom::Everything));
    }
}

/// The parts of a plan's view that formats cannot show.
pub fn unavailable(plan: &Plan) -> Vec<OmittedFormat> {
    FORMATS.par_iter().with_max_len(1).filter_map(|format| (format.unavailable)(plan)).collect()
}

/// The same as text, one line each.
pub fn unavailable_text(view: &str, found: &[OmittedFormat]) -> String {
    let mut text = String::new();
    let parent = if view.is_empty() { String::new() } else { format!("{view}/") };
    for OmittedFormat { format, omission, reason } in found {
        let what = match omission {
            Omission::Part => "partial",
            Omission::Absent | Omission::Empty => "not there",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{what:<10}  {parent}{format}/: {}", printable(reason));
    }
    text
}
