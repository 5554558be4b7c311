//! Permissions of a file that is made from other files.
//!
//! A reader of a source file passes *gates*: each directory above the file must let the reader pass, and the file must
//! let the reader read. A user may read a file made from several sources if the user passes all gates of all of them. The
//! kernel decides by an owner, a group and nine bits, which cannot express this exactly. [`AccessRules::permission`] finds the owner,
//! group and bits that admit most readers and none that a gate would refuse.
//!
//! The members of a group and the groups of a user are unknown. So each rule assumes the worst: a member of the chosen group may
//! also own any gate and be a member of any gate's group.
//!
//! This module makes no system calls; the module `survey` does.

use std::sync::Arc;

/// Permission bit of one class of users: to read.
pub const READ: u16 = 0o4;
/// Permission bit of one class of users: to pass a directory.
pub const PASS: u16 = 0o1;

/// Represents users and groups without an id in this user namespace, as in a container that does not map them.
pub(crate) const UNKNOWN: u32 = u32::MAX;

/// A file or directory that a reader must pass, and the users that it admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AccessRule {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Whether the owner passes.
    pub user: bool,
    /// Whether other members of the group pass.
    pub group: bool,
    /// Whether everybody else passes.
    pub other: bool,
}

impl AccessRule {
    /// Admits root only.
    pub const CLOSED: Self = Self { uid: UNKNOWN, gid: UNKNOWN, user: false, group: false, other: false };

    /// A gate of this mode that must grant `wanted`, bits of one class.
    pub const fn new(uid: u32, gid: u32, mode: u32, wanted: u16) -> Self {
        let wanted = wanted as u32;
        let [user, group, other] =
            [mode >> 6 & wanted == wanted, mode >> 3 & wanted == wanted, mode & wanted == wanted];
        Self { uid, gid, user, group, other }
    }

    /// The same gate with an access control list. The list may refuse members of the group and others, and the group's bits
    /// do not show what it grants. Only the owner's bits keep their meaning.
    #[must_use]
    pub(crate) const fn with_access_list(self) -> Self {
        Self { group: false, other: false, ..self }
    }

    /// Whether everybody passes.
    const fn is_open(self) -> bool {
        self.user && self.group && self.other
    }
}

/// The gates before a file or directory, and its own owner and group. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AccessRules {
    /// Owner of the file itself.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Sorted, each once, without those that admit everybody.
    list: Arc<[AccessRule]>,
}

impl AccessRules {
    /// The gates before a file of this owner and group.
    pub fn new(uid: u32, gid: u32, gates: impl IntoIterator<Item = AccessRule>) -> Self {
        let mut gates: Vec<AccessRule> = gates.into_iter().filter(|gate| !gate.is_open()).collect();
        gates.sort_unstable();
        gates.dedup();
        Self { uid, gid, list: gates.into() }
    }

    /// No gates: everybody passes.
    pub fn open(uid: u32, gid: u32) -> Self {
        Self::new(uid, gid, [])
    }

    /// The gates that do not admit everybody.
    pub fn iter(&self) -> impl Iterator<Item = &AccessRule> {
        self.list.iter()
    }

    /// Owner, group and bits of a file behind these gates: see [`permission`].
    pub fn permission(&self, mounter: &Mounter, overrides: &Overrides) -> Permission {
        permission(&[Grant { gates: self, bits: READ }], mounter, overrides)
    }

    /// The gates of several files, with the owner and group of the first; `None` of no files.
    pub fn all<'a>(files: impl IntoIterator<Item = &'a Self>) -> Option<Self> {
        let mut files = files.into_iter();
        let first = files.next()?;
        let mut rest = files.filter(|file| file.list != first.list).peekable();
        if rest.peek().is_none() {
            return Some(first.clone());
        }
        let gates: Vec<AccessRule> = first.list.iter().chain(rest.flat_map(|file| file.list.iter())).copied().collect();
        Some(Self::new(first.uid, first.gid, gates))
    }
}

