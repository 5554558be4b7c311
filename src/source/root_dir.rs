//! Opens the files of a repository, and refuses files outside of it.
//!
//! A repository may come from anywhere, and this process may have more rights than its author: ckfs must not follow a symbolic link
//! to a secret. Paths are resolved as by `openat2` with `RESOLVE_BENEATH`. Where the kernel or a sandbox lacks this call, they are
//! resolved component by component with the same results.
//!
//! A file is found once, as a descriptor that cannot be read from. Its type and its path come from this descriptor, and reading
//! opens the same descriptor again. So nothing can replace the file between the two steps.

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::FileExt, fs::MetadataExt, fs::OpenOptionsExt},
    },
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use nix::{
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        stat::FileStat,
    },
    unistd::{getegid, geteuid},
};
use rustix::{
    fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, readlinkat},
    io::Errno,
};

use super::{
    ByteSpan, SourceError,
    digest::KnownDigest,
    permission::{AccessRule, AccessRules, DirectoryRules, PASS, READ},
    remote::handle::Remote,
    stall::WaitGuard,
    survey::Survey,
};

/// Flags of a descriptor that only names a file.
const NAMING: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// Most symbolic links followed on the way to one file, the same number as in the kernel.
const LINKS_MAX: usize = 40;

/// Most attempts of a resolution that a concurrent rename or a signal interrupts.
const TRIES_MAX: usize = 8;

/// Prefix of a directory of the Hub's cache that holds a repository: its revisions and the blobs that they link to.
const HUB_PREFIX: &str = "models--";

/// Descriptors that a mount needs besides those of its source files, with some to spare.
const OTHER_DESCRIPTORS: u64 = 48;

/// The directory that must contain a repository's files.
#[derive(Debug)]
pub struct RootDir {
    /// As the user named it.
    named: PathBuf,
    /// The repository's own directory, without links.
    real: PathBuf,
    /// The directory that links may lead to, without links: the repository, or in the Hub's cache
    /// all of its directory there, with revisions and blobs.
    root: PathBuf,
    root_fd: OwnedFd,
    /// The repository's path relative to `root`; empty outside the Hub's cache.
    below: PathBuf,
    survey: Survey,
}

/// A file, directory or other thing that was found.
pub struct FoundFile {
    /// The path by which it was found.
    path: PathBuf,
    /// Its path without links.
    real: PathBuf,
    /// A descriptor that cannot be read from.
    file: File,
    meta: Metadata,
    /// The path by which it is found again, relative to the directory of a [`RootDir`].
    below: Option<PathBuf>,
    /// The remote object of which the file is a copy, perhaps with holes.
    remote: Option<Remote>,
}

/// An open regular file, the gates before it, and how to find it again. Cheap to clone.
#[derive(Clone)]
pub struct Opened {
    pub(super) path: Arc<Path>,
    pub(super) file: Arc<File>,
    pub(super) gates: AccessRules,
    pub(super) revalidate: Revalidate,
    pub(super) remote: Option<Remote>,
    /// The digest that the Hub's cache names it by.
    pub(super) digest: Option<KnownDigest>,
}

/// How a file is found again, to check whether its name still leads to it.
#[derive(Clone, Debug)]
pub(super) enum Revalidate {
    /// By a path that may lead anywhere.
    Named,
    /// By a path relative to a directory.
    Beneath(Arc<RootDir>, PathBuf),
    /// Not at all: it belongs to the cache, and is written while it is read.
    Cached,
}

impl RootDir {
    /// The directory of a repository. The user's path to it may contain links.
    ///
    /// # Errors
    /// It cannot be opened, or is no directory.
    pub fn open(named: &Path) -> io::Result<Self> {
        raise_open_file_limit();
        let fd = openat(CWD, named, NAMING | OFlags::DIRECTORY, Mode::empty())?;
        let real = location(fd.as_fd(), named)?;
        // The directory of the cache may itself be a link to another disk.
        let (root, root_fd) =
            match [std::path::absolute(named)?, real.clone()].iter().find_map(|path| hub_root(path, &real)) {
                Some(hub) => hub,
                None => (real.clone(), fd),
            };
        let below = real.strip_prefix(&root).unwrap_or(Path::new("")).to_owned();
        Ok(Self { named: named.to_owned(), real, root, root_fd, below, survey: Survey::default() })
    }

