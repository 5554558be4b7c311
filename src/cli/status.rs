//! `ckfs status`: the mounts and their state.

use std::{
    fmt::Write,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{anyhow, bail};
use ckfs_checkpoint::printable_lines;
use ckfs_config::{Config, DtypeChoice, LayoutChoice};
use ckfs_fuse::{MountEntry, ckfs_mounts};
use ckfs_host::ask_within;
use ckfs_plan::{Layout, report::human_bytes};
use clap::Args;
use serde_json::{Value, json};

use super::{hint, last_mount, output, paragraph::counted};

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
                "dtype": settings.dtype.and_then(DtypeChoice::dtype).map(ckfs_tensor::DType::code),
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

fn word(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn sum(value: &Value) -> u64 {
    value.as_object().into_iter().flatten().filter_map(|(_, bytes)| bytes.as_u64()).sum()
}

/// The problems of a mount, one per group of lines.
fn problems_text(stats: &Value) -> String {
    let mut text = String::new();
    for problem in stats["problems"].as_array().into_iter().flatten() {
        let (kind, file, times) =
            (word(&problem["kind"]), word(&problem["file"]), problem["count"].as_u64().unwrap_or(0));
        let (first, last) = (word(&problem["first"]), word(&problem["last"]));
        let ended = problem["ended"].as_str().map_or_else(String::new, |ended| format!(", ended {ended}"));
        // Writing to a string cannot fail.
        let _ = writeln!(text, "          {kind}: {file}");
        let _ = writeln!(text, "            cause  {}", word(&problem["cause"]));
        let _ = writeln!(text, "            seen   {times} times, first {first}, last {last}{ended}");
        if ended.is_empty() {
            let _ = writeln!(text, "            do     {}", word(&problem["remedy"]));
        }
    }
    let named = stats["problems"].as_array().into_iter().flatten().map(|problem| word(&problem["file"]));
    let named: Vec<String> = named.collect();
    for file in stats["poisoned_files"].as_array().into_iter().flatten().map(word) {
        if !named.contains(&file) {
            let _ = writeln!(text, "          source changed: {file}");
        }
    }
    match stats["problems_left_out"].as_u64() {
        None | Some(0) => {}
        Some(count) => {
            let _ = writeln!(text, "          {count} more problems, not all shown here");
        }
    }
    let last = &stats["last_error"];
    if last.is_object() {
        let (time, kind, file) = (word(&last["time"]), word(&last["kind"]), word(&last["file"]));
        let _ = writeln!(text, "  last    error at {time}: {kind}: {file}");
    }
    text
}

/// The threads of a daemon: how many, and for what those are that come and go.
fn threads_text(stats: &Value) -> String {
    let Some(all) = stats["threads"].as_u64() else { return String::new() };
    let uses = stats["threads_by_use"].as_object().into_iter().flatten();
    let uses: Vec<String> = uses.map(|(name, count)| format!("{name} {count}")).collect();
    let uses = if uses.is_empty() { String::new() } else { format!(", of them {}", uses.join(", ")) };
    format!("  threads {all}{uses}\n")
}

/// The memory that a mount holds and may hold.
fn memory_text(memory: &Value) -> String {
    let bytes = |value: &Value| human_bytes(value.as_u64().unwrap_or(0));
    let parts = |of: &Value, rows: &[(&str, &str)]| {
        rows.iter().map(|(what, key)| format!("{what} {}", bytes(&of[*key]))).collect::<Vec<_>>().join(", ")
    };
    let (held, budget, process) = (&memory["held"], &memory["budget"], &memory["process"]);
    if !held.is_object() {
        return String::new();
    }
    let buffers = [
        ("spare buffers", "spare_buffers_bytes"),
        ("decoded chunks", "decoded_chunks_bytes"),
        ("thread buffers", "thread_buffers_bytes"),
        ("mapped pages", "mapped_bytes"),
    ];
    let buffers = |of: &Value| parts(of, &buffers);
    let mut text = String::new();
    if budget.is_object() {
        let (limit, origin) = (bytes(&memory["limit_bytes"]), word(&memory["limit_origin"]));
        let (total, cache) = (bytes(&budget["total_bytes"]), bytes(&budget["cache_bytes"]));
        // Writing to a string cannot fail.
        let _ =
            writeln!(text, "  memory  limit {limit} ({origin}); budget {total}: cache {cache}, {}", buffers(budget));
    }
    let files =
        [("tiles", "tiles_bytes"), ("materialized", "materialized_bytes"), ("dropped but mapped", "dropped_bytes")];
    let _ = writeln!(text, "  held    {}, {}", parts(held, &files), buffers(held));
    let shared = memory["shared_bytes"].as_u64();
    let shared = shared.map_or_else(String::new, |bytes| format!("; files in memory {}", human_bytes(bytes)));
    let kinds = [
        ("anonymous", "rss_anon_bytes"),
        ("mapped files", "rss_file_bytes"),
        ("mapped shared memory", "rss_shmem_bytes"),
    ];
    let _ = writeln!(text, "  process {}{shared}", parts(process, &kinds));
    text
}

/// The views of a mount, or the steps that it shows.
fn shown(mount: &Value) -> String {
    let stats = &mount["stats"];
    let views = mount["views"].as_array().into_iter().flatten().map(|view| {
        let (name, mesh, layout) = (word(&view["name"]), word(&view["mesh"]), word(&view["layout"]));
        let name = if name.is_empty() { name } else { format!("{name}: ") };
        let mesh = if mesh.is_empty() { "no mesh".to_owned() } else { mesh };
        format!("{name}{mesh} {layout}")
    });
    let mut all: Vec<String> = views.collect();
    if let Some(count) = stats["steps"]["shown"].as_u64() {
        all.insert(0, format!("{count} steps"));
    }
    all.join(", ")
}

/// One line for each mount, in columns.
fn lines(mounts: &[Value]) -> String {
    let rows: Vec<[String; 6]> = mounts
        .iter()
        .map(|mount| {
            let stats = &mount["stats"];
            let served = if stats.is_object() { human_bytes(sum(&stats["bytes_served"])) } else { String::new() };
            let source = mount["source"].as_str().map_or_else(|| word(&mount["name"]), str::to_owned);
            let version = word(&mount["version"]);
            [word(&mount["mountpoint"]), word(&mount["health"]), shown(mount), served, version, source]
        })
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [first, second, third, fourth, fifth] = [0, 1, 2, 3, 4].map(width);
    let mut text = String::new();
    for (mount, [mountpoint, health, shown, served, version, source]) in mounts.iter().zip(&rows) {
        let served = format!("{served:>fourth$} served");
        let line =
            format!("{mountpoint:first$}  {health:second$}  {shown:third$}  {served}  {version:fifth$}  {source}");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line}");
        // What is wrong, and what to do.
        if let Some(remedy) = mount["remedy"].as_str() {
            let _ = writeln!(text, "          {remedy}");
        }
        text.push_str(&other_version(mount));
        text.push_str(&problems_text(&mount["stats"]));
    }
    text
}

/// What to do where a daemon is of another version than this program, as after an upgrade.
fn other_version(mount: &Value) -> String {
    match (mount["version"].as_str(), mount["mountpoint"].as_str()) {
        (Some(version), Some(mountpoint)) if version != env!("CARGO_PKG_VERSION") => format!(
            "          its daemon has version {version}, this program {}: `ckfs restart {mountpoint}`\n",
            env!("CARGO_PKG_VERSION")
        ),
        _ => String::new(),
    }
}

fn text(mount: &Value) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{}", word(&mount["mountpoint"]));
    let source = mount["source"].as_str().map_or_else(|| word(&mount["name"]), str::to_owned);
    let _ = writeln!(text, "  source  {source}");
    let process = mount["pid"].as_u64().map_or_else(String::new, |pid| format!(", process {pid}"));
    let version = mount["version"].as_str().map_or_else(String::new, |version| format!(", version {version}"));
    let _ = writeln!(text, "  health  {}{process}{version}", word(&mount["health"]));
    text.push_str(&other_version(mount));
    if let Some(remedy) = mount["remedy"].as_str() {
        let _ = writeln!(text, "          {remedy}");
    }
    text.push_str(&problems_text(&mount["stats"]));
    for view in mount["views"].as_array().into_iter().flatten() {
        let (name, mesh) = (word(&view["name"]), word(&view["mesh"]));
        let name = if name.is_empty() { String::new() } else { format!("{name}: ") };
        let mesh = if mesh.is_empty() { "no mesh".to_owned() } else { format!("mesh {mesh}") };
        let dtype = view["dtype"].as_str().map_or_else(String::new, |dtype| format!(", dtype {dtype}"));
        let _ = writeln!(text, "  view    {name}{mesh}, layout {}{dtype}", word(&view["layout"]));
    }
    let stats = &mount["stats"];
    text.push_str(&steps_text(stats));
    if stats.is_object() {
        let (served, fetched) = (sum(&stats["bytes_served"]), sum(&stats["bytes_fetched"]));
        let _ = writeln!(text, "  served  {}, from {} of the source", human_bytes(served), human_bytes(fetched));
        let count = |name: &str| stats[name].as_u64().unwrap_or(0);
        let reads = stats["ops"]["read"]["count"].as_u64().unwrap_or(0);
        let _ = writeln!(
            text,
            "  reads   {reads}, {} failed; {} opens failed; {} tiles made, {} found; {} panics; {} sources changed",
            count("failed_reads"),
            count("failed_opens"),
            count("tile_misses"),
            count("tile_hits"),
            count("panics"),
            count("poisoned_sources"),
        );
        text.push_str(&remote_text(stats));
        text.push_str(&threads_text(stats));
        text.push_str(&memory_text(&stats["memory"]));
    }
    text
}

