//! What was typed, given meaning: configuration, checkpoint, plans, volume.

use std::{fs, path::Path, sync::Arc, thread};

use anyhow::{Context, anyhow};

use super::{
    flags::SourceFlags,
    output::{Usage, chain},
};
use crate::{
    checkpoint::{Checkpoint, OpenOptions, printable},
    plan::{
        Config, Plan,
        config::{MountKeys, ViewKeys},
    },
    read::EngineOptions,
    source::FileId,
    volume::{ViewPlan, Volume, VolumeOptions},
};

/// Least and most memory for transformed data by default, and its part of all memory.
const CACHE_BYTES: (u64, u64) = (256 << 20, 16 << 30);
const CACHE_PART_OF_MEMORY: u64 = 8;

/// The configuration that flags and a file amount to.
///
/// # Errors
/// A file that cannot be read or is malformed.
pub(super) fn config(file: Option<&Path>, keys: &ViewKeys, mount: &MountKeys) -> anyhow::Result<Config> {
    let mut config = file.map(Config::load).transpose()?.unwrap_or_default();
    let base = std::env::current_dir().context("working directory")?;
    config.overlay(keys, mount, &base)?;
    Ok(config)
}

/// The configuration of a command that takes `SOURCE`, or finds it in a file.
///
/// # Errors
/// As [`config`], and a usage error if there is no source.
pub(super) fn source_config(source: Option<&str>, flags: &SourceFlags) -> anyhow::Result<Config> {
    let mut config = config(flags.view.config.as_deref(), &flags.view.keys(), &flags.engine.keys())?;
    if let Some(source) = source {
        config.source = Some(source.to_owned());
    }
    if config.source.is_none() {
        return Err(Usage("expected SOURCE, or a --config file that names it".to_owned()).into());
    }
    Ok(config)
}

/// Takes apart the arguments `[SOURCE] PATH`: the first is optional where a configuration file names the source.
///
/// # Errors
/// A usage error.
pub(super) fn source_and<'a>(
    first: &'a str,
    second: Option<&'a str>,
    flags: &SourceFlags,
    what: &str,
) -> anyhow::Result<(Option<&'a str>, &'a str)> {
    match second {
        Some(second) => Ok((Some(first), second)),
        None if flags.view.config.is_some() => Ok((None, first)),
        None => Err(Usage(format!("expected SOURCE and {what}, found {first:?} only")).into()),
    }
}

/// Opens the checkpoint, and makes the configuration's source independent of the working directory.
///
/// # Errors
/// Everything wrong with the repository.
pub(super) fn checkpoint(config: &mut Config) -> anyhow::Result<Arc<Checkpoint>> {
    let mut source = config.source.clone().ok_or_else(|| anyhow!("no source"))?;
    // A daemon leaves the working directory, and its files are looked at by path again.
    if Path::new(&source).exists() {
        source = std::path::absolute(&source).with_context(|| source.clone())?.display().to_string();
    }
    let io = config.mount.source_io.as_ref().map(|io| io.0).unwrap_or_default();
    let mut adapters: Vec<_> = config.views.iter().filter_map(|view| view.keys.lora.clone()).collect();
    adapters.sort();
    adapters.dedup();
    let checkpoint = Checkpoint::open(&source, &OpenOptions { io, adapters, ..OpenOptions::default() })?;
    config.source = Some(match checkpoint.revision() {
        // The label is the repository's name with a short revision.
        Some(revision) => {
            let name = checkpoint.label().split('@').next().unwrap_or_default();
            format!("{name}@{revision}")
        }
        None => source,
    });
    for file in checkpoint.suspicious_files() {
        tracing::warn!("{}: left out: safetensors that the index does not name", printable(&file.path));
    }
    for warning in checkpoint.warnings() {
        tracing::warn!("{}", printable(warning));
    }
    Ok(Arc::new(checkpoint))
}