    /// Whether the repository is a revision in the Hub's cache.
    pub fn is_in_hub_cache(&self) -> bool {
        self.root != self.real
    }

    /// The directory, as the user named it.
    pub fn path(&self) -> &Path {
        &self.named
    }

    /// The gates before a directory of the repository; "" is the repository's own.
    pub fn directory_gates(&self, directory: &str) -> DirectoryRules {
        self.survey.directory(&self.real.join(directory))
    }

    /// Finds the file that `path`, relative to the repository, leads to. [`FoundFile::is_inside`] tells whether it is part of the
    /// repository.
    ///
    /// # Errors
    /// Nothing is there, or it cannot be reached.
    pub fn find(&self, path: &str) -> io::Result<FoundFile> {
        let named = self.named.join(path);
        let below = self.below.join(path);
        match resolve(self.root_fd.as_fd(), &below) {
            Ok(fd) => return self.found(named, below, fd),
            Err(Errno::XDEV) => {}
            Err(errno) => return Err(errno.into()),
        }
        let fd = openat(&self.root_fd, &below, NAMING, Mode::empty())?;
        let real = location(fd.as_fd(), &named)?;
        // An absolute link is accepted if it leads back to the repository.
        if let Ok(back) = real.strip_prefix(&self.root)
            && let Ok(fd) = resolve(self.root_fd.as_fd(), back)
        {
            return self.found(named, back.to_owned(), fd);
        }
        FoundFile::new(named, real, fd, None)
    }

    fn found(&self, named: PathBuf, below: PathBuf, fd: OwnedFd) -> io::Result<FoundFile> {
        let real = location(fd.as_fd(), &named)?;
        // In the Hub's cache only this revision and the blobs that revisions link to.
        let counts = real.starts_with(&self.real) || real.starts_with(self.root.join("blobs"));
        FoundFile::new(named, real, fd, counts.then_some(below))
    }

    /// The attributes of the file that the path of an earlier found file leads to now.
    ///
    /// # Errors
    /// Nothing is there, or it cannot be reached, or it is outside of the repository.
    pub(super) fn find_again(&self, below: &Path) -> nix::Result<FileStat> {
        let errno = |errno: Errno| nix::errno::Errno::from_raw(errno.raw_os_error());
        // Another repository may have replaced the one that was opened.
        let root = openat(CWD, &self.root, NAMING | OFlags::DIRECTORY, Mode::empty()).map_err(errno)?;
        nix::sys::stat::fstat(resolve(root.as_fd(), below).map_err(errno)?)
    }
}

impl FoundFile {
    /// Finds a file that the user named, wherever its path leads.
    ///
    /// # Errors
    /// Nothing is there, or it cannot be reached.
    pub fn named(path: &Path) -> io::Result<Self> {
        let fd = openat(CWD, path, NAMING, Mode::empty())?;
        let real = location(fd.as_fd(), path)?;
        Self::new(path.to_owned(), real, fd, None)
    }

    fn new(path: PathBuf, real: PathBuf, fd: OwnedFd, below: Option<PathBuf>) -> io::Result<Self> {
        let file = File::from(fd);
        Ok(Self { path, real, meta: file.metadata()?, file, below, remote: None })
    }

