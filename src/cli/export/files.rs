//! The files and directories that an export writes: their names until they are complete, and who may read them.

use std::{
    fs::{self, File},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use ckfs_volume::{Ino, Volume};

use super::super::tree;

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

/// Makes a directory, if it is missing, that no more users may list than the mount's directory.
fn create_directory(volume: &Volume, ino: Ino, target: &Path) -> std::io::Result<()> {
    let mode = |gid| u32::from(volume.copy_mode(ino, nix::unistd::geteuid().as_raw(), gid)) | 0o700;
    let gid = nix::unistd::getegid().as_raw();
    match fs::DirBuilder::new().mode(mode(gid)).create(target) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && target.is_dir() => return Ok(()),
        other => other?,
    }
    let made = fs::metadata(target)?;
    if made.gid() == gid {
        return Ok(());
    }
    // The parent directory gives its group to new entries.
    let narrower = made.mode() & (!GROUP | mode(made.gid()));
    fs::set_permissions(target, fs::Permissions::from_mode(narrower & 0o7777))
}

/// Makes a file that no more users may read than the mount's file.
pub(super) fn create_file(volume: &Volume, node: &tree::PathNode, target: &Path) -> std::io::Result<File> {
    let mode = |gid| u32::from(volume.copy_mode(node.attr.ino, nix::unistd::geteuid().as_raw(), gid)) | 0o600;
    let gid = nix::unistd::getegid().as_raw();
    // Other users may be able to read a file that an earlier export left.
    match fs::remove_file(target) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let file = File::options().write(true).create_new(true).mode(mode(gid)).open(target)?;
    let made = file.metadata()?;
    if made.gid() != gid {
        file.set_permissions(fs::Permissions::from_mode(made.mode() & 0o777 & (!GROUP | mode(made.gid()))))?;
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
