//! The tensor table: what tensors a checkpoint has and where their bytes are.
//!
//! Tensors are numbered by file, in the order of the list of weight files, and within a file by the place of their bytes.
//! A repo may have 150 000 of them, so the table is a few flat arrays: about 120 bytes per tensor, names included.

use rayon::slice::ParallelSliceMut;

use crate::{
    format::safetensors::Header,
    source::{ByteSpan, FileId},
    tensor::{DType, TensorId},
};

/// One tensor of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Name, as in the file's header.
    pub name: &'a str,
    /// Type of its elements.
    pub dtype: DType,
    /// Extents in elements, row-major; empty for a scalar.
    pub shape: &'a [u64],
    /// The file that holds its bytes.
    pub file: FileId,
    /// Where in that file.
    pub span: ByteSpan,
}

/// Immutable table of tensors.
#[derive(Clone, Debug, Default)]
pub struct TensorTable {
    rows: Vec<Row>,
    /// All names, one after the other in row order.
    names: String,
    /// All extents, likewise.
    extents: Vec<u64>,
    /// Row numbers in lexical order of name.
    by_name: Vec<u32>,
    /// Row numbers of the tensors that are there, ascending; `None` if all are.
    shown: Option<Vec<u32>>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    span: ByteSpan,
    name_end: u32,
    extents_end: u32,
    file: FileId,
    dtype: DType,
}

impl TensorTable {
    /// The tensors of these files, numbered in this order. `None` if a number does not fit 32 bits: more than 4 GiB of names.
    pub(super) fn new<'a>(headers: impl Iterator<Item = (FileId, &'a Header)> + Clone) -> Option<Self> {
        let mut table = Self::default();
        table.rows.reserve_exact(headers.clone().map(|(_, header)| header.len()).sum());
        table.names.reserve_exact(headers.clone().map(|(_, header)| header.names_bytes()).sum());
        table.extents.reserve_exact(headers.clone().map(|(_, header)| header.extents_len()).sum());
        for (file, header) in headers {
            for tensor in header.tensors() {
                table.names.push_str(tensor.name);
                table.extents.extend_from_slice(tensor.shape);
                table.rows.push(Row {
                    span: ByteSpan::new(tensor.start, tensor.end)?,
                    name_end: u32::try_from(table.names.len()).ok()?,
                    extents_end: u32::try_from(table.extents.len()).ok()?,
                    file,
                    dtype: tensor.dtype,
                });
            }
        }
        let mut by_name: Vec<u32> = (0..u32::try_from(table.rows.len()).ok()?).collect();
        // By file as well, so that repeated names stand in a fixed order.
        by_name.par_sort_unstable_by(|left, right| {
            table.name(*left as usize).cmp(table.name(*right as usize)).then(left.cmp(right))
        });
        table.by_name = by_name;
        Some(table)
    }

    /// This table with some tensors hidden and others renamed: `name` gives the name of each, or `None` to hide it. Ids stay
    /// what they are, and hidden tensors can still be looked at by id.
    pub(super) fn derived(&self, mut name: impl FnMut(TensorId, &TensorInfo<'_>) -> Option<String>) -> Option<Self> {
        let mut table = Self { rows: self.rows.clone(), extents: self.extents.clone(), ..Self::default() };
        let mut shown = Vec::with_capacity(self.rows.len());
        for row in 0..u32::try_from(self.rows.len()).ok()? {
            let info = self.tensor(TensorId(row));
            if let Some(name) = self.has(row).then(|| name(TensorId(row), &info)).flatten() {
                table.names.push_str(&name);
                shown.push(row);
            } else {
                table.names.push_str(info.name);
            }
            table.rows[row as usize].name_end = u32::try_from(table.names.len()).ok()?;
        }
        let mut by_name = shown.clone();
        by_name.par_sort_unstable_by(|left, right| table.name(*left as usize).cmp(table.name(*right as usize)));
        (table.by_name, table.shown) = (by_name, Some(shown));
        Some(table)
    }

    /// Whether a tensor is there, as opposed to hidden.
    fn has(&self, row: u32) -> bool {
        self.shown.as_ref().is_none_or(|shown| shown.binary_search(&row).is_ok())
    }

    /// One more than the highest id, hidden tensors included.
    pub fn id_end(&self) -> usize {
        self.rows.len()
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
        let row = &self.rows[row_number];
        let before = row_number.checked_sub(1).map_or(0, |before| self.rows[before].extents_end);
        TensorInfo {
            name: self.name(row_number),
            dtype: row.dtype,
            shape: &self.extents[before as usize..row.extents_end as usize],
            file: row.file,
            span: row.span,
        }
    }

    /// All tensors, in order of id.
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
        self.rows.capacity() * size_of::<Row>()
            + self.names.capacity()
            + self.extents.capacity() * size_of::<u64>()
            + self.by_name.capacity() * size_of::<u32>()
    }

    fn name(&self, row: usize) -> &str {
        let start = row.checked_sub(1).map_or(0, |before| self.rows[before].name_end);
        &self.names[start as usize..self.rows[row].name_end as usize]
    }
}
