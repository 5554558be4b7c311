//! The files of a `torch.distributed.checkpoint` directory: segments, each an archive of one chunk.
//!
//! `dcp/.metadata`: a row for each chunk of each tensor, and one more for the chunk's segment, generated as they are read.
//!
//! Chunks of tensors of one kind have rows of equal length. Rows of segments differ in the segments' offsets, which always take
//! the same number of bytes. A segment's offset follows from the segments before it in the same file. Devices whose chunks have the
//! same shapes have their segments at the same offsets. So offsets are stored by class of devices, for every
//! [`STEP`]th tensor, and counted from there.

use std::{collections::HashMap, sync::Arc};

use ckfs_format::{
    dcp::write::{DcpSegment, Writer as DcpWriter},
    torch::write as torch,
};
use ckfs_plan::{Plan, PlannedTensor, TensorKinds};
use ckfs_tensor::{DType, Element, Region, Shape, View, to_usize};
use parking_lot::Mutex;

use super::{
    bundle::ShardClasses,
    file_image::{FileImage, ImageError},
    generated_records::{GeneratedRecords, byte_counter, starts},
    safetensors_layout::NamedView,
    torch_archive::{Root, alignment, data_bytes, push_archive},
};

/// Chunks, or files, in one block of rows.
const BLOCK: u64 = 256;

/// Segment offsets are stored for every tensor whose number is a multiple of this.
const STEP: usize = 64;

/// The file of what is no tensor: as a second one of the first rank.
pub(super) const OBJECTS: &str = "__0_1.distcp";

/// Most files in a directory.
const FILES_MAX: u64 = 1 << 16;

/// Most chunks that metadata describes: a reader takes about 1 KiB of memory for each.
const CHUNKS_MAX: u64 = 1 << 26;

/// Most shapes of chunks that are compared, over all kinds of tensors and all files.
const SHAPES_MAX: u64 = 1 << 24;

/// Chunks of a kind on the devices of one block.
#[derive(Clone, Copy, Debug)]
struct ChunkBlock {
    /// Number of the first chunk.
    first: u64,
    /// End of their rows in bytes, counted from the first row of the tensor's chunks.
    chunks_end: u64,
    /// End in bytes of the rows of their segments.
    segments_end: u64,
}

/// The metadata of a plan's bundle.
#[derive(Debug)]
pub(super) struct DcpMetadata {
    plan: Arc<Plan>,
    kinds: Arc<TensorKinds>,
    /// Indices of the bundled tensors.
    tensors: Vec<usize>,
    /// The devices that have a file, ascending.
    holders: Vec<u64>,
    writer: DcpWriter,
    starts: Vec<u64>,
    /// By kind; empty for kinds without a bundled tensor.
    blocks: Vec<Vec<ChunkBlock>>,
    classes: ShardClasses,
    /// Distinct shapes of chunks.
    shapes: Vec<Shape>,
    /// By kind and class, the shape of the chunk that devices of the class hold: 0 for none, else its index plus 1.
    shape_of: Vec<u32>,
    /// For every [`STEP`]th bundled tensor, and after the last one: by class, the end of the segments before it.
    ends: Vec<Vec<u64>>,
    /// What is no tensor: name, first byte in [`OBJECTS`] and length.
    objects: Vec<(String, u64, u64)>,
    cursor: Mutex<SegmentCursor>,
}

/// Position up to which segment offsets are counted: readers request one tensor after the other.
#[derive(Debug)]
struct SegmentCursor {
    /// The tensor after the last that was counted.
    next: usize,
    files: Segments,
    /// By class, first byte and length of the last one's segment.
    places: Arc<[(u64, u64)]>,
}

/// Checks that a plan's bundle can have metadata.
///
/// # Errors
/// The reason.
pub(super) fn fits(plan: &Plan, kinds: &TensorKinds) -> Result<(), String> {
    let remedy = "use a smaller mesh";
    let files = plan.bundle().map(|tensor| plan.holder_count(tensor)).max().unwrap_or(0);
    if files > FILES_MAX {
        return Err(format!(
            "{files} devices hold shards, a file for each; at most {FILES_MAX} files are possible: {remedy}"
        ));
    }
    let chunks = plan.bundle().map(|tensor| plan.holder_count(tensor)).fold(0, u64::saturating_add);
    if chunks > CHUNKS_MAX {
        return Err(format!("the tensors have {chunks} shards, at most {CHUNKS_MAX} can be described: {remedy}"));
    }
    let files = plan.first_holders().len() as u64;
    if files > FILES_MAX || files.saturating_mul(kinds.first.len() as u64) > SHAPES_MAX {
        let kinds = kinds.first.len();
        return Err(format!(
            "{files} devices hold shards of {kinds} kinds of tensors, at most {SHAPES_MAX} for both together are possible: \
             {remedy}"
        ));
    }
    Ok(())
}

