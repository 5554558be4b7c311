//! The headers of weight files, and the table of their tensors, checked against the index.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt,
};

use ckfs_format::safetensors::{Header, HeaderErrors};
use ckfs_source::{ByteSpan, FileId, Source};
use rayon::slice::ParallelSliceMut;

use super::super::{
    folder::PinnedFiles,
    index::Index,
    problem::{Problem, Problems},
    table::{NewRow, RowPlace, TensorTable},
};

/// The header of a file, which messages call `shown`.
///
/// # Errors
/// Its bytes do not come, or they are none: that alone is [`Problem::Other`].
pub(crate) fn read_header(source: &dyn Source, file: FileId, shown: impl fmt::Display) -> Result<Header, Problem> {
    let refused = |errors: HeaderErrors| Problem::of_file(&shown, errors);
    let file_bytes = source.len_bytes(file);
    let mut prefix = [0; 8];
    if file_bytes >= 8 {
        source.read_into(file, 0, &mut prefix)?;
    }
    let len = Header::json_bytes(prefix, file_bytes).map_err(refused)?;
    Header::parse(&source.read_bytes(file, 8, len)?, file_bytes).map_err(refused)
}

/// The tensors of these files that are kept, in this order.
pub(crate) fn table_of(
    headers: &[(FileId, Header)],
    keeps: &dyn Fn(FileId, &str) -> bool,
    problems: &mut Problems,
) -> TensorTable {
    let rows = rows(headers).filter(|row| keeps(row.place.file(), row.name));
    problems.or_too_large(TensorTable::new(rows))
}

/// The tensors of these files, in order.
pub(crate) fn rows(headers: &[(FileId, Header)]) -> impl Iterator<Item = NewRow<'_>> {
    headers.iter().flat_map(|(id, header)| {
        header.tensors().map(move |tensor| NewRow {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            place: RowPlace::Span(
                *id,
                ByteSpan::new(tensor.start, tensor.end).expect("a header's offsets are in order"),
            ),
        })
    })
}

impl PinnedFiles<'_> {
    /// Whether an index names the tensors of a table and no others, each once and in its file: it has nothing to compare then.
    pub(crate) fn agree_with_index(&self, index: &Index<'_>, table: &TensorTable) -> bool {
        if index.tensors.len() != table.len() {
            return false;
        }
        let numbered = (0..).zip(self.weights).map(|(id, at)| (self.files[*at].path.as_str(), FileId(id)));
        let ids: HashMap<&str, FileId> = numbered.collect();
        let files: Vec<Option<FileId>> = index.files.iter().map(|file| ids.get(file.as_str()).copied()).collect();
        let mut named: Vec<(&str, u32)> = index.tensors.iter().map(|(name, file)| (&**name, *file)).collect();
        named.par_sort_unstable();
        let mut tensors = named.iter().zip(table.by_name().map(|id| table.tensor(id)));
        tensors.all(|((name, file), tensor)| *name == tensor.name && files[*file as usize] == tensor.first_file())
            && named.windows(2).all(|pair| pair[0].0 != pair[1].0)
    }

    /// Compares index and headers in both directions, by name. Of the `decided` names the user has chosen another copy.
    pub(crate) fn compare_with_index(
        &self,
        index_name: &str,
        index: &Index<'_>,
        (table, decided): (&TensorTable, &HashSet<String>),
        broken: &BTreeSet<String>,
        problems: &mut Problems,
    ) {
        // The files that the index names for a tensor, and the first that has it. Repetitions there are reported above.
        let mut both: BTreeMap<&str, (Vec<&str>, Option<&str>)> = BTreeMap::new();
        for (name, file) in &index.tensors {
            both.entry(name).or_default().0.push(&index.files[*file as usize]);
        }
        for tensor in table.by_name().map(|id| table.tensor(id)) {
            let path = || self.path(tensor.first_file().expect("headers have stored tensors only"));
            both.entry(tensor.name).or_default().1.get_or_insert_with(path);
        }
        for (name, (named, found)) in both {
            match (named.iter().min(), found) {
                (Some(file), None) => {
                    if !broken.contains(*file) && self.files.iter().any(|listed| listed.path == *file) {
                        problems.push(Problem::NotInFile { tensor: name.to_owned(), file: (*file).to_owned() });
                    }
                }
                (None, Some(file)) => {
                    problems.push(Problem::NotInIndex { tensor: name.to_owned(), file: file.to_owned() });
                }
                (Some(expected), Some(found)) if *expected != found && !decided.contains(name) => {
                    let expected = format_args!("in {expected} by the index");
                    problems.push(Problem::of_tensor(name, expected, format_args!("in {found}")));
                }
                (Some(_), Some(_)) | (None, None) => {}
            }
            for _ in 1..named.len() {
                problems.of_file(index_name, format_args!("names tensor {name:?} twice"));
            }
        }
    }
}
