//! The files and directories that an export writes: their names until they are complete, and who may read them.

use std::{
    fs::{self, File},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use ckfs_host::if_there;
use ckfs_volume::{Ino, Volume};

use super::{super::tree, journal::Written};

/// Bytes read at once.
pub(super) const CHUNK_BYTES: usize = 8 << 20;

/// The name of a node of the mount while it is not complete.
fn partial_path(target: &Path) -> PathBuf {
    let mut partial = target.to_owned().into_os_string();
    partial.push(".part");
    PathBuf::from(partial)
}

/// Makes a link in place of what is there, at once.
pub(super) fn replace_link(to: impl AsRef<Path>, link: &Path) -> std::io::Result<()> {
    let partial = partial_path(link);
    if_there(fs::remove_file(&partial))?;
    symlink(to, &partial)?;
    fs::rename(&partial, link)
}

/// A file that is being written, under the name that it has until it is complete. Dropped before, it is removed.
pub(super) struct PartialFile<'a> {
    pub(super) node: &'a tree::PathNode,
    pub(super) path: PathBuf,
    target: PathBuf,
}

impl<'a> PartialFile<'a> {
    /// Makes the file, and the directory for it.
    pub(super) fn create(volume: &Volume, node: &'a tree::PathNode, directory: &Path) -> anyhow::Result<(Self, File)> {
        let target = directory.join(&node.path);
        let partial = Self { node, path: partial_path(&target), target };
        let created = create_directories(volume, parent(&node.path), directory);
        let file = created.and_then(|()| create_file(volume, node, &partial.path));
        Ok((partial, file.with_context(|| directory.join(&node.path).display().to_string())?))
    }

    /// Syncs it, in which all bytes were written, gives it its name and notes that.
    pub(super) fn complete(self, file: &File, written: &mut Written<'_>) -> anyhow::Result<()> {
        let context = || self.path.display().to_string();
        file.sync_all().with_context(context)?;
        let found = file.metadata().with_context(context)?.len();
        if found != self.node.attr.size_bytes {
            bail!("{}: expected {} bytes, found {found}", self.path.display(), self.node.attr.size_bytes);
        }
        fs::rename(&self.path, &self.target).with_context(context)?;
        written(&self.target)
    }
}

impl Drop for PartialFile<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The directory of a path of the mount.
pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// Bits of the group.
const GROUP: u32 = 0o070;

/// Makes the target directory of the export, and its missing parents.
pub(super) fn create_target(volume: &Volume, target: &Path) -> std::io::Result<()> {
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    create_directory(volume, Ino::ROOT, target)
}

/// Makes the directory at a path of the mount, and its missing parents.
pub(super) fn create_directories(volume: &Volume, path: &str, directory: &Path) -> std::io::Result<()> {
    if directory.join(path).is_dir() {
        return Ok(());
    }
    let ends = path.char_indices().filter(|(_, c)| *c == '/').map(|(at, _)| at).chain([path.len()]);
    for end in ends {
        let path = &path[..end];
        let ino = volume.resolve(path).map_err(std::io::Error::other)?.ino;
        create_directory(volume, ino, &directory.join(path))?;
    }
    Ok(())
}

/// The permission bits for a copy of a node that is of this process's user and of a group.
fn copy_mode(volume: &Volume, ino: Ino, gid: u32) -> u32 {
    volume.copy_mode(ino, nix::unistd::geteuid().as_raw(), gid).into()
}

/// Takes permissions away from what was made, where the parent directory gave it another group than this process's.
fn narrow(volume: &Volume, ino: Ino, made: &fs::Metadata) -> Option<fs::Permissions> {
    let is_other = made.gid() != nix::unistd::getegid().as_raw();
    is_other.then(|| fs::Permissions::from_mode(made.mode() & 0o7777 & (!GROUP | copy_mode(volume, ino, made.gid()))))
}

/// Makes a directory, if it is missing, that no more users may list than the mount's directory.
fn create_directory(volume: &Volume, ino: Ino, target: &Path) -> std::io::Result<()> {
    let mode = copy_mode(volume, ino, nix::unistd::getegid().as_raw()) | 0o700;
    match fs::DirBuilder::new().mode(mode).create(target) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && target.is_dir() => return Ok(()),
        other => other?,
    }
    match narrow(volume, ino, &fs::metadata(target)?) {
        Some(narrower) => fs::set_permissions(target, narrower),
        None => Ok(()),
    }
}

/// Makes a file that no more users may read than the mount's file.
fn create_file(volume: &Volume, node: &tree::PathNode, target: &Path) -> std::io::Result<File> {
    // Other users may be able to read a file that an earlier export left.
    if_there(fs::remove_file(target))?;
    let mode = copy_mode(volume, node.attr.ino, nix::unistd::getegid().as_raw()) | 0o600;
    let file = File::options().write(true).create_new(true).mode(mode).open(target)?;
    if let Some(narrower) = narrow(volume, node.attr.ino, &file.metadata()?) {
        file.set_permissions(narrower)?;
    }
    Ok(file)
}
