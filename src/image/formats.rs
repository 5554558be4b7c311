//! The list of output formats, and what all of them together show of a view.

use std::{fmt::Write, sync::Arc};

use rayon::prelude::*;

use super::{
    dcp::Dcp,
    hf::Hf,
    input::FormatInput,
    manifest::ManifestFormat,
    npy::Npy,
    orbax::Orbax,
    output::{Directory, Lack, MadeOf, OutputFormat, TextFile, Unavailable},
    pt::Pt,
    raw::RawFormat,
    safetensors::Safetensors,
    sharded_state::ShardedState,
};
use crate::{
    checkpoint::printable,
    plan::{Plan, Problem},
};

/// All output formats, in the order in which they are told of.
pub const FORMATS: [&dyn OutputFormat; 9] =
    [&RawFormat, &Npy, &Safetensors, &Pt, &Dcp, &Orbax, &Hf, &ShardedState, &ManifestFormat];

/// Name of the file that says why a format's directory is otherwise empty.
const UNAVAILABLE: &str = "UNAVAILABLE.txt";

/// What all formats show of a view, and what they cannot show.
///
/// # Errors
/// All problems of all formats.
pub fn show(input: &Arc<FormatInput>) -> Result<(Directory, Vec<Unavailable>), Vec<Problem>> {
    let shown: Vec<_> = FORMATS.par_iter().map(|format| format.show(input)).collect();
    let (mut all, mut lacking, mut problems) = (Directory::default(), Vec::new(), Vec::new());
    let mut is_refused = false;
    for result in shown {
        match result {
            Ok(mut shown) => {
                if let Some(found) = shown.unavailable {
                    explain(&mut shown.directory, &found);
                    lacking.push(found);
                }
                if let Err(name) = all.merge(shown.directory) {
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

/// Puts into the directory of a format that cannot hold the view why it is empty: no loader takes it for a checkpoint.
fn explain(directory: &mut Directory, Unavailable { format, lack, reason }: &Unavailable) {
    if *lack != Lack::Empty {
        return;
    }
    let reason = printable(reason);
    tracing::warn!("{format}/ is not available: {reason}");
    let text = format!("{format}/ is not available for this view: {reason}\n");
    if let Some(empty) = directory.directory(format) {
        empty.file(UNAVAILABLE, TextFile::new(text.into_bytes(), MadeOf::Everything));
    }
}

/// What the formats cannot show of a plan's view.
pub fn unavailable(plan: &Plan) -> Vec<Unavailable> {
    FORMATS.iter().filter_map(|format| format.unavailable(plan)).collect()
}

/// The same for a reader, a line each.
pub fn unavailable_text(view: &str, found: &[Unavailable]) -> String {
    let mut text = String::new();
    let parent = if view.is_empty() { String::new() } else { format!("{view}/") };
    for Unavailable { format, lack, reason } in found {
        let what = match lack {
            Lack::Part => "partial",
            Lack::Absent | Lack::Empty => "not there",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{what:<10}  {parent}{format}/: {}", printable(reason));
    }
    text
}