/// What to do about names that are not as expected.
const ADVICE: &str = "  --allow-missing[=PATTERN] accepts what is missing, --allow-unmapped[=PATTERN] what is unexpected; \
                      --source-rename 'REGEX=>TO' mends names";

/// Builds the plan of every view.
///
/// # Errors
/// Everything wrong with any of them.
pub(super) fn plans(checkpoint: &Checkpoint, config: &Config) -> anyhow::Result<Vec<ViewPlan>> {
    let mut failures = Vec::new();
    let mut plans = Vec::new();
    let mut of_names = false;
    for view in &config.views {
        match Plan::build(checkpoint, &view.keys.options()) {
            Ok(plan) => plans.push(ViewPlan { name: view.name.clone(), plan: Arc::new(plan) }),
            Err(error) => {
                of_names |= error.concerns_names();
                let of_view = if view.name.is_empty() { String::new() } else { format!("view {}: ", view.name) };
                failures.push(format!("{of_view}{error}"));
            }
        }
    }
    if of_names {
        failures.push(ADVICE.to_owned());
    }
    if failures.is_empty() { Ok(plans) } else { Err(anyhow!("{}", failures.join("\n"))) }
}

/// Memory of this machine, or what its control group may use if that is less.
pub(super) fn memory_bytes() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB"))?;
    let total = total.trim().parse::<u64>().ok()?.saturating_mul(1024);
    let limit = fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
    Some(limit.map_or(total, |limit: u64| limit.min(total)))
}

/// Cores that this process may use.
pub(super) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Limits of the engine.
pub(super) fn engine_options(keys: &MountKeys) -> EngineOptions {
    let (least, most) = CACHE_BYTES;
    let by_default = || (memory_bytes().unwrap_or(0) / CACHE_PART_OF_MEMORY).clamp(least, most);
    let bytes = keys.cache_bytes.map_or_else(by_default, |bytes| bytes.0);
    EngineOptions {
        tile_cache_bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
        workers: keys.threads.unwrap_or_else(|| cores().clamp(2, 16)),
    }
}

/// Everything, ready to be read.
///
/// # Errors
/// Everything wrong with repository or plans.
pub(super) fn volume(config: &mut Config) -> anyhow::Result<Volume> {
    let checkpoint = checkpoint(config)?;
    let plans = plans(&checkpoint, config)?;
    for (name, warning) in plans.iter().flat_map(|view| view.plan.warnings.iter().map(|text| (&view.name, text))) {
        let warning = printable(warning);
        if name.is_empty() {
            tracing::warn!("{warning}");
        } else {
            tracing::warn!("view {name}: {warning}");
        }
    }
    lay_out(&checkpoint, &plans, config)
}

/// The volume of these plans.
///
/// # Errors
/// Everything that keeps the plans from being mounted.
pub(super) fn lay_out(checkpoint: &Arc<Checkpoint>, plans: &[ViewPlan], config: &Config) -> anyhow::Result<Volume> {
    let options = VolumeOptions {
        engine: engine_options(&config.mount),
        // Without a word nothing bypasses the page cache.
        direct: config.mount.direct_io.as_ref().map(Into::into).unwrap_or_default(),
        config_text: config.to_toml()?,
    };
    Ok(Volume::new(Arc::clone(checkpoint), plans.to_vec(), options)?)
}

/// Fails if a source file is no longer what it was when it was opened.
///
/// # Errors
/// The first file that changed.
pub(super) fn check_sources(volume: &Volume) -> anyhow::Result<()> {
    let checkpoint = volume.engine().checkpoint();
    let number = |file: usize| u32::try_from(file).expect("files were numbered by 32 bits when they were opened");
    (0..checkpoint.source().file_count())
        .map(|file| FileId(number(file)))
        .try_for_each(|file| Ok(checkpoint.source().check(file)?))
}

/// Logs an error with its causes.
pub(super) fn warn(what: &str, error: &anyhow::Error) {
    tracing::warn!("{what}: {}", chain(error));
}
