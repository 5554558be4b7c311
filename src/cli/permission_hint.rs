//! Turns EACCES into a hint: the path component that denies access, the user, and the chmod that grants it.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::AtFlags,
    unistd::{AccessFlags, Gid, Group, Uid, User, faccessat, getegid, geteuid},
};

/// Bits of permissions.
const MODE_BITS: u32 = 0o7777;

/// What the process has to do with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    /// Read its bytes or its entries.
    Read,
    /// Pass it on the way to a file.
    Search,
}

/// The first directory on the way to a path that this process may not pass, or else the path itself, if it may not be read.
fn closed(path: &Path) -> Option<(PathBuf, Needs)> {
    let path = std::path::absolute(path).ok()?;
    let is_denied = |path: &Path, flags| {
        let found = faccessat(nix::fcntl::AT_FDCWD, path, flags, AtFlags::AT_EACCESS);
        matches!(found, Err(Errno::EACCES | Errno::EPERM))
    };
    let mut above: Vec<&Path> = path.ancestors().skip(1).collect();
    above.reverse();
    // A file among them is closed to nobody: nothing is below it.
    let directory = above.into_iter().find(|directory| directory.is_dir() && is_denied(directory, AccessFlags::X_OK));
    match directory {
        Some(directory) => Some((directory.to_owned(), Needs::Search)),
        None => is_denied(&path, AccessFlags::R_OK).then_some((path, Needs::Read)),
    }
}

fn user(uid: Uid) -> String {
    let name = User::from_uid(uid).ok().flatten().map_or_else(String::new, |user| format!(" ({})", user.name));
    format!("user {uid}{name}")
}

fn group(gid: Gid) -> String {
    let name = Group::from_gid(gid).ok().flatten().map_or_else(String::new, |group| format!(" ({})", group.name));
    format!("group {gid}{name}")
}

/// Whether this process's users are those of a namespace: the host's own maps all 2^32 - 1 numbers to themselves.
fn in_user_namespace() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    !map.is_empty() && map.split_whitespace().collect::<Vec<_>>() != ["0", "0", "4294967295"]
}

/// Which file or directory on the way to `path` is closed to this process, and what opens it. `None` if none is.
pub(super) fn denied(path: &Path) -> Option<String> {
    let (closed, needs) = closed(path)?;
    let metadata = fs::metadata(&closed).ok()?;
    let (mode, owner, of_group) = (metadata.mode() & MODE_BITS, metadata.uid(), metadata.gid());
    let verb = if needs == Needs::Read { "read" } else { "search" };
    let (this, shown) = (geteuid(), closed.display());
    let found = format!(
        "{shown} has mode {mode:04o}, {}, {}; ckfs runs as {}, {}, and cannot {verb} it",
        user(Uid::from_raw(owner)),
        group(Gid::from_raw(of_group)),
        user(this),
        group(getegid()),
    );
    let remedy = if this.is_root() && in_user_namespace() {
        // The rights of its root end at files of users and groups that it does not know.
        "this root is that of a user namespace, which does not know the owner or the group: run ckfs outside of it, or map them \
         into it (newuidmap, newgidmap; --uidmap, --gidmap of a container)"
            .to_owned()
    } else if this.is_root() {
        // The bits do not bind root: a server of files does.
        format!("run ckfs as user {owner}, since the server of these files refuses root")
    } else {
        let bits = if needs == Needs::Search { "x" } else { "rX" };
        format!("its owner permits it by `setfacl -m u:{this}:{bits} {shown}` or `chmod o+{bits} {shown}`")
    };
    Some(format!("{found}: {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_open_is_not_denied() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(denied(directory.path()), None);
        assert_eq!(denied(&directory.path().join("missing")), None);
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(denied(&file.join("below")), None);
    }

    #[test]
    fn what_is_closed_is_named_with_its_mode() {
        use std::os::unix::fs::PermissionsExt;

        if geteuid().is_root() {
            // Nothing is closed to root. `tests/python/test_commands.py` asks as another user.
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("inner");
        fs::create_dir(&inner).unwrap();
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o000)).unwrap();
        let found = denied(&inner.join("file")).unwrap();
        fs::set_permissions(&inner, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(found.starts_with(&format!("{} has mode 0000, user {}", inner.display(), geteuid())), "{found}");
    }
}
