//! The tensor table: the tensors of a checkpoint, and how each is stored.
//!
//! Stored tensors are numbered by file, in the order of weight files and then adapters, and within a file by the
//! position of their bytes. A tensor that is stored as boxes ([`MosaicTensor`]) stands where its first box is. After them come the boxes,
//! which have ids and bytes but are never shown, then the tensors that are decoded from quantized ones, and then those that are made
//! of others ([`Composed`]), which only tables for layouts have. Every table of a repository has all other rows, so that a number means the same tensor in each table. Tables differ in the *shown*
//! rows: the stored tensors, or decoded ones in the place of their codes, or a part of either under other names. A
//! repository may have 150 000 tensors, so the table is a few flat arrays: about 120 bytes per tensor, names included.

use std::{borrow::Cow, sync::Arc};

use ckfs_source::{ByteSpan, FileId};
use ckfs_tensor::{DType, Mosaics, Shape, SourceTensor, TensorId, View, ViewError};
use rayon::slice::ParallelSliceMut;

use super::{
    composed::Composed,
    scheme::{Found, Quantized},
};

/// How a tensor is stored.
#[derive(Clone, Copy, Debug)]
pub enum Storage<'a> {
    /// Its elements one after the other, little-endian and row-major, in one span of one file.
    Plain {
        /// The file.
        file: FileId,
        /// Where in that file.
        span: ByteSpan,
    },
    /// As codes and operands that decode them. All of these are other stored tensors.
    Quantized(&'a Quantized),
    /// As boxes that cover it. Each is a tensor of its own id, which is never shown.
    Mosaic(MosaicTensor<'a>),
    /// As a part of another tensor.
    Composed(&'a Composed),
}

/// A tensor that is stored as boxes.
#[derive(Clone, Copy, Debug)]
pub struct MosaicTensor<'a> {
    all: &'a Arc<Mosaics>,
    number: u32,
    id: TensorId,
    /// The file of its first box, or the first file if it has none.
    pub(super) file: FileId,
}

impl MosaicTensor<'_> {
    /// The tensor as views hold it.
    pub fn of_view(&self) -> ckfs_tensor::Mosaic {
        ckfs_tensor::Mosaic::new(Arc::clone(self.all), self.number, self.id)
    }

    /// The ids of its boxes.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = TensorId> {
        self.all.boxes_of(self.number).map(|part| part.tensor)
    }
}

/// One tensor of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct TensorInfo<'a> {
    /// Its name: as in the file's header, as decoded, or as renamed.
    pub name: &'a str,
    /// Type of its elements. For a quantized tensor, the type to which it is decoded by default.
    pub dtype: DType,
    /// Extents in elements, row-major; empty for a scalar.
    pub shape: &'a [u64],
    /// Where and how it is stored.
    pub storage: Storage<'a>,
}

impl<'a> TensorInfo<'a> {
    /// The file that holds the bytes of a stored tensor.
    ///
    /// # Panics
    /// If the tensor is made of others or stored as boxes: views read stored tensors and boxes only.
    pub fn file(&self) -> FileId {
        self.plain().0
    }

    fn plain(&self) -> (FileId, ByteSpan) {
        self.stored().unwrap_or_else(|| panic!("{} has no bytes of its own", self.name))
    }

    /// Where its bytes are, if it has some of its own in one span.
    pub(super) const fn stored(&self) -> Option<(FileId, ByteSpan)> {
        if let Storage::Plain { file, span } = self.storage { Some((file, span)) } else { None }
    }

    /// The file of the first byte of a tensor that is not decoded from others.
    pub(super) const fn first_file(&self) -> Option<FileId> {
        match self.storage {
            Storage::Plain { file, .. } => Some(file),
            Storage::Mosaic(mosaic) => Some(mosaic.file),
            Storage::Quantized(_) | Storage::Composed(_) => None,
        }
    }

    /// The span of a stored tensor in its file.
    ///
    /// # Panics
    /// If the tensor is made of others or stored as boxes: views read stored tensors and boxes only.
    pub fn span(&self) -> ByteSpan {
        self.plain().1
    }

