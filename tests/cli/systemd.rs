//! Administrators rely on the unit file at boot, without anyone to watch: systemd itself checks it, and
//! these tests check the promises that systemd cannot check.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd").join(name)
}

/// The default of `--source-timeout`.
const SOURCE_TIMEOUT_SECONDS: u64 = 60;

fn unit() -> String {
    fs::read_to_string(file("ckfs@.service")).unwrap()
}

fn unit_of_server() -> String {
    fs::read_to_string(file("ckfs-serve@.service")).unwrap()
}

/// Values of a setting, in order.
fn values<'a>(unit: &'a str, name: &str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('=')).collect()
}

#[test]
fn systemd_accepts_the_unit() {
    if let Err(error) = Command::new("systemd-analyze").arg("--version").output() {
        assert!(env::var_os("CI").is_none_or(|ci| ci != "true"), "systemd-analyze: {error}");
        eprintln!("skipped: systemd-analyze: {error}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // The program need not be installed at the unit's path; any existing program does.
    let installed = unit().replace("/usr/bin/ckfs", env!("CARGO_BIN_EXE_ckfs"));
    let path = directory.path().join("ckfs@example.service");
    fs::write(&path, installed).unwrap();
    let verify = |path: &Path| {
        let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(path).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // Other units of this host may have faults of their own; lines about ours contain its name.
        let ours: Vec<String> = said.lines().filter(|line| line.contains("ckfs@")).map(str::to_owned).collect();
        (output.status.success(), ours, said)
    };
    let (success, ours, said) = verify(&path);
    assert!(success && ours.is_empty(), "{said}");
    // The check must also find a fault.
    fs::write(&path, unit().replace("KillMode=mixed", "KillMode=gentle").replace("Type=notify", "Tipe=notify"))
        .unwrap();
    assert!(!verify(&path).1.is_empty());
}

/// What systemd says about a unit with its drop-ins; empty if nothing. `None` without systemd.
fn verified(name: &str, unit: &str, drop_ins: &[PathBuf], user: bool) -> Option<String> {
    if let Err(error) = Command::new("systemd-analyze").arg("--version").output() {
        assert!(env::var_os("CI").is_none_or(|ci| ci != "true"), "systemd-analyze: {error}");
        eprintln!("skipped: systemd-analyze: {error}");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(name);
    fs::write(&path, unit.replace("/usr/bin/ckfs", env!("CARGO_BIN_EXE_ckfs"))).unwrap();
    let beside = directory.path().join(format!("{name}.d"));
    fs::create_dir(&beside).unwrap();
    for drop_in in drop_ins {
        fs::copy(drop_in, beside.join(drop_in.file_name().unwrap())).unwrap();
    }
    let mut command = Command::new("systemd-analyze");
    command.args(["verify", "--man=no"]).args(user.then_some("--user")).arg(&path);
    command.env("XDG_RUNTIME_DIR", directory.path());
    let said = String::from_utf8_lossy(&command.output().unwrap().stderr).into_owned();
    // Other units of this host may have faults of their own; lines about ours contain its name, or the directory.
    let place = directory.path().display().to_string();
    let ours = said.lines().filter(|line| line.contains(name) || line.contains(&place));
    Some(ours.collect::<Vec<_>>().join("\n"))
}

#[test]
fn systemd_accepts_the_unit_of_users_and_the_drop_ins() {
    let of_user = fs::read_to_string(file("user/ckfs@.service")).unwrap();
    // What is another line in it than in the unit of the system, beside paths and rights.
    for (name, of_system) in [
        ("Type", unit()),
        ("Restart", unit()),
        ("KillMode", unit()),
        ("TimeoutStopSec", unit()),
        ("FileDescriptorStoreMax", unit()),
        ("RestartKillSignal", unit()),
    ] {
        assert_eq!(values(&of_user, name), values(&of_system, name), "{name}");
    }
    let refused = "Restarts do not mend a wrong configuration";
    for unit in [&of_user, &unit(), &unit_of_server()] {
        assert_eq!(values(unit, "RestartPreventExitStatus"), ["2"], "{refused}");
        // A busy machine is no hang, and a hang is none of the storage: its waits end sooner, by themselves.
        let alive_seconds: u64 = values(unit, "WatchdogSec")[0].parse().unwrap();
        assert!(alive_seconds >= 2 * SOURCE_TIMEOUT_SECONDS, "{alive_seconds}");
    }
    let Some(said) = verified("ckfs@example.service", &of_user, &[], true) else { return };
    assert_eq!(said, "");
    let wrong = of_user.replace("KillMode=mixed", "KillMode=gentle");
    assert_ne!(verified("ckfs@example.service", &wrong, &[], true).unwrap(), "", "the check finds a fault");
    let directory = tempfile::tempdir().unwrap();
    let faulty = directory.path().join("faulty.conf");
    fs::write(&faulty, "[Service]\nMemoryMax=lots\n").unwrap();
    let said = verified("ckfs@example.service", &unit(), &[faulty], false).unwrap();
    assert!(said.contains("MemoryMax") || said.contains("lots"), "the check reads drop-ins: {said}");
    let mut drop_ins: Vec<PathBuf> =
        fs::read_dir(file("drop-in")).unwrap().map(|entry| entry.unwrap().path()).collect();
    drop_ins.sort();
    assert!(drop_ins.len() >= 3, "{drop_ins:?}");
    let reader = "[Service]\nExecStart=/usr/bin/ckfs status\n";
    for drop_in in &drop_ins {
        let is_of_reader = drop_in.ends_with("reader.conf");
        let unit = if is_of_reader { reader.to_owned() } else { unit() };
        let text = fs::read_to_string(drop_in).unwrap();
        assert!(text.starts_with("# /etc/systemd/system/") && text.contains("\n["), "{text}");
        let said = verified("ckfs@example.service", &unit, std::slice::from_ref(drop_in), false).unwrap();
        // Settings of newer versions of systemd are passed over by older ones; a unit that is required is not here, nor is the program.
        let is_absent =
            |line: &&str| line.contains("ckfs@llama") || line.contains("Command /usr/bin/ckfs is not executable");
        let said: Vec<&str> = said.lines().filter(|line| !line.contains("Restart") && !is_absent(line)).collect();
        assert!(said.is_empty(), "{}: {said:?}", drop_in.display());
    }
}

/// The server needs no right of root: it mounts nothing.
#[test]
fn the_unit_of_the_server_has_no_privileges_and_drains() {
    let unit = unit_of_server();
    assert_eq!(values(&unit, "Type"), ["notify"]);
    assert_eq!(values(&unit, "ExecStart"), ["/usr/bin/ckfs serve --config /etc/ckfs/%i.toml"]);
    assert_eq!((values(&unit, "CapabilityBoundingSet"), values(&unit, "DynamicUser")), (vec![""], vec!["yes"]));
    let stop_seconds: u64 = values(&unit, "TimeoutStopSec")[0].parse().unwrap();
    assert!(stop_seconds > ckfs::serve::ServeOptions::default().drain.as_secs() + 5);
    assert_eq!(values(&unit, "CacheDirectory"), ["ckfs-serve"]);
    assert_eq!(values(&unit, "Environment"), ["CKFS_CACHE_DIR=%C/ckfs-serve"]);
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        assert!(env::var_os("CI").is_none_or(|ci| ci != "true"), "systemd-analyze is missing");
        eprintln!("skipped: no systemd-analyze");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ckfs-serve@example.service");
    fs::write(&path, unit.replace("/usr/bin/ckfs", env!("CARGO_BIN_EXE_ckfs"))).unwrap();
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !said.contains("ckfs-serve@"), "{said}");
}

#[test]
fn the_unit_keeps_the_mount_visible() {
    let unit = unit();
    let settings: Vec<&str> = unit.lines().filter(|line| !line.starts_with('#')).collect();
    for hiding in ["Protect", "Private", "ReadOnlyPaths", "ReadWritePaths", "InaccessiblePaths", "TemporaryFileSystem"]
    {
        assert!(settings.iter().all(|line| !line.starts_with(hiding)), "{hiding} gives the service a mount namespace");
    }
    for hiding in ["MountFlags", "RootDirectory", "BindPaths", "DynamicUser", "User", "PAMName"] {
        assert_eq!(values(&unit, hiding), Vec::<&str>::new(), "{hiding}");
    }
}

#[test]
fn the_unit_waits_for_readiness_and_for_the_end() {
    let unit = unit();
    assert_eq!(values(&unit, "Type"), ["notify"]);
    assert_eq!(values(&unit, "KillMode"), ["mixed"]);
    assert_eq!(values(&unit, "Restart"), ["on-failure"]);
    assert_eq!(values(&unit, "ExecStart"), ["/usr/bin/ckfs mount --foreground --config /etc/ckfs/%i.toml"]);
    let stop_seconds: u64 = values(&unit, "TimeoutStopSec")[0].parse().unwrap();
    let defaults = ckfs::fuse::MountOptions::default();
    assert!(
        stop_seconds > (defaults.grace + defaults.drain).as_secs() + 5,
        "the daemon would be killed while draining"
    );
    // The next process goes on with the mount: its descriptor and its record are kept, and a restart leaves it.
    assert_eq!(
        (values(&unit, "FileDescriptorStoreMax"), values(&unit, "RestartKillSignal")),
        (vec!["4"], vec!["SIGUSR2"])
    );
    assert_eq!(ckfs::host::signal::LEAVE.as_str(), "SIGUSR2");
    // It would wait for a mount that nobody answers for now.
    assert!(values(&unit, "ExecStopPost").is_empty());
}

/// Remote sources need the network, a place for their bytes, and credentials; a service of the system has no `HOME`.
#[test]
fn the_unit_can_read_remote_sources() {
    let unit = unit();
    let families: Vec<&str> =
        values(&unit, "RestrictAddressFamilies").iter().flat_map(|line| line.split(' ')).collect();
    assert!(["AF_UNIX", "AF_INET", "AF_INET6"].iter().all(|family| families.contains(family)), "{families:?}");
    assert_eq!(values(&unit, "CacheDirectory"), ["ckfs"]);
    assert_eq!(values(&unit, "Environment"), ["CKFS_CACHE_DIR=%C/ckfs"]);
    assert_eq!(values(&unit, "EnvironmentFile"), ["-/etc/ckfs/%i.env"]);
    assert!(values(&unit, "After")[0].contains("network-online.target"));
    assert_eq!(values(&unit, "Wants"), ["network-online.target"]);
    // What the unit runs is on every system.
    let programs = ["ExecStart", "ExecReload"].map(|name| values(&unit, name)[0].trim_start_matches('-'));
    assert!(
        programs.iter().all(|line| line.starts_with("/usr/bin/ckfs ") || line.starts_with("/bin/sh ")),
        "{programs:?}"
    );
}

#[test]
fn the_example_is_valid_and_names_source_and_mountpoint() {
    let example: toml::Table = fs::read_to_string(file("example.toml")).unwrap().parse().unwrap();
    assert!(example["source"].is_str() && example["mountpoint"].is_str());
}
