//! `gguf/`: the file of llama.cpp, in the layout of that name.

use std::sync::Arc;

use ckfs_format::gguf::gguf_padding;
use ckfs_plan::{GgufFile, Problem};

use super::{
    file_image::{FileImage, ImageError},
    input::FormatInput,
    output::{DerivedFrom, Directory, FileContent, FormatFiles, OutputFormat, VirtualFile},
};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct GgufFormat;

impl OutputFormat for GgufFormat {
    fn name(&self) -> &'static str {
        "gguf"
    }

    fn layout(&self, input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
        let Some(planned) = &input.plan.gguf else { return Ok(FormatFiles::default()) };
        let is_whole = planned.tensors.len() == input.plan.tensors.len()
            && planned.tensors.iter().all(|(name, _)| input.plan.find(name).is_some());
        let file = format!("{}/model.gguf", self.name());
        let problem = |reason: String| vec![Problem::File { file: file.clone(), reason }];
        if !is_whole {
            return Err(problem("expected all tensors of the model: no --include or --exclude".to_owned()));
        }
        let image = lay_out(planned).map_err(|error| problem(error.to_string()))?;
        let model = GgufModelFile { input: Arc::clone(input), len_bytes: image.len_bytes() };
        Ok(Directory::with(self.name(), |directory| _ = directory.file("model.gguf", model)).into())
    }
}

fn lay_out(file: &GgufFile) -> Result<FileImage, ImageError> {
    let mut image = FileImage::default();
    image.push_bytes(Arc::clone(&file.header));
    for (name, view) in &file.tensors {
        let start = image.len_bytes();
        image.push_view(name, view.clone())?;
        let padding = gguf_padding(image.len_bytes() - start);
        image.push_bytes(vec![0; ckfs_tensor::to_usize(padding)].into());
    }
    Ok(image)
}

/// The header, then all tensors.
struct GgufModelFile {
    input: Arc<FormatInput>,
    len_bytes: u64,
}

impl VirtualFile for GgufModelFile {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn content(&self) -> Result<FileContent, ImageError> {
        let planned =
            self.input.plan.gguf.as_ref().ok_or_else(|| ImageError("the plan has no such file".to_owned()))?;
        lay_out(planned).map(FileContent::Image)
    }

    /// The header has texts of files beside the weights.
    fn derived_from(&self) -> DerivedFrom {
        DerivedFrom::Everything
    }
}
