//! Owners and permission bits of the mount's nodes: no user reads through a mount what the sources' permissions deny.
//!
//! | node | may be read by those that may read |
//! | --- | --- |
//! | a tensor's file | every source file that holds a part of the tensor |
//! | a file of many tensors, or one that shows names and shapes | every source file of the view's tensors |
//! | a copied file of the repository | that file; where it is rewritten, the source files of its tensors too |
//! | a directory of tensor names | the repository's directory and all of these source files; it is traversed as the repository's is |
//! | other directories | the repository's directory, or the directory of the repository that they mirror |
//! | `.ckfs/` and its contents | everything; it belongs to the mounting user |
//!
//! Source files with equal permissions on the whole path (gates) form one class. Most repositories have one class, and all
//! tensors then have the same attributes. With several classes, a tensor's are computed at the first request.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    fmt::Write,
    sync::{Arc, OnceLock},
};

use ckfs_checkpoint::Checkpoint;
use ckfs_image::DerivedFrom;
use ckfs_plan::Plan;
use ckfs_source::{
    FileId,
    permission::{self, AccessRule, AccessRules, DirectoryRules, Grant, Mounter, Overrides, PASS, Permission, READ},
};
use ckfs_tensor::View;
use nix::unistd::{Gid, Group, Uid, User};

use super::{file_system::Ino, tree::NodeTree};

/// The origin of a node's permissions.
#[derive(Clone, Debug)]
pub(super) enum ReadSubject {
    /// A file of a view.
    File { view: u32, derived_from: DerivedFrom },
    /// A directory of names of tensors.
    Names { view: u32 },
    /// A directory that shows nothing of tensors.
    Directory(Ino),
    /// The mount's own files.
    Own { is_directory: bool },
    /// A symbolic link, which every user may follow.
    Link,
}

/// Classes of source files, and the class of each file.
#[derive(Debug)]
struct GateClasses {
    gates: Vec<AccessRules>,
    of_file: Vec<u32>,
}

impl GateClasses {
    fn new(checkpoint: &Checkpoint) -> Self {
        let source = checkpoint.source();
        let mut numbers: HashMap<AccessRules, u32> = HashMap::new();
        let mut classes = Self { gates: Vec::new(), of_file: Vec::new() };
        for file in source.files() {
            let gates = source.pin(file).gates.clone();
            let next = u32::try_from(classes.gates.len()).expect("no more classes than files");
            let number = *numbers.entry(gates.clone()).or_insert(next);
            if number == next {
                classes.gates.push(gates);
            }
            classes.of_file.push(number);
        }
        classes
    }

    fn of(&self, file: FileId) -> u32 {
        self.of_file[file.index()]
    }

    /// The gates of all these classes.
    fn all(&self, classes: impl IntoIterator<Item = u32>) -> Option<AccessRules> {
        AccessRules::all(classes.into_iter().map(|class| &self.gates[class as usize]))
    }
}

/// Permissions of one view's files.
#[derive(Debug)]
struct OfView {
    plan: Arc<Plan>,
    /// The gates of all its tensors together.
    gates: OnceLock<AccessRules>,
    file: OnceLock<Permission>,
    directory: OnceLock<Permission>,
    /// Gates by tensor; empty if all tensors are of one class.
    tensors: Box<[OnceLock<Permission>]>,
}

/// Owners and permission bits of all nodes.
pub(super) struct Permissions {
    checkpoint: Arc<Checkpoint>,
    mounter: Mounter,
    overrides: Overrides,
    classes: GateClasses,
    /// Class of the files that hold tensors, if all are of one.
    weights: Option<u32>,
    repository: DirectoryRules,
    everything: AccessRules,
    /// Gates of directories that do not get their permissions from the repository's directory.
    directories: HashMap<Ino, DirectoryRules>,
    views: Vec<OfView>,
    /// Permission of every file of tensors, if there is only one class.
    uniform: Option<Permission>,
    plain_directory: Permission,
}

/// Permissions where no source file determines them.
fn closed() -> AccessRules {
    AccessRules::new(0, 0, [AccessRule::CLOSED])
}

/// The gates before the repository's directory. A single file has none of its own.
fn repository_gates(checkpoint: &Checkpoint, classes: &GateClasses) -> DirectoryRules {
    if let Some((_, gates)) = checkpoint.opened.directories.first() {
        return gates.clone();
    }
    let gates = classes.gates.first().cloned().unwrap_or_else(closed);
    DirectoryRules { list: gates.clone(), pass: gates }
}

