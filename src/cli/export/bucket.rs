//! An export into a bucket, where files are objects: each appears when all of it has come, with the digest of its view and sources
//! among its metadata. So the objects are their own journal. As long as tasks are at it there are a claim, by which they agree on
//! what is exported, and a mark of each task that is done; the one that finds all marks writes what belongs to no share.

use std::collections::{HashMap, HashSet};

use anyhow::bail;
use ckfs_service::identity;
use ckfs_source::{Served, remote::Bucket};
use ckfs_volume::{NodeKind, Volume};
use indicatif::ProgressBar;

use super::{
    super::tree::{self, PathNode},
    files::CHUNK_BYTES,
    parts::{ExportTask, Shares},
};

/// The object that says what is exported.
const CLAIM: &str = ".ckfs-export";

fn mark_of(ExportTask { number, of }: ExportTask) -> String {
    format!("{CLAIM}-part-{number}-of-{of}")
}

/// What a task of an export has to do with a bucket.
pub(super) struct BucketExport<'a> {
    pub(super) volume: &'a Volume,
    pub(super) bucket: &'a Bucket,
    pub(super) address: &'a str,
    pub(super) digest: &'a str,
    pub(super) part: ExportTask,
    pub(super) shares: &'a Shares,
    pub(super) force: bool,
    pub(super) bar: &'a ProgressBar,
}

fn is_file(node: &PathNode) -> bool {
    node.attr.kind == NodeKind::File
}

impl BucketExport<'_> {
    /// Writes the share of the task, and the last objects if all shares are there. Returns how many files of the share were
    /// complete before, and whether the export is complete.
    pub(super) fn run(&self, nodes: &[PathNode]) -> anyhow::Result<(usize, bool)> {
        let (bucket, part, mine) = (self.bucket, self.part, self.shares.of(self.part));
        let what = part.what(self.digest, nodes);
        let there = bucket.list()?;
        if !self.force && there.contains_key(CLAIM) {
            self.check_claim(&what)?;
        }
        let missing = self.missing(mine, &there)?;
        let kept_files = mine.len() - missing.len();
        if !self.force {
            let is_whole =
                !there.contains_key(CLAIM) && missing.is_empty() && nodes.iter().all(|node| is_listed(node, &there));
            if is_whole && self.missing(&self.shares.last, &there)?.is_empty() {
                return Ok((kept_files, true));
            }
            let known: HashSet<&str> = nodes.iter().map(|node| node.path.as_str()).collect();
            let is_other = |name: &&String| !name.starts_with(CLAIM) && !known.contains(name.as_str());
            if let Some(other) = there.keys().filter(is_other).min() {
                bail!("{}: not empty, it has {other}; --force writes there all the same", self.address);
            }
        }
        if !bucket.mark(CLAIM, &what, self.force)? {
            self.check_claim(&what)?;
        }
        bucket.remove(&mark_of(part))?;
        self.write_all(&missing)?;
        bucket.mark(&mark_of(part), &what, true)?;
        let there = bucket.list()?;
        if !there.contains_key(CLAIM) {
            // Another task has found all complete meanwhile.
            bucket.remove(&mark_of(part))?;
            return Ok((kept_files, true));
        }
        for other in part.all() {
            let is_there = self.shares.of(other).iter().all(|node| is_listed(node, &there));
            if !is_there
                || !there.contains_key(&mark_of(other))
                || bucket.text_of(&mark_of(other))?.as_ref() != Some(&what)
            {
                return Ok((kept_files, false));
            }
        }
        self.check_claim(&what)?;
        self.write_all(&self.missing(&self.shares.last, &there)?)?;
        // A task that comes now finds all complete, and leaves no mark.
        bucket.remove(CLAIM)?;
        part.all().try_for_each(|other| bucket.remove(&mark_of(other)))?;
        Ok((kept_files, true))
    }

    /// Checks that the tasks that are at work there, if any, are of the same export.
    fn check_claim(&self, what: &str) -> anyhow::Result<()> {
        match self.bucket.text_of(CLAIM)? {
            Some(found) if found != what => bail!(
                "{}: an export of another view, of a source that has changed or in another number of parts is under way or was \
                 interrupted there: {CLAIM} has {found:?}, expected {what:?}; --force begins anew",
                self.address
            ),
            Some(_) | None => Ok(()),
        }
    }

    /// The text that the object of a node has.
    fn text(&self, node: &PathNode) -> String {
        identity::file_digest(self.digest, &node.path, node.attr.size_bytes)
    }

    /// The files that are not there; with `--force` all.
    fn missing<'n>(&self, nodes: &'n [PathNode], there: &HashMap<String, u64>) -> anyhow::Result<Vec<&'n PathNode>> {
        let mut missing = Vec::new();
        for node in nodes.iter().filter(|node| is_file(node)) {
            if self.force || !there.contains_key(&node.path) {
                missing.push(node);
            } else if self.bucket.text_of(&node.path)?.is_some_and(|found| found != self.text(node)) {
                bail!("{}: has another {}; --force replaces it", self.address, node.path);
            }
        }
        Ok(missing)
    }

    fn write_all(&self, nodes: &[&PathNode]) -> anyhow::Result<()> {
        for node in nodes {
            self.bar.set_message(node.path.clone());
            let size_bytes = node.attr.size_bytes;
            self.bucket.write(&node.path, size_bytes, &self.text(node), |send| {
                let open = tree::OpenNode::open(self.volume, node)?;
                tree::stream(&open, &node.path, (0, size_bytes), CHUNK_BYTES, &mut |bytes: Served<'_>| {
                    let bytes = bytes.to_vec()?;
                    self.bar.inc(bytes.len() as u64);
                    Ok(send(bytes)?)
                })
            })?;
        }
        ckfs_service::check_sources(self.volume).inspect_err(|_| {
            for node in nodes.iter().filter(|node| self.volume.needs_poisoned(node.attr.ino)) {
                match self.bucket.remove(&node.path) {
                    Ok(()) => tracing::error!("{}/{}: removed: its source is wrong", self.address, node.path),
                    Err(error) => tracing::error!("its source is wrong, and it cannot be removed: {error}"),
                }
            }
        })?;
        Ok(())
    }
}

fn is_listed(node: &PathNode, there: &HashMap<String, u64>) -> bool {
    node.attr.kind != NodeKind::File || there.get(&node.path) == Some(&node.attr.size_bytes)
}
