//! Files of torch: `.pt` archives, and directories of `torch.distributed.checkpoint`.
//!
//! Both are made of the archives that `torch.save` writes, laid out without reading any data: see [`crate::format::torch`]
//! and [`crate::format::zip`].

use std::{
    collections::HashMap,
    io::{self, Write},
};

use super::{FileImage, ImageError, safetensors::Entry};
use crate::{
    format::{
        dcp,
        pickle::Pickle,
        torch,
        zip::{ZipWriter, crc32},
    },
    tensor::{DType, Region, Shape},
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

/// Counts bytes and drops them.
#[derive(Default)]
struct Length(u64);

impl Write for Length {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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

/// Lays out an archive and hands its parts over in order.
fn archive(pickle: &[u8], tensors: &[(DType, &Shape)], each: &mut dyn FnMut(Part)) {
    let mut zip = ZipWriter::default();
    for (name, bytes) in [("data.pkl", pickle), ("byteorder", b"little".as_slice())] {
        each(Part::Bytes(zip.entry(&format!("{}/{name}", torch::ROOT), bytes.len() as u64, crc32(bytes), ALIGNMENT)));
        each(Part::Bytes(bytes.to_vec()));
    }
    for (number, (dtype, shape)) in tensors.iter().enumerate() {
        let len = dtype.bytes_of(shape.elements()).unwrap_or(0);
        each(Part::Bytes(zip.entry(&format!("{}/data/{number}", torch::ROOT), len, 0, alignment(len))));
        each(Part::Data(number));
    }
    let version = b"3\n".as_slice();
    each(Part::Bytes(zip.entry(&format!("{}/version", torch::ROOT), version.len() as u64, crc32(version), ALIGNMENT)));
    each(Part::Bytes([version, &zip.finish()].concat()));
}

/// The pickle, which fails only for names of 4 GiB, far beyond what any plan holds.
fn infallible(pickle: io::Result<Vec<u8>>) -> Vec<u8> {
    pickle.unwrap_or_default()
}

fn archive_len(root: &Root<'_>, tensors: &[(DType, &Shape)]) -> u64 {
    let mut len = 0;
    archive(&infallible(pickled(root, tensors)), tensors, &mut |part| {
        len += match part {
            Part::Bytes(bytes) => bytes.len() as u64,
            Part::Data(number) => tensors[number].0.bytes_of(tensors[number].1.elements()).unwrap_or(0),
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
    archive(&infallible(pickled(root, &tensors)), &tensors, &mut |part| match part {
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
    archive(&infallible(pickle()), &[], &mut |part| {
        if let Part::Bytes(bytes) = part {
            file.extend(bytes);
        }
    });
    file
}

/// Where the segments of the files of a `torch.distributed.checkpoint` directory are.
#[derive(Clone, Debug)]
pub struct Segments {
    ends: Vec<u64>,
    /// Lengths of segments. A model has many chunks, but of few shapes.
    lens: HashMap<(DType, Shape), u64>,
}

impl Segments {
    /// So many files without segments.
    pub fn new(files: u64) -> Self {
        Self { ends: vec![0; usize::try_from(files).unwrap_or(0)], lens: HashMap::new() }
    }

    /// Adds the segment of a chunk of this type and shape to a file: its first byte and its length.
    pub fn add(&mut self, file: usize, dtype: DType, shape: &Shape) -> (u64, u64) {
        let start = self.ends[file].next_multiple_of(alignment(dtype.bytes_of(shape.elements()).unwrap_or(0)));
        let len = || archive_len(&Root::Tensor, &[(dtype, shape)]);
        let len = *self.lens.entry((dtype, shape.clone())).or_insert_with(len);
        self.ends[file] = start + len;
        (start, len)
    }

    /// Length of a file.
    pub fn len_bytes(&self, file: usize) -> u64 {
        self.ends[file]
    }
}

/// A file of chunks, one segment each.
///
/// # Errors
/// [`ImageError::Unsupported`].
pub fn distcp<'a>(entries: impl Iterator<Item = Entry<'a>>) -> Result<FileImage, ImageError> {
    let mut image = FileImage::default();
    let mut segments = Segments::new(1);
    for entry in entries {
        let gap = segments.len_bytes(0);
        let (start, _) = segments.add(0, entry.view.dtype(), entry.view.shape());
        image.push_bytes(vec![0; usize::try_from(start - gap).unwrap_or(0)].into());
        push_archive(&mut image, &Root::Tensor, &[entry])?;
    }
    Ok(image)
}

/// A tensor of a `torch.distributed.checkpoint` directory.
#[derive(Clone, Debug)]
pub struct Chunked<'a> {
    /// Its name.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Shape of the whole.
    pub shape: &'a Shape,
    /// Number of each chunk's file, and its region; none is empty, no two overlap.
    pub chunks: Vec<(u64, Region)>,
}

/// Name of the file of number `file` in a `torch.distributed.checkpoint` directory.
pub fn distcp_name(file: u64) -> String {
    format!("__{file}_0.distcp")
}

/// Writes the `.metadata` of files in which every chunk's segment follows those of the tensors before.
///
/// # Errors
/// What `out` fails with.
pub fn dcp_metadata<'a>(
    tensors: impl Iterator<Item = Chunked<'a>> + Clone,
    files: u64,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut pickle = Pickle::new(out)?;
    dcp::begin(&mut pickle)?;
    for tensor in tensors.clone() {
        let chunks = tensor.chunks.into_iter().map(|(_, region)| region);
        dcp::tensor(&mut pickle, tensor.name, tensor.dtype, tensor.shape, chunks)?;
    }
    dcp::begin_segments(&mut pickle)?;
    let mut segments = Segments::new(files);
    for tensor in tensors {
        for ((file, region), index) in tensor.chunks.iter().zip(0..) {
            let (offset, len) = segments.add(usize::try_from(*file).unwrap_or(0), tensor.dtype, region.shape());
            let name = distcp_name(*file);
            dcp::segment(&mut pickle, tensor.name, region, index, dcp::Segment { file: &name, offset, len })?;
        }
    }
    dcp::end(&mut pickle)
}

/// Length of what [`dcp_metadata`] writes.
pub fn dcp_metadata_len<'a>(tensors: impl Iterator<Item = Chunked<'a>> + Clone, files: u64) -> u64 {
    let mut len = Length::default();
    // Counting cannot fail.
    let _ = dcp_metadata(tensors, files, &mut len);
    len.0
}

/// The file that tells Megatron-Core how the directory is to be read.
pub const MEGATRON_METADATA: &str = "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1, \
                                     \"common_backend\": \"torch\", \"common_backend_version\": 1}";
