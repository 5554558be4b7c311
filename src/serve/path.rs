//! Paths of requests as names of nodes.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// What is written as it is in a path.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// The text of one component; `None` if it is no UTF-8, or has NUL.
pub(super) fn decoded(component: &str) -> Option<String> {
    let text = percent_decode_str(component).decode_utf8().ok()?;
    (!text.contains('\0')).then(|| text.into_owned())
}

/// The names of a path, each decoded once. Empty ones are left out. `None` if a name is `.` or `..` or has a slash, however it is
/// written: nothing of a volume has such a name.
pub(super) fn names(path: &str) -> Option<Vec<String>> {
    let is_name = |name: &String| name != "." && name != ".." && !name.contains('/');
    let components = path.split('/').filter(|component| !component.is_empty());
    components.map(|component| decoded(component).filter(is_name)).collect()
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
            assert_eq!(names(path), None, "{path}");
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
