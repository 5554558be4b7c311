//! Files of torch: `.pt` archives, and directories of `torch.distributed.checkpoint`.
//!
//! Both are made of the archives that `torch.save` writes, laid out without reading any data: see [`crate::format::torch`]
//! and [`crate::format::zip`].

use std::{collections::HashMap, io};

use super::{FileImage, ImageError, safetensors::Entry};
pub use crate::format::dcp::{Segment as DcpSegment, Writer as DcpWriter};
use crate::{
    format::{
        pickle::Pickle,
        torch,
        zip::{ZipWriter, crc32},
    },
    tensor::{DType, Shape},
};

/// Alignment of storages, as torch aligns them.
const ALIGNMENT: u64 = 64;
/// Alignment of large storages: a page.
const PAGE: u64 = 4096;
/// Storages of this size are large.
const LARGE_BYTES: u64 = 1 << 20;

fn alignment(data_bytes: u64) -> u64 {
    if data_bytes < LARGE_BYTES { ALIGNMENT } else { PAGE }
}

/// A part of an archive.
enum Part {
    Bytes(Vec<u8>),
    /// The elements of the tensor of this number.
    Data(usize),
}

/// What an archive's pickle is.
enum Root<'a> {
    /// The only tensor.
    Tensor,
    /// A dictionary of all tensors by name.
    Dictionary(&'a [&'a str]),
}

fn pickled(root: &Root<'_>, tensors: &[(DType, &Shape)]) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut pickle = Pickle::new(&mut bytes)?;
    match root {
        Root::Tensor => {
            for (dtype, shape) in tensors {
                torch::tensor(&mut pickle, 0, *dtype, shape)?;
            }
        }
        Root::Dictionary(names) => {
            pickle.empty_dict()?;
            for (number, (name, (dtype, shape))) in names.iter().zip(tensors).enumerate() {
                pickle.text(name)?;
                torch::tensor(&mut pickle, number, *dtype, shape)?;
                pickle.set_item()?;
            }
        }
    }
    pickle.stop()?;
    Ok(bytes)
}

/// Lays out an archive and hands its parts over in order. `checksum` gives those of literal bytes.
fn archive(pickle: &[u8], tensors: &[(DType, &Shape)], checksum: fn(&[u8]) -> u32, each: &mut dyn FnMut(Part)) {
    let mut zip = ZipWriter::default();
    for (name, bytes) in [("data.pkl", pickle), ("byteorder", b"little".as_slice())] {
        each(Part::Bytes(zip.entry(
            &format!("{}/{name}", torch::ROOT),
            bytes.len() as u64,
            checksum(bytes),
            ALIGNMENT,
        )));
        each(Part::Bytes(bytes.to_vec()));
    }
    for (number, (dtype, shape)) in tensors.iter().enumerate() {
        let len = data_bytes(*dtype, shape);
        each(Part::Bytes(zip.entry(&format!("{}/data/{number}", torch::ROOT), len, 0, alignment(len))));
        each(Part::Data(number));
    }
    let version = b"3\n".as_slice();
    each(Part::Bytes(zip.entry(
        &format!("{}/version", torch::ROOT),
        version.len() as u64,
        checksum(version),
        ALIGNMENT,
    )));
    each(Part::Bytes([version, &zip.finish()].concat()));
}

/// Bytes of a tensor's elements.
fn data_bytes(dtype: DType, shape: &Shape) -> u64 {
    dtype.bytes_of(shape.elements()).expect("a type of torch has whole bytes, and a plan's tensors fit 64 bits")
}

fn infallible(pickle: io::Result<Vec<u8>>) -> Vec<u8> {
    pickle.expect("memory takes all bytes, no name has 4 GiB, and types that torch has not were refused")
}

fn archive_len(root: &Root<'_>, tensors: &[(DType, &Shape)]) -> u64 {
    let mut len = 0;
    // Checksums are as long whatever they are.
    archive(&infallible(pickled(root, tensors)), tensors, |_| 0, &mut |part| {
        len += match part {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Data(number) => data_bytes(tensors[number].0, tensors[number].1),
        };
    });
    len
}

