//! `ckfs mount`, and the arguments of `mount.ckfs`.
//!
//! The process that the user starts makes the cheap checks, starts the program again as the daemon, and waits for its
//! report. The daemon does the real work, so that the message of a failed start is the daemon's own.

use std::{
    ffi::OsString,
    fs,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use ckfs_config::{Config, Group, Settings, TimeLimit, options};
use ckfs_fuse::{
    DaemonError, MountError, Readiness, Started, Succession, block_signals, check_passed, is_daemon, is_passed, keep,
    parse_mount_helper, serve_service, start_background,
};
use ckfs_host::{Log, LogTarget, system_log};
use ckfs_plan::{
    Plan,
    report::{bytes_per_device, human_bytes},
};
use ckfs_service::{AliveContent, wait_registry, watch};
use ckfs_source::Wait;
use clap::Args;

use super::{
    flags::{LogFlags, ServingFlags, SourceFlags, source_help},
    last_mount, open,
    output::{AlreadyReported, Usage, error_text, message},
    paragraph::counted,
    steps,
};

/// Mounts a checkpoint.
///
/// Returns when the file system answers; a daemon goes on in the background and ends when the mount is removed, or by
/// SIGTERM. Everything wrong with the checkpoint, the flags or the mountpoint is an error now, not later. Once mounted,
/// a read fails only if its bytes do not come or a source file changes, and then with EIO.
///
/// MNT must be an existing directory without a live mount on it, unless --mkdir makes it. The mount of a killed daemon is
/// removed. MNT may also be /dev/fd/N: a descriptor of /dev/fuse that this program inherits, which another process has
/// opened for reading and writing and mounted. That process unmounts.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs mount /data/llama /mnt/llama --mesh fsdp=4,tensor=2
  ckfs mount org/name@main /mnt/name --dtype bf16 --layout hf
  ckfs mount --config /etc/ckfs/llama.toml --foreground     as a systemd service of Type=notify does
  ckfs mount /data/llama /mnt/llama -o mesh=fsdp=4:tensor=2,allow_other
  mount -t ckfs /data/llama /mnt/llama -o mesh=fsdp=4       with this program as /sbin/mount.ckfs

What is in the mount:
  dev0/...                      raw bytes of device 0's shards
  full/...                      the same tensors unsharded
  safetensors/dev0.safetensors  all shards of a device in one file
  npy/dev0/..., pt/dev0.pt      the same for numpy and torch
  orbax/0/                      an Orbax checkpoint, chunks as devices hold them
  dcp/                          a torch.distributed.checkpoint
  hf/                           the repository as it is, casts applied
  mesh/fsdp=0,.../              links to the devices
  .ckfs/                        manifest, plan, configuration, statistics

Signals to the daemon, also while it starts:
  TERM, INT, QUIT  unmount, waiting for open files (--grace, --drain); a second one cuts them off
  HUP              opens the log file anew, as after it was rotated
  USR1             writes one line of statistics to the log
  USR2             leaves the mount to the next daemon, where a keeper or systemd keeps it; else nothing
  others           are ignored if they can be, such as PIPE, ALRM, IO, XCPU and XFSZ

The log of a daemon in the background goes to --log-file, else to the system's log (/dev/log, or the \
journal), else to $XDG_STATE_HOME/ckfs/ (~/.local/state/ckfs/): one file per mountpoint of at most 4 MiB, \
and the one before it. Without HOME there is no such place, and the log goes nowhere. After mounting, one \
line on standard error says which it is; -q omits it.")]
pub(super) struct Mount {
    #[arg(help = source_help())]
    source: Option<String>,
    /// An existing directory; --mkdir makes it.
    #[arg(value_name = "MNT")]
    mountpoint: Option<PathBuf>,
    /// Stays in the foreground, and tells systemd when ready.
    #[arg(long, short = 'f', help_heading = "Mount")]
    foreground: bool,
    /// Flags in the manner of mount(8): names with underscores, commas between them; `\,` for a comma in a value.
    #[arg(short = 'o', value_name = "NAME[=VALUE],...", help_heading = "Mount")]
    options: Vec<String>,
    #[command(flatten)]
    flags: SourceFlags,
    #[command(flatten)]
    serving: ServingFlags,
    /// Goes on with the mount of another daemon.
    #[arg(long, hide = true, value_parser = ["running", "dead"])]
    succeed: Option<String>,
    /// Keeps the mount of the daemon at the other end of standard input.
    #[arg(long, hide = true)]
    keep: bool,
}

/// The arguments of `ckfs mount` for the arguments that mount(8) gave to `mount.ckfs`.
///
/// # Errors
/// A usage error.
pub(super) fn helper_arguments(args: &[OsString]) -> anyhow::Result<Vec<OsString>> {
    // People type these; mount(8) never does.
    match args.first().and_then(|arg| arg.to_str()) {
        Some("-h" | "--help") => return Ok(["ckfs", "mount", "--help"].map(Into::into).into()),
        Some("-V" | "--version") => return Ok(["ckfs", "--version"].map(Into::into).into()),
        Some(_) | None => {}
    }
    let request = parse_mount_helper(args).map_err(|error| Usage(error.to_string()))?;
    // Also where unknown options are passed over: half of a mesh is another mesh.
    options::check_commas(&request.options).map_err(|error| Usage(format!("-o: {error}")))?;
    // With `-f` nothing is mounted: plan shows whether a mount would succeed.
    let is_mount = !request.fake;
    let mut args: Vec<OsString> = vec!["ckfs".into(), if is_mount { "mount" } else { "plan" }.into()];
    args.extend((is_mount && request.verbose).then(|| "-v".into()));
    for (name, value) in &request.options {
        match options::flag_of(name, value.as_deref()) {
            // The settings for serving do not affect the view.
            Ok((group, flag)) => args.extend((is_mount || Group::READERS.contains(&group)).then(|| flag.into())),
            Err(_) if is_mount && request.sloppy => {}
            Err(error) => return Err(Usage(error).into()),
        }
    }
    args.extend(["--".into(), request.source]);
    args.extend(is_mount.then(|| request.mountpoint.into()));
    Ok(args)
}

impl Mount {
    /// The settings of `-o`.
    fn options(&self) -> anyhow::Result<Settings> {
        let mut args: Vec<OsString> = vec!["source".into(), "mountpoint".into()];
        for list in &self.options {
            args.extend(["-o".into(), list.into()]);
        }
        let request = parse_mount_helper(&args).map_err(|error| Usage(format!("-o: {error}")))?;
        options::check_commas(&request.options).map_err(|error| Usage(format!("-o: {error}")))?;
        let options = request.options.iter().map(|(name, value)| (name.as_str(), value.as_deref()));
        Ok(options::parse(options).map_err(|reason| Usage(format!("-o: {reason}")))?)
    }

    /// The configuration: flags have precedence over `-o`, and `-o` over the file.
    fn config(&self, log: &LogFlags) -> anyhow::Result<(Config, PathBuf)> {
        let lines = [&self.flags.settings, &self.serving.settings, &log.file.settings, &self.options()?];
        let mut config = open::config(&lines)?;
        // With a file that names the source, a single argument is the mountpoint.
        let (source, mountpoint) = match (&self.source, &self.mountpoint) {
            (Some(only), None) if config.source.is_some() => (None, Some(PathBuf::from(only))),
            (source, mountpoint) => (source.clone(), mountpoint.clone()),
        };
        config.source = source.or(config.source);
        if config.source.is_none() {
            return Err(Usage("expected SOURCE and MNT, or a --config file that names them".to_owned()).into());
        }
        let Some(mountpoint) = mountpoint.or_else(|| config.mountpoint.clone()) else {
            return Err(Usage("expected MNT after SOURCE, or a --config file that names it".to_owned()).into());
        };
        let mountpoint = std::path::absolute(&mountpoint).context("mountpoint")?;
        config.mountpoint = Some(mountpoint.clone());
        Ok((config, mountpoint))
    }

    /// Mounts. `args` are those of this process; it starts itself again with them as the daemon.
    pub(super) fn run(&self, log: &LogFlags, sink: &Log, args: &[OsString]) -> anyhow::Result<()> {
        let config = self.config(log);
        if self.keep {
            // As the keeper of a daemon's mount.
            let (config, mountpoint) = config?;
            let file = self.flags.settings.config.as_deref().context("--keep: only with --config")?;
            sink.switch(LogTarget::of_daemon(&mountpoint));
            let timeout = config.start_limit.map(TimeLimit::duration).unwrap_or_default();
            return Ok(keep(file, &mountpoint, timeout).inspect_err(|error| tracing::error!("{error}"))?);
        }
        if self.foreground || is_daemon() {
            let succession = match self.succeed.as_deref() {
                None => Succession::None,
                Some("running") => Succession::Running,
                Some(_) => Succession::Dead,
            };
            let is_watched = self.foreground && !is_daemon() && !log.quiet && io::stderr().is_terminal();
            return serve_here(
                config,
                sink,
                if is_watched { DaemonTie::Terminal } else { DaemonTie::None },
                succession,
            );
        }
        let (config, mountpoint) = config?;
        ckfs_fuse::check_host()?;
        let mut made = MadeDirectories::default();
        if is_passed(&mountpoint) {
            check_passed(&mountpoint)?;
        } else {
            if config.mount.mkdir == Some(true) {
                made.make(&mountpoint)?;
            }
            check_mountpoint(&mountpoint)?;
        }
        let timeout = config.start_limit.map(TimeLimit::duration).unwrap_or_default();
        let Started { pid, log: place, served } = start(args, &mountpoint, timeout)?;
        made.keep();
        let (source, path) = (config.source.unwrap_or_default(), mountpoint.display());
        tracing::info!("{source} is mounted on {path} by process {pid}");
        log.tell(sink, &format!("mounted on {path}; its log goes {place}; {served}"));
        Ok(())
    }
}

/// Starts a daemon with the arguments of `ckfs mount`, which name `mountpoint`, and waits until the mount answers.
///
/// # Errors
/// The reason why it did not start, in its own words.
pub(super) fn start(args: &[OsString], mountpoint: &Path, timeout: Duration) -> anyhow::Result<Started> {
    let program = std::env::current_exe().context("path of this program")?;
    Ok(start_background(&program, args, mountpoint, timeout)?)
}

/// The number of devices of each view, and the bytes of each device.
fn per_device<'a>(plans: impl IntoIterator<Item = &'a Plan>) -> String {
    let of_view = |plan: &Plan| {
        let held = bytes_per_device(plan);
        let (least, most) = (held.iter().min().copied().unwrap_or(0), held.iter().max().copied().unwrap_or(0));
        let devices = counted(held.len(), "device");
        if least == most {
            format!("{devices}, {} each", human_bytes(most))
        } else {
            format!("{devices}, {} to {} each", human_bytes(least), human_bytes(most))
        }
    };
    plans.into_iter().map(of_view).collect::<Vec<_>>().join("; ")
}

