//! How much memory this process may use, and how much it uses.
//!
//! The limit is the least of the machine's memory and the limits of the process's control group and of all groups above it. A
//! group has its limits in files: version 2 in `memory.max` and `memory.high`, version 1 in `memory.limit_in_bytes`.
//! `/proc/self/cgroup` names the group of the process, and `/proc/self/mountinfo` says where the groups are mounted and
//! which of them is the root of the mount: a container often sees only its own group. Version 1 also says in `memory.stat`
//! what limit all groups above impose, those outside the mount included; version 2 hides those.
//!
//! Finding the files is a pure function of the two texts, [`limit_files`]. Swap is not counted: a limit that is kept only with
//! swap is not kept.
//!
//! Own code, because `cgroups-rs` (0.5) is made to create and manage groups below `/sys/fs/cgroup`. It does not look for limits of
//! the groups above the process's own.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use nix::unistd::{SysconfVar, sysconf};

/// Version 1 writes "no limit" as the largest number of whole pages, about 2^63. No machine has this much.
const UNLIMITED_BYTES: u64 = 1 << 60;

/// What is assumed of a machine that does not tell its memory.
const ASSUMED_BYTES: u64 = 1 << 30;

/// The most memory that this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// In bytes.
    pub bytes: u64,
    /// What sets the limit.
    pub origin: LimitOrigin,
}

/// What sets a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitOrigin {
    /// The memory of the machine.
    Machine,
    /// A control group.
    Cgroup {
        /// The file that holds the limit.
        file: PathBuf,
    },
    /// Neither could be read; the number is an assumption.
    Assumed,
}

impl fmt::Display for LimitOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => f.write_str("memory of the machine"),
            Self::Cgroup { file } => write!(f, "control group: {}", file.display()),
            Self::Assumed => f.write_str("assumed: /proc and /sys could not be read"),
        }
    }
}

/// A file that may hold a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitFile {
    /// Where it is.
    pub path: PathBuf,
    /// What stands before the number in its line: nothing where the file is a number of bytes, or `max`.
    pub before: &'static str,
}

impl LimitFile {
    /// The limit that the file's text states, if it states one.
    fn limit_bytes(&self, text: &str) -> Option<u64> {
        let number = text.lines().find_map(|line| line.strip_prefix(self.before))?;
        number.trim().parse().ok().filter(|bytes| *bytes < UNLIMITED_BYTES)
    }
}

/// Version of a hierarchy of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A mount of control groups that have limits of memory.
#[derive(Debug)]
struct GroupMount {
    version: Version,
    /// The group that is the mount's root.
    root: String,
    mountpoint: PathBuf,
}

/// The files that may hold limits of a process, its own group's first, given its `/proc/self/cgroup` and
/// `/proc/self/mountinfo`. Files that do not exist are named too: the root group has none, and on a host with both
/// versions only one of them limits memory.
pub fn limit_files(cgroup: &str, mountinfo: &str) -> Vec<LimitFile> {
    let mounts: Vec<GroupMount> = mountinfo.lines().filter_map(group_mount).collect();
    let mut files = Vec::new();
    for (version, group) in cgroup.lines().filter_map(membership) {
        let of_version = || mounts.iter().filter(move |mount| mount.version == version);
        let mut shown = of_version().filter_map(|mount| Some((mount, steps_below(group, &mount.root)?))).peekable();
        if shown.peek().is_none() {
            // The mount's root is not above the group as far as the names tell. Its limits are the best guess.
            of_version().for_each(|mount| add_files(mount, &[], &mut files));
        }
        shown.for_each(|(mount, steps)| add_files(mount, &steps, &mut files));
    }
    files
}

/// Adds the files of a group and of all above it that the mount shows.
fn add_files(mount: &GroupMount, steps: &[&str], files: &mut Vec<LimitFile>) {
    let mut found = Vec::new();
    for depth in (0..=steps.len()).rev() {
        let directory = mount.mountpoint.join(steps[..depth].join("/"));
        let file = |name, before| LimitFile { path: directory.join(name), before };
        match mount.version {
            Version::One => {
                found.push(file("memory.limit_in_bytes", ""));
                if depth == steps.len() {
                    found.push(file("memory.stat", "hierarchical_memory_limit "));
                }
            }
            Version::Two => found.extend(["memory.max", "memory.high"].map(|name| file(name, ""))),
        }
    }
    for file in found {
        if !files.contains(&file) {
            files.push(file);
        }
    }
}

