//! Compares every file of a mount with a directory of the expected files, in the guest of `boot.sh`.
//!
//! ```text
//! reader page                      prints the bytes of a memory page
//! reader compare MOUNT EXPECTED    by read(2) at odd offsets, by mmap(2), and by O_DIRECT; fails at the first difference
//! ```
//!
//! It uses the standard library only, so that `rustc` builds it for each architecture in a second.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    collections::BTreeSet,
    env,
    ffi::c_void,
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    ptr, slice,
};

const O_DIRECT: i32 = if cfg!(target_arch = "aarch64") { 0x10000 } else { 0x4000 };
/// Aligned enough for `O_DIRECT` with pages of any size.
const DIRECT_BYTES: usize = 1 << 20;
const ALIGNMENT: usize = 64 << 10;
/// Reads of this length begin and end inside pages.
const ODD_BYTES: usize = (128 << 10) + 77;

unsafe extern "C" {
    fn mmap(address: *mut c_void, len: usize, protection: i32, flags: i32, fd: i32, offset: i64) -> *mut c_void;
    fn munmap(address: *mut c_void, len: usize) -> i32;
    fn sysconf(name: i32) -> i64;
}

/// `_SC_PAGESIZE` of musl.
const PAGE_SIZE: i32 = 30;

fn by_read(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let (mut found, mut part) = (Vec::new(), vec![0; ODD_BYTES]);
    loop {
        let len = file.read_at(&mut part, found.len() as u64)?;
        if len == 0 {
            return Ok(found);
        }
        found.extend_from_slice(&part[..len]);
    }
}

fn by_mmap(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let len = usize::try_from(file.metadata()?.len()).expect("a file fits the address space");
    if len == 0 {
        return Ok(Vec::new());
    }
    const PROT_READ: i32 = 1;
    // Shared maps of files that are opened past the page cache need Linux 6.6.
    const MAP_PRIVATE: i32 = 2;
    // SAFETY: a new mapping, of a file that nothing changes, is read while it is mapped.
    unsafe {
        let map = mmap(ptr::null_mut(), len, PROT_READ, MAP_PRIVATE, file.as_raw_fd(), 0);
        if map as isize == -1 {
            return Err(io::Error::last_os_error());
        }
        let found = slice::from_raw_parts(map.cast::<u8>(), len).to_vec();
        munmap(map, len);
        Ok(found)
    }
}

fn by_direct(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = fs::OpenOptions::new().read(true).custom_flags(O_DIRECT).open(path)?;
    let layout = Layout::from_size_align(DIRECT_BYTES, ALIGNMENT).expect("a power of two");
    // SAFETY: the layout has a size, the memory is zeroed, and freed after its last use.
    let memory = unsafe { alloc_zeroed(layout) };
    let part = unsafe { slice::from_raw_parts_mut(memory, DIRECT_BYTES) };
    let mut found = Vec::new();
    let done = loop {
        match file.read(part) {
            Ok(0) => break Ok(found),
            Ok(len) => found.extend_from_slice(&part[..len]),
            Err(error) => break Err(error),
        }
    };
    // SAFETY: allocated above with this layout.
    unsafe { dealloc(memory, layout) };
    done
}

/// Relative paths of all files and links below `root`, except the directory `.ckfs`, which is about the mount.
fn files(root: &Path, below: &Path, found: &mut BTreeSet<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if path == Path::new(".ckfs") {
            continue;
        }
        if entry.file_type()?.is_dir() {
            files(root, &path, found)?;
        } else {
            found.insert(path);
        }
    }
    Ok(())
}

/// Orbax's record of times, which no two mounts have in common.
const TIMES: &str = "_CHECKPOINT_METADATA";

type Way = (&'static str, fn(&Path) -> io::Result<Vec<u8>>);
const WAYS: [Way; 3] = [("read", by_read), ("mmap", by_mmap), ("O_DIRECT", by_direct)];

fn compare(mount: &Path, expected: &Path) -> Result<(), String> {
    let (mut ours, mut theirs) = (BTreeSet::new(), BTreeSet::new());
    files(mount, Path::new(""), &mut ours).map_err(|error| format!("{}: {error}", mount.display()))?;
    files(expected, Path::new(""), &mut theirs).map_err(|error| format!("{}: {error}", expected.display()))?;
    if let Some(path) = ours.symmetric_difference(&theirs).next() {
        return Err(format!("{}: in one of {} and {} only", path.display(), mount.display(), expected.display()));
    }
    let mut bytes = 0;
    for path in &ours {
        let (one, other) = (fs::read_link(mount.join(path)).ok(), fs::read_link(expected.join(path)).ok());
        if one != other {
            return Err(format!("{}: a link to {one:?}, expected {other:?}", path.display()));
        }
        if one.is_some() || path.ends_with(TIMES) {
            continue;
        }
        let right = fs::read(expected.join(path)).map_err(|error| format!("{}: {error}", path.display()))?;
        for (name, way) in WAYS {
            let found = way(&mount.join(path)).map_err(|error| format!("{}: by {name}: {error}", path.display()))?;
            if found != right {
                let at = found.iter().zip(&right).position(|(one, other)| one != other);
                let (found, right, at) = (found.len(), right.len(), at.unwrap_or(found.len().min(right.len())));
                let path = path.display();
                return Err(format!("{path}: by {name}: {found} bytes, expected {right}, which differ at {at}"));
            }
        }
        bytes += right.len();
    }
    println!("{} files, {bytes} bytes, equal by read, mmap and O_DIRECT", ours.len());
    if ours.is_empty() { Err("nothing was compared".to_owned()) } else { Ok(()) }
}

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["page"] => {
            // SAFETY: a plain call.
            println!("{}", unsafe { sysconf(PAGE_SIZE) });
            Ok(())
        }
        ["compare", mount, expected] => compare(Path::new(mount), Path::new(expected)),
        _ => Err("expected page or compare".to_owned()),
    };
    if let Err(error) = done {
        eprintln!("reader: {error}");
        std::process::exit(1);
    }
}