/// Owner, group and bits of a directory whose names are those of a directory behind these gates.
pub fn directory_permission(gates: &DirectoryRules, mounter: &Mounter, overrides: &Overrides) -> Permission {
    let grants = [Grant { gates: &gates.list, bits: READ }, Grant { gates: &gates.pass, bits: PASS }];
    let found = permission::permission(&grants, mounter, overrides);
    Permission { mode: overrides.dir_mode.unwrap_or(found.mode), ..found }
}

impl Permissions {
    /// The permissions of a tree of these views.
    pub(super) fn new(
        checkpoint: &Arc<Checkpoint>,
        views: &[Arc<Plan>],
        tree: &NodeTree,
        mounter: Mounter,
        overrides: Overrides,
    ) -> Self {
        let classes = GateClasses::new(checkpoint);
        let mut of_tensors: HashSet<u32> =
            checkpoint.opened.adapters.iter().map(|adapter| classes.of(adapter.file)).collect();
        let weights = checkpoint.files().iter().filter(|file| file.role == ckfs_checkpoint::FileRole::Weights);
        of_tensors.extend(weights.filter_map(|file| Some(classes.of(file.file?))));
        let weights = of_tensors.iter().copied().next().filter(|_| of_tensors.len() == 1);
        let known: HashMap<&str, &DirectoryRules> =
            checkpoint.opened.directories.iter().skip(1).map(|(path, gates)| (path.as_str(), gates)).collect();
        let mirrors = tree.mirrors.iter();
        let directories =
            mirrors.filter_map(|(ino, path)| Some((*ino, (*known.get(path.as_str())?).clone()))).collect();
        let slots = |count: usize| (0..count).map(|_| OnceLock::new()).collect();
        let of_view = |plan: &Arc<Plan>| OfView {
            plan: Arc::clone(plan),
            gates: OnceLock::new(),
            file: OnceLock::new(),
            directory: OnceLock::new(),
            tensors: slots(if weights.is_some() { 0 } else { plan.tensors.len() }),
        };
        let repository = repository_gates(checkpoint, &classes);
        let mut permissions = Self {
            checkpoint: Arc::clone(checkpoint),
            everything: AccessRules::all(&classes.gates).unwrap_or_else(closed),
            views: views.iter().map(of_view).collect(),
            uniform: None,
            plain_directory: Permission { uid: 0, gid: 0, mode: 0 },
            mounter,
            overrides,
            classes,
            weights,
            repository,
            directories,
        };
        permissions.uniform =
            permissions.weights.map(|class| permissions.file(&permissions.classes.gates[class as usize]));
        permissions.plain_directory = permissions.directory(&permissions.repository);
        permissions
    }

    fn file(&self, gates: &AccessRules) -> Permission {
        let found = gates.permission(&self.mounter, &self.overrides);
        Permission { mode: self.overrides.file_mode.unwrap_or(found.mode), ..found }
    }

    fn directory(&self, gates: &DirectoryRules) -> Permission {
        directory_permission(gates, &self.mounter, &self.overrides)
    }

    /// Owner, group and bits of a node.
    pub(super) fn of(&self, subject: &ReadSubject) -> Permission {
        match subject {
            ReadSubject::File { view, derived_from } => self.of_file(&self.views[*view as usize], derived_from),
            ReadSubject::Names { view } => {
                let view = &self.views[*view as usize];
                *view.directory.get_or_init(|| self.directory(&self.names_gates(view)))
            }
            ReadSubject::Directory(ino) => {
                self.directories.get(ino).map_or(self.plain_directory, |gates| self.directory(gates))
            }
            ReadSubject::Own { is_directory } => {
                let (uid, gid) = (self.mounter.uid, self.mounter.gid);
                let said = if *is_directory { self.overrides.dir_mode } else { self.overrides.file_mode };
                Permission { uid, gid, mode: said.unwrap_or_else(|| self.mode(subject, uid, gid)) }
            }
            ReadSubject::Link => Permission { mode: 0o777, ..self.plain_directory },
        }
    }

