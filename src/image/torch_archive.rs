//! The archives that `torch.save` writes, laid out without reading any data: see [`ckfs_format::torch::write`] and
//! [`ckfs_format::zip::write`].

use std::{borrow::Cow, sync::Arc};

use ckfs_format::{
    pickle::write::Pickle,
    torch::write as torch,
    zip::write::{ZipWriter, crc32},
};
use ckfs_plan::{Plan, PlannedTensor};
use ckfs_tensor::{DType, Shape};

use super::{
    file_image::{FileImage, ImageError, Segment},
    safetensors_layout::NamedView,
};

/// Alignment of storages, as torch aligns them.
const ALIGNMENT: u64 = 64;
/// Alignment of large storages: a page.
const PAGE: u64 = 4096;
/// Storages of this size are large.
const LARGE_BYTES: u64 = 1 << 20;

pub(super) fn alignment(data_bytes: u64) -> u64 {
    if data_bytes < LARGE_BYTES { ALIGNMENT } else { PAGE }
}

/// The object in an archive's pickle.
pub(super) enum Root<'a> {
    /// The only tensor.
    Tensor,
    /// The only tensor, with one axis.
    Flat,
    /// The only tensor under "param", and before it the axis along which it was split, if it was.
    Parameter(Option<u64>),
    /// A dictionary of all tensors by name.
    Dictionary(&'a [&'a str]),
}

fn pickled(root: &Root<'_>, tensors: &[(DType, &Shape)]) -> Option<Vec<u8>> {
    let mut pickle = Pickle::new();
    match root {
        Root::Tensor => {
            for (dtype, shape) in tensors {
                torch::tensor(&mut pickle, 0, *dtype, shape)?;
            }
        }
        Root::Flat => {
            let (dtype, shape) = tensors[0];
            torch::tensor(&mut pickle, 0, dtype, &Shape::try_new(&[shape.elements()]).ok()?)?;
        }
        Root::Parameter(axis) => {
            let (dtype, shape) = tensors[0];
            pickle.ops(b"}");
            if let Some(axis) = axis {
                pickle.text("cat_dim");
                pickle.int(*axis);
                pickle.ops(b"s");
            }
            pickle.text("param");
            torch::tensor(&mut pickle, 0, dtype, shape)?;
            pickle.ops(b"s");
        }
        Root::Dictionary(names) => {
            pickle.ops(b"}");
            for (number, (name, (dtype, shape))) in names.iter().zip(tensors).enumerate() {
                pickle.text(name);
                torch::tensor(&mut pickle, number, *dtype, shape)?;
                pickle.ops(b"s");
            }
        }
    }
    Some(pickle.finish().0)
}

/// A storage of an archive: its key and its length in bytes.
type StorageLen<'a> = (Cow<'a, str>, u64);

fn storages<'a>(tensors: &[(DType, &Shape)]) -> Vec<StorageLen<'a>> {
    let storage =
        |(number, (dtype, shape)): (usize, &(DType, &Shape))| (number.to_string().into(), data_bytes(*dtype, shape));
    tensors.iter().enumerate().map(storage).collect()
}

/// Bytes of a tensor's elements.
pub(super) fn data_bytes(dtype: DType, shape: &Shape) -> u64 {
    dtype.bytes_of(shape.elements()).expect("a type of torch has whole bytes, and a plan's tensors fit 64 bits")
}

fn infallible(pickle: Option<Vec<u8>>) -> Vec<u8> {
    pickle.expect("types that torch lacks were refused")
}

