//! `ckfs doctor`: whether this host can mount, and how fast.

use std::{
    env, fs,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, anyhow, ensure};
use ckfs_checkpoint::hub_cache_directory;
use ckfs_format::safetensors::write_header;
use ckfs_fuse::{MountEntry, MountError, UnmountOptions, ckfs_mounts, unmount};
use ckfs_host::limits::may_administer;
use ckfs_plan::report::human_bytes;
use ckfs_source::page_size::page_bytes;
use ckfs_tensor::DType;
use ckfs_volume::readers_of;
use clap::Args;
use nix::{sys::utsname::uname, unistd::geteuid};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    mount, output,
    paragraph::{filled, items},
    status::{MountHealth, probe},
};

/// Longest time for a trial mount.
const TRY_LIMIT: Duration = Duration::from_secs(20);

/// Checks whether this host can mount, and gives a remedy for each obstacle.
///
/// Examines the kernel, /dev/fuse, rights, limits and memory. If these allow it, mounts a small test file for a
/// moment. Changes nothing. Fails if something keeps ckfs from mounting.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs doctor
  ckfs doctor --json | jq '.checks[] | select(.state != \"ok\")'")]
pub(super) struct Doctor {
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Warn,
    Fail,
}

/// One examined property of the host.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    state: Verdict,
    found: String,
    /// The remedy; empty if none is needed.
    advice: String,
}

fn check(name: &'static str, state: Verdict, found: impl Into<String>, advice: impl Into<String>) -> Check {
    let advice = if state == Verdict::Ok { String::new() } else { advice.into() };
    Check { name, state, found: found.into(), advice }
}

/// Major and minor number of a kernel's release.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// From the system call, which needs no `/proc`.
fn release() -> String {
    uname().map_or_else(|_| "unknown".to_owned(), |found| found.release().to_string_lossy().into_owned())
}

fn kernel() -> Check {
    let release = release();
    let (state, advice) = match kernel_version(&release) {
        Some(version) if version >= (5, 4) => (Verdict::Ok, ""),
        Some(_) => (Verdict::Warn, "use Linux 5.4 or newer; older kernels are not tested"),
        None => (Verdict::Warn, "the version of the kernel could not be read"),
    };
    check("kernel", state, format!("Linux {release}"), advice)
}

/// What a mount needs besides FUSE; no row if it is there.
fn host() -> Option<Check> {
    let (error, name) = match ckfs_fuse::check_host() {
        Err(error @ MountError::NoProc) => (error, "/proc"),
        Err(error @ MountError::NoNull) => (error, "/dev/null"),
        // That there is no device says a row of its own.
        Err(_) | Ok(()) => return None,
    };
    let message = error.to_string();
    let (found, advice) = message.split_once("; ").unwrap_or((&message, ""));
    Some(check(name, Verdict::Fail, found.trim_start_matches(name).trim_start_matches(": "), advice))
}

/// Whether this process could mount, as far as the device shows.
pub(super) fn device_problem() -> Option<String> {
    let path = Path::new("/dev/fuse");
    match fs::metadata(path) {
        Err(error) => Some(format!("/dev/fuse: {error}")),
        Ok(metadata) if !metadata.file_type().is_char_device() => Some("/dev/fuse: not a device".to_owned()),
        Ok(_) => fs::File::options().read(true).write(true).open(path).err().map(|error| format!("/dev/fuse: {error}")),
    }
}

fn device() -> Check {
    let mode = fs::metadata("/dev/fuse").map_or(0, |metadata| metadata.permissions().mode() & 0o7777);
    let (found, advice) = match device_problem() {
        None => return check("/dev/fuse", Verdict::Ok, format!("there, mode {mode:04o}, can be opened"), ""),
        // A closed device is there.
        Some(problem) if Path::new("/dev/fuse").exists() => (
            format!("{problem}; mode {mode:04o}"),
            "as root: chmod 666 /dev/fuse, or a udev rule; a container needs --device /dev/fuse --cap-add SYS_ADMIN",
        ),
        Some(problem) => (
            problem,
            "load the module (modprobe fuse); give a container the device (--device /dev/fuse --cap-add SYS_ADMIN)",
        ),
    };
    check("/dev/fuse", Verdict::Fail, found, format!("{advice}. Without it `ckfs cat` and `ckfs export` work"))
}

