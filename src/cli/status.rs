//! `ckfs status`: the mounts and their state.

use std::{
    fmt::Write,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{anyhow, bail};
use ckfs_checkpoint::printable_lines;
use ckfs_config::{Config, LayoutChoice};
use ckfs_fuse::{MountEntry, ckfs_mounts};
use ckfs_host::ask_within;
use ckfs_plan::Layout;
use clap::Args;
use serde_json::{Value, json};

use super::{
    hint, last_mount, output,
    paragraph::{counted, filled, items},
};

/// Longest time for the answer of a mount.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Shows the mounts and their state.
///
/// One line for each ckfs mount: mountpoint, health, views, bytes served, source; below it what is wrong. Of MNT: also the
/// process, counters, and the memory that it holds and may hold.
///
/// A mount is healthy, or in one of these states. Degraded: it answers, but a source file changed or does not answer, a
/// read or an open failed because of a source, or a request panicked. Each problem is listed with file, cause, times
/// and remedy until the mount is made anew. A source that answers again is no longer a problem. Stale: its daemon is
/// gone. Stuck: it does not answer in time. Failing: it answers with an error. Private: it is another user's mount, not
/// shared.
///
/// Exit code 1 if a shown mount is neither healthy nor private, or if MNT is given and is private or not a ckfs mount. With --live
/// it is 1 only for mounts that a restart of their daemon may help.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs status
  ckfs status /mnt/llama
  ckfs status --live /mnt/llama
  ckfs status --last /mnt/llama > llama.toml && ckfs mount --config llama.toml
  ckfs status --json | jq '.mounts[] | select(.health != \"healthy\")'")]
pub(super) struct Status {
    /// Only the mount there.
    #[arg(value_name = "MNT")]
    mountpoint: Option<PathBuf>,
    /// Fails for stale and stuck mounts only, and for a MNT where none is: a liveness probe.
    ///
    /// A degraded mount serves all but the files that it names. To restart its daemon would take away the others too.
    #[arg(long, conflicts_with = "last")]
    live: bool,
    /// Prints the configuration of your last mount, or of the last one on MNT, live or gone: a file for --config.
    #[arg(long, conflicts_with = "json")]
    last: bool,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// Whether a mount answers, and whether it reports a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MountHealth {
    /// It answers and reports no problem.
    Healthy,
    /// It answers and reports a problem.
    Degraded,
    /// Its daemon is gone.
    Stale,
    /// It does not answer in time.
    Stuck,
    /// It answers with an error.
    Failing,
    /// Another user's mount, which is not shared.
    Private,
}

impl MountHealth {
    /// As printed.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Stale => "stale",
            Self::Stuck => "stuck",
            Self::Failing => "failing",
            Self::Private => "private",
        }
    }

    /// What a mount that says nothing of itself suffers from, and what to do.
    pub(super) const fn remedy(self) -> Option<&'static str> {
        match self {
            Self::Healthy | Self::Degraded => None,
            Self::Stale => {
                Some("its daemon is gone: `ckfs umount` removes the mount, and so does the next `ckfs mount` there")
            }
            Self::Stuck => Some(
                "no answer within 5 s: its daemon is stopped or waits for its storage, and its log says more; \
                 `ckfs umount --lazy` takes it away",
            ),
            Self::Failing => Some("it answers with an error, which its log names"),
            Self::Private => Some("another user's: that user and root may ask it"),
        }
    }
}

/// The report of a mount about itself.
#[derive(Debug)]
pub(super) struct Probe {
    /// Whether it answers.
    pub(super) health: MountHealth,
    stats: Value,
    config: Option<Config>,
}

impl Probe {
    /// The daemon's process.
    pub(super) fn pid(&self) -> Option<u64> {
        self.stats["pid"].as_u64()
    }
}

