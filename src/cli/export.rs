//! `ckfs export`: the virtual tree as real files.

mod chunked;
mod files;
mod journal;

use std::{
    fs::{self, File},
    os::unix::{ffi::OsStringExt, fs::symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use ckfs_config::Config;
use ckfs_fuse::ckfs_mounts;
use ckfs_plan::report::human_bytes;
use ckfs_service::identity::{self, IdentityScope};
use ckfs_volume::{FileSystem, NodeKind, Volume};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use self::{
    files::{create_directories, create_file, create_target, finish, partial_path},
    journal::{Journal, Written, complete, completed, interrupted, state},
};
use super::{
    flags::{LogFlags, SourceFlags, source_help},
    open, output, paragraph, steps, tree,
};

/// Bytes read at once.
const CHUNK_BYTES: usize = 8 << 20;

/// Writes the virtual files to a directory, without mounting.
///
/// Everything that the same flags would mount becomes real files: all of it, or the files that --only names. Every file
/// is written under another name, synced, and renamed when complete, so that no file is there in part.
///
/// With `--steps` each selected step of a run is written to DIR/STEP, and DIR/latest leads to the newest. The same command
/// later adds the steps that have come since.
///
/// An export that was interrupted, by a signal, an error or the end of the host, goes on if the same command is given
/// again: files that are complete, and unchanged since, are kept. Until the end, DIR has a file `.ckfs-export`. The same
/// command after that finds the files complete, and changes nothing.
///
/// A file is readable by exactly the users that can read the source files it is made of, whatever the umask.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs export /data/llama /scratch/llama --mesh fsdp=8 --only 'safetensors/*'
  ckfs export /data/llama /scratch/llama-bf16 --dtype bf16 --only hf
  ckfs export /data/llama /scratch/dev3 --mesh fsdp=4 --only dev3

A pattern of --only matches a path or a directory above it; * stands for any text, also with slashes.")]
pub(super) struct Export {
    #[arg(value_name = "SOURCE", help = source_help())]
    first: String,
    /// Where to: a directory that is empty or not there yet, or that of an interrupted export of the same.
    #[arg(value_name = "DIR")]
    second: Option<String>,
    /// Only what matches this pattern; may be repeated.
    #[arg(long, value_name = "GLOB")]
    only: Vec<String>,
    /// Writes into a directory that has something in it, replacing files; begins an interrupted export anew.
    #[arg(long)]
    force: bool,
    /// Prints JSON when all is done.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: SourceFlags,
}

/// A bar on standard error, where that is a terminal.
pub(super) fn bar(bytes: u64, log: &LogFlags) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    // The bar hides itself if standard error is not a terminal.
    bar.set_draw_target(if log.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() });
    let template = "{bar:30} {percent:>3} %  {bytes} of {total_bytes}  {binary_bytes_per_sec}  {eta}  {wide_msg}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// A path without links or `..`, as far as it exists.
fn real(path: &Path) -> PathBuf {
    let there = |part: &Path| Some(fs::canonicalize(part).ok()?.join(path.strip_prefix(part).ok()?));
    path.ancestors().find_map(there).unwrap_or_else(|| path.to_owned())
}

impl Export {
    pub(super) fn run(&self, log: &LogFlags) -> anyhow::Result<()> {
        let (source, directory) = open::source_and(&self.first, self.second.as_deref(), &self.flags, "DIR")?;
        tree::patterns(&self.only)?;
        let directory = std::path::absolute(directory).context("DIR")?;
        let is_known = interrupted(&directory).is_some() || completed(&directory).is_some();
        check_target(&directory, source, self.force || is_known)?;
        let mut config = open::source_config(source, &self.flags)?;
        let Some(wanted) = config.mount.steps else {
            let written = self.export(&mut config, &directory, None, log)?;
            return if self.json { output::print_json(&written) } else { Ok(()) };
        };
        let mut all = Vec::new();
        let steps = steps::selected(&config, wanted)?;
        let latest = steps.last().map(|(step, _)| step.number.to_string());
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        let mut journal = Journal::open(&directory, &config.to_toml()?, self.force)?;
        for (step, mut config) in steps {
            let target = directory.join(step.number.to_string());
            let mut written = self
                .export(&mut config, &target, Some(&mut journal), log)
                .with_context(|| format!("step {}", step.number))?;
            written["step"] = step.number.into();
            all.push(written);
        }
        if let Some(latest) = latest {
            replace_link(Path::new(&latest), &directory.join("latest"))?;
        }
        journal.end()?;
        complete(&directory, "steps");
        if self.json { output::print_json(&json!({ "directory": directory, "steps": all })) } else { Ok(()) }
    }

    /// Writes the files of one checkpoint to a directory: all of an export, or of one that has a journal already.
    fn export(
        &self,
        config: &mut Config,
        directory: &Path,
        journal: Option<&mut Journal>,
        log: &LogFlags,
    ) -> anyhow::Result<Value> {
        let volume = open::volume(config)?;
        // The counters of this process describe no mount.
        let nodes = tree::select(&volume, &self.only, "export", &|node| {
            ![".ckfs/stats.json", ".ckfs/metrics"].contains(&node.path.as_str())
        })?;
        let root = volume.engine().checkpoint().root();
        if real(directory).starts_with(real(root)) {
            return Err(inside_source(directory, root));
        }
        let total = tree::total_bytes(&nodes);
        let count = |kind| nodes.iter().filter(|node| node.attr.kind == kind).count();
        let (files, directories, links) = (count(NodeKind::File), count(NodeKind::Directory), count(NodeKind::Symlink));
        let done = |kept: usize, what: &str| {
            if !self.json && !log.quiet {
                let (bytes, place) = (human_bytes(total), directory.display());
                ckfs_host::tell(&format!("ckfs: {}, {bytes} in {place}{what}\n", paragraph::counted(files, "file")));
            }
            json!({
                "directory": directory.display().to_string(), "files": files, "bytes": total, "directories": directories,
                "links": links, "kept_files": kept,
            })
        };
        let digest = digest(&volume);
        let now = || state_of(&volume, &nodes, directory, &digest);
        if !self.force && interrupted(directory).is_none() {
            let left = completed(directory);
            if left.is_some() && now()? == left {
                return Ok(done(files, ": complete already"));
            }
            let is_ours = journal.as_ref().is_some_and(|journal| journal.has_begun(directory));
            if !is_ours && fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some()) {
                return Err(not_empty(directory));
            }
        }
        create_target(&volume, directory).with_context(|| directory.display().to_string())?;
        let (mut own, journal) = match journal {
            Some(given) => {
                given.begin(directory)?;
                (None, Some(given))
            }
            None => (Some(Journal::open(directory, &digest, self.force)?), None),
        };
        let Some(journal) = journal.or(own.as_mut()) else { bail!("export without a journal") };
        let (kept, missing) = kept_and_missing(&volume, &nodes, directory, &digest, journal)?;
        let kept_bytes = tree::total_bytes(&kept);
        if !kept.is_empty() && !log.quiet {
            let (count, kept, all) = (kept.len(), human_bytes(kept_bytes), human_bytes(total));
            ckfs_host::tell(&format!("ckfs: {count} files, {kept} of {all}, are complete already\n"));
        }
        check_room(directory, total - kept_bytes)?;
        let bar = bar(total, log);
        bar.inc(kept_bytes);
        let (chunked, others) = chunked::split(&volume, &missing)?;
        let mut written = |path: &Path| journal.note(path, &digest);
        for node in others {
            bar.set_message(node.path.clone());
            write_node(&volume, node, directory, &bar, &mut written)?;
        }
        chunked::write(&volume, &chunked, directory, &bar, &mut written)?;
        ckfs_service::check_sources(&volume).inspect_err(|_| remove_wrong(&volume, &nodes, directory))?;
        for node in nodes.iter().filter(|node| node.attr.kind == NodeKind::Directory) {
            sync_directory(&directory.join(&node.path))?;
        }
        if let Some(own) = own {
            own.end()?;
        }
        if let Some(state) = now()? {
            complete(directory, &state);
        }
        sync_directory(directory)?;
        bar.finish_and_clear();
        Ok(done(kept.len(), ""))
    }
}