fn in_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|directory| directory.join(program)).find(|path| path.is_file())
}

fn rights() -> Vec<Check> {
    let (root, admin) = (geteuid().is_root(), may_administer());
    let capability = match admin {
        Some(true) => ", CAP_SYS_ADMIN",
        Some(false) if root => " without CAP_SYS_ADMIN, which mounts need",
        Some(false) => "",
        None => ", its capabilities not known without /proc",
    };
    let (who, admin) = (format!("user {}{capability}", geteuid()), admin.unwrap_or(root));
    let helper = in_path("fusermount3");
    let can = root && admin || helper.is_some();
    let advice = if root {
        "start the container with --cap-add SYS_ADMIN --device /dev/fuse; `ckfs serve` and `ckfs export` need no mount"
    } else {
        "install fuse3 (for fusermount3), or run as root with CAP_SYS_ADMIN"
    };
    let verdict = match (can, root && !admin) {
        (true, false) => Verdict::Ok,
        // fusermount3 has what the container may have, which is usually no more.
        (true, true) => Verdict::Warn,
        (false, _) => Verdict::Fail,
    };
    let mut checks = vec![check("rights", verdict, who, advice)];
    let found = helper.map_or_else(|| "not found".to_owned(), |path| path.display().to_string());
    let needed = !(root && admin);
    let state = if found != "not found" || !needed { Verdict::Ok } else { Verdict::Fail };
    let note = if needed { "" } else { " (not needed by root)" };
    checks.push(check("fusermount3", state, format!("{found}{note}"), "install fuse3"));
    let conf = fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    let allowed = conf.lines().any(|line| line.trim() == "user_allow_other");
    let (state, found) = match (allowed, root) {
        (true, _) => (Verdict::Ok, "user_allow_other is set"),
        (false, true) => (Verdict::Ok, "user_allow_other is not set (not needed by root)"),
        (false, false) => (Verdict::Warn, "user_allow_other is not set"),
    };
    checks.push(check("allow_other", state, found, "put user_allow_other into /etc/fuse.conf to use --allow-other"));
    checks
}

/// Removes a directory with a checkpoint in `model/` and a mount on `mnt/`, unless `keep` is set.
pub(super) struct Trial {
    directory: PathBuf,
    pub(super) model: PathBuf,
    pub(super) mountpoint: PathBuf,
    pub(super) mounted: bool,
    pub(super) keep: bool,
}

impl Trial {
    /// Makes the directories for a checkpoint and its mount.
    pub(super) fn at(directory: &Path) -> anyhow::Result<Self> {
        let (model, mountpoint) = (directory.join("model"), directory.join("mnt"));
        for new in [&model, &mountpoint] {
            let made = fs::create_dir_all(new).with_context(|| new.display().to_string());
            made.inspect_err(|_| drop((fs::remove_dir(&model), fs::remove_dir(directory))))?;
        }
        Ok(Self { directory: directory.to_owned(), model, mountpoint, mounted: false, keep: false })
    }

    /// With a small checkpoint, and the bytes of its file: in the directory for temporary files, or where that takes none (a read-only
    /// root, a full disk), in another usual one.
    fn small(name: &str) -> anyhow::Result<(Self, Vec<u8>)> {
        let below = |place: &Path| {
            let trial = Self::at(&place.join(format!("{name}-{}", std::process::id())))?;
            let file = write_trial(&trial.model)?;
            Ok((trial, file))
        };
        let given = env::temp_dir();
        below(&given).or_else(|error| {
            let others = ["/dev/shm", "/var/tmp"].map(Path::new).into_iter().filter(|other| *other != given);
            others.map(below).find_map(Result::ok).ok_or(error)
        })
    }

    pub(super) fn end(&mut self) -> anyhow::Result<()> {
        if self.mounted && !self.keep {
            let options = UnmountOptions { wait: Duration::from_secs(5), ..UnmountOptions::default() };
            unmount(&self.mountpoint, options)?;
            self.mounted = false;
        }
        if !self.keep && self.directory.exists() {
            // A recursive removal must never enter a mount: it runs only after the unmount.
            fs::remove_dir(&self.mountpoint).context("mnt")?;
            fs::remove_dir_all(&self.model).context("model")?;
            fs::remove_dir(&self.directory).with_context(|| self.directory.display().to_string())?;
        }
        Ok(())
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!("cleaning up: {}", output::chain(&error));
        }
    }
}