fn push_archive(image: &mut FileImage, root: &Root<'_>, entries: &[Entry<'_>]) -> Result<(), ImageError> {
    for Entry { name, view } in entries {
        if torch::dtype_name(view.dtype()).is_none() {
            return Err(ImageError::Unsupported { name: (*name).to_owned(), dtype: view.dtype(), format: "torch" });
        }
    }
    let tensors: Vec<_> = entries.iter().map(|entry| (entry.view.dtype(), entry.view.shape())).collect();
    let mut result = Ok(());
    // Neighbouring literal parts become one segment.
    let mut literal = Vec::new();
    archive(&infallible(pickled(root, &tensors)), &tensors, crc32, &mut |part| match part {
        Part::Bytes(bytes) => literal.extend(bytes),
        Part::Data(number) => {
            image.push_bytes(std::mem::take(&mut literal).into());
            let entry = &entries[number];
            if let Err(error) = image.push_view(entry.name, entry.view.clone()) {
                result = Err(error);
            }
        }
    });
    image.push_bytes(literal.into());
    result
}

/// Whether torch has a type.
pub fn torch_holds(dtype: DType) -> bool {
    torch::dtype_name(dtype).is_some()
}

/// A `.pt` file: a dictionary of these tensors by name.
///
/// # Errors
/// [`ImageError::Unsupported`].
pub fn pt(entries: &[Entry<'_>]) -> Result<FileImage, ImageError> {
    let names: Vec<_> = entries.iter().map(|entry| entry.name).collect();
    let mut image = FileImage::default();
    push_archive(&mut image, &Root::Dictionary(&names), entries)?;
    Ok(image)
}

/// Length of the file that [`pt`] lays out.
pub fn pt_len(entries: &[Entry<'_>]) -> u64 {
    let names: Vec<_> = entries.iter().map(|entry| entry.name).collect();
    let tensors: Vec<_> = entries.iter().map(|entry| (entry.view.dtype(), entry.view.shape())).collect();
    archive_len(&Root::Dictionary(&names), &tensors)
}

/// A `.pt` file of the dictionary `{"iteration": 0}`: what training frameworks keep beside the tensors.
pub fn common_pt() -> Vec<u8> {
    let pickle = || {
        let mut bytes = Vec::new();
        let mut pickle = Pickle::new(&mut bytes)?;
        pickle.empty_dict()?;
        pickle.text("iteration")?;
        pickle.int(0)?;
        pickle.set_item()?;
        pickle.stop()?;
        io::Result::Ok(bytes)
    };
    let mut file = Vec::new();
    archive(&infallible(pickle()), &[], crc32, &mut |part| {
        if let Part::Bytes(bytes) = part {
            file.extend(bytes);
        }
    });
    file
}

/// Where the segments of files of a `torch.distributed.checkpoint` directory are: in each file one after the other.
#[derive(Clone, Debug)]
pub struct Segments {
    ends: Vec<u64>,
    /// Lengths of segments. A model has many chunks, but of few shapes.
    lens: HashMap<(DType, Shape), u64>,
}

impl Segments {
    /// So many files without segments.
    pub fn new(files: usize) -> Self {
        Self { ends: vec![0; files], lens: HashMap::new() }
    }

    /// Goes on after segments that end there, by file.
    pub fn go_on(&mut self, ends: &[u64]) {
        self.ends.clear();
        self.ends.extend_from_slice(ends);
    }

    /// Adds the segment of a chunk of this type and shape to a file: its first byte and its length.
    pub fn add(&mut self, file: usize, dtype: DType, shape: &Shape) -> (u64, u64) {
        let start = self.ends[file].next_multiple_of(alignment(data_bytes(dtype, shape)));
        let len = || archive_len(&Root::Tensor, &[(dtype, shape)]);
        let len = *self.lens.entry((dtype, shape.clone())).or_insert_with(len);
        self.ends[file] = start + len;
        (start, len)
    }

    /// Lengths of the files.
    pub fn ends(&self) -> &[u64] {
        &self.ends
    }
}

/// A file of chunks, one segment each.
///
/// # Errors
/// [`ImageError::Unsupported`].
///
/// # Panics
/// If an element type has no whole bytes: see [`torch_holds`].
pub fn distcp<'a>(entries: impl Iterator<Item = Entry<'a>>) -> Result<FileImage, ImageError> {
    let mut image = FileImage::default();
    let mut segments = Segments::new(1);
    for entry in entries {
        let end = segments.ends()[0];
        let (start, _) = segments.add(0, entry.view.dtype(), entry.view.shape());
        let gap = usize::try_from(start - end).expect("less than a page");
        image.push_bytes(vec![0; gap].into());
        push_archive(&mut image, &Root::Tensor, &[entry])?;
    }
    Ok(image)
}

/// Name of the file of number `file` in a `torch.distributed.checkpoint` directory.
pub fn distcp_name(file: u64) -> String {
    format!("__{file}_0.distcp")
}

/// The file that tells Megatron-Core how the directory is to be read.
pub const MEGATRON_METADATA: &str = "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1, \
                                     \"common_backend\": \"torch\", \"common_backend_version\": 1}";
