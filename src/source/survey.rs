//! Reads the facts that [`super::permission`] needs from the system. These are the owners and permissions of the files and
//! directories on the way to a source, and the user of this process.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::unistd::{getegid, geteuid, getgroups};
use parking_lot::Mutex;

use super::permission::{AccessRule, AccessRules, DirectoryRules, Mounter, PASS, READ, UNKNOWN};

/// Extended attribute that holds the access control list of a file.
const ACCESS_LIST: &str = "system.posix_acl_access";

/// Gates found so far: the files of a repository have the same directories above them.
#[derive(Debug)]
pub(super) struct Survey {
    directories: Mutex<HashMap<PathBuf, AccessRule>>,
    known: Mutex<HashSet<AccessRules>>,
    /// The ids that represent users and groups without an id in this user namespace.
    unmapped: [Option<u32>; 2],
}

impl Default for Survey {
    fn default() -> Self {
        let unmapped = ["uid", "gid"].map(unmapped);
        Self { directories: Mutex::default(), known: Mutex::default(), unmapped }
    }
}

fn unmapped(kind: &str) -> Option<u32> {
    let map = fs::read_to_string(format!("/proc/self/{kind}_map")).unwrap_or_default();
    // All users have ids if a single range maps all of them.
    if map.split_ascii_whitespace().eq(["0", "0", "4294967295"]) {
        return None;
    }
    let overflow = fs::read_to_string(format!("/proc/sys/kernel/overflow{kind}")).unwrap_or_default();
    overflow.trim().parse().ok().or(Some(65534))
}

impl Survey {
    /// The gates before an open file whose path, without links, is `real`.
    pub(super) fn file(&self, file: &File, real: &Path) -> AccessRules {
        let listed = has_access_list(rustix::fs::fgetxattr(file, ACCESS_LIST, &mut [0_u8; 0]));
        let own = file.metadata().map_or(AccessRule::CLOSED, |meta| self.gate(&meta, READ, listed));
        self.behind(own, real)
    }

    /// The gates before a directory whose path, without links, is `real`.
    pub(super) fn directory(&self, real: &Path) -> DirectoryRules {
        let gates = |wanted| self.behind(self.directory_gate(real, wanted), real);
        DirectoryRules { list: gates(READ | PASS), pass: gates(PASS) }
    }

    fn behind(&self, own: AccessRule, real: &Path) -> AccessRules {
        let above = real.ancestors().skip(1).map(|above| self.passed(above));
        let found = AccessRules::new(own.uid, own.gid, above.chain([own]));
        let mut known = self.known.lock();
        if let Some(same) = known.get(&found) {
            return same.clone();
        }
        known.insert(found.clone());
        found
    }

    /// The gate that a directory above a source is.
    fn passed(&self, directory: &Path) -> AccessRule {
        let mut directories = self.directories.lock();
        if let Some(gate) = directories.get(directory) {
            return *gate;
        }
        let gate = self.directory_gate(directory, PASS);
        directories.insert(directory.to_owned(), gate);
        gate
    }

    /// The gate of a directory. If the attributes of a directory cannot be read, no user may enter it.
    fn directory_gate(&self, directory: &Path, wanted: u16) -> AccessRule {
        let listed = has_access_list(rustix::fs::lgetxattr(directory, ACCESS_LIST, &mut [0_u8; 0]));
        fs::symlink_metadata(directory).map_or(AccessRule::CLOSED, |meta| self.gate(&meta, wanted, listed))
    }

    fn gate(&self, meta: &fs::Metadata, wanted: u16, has_access_list: bool) -> AccessRule {
        let known = |unmapped: Option<u32>, id: u32| if unmapped == Some(id) { UNKNOWN } else { id };
        let (uid, gid) = (known(self.unmapped[0], meta.uid()), known(self.unmapped[1], meta.gid()));
        let gate = AccessRule::new(uid, gid, meta.mode(), wanted);
        if has_access_list { gate.with_access_list() } else { gate }
    }
}

/// Whether a query for an access control list found one. A failure may hide a list, unless it means that there is no list or that
/// the file system has no such attributes.
fn has_access_list(answer: rustix::io::Result<usize>) -> bool {
    use rustix::io::Errno;
    !matches!(answer, Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS))
}

/// Numbers of the capabilities that let a process through gates.
const GATE_CAPABILITIES: [u32; 2] = [1, 2];

impl Mounter {
    /// The user of this process.
    pub fn of_this_process() -> Self {
        let groups = getgroups().unwrap_or_default().into_iter().chain([getegid()]);
        let set = ckfs_host::limits::capabilities();
        Self {
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
            groups: groups.map(nix::unistd::Gid::as_raw).collect(),
            // If `/proc` does not tell, root is assumed to have them.
            privileged: set.map_or(geteuid().is_root(), |set| GATE_CAPABILITIES.iter().any(|bit| set >> bit & 1 == 1)),
        }
    }
}
