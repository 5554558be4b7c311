//! `ckfs fetch`: what this host's devices will read, into the disk cache.

use std::{path::PathBuf, sync::atomic::Ordering, thread, time::Duration};

use anyhow::{anyhow, bail};
use ckfs_checkpoint::Checkpoint;
use ckfs_config::HfCache;
use ckfs_plan::{FETCHED_BYTES, RemoteBytes, report::human_bytes};
use ckfs_service::plan_views;
use ckfs_source::{ByteSpan, FetchPart, FileId, RemoteSource, Source, remote::url_schemes};
use ckfs_volume::ViewPlan;
use clap::Args;
use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::{
    flags::{LogFlags, SourceFlags},
    open, output,
    paragraph::filled,
    tree,
};

/// Time between two updates of the progress.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes read at once where the cache keeps none, to learn why.
const PROBE_BYTES: usize = 1 << 20;

/// Fetches what this host's devices will read into the disk cache.
///
/// Brings the bytes of a remote source that the devices of --devices read under the same flags, and nothing else. What the cache
/// has already is not fetched again. A mount with the same --cache-dir, now or later, reads them locally. It works without a mount,
/// and before one.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs fetch meta-llama/Llama-3.1-70B --mesh fsdp=64 --devices 8-15
  ckfs fetch s3://bucket/llama --layout maxtext --mesh fsdp=64,tensor=8 --devices 0-7 --cache-dir /scratch/ckfs")]
pub(super) struct FetchCommand {
    #[arg(help = format!("org/name[@revision] on the Hub, hf://, {}", url_schemes()))]
    source: Option<String>,
    /// Prints JSON when all is done.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: SourceFlags,
}

impl FetchCommand {
    pub(super) fn run(&self, log: &LogFlags) -> anyhow::Result<()> {
        let mut config = open::source_config(self.source.as_deref(), &self.flags)?;
        let checkpoint = open::checkpoint(&mut config)?;
        let plans = plan_views(&checkpoint, &config).map_err(open::explained)?;
        let label = checkpoint.label();
        let needs = needs(&checkpoint, &plans)?;
        let (Some(before), Some(remote)) = (needs, checkpoint.source().remote()) else {
            let told = fetched(label, true, [0; 5], &[]);
            let text = "{source}: its files are on this machine; there is nothing to fetch\n";
            return output::print_either(self.json, &told, || filled(text, &told));
        };
        let bar = output::bar(before.absent_bytes, log);
        if remote.cache_limit().is_none() {
            bail!("{label}: no disk cache keeps what would be fetched; --cache-dir names a directory with room");
        }
        let failures = remote.counters().failures.load(Ordering::Relaxed);
        for view in &plans {
            request(&checkpoint, remote, view, &bar)?;
        }
        finish(remote, &bar);
        // What no view's tensors need: the other files. Nothing is requested between these spans. After a failure they are requested
        // one by one below, so that a service that is gone is waited for once.
        let failed = remote.counters().failures.load(Ordering::Relaxed) > failures;
        for (file, spans) in before.spans.iter().filter(|_| !failed) {
            for span in remote.absent_spans(*file, spans) {
                offer(remote, *file, &[span], &bar)?;
            }
        }
        finish(remote, &bar);
        complete(&**checkpoint.source(), remote, &before)?;
        bar.finish_and_clear();
        let shared = remote.share()?;
        let is_part = |file: &FileId| {
            let len = checkpoint.source().len_bytes(*file);
            ByteSpan::new(0, len).is_some_and(|all| remote.absent_bytes(*file, &[all]) > 0)
        };
        let parts = before.spans.iter().filter(|(file, _)| is_part(file)).count();
        let cached = before.spanned_bytes.saturating_sub(before.absent_bytes);
        let requests = remote.counters().requests.load(Ordering::Relaxed);
        let numbers = [before.needed_bytes, before.absent_bytes, cached, requests, parts as u64];
        let told = fetched(label, false, numbers, &shared);
        output::print_either(self.json, &told, || {
            let text = "{source}: {needed_bytes:b} needed; {fetched_bytes:b} fetched in {requests} requests, {cached_bytes:b} were in \
                        the cache\n";
            let mut text = filled(text, &told);
            if parts > 0 {
                let part = "not compared with the digests that their service names: {part_files} files, of which these devices need \
                            only a part\n";
                text += &filled(part, &told);
            }
            if config.mount.hf_cache == Some(HfCache::Share) {
                text += &shared_text(&shared);
            }
            text
        })
    }
}

/// The bytes that are needed, were fetched and were cached, and the numbers of requests and of files that are here in part.
fn fetched(
    label: &str,
    is_local: bool,
    [needed, fetched, cached, requests, parts]: [u64; 5],
    shared: &[PathBuf],
) -> Value {
    // A path that is no text has no other form in JSON.
    let shared: Vec<_> = shared.iter().map(|snapshot| snapshot.to_string_lossy()).collect();
    json!({
        "source": label, "is_local": is_local, "needed_bytes": needed, "fetched_bytes": fetched, "cached_bytes": cached,
        "requests": requests, "part_files": parts, "shared": shared,
    })
}