/// The gates of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryRules {
    /// Gates for listing it.
    pub list: AccessRules,
    /// Gates for access to its entries.
    pub pass: AccessRules,
}

/// The user that runs this process. The user must be able to read through ckfs everything that it can read without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounter {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// All groups.
    pub groups: Vec<u32>,
    /// Whether it passes gates by a capability. A successful open then says nothing about its user.
    pub privileged: bool,
}

impl Mounter {
    /// Whether the user passes all gates without a capability. The user of an unprivileged process may read every file that the
    /// process has opened, whatever its access control list.
    fn passes(&self, gates: &AccessRules) -> bool {
        let through = |gate: &AccessRule| {
            if gate.uid == self.uid {
                gate.user
            } else if self.groups.contains(&gate.gid) {
                gate.group
            } else {
                gate.other
            }
        };
        !self.privileged || gates.iter().all(through)
    }

    /// Whether the kernel grants `bits` to the user.
    fn is_granted(&self, permission: Permission, bits: u16) -> bool {
        let shift = if self.uid == permission.uid {
            6
        } else if self.groups.contains(&permission.gid) {
            3
        } else {
            0
        };
        (self.uid == 0 && self.privileged) || permission.mode >> shift & bits == bits
    }
}

/// Owner, group and permission bits for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Permission {
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits.
    pub mode: u16,
}

/// Owner, group and bits that the user sets, in place of those that follow from the sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Bits of files.
    pub file_mode: Option<u16>,
    /// Bits of directories.
    pub dir_mode: Option<u16>,
    /// Owner of everything.
    pub uid: Option<u32>,
    /// Group of everything.
    pub gid: Option<u32>,
}

/// Bits for one class of users, and the gates that a user must pass to get them.
#[derive(Clone, Copy, Debug)]
pub struct Grant<'a> {
    /// The gates.
    pub gates: &'a AccessRules,
    /// [`READ`], [`PASS`] or both.
    pub bits: u16,
}

impl Grant<'_> {
    /// Whether the owner `uid` passes.
    fn admits_owner(&self, uid: u32, mounter: &Mounter) -> bool {
        let through = |gate: &AccessRule| if gate.uid == uid { gate.user } else { gate.group && gate.other };
        // Root reads everything.
        uid == 0 || (uid == mounter.uid && mounter.passes(self.gates)) || self.gates.iter().all(through)
    }

    /// Whether every user except `uid` passes: the members of the group `gid`, or those outside it.
    fn admits_others(&self, uid: u32, gid: u32, are_members: bool) -> bool {
        let through = |gate: &AccessRule| {
            let (is_member, is_none) = (are_members && gate.gid == gid, !are_members && gate.gid == gid);
            (gate.user || gate.uid == uid || gate.uid == 0) && (gate.group || is_none) && (gate.other || is_member)
        };
        self.gates.iter().all(through)
    }

    /// The bits that may be granted with this owner and group.
    fn mode(&self, uid: u32, gid: u32, mounter: &Mounter) -> u16 {
        let class = |admitted: bool, shift: u16| if admitted { self.bits << shift } else { 0 };
        class(self.admits_owner(uid, mounter), 6)
            | class(self.admits_others(uid, gid, true), 3)
            | class(self.admits_others(uid, gid, false), 0)
    }
}

/// The value that all items have; `None` if there are no items or several values.
fn only(mut values: impl Iterator<Item = u32>) -> Option<u32> {
    let first = values.next()?;
    values.all(|value| value == first).then_some(first)
}

