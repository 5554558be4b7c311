//! `ckfs status`: what is mounted and how it does.

use std::{
    fmt::Write,
    fs, io,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{anyhow, bail};
use clap::Args;
use serde_json::{Value, json};

use super::output;
use crate::{
    checkpoint::printable_lines,
    fuse::{MountEntry, ckfs_mounts},
    plan::{Config, report::human_bytes},
};

/// How long a mount may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Shows what is mounted, and how it does.
///
/// For each ckfs mount: source, mountpoint, whether it answers, its process, the views, and its counters. Fails if MNT is
/// given and is no ckfs mount, or if a mount shown does not answer. A mount that another user does not share is private.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs status
  ckfs status /mnt/llama
  ckfs status --json | jq '.mounts[] | select(.health != \"live\")'")]
pub(super) struct Status {
    /// Only the mount there.
    #[arg(value_name = "MNT")]
    mountpoint: Option<PathBuf>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// Whether a mount answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Health {
    /// It does.
    Live,
    /// Its daemon is gone.
    Stale,
    /// It does not answer in time.
    Stuck,
    /// It answers with an error.
    Failing,
    /// It is another user's, who does not share it.
    Private,
}

impl Health {
    /// As printed.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Stale => "stale",
            Self::Stuck => "stuck",
            Self::Failing => "failing",
            Self::Private => "private",
        }
    }
}

/// What a mount says of itself.
#[derive(Debug)]
pub(super) struct Probe {
    /// Whether it answers.
    pub(super) health: Health,
    stats: Value,
    config: Option<Config>,
}

/// Asks a mount, in another thread since nobody knows whether it will answer.
pub(super) fn probe(mountpoint: &Path) -> Probe {
    let (answer, answered) = mpsc::channel();
    let path = mountpoint.join(".ckfs");
    let asking = thread::Builder::new().name("ckfs-probe".into()).spawn(move || {
        let read = |name: &str| fs::read_to_string(path.join(name));
        let _ = answer.send(read("stats.json").and_then(|stats| Ok((stats, read("config.toml")?))));
    });
    let answer = asking.ok().and_then(|_| answered.recv_timeout(ANSWER_LIMIT).ok());
    let dead = |health| Probe { health, stats: Value::Null, config: None };
    match answer {
        None => dead(Health::Stuck),
        Some(Err(error)) if is_gone(&error) => dead(Health::Stale),
        Some(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => dead(Health::Private),
        Some(Err(_)) => dead(Health::Failing),
        Some(Ok((stats, config))) => Probe {
            health: Health::Live,
            stats: serde_json::from_str(&stats).unwrap_or_default(),
            config: Config::parse(&config, Path::new("config.toml"), Path::new("/")).ok(),
        },
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED | libc::ECONNREFUSED))
}

fn views(config: Option<&Config>) -> Vec<Value> {
    let views = config.into_iter().flat_map(|config| &config.views);
    views
        .map(|view| {
            let options = view.keys.options();
            json!({
                "name": view.name,
                "mesh": options.mesh.to_string(),
                "layout": options.layout.name(),
                "dtype": options.dtype.map(crate::tensor::DType::code),
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
        "pid": probe.stats["pid"],
        "views": views(probe.config.as_ref()),
        "stats": probe.stats,
    })
}

fn sum(value: &Value) -> u64 {
    value.as_object().into_iter().flatten().filter_map(|(_, bytes)| bytes.as_u64()).sum()
}

fn text(mount: &Value) -> String {
    let mut text = String::new();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{}", word(&mount["mountpoint"]));
    let source = mount["source"].as_str().map_or_else(|| word(&mount["name"]), str::to_owned);
    let _ = writeln!(text, "  source  {source}");
    let process = mount["pid"].as_u64().map_or_else(String::new, |pid| format!(", process {pid}"));
    let _ = writeln!(text, "  health  {}{process}", word(&mount["health"]));
    for view in mount["views"].as_array().into_iter().flatten() {
        let (name, mesh) = (word(&view["name"]), word(&view["mesh"]));
        let name = if name.is_empty() { String::new() } else { format!("{name}: ") };
        let mesh = if mesh.is_empty() { "no mesh".to_owned() } else { format!("mesh {mesh}") };
        let dtype = view["dtype"].as_str().map_or_else(String::new, |dtype| format!(", dtype {dtype}"));
        let _ = writeln!(text, "  view    {name}{mesh}, layout {}{dtype}", word(&view["layout"]));
    }
    let stats = &mount["stats"];
    if stats.is_object() {
        let (served, fetched) = (sum(&stats["bytes_served"]), sum(&stats["bytes_fetched"]));
        let _ = writeln!(text, "  served  {}, from {} of the source", human_bytes(served), human_bytes(fetched));
        let count = |name: &str| stats[name].as_u64().unwrap_or(0);
        let reads = stats["ops"]["read"]["count"].as_u64().unwrap_or(0);
        let _ = writeln!(
            text,
            "  reads   {reads}, {} failed; {} tiles made, {} found; {} panics; {} sources changed",
            count("failed_reads"),
            count("tile_misses"),
            count("tile_hits"),
            count("panics"),
            count("poisoned_sources"),
        );
    }
    text
}

impl Status {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let mut entries = ckfs_mounts();
        if let Some(path) = &self.mountpoint {
            // A stale mount cannot be resolved, but its path can be compared as it is.
            let resolved = fs::canonicalize(path).or_else(|_| std::path::absolute(path))?;
            entries.retain(|entry| entry.mountpoint == resolved);
            if entries.is_empty() {
                bail!("{}: no ckfs mount", resolved.display());
            }
        }
        let probes: Vec<_> = entries.into_iter().map(|entry| (probe(&entry.mountpoint), entry)).collect();
        let mounts: Vec<Value> = probes.iter().map(|(probe, entry)| describe(entry, probe)).collect();
        if self.json {
            output::print_json(&json!({ "mounts": mounts }))?;
        } else if mounts.is_empty() {
            eprintln!("ckfs: nothing is mounted");
        } else {
            output::print(&printable_lines(&mounts.iter().map(text).collect::<Vec<_>>().join("\n")))?;
        }
        // What others keep to themselves is no failure, unless it was asked for.
        let dead = |health| health != Health::Live && (health != Health::Private || self.mountpoint.is_some());
        match probes.iter().filter(|(probe, _)| dead(probe.health)).count() {
            0 => Ok(()),
            1 => Err(anyhow!("1 mount does not answer")),
            count => Err(anyhow!("{count} mounts do not answer")),
        }
    }
}