/// A line of `/proc/self/cgroup`, `ID:CONTROLLERS:GROUP`, if its hierarchy limits memory.
fn membership(line: &str) -> Option<(Version, &str)> {
    let mut fields = line.splitn(3, ':');
    let (id, controllers, group) = (fields.next()?, fields.next()?, fields.next()?);
    if controllers.split(',').any(|controller| controller == "memory") {
        Some((Version::One, group))
    } else {
        (id == "0" && controllers.is_empty()).then_some((Version::Two, group))
    }
}

/// A line of `/proc/self/mountinfo`, if it mounts groups that limit memory.
fn group_mount(line: &str) -> Option<GroupMount> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut file_system = file_system.split(' ');
    let (kind, _source, options) = (file_system.next()?, file_system.next()?, file_system.next()?);
    let version = match kind {
        "cgroup" if options.split(',').any(|option| option == "memory") => Version::One,
        "cgroup2" => Version::Two,
        _ => return None,
    };
    let mut fields = mount.split(' ').skip(3);
    let mut path = || Some(String::from_utf8_lossy(&unescape(fields.next()?.as_bytes())).into_owned());
    let (root, mountpoint) = (path()?, path()?);
    Some(GroupMount { version, root, mountpoint: PathBuf::from(mountpoint) })
}