/// The result of `--hf-cache share`.
fn shared_text(snapshots: &[PathBuf]) -> String {
    if snapshots.is_empty() {
        return "not placed into the Hugging Face cache: not all files are complete here; without --mesh and --devices they are\n"
            .to_owned();
    }
    let lines = snapshots.iter().map(|snapshot| format!("{}: complete for other programs\n", snapshot.display()));
    lines.collect::<Vec<_>>().concat()
}

/// The needs of the listed devices of all views.
pub(super) fn needs(checkpoint: &Checkpoint, plans: &[ViewPlan]) -> anyhow::Result<Option<RemoteBytes>> {
    let views: Vec<_> = plans.iter().map(|view| (view.name.as_str(), &*view.plan)).collect();
    RemoteBytes::of(checkpoint, &views).map_err(|reason| anyhow!("{reason}"))
}

/// Requests what a view needs in the order of its tensors, as a trainer reads them.
fn request(
    checkpoint: &Checkpoint,
    remote: &dyn RemoteSource,
    view: &ViewPlan,
    bar: &ProgressBar,
) -> anyhow::Result<()> {
    let mut failure = None;
    let walked = view.plan.for_each_needed(checkpoint, &view.plan.devices, FETCHED_BYTES, &mut |file, spans| {
        failure = offer(remote, file, spans, bar).err();
        failure.is_none()
    });
    walked.map_err(|reason| anyhow!("{reason}"))?;
    failure.map_or(Ok(()), Err)
}

/// Requests spans, and waits while the source has enough requests.
fn offer(remote: &dyn RemoteSource, file: FileId, spans: &[ByteSpan], bar: &ProgressBar) -> anyhow::Result<()> {
    while !remote.prefetch(file, spans) {
        show(remote, bar);
        // A cache that was full a moment ago refuses, although another process may have left it.
        let bytes = spans.iter().map(|span| span.len()).sum();
        let has_room = || {
            remote.cache_limit().is_some_and(|(_, limit)| limit.limit_bytes >= limit.used_bytes.saturating_add(bytes))
        };
        if remote.ahead_jobs() == 0 && !remote.prefetch(file, spans) && !has_room() {
            let (total, limit) = (human_bytes(bar.length().unwrap_or(0)), limit_text(remote));
            bail!("the disk cache has no room for {total} that these devices read: {limit}");
        }
        thread::sleep(LOOK);
    }
    show(remote, bar);
    Ok(())
}

/// What bounds the disk cache, and what allows more.
fn limit_text(remote: &dyn RemoteSource) -> String {
    let Some((dir, limit)) = remote.cache_limit() else { return "there is none".to_owned() };
    let (dir, used, most) = (dir.display(), human_bytes(limit.used_bytes), human_bytes(limit.limit_bytes));
    match limit.disk {
        None => format!("{dir} holds {used} of at most {most}; --cache-disk-bytes allows more"),
        Some(disk) => format!(
            "of {} on the file system of {dir}, {} are free, and {} stay free; --cache-dir names another place, and \
             --cache-disk-bytes SIZE leaves 1 % free, at most 1 GiB",
            human_bytes(disk.total_bytes),
            human_bytes(disk.free_bytes),
            human_bytes(disk.kept_free_bytes),
        ),
    }
}

/// Waits until all that was requested is here.
fn finish(remote: &dyn RemoteSource, bar: &ProgressBar) {
    while remote.ahead_jobs() > 0 {
        show(remote, bar);
        thread::sleep(LOOK);
    }
}

fn show(remote: &dyn RemoteSource, bar: &ProgressBar) {
    let fetched = remote.counters().fetched_bytes.load(Ordering::Relaxed);
    // Headers were fetched before, and count too.
    bar.set_position(fetched.min(bar.length().unwrap_or(u64::MAX)));
}

/// Checks that the cache has everything, and says why if it does not.
fn complete(source: &dyn Source, remote: &dyn RemoteSource, needs: &RemoteBytes) -> anyhow::Result<()> {
    for (file, spans) in &needs.spans {
        let absent: Vec<ByteSpan> =
            spans.iter().copied().filter(|span| remote.absent_bytes(*file, &[*span]) > 0).collect();
        for span in &absent {
            // A reader's request waits for the bytes, and says why they do not come.
            for (start, len) in tree::parts(span.start(), span.end(), PROBE_BYTES) {
                source.fetch(*file, &mut [FetchPart { start, target: &mut vec![0; len] }])?;
            }
        }
        let left = remote.absent_bytes(*file, &absent);
        if left > 0 {
            bail!(
                "{}: {} came but are not in the disk cache: it has no room, or another process removes what this one fetches",
                source.path(*file).display(),
                human_bytes(left)
            );
        }
    }
    Ok(())
}
