//! `universal/`: a universal checkpoint of `DeepSpeed`, of a training state with ZeRO, as its converter `ds_to_universal` writes it, for
//! training by any number of ranks. The file `latest_universal` beside it names the directory, as the converter leaves it.

use std::{collections::HashMap, sync::Arc};

use ckfs_checkpoint::{ParameterFrame, UniversalFile};
use ckfs_plan::Problem;
use ckfs_tensor::{DType, Shape, SourceTensor, TensorId, View};

use super::{
    file_image::{FileImage, ImageError},
    hf::unchanged,
    input::FormatInput,
    output::{DerivedFrom, Directory, FileContent, FormatFiles, OutputFormat, Shown, VirtualFile, text_file},
    safetensors_layout::NamedView,
    torch_archive::{Root, archive_of_values, push_archive, push_pickled},
};

/// See the module's documentation.
pub(super) const UNIVERSAL: OutputFormat = OutputFormat { name: "universal", unavailable: |_| None, layout };

/// The file by which `DeepSpeed` finds the directory.
const LATEST: &str = "latest_universal";

fn layout(input: &Arc<FormatInput>) -> Result<FormatFiles, Vec<Problem>> {
    let (checkpoint, mut directory) = (&input.checkpoint, Directory::default());
    let files = &checkpoint.opened.contents.tree.universal;
    let view = |tensor: &ckfs_plan::PlannedTensor| (tensor.name.clone(), tensor.view.clone());
    let views: Arc<HashMap<String, View>> = Arc::new(input.plan.bundle().map(view).collect());
    let is_stored = |(name, view): (&String, &View)| {
        checkpoint.find(name).is_some_and(|id| checkpoint.tensor(id).dtype == view.dtype())
    };
    // Of other tensors than the stored ones the optimizer's state says nothing.
    if files.is_empty() || !input.is_whole() || !views.iter().all(is_stored) || checkpoint.averaged().is_some() {
        return Ok((directory, None));
    }
    for (path, file) in files {
        let entry = if let UniversalFile::Original(file) = file {
            unchanged(input, *file)
        } else {
            let (input, views, path) = (Arc::clone(input), Arc::clone(&views), path.clone());
            let file = ArchiveFile { input, views, path };
            file.image().map_err(|ImageError(reason)| vec![Problem::File { file: file.path.clone(), reason }])?;
            Shown::File(Arc::new(file))
        };
        directory.add_at(UNIVERSAL.name, path, entry, false).map_err(|problem| vec![problem])?;
    }
    directory.file(LATEST, text_file(UNIVERSAL.name.as_bytes().into(), DerivedFrom::Tensors));
    Ok((directory, None))
}

/// A file that `torch.save` would write.
struct ArchiveFile {
    input: Arc<FormatInput>,
    views: Arc<HashMap<String, View>>,
    path: String,
}

impl ArchiveFile {
    fn file(&self) -> &UniversalFile {
        &self.input.checkpoint.opened.contents.tree.universal[&self.path]
    }

    /// The view of a stored tensor that is not shown.
    fn unnamed(&self, id: TensorId) -> Result<View, ImageError> {
        let stored = self.input.checkpoint.tensor(id);
        Ok(View::source(SourceTensor { id, dtype: stored.dtype, shape: self.shape(stored.shape)? }))
    }

    fn shape(&self, extents: &[u64]) -> Result<Shape, ImageError> {
        Shape::try_new(extents).map_err(|error| self.fault(&error))
    }

    fn fault(&self, error: &dyn std::fmt::Display) -> ImageError {
        ImageError(format!("{}: {error}", self.path))
    }

    fn image(&self) -> Result<FileImage, ImageError> {
        let mut image = FileImage::default();
        let (view, root) = match self.file() {
            UniversalFile::Original(_) => return Err(self.fault(&"a file of the source")),
            UniversalFile::Parameter { tensor, frame } => {
                let view = self.views.get(tensor).ok_or_else(|| self.fault(&format_args!("no tensor {tensor:?}")))?;
                match frame {
                    ParameterFrame::Flat => (view.clone(), Root::Flat),
                    ParameterFrame::Split => (view.clone(), Root::Parameter(Some(0))),
                    ParameterFrame::Float32 => (self.float32(view)?, Root::Parameter(None)),
                }
            }
            UniversalFile::Unnamed(id) => (self.float32(&self.unnamed(*id)?)?, Root::Parameter(None)),
            UniversalFile::Values { shape, bytes } => {
                return archive_of_values(&Root::Parameter(None), &self.shape(shape)?, bytes);
            }
            UniversalFile::Pickled { pickle, storages } => {
                let views: Vec<View> = storages.iter().map(|(_, id)| self.unnamed(*id)).collect::<Result<_, _>>()?;
                let lens: Vec<_> = storages
                    .iter()
                    .zip(&views)
                    .map(|((key, _), view)| (key.as_str().into(), view.bytes().unwrap_or(0)))
                    .collect();
                let data = |image: &mut FileImage, number: usize| image.push_view(&self.path, views[number].clone());
                push_pickled(&mut image, pickle, &lens, &data)?;
                return Ok(image);
            }
        };
        push_archive(&mut image, &root, &[NamedView { name: &self.path, view }])?;
        Ok(image)
    }

    fn float32(&self, view: &View) -> Result<View, ImageError> {
        view.cast(DType::F32).map_err(|error| self.fault(&error))
    }
}

impl VirtualFile for ArchiveFile {
    fn len_bytes(&self) -> u64 {
        self.image().expect("the files were laid out when the volume was built").len_bytes()
    }

    fn content(&self) -> Result<FileContent, ImageError> {
        self.image().map(FileContent::Image)
    }

    fn derived_from(&self) -> DerivedFrom {
        let UniversalFile::Parameter { tensor, .. } = self.file() else { return DerivedFrom::Tensors };
        let views = self.views.get(tensor).cloned().into_iter().collect();
        DerivedFrom::Repository { file: None, views, all_tensors: false }
    }
}