    /// The file of the cache that holds a remote object, part of the object's repository.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn cached(remote: &Remote) -> io::Result<Self> {
        let entry = &remote.object.entry;
        let real = PathBuf::from(format!("/proc/self/fd/{}", entry.data.as_raw_fd()));
        let fd = openat(CWD, &real, NAMING, Mode::empty())?;
        let (path, below) = (remote.object.name.to_path_buf(), PathBuf::from(&remote.object.file.path));
        Ok(Self { remote: Some(remote.clone()), ..Self::new(path, real, fd, Some(below))? })
    }

    /// Whether the file is part of the repository.
    pub fn is_inside(&self) -> bool {
        self.below.is_some()
    }

    /// Its path without links.
    pub fn real(&self) -> &Path {
        &self.real
    }

    /// Its metadata, among them type and length.
    pub fn metadata(&self) -> &Metadata {
        &self.meta
    }

    /// Opens it for reading.
    ///
    /// # Errors
    /// [`SourceError::Refused`] if it is not a regular file, which is then not opened; [`SourceError::Io`].
    pub fn open(self, root: Option<&Arc<RootDir>>) -> Result<Opened, SourceError> {
        let path: Arc<Path> = Arc::from(self.path);
        if !self.meta.is_file() {
            return Err(SourceError::Refused { file: path, text: "not a regular file".to_owned() });
        }
        let file = reopen(&self.file, &self.real, &self.meta)
            .map_err(|error| SourceError::io(Arc::clone(&path), "open", error))?;
        let survey = |survey: &Survey| survey.file(&file, &self.real);
        let (gates, revalidate) = match (self.remote.is_some(), root, self.below) {
            (true, ..) => (private_gates(0o400, READ), Revalidate::Cached),
            (false, Some(root), Some(below)) => (survey(&root.survey), Revalidate::Beneath(Arc::clone(root), below)),
            (false, Some(root), None) => (survey(&root.survey), Revalidate::Named),
            (false, None, _) => (survey(&Survey::default()), Revalidate::Named),
        };
        let digest = KnownDigest::of_blob(&self.real).filter(|_| self.remote.is_none());
        Ok(Opened { path, file: Arc::new(file), gates, revalidate, remote: self.remote, digest })
    }
}

impl Opened {
    /// The path by which it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length in bytes.
    ///
    /// # Errors
    /// The system cannot tell.
    pub fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Fills `target` with the bytes from `start` on, and notes those that come.
    ///
    /// # Errors
    /// It cannot be read, or ends earlier.
    pub fn read_exact_at(&self, target: &mut [u8], start: u64, fetching: &WaitGuard<'_>) -> io::Result<()> {
        if let Some(remote) = &self.remote {
            let span = ByteSpan::of_len(start, target.len() as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
            return remote.read_span(span, target);
        }
        let mut at = start;
        for piece in target.chunks_mut(fetching.piece_bytes()) {
            self.file.read_exact_at(piece, at)?;
            at += piece.len() as u64;
            fetching.advance();
        }
        Ok(())
    }

    /// Its bytes, but at most the first `bytes_max` of them; notes those that come. A remote object must not be longer than that.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self, bytes_max: u64, fetching: &WaitGuard<'_>) -> io::Result<Vec<u8>> {
        if let Some(remote) = &self.remote {
            if remote.object.file.size_bytes > bytes_max {
                return Err(io::Error::other(format!("expected at most {bytes_max} bytes")));
            }
            let mut bytes = vec![0; usize::try_from(remote.object.file.size_bytes).map_err(io::Error::other)?];
            remote.read_span(remote.object.file.span(), &mut bytes)?;
            return Ok(bytes);
        }
        let mut bytes = Vec::new();
        let mut rest = (&*self.file).take(bytes_max);
        while (&mut rest).take(fetching.piece_bytes() as u64).read_to_end(&mut bytes)? > 0 {
            fetching.advance();
        }
        Ok(bytes)
    }
}

/// Raises the soft limit of open files to the hard one: every source file stays open, and a repository may have hundreds. Returns
/// the new limit.
fn raise_open_file_limit() -> Option<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    if soft >= hard {
        return Some(soft);
    }
    match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => Some(hard),
        Err(errno) => {
            tracing::debug!("cannot raise the limit of open files from {soft} to {hard}: {errno}");
            Some(soft)
        }
    }
}