/// The digest of what is exported, and by which program.
fn digest(volume: &Volume) -> String {
    let checkpoint = volume.engine().checkpoint();
    let commit = |plan| identity::commit(checkpoint, plan, IdentityScope::FileSystem);
    let views: Vec<String> = volume.plans().iter().map(|plan| commit(plan)).collect();
    identity::of_views(views.iter().map(|commit| (env!("CKFS_COMMIT"), commit.as_str())))
}

/// Whether a node is a file of which the digest tells. It says nothing of texts about the mount.
fn has_stamp(volume: &Volume, node: &tree::PathNode) -> anyhow::Result<bool> {
    let ino = node.attr.ino;
    let has_image = || Ok::<_, anyhow::Error>(volume.image(ino).with_context(|| node.path.clone())?.is_some());
    Ok(node.attr.kind == NodeKind::File && (volume.original(ino).is_some() || has_image()?))
}

/// The state of the files of an export, if all are there.
fn state_of(
    volume: &Volume,
    nodes: &[tree::PathNode],
    directory: &Path,
    digest: &str,
) -> anyhow::Result<Option<String>> {
    let path = |node: &tree::PathNode| Ok((directory.join(&node.path), has_stamp(volume, node)?));
    let paths: Vec<_> = nodes.iter().map(path).collect::<anyhow::Result<_>>()?;
    Ok(state(digest, paths.into_iter()))
}

