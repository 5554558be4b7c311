//! The configuration of a command, and what it opens.

use std::{io, path::Path, sync::Arc};

use anyhow::{Context, bail};
use ckfs_checkpoint::Checkpoint;
use ckfs_config::{Config, MountSettings, Settings};
use ckfs_fuse::interruptible;
use ckfs_plan::ViewOptions;
use ckfs_service::{Alive, OpenError, WaitWatch, open_alive, open_checkpoint, open_volume, wait_registry, watch};
use ckfs_source::{Wait, WaitRegistry};
use ckfs_volume::Volume;

use super::{
    flags::SourceFlags,
    hint,
    output::{Usage, error_text},
};

/// The configuration of command lines and a file. The first command line has precedence.
///
/// # Errors
/// A file that is unreadable or malformed.
pub(super) fn config(lines: &[&Settings]) -> anyhow::Result<Config> {
    let base = std::env::current_dir().context("working directory")?;
    // The time limit that a file says is not known before it is read.
    let limits = lines.iter().map(|line| &line.mount).find(|mount| mount.source_timeout.is_some()).cloned();
    let file = lines.iter().find_map(|line| line.config.as_ref()).unwrap_or(&base);
    let action = "read the configuration and find what it names";
    let config = within(&limits.unwrap_or_default(), file, action, || Config::gather(lines, &base))?;
    // A malformed layout file is an error of the configuration, whatever the state of the source.
    for view in &config.views {
        ViewOptions::new(&view.settings)?;
    }
    Ok(config)
}

/// The configuration of a command that takes `SOURCE`, or finds it in a file.
///
/// # Errors
/// As [`config`], and a usage error if there is no source.
pub(super) fn source_config(source: Option<&str>, flags: &SourceFlags) -> anyhow::Result<Config> {
    let config = with_source(config(&[&flags.settings])?, source)?;
    if let Some(source) = source.filter(|_| config.mount.offline != Some(true)) {
        within(&config.mount, Path::new(source), "look for the source", || hint::tell_near(source));
    }
    Ok(config)
}

/// The configuration with the source that an argument names.
///
/// # Errors
/// A usage error if neither names one.
pub(super) fn with_source(mut config: Config, source: Option<&str>) -> anyhow::Result<Config> {
    config.source = source.map(str::to_owned).or(config.source);
    if config.source.is_none() {
        return Err(Usage("expected SOURCE, or a --config file that names it".to_owned()).into());
    }
    Ok(config)
}

/// Where a mount shows its configuration.
const SHOWN_CONFIG: &str = ".ckfs/config.toml";

/// The mount that an argument names, with the configuration that it was made with; `None` if the argument is a source.
///
/// # Errors
/// The configuration cannot be read, or flags say another one: they would not be followed.
pub(super) fn mount_config<'a>(
    target: Option<&'a str>,
    flags: &SourceFlags,
) -> anyhow::Result<Option<(&'a Path, Config)>> {
    let Some(mount) = target.map(Path::new) else { return Ok(None) };
    // The path of a source is as good as that of a mount.
    let is_mount = || mount.join(SHOWN_CONFIG).is_file();
    if !within(&flags.settings.mount, mount, "look for a mount", is_mount) {
        return Ok(None);
    }
    let given: Vec<String> = flags.settings.given().map(|setting| format!("--{}", setting.name)).collect();
    if !given.is_empty() {
        let (mount, given) = (mount.display(), given.join(", "));
        bail!("{mount}: is a mount, which says by itself how it was made; {given}: only for sources");
    }
    Ok(Some((mount, shown_config(mount)?)))
}

/// The mount that an argument names, if it names one, and the configuration of it or of the source.
///
/// # Errors
/// As [`mount_config`] and [`source_config`].
pub(super) fn target_config<'a>(
    target: Option<&'a str>,
    flags: &SourceFlags,
) -> anyhow::Result<(Option<&'a Path>, Config)> {
    Ok(match mount_config(target, flags)? {
        Some((mount, config)) => (Some(mount), config),
        None => (None, source_config(target, flags)?),
    })
}

