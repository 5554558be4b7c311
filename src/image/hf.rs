//! `hf/`: the repository itself, its files unchanged or with other tensors under a new header.

use std::sync::Arc;

use ckfs_checkpoint::Checkpoint;
use ckfs_plan::{HfContent, HfFile, Plan, Problem};
use ckfs_source::FileId;
use ckfs_tensor::View;

use super::{
    bundle::borrowed,
    file_image::ImageError,
    input::FormatInput,
    output::{
        DerivedFrom, Directory, FileContent, FormatFiles, LazyFile, Omission, OmittedFormat, OutputFormat, Shown,
        VirtualFile, text_file,
    },
    safetensors_layout::{self, safetensors},
};

/// See the module's documentation.
pub(super) const HF: OutputFormat = OutputFormat { name: "hf", unavailable, layout };

fn unavailable(plan: &Plan) -> Option<OmittedFormat> {
    let reason = plan.no_hf.clone()?;
    Some(OmittedFormat { format: HF.name, omission: Omission::Absent, reason })
}

fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut directory = Directory::default();
    for (number, HfFile { path, .. }) in input.plan.hf.iter().enumerate() {
        let added = file(input, number).and_then(|file| directory.add_at(HF.name, path, file, true));
        problems.extend(added.err());
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    Ok((directory, unavailable(&input.plan)))
}

/// The planned file with this number.
///
/// # Errors
/// The tensors cannot be laid out in a file.
pub(super) fn file(input: &Arc<FormatInput>, number: usize) -> Result<Shown, Problem> {
    let HfFile { path, content } = &input.plan.hf[number];
    Ok(Shown::File(match content {
        HfContent::Original(file) => return Ok(unchanged(input, *file)),
        HfContent::Text(rewritten) => return Ok(text(input, path, rewritten)),
        HfContent::Weights { tensors, metadata } => {
            let laid_out = lay_out(tensors, metadata);
            let image =
                laid_out.map_err(|error| Problem::File { file: format!("hf/{path}"), reason: error.to_string() })?;
            Arc::new(WeightsFile {
                input: Arc::clone(input),
                number,
                original: original(&input.checkpoint, path),
                len_bytes: image.len_bytes(),
            })
        }
    }))
}

/// A file of the source, unchanged.
pub(super) fn unchanged(input: &FormatInput, file: FileId) -> Shown {
    let len_bytes = input.checkpoint.source().len_bytes(file);
    let derived = DerivedFrom::Repository { file: Some(file), views: Vec::new(), all_tensors: false };
    Shown::File(Arc::new(LazyFile::new(move || FileContent::Original(file, len_bytes), derived)))
}

/// A text in place of the repository's own at a path.
pub(super) fn text(input: &FormatInput, path: &str, text: &[u8]) -> Shown {
    // The configuration is rewritten from the repository's one. An index names tensors.
    let file = original(&input.checkpoint, path);
    let all_tensors = file.is_none() || path.ends_with(".index.json");
    let derived = DerivedFrom::Repository { file, views: Vec::new(), all_tensors };
    Shown::File(Arc::new(text_file(text.into(), derived)))
}

/// The repository's own file at a path.
fn original(checkpoint: &Checkpoint, path: &str) -> Option<FileId> {
    checkpoint.files().iter().find(|file| file.path == path).and_then(|file| file.file)
}

fn lay_out(tensors: &[(String, View)], metadata: &[(String, String)]) -> Result<super::FileImage, ImageError> {
    let entries = tensors.iter().map(|(name, view)| safetensors_layout::NamedView { name, view: view.clone() });
    safetensors(entries.collect(), &borrowed(metadata))
}

/// A weight file with other tensors than the repository's.
struct WeightsFile {
    input: Arc<FormatInput>,
    number: usize,
    original: Option<FileId>,
    /// Length of the layout. The layout itself is not stored: it has a row for each tensor.
    len_bytes: u64,
}

/// Names and views, and the metadata of the header.
type Planned<'a> = (&'a [(String, View)], &'a [(String, String)]);

impl WeightsFile {
    fn planned(&self) -> Planned<'_> {
        match &self.input.plan.hf[self.number].content {
            HfContent::Weights { tensors, metadata } => (tensors, metadata),
            HfContent::Original(_) | HfContent::Text(_) => (&[], &[]),
        }
    }
}

impl VirtualFile for WeightsFile {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn content(&self) -> Result<FileContent, ImageError> {
        let (tensors, metadata) = self.planned();
        lay_out(tensors, metadata).map(FileContent::Image)
    }

    fn derived_from(&self) -> DerivedFrom {
        let views = self.planned().0.iter().map(|(_, view)| view.clone()).collect();
        DerivedFrom::Repository { file: self.original, views, all_tensors: false }
    }
}