/// The files that an interrupted export has left complete, and everything else.
fn kept_and_missing(
    volume: &Volume,
    nodes: &[tree::PathNode],
    directory: &Path,
    digest: &str,
    journal: &Journal,
) -> anyhow::Result<(Vec<tree::PathNode>, Vec<tree::PathNode>)> {
    let (mut kept, mut missing) = (Vec::new(), Vec::new());
    for node in nodes {
        let is_kept = journal.has(&directory.join(&node.path), digest) && has_stamp(volume, node)?;
        if is_kept { &mut kept } else { &mut missing }.push(node.clone());
    }
    Ok((kept, missing))
}

/// Makes a symbolic link, or lets the one of this name lead elsewhere in one step.
fn replace_link(to: &Path, link: &Path) -> anyhow::Result<()> {
    let context = || link.display().to_string();
    let partial = link.with_extension(format!("{}.partial", std::process::id()));
    symlink(to, &partial).with_context(context)?;
    fs::rename(&partial, link).with_context(context)
}

/// Removes the files that were written from sources found wrong at the end.
fn remove_wrong(volume: &Volume, nodes: &[tree::PathNode], directory: &Path) {
    for node in nodes.iter().filter(|node| node.attr.kind == NodeKind::File && volume.needs_poisoned(node.attr.ino)) {
        let path = directory.join(&node.path);
        match fs::remove_file(&path) {
            Ok(()) => tracing::error!("{}: removed: its source is wrong", path.display()),
            Err(error) => tracing::error!("{}: its source is wrong, and it cannot be removed: {error}", path.display()),
        }
    }
}

fn inside_source(directory: &Path, source: &Path) -> anyhow::Error {
    anyhow!("{}: lies inside the source {}: give a directory outside of it", directory.display(), source.display())
}

fn not_empty(directory: &Path) -> anyhow::Error {
    anyhow!("{}: not empty; --force writes into it all the same", directory.display())
}

fn check_target(directory: &Path, source: Option<&str>, force: bool) -> anyhow::Result<()> {
    match fs::read_dir(directory) {
        Ok(mut entries) => {
            if !force && entries.next().is_some() {
                // What is refused with --force too proposes no --force.
                if let Some(mount) = ckfs_mounts().iter().find(|mount| real(directory).starts_with(&mount.mountpoint)) {
                    let at = mount.mountpoint.display();
                    bail!(
                        "{}: lies in the ckfs mount {at}, which is read-only: give another directory",
                        directory.display()
                    );
                }
                if let Some(source) = source.map(Path::new).filter(|source| real(directory).starts_with(real(source))) {
                    return Err(inside_source(directory, source));
                }
                return Err(not_empty(directory));
            }
            Ok(())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| directory.display().to_string()),
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

fn sync_directory(path: &Path) -> anyhow::Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).with_context(|| path.display().to_string())
}

fn write_node(
    volume: &Volume,
    node: &tree::PathNode,
    directory: &Path,
    bar: &ProgressBar,
    written: &mut Written<'_>,
) -> anyhow::Result<()> {
    let target = directory.join(&node.path);
    let context = || target.display().to_string();
    if node.attr.kind == NodeKind::Directory {
        return create_directories(volume, &node.path, directory).with_context(context);
    }
    let partial = partial_path(volume, node, directory).with_context(context)?;
    if node.attr.kind == NodeKind::Symlink {
        let link = volume.read_link(node.attr.ino).with_context(context)?;
        match fs::remove_file(&partial) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error).with_context(context),
            Ok(()) | Err(_) => {}
        }
        symlink(std::ffi::OsString::from_vec(link), &partial).with_context(context)?;
    } else {
        let result = write_file(volume, node, &partial, bar);
        if result.is_err() {
            let _ = fs::remove_file(&partial);
        }
        result?;
    }
    fs::rename(&partial, &target).with_context(context)?;
    if node.attr.kind == NodeKind::File { written(&target) } else { Ok(()) }
}

fn write_file(volume: &Volume, node: &tree::PathNode, partial: &Path, bar: &ProgressBar) -> anyhow::Result<()> {
    let context = || partial.display().to_string();
    let file = create_file(volume, node, partial).with_context(context)?;
    let open = tree::OpenNode::open(volume, node)?;
    tree::stream(&open, &node.path, (0, node.attr.size_bytes), CHUNK_BYTES, &mut |bytes| {
        bytes.write_to(&file).with_context(context)?;
        bar.inc(bytes.len() as u64);
        Ok(())
    })?;
    finish(&file, node, partial)
}