/// Distinct shapes of the chunks on the first devices of classes, and by tensor and class the shape's index plus 1.
fn shapes<'a>(
    plan: &Plan,
    tensors: impl Iterator<Item = &'a PlannedTensor>,
    devices: &[u64],
) -> (Vec<Shape>, Vec<u32>) {
    let mut known: HashMap<Shape, u32> = HashMap::new();
    let (mut shapes, mut shape_of) = (Vec::new(), Vec::new());
    for tensor in tensors {
        shape_of.extend(devices.iter().map(|device| {
            let Some(region) = plan.own_region(tensor, *device) else { return 0 };
            *known.entry(region.shape().clone()).or_insert_with_key(|shape| {
                shapes.push(shape.clone());
                narrow(shapes.len() as u64)
            })
        }));
    }
    (shapes, shape_of)
}

fn narrow(number: u64) -> u32 {
    u32::try_from(number).expect("fewer than 2^32 files and tensors")
}

impl DcpMetadata {
    /// The metadata of a bundle that [`fits`] and has types of torch only.
    pub(super) fn new(plan: Arc<Plan>, kinds: Arc<TensorKinds>, objects: Vec<(String, u64, u64)>) -> Self {
        let bundled = |index: &usize| plan.is_bundled(&plan.tensors[*index]);
        let tensors: Vec<usize> = (0..plan.tensors.len()).filter(bundled).collect();
        let holders = plan.first_holders();
        let dtypes = plan.bundle().map(|tensor| tensor.view.dtype());
        let writer = DcpWriter::new(narrow(holders.len() as u64), dtypes).expect("types that torch lacks were refused");
        let mut used = vec![false; kinds.first.len()];
        for tensor in &tensors {
            used[kinds.of(*tensor)] = true;
        }
        let firsts = || kinds.first.iter().map(|first| &plan.tensors[*first]);
        let used_firsts = firsts().zip(&used).filter(|(_, used)| **used).map(|(first, _)| first);
        let classes = ShardClasses::new(&holders, used_firsts, |tensor, device| plan.own_region(tensor, device));
        let (shapes, shape_of) = shapes(&plan, firsts(), &classes.first);
        let cursor = SegmentCursor { next: usize::MAX, files: Segments::new(classes.first.len()), places: [].into() };
        let mut metadata = Self {
            tensors,
            holders,
            writer,
            starts: Vec::new(),
            blocks: Vec::new(),
            classes,
            shapes,
            shape_of,
            ends: Vec::new(),
            objects,
            cursor: Mutex::new(cursor),
            plan,
            kinds,
        };
        let blocks = used.iter().enumerate();
        metadata.blocks =
            blocks.map(|(kind, used)| if *used { metadata.kind_blocks(kind) } else { Vec::new() }).collect();
        metadata.ends = metadata.all_ends();
        metadata.starts = starts(metadata.lengths().into_iter());
        metadata
    }

    fn tensor(&self, number: usize) -> &PlannedTensor {
        &self.plan.tensors[self.tensors[number]]
    }

    fn blocks(&self, number: usize) -> &[ChunkBlock] {
        &self.blocks[self.kinds.of(self.tensors[number])]
    }

    /// Files of the devices in a block of a tensor's chunks, and the regions, without empty ones.
    fn chunks(&self, tensor: &PlannedTensor, block: u64) -> impl Iterator<Item = (u64, Region)> {
        let numbers = block * BLOCK..((block + 1) * BLOCK).min(self.plan.holder_count(tensor));
        let device = |number| self.plan.holder(tensor, number);
        let chunk = |device| {
            let region = torch::region(tensor.view.dtype(), &self.plan.own_region(tensor, device)?);
            Some((device, region.expect("shards that split an element of torch were refused")))
        };
        numbers.map(device).filter_map(chunk).collect::<Vec<_>>().into_iter()
    }

    fn kind_blocks(&self, kind: usize) -> Vec<ChunkBlock> {
        let first = &self.plan.tensors[self.kinds.first[kind]];
        let mut length = byte_counter();
        let (mut next, mut chunks_end, mut segments_end) = (0, 0, 0);
        let count = self.plan.holder_count(first).div_ceil(BLOCK);
        let block = |block| {
            let first_chunk = next;
            for (_, region) in self.chunks(first, block) {
                chunks_end += length(&|out| self.writer.chunk(&region, out));
                // The length is the same for every tensor, file and offset.
                let segment = DcpSegment { file: 0, offset: 0, len: 0 };
                segments_end += length(&|out| self.writer.segment(0, &region, next, segment, out));
                next += 1;
            }
            ChunkBlock { first: first_chunk, chunks_end, segments_end }
        };
        (0..count).map(block).collect()
    }

