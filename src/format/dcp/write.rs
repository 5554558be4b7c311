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

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ckfs_tensor::{DType, Region, Shape};

use super::super::{
    pickle::write::{push_get, push_int, push_ints, push_put, push_text, push_wide_int},
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

/// All other words.
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

/// What the words of a part stand for that are not of the head.
const OPCODES: [(&str, &[u8]); 14] = [
    ("new", b")\x81"),
    ("{}", b"}"),
    ("[]", b"]"),
    ("(", b"("),
    (")", b"t"),
    ("(one)", b"\x85"),
    ("call", b"R"),
    ("build", b"b"),
    ("set", b"s"),
    ("append", b"a"),
    ("None", b"N"),
    ("False", b"\x89"),
    ("0", b"K\0"),
    ("end", b"."),
];

/// Writes the parts of the metadata. Its parts stand between the numbers of rows.
#[derive(Clone, Debug)]
pub struct Writer {
    /// What stands before everything else.
    pub head: Vec<u8>,
    /// The start of the tensors.
    pub begin: Vec<u8>,
    tensor: BTreeMap<DType, Vec<u8>>,
    tensor_chunks: Vec<u8>,
    chunk: [Vec<u8>; 3],
    /// The end of a tensor's chunks.
    pub end_tensor: Vec<u8>,
    /// The start of the segments.
    pub begin_segments: Vec<u8>,
    segment: [Vec<u8>; 7],
    object: Vec<u8>,
    object_segment: Vec<u8>,
    /// The end of the file.
    pub end: Vec<u8>,
    /// Slot of the name of file 0.
    first_file: u32,
    /// Slot of the name of tensor 0.
    first_tensor: u32,
}

impl Writer {
    /// A writer for `files` files and tensors of these types, or the first type that torch has not.
    ///
    /// # Errors
    /// The type that torch has not.
    ///
    /// # Panics
    /// Never: the head has a few dozen words, all that parts consist of.
    pub fn new(files: u32, dtypes: impl IntoIterator<Item = DType>) -> Result<Self, DType> {
        let named = |dtype: DType| torch::dtype_name(dtype).map(|name| (dtype, name)).ok_or(dtype);
        let dtypes: BTreeMap<DType, &str> = dtypes.into_iter().map(named).collect::<Result<_, _>>()?;
        let names: BTreeSet<&str> = dtypes.values().copied().collect();
        let (mut head, mut slots) = (b"\x80\x02".to_vec(), HashMap::new());
        let globals = GLOBALS.into_iter().chain(names.into_iter().map(|name| ("torch", name)));
        for (module, word) in globals.chain(WORDS.map(|word| ("", word))) {
            if module.is_empty() {
                push_text(&mut head, word);
            } else {
                head.extend(format!("c{module}\n{word}\n").bytes());
            }
            let slot = u8::try_from(slots.len()).expect("the head has a few dozen words");
            head.extend([b'q', slot, b'0']);
            slots.insert(word, slot);
        }
        let part = |text: &str| -> Vec<u8> {
            let mut bytes = Vec::new();
            for word in text.split(' ') {
                match OPCODES.iter().find(|(name, _)| *name == word) {
                    Some((_, opcodes)) => bytes.extend(*opcodes),
                    None => bytes.extend([b'h', slots[word]]),
                }
            }
            bytes
        };
        // Type, layout, no gradient, memory format, not pinned: five members, which old and new versions read.
        let tensor = |name: &str| {
            part(&format!(
                "TensorStorageMetadata new {{}} properties TensorProperties new ( {name} _get_layout torch.strided (one) call \
                 False _MEM_FORMAT_ENCODING 0 (one) call False ) build set size Size"
            ))
        };
        let first_file = u32::try_from(slots.len()).expect("the head has a few dozen words");
        Ok(Self {
            begin: part("Metadata new {} state_dict_metadata {}"),
            tensor: dtypes.iter().map(|(dtype, name)| (*dtype, tensor(name))).collect(),
            tensor_chunks: part("(one) call set chunks []"),
            chunk: [
                "ChunkStorageMetadata new {} offsets Size",
                "(one) call set sizes Size",
                "(one) call set build append",
            ]
            .map(part),
            end_tensor: part("set build set"),
            begin_segments: part("set planner_data None set storage_data {}"),
            segment: [
                "MetadataIndex new {} fqn",
                "set offset Size",
                "(one) call set index",
                "set build _StorageInfo new {} relative_path",
                "set offset",
                "set length",
                "set build set",
            ]
            .map(part),
            object: part("BytesStorageMetadata new set"),
            // Instead of the offsets and the number of a chunk.
            object_segment: part("set offset None set index None"),
            end: part("set storage_meta None set version None set build end"),
            head,
            first_file,
            first_tensor: first_file + files,
        })
    }

    /// Appends the name of a file.
    pub fn file(&self, number: u32, name: &str, out: &mut Vec<u8>) {
        push_text(out, name);
        push_put(out, self.first_file + number);
        out.push(b'0');
    }

    /// Appends the description of a tensor: what follows are its chunks.
    ///
    /// # Panics
    /// If the type is none of the writer's.
    pub fn tensor(&self, number: u32, name: &str, dtype: DType, shape: &Shape, out: &mut Vec<u8>) {
        push_text(out, name);
        push_put(out, self.first_tensor + number);
        out.extend(&self.tensor[&dtype]);
        push_ints(out, shape.extents());
        out.extend(&self.tensor_chunks);
    }

    /// Appends a chunk of a tensor.
    pub fn chunk(&self, chunk: &Region, out: &mut Vec<u8>) {
        let [begin, sizes, end] = &self.chunk;
        out.extend(begin);
        push_ints(out, chunk.origin());
        out.extend(sizes);
        push_ints(out, chunk.shape().extents());
        out.extend(end);
    }

    /// Appends where chunk number `index` of tensor number `tensor` is.
    pub fn segment(&self, tensor: u32, chunk: &Region, index: u64, segment: DcpSegment, out: &mut Vec<u8>) {
        let [begin, offset, number, path, start, length, end] = &self.segment;
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
        out.extend(&self.object);
    }

    /// Appends where it is, after the segments of the tensors.
    pub fn object_segment(&self, name: &str, path: &str, (offset, len): (u64, u64), out: &mut Vec<u8>) {
        let [begin, _, _, before_path, start, length, end] = &self.segment;
        out.extend(begin);
        push_text(out, name);
        out.extend(&self.object_segment);
        out.extend(before_path);
        push_text(out, path);
        out.extend(start);
        push_wide_int(out, offset);
        out.extend(length);
        push_wide_int(out, len);
        out.extend(end);
    }
}