    fn of_file(&self, view: &OfView, derived_from: &DerivedFrom) -> Permission {
        let find = || self.file(&self.file_gates(view, derived_from));
        match derived_from {
            DerivedFrom::Tensor(tensor) => {
                self.uniform.unwrap_or_else(|| *view.tensors[*tensor as usize].get_or_init(find))
            }
            DerivedFrom::Tensors => self.uniform.unwrap_or_else(|| *view.file.get_or_init(find)),
            DerivedFrom::Repository { .. } | DerivedFrom::Everything => find(),
        }
    }

    /// The gates of a file of a view.
    fn file_gates<'a>(&'a self, view: &'a OfView, derived_from: &DerivedFrom) -> Cow<'a, AccessRules> {
        match derived_from {
            DerivedFrom::Tensor(tensor) => Cow::Owned(self.tensor_gates(view, *tensor as usize)),
            DerivedFrom::Tensors => Cow::Borrowed(self.view_gates(view)),
            DerivedFrom::Repository { file, views, all_tensors } => {
                Cow::Owned(self.repository_file_gates(*file, views, *all_tensors))
            }
            DerivedFrom::Everything => Cow::Borrowed(&self.everything),
        }
    }

    /// The permission bits that a node may have under this owner and group. The owner can always read.
    pub(super) fn mode(&self, subject: &ReadSubject, uid: u32, gid: u32) -> u16 {
        let file =
            |gates: &AccessRules| permission::mode(&[Grant { gates, bits: READ }], uid, gid, &self.mounter) | 0o400;
        let directory = |list: &AccessRules, pass: &AccessRules| {
            let grants = [Grant { gates: list, bits: READ }, Grant { gates: pass, bits: PASS }];
            permission::mode(&grants, uid, gid, &self.mounter) | 0o500
        };
        match subject {
            ReadSubject::File { view, derived_from } => {
                file(&self.file_gates(&self.views[*view as usize], derived_from))
            }
            ReadSubject::Own { is_directory: false } => file(&self.everything),
            ReadSubject::Own { is_directory: true } => directory(&self.everything, &self.everything),
            ReadSubject::Names { view } => {
                let gates = self.names_gates(&self.views[*view as usize]);
                directory(&gates.list, &gates.pass)
            }
            ReadSubject::Directory(ino) => {
                let gates = self.directories.get(ino).unwrap_or(&self.repository);
                directory(&gates.list, &gates.pass)
            }
            ReadSubject::Link => 0o777,
        }
    }

    /// Adds the classes of the files that a view reads.
    fn add_classes(&self, view: &View, classes: &mut HashSet<u32>) {
        view.for_each_stored(&mut |tensor| {
            classes.insert(self.classes.of(self.checkpoint.tensor(tensor).file()));
        });
    }

    /// The gates of these classes together; without classes nothing was read, and the gates are those of the listing.
    fn gates_of(&self, classes: HashSet<u32>) -> AccessRules {
        let mut classes: Vec<u32> = classes.into_iter().collect();
        classes.sort_unstable();
        self.classes.all(classes).unwrap_or_else(|| self.repository.list.clone())
    }

    fn tensor_gates(&self, view: &OfView, tensor: usize) -> AccessRules {
        let mut classes: HashSet<u32> = self.weights.into_iter().collect();
        if classes.is_empty() {
            self.add_classes(&view.plan.tensors[tensor].view, &mut classes);
        }
        self.gates_of(classes)
    }

    fn view_gates<'a>(&self, view: &'a OfView) -> &'a AccessRules {
        view.gates.get_or_init(|| {
            let mut classes: HashSet<u32> = self.weights.into_iter().collect();
            if classes.is_empty() {
                view.plan.tensors.iter().for_each(|tensor| self.add_classes(&tensor.view, &mut classes));
            }
            self.gates_of(classes)
        })
    }

    fn names_gates(&self, view: &OfView) -> DirectoryRules {
        let DirectoryRules { list, pass } = &self.repository;
        let list = AccessRules::all([list, self.view_gates(view)]).unwrap_or_else(|| list.clone());
        DirectoryRules { list, pass: pass.clone() }
    }

    /// The gates of a file derived from one of the repository's files, from views, and from the names of all tensors.
    fn repository_file_gates(&self, file: Option<FileId>, views: &[View], all_tensors: bool) -> AccessRules {
        let mut classes: HashSet<u32> = file.map(|file| self.classes.of(file)).into_iter().collect();
        for view in views {
            self.add_classes(view, &mut classes);
        }
        if all_tensors {
            let files = self.checkpoint.tensors().flat_map(|(id, _)| self.checkpoint.files_of(id));
            classes.extend(files.map(|file| self.classes.of(file)));
        }
        self.gates_of(classes)
    }
}

