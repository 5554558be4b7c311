//! The tensor table: the tensors of a checkpoint, and how each is stored.
//!
//! Stored tensors are numbered by file, in the order of weight files and then adapters, and within a file by the
//! position of their bytes. After them come the tensors that are decoded from quantized ones. Every table of a
//! repository has all of these rows, so that a number means the same tensor in each table. Tables differ in the *shown*
//! rows: the stored tensors, or decoded ones in the place of their codes, or a part of either under other names. A
//! repository may have 150 000 tensors, so the table is a few flat arrays: about 120 bytes per tensor, names included.

use std::sync::Arc;

use rayon::slice::ParallelSliceMut;

use super::scheme::{Found, Quantized};
use crate::{
    format::safetensors::Header,
    source::{ByteSpan, FileId},
    tensor::{DType, TensorId},
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
    Quantized(Quantized<'a>),
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
    /// If the tensor is decoded from others: views read stored tensors only.
    pub fn file(&self) -> FileId {
        match self.storage {
            Storage::Plain { file, .. } => file,
            Storage::Quantized(_) => panic!("{} has no bytes of its own", self.name),
        }
    }

    /// The span of a stored tensor in its file.
    ///
    /// # Panics
    /// If the tensor is decoded from others: views read stored tensors only.
    pub fn span(&self) -> ByteSpan {
        match self.storage {
            Storage::Plain { span, .. } => span,
            Storage::Quantized(_) => panic!("{} has no bytes of its own", self.name),
        }
    }

    /// How it is decoded, if it is.
    pub fn quantized(&self) -> Option<Quantized<'a>> {
        match self.storage {
            Storage::Plain { .. } => None,
            Storage::Quantized(quantized) => Some(quantized),
        }
    }

    /// Bytes of all elements. A last byte that sub-byte types fill only in part counts whole.
    pub fn bytes(&self) -> u64 {
        match self.storage {
            Storage::Plain { span, .. } => span.len(),
            Storage::Quantized(_) => (self.shape.iter().product::<u64>() * self.dtype.bits()).div_ceil(8),
        }
    }
}

/// Immutable table of tensors.
#[derive(Clone, Debug, Default)]
pub struct TensorTable {
    /// One row for each stored tensor, and after them one for each shown decoded tensor. Of the latter, only the end of
    /// the name is meaningful.
    rows: Vec<StoredRow>,
    /// The tensors after the stored ones.
    quantized: Arc<Found>,
    /// Number of stored tensors.
    stored: u32,
    /// All names, one after the other in row order.
    names: String,
    /// All extents of stored tensors, likewise.
    extents: Vec<u64>,
    /// Row numbers in lexical order of name.
    by_name: Vec<u32>,
    /// Row numbers of the tensors that are shown, in order; `None` if all are.
    shown: Option<Vec<u32>>,
}

#[derive(Clone, Copy, Debug)]
struct StoredRow {
    span: ByteSpan,
    name_end: u32,
    extents_end: u32,
    file: FileId,
    dtype: DType,
}