    /// The elements as they are stored, of a tensor of this number that is not made of others.
    ///
    /// # Errors
    /// The shape is too large.
    pub fn stored_view(&self, id: TensorId) -> Result<View, ViewError> {
        if let Some(mosaic) = self.mosaic() {
            return Ok(View::mosaic(mosaic.of_view()));
        }
        self.source(id).map(View::source)
    }

    /// The same as an operand of codes, of a tensor that is not stored as boxes.
    ///
    /// # Errors
    /// The shape is too large.
    pub fn source(&self, id: TensorId) -> Result<SourceTensor, ViewError> {
        Ok(SourceTensor { id, dtype: self.dtype, shape: Shape::try_new(self.shape)? })
    }

    /// How it is decoded, if it is.
    pub fn quantized(&self) -> Option<&'a Quantized> {
        if let Storage::Quantized(quantized) = self.storage { Some(quantized) } else { None }
    }

    /// Its boxes, if it is stored as boxes.
    pub fn mosaic(&self) -> Option<MosaicTensor<'a>> {
        if let Storage::Mosaic(mosaic) = self.storage { Some(mosaic) } else { None }
    }

    /// Bytes of all elements. A last byte that sub-byte types fill only in part counts whole.
    pub fn bytes(&self) -> u64 {
        match self.storage {
            Storage::Plain { span, .. } => span.len(),
            Storage::Quantized(_) | Storage::Mosaic(_) | Storage::Composed(_) => {
                (self.shape.iter().product::<u64>() * self.dtype.bits()).div_ceil(8)
            }
        }
    }
}

/// Immutable table of tensors.
#[derive(Clone, Debug, Default)]
pub struct TensorTable {
    /// One row for each stored tensor, and after them one for each shown decoded tensor. Of the latter, only the end of
    /// the name is meaningful.
    rows: Vec<StoredRow>,
    /// The tensors that are stored as boxes. The boxes have the ids after those of the stored tensors.
    mosaics: Arc<Mosaics>,
    /// By box: where it is.
    boxes: Arc<Vec<BoxPlace>>,
    /// The tensors after the boxes.
    quantized: Arc<Found>,
    /// The tensors after those.
    composed: Arc<Vec<Composed>>,
    /// Number of stored tensors.
    stored: u32,
    /// All names, one after the other in row order.
    names: String,
    /// All extents of stored tensors, likewise.
    extents: Vec<u64>,
    /// Ids in lexical order of name.
    by_name: Vec<u32>,
    /// Ids of the tensors that are shown, in order; `None` if all stored ones are.
    shown: Option<Vec<u32>>,
}

#[derive(Clone, Copy, Debug)]
struct StoredRow {
    place: RowPlace,
    name_end: u32,
    extents_end: u32,
    dtype: DType,
}

/// Where a row's elements are.
#[derive(Clone, Copy, Debug)]
pub(super) enum RowPlace {
    /// In this span of a file.
    Span(FileId, ByteSpan),
    /// In the boxes of the mosaic of this number, the first of which is in this file.
    Mosaic(FileId, u32),
}

/// Where the first element of a box is.
#[derive(Clone, Copy, Debug)]
pub(super) struct BoxPlace {
    /// First byte.
    pub(super) start: u64,
    /// The file.
    pub(super) file: FileId,
    /// The row of its tensor.
    pub(super) row: u32,
}

/// A stored tensor that is to be in a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewRow<'a> {
    /// Its name.
    pub(super) name: &'a str,
    /// Type of its elements.
    pub(super) dtype: DType,
    /// Its extents.
    pub(super) shape: &'a [u64],
    /// Where it is.
    pub(super) place: RowPlace,
}

/// What an id stands for.
enum Id {
    /// A row of this number.
    Row(usize),
    /// A box of this number.
    Box(usize),
}

impl RowPlace {
    /// The file of its first byte.
    pub(super) const fn file(self) -> FileId {
        match self {
            Self::Span(file, _) | Self::Mosaic(file, _) => file,
        }
    }
}