    /// Adds the segments of a tensor to files, one for each class of devices.
    fn add(&self, number: usize, files: &mut Segments) -> Arc<[(u64, u64)]> {
        let classes = self.classes.first.len();
        let dtype = self.tensor(number).view.dtype();
        let shapes = &self.shape_of[self.kinds.of(self.tensors[number]) * classes..][..classes];
        let add = |(class, shape): (usize, &u32)| {
            let shape = shape.checked_sub(1).map(|place| &self.shapes[place as usize]);
            shape.map_or((0, 0), |shape| files.add(class, dtype, shape))
        };
        shapes.iter().enumerate().map(add).collect()
    }

    fn all_ends(&self) -> Vec<Vec<u64>> {
        let mut files = Segments::new(self.classes.first.len());
        let mut ends = Vec::new();
        for number in 0..self.tensors.len() {
            if number.is_multiple_of(STEP) {
                ends.push(files.ends.clone());
            }
            self.add(number, &mut files);
        }
        ends.push(files.ends.clone());
        ends
    }

    /// By class, first byte and length of a tensor's segment.
    fn segments(&self, number: usize) -> Arc<[(u64, u64)]> {
        let mut cursor = self.cursor.lock();
        let SegmentCursor { next, files, places } = &mut *cursor;
        // If the tensor is before the cursor, or a later stored offset exists, counting starts from the stored one.
        let known = number / STEP * STEP;
        if number + 1 != *next && (number < *next || *next < known) {
            files.go_on(&self.ends[number / STEP]);
            *next = known;
        }
        while *next <= number {
            *places = self.add(*next, files);
            *next += 1;
        }
        Arc::clone(places)
    }

    /// Length of a device's file.
    pub(super) fn file_bytes(&self, device: u64) -> u64 {
        let place = self.place(device);
        self.ends.last().expect("the ends of all files are the last")[self.classes.of(place)]
    }

    fn place(&self, device: u64) -> usize {
        self.holders.binary_search(&device).expect("a device that is the first to hold a region has a file")
    }

    /// Groups before those of the tensors: the head, the blocks of files, and what is between these and the tensors.
    fn before_tensors(&self) -> usize {
        2 + self.holders.len().div_ceil(to_usize(BLOCK))
    }

    /// Lengths of all groups.
    fn lengths(&self) -> Vec<u64> {
        let mut count = byte_counter();
        let mut lengths: Vec<u64> =
            (0..self.before_tensors()).map(|group| count(&|out| self.before(group, out))).collect();
        let end = count(&|out| out.extend(&self.writer.end_tensor));
        lengths.extend((0..self.tensors.len()).map(|number| {
            let chunks = self.blocks(number).last().map_or(0, |block| block.chunks_end);
            count(&|out| self.description(number, out)) + chunks + end
        }));
        lengths.push(count(&|out| self.begin_segments(out)));
        let segments = |number| self.blocks(number).last().map_or(0, |block| block.segments_end);
        lengths.extend((0..self.tensors.len()).map(segments));
        lengths.push(count(&|out| self.end(out)));
        lengths
    }

    fn begin_segments(&self, out: &mut Vec<u8>) {
        self.objects.iter().for_each(|(name, ..)| self.writer.object(name, out));
        out.extend(&self.writer.begin_segments);
    }

    fn end(&self, out: &mut Vec<u8>) {
        for (name, start, len) in &self.objects {
            self.writer.object_segment(name, OBJECTS, (*start, *len), out);
        }
        out.extend(&self.writer.end);
    }

    fn before(&self, group: usize, out: &mut Vec<u8>) {
        let Some(block) = group.checked_sub(1) else { return out.extend(&self.writer.head) };
        if group + 1 == self.before_tensors() {
            return out.extend(&self.writer.begin);
        }
        let block_files = to_usize(BLOCK);
        for (number, device) in (0..).zip(&self.holders).skip(block * block_files).take(block_files) {
            self.writer.file(number, &distcp_name(*device), out);
        }
    }

    fn description(&self, number: usize, out: &mut Vec<u8>) {
        let tensor = self.tensor(number);
        let dtype = tensor.view.dtype();
        let shape =
            torch::shape(dtype, tensor.view.shape()).expect("shards that split an element of torch were refused");
        self.writer.tensor(narrow(number as u64), &tensor.name, dtype, &shape, out);
    }

    fn chunk_block(&self, number: usize, block: usize, out: &mut Vec<u8>) {
        for (_, region) in self.chunks(self.tensor(number), block as u64) {
            self.writer.chunk(&region, out);
        }
    }

    fn segment_block(&self, number: usize, block: usize, out: &mut Vec<u8>) {
        let places = self.segments(number);
        let first = self.blocks(number)[block].first;
        for (index, (device, region)) in (first..).zip(self.chunks(self.tensor(number), block as u64)) {
            let file = self.place(device);
            let (offset, len) = places[self.classes.of(file)];
            let segment = DcpSegment { file: narrow(file as u64), offset, len };
            self.writer.segment(narrow(number as u64), &region, index, segment, out);
        }
    }