impl TensorTable {
    /// The tensors of these files, numbered in this order. `None` if a number does not fit 32 bits, as with more than 4
    /// GiB of names.
    pub(super) fn new<'a>(headers: impl Iterator<Item = (FileId, &'a Header)> + Clone) -> Option<Self> {
        let mut table = Self::default();
        table.rows.reserve_exact(headers.clone().map(|(_, header)| header.len()).sum());
        table.names.reserve_exact(headers.clone().map(|(_, header)| header.names_bytes()).sum());
        table.extents.reserve_exact(headers.clone().map(|(_, header)| header.extents_len()).sum());
        for (file, header) in headers {
            for tensor in header.tensors() {
                table.names.push_str(tensor.name);
                table.extents.extend_from_slice(tensor.shape);
                table.rows.push(StoredRow {
                    span: ByteSpan::new(tensor.start, tensor.end)?,
                    name_end: u32::try_from(table.names.len()).ok()?,
                    extents_end: u32::try_from(table.extents.len()).ok()?,
                    file,
                    dtype: tensor.dtype,
                });
            }
        }
        table.stored = u32::try_from(table.rows.len()).ok()?;
        table.by_name = (0..table.stored).collect();
        table.sort();
        Some(table)
    }

    /// Sorted by row as well, so that repeated names have a fixed order.
    fn sort(&mut self) {
        let mut by_name = std::mem::take(&mut self.by_name);
        by_name.par_sort_unstable_by(|left, right| {
            self.name(*left as usize).cmp(self.name(*right as usize)).then(left.cmp(right))
        });
        self.by_name = by_name;
    }

    /// This table, which must hold stored tensors only, showing only the first ones.
    pub(super) fn showing_first(mut self, count: usize) -> Self {
        let is_first = |row: &u32| (*row as usize) < count;
        self.by_name.retain(is_first);
        self.shown = Some((0..self.stored).filter(is_first).collect());
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
    pub(super) fn derived(&self, mut rows: impl Iterator<Item = (TensorId, String)>) -> Option<Self> {
        let mut names: Vec<Option<String>> = vec![None; self.id_end()];
        let mut shown = Vec::with_capacity(rows.size_hint().0);
        for (id, name) in &mut rows {
            names[id.0 as usize] = Some(name);
            shown.push(id.0);
        }
        let (quantized, extents) = (Arc::clone(&self.quantized), self.extents.clone());
        let mut table = Self { rows: self.rows.clone(), quantized, stored: self.stored, extents, ..Self::default() };
        let extents_end = u32::try_from(table.extents.len()).ok()?;
        for (row, name) in names.iter().enumerate() {
            table.names.push_str(name.as_deref().unwrap_or_else(|| self.name(row)));
            let name_end = u32::try_from(table.names.len()).ok()?;
            if let Some(row) = table.rows.get_mut(row) {
                row.name_end = name_end;
            } else {
                let dtype = self.quantized.tensors.get(row - self.stored as usize).dtype;
                table.rows.push(StoredRow {
                    span: ByteSpan::of_len(0, 0)?,
                    name_end,
                    extents_end,
                    file: FileId(0),
                    dtype,
                });
            }
        }
        table.by_name.clone_from(&shown);
        table.sort();
        table.shown = Some(shown);
        Some(table)
    }

    /// The ids of the decoded tensors, in the order of the quantized table.
    pub(super) fn decoded_id(&self, number: usize) -> TensorId {
        TensorId(self.stored + u32::try_from(number).expect("row numbers fit 32 bits: checked when the table was made"))
    }

    /// Ids of all stored tensors, shown or not.
    pub(super) fn stored_ids(&self) -> impl ExactSizeIterator<Item = TensorId> + use<> {
        (0..self.stored).map(TensorId)
    }

    /// One more than the highest id, hidden tensors included.
    pub fn id_end(&self) -> usize {
        self.stored as usize + self.quantized.tensors.len()
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
        let row_number = id.0 as usize;
        let name = self.name(row_number);
        if let Some(number) = row_number.checked_sub(self.stored as usize) {
            let quantized = self.quantized.tensors.get(number);
            let shape = quantized.template.shape().extents();
            return TensorInfo { name, dtype: quantized.dtype, shape, storage: Storage::Quantized(quantized) };
        }
        let row = &self.rows[row_number];
        let before = row_number.checked_sub(1).map_or(0, |before| self.rows[before].extents_end);
        TensorInfo {
            name,
            dtype: row.dtype,
            shape: &self.extents[before as usize..row.extents_end as usize],
            storage: Storage::Plain { file: row.file, span: row.span },
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

    /// Ids of the tensors whose names begin so, in lexical order of name; O(log n) to the first.
    pub fn with_prefix(&self, prefix: &str) -> impl Iterator<Item = TensorId> {
        let first = self.by_name.partition_point(|row| self.name(*row as usize) < prefix);
        let rows = self.by_name[first..].iter().take_while(move |row| self.name(**row as usize).starts_with(prefix));
        rows.map(|row| TensorId(*row))
    }

    /// The tensor of that name; O(log n).
    pub fn find(&self, name: &str) -> Option<TensorId> {
        let place = self.by_name.binary_search_by(|row| self.name(*row as usize).cmp(name)).ok()?;
        Some(TensorId(self.by_name[place]))
    }

    /// Memory held by the table, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.rows.capacity() * size_of::<StoredRow>()
            + self.names.capacity()
            + self.extents.capacity() * size_of::<u64>()
            + self.by_name.capacity() * size_of::<u32>()
    }

    fn name(&self, row: usize) -> &str {
        if row >= self.rows.len() {
            return self.quantized.tensors.get(row - self.stored as usize).name;
        }
        let start = row.checked_sub(1).map_or(0, |before| self.rows[before].name_end);
        &self.names[start as usize..self.rows[row].name_end as usize]
    }
}
