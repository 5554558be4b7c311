//! The table of files that a block refers to, and places in those files.

use std::sync::Arc;

use ckfs_host::RelativePath;

use super::cursor::Cursor;
use crate::FormatError;

/// Longest path, in bytes.
const PATH_BYTES_MAX: u16 = u16::MAX;

/// Most bytes of all paths of one table. A path takes a few bytes of the block and may be 64 KiB long.
const PATHS_BYTES_MAX: usize = 64 << 20;

/// Most files of one table.
const FILES_MAX: u64 = 1 << 20;

/// A place in a file of the database.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlobLocation {
    /// The file, relative to the directory of the manifest: UTF-8, with `/` between its parts, none of which is `.` or `..`.
    pub path: Arc<str>,
    /// What stands before the paths in the table of a node that is read from here.
    pub(super) base: Arc<str>,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub len_bytes: u64,
}

impl BlobLocation {
    /// One past the last byte. It fits 63 bits.
    pub fn end(&self) -> u64 {
        self.offset + self.len_bytes
    }
}

/// One file: its path and the base that nodes in it have, or the path as stored if it is no path inside the database.
type File = Result<(Arc<str>, Arc<str>), String>;

/// The files of one block.
#[derive(Debug)]
pub(super) struct FileTable(Vec<File>);

impl FileTable {
    /// Reads the table of a block whose own file has this base.
    pub(super) fn read(cursor: &mut Cursor<'_>, parent_base: &str) -> Result<Self, FormatError> {
        let count = cursor.count("number of files", FILES_MAX)?;
        let mut prefixes = vec![0; usize::from(count > 0)];
        prefixes.extend(cursor.lengths(count.saturating_sub(1), "path prefix length", PATH_BYTES_MAX)?);
        let suffixes = cursor.lengths(count, "path suffix length", PATH_BYTES_MAX)?;
        let bases = cursor.lengths(count, "base path length", PATH_BYTES_MAX)?;
        let mut files: Vec<File> = Vec::with_capacity(count);
        let mut total_bytes = 0;
        let mut path: Vec<u8> = Vec::new();
        for ((prefix, suffix), base) in prefixes.into_iter().zip(suffixes).zip(bases) {
            if prefix > path.len() {
                return Err(cursor.block.wrong("path prefix length", format!("at most {}", path.len()), prefix));
            }
            path.truncate(prefix);
            path.extend_from_slice(cursor.take(suffix, "paths")?);
            if base > path.len() {
                return Err(cursor.block.wrong("base path length", format!("at most {}", path.len()), base));
            }
            let len = parent_base.len() + path.len();
            if len > usize::from(PATH_BYTES_MAX) {
                return Err(cursor.block.wrong("path length", format!("at most {PATH_BYTES_MAX}"), len));
            }
            total_bytes += len + parent_base.len() + base;
            if total_bytes > PATHS_BYTES_MAX {
                let (limit, found) = (PATHS_BYTES_MAX as u64, total_bytes as u64);
                return Err(cursor.block.beyond("bytes of paths", limit, found));
            }
            files.push(file(parent_base, &path, base));
        }
        Ok(Self(files))
    }

    /// A column of numbers of files.
    pub(super) fn ids(&self, cursor: &mut Cursor<'_>, rows: usize) -> Result<Vec<usize>, FormatError> {
        let id = |_| {
            let found = cursor.varint("file number")?;
            let id = usize::try_from(found).ok().filter(|id| *id < self.0.len());
            id.ok_or_else(|| cursor.block.wrong("file number", format!("less than {}", self.0.len()), found))
        };
        (0..rows).map(id).collect()
    }

    /// A place in file number `id`, which [`FileTable::ids`] gave.
    pub(super) fn location(
        &self,
        cursor: &Cursor<'_>,
        id: usize,
        offset: u64,
        len_bytes: u64,
    ) -> Result<BlobLocation, FormatError> {
        let in_range = offset.checked_add(len_bytes).is_some_and(|end| i64::try_from(end).is_ok());
        if !in_range {
            let found = format!("{len_bytes} bytes at {offset}");
            return Err(cursor.block.wrong("place in a file", "an end of at most 63 bits", found));
        }
        match &self.0[id] {
            Ok((path, base)) => Ok(BlobLocation { path: Arc::clone(path), base: Arc::clone(base), offset, len_bytes }),
            Err(path) => {
                let block = cursor.block;
                Err(FormatError(format!("{block}: expected a path of a file inside the database, found {path:?}")))
            }
        }
    }
}

fn file(parent_base: &str, path: &[u8], base: usize) -> File {
    let lossy = || format!("{parent_base}{}", String::from_utf8_lossy(path));
    let text = std::str::from_utf8(path).map_err(|_| lossy())?;
    let base = text.get(..base).ok_or_else(lossy)?;
    let whole = [parent_base, text].concat();
    match RelativePath::parse(&whole) {
        Ok(path) => Ok((path.as_str().into(), [parent_base, base].concat().into())),
        Err(_) => Err(whole),
    }
}