/// How a trial ended.
enum Tried<T> {
    /// It was made.
    Done(T),
    /// There is no place for its files.
    Not(anyhow::Error),
    /// It failed.
    Failed(anyhow::Error),
}

impl<T> Tried<T> {
    fn of(name: &str, trial: impl FnOnce(Trial, &[u8]) -> anyhow::Result<T>) -> Self {
        match Trial::small(name) {
            Ok((made, file)) => trial(made, &file).map_or_else(Self::Failed, Self::Done),
            Err(error) => Self::Not(error),
        }
    }

    fn check(&self, name: &'static str, failed: Verdict, advice: &str) -> Check {
        match self {
            Self::Done(_) => check(name, Verdict::Ok, "tried with a small file", ""),
            Self::Not(error) => check(
                name,
                Verdict::Warn,
                format!("not tried: {}", output::chain(error)),
                "set TMPDIR to a directory that takes files, and ask again",
            ),
            Self::Failed(error) => check(name, failed, output::chain(error), advice),
        }
    }
}

/// Mounts a file of a few bytes and reads it. Returns whether the kernel read it by itself.
fn try_mount(mut trial: Trial, file: &[u8]) -> anyhow::Result<bool> {
    let Trial { model, mountpoint, mounted, .. } = &mut trial;
    let args = ["--quiet", "mount", &model.display().to_string(), &mountpoint.display().to_string()];
    mount::start(&args.map(Into::into), mountpoint, TRY_LIMIT)?;
    *mounted = true;
    let read = fs::read(mountpoint.join("hf/model.safetensors")).context("hf/model.safetensors")?;
    ensure!(read == file, "other bytes came back than those of the source");
    let stats = fs::read(mountpoint.join(".ckfs/stats.json")).context(".ckfs/stats.json")?;
    let stats: Value = serde_json::from_slice(&stats).context(".ckfs/stats.json")?;
    trial.end()?;
    Ok(stats["passthrough_opens"].as_u64().unwrap_or(0) > 0)
}

/// Writes the small file that trials mount. Returns its bytes.
fn write_trial(model: &Path) -> anyhow::Result<Vec<u8>> {
    let mut file = write_header([("tensor", DType::U8, &[1][..])], &[], 8)?.bytes;
    file.push(1);
    fs::write(model.join("model.safetensors"), &file).with_context(|| model.display().to_string())?;
    Ok(file)
}

/// Lets `ckfs run` mount the small file for a command that ends at once.
fn try_run(mut trial: Trial, _file: &[u8]) -> anyhow::Result<()> {
    let program = env::current_exe().context("path of this program")?;
    let mut command = Command::new(&program);
    command.args(["--quiet", "run"]).arg(&trial.model).arg("--").arg(&program).arg("--version");
    // Its mountpoint is made where the trial's files could be.
    command.envs(trial.directory.parent().map(|place| ("TMPDIR", place)));
    let output = command.stdin(Stdio::null()).output().context("run")?;
    trial.end()?;
    let message = String::from_utf8_lossy(&output.stderr);
    let first = message.lines().next().unwrap_or_default();
    ensure!(output.status.success(), "{}", first.strip_prefix("ckfs: error: ").unwrap_or(first));
    Ok(())
}

/// Whether users without root can mount for one command.
fn private() -> Check {
    let tried = Tried::of("ckfs-doctor-run", try_run);
    tried.check("ckfs run", Verdict::Warn, "`ckfs mount` and `ckfs export` need no namespaces")
}

/// `tried` is the result of a trial mount, if there was one.
fn passthrough(tried: Option<bool>) -> Check {
    let new_enough = kernel_version(&release()).is_some_and(|version| version >= (6, 9));
    let config = fs::read_to_string(format!("/boot/config-{}", release())).unwrap_or_default();
    let off = config.contains("# CONFIG_FUSE_PASSTHROUGH is not set");
    let (state, found) = match (new_enough && !off, may_administer().unwrap_or(geteuid().is_root())) {
        (true, true) if tried == Some(true) => (Verdict::Ok, "tried: the kernel reads byte-identical files by itself"),
        (true, true) if tried.is_some() => {
            (Verdict::Warn, "tried: the kernel leaves byte-identical files to the daemon")
        }
        (true, true) => (Verdict::Ok, "kernel 6.9 or newer and CAP_SYS_ADMIN; not tried"),
        (true, false) => (Verdict::Warn, "needs CAP_SYS_ADMIN, which this process lacks"),
        (false, _) => (Verdict::Warn, "needs Linux 6.9 with CONFIG_FUSE_PASSTHROUGH"),
    };
    check(
        "passthrough",
        state,
        found,
        "byte-identical files are then read through the daemon, which is slower, not wrong",
    )
}

