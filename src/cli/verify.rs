//! `ckfs verify`: every byte compared with the slow evaluator.
//!
//! The expected bytes come from the expressions of the views and [`ckfs_read::reference`], which shares no code with
//! lowering, tilings, kernels and caches. The evaluator reads source bytes by `pread`; those of remote objects it fetches.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow};
use ckfs_checkpoint::Checkpoint;
use ckfs_config::{ByteCount, Config};
use ckfs_image::{FileImage, Segment};
use ckfs_plan::report::{human_bytes, percent};
use ckfs_read::reference::{Evaluator, KnownScales};
use ckfs_source::{FileId, Source};
use ckfs_tensor::TensorId;
use ckfs_volume::{NodeKind, Volume};
use clap::Args;
use indicatif::ProgressBar;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde::Serialize;
use serde_json::json;

use super::{
    flags::{LogFlags, SourceFlags},
    open, output, steps, sums, tree,
};

/// Bytes compared at once.
const CHUNK_BYTES: usize = 1 << 20;
/// Bytes around each place of interest that are compared in a sample.
const PROBE_BYTES: u64 = 512;
/// Differences that are printed.
const DIFFERENCES_SHOWN: usize = 20;

/// Compares virtual files with the results of a slow, independent evaluator.
///
/// Given a SOURCE, bytes come from the engine as a mount would serve them. Given a mount, bytes come from its files,
/// and source and flags from its own configuration. By default a sample of each file is compared: both ends, borders of
/// tensors and pieces, and positions spread over the rest. The positions are the same every time. Prints counts and the
/// first differences; fails if there are any. Of a run, every selected step is compared, or every step that its mount shows.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs verify /mnt/llama
  ckfs verify /mnt/llama --full --only dev3
  ckfs verify /mnt/llama --sums llama.sums
  ckfs verify /data/llama --mesh fsdp=4,tensor=2 --dtype bf16 --sample 1M")]
pub(super) struct Verify {
    /// A mount, or a source as for `ckfs mount`.
    #[arg(value_name = "SOURCE|MNT")]
    target: Option<String>,
    /// Bytes of each file to compare.
    #[arg(long, value_name = "SIZE", default_value = "64K")]
    sample: ByteCount,
    /// Compares every byte; the evaluator does some ten megabytes a second and core.
    #[arg(long, conflicts_with = "sample")]
    full: bool,
    /// Compares SHA-256 digests with those that `ckfs sums` wrote to this file, instead of with the evaluator.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sample", "full"])]
    sums: Option<PathBuf>,
    /// Only files that match this pattern, or below directories that do; may be repeated.
    #[arg(long, value_name = "GLOB")]
    only: Vec<String>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: SourceFlags,
}

/// A range of bytes that differs from the expected ones.
#[derive(Clone, Debug, Serialize)]
struct Difference {
    path: String,
    what: String,
}

/// The results of a verification.
#[derive(Debug, Default, Serialize)]
pub(super) struct Verification {
    files: u64,
    /// Bytes that were compared, of those of the files.
    bytes: u64,
    file_bytes: u64,
    differences: u64,
    first_differences: Vec<Difference>,
}

impl Verification {
    fn differ(&mut self, path: &str, what: String) {
        self.differences += 1;
        if self.first_differences.len() < DIFFERENCES_SHOWN {
            self.first_differences.push(Difference { path: path.to_owned(), what });
        }
    }

    /// The results of both together.
    fn and(mut self, other: Self) -> Self {
        self.files += other.files;
        self.bytes += other.bytes;
        self.file_bytes += other.file_bytes;
        self.differences += other.differences;
        self.first_differences.extend(other.first_differences);
        self.first_differences.sort_by(|a, b| a.path.cmp(&b.path));
        self.first_differences.truncate(DIFFERENCES_SHOWN);
        self
    }

    /// One line for a reader: how much of how much was compared.
    pub(super) fn summary(&self) -> String {
        let (of, bytes) = (self.file_bytes, self.bytes);
        let compared = match bytes {
            _ if bytes >= of => format!("all {}", human_bytes(of)),
            _ => format!("{} of {} ({})", human_bytes(bytes), human_bytes(of), percent(bytes, of)),
        };
        format!("{} files, {compared} compared", self.files)
    }