impl TensorTable {
    /// The tensors of these rows, numbered in this order. `None` if a number does not fit 32 bits, as with more than 4
    /// GiB of names.
    pub(super) fn new<'a>(rows: impl Iterator<Item = NewRow<'a>>) -> Option<Self> {
        let mut table = Self::default();
        table.push_rows(rows)?;
        table.by_name = (0..table.stored).collect();
        table.sort();
        Some(table)
    }

    fn push_rows<'a>(&mut self, rows: impl Iterator<Item = NewRow<'a>>) -> Option<()> {
        for row in rows {
            self.names.push_str(row.name);
            self.extents.extend_from_slice(row.shape);
            self.rows.push(StoredRow {
                place: row.place,
                name_end: u32::try_from(self.names.len()).ok()?,
                extents_end: u32::try_from(self.extents.len()).ok()?,
                dtype: row.dtype,
            });
        }
        self.rows.shrink_to_fit();
        self.names.shrink_to_fit();
        self.extents.shrink_to_fit();
        self.stored = u32::try_from(self.rows.len()).ok()?;
        Some(())
    }

    /// This table, whose rows refer to these mosaics, with the places of their boxes.
    pub(super) fn with_mosaics(mut self, mosaics: Mosaics, boxes: Vec<BoxPlace>) -> Option<Self> {
        debug_assert_eq!(mosaics.boxes(), boxes.len(), "each box has a place");
        self.mosaics = Arc::new(mosaics.numbered_from(TensorId(self.stored)));
        self.boxes = Arc::new(boxes);
        u32::try_from(self.id_end()).ok()?;
        Some(self)
    }

    /// Sorted by row as well, so that repeated names have a fixed order.
    fn sort(&mut self) {
        let mut named: Vec<(&str, u32)> = self.by_name.iter().map(|row| (self.name(*row), *row)).collect();
        named.par_sort_unstable();
        self.by_name = named.into_iter().map(|(_, row)| row).collect();
    }

    /// This table, which must have no decoded tensors yet, with more stored tensors that are not shown. The ids of its boxes change.
    /// `None` if a number does not fit 32 bits.
    pub(super) fn with_hidden_rows<'a>(mut self, more: impl Iterator<Item = NewRow<'a>>) -> Option<Self> {
        self.shown.get_or_insert_with(|| (0..self.stored).collect());
        self.push_rows(more)?;
        let mosaics = Arc::unwrap_or_clone(std::mem::take(&mut self.mosaics));
        self.mosaics = Arc::new(mosaics.numbered_from(TensorId(self.stored)));
        Some(self)
    }

    /// This table, likewise with the stored tensors of another, whose files have other ids here. Its tensor 0 is then the one after all
    /// of this table's.
    pub(super) fn with_hidden_table(mut self, other: &Self, file: &dyn Fn(FileId) -> FileId) -> Option<Self> {
        let (first, tensors) = (self.stored, u32::try_from(self.mosaics.len()).ok()?);
        let mut mosaics = Arc::unwrap_or_clone(std::mem::take(&mut self.mosaics));
        mosaics.append(&other.mosaics);
        self.mosaics = Arc::new(mosaics);
        let boxes = other.boxes.iter().map(|part| BoxPlace { file: file(part.file), row: first + part.row, ..*part });
        self.boxes = Arc::new(self.boxes.iter().copied().chain(boxes).collect());
        let rows = (0..other.stored).map(|row| {
            let TensorInfo { name, dtype, shape, .. } = other.tensor(TensorId(row));
            let place = match other.rows[row as usize].place {
                RowPlace::Span(own, span) => RowPlace::Span(file(own), span),
                RowPlace::Mosaic(own, number) => RowPlace::Mosaic(file(own), tensors + number),
            };
            NewRow { name, dtype, shape, place }
        });
        self.with_hidden_rows(rows)
    }

    /// This table, with other places for these stored tensors.
    pub(super) fn relocated(mut self, places: &[(TensorId, RowPlace)]) -> Self {
        for (id, place) in places {
            self.rows[id.0 as usize].place = *place;
        }
        self
    }

    /// This table, which must hold stored tensors only, with decoded tensors that are not shown. They take no rows
    /// until they are shown. `None` if an id does not fit 32 bits.
    pub(super) fn with_quantized(mut self, quantized: &Arc<Found>) -> Option<Self> {
        self.quantized = Arc::clone(quantized);
        u32::try_from(self.id_end()).ok()?;
        Some(self)
    }

    /// This table showing other rows, in this order and under these names. Ids do not change, and a hidden tensor is
    /// still found by its id. `None` if the names are longer than 4 GiB.
    ///
    /// # Panics
    /// If a row is a box: boxes are never shown.
    pub(super) fn derived<'a>(&self, mut rows: impl Iterator<Item = (TensorId, Cow<'a, str>)>) -> Option<Self> {
        let mut names: Vec<Option<Cow<'a, str>>> = vec![None; self.row_end()];
        let mut shown = Vec::with_capacity(rows.size_hint().0);
        for (id, name) in &mut rows {
            let Id::Row(row) = self.resolve(id.0) else { panic!("{name}: a box is never shown") };
            names[row] = Some(name);
            shown.push(id.0);
        }
        let mut table = Self {
            rows: self.rows.clone(),
            mosaics: Arc::clone(&self.mosaics),
            boxes: Arc::clone(&self.boxes),
            quantized: Arc::clone(&self.quantized),
            composed: Arc::clone(&self.composed),
            stored: self.stored,
            extents: self.extents.clone(),
            ..Self::default()
        };
        let extents_end = u32::try_from(table.extents.len()).ok()?;
        for (row, name) in names.iter().enumerate() {
            table.names.push_str(name.as_deref().unwrap_or_else(|| self.row_name(row)));
            let name_end = u32::try_from(table.names.len()).ok()?;
            if let Some(row) = table.rows.get_mut(row) {
                row.name_end = name_end;
            } else {
                let place = RowPlace::Span(FileId(0), ByteSpan::of_len(0, 0)?);
                table.rows.push(StoredRow { place, name_end, extents_end, dtype: self.made(row).dtype });
            }
        }
        table.by_name.clone_from(&shown);
        table.sort();
        table.shown = Some(shown);
        Some(table)
    }

    /// This table with more tensors that are made of those that it has, and the number of the first. They are not shown until they are
    /// requested. `None` if an id does not fit 32 bits.
    pub(super) fn with_composed(mut self, composed: Vec<Composed>) -> Option<(Self, usize)> {
        let first = self.composed.len();
        Arc::make_mut(&mut self.composed).extend(composed);
        u32::try_from(self.id_end()).ok()?;
        Some((self, first))
    }

    /// The ids of the composed tensors, by their numbers.
    pub(super) fn composed_id(&self, number: usize) -> TensorId {
        self.decoded_id(self.quantized.tensors.len() + number)
    }

    /// The ids of the decoded tensors, in the order of the quantized table.
    pub(super) fn decoded_id(&self, number: usize) -> TensorId {
        let id = self.stored as usize + self.boxes.len() + number;
        TensorId(u32::try_from(id).expect("ids fit 32 bits: checked when the table was made"))
    }

    /// Ids of all stored tensors, shown or not.
    pub(super) fn stored_ids(&self) -> impl ExactSizeIterator<Item = TensorId> + use<> {
        (0..self.stored).map(TensorId)
    }

    /// One more than the highest id, hidden tensors and boxes included.
    pub fn id_end(&self) -> usize {
        self.row_end() + self.boxes.len()
    }

    /// Number of tensors, hidden ones included and boxes not.
    fn row_end(&self) -> usize {
        self.stored as usize + self.quantized.tensors.len() + self.composed.len()
    }

    /// The tensor of a row after the stored ones, under its own name: it has no bytes of its own.
    fn made(&self, row: usize) -> TensorInfo<'_> {
        let number = row - self.stored as usize;
        if let Some(number) = number.checked_sub(self.quantized.tensors.len()) {
            let made = &self.composed[number];
            let storage = Storage::Composed(made);
            return TensorInfo { name: &made.name, dtype: made.dtype, shape: &made.shape, storage };
        }
        let made = &self.quantized.tensors[number];
        let shape = made.shape().extents();
        TensorInfo { name: &made.name, dtype: made.dtype, shape, storage: Storage::Quantized(made) }
    }

    fn resolve(&self, id: u32) -> Id {
        match (id as usize).checked_sub(self.stored as usize) {
            None => Id::Row(id as usize),
            Some(after) if after < self.boxes.len() => Id::Box(after),
            Some(_) => Id::Row(id as usize - self.boxes.len()),
        }
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// One tensor.
    ///
    /// # Panics
    /// If `id` is not of this table.
    pub fn tensor(&self, id: TensorId) -> TensorInfo<'_> {
        let row_number = match self.resolve(id.0) {
            Id::Row(row) => row,
            Id::Box(number) => return self.of_box(number),
        };
        let name = self.row_name(row_number);
        if row_number >= self.stored as usize {
            return TensorInfo { name, ..self.made(row_number) };
        }
        let row = &self.rows[row_number];
        let before = row_number.checked_sub(1).map_or(0, |before| self.rows[before].extents_end);
        TensorInfo {
            name,
            dtype: row.dtype,
            shape: &self.extents[before as usize..row.extents_end as usize],
            storage: match row.place {
                RowPlace::Span(file, span) => Storage::Plain { file, span },
                RowPlace::Mosaic(file, number) => {
                    Storage::Mosaic(MosaicTensor { all: &self.mosaics, number, id, file })
                }
            },
        }
    }

    /// A box: the stored elements from its first to its last, under the name of its tensor.
    fn of_box(&self, number: usize) -> TensorInfo<'_> {
        let BoxPlace { start, file, row } = self.boxes[number];
        let dtype = self.rows[row as usize].dtype;
        let part = self.mosaics.box_of(self.mosaic_of(row as usize), number);
        let span = ByteSpan::of_len(start, (part.stored_elements() * dtype.bits()).div_ceil(8));
        let span = span.expect("a box is inside its file: checked when the table was made");
        TensorInfo {
            name: self.row_name(row as usize),
            dtype,
            shape: part.extents,
            storage: Storage::Plain { file, span },
        }
    }

    fn mosaic_of(&self, row: usize) -> u32 {
        match self.rows[row].place {
            RowPlace::Mosaic(_, number) => number,
            RowPlace::Span(..) => panic!("{} is not stored as boxes", self.row_name(row)),
        }
    }

    /// All shown tensors in order: by file, and within a file by position. Decoded ones stand in the place of their
    /// codes.
    ///
    /// # Panics
    /// Never: numbers of rows fit 32 bits.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (TensorId, TensorInfo<'_>)> {
        let number = |at: usize| u32::try_from(at).expect("row numbers fit 32 bits: checked when the table was made");
        (0..self.len()).map(move |at| {
            let row = self.shown.as_ref().map_or_else(|| number(at), |shown| shown[at]);
            (TensorId(row), self.tensor(TensorId(row)))
        })
    }

    /// Ids in lexical order of name.
    pub fn by_name(&self) -> impl ExactSizeIterator<Item = TensorId> {
        self.by_name.iter().map(|row| TensorId(*row))
    }

    /// Neighbours in that order that have one name.
    pub(super) fn repeated(&self) -> impl Iterator<Item = [TensorId; 2]> {
        let pairs = self.by_name.windows(2).filter(|pair| self.name(pair[0]) == self.name(pair[1]));
        pairs.map(|pair| [pair[0], pair[1]].map(TensorId))
    }

    /// Ids of the tensors whose names begin so, in lexical order of name; O(log n) to the first.
    pub fn with_prefix(&self, prefix: &str) -> impl Iterator<Item = TensorId> {
        let first = self.by_name.partition_point(|row| self.name(*row) < prefix);
        let rows = self.by_name[first..].iter().take_while(move |row| self.name(**row).starts_with(prefix));
        rows.map(|row| TensorId(*row))
    }

    /// The tensor of that name; O(log n).
    pub fn find(&self, name: &str) -> Option<TensorId> {
        let place = self.by_name.binary_search_by(|row| self.name(*row).cmp(name)).ok()?;
        Some(TensorId(self.by_name[place]))
    }

    /// Memory held by the table, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.rows.capacity() * size_of::<StoredRow>()
            + self.names.capacity()
            + self.extents.capacity() * size_of::<u64>()
            + self.by_name.capacity() * size_of::<u32>()
            + self.boxes.capacity() * size_of::<BoxPlace>()
            + self.mosaics.memory_bytes()
    }

    fn name(&self, id: u32) -> &str {
        match self.resolve(id) {
            Id::Row(row) => self.row_name(row),
            Id::Box(number) => self.row_name(self.boxes[number].row as usize),
        }
    }

    fn row_name(&self, row: usize) -> &str {
        if row >= self.rows.len() {
            return self.made(row).name;
        }
        let start = row.checked_sub(1).map_or(0, |before| self.rows[before].name_end);
        &self.names[start as usize..self.rows[row].name_end as usize]
    }
}
