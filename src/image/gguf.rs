//! `gguf/`: the file of llama.cpp, in the layout of that name.

use std::sync::Arc;

use ckfs_format::gguf::gguf_padding;
use ckfs_plan::{GgufFile, Problem};

use super::{
    file_image::{FileImage, ImageError},
    input::FormatInput,
    output::{DerivedFrom, Directory, FileContent, FormatFiles, LazyFile, OutputFormat},
};

/// See the module's documentation.
pub(super) const GGUF: OutputFormat = OutputFormat { name: "gguf", unavailable: |_| None, layout };

fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    let Some(planned) = &input.plan.gguf else { return Ok(Default::default()) };
    let is_whole = planned.tensors.len() == input.plan.tensors.len()
        && planned.tensors.iter().all(|(name, _)| input.plan.find(name).is_some());
    let file = format!("{}/model.gguf", GGUF.name);
    let problem = |reason: String| vec![Problem::File { file: file.clone(), reason }];
    if !is_whole {
        return Err(problem("expected all tensors of the model: no --include or --exclude".to_owned()));
    }
    let image = lay_out(planned).map_err(|error| problem(error.to_string()))?;
    // The header has texts of files beside the weights.
    let model = LazyFile::new(move || FileContent::Image(image.clone()), DerivedFrom::Everything);
    Ok((Directory::with(GGUF.name, |directory| _ = directory.file("model.gguf", model)), None))
}

/// The header, then all tensors.
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
