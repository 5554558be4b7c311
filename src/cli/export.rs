//! `ckfs export`: the virtual tree as real files.

#[cfg(feature = "stores")]
mod bucket;
mod chunked;
mod directory;
mod files;
mod journal;
mod parts;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use ckfs_config::Config;
use ckfs_fuse::ckfs_mounts;
use ckfs_plan::report::human_bytes;
use ckfs_service::identity::{self, IdentityScope};
#[cfg(feature = "stores")]
use ckfs_source::remote::Bucket;
use ckfs_volume::{NodeKind, Volume};
use clap::Args;
use serde_json::{Value, json};

#[cfg(feature = "stores")]
use self::bucket::BucketExport;
use self::{
    directory::{DirectoryExport, sync_directory},
    files::{create_target, replace_link},
    journal::{BusyTarget, Journal, complete, completed, end_of_tasks, interrupted},
    parts::{ExportPart, ExportTask, shares},
};
use super::{
    flags::{LogFlags, SourceFlags, source_help},
    open,
    output::{self, Usage},
    paragraph, steps, tree,
};

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
/// With `--part K/N` this is one of N tasks that export together: each is given the same command but for K, and writes a share
/// of the files. Files that need the same compressed chunks of the source are in one share. The task that finds all shares
/// complete writes the indexes and other files without tensors, so that no checkpoint is there before its tensors are. A task
/// that runs again finds its files complete.
///
/// DIR may be an address of a bucket, s3://, gs:// or az://, of one checkpoint.
///
/// A file is readable by exactly the users that can read the source files it is made of, whatever the umask.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs export /data/llama /scratch/llama --mesh fsdp=8 --only 'safetensors/*'
  ckfs export /data/llama /scratch/llama-bf16 --dtype bf16 --only hf
  ckfs export /data/llama /scratch/dev3 --mesh fsdp=4 --only dev3
  ckfs export /data/llama /shared/llama --layout maxtext --part $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT

A pattern of --only matches a path or a directory above it; * stands for any text, also with slashes.")]
pub(super) struct Export {
    #[arg(value_name = "SOURCE", help = source_help())]
    first: String,
    /// Where to: a directory that is empty or not there yet, or that of an interrupted export of the same; or a bucket.
    #[arg(value_name = "DIR")]
    second: Option<String>,
    /// Only what matches this pattern; may be repeated.
    #[arg(long, value_name = "GLOB")]
    only: Vec<String>,
    /// Writes into a directory that has something in it, replacing files; begins an interrupted export anew.
    #[arg(long)]
    force: bool,
    /// The K-th of N tasks that export together, K from 1 to N or from 0 to N-1; or, as for other commands, a part of the model.
    #[arg(long, value_name = "K/N|PART")]
    part: Vec<ExportPart>,
    /// Prints JSON when all is done.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: SourceFlags,
}

/// A path without links or `..`, as far as it exists.
fn real(path: &Path) -> PathBuf {
    let there = |part: &Path| Some(fs::canonicalize(part).ok()?.join(path.strip_prefix(part).ok()?));
    path.ancestors().find_map(there).unwrap_or_else(|| path.to_owned())
}

impl Export {
    /// The flags of a view, with the part of the model.
    fn flags(&self) -> SourceFlags {
        let mut flags = self.flags.clone();
        let model = |part: &ExportPart| if let ExportPart::Model(part) = part { Some(*part) } else { None };
        flags.settings.view.part = self.part.iter().rev().find_map(model);
        flags
    }

    /// The task that this one is, if there are several.
    fn task(&self) -> Option<ExportTask> {
        let task = |part: &ExportPart| if let ExportPart::Task(task) = part { Some(*task) } else { None };
        self.part.iter().rev().find_map(task)
    }

    pub(super) fn run(&self, log: &LogFlags) -> anyhow::Result<()> {
        let (source, directory) = open::source_and(&self.first, self.second.as_deref(), &self.flags(), "DIR")?;
        tree::patterns(&self.only)?;
        if directory.contains("://") {
            return self.run_into_bucket(source, directory, log);
        }
        let directory = std::path::absolute(directory).context("DIR")?;
        check_target(&directory, source, self.force)?;
        let mut config = open::source_config(source, &self.flags())?;
        let Some(wanted) = config.mount.steps else {
            let written = self.export(&mut config, &directory, None, log)?;
            return if self.json { output::print_json(&written) } else { Ok(()) };
        };
        if self.task().is_some() {
            return Err(one_checkpoint("--part"));
        }
        let mut all = Vec::new();
        let steps = steps::selected(&config, wanted)?;
        let latest = steps.last().map(|(step, _)| step.number.to_string());
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        let mut journal = Journal::open(&directory, None, &config.to_toml()?, self.force)?;
        for (step, mut config) in steps {
            let target = directory.join(step.number.to_string());
            let mut written = self
                .export(&mut config, &target, Some(&mut journal), log)
                .with_context(|| format!("step {}", step.number))?;
            written["step"] = step.number.into();
            all.push(written);
        }
        if let Some(latest) = latest {
            let link = directory.join("latest");
            replace_link(latest, &link).with_context(|| link.display().to_string())?;
        }
        journal.end()?;
        complete(&directory, "steps");
        if self.json { output::print_json(&json!({ "directory": directory, "steps": all })) } else { Ok(()) }
    }