/// Asks a mount from another thread, since the mount may never answer.
pub(super) fn probe(mountpoint: &Path) -> Probe {
    let path = mountpoint.join(".ckfs");
    let read = move |name: &str| fs::read_to_string(path.join(name));
    let ask = move || read("stats.json").and_then(|stats| Ok((stats, read("config.toml")?)));
    let answer = ask_within(ANSWER_LIMIT, "ckfs-probe", ask).ok().flatten();
    let dead = |health| Probe { health, stats: Value::Null, config: None };
    match answer {
        None => dead(MountHealth::Stuck),
        Some(Err(error)) if is_gone(&error) => dead(MountHealth::Stale),
        Some(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => dead(MountHealth::Private),
        Some(Err(_)) => dead(MountHealth::Failing),
        Some(Ok((stats, config))) => {
            let stats: Value = serde_json::from_str(&stats).unwrap_or_default();
            Probe {
                health: if stats["health"] == "degraded" { MountHealth::Degraded } else { MountHealth::Healthy },
                stats,
                config: Config::without_files(&config, Path::new("config.toml"), Path::new("/")).ok(),
            }
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED | libc::ECONNREFUSED))
}

fn views(config: Option<&Config>) -> Vec<Value> {
    let views = config.into_iter().flat_map(|config| &config.views);
    let layout = |choice: &LayoutChoice| match choice {
        LayoutChoice::Named(name) => (*name).to_owned(),
        LayoutChoice::File { path, .. } => path.display().to_string(),
    };
    views
        .map(|view| {
            let settings = &view.settings;
            json!({
                "name": view.name,
                "mesh": settings.mesh.clone().unwrap_or_default().to_string(),
                "layout": settings.layout.as_ref().map_or_else(|| Layout::default().name().to_owned(), layout),
                "dtype": settings.dtype.and_then(|choice| choice.0).map(ckfs_tensor::DType::code),
            })
        })
        .collect()
}

fn describe(entry: &MountEntry, probe: &Probe) -> Value {
    let source = entry.source.to_string_lossy();
    json!({
        "mountpoint": entry.mountpoint.display().to_string(),
        "name": source.strip_prefix("ckfs:").unwrap_or(&source),
        "source": probe.config.as_ref().and_then(|config| config.source.clone()),
        "health": probe.health.name(),
        "remedy": probe.health.remedy(),
        "pid": probe.stats["pid"],
        "version": probe.stats["version"],
        "views": views(probe.config.as_ref()),
        "problems": probe.stats["problems"],
        "last_error": probe.stats["last_error"],
        "stats": probe.stats,
    })
}

const PROBLEM: &str = "          {kind}: {file}\n            cause  {cause}\n            \
                       seen   {count:n} times, first {first}, last {last}[, ended {ended}]\n";

/// The problems of a mount, one per group of lines.
fn problems_text(stats: &Value) -> String {
    let mut text = String::new();
    let problems = items(&stats["problems"]);
    for problem in problems {
        text += &filled(PROBLEM, problem);
        if problem["ended"].is_null() {
            text += &filled("            do     {remedy}\n", problem);
        }
    }
    for file in items(&stats["poisoned_files"]) {
        if problems.iter().all(|problem| problem["file"] != *file) {
            text += &filled("          source changed: {file}\n", &json!({ "file": file }));
        }
    }
    if let Some(1..) = stats["problems_left_out"].as_u64() {
        text += &filled("          {problems_left_out} more problems, not all shown here\n", stats);
    }
    text + &filled("[  last    error at {last_error.time}: {last_error.kind}: {last_error.file}\n]", stats)
}

/// The threads of a daemon: how many, and for what those are that come and go.
fn threads_text(stats: &Value) -> String {
    let uses = stats["threads_by_use"].as_object().into_iter().flatten();
    let uses: Vec<String> = uses.map(|(name, count)| format!("{name} {count}")).collect();
    let threads = json!({ "all": stats["threads"], "uses": uses.join(", ") });
    filled("[  threads {all}, of them {uses}\n|  threads {all}\n]", &threads)
}

/// What a mount served.
const SERVED: &str = concat!(
    "  served  {bytes_served:b}, from {bytes_fetched:b} of the source\n",
    "  reads   {ops.read.count:n}, {failed_reads:n} failed; {failed_opens:n} opens failed; {tile_misses:n} tiles made, ",
    "{tile_hits:n} found; {panics:n} panics; {poisoned_sources:n} sources changed\n"
);

/// The memory that it may hold, and that it holds.
const BUDGET: &str = concat!(
    "  memory  limit {limit_bytes:b} ({limit_origin}); budget {budget.total_bytes:b}: cache {budget.cache_bytes:b}, ",
    "spare buffers {budget.spare_buffers_bytes:b}, decoded chunks {budget.decoded_chunks_bytes:b}, ",
    "thread buffers {budget.thread_buffers_bytes:b}, mapped pages {budget.mapped_bytes:b}\n"
);
const HELD: &str = concat!(
    "  held    tiles {held.tiles_bytes:b}, materialized {held.materialized_bytes:b}, ",
    "dropped but mapped {held.dropped_bytes:b}, spare buffers {held.spare_buffers_bytes:b}, ",
    "decoded chunks {held.decoded_chunks_bytes:b}, thread buffers {held.thread_buffers_bytes:b}, ",
    "mapped pages {held.mapped_bytes:b}\n",
    "  process anonymous {process.rss_anon_bytes:b}, mapped files {process.rss_file_bytes:b}, ",
    "mapped shared memory {process.rss_shmem_bytes:b}[; files in memory {shared_bytes:b}]\n"
);

/// What a remote source did.
const REMOTE: &str = concat!(
    "; {remote_fetched_bytes:b} fetched; {remote_retries:n} retries, {remote_failures:n} failures, ",
    "{remote_pauses:n} pauses asked for ({remote_pause_ms:n} ms)\n",
    "  cached  {remote_hit_bytes:b} of earlier runs and other processes, {remote_prefetch_hit_bytes:b} fetched ahead; ",
    "{remote_miss_bytes:b} waited for, {remote_uncached_bytes:b} past the cache\n"
);

/// The views of a mount, or the steps that it shows.
fn shown(mount: &Value) -> String {
    let steps = mount["stats"]["steps"]["shown"].as_u64().map(|count| format!("{count} steps"));
    let views = items(&mount["views"]).iter().map(|view| filled("[{name}: ][{mesh}|no mesh] {layout}", view));
    steps.into_iter().chain(views).collect::<Vec<_>>().join(", ")
}

/// One line for each mount, in columns.
fn lines(mounts: &[Value]) -> String {
    let row = |mount: &Value| {
        let served = if mount["stats"].is_object() { "{stats.bytes_served:b}" } else { "" };
        let [mountpoint, health, served, version, source] =
            ["{mountpoint}", "{health}", served, "{version}", "[{source}|{name}]"].map(|cell| filled(cell, mount));
        [mountpoint, health, shown(mount), served, version, source]
    };
    let rows: Vec<[String; 6]> = mounts.iter().map(row).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [first, second, third, fourth, fifth] = [0, 1, 2, 3, 4].map(width);
    let mut text = String::new();
    for (mount, [mountpoint, health, shown, served, version, source]) in mounts.iter().zip(&rows) {
        let served = format!("{served:>fourth$} served");
        let line =
            format!("{mountpoint:first$}  {health:second$}  {shown:third$}  {served}  {version:fifth$}  {source}");
        // What is wrong, and what to do. Writing to a string cannot fail.
        let _ = writeln!(text, "{line}");
        text += &wrong_text(mount);
    }
    text
}

/// What is wrong with a mount, and what to do: also where its daemon is of another version than this program, as after an upgrade.
fn wrong_text(mount: &Value) -> String {
    let mut text = filled("[          {remedy}\n]", mount);
    let own = env!("CARGO_PKG_VERSION");
    if let (Some(version), Some(place)) = (mount["version"].as_str(), mount["mountpoint"].as_str())
        && version != own
    {
        // Writing to a string cannot fail.
        let _ =
            writeln!(text, "          its daemon has version {version}, this program {own}: `ckfs restart {place}`");
    }
    text + &problems_text(&mount["stats"])
}

/// All about each mount.
fn each(mounts: &[Value]) -> String {
    mounts.iter().map(text).collect::<Vec<_>>().join("\n")
}

fn text(mount: &Value) -> String {
    let head = "{mountpoint}\n  source  [{source}|{name}]\n  health  {health}[, process {pid}][, version {version}]\n";
    let mut text = filled(head, mount) + &wrong_text(mount);
    for view in items(&mount["views"]) {
        text += &filled("  view    [{name}: ][mesh {mesh}|no mesh], layout {layout}[, dtype {dtype}]\n", view);
    }
    let stats = &mount["stats"];
    text += &steps_text(stats);
    if stats.is_object() {
        let memory = &stats["memory"];
        text += &(filled(SERVED, stats) + &remote_text(stats) + &threads_text(stats));
        for (part, template) in [("budget", BUDGET), ("held", HELD)] {
            if memory[part].is_object() {
                text += &filled(template, memory);
            }
        }
    }
    text
}

/// The steps of a run, and what its command for new steps did; nothing of one checkpoint.
fn steps_text(stats: &Value) -> String {
    let mut text = String::new();
    if stats["steps"].is_object() {
        let steps = "  steps   {shown:n} shown[, newest {latest}]; {unfinished:n} not finished, {failed:n} not planned; \
                     {in_use:n} in use, {deleted:n} deleted, {rewritten:n} written anew\n";
        text += &filled(steps, &stats["steps"]);
    }
    let hook = &stats["on_step"];
    if hook.is_object() {
        let runs = "  on step {succeeded:n} succeeded, {failed:n} failed, {waiting:n} waiting\
                    [, running for step {running.step}]: {command}\n";
        text += &filled(runs, hook);
        for failed in items(&hook["results"]).iter().filter(|result| result["exit_code"].as_i64() != Some(0)) {
            text += &filled("          step {step:n}: [exit code {exit_code}|{error}|no exit code]\n", failed);
        }
    }
    text
}

/// What a remote source did; nothing of a local one.
fn remote_text(stats: &Value) -> String {
    if !stats["remote_requests"].is_u64() {
        return String::new();
    }
    let latencies = json!({ "half": latency(stats, 0.5), "most": latency(stats, 0.99) });
    filled("  remote  {remote_requests} requests", stats)
        + &filled("[, half of them {half}, 99 % {most}]", &latencies)
        + &filled(REMOTE, stats)
}

/// The bound of the histogram within which this part of the requests was answered.
fn latency(stats: &Value, part: f64) -> Option<String> {
    let numbers = |name: &str| -> Option<Vec<u64>> { stats[name].as_array()?.iter().map(Value::as_u64).collect() };
    let (bounds, counts) = (numbers("remote_latency_bounds_ms")?, numbers("remote_latency")?);
    let all: u64 = counts.iter().sum();
    #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
    let wanted = all as f64 * part;
    let mut sum = 0;
    #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
    let place = counts.iter().position(|count| {
        sum += count;
        sum > 0 && sum as f64 >= wanted
    })?;
    let last = bounds.last()?;
    Some(bounds.get(place).map_or_else(|| format!("over {last} ms"), |ms| format!("within {ms} ms")))
}

impl Status {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        if self.last {
            return output::print(&last_mount::find(self.mountpoint.as_deref())?);
        }
        let mut entries = ckfs_mounts();
        if let Some(path) = &self.mountpoint {
            // The path of a stale mount cannot be resolved. It is compared as it is.
            let resolved = fs::canonicalize(path).or_else(|_| std::path::absolute(path))?;
            entries.retain(|entry| entry.mountpoint == resolved);
            if entries.is_empty() {
                let near = hint::near_mount(path).map_or_else(String::new, |near| format!("; {near}"));
                bail!("{}: no ckfs mount{near}", resolved.display());
            }
        }
        let probes: Vec<_> = entries.into_iter().map(|entry| (probe(&entry.mountpoint), entry)).collect();
        let mounts: Vec<Value> = probes.iter().map(|(probe, entry)| describe(entry, probe)).collect();
        if mounts.is_empty() && !self.json {
            ckfs_host::tell("ckfs: nothing is mounted\n");
        } else {
            let all = if self.mountpoint.is_some() { each } else { lines };
            let told = json!({ "mounts": mounts });
            output::print_either(self.json, &told, || printable_lines(&all(&mounts)).into_owned())?;
        }
        // A private mount is a failure only if the user asked for it.
        let count =
            |wanted: &dyn Fn(MountHealth) -> bool| probes.iter().filter(|(probe, _)| wanted(probe.health)).count();
        let dead = count(&|health| match health {
            MountHealth::Stale | MountHealth::Stuck => true,
            MountHealth::Failing => !self.live,
            MountHealth::Private => !self.live && self.mountpoint.is_some(),
            MountHealth::Healthy | MountHealth::Degraded => false,
        });
        let degraded = count(&|health| health == MountHealth::Degraded && !self.live);
        let mounts = |count| counted(count, "mount");
        match (dead, degraded) {
            (0, 0) => Ok(()),
            (0, count) => Err(anyhow!("{} degraded: what to do is above", mounts(count))),
            (1, 0) => Err(anyhow!("1 mount does not answer")),
            (count, 0) => Err(anyhow!("{count} mounts do not answer")),
            (dead, degraded) => Err(anyhow!("{} without an answer, {} degraded", mounts(dead), mounts(degraded))),
        }
    }
}