/// The configuration that a mount shows of itself, with the files of layouts. The sources that it names are not touched.
/// What gives no answer within the mount's time limit ends this process.
///
/// # Errors
/// A file that is unreadable or malformed.
pub(super) fn shown_config(mount: &Path) -> anyhow::Result<Config> {
    let file = mount.join(SHOWN_CONFIG);
    let load = || Config::load_alone(&file);
    let mut config = within(&MountSettings::default(), &file, "read", load)?;
    for view in &mut config.views {
        let Some(layout) = &mut view.settings.layout else { continue };
        if let Some(file) = layout.file().map(Path::to_owned) {
            within(&config.mount, &file, "read", || layout.read_file())?;
        }
    }
    Ok(config)
}

/// Splits the arguments `[SOURCE] PATH`: the first is optional if a configuration file names the source.
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
        None if flags.settings.config.is_some() => Ok((None, first)),
        None => Err(Usage(format!("expected SOURCE and {what}, found {first:?} only")).into()),
    }
}

/// Opens the checkpoint, and makes the configuration's source independent of the working directory. Storage that does not answer
/// ends this process from now on.
///
/// # Errors
/// Everything wrong with the repository.
pub(super) fn checkpoint(config: &mut Config) -> anyhow::Result<Arc<Checkpoint>> {
    let waits = ending_waits(config)?;
    open_checkpoint(config, &waits).map_err(explained)
}

/// The volume of a configuration, ready for reads. Storage that does not answer ends this process from now on.
///
/// # Errors
/// Everything wrong with repository or plans.
pub(super) fn volume(config: &mut Config) -> anyhow::Result<Volume> {
    let waits = ending_waits(config)?;
    open_volume(config, &waits).map_err(explained)
}

/// Opens what a configuration asks for, to be mounted or served: a checkpoint, or a run. Once it is open it watches its waits by
/// itself: `wait_watch` ends.
///
/// # Errors
/// Everything wrong with it; or a setting is of runs only.
pub(super) fn started(
    config: &mut Config,
    waits: &Arc<WaitRegistry>,
    wait_watch: io::Result<WaitWatch>,
) -> anyhow::Result<Box<dyn Alive>> {
    let wait_watch = wait_watch.context("start a thread")?;
    if config.mount.steps.is_none() && config.mount.on_step.is_some() {
        return Err(Usage("--on-step: only with --steps".to_owned()).into());
    }
    let mut service = interruptible(|| open_alive(config, waits))?.map_err(explained)?;
    drop(wait_watch);
    service.start().context("start a thread")?;
    Ok(service)
}

/// An error of opening, with what would help.
pub(super) fn explained(error: OpenError) -> anyhow::Error {
    if let OpenError::Checkpoint { source_name, error } = error {
        return hint::of_source(&source_name, error);
    }
    error.into()
}

// Commands do not wait forever for storage without an answer: this process ends with an error then.

/// Ends this process with an error when a fetch stalls, after `before`.
pub(super) fn ending(fetches: &Arc<WaitRegistry>, before: impl FnOnce() + Send + 'static) -> io::Result<WaitWatch> {
    let note = |_: Option<(&Wait, &str)>| {};
    watch(fetches, note, |message| {
        before();
        ckfs_host::tell(&format!("{}\n", error_text(message)));
        std::process::exit(1);
    })
}

/// A record of waits. From now on this process ends with an error when one of them stalls.
///
/// # Errors
/// The system starts no thread.
pub(super) fn ending_waits(config: &Config) -> anyhow::Result<Arc<WaitRegistry>> {
    let waits = wait_registry(&config.mount);
    // The thread runs to the end of the process.
    std::mem::forget(ending(&waits, || {}).context("start a thread")?);
    Ok(waits)
}

/// Calls `work`, which looks at `path`. If the path gives no answer within the time limit of the settings, this process ends
/// with an error that names it. Without a thread to watch it, which the system may refuse, `work` takes its time.
pub(super) fn within<T>(settings: &MountSettings, path: &Path, action: &'static str, work: impl FnOnce() -> T) -> T {
    let fetches = wait_registry(settings);
    let _watch = ending(&fetches, || {});
    let _looking = fetches.begin_path(path, action);
    work()
}