    fn nodes(&self, volume: &Volume) -> anyhow::Result<Vec<tree::PathNode>> {
        // The counters of this process describe no mount.
        tree::select(volume, &self.only, "export", &|node| {
            ![".ckfs/stats.json", ".ckfs/metrics"].contains(&node.path.as_str())
        })
    }

    #[cfg(not(feature = "stores"))]
    fn run_into_bucket(&self, _: Option<&str>, address: &str, _: &LogFlags) -> anyhow::Result<()> {
        bail!("{address}: this build of ckfs writes to no object store (feature `stores`)")
    }

    /// Writes the files of one checkpoint, or the share of a task, into a bucket.
    #[cfg(feature = "stores")]
    fn run_into_bucket(&self, source: Option<&str>, address: &str, log: &LogFlags) -> anyhow::Result<()> {
        let mut config = open::source_config(source, &self.flags())?;
        if config.mount.steps.is_some() {
            return Err(one_checkpoint("a bucket"));
        }
        let Some(bucket) = Bucket::open(address, &ckfs_service::remote_options(&config.mount)) else {
            return Err(Usage(format!("{address}: expected a directory, s3://, gs:// or az://")).into());
        };
        let bucket = bucket?;
        let volume = open::volume(&mut config)?;
        let label = volume.engine().checkpoint().label();
        if share_a_place(address, label) {
            bail!("{address}: lies inside the source {label}, or the source inside of it: give another place");
        }
        let nodes = self.nodes(&volume)?;
        let part = self.task().unwrap_or(ExportTask { number: 1, of: 1 });
        let shares = shares(&volume, &nodes, part)?;
        let mut told = Told { export: self, log, place: Path::new(address), nodes: shares.of(part), kept_files: 0 };
        let bar = output::bar(tree::total_bytes(told.nodes), log);
        let (digest, force) = (digest(&volume), self.force);
        let (volume, bucket, digest) = (&volume, &bucket, digest.as_str());
        let export = BucketExport { volume, bucket, address, digest, part, shares: &shares, force, bar: &bar };
        let (kept_files, is_complete) = export.run(&nodes)?;
        bar.finish_and_clear();
        told.kept_files = kept_files;
        let written = told.done(None, is_complete);
        if self.json { output::print_json(&written) } else { Ok(()) }
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
        let nodes = self.nodes(&volume)?;
        let root = volume.engine().checkpoint().root();
        if real(directory).starts_with(real(root)) {
            return Err(inside_source(directory, root));
        }
        let digest = digest(&volume);
        let to = DirectoryExport { volume: &volume, directory, digest: &digest, log };
        let is_complete = || to.is_complete(&nodes);
        let shares_of = |part| Ok::<_, anyhow::Error>((part, shares(&volume, &nodes, part)?));
        let tasks = self.task().map(shares_of).transpose()?;
        let mine = tasks.as_ref().map_or(&nodes[..], |(part, shares)| shares.of(*part));
        let mut told = Told { export: self, log, place: directory, nodes: mine, kept_files: 0 };
        // In this order: what is there before the journals are looked for has one, or is complete.
        let has_entries = fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some());
        let others = interrupted(directory);
        if !self.force && (others.is_empty() || tasks.is_some()) {
            if is_complete()? {
                told.kept_files = mine.iter().filter(|node| node.attr.kind == NodeKind::File).count();
                return Ok(told.done(Some(": complete already"), true));
            }
            let is_ours = journal.as_ref().is_some_and(|journal| journal.has_begun(directory)) || !others.is_empty();
            if !is_ours && has_entries {
                return Err(not_empty(directory));
            }
        }
        create_target(&volume, directory).with_context(|| directory.display().to_string())?;
        let what = self.task().map_or_else(|| digest.clone(), |part| part.what(&digest, &nodes));
        let (mut own, journal) = match journal {
            Some(given) => {
                given.begin(directory)?;
                (None, Some(given))
            }
            None => (Some(Journal::open(directory, self.task(), &what, self.force)?), None),
        };
        // The task that has found all complete may have removed the journals just now, and said so before.
        if !self.force
            && tasks.is_some()
            && is_complete()?
            && let Some(own) = own.take()
        {
            own.end()?;
            return Ok(told.done(Some(": complete already"), true));
        }
        let Some(journal) = journal.or(own.as_mut()) else { bail!("export without a journal") };
        if tasks.is_some() {
            journal.note_share(false)?;
        }
        told.kept_files = to.write_all(mine, journal)?;
        let mut last = None;
        if let Some((part, shares)) = &tasks {
            journal.note_share(true)?;
            for task in part.all() {
                if !to.share_is_complete(task, &what, shares.of(task))? {
                    // The task that has found all complete may have removed their journals.
                    return Ok(told.done(None, is_complete()?));
                }
            }
            last = match Journal::open(directory, None, &what, false) {
                Err(error) if error.is::<BusyTarget>() => {
                    return Ok(told.done(Some("; another task writes the last files"), false));
                }
                opened => Some(opened?),
            };
            if let Some(journal) = &mut last {
                to.write_all(&shares.last, journal)?;
            }
        }
        let is_noted = to.state(&nodes)?.is_some_and(|state| complete(directory, &state));
        sync_directory(directory)?;
        match (&tasks, own, last) {
            // Where nothing tells that the export is complete, the journals do.
            (Some(_), ..) if !is_noted => {}
            (Some((part, _)), _, Some(last)) => {
                end_of_tasks(directory, *part)?;
                last.end()?;
            }
            (None, Some(own), _) => own.end()?,
            (..) => {}
        }
        Ok(told.done(None, true))
    }
}