fn request_size() -> Check {
    let human = |pages: u64| human_bytes(pages * page_bytes());
    let page = human(1);
    match fs::read_to_string("/proc/sys/fs/fuse/max_pages_limit").ok().and_then(|text| text.trim().parse::<u64>().ok())
    {
        Some(pages) if pages < 256 => check(
            "request size",
            Verdict::Warn,
            format!("fs.fuse.max_pages_limit is {pages} pages of {page}"),
            format!("sysctl fs.fuse.max_pages_limit=256 or more makes reads of {} one request", human(256)),
        ),
        Some(pages) => {
            check("request size", Verdict::Ok, format!("fs.fuse.max_pages_limit is {pages} pages of {page}"), "")
        }
        None => check("request size", Verdict::Ok, format!("{} at most (kernel before 6.13)", human(256)), ""),
    }
}

/// How the page cache takes the bytes of a mount, which newer kernels do in larger parts. Nothing needs to be set for that.
fn page_cache(version: Option<(u32, u32)>) -> Check {
    let page = human_bytes(page_bytes());
    let found = match version {
        Some(version) if version >= (7, 4) => "large folios, of one request each at most".to_owned(),
        Some(version) if version >= (7, 3) => {
            format!("whole requests, in pages of {page}; Linux 7.4 keeps larger ones and copies them faster")
        }
        _ => {
            format!("pages of {page}, in requests of the read-ahead; Linux 7.3 makes larger requests, 7.4 larger pages")
        }
    };
    check("page cache", Verdict::Ok, found, "")
}

/// Whether the read-ahead of mounts can be set: their files under `/sys` belong to root.
fn read_ahead() -> Check {
    let bdi = Path::new("/sys/class/bdi");
    let writable = nix::unistd::access(bdi, nix::unistd::AccessFlags::F_OK).is_ok()
        && geteuid().is_root()
        && nix::sys::statvfs::statvfs(bdi)
            .is_ok_and(|stat| !stat.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY));
    let (state, found) =
        if writable { (Verdict::Ok, "can be set") } else { (Verdict::Warn, "cannot be set: /sys is not writable") };
    let advice = "as root: echo 4096 > /sys/class/bdi/MAJOR:MINOR/read_ahead_kb after mounting, or a udev rule; sequential reads \
                  are slower without";
    check("read-ahead", state, found, advice)
}

fn machine() -> Vec<Check> {
    let cores = ckfs_service::cores();
    let level = simd_level();
    let mut checks = vec![check("cores", Verdict::Ok, format!("{cores}, vectors {level}"), "")];
    let budget = ckfs_service::budget(&ckfs_config::MountSettings::default());
    let (limit, origin) = (human_bytes(budget.limit.bytes), &budget.limit.origin);
    let state = if budget.limit.bytes < 1 << 30 { Verdict::Warn } else { Verdict::Ok };
    let found = format!(
        "{limit} ({origin}); by default {} for transformed data, {} with buffers and mapped pages",
        human_bytes(budget.cache_bytes),
        human_bytes(budget.total_bytes())
    );
    checks.push(check(
        "memory",
        state,
        found,
        "files larger than half of the cache are not materialized; more memory is faster",
    ));
    checks
}

fn simd_level() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            "avx-512"
        } else if is_x86_feature_detected!("avx2") {
            "avx2"
        } else {
            "sse2"
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        "of the baseline"
    }
}

fn hub_cache() -> Check {
    let Some(cache) = hub_cache_directory() else {
        return check("hub cache", Verdict::Warn, "no home directory", "set HF_HUB_CACHE to use org/name sources");
    };
    let models = fs::read_dir(&cache).map(|entries| {
        entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("models--")).count()
    });
    match models {
        Ok(count) => check("hub cache", Verdict::Ok, format!("{}, {count} models", cache.display()), ""),
        Err(_) => check("hub cache", Verdict::Ok, format!("{}: not there", cache.display()), ""),
    }
}