/// The steps of a run, and what its command for new steps did; nothing of one checkpoint.
fn steps_text(stats: &Value) -> String {
    let steps = &stats["steps"];
    if !steps.is_object() {
        return String::new();
    }
    let count = |name: &str| steps[name].as_u64().unwrap_or(0);
    let newest = steps["latest"].as_u64().map_or_else(String::new, |step| format!(", newest {step}"));
    let mut text = format!(
        "  steps   {} shown{newest}; {} not finished, {} not planned; {} in use, {} deleted, {} written anew\n",
        count("shown"),
        count("unfinished"),
        count("failed"),
        count("in_use"),
        count("deleted"),
        count("rewritten"),
    );
    let hook = &stats["on_step"];
    if hook.is_object() {
        let count = |name: &str| hook[name].as_u64().unwrap_or(0);
        let running =
            hook["running"]["step"].as_u64().map_or_else(String::new, |step| format!(", running for step {step}"));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  on step {} succeeded, {} failed, {} waiting{running}: {}",
            count("succeeded"),
            count("failed"),
            count("waiting"),
            hook["command"].as_str().unwrap_or_default(),
        );
        let results = hook["results"].as_array().into_iter().flatten();
        let failed = results.filter(|result| result["exit_code"].as_i64() != Some(0));
        for result in failed {
            let end = match (result["exit_code"].as_i64(), result["error"].as_str()) {
                (Some(code), _) => format!("exit code {code}"),
                (None, error) => error.unwrap_or("no exit code").to_owned(),
            };
            let _ = writeln!(text, "          step {}: {end}", result["step"].as_u64().unwrap_or(0));
        }
    }
    text
}