/// The bits that `grants` give with this owner and group.
pub fn mode(grants: &[Grant<'_>], uid: u32, gid: u32, mounter: &Mounter) -> u16 {
    grants.iter().fold(0, |mode, grant| mode | grant.mode(uid, gid, mounter))
}

/// Owner, group and bits that give each grant to as many users as possible, and to no user that does not pass its gates.
/// Earlier grants count more. The process's own user keeps the access that it has without ckfs.
///
/// An owner or a group that the user names gets the bits regardless of the gates.
///
/// # Panics
/// If there are no grants.
pub fn permission(grants: &[Grant<'_>], mounter: &Mounter, overrides: &Overrides) -> Permission {
    let own = grants.first().expect("something is granted").gates;
    let candidates = |named: Option<u32>, from: &mut dyn Iterator<Item = Option<u32>>| -> Vec<u32> {
        named.map_or_else(|| from.flatten().filter(|id| *id != UNKNOWN).collect(), |id| vec![id])
    };
    // If gates that do not admit everybody else have one owner or group, it is a candidate; if they have several, none is.
    let uids = grants.iter().flat_map(|Grant { gates, .. }| {
        let restricting = gates.iter().filter(|gate| !(gate.group && gate.other)).map(|gate| gate.uid);
        [only(restricting), only(gates.iter().filter(|gate| !gate.user).map(|gate| gate.uid))]
    });
    let gids = grants.iter().flat_map(|Grant { gates, .. }| {
        let restricting = gates.iter().filter(|gate| !gate.other).map(|gate| gate.gid);
        [only(restricting), only(gates.iter().filter(|gate| !gate.group).map(|gate| gate.gid))]
    });
    let uids = candidates(overrides.uid, &mut [own.uid, mounter.uid, 0].map(Some).into_iter().chain(uids));
    let gids = candidates(overrides.gid, &mut [own.gid, mounter.gid, 0].map(Some).into_iter().chain(gids));
    let all = uids.iter().flat_map(|uid| gids.iter().map(move |gid| (*uid, *gid)));
    let all = all.map(|(uid, gid)| Permission { uid, gid, mode: mode(grants, uid, gid, mounter) });
    let best = all.max_by_key(|found| score(found, grants, mounter, own)).unwrap_or(NOBODY);
    let bits = grants.iter().fold(0, |bits, grant| bits | grant.bits);
    let named = |given: bool, shift: u16| if given { bits << shift } else { 0 };
    let mode = best.mode | named(overrides.uid.is_some(), 6) | named(overrides.gid.is_some(), 3);
    if mode == 0 { Permission { mode: bits << 6, ..NOBODY } } else { Permission { mode, ..best } }
}

/// Root only.
const NOBODY: Permission = Permission { uid: 0, gid: 0, mode: 0 };

/// How good a choice is; larger is better.
fn score(
    found: &Permission,
    grants: &[Grant<'_>],
    mounter: &Mounter,
    own: &AccessRules,
) -> (bool, Vec<bool>, bool, bool) {
    let keeps = |grant: &Grant<'_>| !mounter.passes(grant.gates) || mounter.is_granted(*found, grant.bits);
    let has = |shift: u16, bits: u16| found.mode >> shift & bits == bits;
    // A bit for root as the owner gives no user more access. An owner without the bit loses the access that its groups would give.
    let given = grants.iter().flat_map(|Grant { bits, .. }| {
        let owner = has(6, *bits);
        [has(0, *bits), has(3, *bits), owner && found.uid != 0, owner]
    });
    (grants.iter().all(keeps), given.collect(), found.uid == own.uid, found.gid == own.gid)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALICE: u32 = 1000;
    const BOB: u32 = 1001;
    const ML: u32 = 2000;
    const WEB: u32 = 2001;

    const ROOT: Mounter = Mounter { uid: 0, gid: 0, groups: Vec::new(), privileged: true };

    fn user(uid: u32, groups: &[u32]) -> Mounter {
        let groups = std::iter::once(uid).chain(groups.iter().copied()).collect();
        Mounter { uid, gid: uid, groups, privileged: false }
    }

    fn file(uid: u32, gid: u32, mode: u32, above: &[(u32, u32, u32)]) -> AccessRules {
        let above = above.iter().map(|(uid, gid, mode)| AccessRule::new(*uid, *gid, *mode, 1));
        AccessRules::new(uid, gid, above.chain([AccessRule::new(uid, gid, mode, 4)]))
    }

    /// A name, the sources, the mounting user, and the expected owner, group and bits.
    type Row<'a> = (&'a str, Vec<AccessRules>, &'a Mounter, (u32, u32, u16));

    #[test]
    fn owner_group_and_bits_follow_the_sources() {
        let bob_in_ml = user(BOB, &[ML]);
        let rows: [Row<'_>; 16] = [
            ("public", vec![file(ALICE, ML, 0o644, &[(0, 0, 0o755)])], &ROOT, (ALICE, ML, 0o444)),
            ("of one user", vec![file(ALICE, ML, 0o600, &[(0, 0, 0o755)])], &ROOT, (ALICE, ML, 0o400)),
            ("below a private directory", vec![file(0, 0, 0o644, &[(ALICE, ML, 0o700)])], &ROOT, (ALICE, 0, 0o400)),
            ("of root", vec![file(0, 0, 0o600, &[(0, 0, 0o700)])], &ROOT, (0, 0, 0o400)),
            ("of a group", vec![file(ALICE, ML, 0o640, &[(0, 0, 0o755)])], &ROOT, (ALICE, ML, 0o440)),
            ("below a group's directory", vec![file(ALICE, 0, 0o644, &[(0, ML, 0o750)])], &ROOT, (0, ML, 0o440)),
            ("two groups", vec![file(ALICE, ML, 0o640, &[(ALICE, WEB, 0o750)])], &ROOT, (ALICE, ML, 0o400)),
            ("two owners", vec![file(ALICE, 0, 0o600, &[]), file(BOB, 0, 0o600, &[])], &ROOT, (0, 0, 0o400)),
            (
                "two owners of a group",
                vec![file(ALICE, ML, 0o640, &[]), file(BOB, ML, 0o640, &[])],
                &ROOT,
                (0, ML, 0o440),
            ),
            (
                "one private, one public",
                vec![file(0, 0, 0o644, &[]), file(BOB, ML, 0o600, &[])],
                &ROOT,
                (BOB, 0, 0o400),
            ),
            // A member of ml may be alice, whom the file refuses.
            ("refused to its owner", vec![file(ALICE, ML, 0o040, &[])], &ROOT, (ALICE, ML, 0o040)),
            ("refused to its group", vec![file(ALICE, ML, 0o604, &[])], &ROOT, (ALICE, ML, 0o404)),
            (
                "only others, two groups",
                vec![file(ALICE, ML, 0o604, &[]), file(ALICE, WEB, 0o604, &[])],
                &ROOT,
                (ALICE, ML, 0o400),
            ),
            ("mounted by a member", vec![file(0, ML, 0o640, &[])], &bob_in_ml, (BOB, ML, 0o440)),
            ("mounted by another", vec![file(0, 0, 0o644, &[(ALICE, ML, 0o711)])], &bob_in_ml, (BOB, 0, 0o444)),
            (
                "read through an access list",
                vec![AccessRules::new(ALICE, ML, [AccessRule::new(ALICE, ML, 0o660, 4).with_access_list()])],
                &bob_in_ml,
                (BOB, ML, 0o400),
            ),
        ];
        for (name, files, mounter, (uid, gid, mode)) in rows {
            let found = AccessRules::all(&files).unwrap().permission(mounter, &Overrides::default());
            assert_eq!(found, Permission { uid, gid, mode }, "{name}: {found:?}, mode {:o}", found.mode);
        }
        let access_list = AccessRules::new(ALICE, ML, [AccessRule::new(ALICE, ML, 0o664, 4).with_access_list()]);
        let found = access_list.permission(&ROOT, &Overrides::default());
        assert_eq!(found, Permission { uid: ALICE, gid: ML, mode: 0o400 });
    }

    #[test]
    fn a_directory_is_listed_by_fewer_than_pass_it() {
        let (listed, passed) = (file(ALICE, ML, 0o640, &[]), AccessRules::open(0, 0));
        let grants = [Grant { gates: &listed, bits: READ }, Grant { gates: &passed, bits: PASS }];
        let found = permission(&grants, &ROOT, &Overrides::default());
        assert_eq!(found, Permission { uid: ALICE, gid: ML, mode: 0o551 });
        let private = file(0, 0, 0o600, &[]);
        let grants = [Grant { gates: &private, bits: READ }, Grant { gates: &passed, bits: PASS }];
        assert_eq!(permission(&grants, &ROOT, &Overrides::default()), Permission { uid: 0, gid: 0, mode: 0o511 });
    }

    #[test]
    fn an_owner_or_group_that_the_user_names_may_read() {
        let private = file(ALICE, ALICE, 0o600, &[]);
        let named = |uid, gid| private.permission(&ROOT, &Overrides { uid, gid, ..Overrides::default() });
        assert_eq!(named(Some(BOB), None), Permission { uid: BOB, gid: ALICE, mode: 0o400 });
        assert_eq!(named(None, Some(ML)), Permission { uid: ALICE, gid: ML, mode: 0o440 });
        assert_eq!(named(Some(BOB), Some(ML)), Permission { uid: BOB, gid: ML, mode: 0o440 });
    }

    /// The kernel's decision for a user of these groups.
    fn kernel(uid: u32, groups: &[u32], owner: (u32, u32), mode: u32, wanted: u32) -> bool {
        let class = if uid == owner.0 {
            mode >> 6
        } else if groups.contains(&owner.1) {
            mode >> 3
        } else {
            mode
        };
        uid == 0 || class & wanted == wanted
    }

    type Raw = (u32, u32, u32);

    fn gate() -> impl Strategy<Value = Raw> {
        (0..4_u32, 0..3_u32, 0..8_u32)
    }

    fn gate_of(raw: &Raw) -> AccessRule {
        let (uid, gid, grants) = *raw;
        AccessRule { uid, gid, user: grants & 4 != 0, group: grants & 2 != 0, other: grants & 1 != 0 }
    }

    /// A mode whose classes read as the gate grants.
    fn mode_of(grants: u32) -> u32 {
        (grants >> 2 & 1) << 8 | (grants >> 1 & 1) << 5 | (grants & 1) << 2
    }

    proptest! {
        /// Users 0 to 3, and a fifth that owns nothing; each in any of eight sets of groups.
        #[test]
        fn no_user_reads_a_file_that_the_gates_refuse(
            gates in proptest::collection::vec(gate(), 1..6),
            uid in 0..5_u32,
            groups in 0..8_u32,
            privileged in any::<bool>(),
        ) {
            let set = |groups: u32| (0..3).filter(|group| groups >> group & 1 == 1).collect::<Vec<u32>>();
            let through = |uid, groups: &[u32]| {
                gates.iter().all(|(owner, group, grants)| kernel(uid, groups, (*owner, *group), mode_of(*grants), 4))
            };
            let mounter = Mounter { uid, gid: 0, groups: set(groups), privileged: privileged && uid == 0 };
            let all = AccessRules::new(gates[0].0, gates[0].1, gates.iter().map(gate_of));
            let found = all.permission(&mounter, &Overrides::default());
            prop_assert_eq!(found.mode & !0o444, 0);
            let owner = (found.uid, found.gid);
            for uid in 0..5 {
                for groups in 0..8 {
                    let groups = set(groups);
                    let granted = kernel(uid, &groups, owner, found.mode.into(), 4);
                    // The user that runs this process has read the sources with it.
                    let may = through(uid, &groups) || uid == mounter.uid;
                    prop_assert!(may || !granted, "user {} of {:?} reads through {:?}", uid, groups, found);
                }
            }
            prop_assert!(kernel(mounter.uid, &mounter.groups, owner, found.mode.into(), 4), "{:?}", found);
            // With a single gate nothing is lost.
            if let ([only], true) = (&gates[..], mounter.privileged) {
                let expected = mode_of(only.2);
                let root_only = expected == 0 || only.0 == 0;
                prop_assert!(root_only || u32::from(found.mode) == expected, "{:o} of {:o}", found.mode, expected);
            }
        }
    }
}