    /// An error that lists the first differences, if there are any.
    ///
    /// # Errors
    /// That error.
    pub(super) fn verdict(&self) -> anyhow::Result<()> {
        let different = self.differences;
        if different == 0 {
            return Ok(());
        }
        let line = |found: &Difference| format!("\n  {}: {}", found.path, found.what);
        let lines: String = self.first_differences.iter().map(line).collect();
        let plural = if different == 1 { "" } else { "s" };
        Err(anyhow!("{different} difference{plural} in {}:{lines}", self.summary()))
    }
}

impl Verify {
    pub(super) fn run(&self, log: &LogFlags) -> anyhow::Result<()> {
        if let Some(sums) = &self.sums {
            return sums::check(sums, self.target.as_deref(), &self.only, self.json, (&self.flags, log));
        }
        let amount = if self.full { u64::MAX } else { self.sample.0 };
        let (mount, mut config) = open::target_config(self.target.as_deref(), &self.flags)?;
        let Some(wanted) = config.mount.steps else {
            let found = verify(&mut config, mount, &self.only, amount, log)?;
            return self.tell(&found, || found.verdict(), || format!("{}, no difference\n", found.summary()));
        };
        let mut all = Vec::new();
        if let Some(mount) = mount {
            // One after the other: to tell what it shows, the daemon plans a step.
            for step in mounted_steps(mount)? {
                let place = mount.join(step.to_string());
                let found = open::shown_config(&place)
                    .and_then(|mut config| verify(&mut config, Some(&place), &self.only, amount, log));
                all.push((step, found.with_context(|| format!("step {step}"))?));
            }
        } else {
            for (step, mut config) in steps::selected(&config, wanted)? {
                let found = verify(&mut config, None, &self.only, amount, log);
                all.push((step.number, found.with_context(|| format!("step {}", step.number))?));
            }
        }
        let row = |(step, found): &(u64, Verification)| {
            let mut row = json!(found);
            row["step"] = (*step).into();
            row
        };
        let verdict = |(step, found): &(u64, Verification)| found.verdict().with_context(|| format!("step {step}"));
        let line = |(step, found): &(u64, Verification)| format!("step {step}: {}, no difference\n", found.summary());
        let rows = json!({ "steps": all.iter().map(row).collect::<Vec<_>>() });
        self.tell(&rows, || all.iter().try_for_each(verdict), || all.iter().map(line).collect())
    }

    /// Prints what was found.
    ///
    /// # Errors
    /// There are differences.
    fn tell(
        &self,
        found: &impl Serialize,
        verdict: impl FnOnce() -> anyhow::Result<()>,
        text: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        if self.json {
            output::print_json(found)?;
            return verdict();
        }
        verdict()?;
        output::print(&text())
    }
}

