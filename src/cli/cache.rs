//! `ckfs cache`: the disk cache of remote sources.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail};
use ckfs_checkpoint::printable;
use ckfs_config::parse_age;
use ckfs_plan::report::human_bytes;
use ckfs_source::remote::{
    RemoteCounters,
    cache::{Cache, CacheLimit, Entry, default_directory, usage},
    digest::digest_of,
};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{output, paragraph::filled};

/// Blocks of an entry that are checked at a time.
const STEP_BLOCKS: u64 = 4096;

/// Shows, checks or empties the disk cache of remote sources.
///
/// The cache is `CKFS_CACHE_DIR`, else $`XDG_CACHE_HOME/ckfs`, else ~/.cache/ckfs. Mounts may use it meanwhile.
#[derive(Debug, Args)]
pub(super) struct CacheCommand {
    #[command(subcommand)]
    action: Option<Action>,
    /// Directory of the cache.
    #[arg(long, value_name = "DIR", global = true)]
    cache_dir: Option<PathBuf>,
    /// Prints JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Lists the objects, least recently used first: bytes present, of how many, last use, state.
    List,
    /// Reads everything and compares checksums, and digests of complete objects where their service names them.
    ///
    /// What is wrong is dropped, so that it is fetched again. Exits with 1 if there was damage.
    Verify,
    /// Removes objects that no process uses.
    Prune {
        /// Only those not used for this many days, or for a time such as 12h.
        #[arg(long, value_name = "DAYS", value_parser = parse_age)]
        older_than: Option<Duration>,
    },
}

impl CacheCommand {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let dir = self.cache_dir.clone().or_else(ckfs_service::cache_of_environment).or_else(default_directory);
        let dir = dir.context("no cache: none of --cache-dir, CKFS_CACHE_DIR, XDG_CACHE_HOME and HOME is set")?;
        if !dir.join("objects").exists() {
            let nothing = match self.action {
                None | Some(Action::List) => listed(&dir, (0, Cache::limit_bytes_at(&dir)?), &[]),
                Some(Action::Verify) => verified([0; 4], &[]),
                Some(Action::Prune { .. }) => pruned(0, 0, 0),
            };
            return output::print_either(self.json, &nothing, || format!("{}: empty\n", dir.display()));
        }
        let counters = Arc::new(RemoteCounters::default());
        let cache = Cache::open(&dir, None, counters).with_context(|| dir.display().to_string())?;
        match self.action {
            None | Some(Action::List) => list(&cache, &dir, self.json),
            Some(Action::Verify) => verify(&cache, self.json),
            Some(Action::Prune { older_than }) => prune(&cache, older_than, self.json),
        }
    }
}

/// The entries with their last use, least recently used first.
fn by_use(cache: &Cache) -> anyhow::Result<Vec<(SystemTime, PathBuf)>> {
    let mut entries: Vec<_> = cache.list()?.into_iter().map(|dir| (usage(&dir).0, dir)).collect();
    entries.sort();
    Ok(entries)
}

fn list(cache: &Cache, place: &Path, as_json: bool) -> anyhow::Result<()> {
    let CacheLimit { used_bytes: used, limit_bytes: limit, .. } = cache.limit()?;
    let (mut text, mut rows) = (String::new(), Vec::new());
    for (last, dir) in by_use(cache)? {
        let (object, present, size, state) = match cache.existing(&dir) {
            Ok(entry) => {
                let (meta, present) = (entry.meta(), entry.present_bytes()?);
                let state = match (present == meta.size_bytes, meta.verified) {
                    (true, true) => "complete, verified",
                    (true, false) => "complete",
                    (false, _) => "partial",
                };
                (meta.object, present, meta.size_bytes, state.to_owned())
            }
            Err(error) => (dir.display().to_string(), 0, 0, format!("damaged: {error}")),
        };
        let age = SystemTime::now().duration_since(last).unwrap_or_default();
        rows.push(json!({
            "object": object, "present_bytes": present, "size_bytes": size, "unused_seconds": age.as_secs(), "state": state,
        }));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:>10} of {:>10}  {:>8} ago  {state}  {}",
            human_bytes(present),
            human_bytes(size),
            human_age(age),
            printable(&object)
        );
    }
    let told = listed(place, (used, limit), &rows);
    output::print_either(as_json, &told, || text + &filled("{used_bytes:b} used, at most {limit_bytes:b}\n", &told))
}

fn listed(place: &Path, (used, limit): (u64, u64), rows: &[Value]) -> Value {
    json!({ "directory": place.to_string_lossy(), "used_bytes": used, "limit_bytes": limit, "objects": rows })
}