/// The users that may read a part of the mount, where all users may access the mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PermittedReaders {
    /// Permission of the files derived from these source files.
    pub permission: Permission,
    /// Number of source files with this permission.
    pub files: usize,
    /// One of them.
    pub example: String,
}

/// The users that may read the files derived from each source file, the most common case first. A file derived from several
/// source files may be read by users that may read all of them.
pub fn readers(checkpoint: &Checkpoint, mounter: &Mounter, overrides: &Overrides) -> Vec<PermittedReaders> {
    let source = checkpoint.source();
    let mut found: Vec<PermittedReaders> = Vec::new();
    let mut known: HashMap<AccessRules, usize> = HashMap::new();
    for file in source.files() {
        let gates = source.pin(file).gates.clone();
        let place = *known.entry(gates).or_insert_with_key(|gates| {
            let permission = gates.permission(mounter, overrides);
            let permission = Permission { mode: overrides.file_mode.unwrap_or(permission.mode), ..permission };
            found.iter().position(|readers| readers.permission == permission).unwrap_or_else(|| {
                let example = source.path(file);
                let example = example.strip_prefix(checkpoint.root()).unwrap_or(example).display().to_string();
                found.push(PermittedReaders { permission, files: 0, example });
                found.len() - 1
            })
        });
        found[place].files += 1;
    }
    found.sort_by_key(|readers| std::cmp::Reverse(readers.files));
    found
}

/// Names the users that this permission lets read.
fn names(permission: Permission) -> String {
    let Permission { uid, gid, mode } = permission;
    let user = || {
        let name = User::from_uid(Uid::from_raw(uid)).ok().flatten().map(|user| user.name);
        name.unwrap_or_else(|| format!("user {uid}"))
    };
    let group = || {
        let name = Group::from_gid(Gid::from_raw(gid)).ok().flatten().map(|group| group.name);
        format!("group {}", name.unwrap_or_else(|| gid.to_string()))
    };
    let may = |shift: u16| mode >> shift & READ == READ;
    let names = match (may(6), may(3), may(0)) {
        (true, true, true) => "everybody".to_owned(),
        (true, true, false) => format!("{}, {}", user(), group()),
        (false, true, false) => format!("{} but for {}", group(), user()),
        (false | true, false, false) if uid == 0 || !may(6) => "root only".to_owned(),
        (_, false, false) => user(),
        (_, true, true) => format!("everybody but for {}", user()),
        (_, false, true) => format!("everybody but for {}", group()),
    };
    format!("{names} ({mode:04o})")
}

/// First word of the lines of [`readers_text`].
const KEY: &str = "readable by";

/// The contents of the lines of `readers_text`, extracted from a text that includes them.
pub fn readers_of(text: &str) -> Vec<&str> {
    let lines = text.lines().skip_while(|line| !line.starts_with(KEY));
    let own = lines.enumerate().take_while(|(number, line)| *number == 0 || line.starts_with(&" ".repeat(KEY.len())));
    own.filter_map(|(_, line)| Some(line.get(KEY.len()..)?.trim())).collect()
}

/// Most classes that are shown.
const READERS_SHOWN: usize = 8;

/// The same as text, in as few lines as there are cases.
pub(crate) fn readers_text(found: &[PermittedReaders]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    match found {
        [] => {}
        [only] => {
            let _ = writeln!(text, "{KEY}  {}", names(only.permission));
        }
        several => {
            for (number, PermittedReaders { permission, files, example }) in
                several.iter().take(READERS_SHOWN).enumerate()
            {
                let key = if number == 0 { KEY } else { "" };
                let files = if *files == 1 { String::new() } else { format!(" and {} more", files - 1) };
                let _ = writeln!(text, "{key:<11}  {}: {example:?}{files}", names(*permission));
            }
            if several.len() > READERS_SHOWN {
                let _ = writeln!(text, "{:<11}  and {} more", "", several.len() - READERS_SHOWN);
            }
            let _ = writeln!(text, "{:<11}  files derived from several: users that may read all of them", "");
        }
    }
    text
}