/// Directories that this process made for a mount. They are removed again when dropped, unless the mount succeeded.
#[derive(Debug, Default)]
struct MadeDirectories(Vec<PathBuf>);

impl MadeDirectories {
    /// Makes a directory, and the missing ones above it.
    fn make(&mut self, path: &Path) -> anyhow::Result<()> {
        let missing: Vec<&Path> = path
            .ancestors()
            .take_while(|part| fs::symlink_metadata(part).is_err_and(|error| error.kind() == io::ErrorKind::NotFound))
            .collect();
        for part in missing.into_iter().rev() {
            match fs::create_dir(part) {
                Ok(()) => self.0.push(part.to_owned()),
                // Another process made it meanwhile.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| format!("--mkdir: {}", part.display())),
            }
        }
        Ok(())
    }

    /// Leaves them.
    fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for MadeDirectories {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            // A directory that is in use by now stays.
            let _ = fs::remove_dir(path);
        }
    }
}

/// Finds errors early that would otherwise come late.
pub(super) fn check_mountpoint(path: &Path) -> anyhow::Result<()> {
    match ckfs_fuse::check_mountpoint(path) {
        Err(MountError::Missing { path }) => {
            bail!("mountpoint {}: no such directory; create it first, or give --mkdir", path.display())
        }
        result => Ok(result?),
    }
}

