//! Paths of requests as names of nodes.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// What is written as it is in a path.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// A path that names nothing: `..`, a slash or NUL inside a name, or no UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MalformedPath;

/// The text of one component.
///
/// # Errors
/// It is no UTF-8, or has NUL.
pub(super) fn decoded(component: &str) -> Result<String, MalformedPath> {
    let text = percent_decode_str(component).decode_utf8().map_err(|_| MalformedPath)?;
    if text.contains('\0') { Err(MalformedPath) } else { Ok(text.into_owned()) }
}

/// The names of a path, each decoded once. Empty ones are left out.
///
/// # Errors
/// A name is `.` or `..` or has a slash, however it is written: nothing of a volume has such a name.
pub(super) fn names(path: &str) -> Result<Vec<String>, MalformedPath> {
    let name = |component: &str| {
        let name = decoded(component)?;
        if name == "." || name == ".." || name.contains('/') { Err(MalformedPath) } else { Ok(name) }
    };
    path.split('/').filter(|component| !component.is_empty()).map(name).collect()
}

/// A path with everything escaped that means something in an address, slashes between names excepted.
pub(super) fn encoded(path: &str) -> String {
    path.split('/').map(|name| utf8_percent_encode(name, PLAIN).to_string()).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded_once_and_lead_nowhere_else() {
        for (path, expected) in [
            ("", &[][..]),
            ("/", &[]),
            ("a/b", &["a", "b"]),
            ("a//b/", &["a", "b"]),
            ("a%20b/%C3%BC", &["a b", "ü"]),
            ("mesh/fsdp=0,tensor=1", &["mesh", "fsdp=0,tensor=1"]),
            ("mesh/fsdp%3D0", &["mesh", "fsdp=0"]),
            ("a%252e%252e", &["a%2e%2e"]),
            ("..a/...", &["..a", "..."]),
            ("a+b", &["a+b"]),
            ("%", &["%"]),
        ] {
            assert_eq!(names(path).unwrap(), expected, "{path}");
        }
        for path in ["..", "a/../b", "%2e%2e/x", ".%2E", "a/./b", "%2e", "a%2Fb", "a%2f..%2f..", "%00", "a%00b", "%ff"]
        {
            assert_eq!(names(path), Err(MalformedPath), "{path}");
        }
        assert_eq!(decoded("refs%2Fpr%2F1").unwrap(), "refs/pr/1");
    }

    #[test]
    fn an_encoded_path_reads_back() {
        for path in ["dev0/layers/scanned/wq", "mesh/fsdp=0,tensor=1", "a b/ü?#%/&<>\"'"] {
            assert_eq!(names(&encoded(path)).unwrap().join("/"), path);
        }
        assert_eq!(encoded("a b/c"), "a%20b/c");
    }
}