/// Refuses more source files than the limit of open files allows. To be called before they are opened.
///
/// # Errors
/// [`SourceError::FileLimit`].
pub fn check_open_file_limit(files: usize) -> Result<(), SourceError> {
    let Some(limit) = raise_open_file_limit() else { return Ok(()) };
    let needed = files as u64 + OTHER_DESCRIPTORS;
    if limit >= needed {
        return Ok(());
    }
    Err(SourceError::FileLimit(format!(
        "{files} source files stay open: expected a limit of {needed} open files or more, found {limit}; raise it (ulimit -n \
         {needed}, or LimitNOFILE={needed} of a systemd unit)"
    )))
}

/// The permission checks of a copy in the cache: only the user whose credentials fetched the object may read it.
fn private_gates(mode: u32, wanted: u16) -> AccessRules {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    AccessRules::new(uid, gid, [AccessRule::new(uid, gid, mode, wanted)])
}

/// The gates before a directory of a remote repository.
pub fn private_directory() -> DirectoryRules {
    DirectoryRules { list: private_gates(0o500, READ), pass: private_gates(0o500, PASS) }
}

/// The directory in the Hub's cache that contains the revision `path`, judged by its name; `real` is `path` without links.
fn hub_root(path: &Path, real: &Path) -> Option<(PathBuf, OwnedFd)> {
    let snapshots = path.parent().filter(|dir| dir.file_name() == Some(OsStr::new("snapshots")))?;
    let hub = snapshots.parent()?;
    hub.file_name().filter(|name| name.as_bytes().starts_with(HUB_PREFIX.as_bytes()))?;
    let fd = openat(CWD, hub, NAMING | OFlags::DIRECTORY, Mode::empty()).ok()?;
    let root = location(fd.as_fd(), hub).ok()?;
    (real != root && real.starts_with(&root)).then_some((root, fd))
}

/// The path of a descriptor without links. Where `/proc` is not mounted, the path that its name leads to now.
fn location(fd: BorrowedFd<'_>, named: &Path) -> io::Result<PathBuf> {
    let real = match fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())) {
        Ok(real) => real,
        Err(_) => fs::canonicalize(named)?,
    };
    if real.is_absolute() { Ok(real) } else { Err(io::Error::other(format!("{} lies outside of /", real.display()))) }
}

/// Opens the file of a descriptor for reading, without resolving its path again. Where `/proc` is not mounted, opens it by its
/// path, if that still leads to the same file.
fn reopen(fd: &File, real: &Path, meta: &Metadata) -> io::Result<File> {
    let open = |path: &Path, flags: i32| OpenOptions::new().read(true).custom_flags(flags | libc::O_NOCTTY).open(path);
    // Waits for a process that holds a lease on the file, as a file server does.
    let patient = |path: &Path, flags: i32| match open(path, flags | libc::O_NONBLOCK) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => open(path, flags),
        other => other,
    };
    let file = match patient(Path::new(&format!("/proc/self/fd/{}", fd.as_raw_fd())), 0) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => patient(real, libc::O_NOFOLLOW)?,
        other => other?,
    };
    let opened = file.metadata()?;
    let same = opened.is_file() && (opened.dev(), opened.ino()) == (meta.dev(), meta.ino());
    if same { Ok(file) } else { Err(io::Error::other("another file was put in its place while it was opened")) }
}

/// The file that `path` leads to below `root`; [`Errno::XDEV`] if the path leaves `root`.
fn resolve(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Errno> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    for _ in 0..TRIES_MAX {
        match openat2(root, path, NAMING, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS) {
            // Something was renamed meanwhile.
            Err(Errno::AGAIN | Errno::INTR) => {}
            // Before Linux 5.6, or in a sandbox that does not know the call.
            Err(Errno::NOSYS | Errno::PERM) => break,
            other => return other,
        }
    }
    walk(root, path)
}

