//! The builder of a table whose tensors are stored as boxes: parts of files, each with an origin, extents and strides.
//!
//! A dialect that knows such tensors adds them one by one ([`MosaicBuilder::add`]). Every fault of every tensor becomes a problem:
//! boxes that are outside the tensor or the file, that overlap, or that leave elements without a box. A tensor that is one
//! box in row-major order becomes a plain row; it costs no more than one of a safetensors file.

use ckfs_format::torch::read::SavedTensor;
use ckfs_source::{ByteSpan, FileId, Source};
use ckfs_tensor::{CoverFault, DType, Element, Mosaics, NewBox, PerAxis, Shape, TensorId, cover, mosaic};

use super::{
    problem::{BYTES_MAX, Problem, Problems},
    table::{BoxPlace, NewRow, RowPlace, TensorTable},
};

/// Most boxes that one repeated element becomes. Torch stores a tensor that repeats itself along an axis once.
const REPEATED_MAX: u64 = 1 << 16;

/// A box of a tensor: where it is in the tensor, and where in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredBox {
    /// The file.
    pub(super) file: FileId,
    /// First byte of the first element.
    pub(super) start: u64,
    /// First element in the tensor, along each axis.
    pub(super) origin: PerAxis,
    /// Extents. A box with an extent of 0 is passed over.
    pub(super) extents: PerAxis,
    /// Distance of neighbours along each axis in the file, in elements. 0 repeats an element.
    pub(super) strides: PerAxis,
}

impl StoredBox {
    /// The box of a whole tensor with these strides.
    pub(super) fn whole(file: FileId, start: u64, shape: &[u64], strides: &[u64]) -> Self {
        let origin = PerAxis::from_elem(0, shape.len());
        Self { file, start, origin, extents: PerAxis::from_slice(shape), strides: PerAxis::from_slice(strides) }
    }

    /// The box that a tensor is that is alone saved in a file.
    pub(super) fn saved(file: FileId, saved: &SavedTensor) -> Self {
        Self::whole(file, saved.span().start, &saved.tensor.shape, &saved.tensor.strides)
    }

    /// A box whose elements are stored in row-major order.
    pub(super) fn row_major(file: FileId, start: u64, origin: &[u64], extents: &[u64]) -> Self {
        let (origin, strides) = (PerAxis::from_slice(origin), mosaic::row_major(extents));
        Self { file, start, origin, extents: PerAxis::from_slice(extents), strides }
    }

    /// The same with `len` indices of an axis from `first` on, which are those of the tensor from `origin` on.
    pub(super) fn run(mut self, axis: usize, (first, len): (u64, u64), origin: u64, element_bytes: u64) -> Self {
        // Inside the tensor, whose last byte fits 64 bits.
        self.start += first * self.strides[axis] * element_bytes;
        (self.origin[axis], self.extents[axis]) = (origin, len);
        self
    }

    /// The same with one stride for axes on which there is nothing to stride over, so that equal boxes are equal values.
    fn normalized(mut self) -> Self {
        let row_major = mosaic::row_major(&self.extents);
        for axis in 0..self.strides.len() {
            if self.extents[axis] == 1 {
                self.strides[axis] = row_major[axis];
            }
        }
        self
    }

