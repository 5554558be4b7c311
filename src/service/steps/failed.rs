//! The tree of a step that cannot be planned: its directory holds `.ckfs/error` alone, and every other name in
//! it is EIO.

use std::{ops::ControlFlow, time::SystemTime};

use ckfs_tensor::to_usize;
use ckfs_volume::{
    Access, Attr, BUFFER_BYTES, DirEntry, FileSystem, FsError, Handle, Ino, NodeKind, NodeScope, Nodes, NodesRef,
    OpenedFile, Permission, ReadFailure, Replied, Served, StatFs,
};

/// Numbers of the nodes.
const OWN: Ino = Ino(2);
const ERROR: Ino = Ino(3);

/// Names of the nodes.
const OWN_NAME: &str = ".ckfs";
const ERROR_NAME: &str = "error";

/// Why a step cannot be planned, as a tree.
#[derive(Debug)]
pub(super) struct FailedStep {
    pub(super) message: String,
    text: Vec<u8>,
    directory: Permission,
    file: Permission,
    modified: SystemTime,
}

impl FailedStep {
    /// A tree that shows a message.
    pub(super) fn new(message: String, directory: Permission, modified: SystemTime) -> Self {
        let text = format!("{message}\n").into_bytes();
        let file = Permission { mode: directory.mode & 0o444, ..directory };
        Self { message, text, directory, file, modified }
    }
}

/// The part of a text that a read asks for.
pub(super) fn part(text: &[u8], offset: u64, len: usize) -> Served<'_> {
    let start = to_usize(offset).min(text.len());
    Served::Memory(&text[start..start.saturating_add(len).min(text.len())])
}

impl FileSystem for FailedStep {
    fn nodes(&self, _ino: Ino, _scope: NodeScope) -> Option<NodesRef<'_>> {
        Some(NodesRef::All(self))
    }

    fn open(&self, ino: Ino) -> Result<OpenedFile, FsError> {
        match ino {
            ERROR => Ok(OpenedFile { handle: Handle(0), access: Access::Cached }),
            Ino::ROOT | OWN => Err(FsError::IsDirectory),
            _ => Err(FsError::NotFound),
        }
    }

    fn read(
        &self,
        _ino: Ino,
        _handle: Handle,
        offset: u64,
        len: usize,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<FsError>> {
        Ok(reply(part(&self.text, offset, len)))
    }

    fn release(&self, _ino: Ino, _handle: Handle) {}
}

impl Nodes for FailedStep {
    fn attr(&self, ino: Ino) -> Result<Attr, FsError> {
        let (kind, size_bytes, links, permission) = match ino {
            Ino::ROOT => (NodeKind::Directory, 0, 3, self.directory),
            OWN => (NodeKind::Directory, 0, 2, self.directory),
            ERROR => (NodeKind::File, self.text.len() as u64, 1, self.file),
            _ => return Err(FsError::NotFound),
        };
        let modified = self.modified;
        Ok(Attr { ino, kind, size_bytes, links, modified, permission, buffer_bytes: BUFFER_BYTES })
    }

    fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        match (parent, name) {
            (Ino::ROOT, name) if name == OWN_NAME.as_bytes() => Nodes::attr(self, OWN),
            (OWN, name) if name == ERROR_NAME.as_bytes() => Nodes::attr(self, ERROR),
            // A program that gets ENOENT takes the file for one that no checkpoint has, and may go on without.
            (Ino::ROOT, _) => Err(FsError::Io),
            (ERROR, _) => Err(FsError::NotDirectory),
            _ => Err(FsError::NotFound),
        }
    }

    fn read_dir(
        &self,
        directory: Ino,
        from: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), FsError> {
        let (name, ino, kind) = match directory {
            Ino::ROOT => (OWN_NAME, OWN, NodeKind::Directory),
            OWN => (ERROR_NAME, ERROR, NodeKind::File),
            _ => return Err(FsError::NotDirectory),
        };
        if from == 0 {
            let _ = each(DirEntry { name: name.as_bytes(), ino, kind, next: None });
        }
        Ok(())
    }

    fn parent(&self, ino: Ino) -> Result<Ino, FsError> {
        match ino {
            Ino::ROOT | OWN => Ok(Ino::ROOT),
            ERROR => Ok(OWN),
            _ => Err(FsError::NotFound),
        }
    }

    fn read_link(&self, _ino: Ino) -> Result<Vec<u8>, FsError> {
        Err(FsError::Invalid)
    }

    fn xattr(&self, _ino: Ino, _name: &[u8]) -> Result<Vec<u8>, FsError> {
        Err(FsError::NoAttribute)
    }

    fn xattr_names(&self, _ino: Ino) -> Result<Vec<Vec<u8>>, FsError> {
        Ok(Vec::new())
    }

    fn stat_fs(&self) -> StatFs {
        StatFs { total_bytes: 0, nodes: 3 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_is_found_by_its_path() {
        let permission = Permission { uid: 1, gid: 2, mode: 0o550 };
        let step = FailedStep::new("no config.json".to_owned(), permission, SystemTime::UNIX_EPOCH);
        let own = Nodes::lookup(&step, Ino::ROOT, b".ckfs").unwrap();
        let error = Nodes::lookup(&step, own.ino, b"error").unwrap();
        assert_eq!((own.kind, error.kind, error.size_bytes), (NodeKind::Directory, NodeKind::File, 15));
        assert_eq!((error.permission.mode, &*step.text), (0o440, b"no config.json\n".as_slice()));
        assert_eq!(step.parent(error.ino), Ok(own.ino));
        assert_eq!(Nodes::lookup(&step, Ino::ROOT, b"hf").unwrap_err(), FsError::Io);
        assert_eq!(step.open(own.ino).unwrap_err(), FsError::IsDirectory);
        let mut names = Vec::new();
        Nodes::read_dir(&step, own.ino, 0, &mut |entry| {
            names.push(entry.name.to_vec());
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(names, [b"error".to_vec()]);
    }
}
