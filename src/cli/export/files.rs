//! The files and directories that an export writes: their names until they are complete, and who may read them.

use std::{
    fs::{self, File},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use ckfs_host::if_there;
use ckfs_volume::{Ino, Volume};

use super::super::tree;

/// Bytes read at once.
pub(super) const CHUNK_BYTES: usize = 8 << 20;

/// The name of a node while it is not complete. Makes the directory for it.
pub(super) fn partial_path(volume: &Volume, node: &tree::PathNode, directory: &Path) -> std::io::Result<PathBuf> {
    let parent = node.path.rsplit_once('/').map_or("", |(parent, _)| parent);
    create_directories(volume, parent, directory)?;
    let mut partial = directory.join(&node.path).into_os_string();
    partial.push(".part");
    Ok(PathBuf::from(partial))
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
pub(super) fn create_file(volume: &Volume, node: &tree::PathNode, target: &Path) -> std::io::Result<File> {
    // Other users may be able to read a file that an earlier export left.
    if_there(fs::remove_file(target))?;
    let mode = copy_mode(volume, node.attr.ino, nix::unistd::getegid().as_raw()) | 0o600;
    let file = File::options().write(true).create_new(true).mode(mode).open(target)?;
    if let Some(narrower) = narrow(volume, node.attr.ino, &file.metadata()?) {
        file.set_permissions(narrower)?;
    }
    Ok(file)
}

/// Syncs a file in which all bytes were written.
pub(super) fn finish(file: &File, node: &tree::PathNode, partial: &Path) -> anyhow::Result<()> {
    let context = || partial.display().to_string();
    file.sync_all().with_context(context)?;
    let written = file.metadata().with_context(context)?.len();
    if written != node.attr.size_bytes {
        bail!("{}: expected {} bytes, found {written}", partial.display(), node.attr.size_bytes);
    }
    Ok(())
}