    fn group(&self, group: usize) -> RowGroup {
        let count = self.tensors.len();
        match group.checked_sub(self.before_tensors()) {
            None => RowGroup::Before,
            Some(number) if number < count => RowGroup::Tensor(number),
            Some(number) if number == count => RowGroup::BeginSegments,
            Some(number) if number <= 2 * count => RowGroup::Segments(number - count - 1),
            Some(_) => RowGroup::End,
        }
    }
}

/// Type of a group of rows.
enum RowGroup {
    Before,
    /// A bundled tensor and its chunks.
    Tensor(usize),
    BeginSegments,
    /// The segments of a bundled tensor.
    Segments(usize),
    End,
}

impl GeneratedRecords for DcpMetadata {
    fn starts(&self) -> &[u64] {
        &self.starts
    }

    fn block_ends(&self, group: usize) -> Vec<u64> {
        let len = self.starts[group + 1] - self.starts[group];
        match self.group(group) {
            RowGroup::Before | RowGroup::BeginSegments | RowGroup::End => vec![len],
            RowGroup::Tensor(number) => {
                let mut description = Vec::new();
                self.description(number, &mut description);
                let before = description.len() as u64;
                let chunks = self.blocks(number).iter().map(|block| before + block.chunks_end);
                std::iter::once(before).chain(chunks).chain([len]).collect()
            }
            RowGroup::Segments(number) => self.blocks(number).iter().map(|block| block.segments_end).collect(),
        }
    }

    fn write(&self, group: usize, block: usize, out: &mut Vec<u8>) {
        match self.group(group) {
            RowGroup::Before => self.before(group, out),
            RowGroup::Tensor(number) if block == 0 => self.description(number, out),
            RowGroup::Tensor(number) if block > self.blocks(number).len() => out.extend(&self.writer.end_tensor),
            RowGroup::Tensor(number) => self.chunk_block(number, block - 1, out),
            RowGroup::BeginSegments => self.begin_segments(out),
            RowGroup::Segments(number) => self.segment_block(number, block, out),
            RowGroup::End => self.end(out),
        }
    }
}

/// The offsets of the segments in files of a `torch.distributed.checkpoint` directory; segments follow each other in a file.
#[derive(Clone, Debug)]
pub(super) struct Segments {
    /// Lengths of the files.
    pub(super) ends: Vec<u64>,
    /// Lengths of segments by type and shape. A model has many chunks, but of few shapes.
    lens: HashMap<(DType, Shape), u64>,
}

impl Segments {
    /// `files` files without segments.
    pub(super) fn new(files: usize) -> Self {
        Self { ends: vec![0; files], lens: HashMap::new() }
    }

    /// Continues after the segments that end at `ends`, by file.
    pub(super) fn go_on(&mut self, ends: &[u64]) {
        self.ends.clear();
        self.ends.extend_from_slice(ends);
    }

    /// Appends the segment of a chunk of this type and shape to a file; returns its first byte and its length.
    pub(super) fn add(&mut self, file: usize, dtype: DType, shape: &Shape) -> (u64, u64) {
        let start = self.ends[file].next_multiple_of(alignment(data_bytes(dtype, shape)));
        // That of zeros of the same type and shape.
        let len = || {
            let (mut image, view) = (FileImage::default(), View::fill(shape.clone(), Element::zero(dtype)));
            let pushed = push_archive(&mut image, &Root::Tensor, &[NamedView { name: "", view }]);
            pushed.expect("types that torch lacks were refused");
            image.len_bytes()
        };
        let len = *self.lens.entry((dtype, shape.clone())).or_insert_with(len);
        self.ends[file] = start + len;
        (start, len)
    }
}

/// A file of chunks, one segment each.
///
/// # Errors
/// Torch cannot hold a type.
///
/// # Panics
/// If an element type has no whole bytes: see [`super::torch_archive::torch_holds`].
pub(super) fn distcp<'a>(entries: impl Iterator<Item = NamedView<'a>>) -> Result<FileImage, ImageError> {
    let mut image = FileImage::default();
    let mut segments = Segments::new(1);
    for entry in entries {
        let end = segments.ends[0];
        let (start, _) = segments.add(0, entry.view.dtype(), entry.view.shape());
        let gap = usize::try_from(start - end).expect("less than a page");
        image.push_bytes(vec![0; gap].into());
        push_archive(&mut image, &Root::Tensor, &[entry])?;
    }
    Ok(image)
}

/// Name of the file of number `file` in a `torch.distributed.checkpoint` directory.
pub(super) fn distcp_name(file: u64) -> String {
    format!("__{file}_0.distcp")
}