/// A field of the kernel's table of mounts, with `\040` and its like turned back into bytes.
pub fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = tail.get(..3).filter(|digits| *first == b'\\' && digits.iter().all(|d| (b'0'..=b'7').contains(d)));
        let code = octal.map(|digits| digits.iter().fold(0_u32, |sum, digit| sum * 8 + u32::from(digit - b'0')));
        if let Some(byte) = code.and_then(|code| u8::try_from(code).ok()) {
            bytes.push(byte);
            rest = &tail[3..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    bytes
}

/// The steps from a mount's root down to a group, both as the process's namespace names them: `/` is the namespace's own
/// root, `/..` the group above it. `None` if the mount does not show the group, as far as the names tell.
fn steps_below<'a>(group: &'a str, root: &'a str) -> Option<Vec<&'a str>> {
    let steps = |path: &'a str| path.split('/').filter(|step| !step.is_empty()).collect::<Vec<_>>();
    let (group, root) = (steps(group), steps(root));
    let ups = |steps: &[&str]| steps.iter().take_while(|step| **step == "..").count();
    match group.strip_prefix(root.as_slice()) {
        Some(below) if ups(below) == 0 => Some(below.to_vec()),
        // The root is farther out of the namespace than the group: above it, but the names between are hidden.
        _ if ups(&root) == root.len() && ups(&root) > ups(&group) => Some(Vec::new()),
        _ => None,
    }
}

/// The least of the machine's memory and the limits in `files`, which `read` gives the text of.
fn least(machine_bytes: Option<u64>, files: &[LimitFile], read: impl Fn(&Path) -> Option<String>) -> Limit {
    let (bytes, origin) =
        machine_bytes.map_or((ASSUMED_BYTES, LimitOrigin::Assumed), |bytes| (bytes, LimitOrigin::Machine));
    let mut limit = Limit { bytes, origin };
    for file in files {
        let found = read(&file.path).and_then(|text| file.limit_bytes(&text));
        // A smaller machine is likelier to be known than a larger group, so an assumption gives way to any limit.
        if let Some(bytes) = found.filter(|bytes| *bytes < limit.bytes || limit.origin == LimitOrigin::Assumed) {
            limit = Limit { bytes, origin: LimitOrigin::Cgroup { file: file.path.clone() } };
        }
    }
    limit
}

/// Memory of the machine, in bytes. A container of LXC sees its own share in `/proc/meminfo`.
pub fn machine_bytes() -> Option<u64> {
    let number = |variable| sysconf(variable).ok().flatten().and_then(|number| u64::try_from(number).ok());
    let pages = number(SysconfVar::_PHYS_PAGES).zip(number(SysconfVar::PAGE_SIZE));
    let physical = pages.and_then(|(pages, page_bytes)| pages.checked_mul(page_bytes));
    let shown = fs::read_to_string("/proc/meminfo").ok().and_then(|text| kilobytes(&text, "MemTotal:"));
    physical.into_iter().chain(shown).min()
}

/// The value of a line `NAME   N kB`, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?.trim().strip_suffix("kB")?;
    value.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The limit of this process, as it is now.
pub fn limit() -> Limit {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let files = limit_files(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
    least(machine_bytes(), &files, |path| fs::read_to_string(path).ok())
}

/// Memory that the kernel counts as this process's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Private memory, in bytes.
    pub anonymous_bytes: u64,
    /// Mapped pages of files, which the page cache holds anyway, in bytes.
    pub file_bytes: u64,
    /// Mapped pages of files in memory, in bytes. Files in memory that are not mapped are in no process's count.
    pub shared_bytes: u64,
}

/// Resident memory of this process, from `/proc/self/status`; zeros where that cannot be read.
pub fn resident() -> Resident {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bytes = |name| kilobytes(&status, name).unwrap_or(0);
    Resident { anonymous_bytes: bytes("RssAnon:"), file_bytes: bytes("RssFile:"), shared_bytes: bytes("RssShmem:") }
}

/// Number of threads of this process, from `/proc/self/status`; 0 where that cannot be read.
pub fn threads() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Threads:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "23 60 0:22 / /sys rw - sysfs sysfs rw\n\
                      34 25 0:29 / /sys/fs/cgroup/cpu rw shared:8 - cgroup cgroup rw,cpu,cpuacct\n\
                      35 25 0:30 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n";

    fn paths(cgroup: &str, mountinfo: &str) -> Vec<String> {
        limit_files(cgroup, mountinfo).iter().map(|file| file.path.display().to_string()).collect()
    }

    /// The directories that are looked at, in order.
    fn directories(cgroup: &str, mountinfo: &str) -> Vec<String> {
        let mut found: Vec<String> =
            paths(cgroup, mountinfo).iter().map(|path| path.rsplit_once('/').unwrap().0.to_owned()).collect();
        found.dedup();
        found
    }

    #[test]
    fn groups_are_found_with_all_above_them() {
        let hybrid = format!("{V1}36 25 0:31 / /sys/fs/cgroup/unified rw shared:10 - cgroup2 cgroup2 rw\n");
        // Docker without a cgroup namespace: the mount shows the container's own group as its root.
        let docker_v1 = "700 690 0:30 /docker/4f1e /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory\n";
        // The host's groups mounted into a pod besides its own.
        let two_mounts = "700 690 0:26 /../.. /host/sys/fs/cgroup ro - cgroup2 cgroup rw\n\
                          701 690 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let rows: [(&str, &str, &str, &[&str]); 12] = [
            ("version 2, root", "0::/\n", V2, &["/sys/fs/cgroup"]),
            (
                "version 2, a systemd service",
                "0::/system.slice/system-ckfs.slice/ckfs@llama.service\n",
                V2,
                &[
                    "/sys/fs/cgroup/system.slice/system-ckfs.slice/ckfs@llama.service",
                    "/sys/fs/cgroup/system.slice/system-ckfs.slice",
                    "/sys/fs/cgroup/system.slice",
                    "/sys/fs/cgroup",
                ],
            ),
            ("version 2, docker and kubernetes with a namespace", "0::/\n", V2, &["/sys/fs/cgroup"]),
            (
                "version 1, kubernetes on the host",
                "5:cpu,cpuacct:/kubepods/burstable/pod12/ab\n4:memory:/kubepods/burstable/pod12/ab\n1:name=systemd:/x\n",
                V1,
                &[
                    "/sys/fs/cgroup/memory/kubepods/burstable/pod12/ab",
                    "/sys/fs/cgroup/memory/kubepods/burstable/pod12",
                    "/sys/fs/cgroup/memory/kubepods/burstable",
                    "/sys/fs/cgroup/memory/kubepods",
                    "/sys/fs/cgroup/memory",
                ],
            ),
            ("version 1, docker", "4:memory:/docker/4f1e\n", docker_v1, &["/sys/fs/cgroup/memory"]),
            (
                "version 1, a group within docker",
                "4:memory:/docker/4f1e/inner\n",
                docker_v1,
                &["/sys/fs/cgroup/memory/inner", "/sys/fs/cgroup/memory"],
            ),
            ("version 1, the names do not fit", "4:memory:/\n", docker_v1, &["/sys/fs/cgroup/memory"]),
            (
                "both versions, memory in version 1",
                "4:memory:/a\n0::/b\n",
                &hybrid,
                &[
                    "/sys/fs/cgroup/memory/a",
                    "/sys/fs/cgroup/memory",
                    "/sys/fs/cgroup/unified/b",
                    "/sys/fs/cgroup/unified",
                ],
            ),
            ("two mounts", "0::/\n", two_mounts, &["/host/sys/fs/cgroup", "/sys/fs/cgroup"]),
            (
                "a namespace, and a group beside its root",
                "0::/../other\n",
                "1 1 0:26 /.. /cg ro - cgroup2 cgroup rw\n",
                &["/cg/other", "/cg"],
            ),
            (
                "a mountpoint with a blank, a group with a colon",
                "0::/a:b\n",
                "1 1 0:26 / /my\\040cg ro - cgroup2 cgroup rw\n",
                &["/my cg/a:b", "/my cg"],
            ),
            ("nothing is mounted", "0::/a\n4:memory:/b\n", "", &[]),
        ];
        for (what, cgroup, mountinfo, expected) in rows {
            assert_eq!(directories(cgroup, mountinfo), expected, "{what}");
        }
        assert_eq!(paths("0::/\n", V2), ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.high"]);
        assert_eq!(
            paths("4:memory:/\n", V1),
            ["/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.stat"]
        );
    }

    #[test]
    fn the_least_limit_counts() {
        let files = limit_files("0::/a/b\n4:memory:/c\n", &format!("{V2}{V1}"));
        let with = |texts: &'static [(&str, &str)]| {
            move |path: &Path| {
                let text = texts.iter().find(|(name, _)| Path::new(name) == path)?.1;
                Some(text.to_owned())
            }
        };
        let found = |texts| {
            let limit = least(Some(1000), &files, with(texts));
            let file = match limit.origin {
                LimitOrigin::Cgroup { file } => file.display().to_string(),
                LimitOrigin::Machine | LimitOrigin::Assumed => limit.origin.to_string(),
            };
            (limit.bytes, file)
        };
        let machine = "memory of the machine".to_owned();
        assert_eq!(found(&[]), (1000, machine.clone()));
        assert_eq!(found(&[("/sys/fs/cgroup/a/b/memory.max", "max\n")]), (1000, machine.clone()));
        assert_eq!(found(&[("/sys/fs/cgroup/a/b/memory.max", "5000\n")]), (1000, machine.clone()));
        let two = &[("/sys/fs/cgroup/a/b/memory.max", "900\n"), ("/sys/fs/cgroup/a/memory.high", "800\n")];
        assert_eq!(found(two), (800, "/sys/fs/cgroup/a/memory.high".to_owned()));
        let unlimited = &[("/sys/fs/cgroup/memory/c/memory.limit_in_bytes", "9223372036854771712\n")];
        assert_eq!(found(unlimited), (1000, machine));
        let hidden = &[
            ("/sys/fs/cgroup/memory/c/memory.limit_in_bytes", "700\n"),
            ("/sys/fs/cgroup/memory/c/memory.stat", "cache 5\nhierarchical_memory_limit 600\n"),
        ];
        assert_eq!(found(hidden), (600, "/sys/fs/cgroup/memory/c/memory.stat".to_owned()));
        assert_eq!(least(None, &[], |_| None), Limit { bytes: ASSUMED_BYTES, origin: LimitOrigin::Assumed });
    }

    #[test]
    fn this_machine_tells_its_memory() {
        let limit = limit();
        assert!(limit.bytes > 1 << 20 && limit.bytes <= machine_bytes().unwrap(), "{limit:?}");
        let resident = resident();
        assert!(resident.anonymous_bytes > 0 && resident.file_bytes > 0, "{resident:?}");
        assert_eq!(kilobytes("A: 1 kB\nRssAnon:\t    12 kB\n", "RssAnon:"), Some(12 << 10));
    }
}