/// What a daemon has in common with its starter once it is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DaemonTie {
    /// Nothing.
    None,
    /// There is no starter: a user at a terminal waits for the mount.
    Terminal,
    /// Standard error and the end.
    Attached,
}

/// Mounts and serves in this process, and reports to the waiting starter.
pub(super) fn serve_here(
    config: anyhow::Result<(Config, PathBuf)>,
    log: &Log,
    tie: DaemonTie,
    succession: Succession,
) -> anyhow::Result<()> {
    block_signals()?;
    let given = config.as_ref().ok();
    let log_file = given.and_then(|(config, _)| config.mount.log_file.clone());
    let mountpoint = given.map(|(_, mountpoint)| mountpoint.clone()).unwrap_or_default();
    let readiness = Readiness::new(log, log_file.as_deref(), &mountpoint);
    let mut readiness = readiness.map_err(|error| {
        let is_reported = matches!(error, DaemonError::LogFile { .. }) && is_daemon();
        if is_reported { AlreadyReported.into() } else { anyhow::Error::from(error) }
    })?;
    if tie == DaemonTie::Attached {
        readiness = readiness.attached();
    }
    let result =
        config.and_then(|(config, mountpoint)| mount(config, &mountpoint, log, (&mut readiness, tie), succession));
    if let Err(error) = &result {
        let starter_waits = readiness.in_background();
        log.flush(ckfs_host::log::FLUSH_LIMIT);
        readiness.failed(&message(error));
        if starter_waits {
            return Err(AlreadyReported.into());
        }
    }
    result
}

