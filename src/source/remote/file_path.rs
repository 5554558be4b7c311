//! Paths of files of a repository, as services name them.

/// Greatest depth of a file, as of a directory of this machine.
const LEVELS_MAX: usize = 32;
/// Longest name of a file or directory, as in file systems.
const NAME_BYTES_MAX: usize = 255;

/// Why a path names no file of a repository; `None` if it does. The cost is that of the path's length.
pub(super) fn flaw_of(path: &str) -> Option<&'static str> {
    let mut levels = 0;
    for name in path.split('/') {
        levels += 1;
        if levels > LEVELS_MAX {
            return Some("it is more than 32 levels deep");
        }
        if name.is_empty() {
            return Some("a name between its slashes is empty");
        }
        if matches!(name, "." | "..") {
            return Some("it has . or .. as a name");
        }
        if name.len() > NAME_BYTES_MAX {
            return Some("a name in it is longer than 255 bytes");
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_files() {
        for path in ["a", "a/b.c", "a b/c%2F", "...", &"d/".repeat(31), &"n".repeat(255)] {
            assert_eq!(flaw_of(path.trim_end_matches('/')), None, "{path}");
        }
        for path in ["", "/a", "a/", "a//b", ".", "a/../b", &format!("{}f", "d/".repeat(32)), &"n".repeat(256)] {
            assert!(flaw_of(path).is_some(), "{path}");
        }
    }
}
