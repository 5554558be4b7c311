//! Build script: tells `ckfs --version` which commit and which target the program is made of.
//!
//! It works without git, as in an unpacked crate: there cargo's own record has the commit. Debug builds record no commit,
//! because a commit would then compile everything again.

use std::{
    env, fs,
    io::{self, Write},
    path::Path,
    process::Command,
};

/// What the program is made of; a change of one of these is looked up again.
const INPUTS: [&str; 3] = ["../../src", "../../Cargo.toml", "../../Cargo.lock"];

/// Cargo writes this file into packages.
const RECORD: &str = ".cargo_vcs_info.json";

/// Characters of a commit's name that are shown.
const COMMIT_CHARS: usize = 12;

fn main() -> io::Result<()> {
    let release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let mut out = io::stdout().lock();
    writeln!(out, "cargo::rustc-env=CKFS_TARGET={}", env::var("TARGET").unwrap_or_default())?;
    let has = |feature: &str| env::var_os(format!("CARGO_FEATURE_{feature}")).is_some();
    let features = match (has("STORES"), has("HUB")) {
        (true, _) => "remote",
        (false, true) => "hub",
        (false, false) => "none",
    };
    let serve = if has("SERVE") { ", serve" } else { "" };
    let csi = if has("CSI") { ", csi" } else { "" };
    writeln!(out, "cargo::rustc-env=CKFS_FEATURES={features}{serve}{csi}")?;
    writeln!(out, "cargo::rerun-if-changed=build.rs")?;
    let commit = if let Some(commit) = recorded_commit(Path::new(RECORD)) {
        writeln!(out, "cargo::rerun-if-changed={RECORD}")?;
        commit
    } else if !release {
        "not recorded in a debug build".to_owned()
    } else if let Some(commit) = commit_of_work_tree() {
        for input in INPUTS {
            writeln!(out, "cargo::rerun-if-changed={input}")?;
        }
        // Every commit and every checkout adds a line.
        if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists()) {
            writeln!(out, "cargo::rerun-if-changed={log}")?;
        }
        commit
    } else {
        "unknown: built without git".to_owned()
    };
    writeln!(out, "cargo::rustc-env=CKFS_COMMIT={commit}")
}

/// The output of a git command, without its final line break, if it succeeds.
fn git(args: &[&str]) -> Option<String> {
    let done = Command::new("git").args(args).output().ok().filter(|done| done.status.success())?;
    Some(String::from_utf8(done.stdout).ok()?.trim_end().to_owned())
}

/// The commit of the work tree whose root is the workspace. A package that lies in another project's tree has none.
fn commit_of_work_tree() -> Option<String> {
    let root = git(&["rev-parse", "--show-toplevel"])?;
    if fs::canonicalize(root).ok()? != fs::canonicalize("../..").ok()? {
        return None;
    }
    let name: String = git(&["rev-parse", "HEAD"])?.chars().take(COMMIT_CHARS).collect();
    let mut status = vec!["status", "--porcelain", "--"];
    status.extend(INPUTS);
    let changed = git(&status)?;
    Some(if changed.is_empty() { name } else { format!("{name}, with changes") })
}

/// The commit in cargo's record of a package.
fn recorded_commit(record: &Path) -> Option<String> {
    let text = fs::read_to_string(record).ok()?;
    let value =
        |key: &str| text.split_once(&format!("\"{key}\""))?.1.trim_start().strip_prefix(':').map(str::trim_start);
    let name: String = value("sha1")?.strip_prefix('"')?.chars().take_while(char::is_ascii_hexdigit).collect();
    let changed = value("dirty").is_some_and(|value| value.starts_with("true"));
    let name: String = name.chars().take(COMMIT_CHARS).collect();
    (!name.is_empty()).then(|| if changed { format!("{name}, with changes") } else { name })
}