fn mounts() -> Vec<Check> {
    let asking: Vec<_> = ckfs_mounts()
        .into_iter()
        .filter_map(|entry| {
            let asking = move || {
                let health = probe(&entry.mountpoint).health;
                let answers = matches!(health, MountHealth::Healthy | MountHealth::Degraded);
                let readers = answers.then(|| readers(&entry));
                (health, entry.mountpoint, readers)
            };
            thread::Builder::new().name("ckfs-probe".into()).spawn(asking).ok()
        })
        .collect();
    let answers: Vec<_> = asking.into_iter().filter_map(|thread| thread.join().ok()).collect();
    let dead: Vec<String> = answers
        .iter()
        .filter(|(health, ..)| !matches!(health, MountHealth::Healthy | MountHealth::Private))
        .map(|(health, path, _)| format!("{} is {}", path.display(), health.name()))
        .collect();
    let readers = answers.iter().filter_map(|(_, path, readers)| {
        Some(check("who reads", Verdict::Ok, format!("{}: {}", path.display(), readers.as_deref()?), ""))
    });
    std::iter::once(mounts_check(&answers, &dead)).chain(readers).collect()
}

/// The users that may read the files of a live mount.
fn readers(entry: &MountEntry) -> String {
    if !entry.allows_other() {
        return "only the user that mounted it, as it has no allow_other".to_owned();
    }
    // The mount has just answered: these calls do not hang.
    let plan = fs::read_to_string(entry.mountpoint.join(".ckfs/plan.txt")).unwrap_or_default();
    let found = readers_of(&plan);
    if found.is_empty() { "not known: .ckfs/plan.txt does not say".to_owned() } else { found.join("; ") }
}

fn mounts_check(answers: &[(MountHealth, PathBuf, Option<String>)], dead: &[String]) -> Check {
    if dead.is_empty() {
        let private = answers.iter().filter(|(health, ..)| *health == MountHealth::Private).count();
        let note = if private == 0 { String::new() } else { format!(", {private} of other users") };
        return check("mounts", Verdict::Ok, format!("{} healthy{note}", answers.len() - private), "");
    }
    check(
        "mounts",
        Verdict::Warn,
        dead.join(", "),
        "ckfs status MNT names the problem; ckfs umount --stale --lazy MNT removes a mount whose daemon is gone",
    )
}

impl Doctor {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let mut checks = vec![kernel(), device()];
        let host = host();
        let has_device = device_problem().is_none() && host.is_none();
        checks.extend(host);
        checks.extend(rights());
        let can_try = checks.iter().all(|check| check.state != Verdict::Fail);
        let tried = can_try.then(|| Tried::of("ckfs-doctor", try_mount));
        checks.extend(tried.as_ref().map(|tried| tried.check("mount", Verdict::Fail, "the other checks may say why")));
        checks.extend(has_device.then(private));
        let read_by_kernel = match tried {
            Some(Tried::Done(by_kernel)) => Some(by_kernel),
            Some(Tried::Not(_) | Tried::Failed(_)) | None => None,
        };
        checks.extend([
            passthrough(read_by_kernel),
            request_size(),
            page_cache(kernel_version(&release())),
            read_ahead(),
        ]);
        checks.extend(machine());
        checks.push(hub_cache());
        checks.extend(mounts());
        let rows = json!({ "checks": checks });
        output::print_either(self.json, &rows, || {
            let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
            let line = |row: &Value| {
                let [state, name] = ["{state}", "{name}"].map(|member| filled(member, row));
                let head = format!("{state:<4}  {name:<width$}  ");
                let advice = format!("[{:1$}-> {{advice}}\n]", "", head.len());
                head + &filled("{found}\n", row) + &filled(&advice, row)
            };
            items(&rows["checks"]).iter().map(line).collect()
        })?;
        let failed: Vec<&str> =
            checks.iter().filter(|check| check.state == Verdict::Fail).map(|check| check.name).collect();
        if failed.is_empty() { Ok(()) } else { Err(anyhow!("this host cannot mount: {}", failed.join(", "))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions_are_read() {
        assert_eq!(kernel_version("6.12.30+deb13-amd64"), Some((6, 12)));
        assert_eq!(kernel_version("5.4"), Some((5, 4)));
        assert_eq!(kernel_version("unknown"), None);
    }
}