/// What a mount does before it serves, for systemd.
const OPENING: &str = "reading headers";

fn mount(
    mut config: Config,
    mountpoint: &Path,
    log: &Log,
    (readiness, tie): (&mut Readiness, DaemonTie),
    succession: Succession,
) -> anyhow::Result<()> {
    readiness.status(OPENING);
    let mut made = MadeDirectories::default();
    if is_passed(mountpoint) {
        check_passed(mountpoint)?;
        // The path means nothing to other processes, and to this one only once.
        config.mountpoint = None;
    } else if config.mount.mkdir == Some(true) {
        made.make(mountpoint)?;
    }
    let (path, source) = (mountpoint.display().to_string(), config.source.clone().unwrap_or_default());
    system_log::set_subject(&[("CKFS_MOUNT", &path), ("CKFS_SOURCE", &source)]);
    let waits = wait_registry(&config.mount);
    let (mut reporting, logged) = (readiness.try_clone()?, log.clone());
    let telling = readiness.try_clone()?;
    let note = move |wait: Option<(&Wait, &str)>| match wait {
        Some((wait, text)) => telling.waits(text, wait.left),
        None => telling.status(OPENING),
    };
    let wait_watch = watch(&waits, note, move |message| {
        logged.finish();
        if !reporting.in_background() {
            ckfs_host::tell(&format!("{}\n", error_text(message)));
        }
        reporting.failed(message);
        std::process::exit(1);
    });
    let service = open::started(&mut config, &waits, wait_watch)?;
    let held = match service.content() {
        AliveContent::Checkpoint(volume) => per_device(volume.plans().iter().map(Arc::as_ref)),
        AliveContent::Run(run) => steps::shown(run),
    };
    let keeper = match config.mount.keeper {
        // The next daemon reads it.
        Some(true) => Some(last_mount::write(&config, mountpoint).context("--keeper")?),
        Some(false) | None => None,
    };
    let (mut ready, mut served) = (Ok(()), false);
    let exit = serve_service(&*service, mountpoint, log, (succession, keeper.as_deref()), || {
        ready = readiness.ready(&format!("serving {} on {}", service.label(), mountpoint.display()), &held);
        served = true;
        // A mount for one command only, or without a path, has none to keep.
        if tie != DaemonTie::Attached && config.mountpoint.is_some() {
            last_mount::keep(&config, mountpoint);
        }
        if tie == DaemonTie::Terminal {
            ckfs_host::tell(&format!("ckfs: mounted on {}; {held} (Ctrl-C unmounts)\n", mountpoint.display()));
        }
    });
    if served {
        made.keep();
    }
    ready?;
    if !exit?.is_clean() {
        bail!("{}: open files were cut off; --drain TIME gives their readers longer", mountpoint.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::{Arg, CommandFactory};

    use super::*;

    fn helper(args: &[&str]) -> Result<String, String> {
        let args = helper_arguments(&args.iter().map(OsString::from).collect::<Vec<_>>());
        let text = |args: Vec<OsString>| args.iter().map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ");
        args.map(text).map_err(|error| error.to_string())
    }

    #[test]
    fn options_of_mount_become_flags() {
        let rows = [
            ("mesh=fsdp=4:tensor=2,allow_other", "ckfs mount --mesh=fsdp=4:tensor=2 --allow-other -- s /m"),
            ("rw", "ckfs mount -- s /m"),
            ("defaults,nofail,x-systemd.automount,even", "ckfs mount --even -- s /m"),
            ("cache_bytes=1G,source_io=pread", "ckfs mount --cache-bytes=1G --source-io=pread -- s /m"),
            ("allow_missing,allow_unmapped=*.x", "ckfs mount --allow-missing --allow-unmapped=*.x -- s /m"),
            ("include=a\\,b,include=c,set=scan=true", "ckfs mount --include=a,b --include=c --set=scan=true -- s /m"),
            ("rename=a\\.(b)=>$1,strip_prefix=m.", "ckfs mount --rename=a\\.(b)=>$1 --strip-prefix=m. -- s /m"),
        ];
        for (options, expected) in rows {
            assert_eq!(helper(&["s", "/m", "-o", options]).as_deref(), Ok(expected));
        }
        assert!(helper(&["s", "/m", "-o", "nonsense"]).unwrap_err().starts_with("unknown option \"nonsense\""));
        assert_eq!(helper(&["s", "/m", "-s", "-o", "nonsense"]).as_deref(), Ok("ckfs mount -- s /m"));
        assert!(helper(&["s", "/m", "-o", "even=1"]).unwrap_err().contains("expected no value"));
        assert!(helper(&["s", "/m", "-o", "mesh"]).unwrap_err().contains("expected mesh=VALUE"));
        for (options, expected) in [
            (
                "mesh=fsdp=4,tensor=2",
                "\"tensor=2\" is no option: inside a value a comma is written \\,, in a mesh also \":\": mesh=fsdp=4:tensor=2",
            ),
            ("mesh=fsdp=4,tensor=2,ep=2,even", "mesh=fsdp=4:tensor=2:ep=2"),
            ("even,devices=0,3,5", "\"3,5\" is no option: inside a value a comma is written \\,: devices=0\\,3\\,5"),
        ] {
            for sloppy in [&["s", "/m", "-o"][..], &["s", "/m", "-s", "-o"]] {
                let error = helper(&[sloppy, &[options]].concat()).unwrap_err();
                assert!(error.ends_with(expected), "{error}");
            }
        }
        for (flag, expected) in [("-h", "ckfs mount --help"), ("--help", "ckfs mount --help"), ("-V", "ckfs --version")]
        {
            assert_eq!(helper(&[flag]).as_deref(), Ok(expected));
        }
        assert_eq!(helper(&["-f", "s", "/m", "-o", "mesh=a=2,timeout=3"]).as_deref(), Ok("ckfs plan --mesh=a=2 -- s"));
    }

    /// Flags of `ckfs mount` that determine how the command itself runs.
    const NO_OPTIONS: [&str; 5] = ["foreground", "verbose", "quiet", "help", "version"];

    #[test]
    fn every_flag_of_mount_is_an_option() {
        let mut program = super::super::Cli::command();
        program.build();
        let mount = program.find_subcommand("mount").unwrap();
        let flags: Vec<String> = mount
            .get_arguments()
            .filter(|arg| !arg.is_hide_set())
            .filter_map(Arg::get_long)
            .map(|flag| flag.replace('-', "_"))
            .collect();
        for flag in &flags {
            let known = [Some("?"), None].map(|value| options::flag_of(flag, value));
            assert_eq!(known.iter().all(Result::is_err), NO_OPTIONS.contains(&flag.as_str()), "{flag}");
        }
        let error = options::flag_of("?", None).unwrap_err();
        let (_, options) = error.split_once("there are: ").unwrap();
        for option in options.split(", ") {
            assert!(flags.contains(&option.to_owned()), "{option} is no flag");
        }
        assert!(options.split(", ").count() > 30, "{options}");
    }
}