/// What a remote source did; nothing of a local one.
fn remote_text(stats: &Value) -> String {
    if !stats["remote_requests"].is_u64() {
        return String::new();
    }
    let count = |name: &str| stats[name].as_u64().unwrap_or(0);
    let bytes = |name: &str| human_bytes(count(name));
    let latency = match (latency(stats, 0.5), latency(stats, 0.99)) {
        (Some(half), Some(most)) => format!(", half of them {half}, 99 % {most}"),
        (_, _) => String::new(),
    };
    format!(
        "  remote  {} requests{latency}; {} fetched; {} retries, {} failures, {} pauses asked for ({} ms)\n  \
         cached  {} of earlier runs and other processes, {} fetched ahead; {} waited for, {} past the cache\n",
        count("remote_requests"),
        bytes("remote_fetched_bytes"),
        count("remote_retries"),
        count("remote_failures"),
        count("remote_pauses"),
        count("remote_pause_ms"),
        bytes("remote_hit_bytes"),
        bytes("remote_prefetch_hit_bytes"),
        bytes("remote_miss_bytes"),
        bytes("remote_uncached_bytes"),
    )
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
        if self.json {
            output::print_json(&json!({ "mounts": mounts }))?;
        } else if mounts.is_empty() {
            ckfs_host::tell("ckfs: nothing is mounted\n");
        } else if self.mountpoint.is_some() {
            output::print(&printable_lines(&mounts.iter().map(text).collect::<Vec<_>>().join("\n")))?;
        } else {
            output::print(&printable_lines(&lines(&mounts)))?;
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