/// Appends an archive of these tensors.
///
/// # Errors
/// Torch cannot hold a type.
pub(super) fn push_archive(
    image: &mut FileImage,
    root: &Root<'_>,
    entries: &[NamedView<'_>],
) -> Result<(), ImageError> {
    for NamedView { name, view } in entries {
        if !torch_holds(view.dtype()) || torch::shape(view.dtype(), view.shape()).is_none() {
            return Err(ImageError::unsupported(name, "torch", view.dtype()));
        }
    }
    let tensors: Vec<_> = entries.iter().map(|entry| (entry.view.dtype(), entry.view.shape())).collect();
    let data =
        |image: &mut FileImage, number: usize| image.push_view(entries[number].name, entries[number].view.clone());
    push_pickled(image, &infallible(pickled(root, &tensors)), &storages(&tensors), &data)
}

/// An archive of one tensor of float32, whose elements are these bytes.
pub(super) fn archive_of_values(root: &Root<'_>, shape: &Shape, bytes: &Arc<[u8]>) -> Result<FileImage, ImageError> {
    let (mut image, tensors) = (FileImage::default(), [(DType::F32, shape)]);
    let data = |image: &mut FileImage, _| {
        image.push_bytes(Arc::clone(bytes));
        Ok(())
    };
    push_pickled(&mut image, &infallible(pickled(root, &tensors)), &storages(&tensors), &data)?;
    Ok(image)
}

/// Appends an archive of a pickle with these storages, whose bytes `data` appends by number.
pub(super) fn push_pickled(
    image: &mut FileImage,
    pickle: &[u8],
    storages: &[StorageLen<'_>],
    data: &dyn Fn(&mut FileImage, usize) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    let mut zip = ZipWriter::default();
    // Neighbouring literal parts become one segment.
    let mut literal = Vec::new();
    let small = |zip: &mut ZipWriter, literal: &mut Vec<u8>, name: &str, bytes: &[u8]| {
        let name = format!("{}/{name}", torch::ROOT);
        literal.extend(zip.entry(&name, bytes.len() as u64, crc32(bytes), ALIGNMENT));
        literal.extend(bytes);
    };
    small(&mut zip, &mut literal, "data.pkl", pickle);
    small(&mut zip, &mut literal, "byteorder", b"little");
    for (number, (key, len)) in storages.iter().enumerate() {
        literal.extend(zip.entry(&format!("{}/data/{key}", torch::ROOT), *len, 0, alignment(*len)));
        image.push_bytes(std::mem::take(&mut literal).into());
        data(image, number)?;
    }
    small(&mut zip, &mut literal, "version", b"3\n");
    literal.extend(zip.finish());
    image.push_bytes(literal.into());
    Ok(())
}

/// Whether torch has this type.
pub(super) fn torch_holds(dtype: DType) -> bool {
    torch::dtype_name(dtype).is_some()
}

/// A `.pt` file of the dictionary `{"iteration": 0}`, which training frameworks store beside the tensors.
pub(super) fn common_pt() -> Arc<[u8]> {
    let mut pickle = Pickle::new();
    pickle.ops(b"}");
    pickle.text("iteration");
    pickle.int(0);
    pickle.ops(b"s");
    let mut image = FileImage::default();
    push_pickled(&mut image, &pickle.finish().0, &[], &|_, _| Ok(())).expect("there are no storages");
    let [Segment::Bytes(bytes)] = image.segments() else { unreachable!("an archive without storages is one literal") };
    Arc::clone(bytes)
}

/// Checks that torch has the types of all tensors.
///
/// # Errors
/// The first tensor of a type that torch lacks, or whose shards split an element of torch.
pub(super) fn fits(plan: &Plan) -> Result<(), String> {
    if let Some(tensor) = plan.bundle().find(|tensor| !torch_holds(tensor.view.dtype())) {
        return Err(format!("{}: torch has no type {}", tensor.name, tensor.view.dtype()));
    }
    let is_odd = |tensor: &&PlannedTensor| {
        let dtype = tensor.view.dtype();
        let holders = (0..plan.holder_count(tensor)).map(|number| plan.holder(tensor, number));
        dtype == DType::F4
            && holders
                .filter_map(|device| plan.own_region(tensor, device))
                .any(|region| torch::region(dtype, &region).is_none())
    };
    plan.bundle().find(is_odd).map_or(Ok(()), |tensor| {
        Err(format!(
            "{}: torch has two {} in one element, and a row has an odd number",
            tensor.name,
            tensor.view.dtype()
        ))
    })
}
