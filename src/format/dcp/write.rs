//! The `.metadata` file of a `torch.distributed.checkpoint` directory.
//!
//! A pickle of `Metadata`: per tensor its type, size and chunks, and per chunk the segment of a file that holds it. Each
//! segment is a separate archive, as `torch.save` writes it of the chunk's tensor.
//!
//! ```text
//! head, files, begin, { tensor, { chunk }, end_tensor }, { object }, begin_segments, { segment }, { object_segment }, end
//! ```
//!
//! A large model on many devices has millions of chunks, so that the file is generated in parts. The bytes of each call of
//! [`Writer`] follow from its arguments alone, and a segment's length is the same wherever the segment is: all words
//! are memoized in the head, names of files and tensors have slots by their numbers, and places have one width.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use ckfs_tensor::{DType, Region, Shape};

use super::super::{
    pickle::write::{Memo, Pickle, push_get, push_int, push_ints, push_pop, push_put, push_text, push_wide_int},
    torch::write as torch,
};

const METADATA: &str = "torch.distributed.checkpoint.metadata";
const FILESYSTEM: &str = "torch.distributed.checkpoint.filesystem";

/// All globals but the element types.
const GLOBALS: [(&str, &str); 10] = [
    (METADATA, "Metadata"),
    (METADATA, "TensorStorageMetadata"),
    (METADATA, "TensorProperties"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "_MEM_FORMAT_ENCODING"),
    (FILESYSTEM, "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (METADATA, "BytesStorageMetadata"),
];

/// All words.
const WORDS: [&str; 16] = [
    "state_dict_metadata",
    "planner_data",
    "storage_data",
    "storage_meta",
    "version",
    "properties",
    "size",
    "chunks",
    "offsets",
    "sizes",
    "fqn",
    "offset",
    "index",
    "relative_path",
    "length",
    "torch.strided",
];

/// Where a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DcpSegment {
    /// Number of its file.
    pub file: u32,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// What stands between the numbers of rows.
#[derive(Clone, Debug, Default)]
struct Parts {
    begin: Vec<u8>,
    tensor: BTreeMap<DType, Vec<u8>>,
    tensor_chunks: Vec<u8>,
    chunk: [Vec<u8>; 3],
    end_tensor: Vec<u8>,
    begin_segments: Vec<u8>,
    segment: [Vec<u8>; 7],
    object: Vec<u8>,
    object_segment: Vec<u8>,
    end: Vec<u8>,
}

/// Writes the parts of the metadata.
#[derive(Clone, Debug)]
pub struct Writer {
    head: Vec<u8>,
    parts: Parts,
    /// Slot of the name of file 0.
    first_file: u32,
    /// Slot of the name of tensor 0.
    first_tensor: u32,
}

/// A part of the pickle, made by `write` after the head.
fn part(memo: &Memo, write: impl FnOnce(&mut Pickle<'_>) -> io::Result<()>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut pickle = Pickle::resume(&mut bytes, memo.clone());
    write(&mut pickle).expect("memory takes all bytes, and no word has 4 GiB");
    debug_assert_eq!(pickle.memo().next_slot(), memo.next_slot(), "the head has all words");
    bytes
}

/// Ends a `torch.Size` whose tuple of extents is on top, and puts it where it belongs.
fn end_size(pickle: &mut Pickle<'_>) -> io::Result<()> {
    pickle.tuple1()?;
    pickle.call()?;
    pickle.set_item()
}

fn begin_size(pickle: &mut Pickle<'_>, member: &str) -> io::Result<()> {
    pickle.word(member)?;
    pickle.global("torch", "Size")
}

/// What describes a tensor, from after its name to its extents.
fn properties(pickle: &mut Pickle<'_>, dtype: &str) -> io::Result<()> {
    pickle.object(METADATA, "TensorStorageMetadata")?;
    pickle.empty_dict()?;
    pickle.word("properties")?;
    pickle.object(METADATA, "TensorProperties")?;
    // Type, layout, no gradient, memory format, not pinned: five members, which old and new versions read.
    pickle.mark()?;
    pickle.global("torch", dtype)?;
    pickle.global("torch.serialization", "_get_layout")?;
    pickle.word("torch.strided")?;
    pickle.tuple1()?;
    pickle.call()?;
    pickle.no()?;
    pickle.global(METADATA, "_MEM_FORMAT_ENCODING")?;
    pickle.int(0)?;
    pickle.tuple1()?;
    pickle.call()?;
    pickle.no()?;
    pickle.tuple()?;
    pickle.build()?;
    pickle.set_item()?;
    begin_size(pickle, "size")
}

/// After the name of what is no tensor: neither a place in a tensor nor the number of a chunk.
fn no_chunk(pickle: &mut Pickle<'_>) -> io::Result<()> {
    ["offset", "index"].iter().try_for_each(|member| {
        pickle.set_item()?;
        pickle.word(member)?;
        pickle.none()
    })
}

impl Parts {
    fn new(memo: &Memo, dtypes: &BTreeMap<DType, &'static str>) -> Self {
        let part = |write: &dyn Fn(&mut Pickle<'_>) -> io::Result<()>| part(memo, write);
        Self {
            begin: part(&|pickle| {
                pickle.object(METADATA, "Metadata")?;
                pickle.empty_dict()?;
                pickle.word("state_dict_metadata")?;
                pickle.empty_dict()
            }),
            tensor: dtypes.iter().map(|(dtype, name)| (*dtype, part(&|pickle| properties(pickle, name)))).collect(),
            tensor_chunks: part(&|pickle| {
                end_size(pickle)?;
                pickle.word("chunks")?;
                pickle.empty_list()
            }),
            chunk: [
                part(&|pickle| {
                    pickle.object(METADATA, "ChunkStorageMetadata")?;
                    pickle.empty_dict()?;
                    begin_size(pickle, "offsets")
                }),
                part(&|pickle| {
                    end_size(pickle)?;
                    begin_size(pickle, "sizes")
                }),
                part(&|pickle| {
                    end_size(pickle)?;
                    pickle.build()?;
                    pickle.append()
                }),
            ],
            end_tensor: part(&|pickle| {
                pickle.set_item()?;
                pickle.build()?;
                pickle.set_item()
            }),
            begin_segments: part(&|pickle| {
                pickle.set_item()?;
                pickle.word("planner_data")?;
                pickle.none()?;
                pickle.set_item()?;
                pickle.word("storage_data")?;
                pickle.empty_dict()
            }),
            segment: [
                part(&|pickle| {
                    pickle.object(METADATA, "MetadataIndex")?;
                    pickle.empty_dict()?;
                    pickle.word("fqn")
                }),
                part(&|pickle| {
                    pickle.set_item()?;
                    begin_size(pickle, "offset")
                }),
                part(&|pickle| {
                    end_size(pickle)?;
                    pickle.word("index")
                }),
                part(&|pickle| {
                    pickle.set_item()?;
                    pickle.build()?;
                    pickle.object(FILESYSTEM, "_StorageInfo")?;
                    pickle.empty_dict()?;
                    pickle.word("relative_path")
                }),
                part(&|pickle| {
                    pickle.set_item()?;
                    pickle.word("offset")
                }),
                part(&|pickle| {
                    pickle.set_item()?;
                    pickle.word("length")
                }),
                part(&|pickle| {
                    pickle.set_item()?;
                    pickle.build()?;
                    pickle.set_item()
                }),
            ],
            object: part(&|pickle| {
                pickle.object(METADATA, "BytesStorageMetadata")?;
                pickle.set_item()
            }),
            object_segment: part(&no_chunk),
            end: part(&|pickle| {
                pickle.set_item()?;
                for name in ["storage_meta", "version"] {
                    pickle.word(name)?;
                    pickle.none()?;
                    pickle.set_item()?;
                }
                pickle.build()?;
                pickle.stop()
            }),
        }
    }
}

impl Writer {
    /// A writer for `files` files and tensors of these types, or the first type that torch has not.
    ///
    /// # Errors
    /// The type that torch has not.
    ///
    /// # Panics
    /// Never: memory takes all bytes.
    pub fn new(files: u32, dtypes: impl IntoIterator<Item = DType>) -> Result<Self, DType> {
        let named = |dtype: DType| torch::dtype_name(dtype).map(|name| (dtype, name)).ok_or(dtype);
        let dtypes: BTreeMap<DType, &str> = dtypes.into_iter().map(named).collect::<Result<_, _>>()?;
        let names: BTreeSet<&str> = dtypes.values().copied().collect();
        let mut head = Vec::new();
        let words = || {
            let mut pickle = Pickle::new(&mut head)?;
            for (module, name) in GLOBALS {
                pickle.remember(|pickle| pickle.global(module, name))?;
            }
            for name in names {
                pickle.remember(|pickle| pickle.global("torch", name))?;
            }
            for word in WORDS {
                pickle.remember(|pickle| pickle.word(word))?;
            }
            io::Result::Ok(pickle.memo())
        };
        let memo = words().expect("memory takes all bytes");
        let first_file = memo.next_slot();
        Ok(Self { head, parts: Parts::new(&memo, &dtypes), first_file, first_tensor: first_file + files })
    }

    /// Appends what stands before everything else.
    pub fn head(&self, out: &mut Vec<u8>) {
        out.extend(&self.head);
    }

    /// Appends the name of a file.
    pub fn file(&self, number: u32, name: &str, out: &mut Vec<u8>) {
        push_text(out, name);
        push_put(out, self.first_file + number);
        push_pop(out);
    }

    /// Appends the start of the tensors.
    pub fn begin(&self, out: &mut Vec<u8>) {
        out.extend(&self.parts.begin);
    }

    /// Appends the description of a tensor: what follows are its chunks.
    ///
    /// # Panics
    /// If the type is none of the writer's.
    pub fn tensor(&self, number: u32, name: &str, dtype: DType, shape: &Shape, out: &mut Vec<u8>) {
        push_text(out, name);
        push_put(out, self.first_tensor + number);
        out.extend(&self.parts.tensor[&dtype]);
        push_ints(out, shape.extents());
        out.extend(&self.parts.tensor_chunks);
    }

    /// Appends a chunk of a tensor.
    pub fn chunk(&self, chunk: &Region, out: &mut Vec<u8>) {
        let [begin, sizes, end] = &self.parts.chunk;
        out.extend(begin);
        push_ints(out, chunk.origin());
        out.extend(sizes);
        push_ints(out, chunk.shape().extents());
        out.extend(end);
    }

    /// Appends the end of a tensor's chunks.
    pub fn end_tensor(&self, out: &mut Vec<u8>) {
        out.extend(&self.parts.end_tensor);
    }

    /// Appends the start of the segments.
    pub fn begin_segments(&self, out: &mut Vec<u8>) {
        out.extend(&self.parts.begin_segments);
    }

    /// Appends where chunk number `index` of tensor number `tensor` is.
    pub fn segment(&self, tensor: u32, chunk: &Region, index: u64, segment: DcpSegment, out: &mut Vec<u8>) {
        let [begin, offset, number, path, start, length, end] = &self.parts.segment;
        out.extend(begin);
        push_get(out, self.first_tensor + tensor);
        out.extend(offset);
        push_ints(out, chunk.origin());
        out.extend(number);
        push_int(out, index);
        out.extend(path);
        push_get(out, self.first_file + segment.file);
        out.extend(start);
        push_wide_int(out, segment.offset);
        out.extend(length);
        push_wide_int(out, segment.len);
        out.extend(end);
    }

    /// Appends the description of what is no tensor, after the tensors.
    pub fn object(&self, name: &str, out: &mut Vec<u8>) {
        push_text(out, name);
        out.extend(&self.parts.object);
    }

    /// Appends where it is, after the segments of the tensors.
    pub fn object_segment(&self, name: &str, path: &str, (offset, len): (u64, u64), out: &mut Vec<u8>) {
        let [begin, _, _, before_path, start, length, end] = &self.parts.segment;
        out.extend(begin);
        push_text(out, name);
        out.extend(&self.parts.object_segment);
        out.extend(before_path);
        push_text(out, path);
        out.extend(start);
        push_wide_int(out, offset);
        out.extend(length);
        push_wide_int(out, len);
        out.extend(end);
    }

    /// Appends the end of the file.
    pub fn end(&self, out: &mut Vec<u8>) {
        out.extend(&self.parts.end);
    }
}
