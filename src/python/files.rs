//! The files of an opened checkpoint: those that a mount of it would have.

use std::{ops::ControlFlow, sync::Arc, time::UNIX_EPOCH};

use ckfs_service::Service;
use ckfs_volume::{Attr, FileSystem, FsError, Ino, NodeKind, follow};
use pyo3::{exceptions::PyOSError, prelude::*, types::PyBytes};

use super::{failure::ExceptionKind, opened::OpenedCheckpoint, process};

/// A file or directory: its name, whether it is a directory, bytes, and its time in seconds since 1970.
type FileRow = (String, bool, u64, f64);

fn raised(error: FsError, path: &str) -> PyErr {
    PyOSError::new_err((error.errno(), error.to_string(), path.to_owned()))
}

fn row(name: &str, attr: &Attr) -> FileRow {
    let modified = attr.modified.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    (name.to_owned(), attr.kind == NodeKind::Directory, attr.size_bytes, modified)
}

/// The node at a path. Links are followed; above the root is the root.
fn found(files: &dyn FileSystem, path: &str) -> Result<Attr, FsError> {
    let lookup = |_: &[(String, Attr)], directory: &Attr, name: &str| files.lookup(directory.ino, name.as_bytes());
    follow(files, files.attr(Ino::ROOT)?, path, lookup).map(|(_, attr)| attr)
}

/// What is at a path, whose name is the path.
#[pyfunction]
pub(super) fn entry(py: Python<'_>, opened: &OpenedCheckpoint, path: &str) -> PyResult<FileRow> {
    let files = opened.service(py)?.volume();
    let attr = found(&**files, path).map_err(|error| raised(error, path))?;
    Ok(row(path, &attr))
}

/// What is in the directory at a path.
#[pyfunction]
pub(super) fn entries(py: Python<'_>, opened: &OpenedCheckpoint, path: &str) -> PyResult<Vec<FileRow>> {
    let files = opened.service(py)?.volume();
    let listed = || {
        let directory = found(&**files, path)?.ino;
        let mut names = Vec::new();
        files.read_dir(directory, 0, &mut |entry| {
            names.push(String::from_utf8_lossy(entry.name).into_owned());
            ControlFlow::Continue(())
        })?;
        let attr = |name: String| Ok(row(&name, &found(&**files, &format!("{path}/{name}"))?));
        names.into_iter().map(attr).collect::<Result<Vec<FileRow>, FsError>>()
    };
    listed().map_err(|error| raised(error, path))
}

/// Reads `len` bytes of the file at a path, all of them within it.
fn bytes_of(service: &Service, path: &str, offset: u64, len: usize) -> Result<Vec<u8>, FsError> {
    let files = service.volume();
    let ino = found(&**files, path)?.ino;
    let handle = files.open_uncached(ino)?.handle;
    let mut bytes = vec![0; len];
    let read = files.read_into(ino, handle, offset, &mut bytes);
    files.release(ino, handle);
    read.map(|()| bytes)
}

/// Reads bytes of the file at a path, fewer only at its end. Storage that does not answer is left to a thread of its own, so that
/// Ctrl-C is heard.
#[pyfunction]
pub(super) fn read<'py>(
    py: Python<'py>,
    opened: &OpenedCheckpoint,
    path: &str,
    offset: u64,
    len: u64,
) -> PyResult<Bound<'py, PyBytes>> {
    let service = Arc::clone(opened.service(py)?);
    let (_, is_directory, size, _) = entry(py, opened, path)?;
    if is_directory {
        return Err(raised(FsError::IsDirectory, path));
    }
    let len = usize::try_from(len.min(size.saturating_sub(offset))).map_err(|_| raised(FsError::Invalid, path))?;
    let wanted = path.to_owned();
    match process::apart(py, "ckfs-file", move |_| bytes_of(&service, &wanted, offset, len))? {
        Some(Ok(bytes)) => Ok(PyBytes::new(py, &bytes)),
        Some(Err(FsError::Io)) => {
            let text = format!("{path}: bytes could not be read, or their source has changed");
            Err(ExceptionKind::Read.with(py, &text))
        }
        Some(Err(error)) => Err(raised(error, path)),
        None => Err(ExceptionKind::Read.with(py, &format!("{path}: the read panicked"))),
    }
}