    /// The boxes without repetition that this one stands for, or the number of them if there are too many.
    fn unrepeated(self, found: &mut Vec<Self>) -> Result<(), u64> {
        let repeats = |axis: &usize| self.strides[*axis] == 0 && self.extents[*axis] > 1;
        let Some(axis) = (0..self.strides.len()).find(repeats) else {
            found.push(self.normalized());
            return Ok(());
        };
        let count = self.extents[axis];
        if count.saturating_mul(found.len() as u64 + 1) > REPEATED_MAX {
            return Err(count);
        }
        for index in 0..count {
            let mut one = self.clone();
            one.origin[axis] += index;
            one.extents[axis] = 1;
            one.strides[axis] = 1;
            one.unrepeated(found)?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Entry {
    name: String,
    dtype: DType,
    shape: Shape,
    place: RowPlace,
    /// Where its first byte is.
    start: u64,
}

/// See the module's documentation.
pub(super) struct MosaicBuilder<'a> {
    source: &'a dyn Source,
    entries: Vec<Entry>,
    mosaics: Mosaics,
    /// By box. The row is the number of the mosaic until the rows are in order.
    places: Vec<BoxPlace>,
    problems: &'a mut Problems,
}

impl<'a> MosaicBuilder<'a> {
    /// A builder of a table over these files.
    pub(super) fn new(source: &'a dyn Source, problems: &'a mut Problems) -> Self {
        Self { source, entries: Vec::new(), mosaics: Mosaics::default(), places: Vec::new(), problems }
    }

    /// Where problems go that the caller finds.
    pub(super) fn problems(&mut self) -> &mut Problems {
        self.problems
    }

    /// Adds a tensor. Its faults become problems, also elements that are in no box where there is no `fill` for them.
    pub(super) fn add(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[u64],
        boxes: impl IntoIterator<Item = StoredBox>,
        fill: Option<Element>,
    ) {
        if let Err(faults) = self.try_add(name, dtype, shape, boxes, fill) {
            self.problems.extend(faults.iter().map(|fault| Problem::of_shape(name, dtype, shape, fault)));
        }
    }

    fn try_add(
        &mut self,
        name: &str,
        dtype: DType,
        extents: &[u64],
        boxes: impl IntoIterator<Item = StoredBox>,
        fill: Option<Element>,
    ) -> Result<(), Vec<String>> {
        let shape = Shape::try_new(extents).map_err(|error| vec![error.to_string()])?;
        let mut stored = Vec::new();
        let mut faults = Vec::new();
        for part in boxes.into_iter().filter(|part| !part.extents.contains(&0)) {
            let ranks = [part.origin.len(), part.extents.len(), part.strides.len()];
            if ranks != [shape.rank(); 3] {
                faults.push(format!("expected boxes of {} axes, found one of {}", shape.rank(), part.extents.len()));
                continue;
            }
            if let Err(count) = part.unrepeated(&mut stored) {
                faults
                    .push(format!("expected an element that is repeated at most {REPEATED_MAX} times, found {count}"));
            }
        }
        faults.extend(stored.iter().filter_map(|part| self.fault_in_file(dtype, part)));
        if !faults.is_empty() {
            return Err(faults);
        }
        let (place, start) = self.place(&shape, dtype, &stored, fill)?;
        self.entries.push(Entry { name: name.to_owned(), dtype, shape, place, start });
        Ok(())
    }

    /// Why a box is not in its file.
    fn fault_in_file(&self, dtype: DType, part: &StoredBox) -> Option<String> {
        let elements = mosaic::stored_elements(&part.extents, &part.strides);
        let bits = elements.checked_mul(dtype.bits());
        let end = bits.and_then(|bits| part.start.checked_add(bits.div_ceil(8)));
        let len_bytes = self.source.len_bytes(part.file);
        if end.is_some_and(|end| end <= len_bytes) {
            return None;
        }
        let (region, start) = (cover::region_text(&part.origin, &part.extents), part.start);
        let file = self.source.path(part.file).display();
        Some(format!("the box {region} is at byte {start} of {file}, and leaves its {len_bytes} bytes"))
    }

    /// Where a tensor is, and its first byte.
    fn place(
        &mut self,
        shape: &Shape,
        dtype: DType,
        stored: &[StoredBox],
        fill: Option<Element>,
    ) -> Result<(RowPlace, u64), Vec<String>> {
        let first = stored.first();
        let (file, start) = first.map_or((FileId(0), 0), |part| (part.file, part.start));
        let span = |len| ByteSpan::of_len(start, len).expect("a box is inside its file, as was checked");
        if shape.is_empty() && stored.is_empty() {
            return Ok((RowPlace::Span(file, span(0)), start));
        }
        if let [only] = stored
            && only.extents.as_slice() == shape.extents()
            && only.strides == mosaic::row_major(&only.extents)
            && only.origin.iter().all(|origin| *origin == 0)
        {
            let len = (shape.elements() * dtype.bits()).div_ceil(8);
            return Ok((RowPlace::Span(file, span(len)), start));
        }
        let boxes: Vec<NewBox> = stored.iter().map(new_box).collect();
        let number = self.mosaics.push(shape.clone(), dtype, fill, &boxes);
        let number =
            number.map_err(|faults| faults.iter().map(|fault| self.fault(stored, fault)).collect::<Vec<_>>())?;
        self.places.extend(stored.iter().map(|part| BoxPlace { start: part.start, file: part.file, row: number }));
        Ok((RowPlace::Mosaic(file, number), start))
    }

    fn fault(&self, stored: &[StoredBox], fault: &CoverFault) -> String {
        let described = |index: &usize| {
            let part = &stored[*index];
            let file = self.source.path(part.file).display();
            format!("{} of {file}", cover::region_text(&part.origin, &part.extents))
        };
        match fault {
            CoverFault::Outside(index) => format!("the box {} is outside the tensor", described(index)),
            CoverFault::Overlap(first, second) => {
                format!("the boxes {} and {} overlap", described(first), described(second))
            }
            CoverFault::Missing(..) | CoverFault::Intricate => fault.to_string(),
        }
    }

    /// The table of all tensors, in the order of their first bytes.
    pub(super) fn finish(mut self) -> TensorTable {
        self.entries.sort_by(|left, right| {
            let key = |entry: &Entry| (entry.place.file(), entry.start);
            key(left).cmp(&key(right)).then_with(|| left.name.cmp(&right.name))
        });
        let mut row_of = vec![0; self.mosaics.len()];
        for (row, entry) in (0..).zip(&self.entries) {
            if let RowPlace::Mosaic(_, number) = entry.place {
                row_of[number as usize] = row;
            }
        }
        self.places.iter_mut().for_each(|place| place.row = row_of[place.row as usize]);
        self.places.shrink_to_fit();
        // Tensors may share bytes, or have none, so that the size of the files says nothing of theirs.
        let bytes = self.entries.iter().map(|entry| (entry.shape.elements() * entry.dtype.bits()).div_ceil(8));
        if bytes.fold(0, u64::saturating_add) > BYTES_MAX {
            self.problems.push(Problem::TooManyBytes);
        }
        let rows = self.entries.iter().map(|entry| NewRow {
            name: &entry.name,
            dtype: entry.dtype,
            shape: entry.shape.extents(),
            place: entry.place,
        });
        let table = TensorTable::new(rows).and_then(|table| table.with_mosaics(self.mosaics, self.places));
        let table = self.problems.or_too_large(table);
        find_duplicates(&table, self.source, self.problems);
        table
    }
}

fn new_box(part: &StoredBox) -> NewBox {
    NewBox { origin: part.origin.clone(), extents: part.extents.clone(), strides: part.strides.clone() }
}

/// Two tensors of one name.
fn find_duplicates(table: &TensorTable, source: &dyn Source, problems: &mut Problems) {
    let file = |id: TensorId| table.tensor(id).first_file();
    let file = |id| file(id).map_or_else(String::new, |file| source.path(file).display().to_string());
    problems.extend(table.repeated().map(|ids| {
        let [first, second] = ids.map(file);
        Problem::Duplicate { tensor: table.tensor(ids[0]).name.to_owned(), first, second }
    }));
}