/// How many objects there are, how many have a digest, are parts and have none, and the damages.
fn verified([objects, with_digest, parts, without_digest]: [u64; 4], damages: &[Value]) -> Value {
    json!({
        "objects": objects, "with_digest": with_digest, "parts": parts, "without_digest": without_digest, "damages": damages,
    })
}

fn pruned(removed: u64, freed: u64, in_use: u64) -> Value {
    json!({ "removed": removed, "freed_bytes": freed, "in_use": in_use })
}

fn human_age(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86400),
    }
}

fn verify(cache: &Cache, as_json: bool) -> anyhow::Result<()> {
    let (mut checked, mut damaged, mut parts, mut unnamed) = (0, 0, 0, 0);
    let mut rows = Vec::new();
    let tell = |line: String| if as_json { Ok(()) } else { output::print(&line) };
    for dir in cache.list()? {
        let (found, name) = match cache.existing(&dir) {
            Ok(entry) => (check(cache, &entry), entry.meta().object),
            Err(error) if !dir.exists() => {
                tracing::debug!("{}: removed meanwhile: {error}", dir.display());
                continue;
            }
            Err(error) => (Ok((vec![error.to_string()], Comparable::NoDigest)), dir.display().to_string()),
        };
        checked += 1;
        let (damages, comparable) = found.unwrap_or_else(|error| (vec![format!("{error:#}")], Comparable::NoDigest));
        match comparable {
            Comparable::Part => {
                parts += 1;
                tell(format!("{}: not verifiable: part of a file\n", printable(&name)))?;
            }
            Comparable::NoDigest if damages.is_empty() => unnamed += 1,
            Comparable::Whole | Comparable::NoDigest => {}
        }
        for damage in damages {
            damaged += 1;
            tell(format!("{}: {damage}\n", printable(&name)))?;
            rows.push(json!({ "object": name, "what": damage }));
        }
    }
    let whole = checked - parts - unnamed;
    if as_json {
        output::print_json(&verified([checked, whole, parts, unnamed], &rows))?;
    }
    if damaged > 0 {
        bail!(
            "{damaged} of {checked} objects are damaged; what is wrong was dropped and is fetched again when it is needed"
        );
    }
    if as_json {
        return Ok(());
    }
    let mut text =
        format!("{checked} objects: all blocks are as they were written; {whole} have the digests of their services");
    for (count, what) in [(parts, "not verifiable: part of a file"), (unnamed, "not verifiable: no digest is known")] {
        if count > 0 {
            // Writing to a string cannot fail.
            let _ = write!(text, "; {count} {what}");
        }
    }
    output::print(&(text + "\n"))
}

/// What is wrong with an entry, and whether its digest was compared.
fn check(cache: &Cache, entry: &Entry) -> anyhow::Result<(Vec<String>, Comparable)> {
    let mut found = Vec::new();
    let bad = || cache.counters().bad_blocks.load(Ordering::Relaxed);
    let before = bad();
    let count = entry.block_count();
    let mut start = 0;
    while start < count {
        let blocks = start..(start + STEP_BLOCKS).min(count);
        let _guards = entry.guard(&blocks)?;
        entry.missing(&blocks)?;
        start = blocks.end;
    }
    if bad() > before {
        found.push(format!("{} blocks have a wrong checksum", bad() - before));
    }
    let Some(expected) = entry.meta().known_digest() else { return Ok((found, Comparable::NoDigest)) };
    let Some(digest) = digest_of(entry, &expected)? else { return Ok((found, Comparable::Part)) };
    if digest == expected.hex() {
        entry.note_digest()?;
    } else {
        entry.drop_all()?;
        found.push(format!("expected {} {}, found {digest}", expected.kind(), expected.hex()));
    }
    Ok((found, Comparable::Whole))
}

/// Whether an object could be compared with what its service says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparable {
    /// All of it is here, and was compared.
    Whole,
    /// Only a part of it is here: what was written to the cache is unchanged, but may be wrong.
    Part,
    /// Its service names no digest.
    NoDigest,
}

fn prune(cache: &Cache, older_than: Option<Duration>, as_json: bool) -> anyhow::Result<()> {
    let age_min = older_than.unwrap_or_default();
    let (mut removed, mut freed, mut in_use) = (0, 0, 0);
    for (last, dir) in by_use(cache)? {
        if SystemTime::now().duration_since(last).unwrap_or_default() < age_min {
            continue;
        }
        let left = cache.remove_unused(&dir);
        match left.with_context(|| dir.display().to_string())? {
            Some(bytes) => (removed, freed) = (removed + 1, freed + bytes),
            None => in_use += 1,
        }
    }
    let told = pruned(removed, freed, in_use);
    let text = "{removed} objects removed, {freed_bytes:b} freed, {in_use} in use\n";
    output::print_either(as_json, &told, || filled(text, &told))
}
