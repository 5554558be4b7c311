//! An export into a directory: the files are written, and what is complete is noted beside them.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::unix::ffi::OsStringExt,
    path::Path,
};

use anyhow::{Context, bail};
use ckfs_plan::report::human_bytes;
use ckfs_volume::{FileSystem, NodeKind, Volume};
use indicatif::ProgressBar;

use super::{
    super::{
        flags::LogFlags,
        output,
        tree::{self, PathNode},
    },
    chunked,
    files::{CHUNK_BYTES, PartialFile, create_directories, parent, replace_link},
    journal::{CompleteFiles, Journal, Written, completed, state},
    parts::ExportTask,
};

/// Nodes of a volume go there.
pub(super) struct DirectoryExport<'a> {
    pub(super) volume: &'a Volume,
    pub(super) directory: &'a Path,
    /// Of what is exported, and by which program.
    pub(super) digest: &'a str,
    pub(super) log: &'a LogFlags,
}

impl DirectoryExport<'_> {
    /// Writes what the journal does not say to be complete, and returns how many files it does.
    pub(super) fn write_all(&self, nodes: &[PathNode], journal: &mut Journal) -> anyhow::Result<usize> {
        let total = tree::total_bytes(nodes);
        let (mut kept, mut missing) = (Vec::new(), Vec::new());
        for node in nodes {
            let is_kept = journal.done.has(&self.directory.join(&node.path), self.digest) && self.has_stamp(node)?;
            if is_kept { &mut kept } else { &mut missing }.push(node);
        }
        let kept_bytes = tree::total_bytes(kept.iter().copied());
        if !kept.is_empty() && !self.log.quiet {
            let (count, kept, all) = (kept.len(), human_bytes(kept_bytes), human_bytes(total));
            ckfs_host::tell(&format!("ckfs: {count} files, {kept} of {all}, are complete already\n"));
        }
        check_room(self.directory, total - kept_bytes)?;
        let bar = output::bar(total, self.log);
        bar.inc(kept_bytes);
        let (chunked, others) = chunked::split(self.volume, missing)?;
        let mut written = |path: &Path| journal.note(path, self.digest);
        for node in others {
            bar.set_message(node.path.clone());
            self.write(node, &bar, &mut written)?;
        }
        chunked::write(self.volume, &chunked, self.directory, &bar, &mut written)?;
        ckfs_service::check_sources(self.volume).inspect_err(|_| self.remove_wrong(nodes))?;
        for node in nodes.iter().filter(|node| node.attr.kind == NodeKind::Directory) {
            sync_directory(&self.directory.join(&node.path))?;
        }
        bar.finish_and_clear();
        Ok(kept.len())
    }

    fn write(&self, node: &PathNode, bar: &ProgressBar, written: &mut Written<'_>) -> anyhow::Result<()> {
        let Self { volume, directory, .. } = self;
        let target = directory.join(&node.path);
        let context = || target.display().to_string();
        match node.attr.kind {
            NodeKind::Directory => create_directories(volume, &node.path, directory).with_context(context),
            NodeKind::Symlink => {
                create_directories(volume, parent(&node.path), directory).with_context(context)?;
                let link = volume.read_link(node.attr.ino).with_context(context)?;
                replace_link(OsString::from_vec(link), &target).with_context(context)
            }
            NodeKind::File => {
                let (partial, file) = PartialFile::create(volume, node, directory)?;
                let open = tree::OpenNode::open(volume, node)?;
                tree::stream(&open, &node.path, (0, node.attr.size_bytes), CHUNK_BYTES, &mut |bytes| {
                    bytes.write_to(&file).with_context(|| partial.path.display().to_string())?;
                    bar.inc(bytes.len() as u64);
                    Ok(())
                })?;
                partial.complete(&file, written)
            }
        }
    }

    /// Removes the files that were written from sources found wrong at the end.
    fn remove_wrong(&self, nodes: &[PathNode]) {
        let is_wrong = |node: &&PathNode| node.attr.kind == NodeKind::File && self.volume.needs_poisoned(node.attr.ino);
        for node in nodes.iter().filter(is_wrong) {
            let path = self.directory.join(&node.path);
            let shown = path.display();
            match fs::remove_file(&path) {
                Ok(()) => tracing::error!("{shown}: removed: its source is wrong"),
                Err(error) => tracing::error!("{shown}: its source is wrong, and it cannot be removed: {error}"),
            }
        }
    }

    /// Whether a node is a file of which the digest tells. It says nothing of texts about the mount.
    fn has_stamp(&self, node: &PathNode) -> anyhow::Result<bool> {
        let ino = node.attr.ino;
        let has_image = || Ok::<_, anyhow::Error>(self.volume.image(ino).with_context(|| node.path.clone())?.is_some());
        Ok(node.attr.kind == NodeKind::File && (self.volume.original(ino).is_some() || has_image()?))
    }

    /// The state of the files of an export, if all are there.
    pub(super) fn state(&self, nodes: &[PathNode]) -> anyhow::Result<Option<String>> {
        let path = |node: &PathNode| Ok((self.directory.join(&node.path), self.has_stamp(node)?));
        let paths: Vec<_> = nodes.iter().map(path).collect::<anyhow::Result<_>>()?;
        Ok(state(self.digest, paths.into_iter()))
    }

    /// Whether an export of these nodes was completed, and its files are unchanged.
    pub(super) fn is_complete(&self, nodes: &[PathNode]) -> anyhow::Result<bool> {
        let left = completed(self.directory);
        Ok(left.is_some() && self.state(nodes)? == left)
    }

    /// Whether a task has completed its files, and they are unchanged.
    pub(super) fn share_is_complete(&self, part: ExportTask, what: &str, nodes: &[PathNode]) -> anyhow::Result<bool> {
        let Some(done) = CompleteFiles::of_task(self.directory, part, what)? else { return Ok(false) };
        Ok(done.is_share() && nodes.iter().all(|node| done.has(&self.directory.join(&node.path), self.digest)))
    }
}

fn check_room(directory: &Path, bytes: u64) -> anyhow::Result<()> {
    let stat = nix::sys::statvfs::statvfs(directory).with_context(|| directory.display().to_string())?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    if free < bytes {
        bail!("{}: {} are needed, {} are free", directory.display(), human_bytes(bytes), human_bytes(free));
    }
    Ok(())
}

pub(super) fn sync_directory(path: &Path) -> anyhow::Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).with_context(|| path.display().to_string())
}