/// As [`resolve`], component by component. It never opens a directory above `root`: `..` returns to the directory from which
/// a component was entered.
fn walk(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, Errno> {
    let mut entered: Vec<(OwnedFd, bool)> = Vec::new();
    let mut pending: VecDeque<OsString> = VecDeque::new();
    prepend(&mut pending, path)?;
    let mut links = 0;
    while let Some(name) = pending.pop_front() {
        if name == ".." {
            match entered.pop() {
                Some((_, true)) => continue,
                Some((_, false)) => return Err(Errno::NOTDIR),
                None => return Err(Errno::XDEV),
            }
        }
        let at = entered.last().map_or(root, |(fd, _)| fd.as_fd());
        let fd = openat(at, &name, NAMING | OFlags::NOFOLLOW, Mode::empty())?;
        let kind = FileType::from_raw_mode(fstat(&fd)?.st_mode);
        if kind.is_symlink() {
            links += 1;
            if links > LINKS_MAX {
                return Err(Errno::LOOP);
            }
            let target = readlinkat(&fd, "", Vec::new())?;
            prepend(&mut pending, Path::new(OsStr::from_bytes(target.as_bytes())))?;
        } else {
            entered.push((fd, kind.is_dir()));
        }
    }
    match entered.pop() {
        Some((fd, _)) => Ok(fd),
        None => openat(root, ".", NAMING | OFlags::DIRECTORY, Mode::empty()),
    }
}

/// Puts the components of a path before those that are pending.
fn prepend(pending: &mut VecDeque<OsString>, path: &Path) -> Result<(), Errno> {
    let ends_in_slash = path.as_os_str().as_bytes().ends_with(b"/");
    let mut names = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name.to_owned()),
            Component::ParentDir => names.push("..".into()),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return Err(Errno::XDEV),
        }
    }
    // A file with a trailing slash is not a directory.
    if ends_in_slash {
        names.push(".".into());
    }
    for name in names.into_iter().rev() {
        pending.push_front(name);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let repo = dir.path().join("repo");
        fs::create_dir_all(repo.join("sub/deep")).unwrap();
        fs::write(dir.path().join("secret"), "s").unwrap();
        fs::write(repo.join("file"), "f").unwrap();
        fs::write(repo.join("sub/file"), "g").unwrap();
        let link = |target: &str, name: &str| symlink(target, repo.join(name)).unwrap();
        for (target, name) in [
            ("file", "inside"),
            ("../file", "sub/up"),
            ("sub/deep/../../file", "around"),
            ("../repo/file", "out-and-back"),
            ("../secret", "out"),
            ("/etc/passwd", "absolute"),
            ("loop", "loop"),
            ("nowhere", "dangling"),
            ("inside", "twice"),
            ("..", "above"),
            ("sub", "directory"),
            (".", "itself"),
            ("file/", "slash"),
        ] {
            link(target, name);
        }
        dir
    }

    #[test]
    fn paths_lead_to_the_same_with_and_without_the_system_call() {
        let dir = tree();
        let root = openat(CWD, dir.path().join("repo"), NAMING, Mode::empty()).unwrap();
        let rows: [(&str, Result<&str, Errno>); 20] = [
            ("file", Ok("file")),
            ("inside", Ok("file")),
            ("twice", Ok("file")),
            ("sub/up", Ok("file")),
            ("around", Ok("file")),
            ("directory/file", Ok("sub/file")),
            ("directory", Ok("sub")),
            ("itself", Ok("")),
            ("itself/sub/..", Ok("")),
            ("out", Err(Errno::XDEV)),
            ("out-and-back", Err(Errno::XDEV)),
            ("absolute", Err(Errno::XDEV)),
            ("above", Err(Errno::XDEV)),
            ("above/secret", Err(Errno::XDEV)),
            ("..", Err(Errno::XDEV)),
            ("loop", Err(Errno::LOOP)),
            ("dangling", Err(Errno::NOENT)),
            ("file/x", Err(Errno::NOTDIR)),
            ("file/../file", Err(Errno::NOTDIR)),
            ("slash", Err(Errno::NOTDIR)),
        ];
        for (path, expected) in rows {
            let expected = expected.map(|path| dir.path().join("repo").join(path).canonicalize().unwrap());
            for (name, found) in
                [("call", resolve(root.as_fd(), path.as_ref())), ("walk", walk(root.as_fd(), path.as_ref()))]
            {
                let found = found.map(|fd| location(fd.as_fd(), Path::new("")).unwrap());
                assert_eq!(found, expected, "{path} by {name}");
            }
        }
    }

    #[test]
    fn links_out_of_the_repository_are_told_from_links_within() {
        let dir = tree();
        let real = dir.path().canonicalize().unwrap();
        let repo = real.join("repo");
        symlink(repo.join("sub/file"), repo.join("absolute-inside")).unwrap();
        symlink(&repo, real.join("named")).unwrap();
        let root = RootDir::open(&real.join("named")).unwrap();
        for (path, inside, to) in [
            ("file", true, repo.join("file")),
            ("absolute-inside", true, repo.join("sub/file")),
            ("out-and-back", true, repo.join("file")),
            ("out", false, real.join("secret")),
        ] {
            let found = root.find(path).unwrap();
            assert_eq!((found.is_inside(), found.real()), (inside, &*to), "{path}");
        }
        assert!(root.find("dangling").is_err() && root.find("loop").is_err());
        // A file that is replaced after it was found: the found one is opened.
        let found = root.find("inside").unwrap();
        fs::remove_file(repo.join("inside")).unwrap();
        symlink("../secret", repo.join("inside")).unwrap();
        let opened = found.open(None).unwrap();
        assert_eq!(io::read_to_string(&*opened.file).unwrap(), "f");
    }

    #[test]
    fn in_the_cache_of_the_hub_blobs_count_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        let repo = real.join("models--org--name");
        let snapshot = repo.join("snapshots/abc");
        for new in ["blobs", "refs", "snapshots/abc", "snapshots/def"] {
            fs::create_dir_all(repo.join(new)).unwrap();
        }
        for new in ["blobs/1", "refs/main", "snapshots/def/own", "snapshots/abc/own"] {
            fs::write(repo.join(new), new).unwrap();
        }
        fs::write(real.join("other"), "").unwrap();
        symlink("../../blobs/1", snapshot.join("blob")).unwrap();
        symlink("../../refs/main", snapshot.join("ref")).unwrap();
        symlink("../def/own", snapshot.join("sibling")).unwrap();
        symlink("../../../other", snapshot.join("other")).unwrap();
        let root = RootDir::open(&snapshot).unwrap();
        let check = |root: &RootDir| {
            assert!(root.is_in_hub_cache());
            for (name, inside) in [("blob", true), ("own", true), ("ref", false), ("sibling", false)] {
                assert_eq!(root.find(name).unwrap().is_inside(), inside, "{name}");
            }
        };
        check(&root);
        assert!(!root.find("other").unwrap().is_inside());
        // Also where the cache is on another disk.
        fs::create_dir(real.join("cache")).unwrap();
        fs::rename(&repo, real.join("moved")).unwrap();
        symlink("../moved", real.join("cache/models--org--name")).unwrap();
        check(&RootDir::open(&real.join("cache/models--org--name/snapshots/abc")).unwrap());
    }

    #[test]
    fn pipes_and_devices_are_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        symlink("/dev/zero", dir.path().join("device")).unwrap();
        let root = Arc::new(RootDir::open(dir.path()).unwrap());
        for name in ["pipe", "device"] {
            let found = root.find(name).unwrap();
            assert!(matches!(found.open(Some(&root)), Err(SourceError::Refused { .. })), "{name}");
        }
    }
}