/// Whether one of two addresses is a place inside the other, by whatever scheme.
fn share_a_place(one: &str, other: &str) -> bool {
    let place = |address: &str| address.split_once("://").map(|(_, rest)| format!("{}/", rest.trim_end_matches('/')));
    place(one).zip(place(other)).is_some_and(|(one, other)| one.starts_with(&other) || other.starts_with(&one))
}

fn one_checkpoint(what: &str) -> anyhow::Error {
    let message =
        format!("{what} takes one checkpoint, and --steps is of a run: give the directory of a step as SOURCE");
    Usage(message).into()
}

/// What an export says of itself when it is done.
struct Told<'a> {
    export: &'a Export,
    log: &'a LogFlags,
    place: &'a Path,
    nodes: &'a [tree::PathNode],
    kept_files: usize,
}

impl Told<'_> {
    /// Tells how many files are there, and, unless other words say it, whether those of all tasks are.
    fn done(&self, words: Option<&str>, is_complete: bool) -> Value {
        let words = words.unwrap_or(match (self.export.task(), is_complete) {
            (None, _) => "",
            (Some(_), true) => "; all parts are complete",
            (Some(_), false) => "; other parts are not complete yet",
        });
        let (total, count) =
            (tree::total_bytes(self.nodes), |kind| self.nodes.iter().filter(|node| node.attr.kind == kind).count());
        let files = count(NodeKind::File);
        if !self.export.json && !self.log.quiet {
            let part = self.export.task().map_or_else(String::new, |part| format!("part {part}: "));
            let (counted, bytes, place) = (paragraph::counted(files, "file"), human_bytes(total), self.place.display());
            ckfs_host::tell(&format!("ckfs: {part}{counted}, {bytes} in {place}{words}\n"));
        }
        let mut told = json!({
            "directory": self.place.display().to_string(), "files": files, "bytes": total,
            "directories": count(NodeKind::Directory), "links": count(NodeKind::Symlink), "kept_files": self.kept_files,
        });
        if let Some(part) = self.export.task() {
            told["part"] = part.to_string().into();
            told["complete"] = is_complete.into();
        }
        told
    }
}

/// The digest of what is exported, and by which program.
fn digest(volume: &Volume) -> String {
    let checkpoint = volume.engine().checkpoint();
    let commit = |plan| identity::commit(checkpoint, plan, IdentityScope::FileSystem);
    let views: Vec<String> = volume.plans().iter().map(|plan| commit(plan)).collect();
    identity::of_views(views.iter().map(|commit| (env!("CKFS_COMMIT"), commit.as_str())))
}

fn inside_source(directory: &Path, source: &Path) -> anyhow::Error {
    anyhow!("{}: lies inside the source {}: give a directory outside of it", directory.display(), source.display())
}

fn not_empty(directory: &Path) -> anyhow::Error {
    anyhow!("{}: not empty; --force writes into it all the same", directory.display())
}

fn check_target(directory: &Path, source: Option<&str>, force: bool) -> anyhow::Result<()> {
    let mut entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        found => found.with_context(|| directory.display().to_string())?,
    };
    if force || entries.next().is_none() {
        return Ok(());
    }
    // After the look that found something: what that is of, another task may just have begun.
    if !interrupted(directory).is_empty() || completed(directory).is_some() {
        return Ok(());
    }
    // What is refused with --force too proposes no --force.
    if let Some(mount) = ckfs_mounts().iter().find(|mount| real(directory).starts_with(&mount.mountpoint)) {
        let (directory, at) = (directory.display(), mount.mountpoint.display());
        bail!("{directory}: lies in the ckfs mount {at}, which is read-only: give another directory");
    }
    Err(match source.map(Path::new).filter(|source| real(directory).starts_with(real(source))) {
        Some(source) => inside_source(directory, source),
        None => not_empty(directory),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_no_target_where_it_is_the_source() {
        for (one, other, is_same) in [
            ("s3://b/m", "s3://b/m/", true),
            ("s3a://b/m/out", "s3://b/m", true),
            ("s3://b", "s3://b/m", true),
            ("s3://b/m2", "s3://b/m", false),
            ("s3://b/m", "/b/m", false),
            ("s3://b/m", "hf://org/m", false),
        ] {
            assert_eq!(share_a_place(one, other), is_same, "{one} {other}");
        }
    }
}