/// The steps that the mount of a run shows.
fn mounted_steps(mount: &Path) -> anyhow::Result<Vec<u64>> {
    let mut numbers: Vec<u64> = Vec::new();
    for entry in fs::read_dir(mount).with_context(|| mount.display().to_string())? {
        let name = entry.with_context(|| mount.display().to_string())?.file_name();
        numbers.extend(name.to_str().and_then(|name| name.parse::<u64>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Compares the files of a mount with the files that its own configuration describes.
///
/// # Errors
/// Source or configuration are not readable. Differences are in the result.
pub(super) fn verify_mount(mount: &Path, amount: u64, log: &LogFlags) -> anyhow::Result<Verification> {
    verify(&mut open::shown_config(mount)?, Some(mount), &[], amount, log)
}

fn verify(
    config: &mut Config,
    mount: Option<&Path>,
    only: &[String],
    amount: u64,
    log: &LogFlags,
) -> anyhow::Result<Verification> {
    let volume = open::volume(config)?;
    let nodes = tree::select(&volume, only, "verify", &|node| node.attr.kind == NodeKind::File)?;
    let bar = output::bar(nodes.iter().map(|node| node.attr.size_bytes.min(amount)).fold(0, u64::saturating_add), log);
    let scales = KnownScales::default();
    let of_file = |node: &tree::PathNode| {
        let result = verify_file(&volume, mount, node, amount, &scales, &bar);
        bar.inc(node.attr.size_bytes.min(amount));
        result.with_context(|| node.path.clone())
    };
    let findings = nodes.par_iter().map(of_file).try_reduce(Verification::default, |one, other| Ok(one.and(other)))?;
    ckfs_service::check_sources(&volume)?;
    bar.finish_and_clear();
    Ok(findings)
}

fn verify_file(
    volume: &Volume,
    mount: Option<&Path>,
    node: &tree::PathNode,
    amount: u64,
    scales: &KnownScales,
    bar: &ProgressBar,
) -> anyhow::Result<Verification> {
    let checkpoint = volume.engine().checkpoint();
    let size = node.attr.size_bytes;
    let expected = if let Some(original) = volume.original(node.attr.ino) {
        Expected::File(&**checkpoint.source(), original)
    } else if let Some(image) = volume.image(node.attr.ino)? {
        Expected::Image(image)
    } else {
        // The evaluator has no expected bytes for text that ckfs makes about itself.
        return Ok(Verification::default());
    };
    bar.set_message(node.path.clone());
    let mut findings = Verification { files: 1, file_bytes: size, ..Verification::default() };
    let served = match tree::ServedFile::open(volume, mount, node) {
        Ok(served) => served,
        Err(error) => {
            findings.differ(&node.path, format!("cannot be opened: {}", output::chain(&error)));
            return Ok(findings);
        }
    };
    if let Some(found) = served.found_bytes()?.filter(|found| *found != size) {
        findings.differ(&node.path, format!("expected {size} bytes, found {found}"));
        return Ok(findings);
    }
    let mut evaluator = Evaluator::with_scales(|tensor, span| Ok(read_tensor(checkpoint, tensor, span)?), scales);
    let mut bytes = Vec::new();
    for (start, len) in spans(&node.path, &expected, size, amount)? {
        let end = start + len as u64;
        if let Err(error) = served.read(start, len, &mut bytes) {
            // A mount tells only the number of an error. What the evaluator cannot compute either has the reason.
            let expected = if mount.is_some() { expected.bytes(start, end, &mut evaluator).err() } else { None };
            let reason = expected.map(|error| format!(": {}", output::chain(&error))).unwrap_or_default();
            findings.differ(&node.path, format!("bytes {start}..{end}: {}{reason}", output::chain(&error)));
            continue;
        }
        let wanted = expected.bytes(start, end, &mut evaluator)?;
        findings.bytes += len as u64;
        if let Some(at) = bytes.iter().zip(&wanted).position(|(found, wanted)| found != wanted) {
            let count = bytes.iter().zip(&wanted).filter(|(found, wanted)| found != wanted).count();
            let what = format!(
                "byte {}: expected 0x{:02x}, found 0x{:02x}; {count} of bytes {start}..{end} differ",
                start + at as u64,
                wanted[at],
                bytes[at]
            );
            findings.differ(&node.path, what);
        }
    }
    Ok(findings)
}

/// The expected content of a file.
enum Expected<'a> {
    File(&'a dyn Source, FileId),
    Image(FileImage),
}

impl Expected<'_> {
    fn bytes(&self, start: u64, end: u64, evaluator: &mut Evaluator<'_>) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(usize::try_from(end - start)?);
        match self {
            Self::File(source, file) => {
                bytes.resize(usize::try_from(end - start)?, 0);
                read_source(*source, *file, start, &mut bytes)?;
            }
            Self::Image(image) => {
                for (segment, low, high) in image.spans(start, end) {
                    match &image.segments()[segment] {
                        Segment::Bytes(made) => {
                            bytes.extend_from_slice(&made[usize::try_from(low)?..usize::try_from(high)?]);
                        }
                        Segment::Spaces(_) => bytes.resize(bytes.len() + usize::try_from(high - low)?, b' '),
                        Segment::View(view) => bytes.extend(evaluator.evaluate(view, low..high)?),
                    }
                }
            }
        }
        Ok(bytes)
    }
}

/// Bytes of a source file as it was opened, by `pread`: its path may lead elsewhere now. Of a remote object they are fetched
/// where they are not cached.
fn read_source(source: &dyn Source, file: FileId, start: u64, bytes: &mut [u8]) -> std::io::Result<()> {
    // A remote object is never complete for certain: its blocks may be evicted.
    let open = if source.remote().is_some() { None } else { source.backing(file) };
    match open {
        Some(open) => open.read_exact_at(bytes, start),
        // A changed file refuses this with its reason.
        None => source.read_into(file, start, bytes).map_err(std::io::Error::other),
    }
}

/// Bytes of a source tensor, read past maps and caches of this process.
fn read_tensor(checkpoint: &Checkpoint, tensor: TensorId, span: std::ops::Range<u64>) -> std::io::Result<Vec<u8>> {
    let info = checkpoint.tensor(tensor);
    let mut bytes = vec![0; usize::try_from(span.end - span.start).map_err(std::io::Error::other)?];
    let (source, start) = (checkpoint.source(), info.span().start() + span.start);
    if let Some(chunks) = source.chunks().filter(|chunks| chunks.coded(info.file(), start).is_some()) {
        chunks.decode_by_definition(info.file(), start, &mut bytes).map_err(std::io::Error::other)?;
    } else {
        read_source(&**source, info.file(), start, &mut bytes)?;
    }
    Ok(bytes)
}

/// The spans of a file to compare, ascending and disjoint, each of at most [`CHUNK_BYTES`].
fn spans(path: &str, expected: &Expected<'_>, size: u64, amount: u64) -> anyhow::Result<Vec<(u64, usize)>> {
    let mut spans = if amount < size { sample(path, &borders(expected)?, size, amount) } else { vec![(0, size)] };
    spans.retain(|(start, end)| start < end);
    Ok(spans.into_iter().flat_map(|(start, end)| tree::parts(start, end, CHUNK_BYTES)).collect())
}

/// Bytes of a file at the borders between segments or pieces.
fn borders(expected: &Expected<'_>) -> anyhow::Result<BTreeSet<u64>> {
    let Expected::Image(image) = expected else { return Ok(BTreeSet::new()) };
    let mut borders = BTreeSet::new();
    for (index, segment) in image.segments().iter().enumerate() {
        let start = image.start_of(index);
        borders.insert(start);
        if let Segment::View(view) = segment {
            let tiling = view.lower()?;
            borders.extend(tiling.pieces().iter().map(|piece| start + piece.start * tiling.unit_bytes()));
        }
    }
    Ok(borders)
}

/// About `bytes` bytes: both ends, borders, and positions spread by a hash of the path.
fn sample(path: &str, borders: &BTreeSet<u64>, size: u64, bytes: u64) -> Vec<(u64, u64)> {
    let probes = (bytes / PROBE_BYTES).max(3);
    let mut places: BTreeSet<u64> = [0, size.saturating_sub(1)].into();
    let stride = usize::try_from(borders.len() as u64 / (probes / 2).max(1)).unwrap_or(0) + 1;
    places.extend(borders.iter().step_by(stride));
    // FNV-1a, then a linear congruential sequence: every run takes the same positions.
    let mut state = path
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    while (places.len() as u64) < probes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // The sequence can repeat a position; the sample is then smaller.
        if !places.insert((state >> 11) % size) && size < probes {
            break;
        }
    }
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for place in places {
        let (start, end) = (place.saturating_sub(PROBE_BYTES / 2), (place + PROBE_BYTES / 2).min(size));
        match spans.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => spans.push((start, end)),
        }
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_both_ends_and_borders_and_do_not_overlap() {
        for size in [600_u64, 5000, 1 << 20, 1 << 40] {
            let borders = (0..20).map(|n| n * size / 20).collect();
            let spans = sample("a", &borders, size, 64 << 10);
            assert_eq!((spans[0].0, spans.last().unwrap().1), (0, size));
            assert!(spans.windows(2).all(|pair| pair[0].1 < pair[1].0), "{spans:?}");
            assert!(borders.iter().all(|at| spans.iter().any(|(start, end)| start <= at && at < end)));
            assert_eq!(spans, sample("a", &borders, size, 64 << 10));
            let total: u64 = spans.iter().map(|(start, end)| end - start).sum();
            assert!(total <= 64 << 10 && total * 2 >= (32 << 10).min(size), "{size}: {total}");
        }
    }
}
