//! Paths that come from input: of a repository's index, of a listing, of a checkpoint's metadata.

use std::ops::Deref;

/// Greatest number of components, as of a directory that is listed on this machine.
const LEVELS_MAX: usize = 32;
/// Longest name of a file or directory, as in file systems.
const NAME_BYTES_MAX: usize = 255;

/// The path of a file or directory inside another: components between single slashes, none of which is empty, `.` or `..`, or
/// longer than a file system allows. It has no NUL and no backslash, which is a separator elsewhere.
///
/// ```
/// use ckfs_host::RelativePath;
///
/// assert_eq!(RelativePath::parse("a/b.safetensors").unwrap().as_str(), "a/b.safetensors");
/// assert_eq!(RelativePath::parse("../b").unwrap_err().to_string(), "it has . or .. as a name");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RelativePath<'a>(&'a str);

/// Why a text is no [`RelativePath`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PathFlaw(
    /// In words, about "it".
    pub &'static str,
);

impl PathFlaw {
    const DEEP: Self = Self("it is more than 32 levels deep");
}

impl<'a> RelativePath<'a> {
    /// The path that a text is. The cost is that of its length.
    ///
    /// # Errors
    /// [`PathFlaw`], the first that is met.
    pub fn parse(text: &'a str) -> Result<Self, PathFlaw> {
        if text.is_empty() {
            return Err(PathFlaw("it is empty"));
        }
        if text.starts_with('/') {
            return Err(PathFlaw("it begins with a slash"));
        }
        if text.contains(['\0', '\\']) {
            return Err(PathFlaw("it has a NUL or a backslash"));
        }
        for (level, name) in text.split('/').enumerate() {
            if level == LEVELS_MAX {
                return Err(PathFlaw::DEEP);
            }
            match name {
                "" => return Err(PathFlaw("a name between its slashes is empty")),
                "." | ".." => return Err(PathFlaw("it has . or .. as a name")),
                _ if name.len() > NAME_BYTES_MAX => return Err(PathFlaw("a name in it is longer than 255 bytes")),
                _ => {}
            }
        }
        Ok(Self(text))
    }

    /// The path of a file or directory directly inside the other: one component.
    ///
    /// # Errors
    /// [`PathFlaw`]; of a path with several components that it is deep.
    pub fn parse_name(text: &'a str) -> Result<Self, PathFlaw> {
        if text.contains('/') { Err(PathFlaw::DEEP) } else { Self::parse(text) }
    }

    /// Its text.
    pub const fn as_str(self) -> &'a str {
        self.0
    }
}

impl Deref for RelativePath<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Component, Path};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_flaw_has_its_name() {
        for path in ["a", "a/b.c", "a b/c%2F", "...", &"d/".repeat(31), &"n".repeat(255)] {
            let path = path.trim_end_matches('/');
            assert_eq!(RelativePath::parse(path).map(RelativePath::as_str), Ok(path));
        }
        for (path, flaw) in [
            ("", "it is empty"),
            ("/a", "it begins with a slash"),
            ("a/", "a name between its slashes is empty"),
            ("a//b", "a name between its slashes is empty"),
            (".", "it has . or .. as a name"),
            ("a/../b", "it has . or .. as a name"),
            ("a\\b", "it has a NUL or a backslash"),
            ("a\0", "it has a NUL or a backslash"),
            (&format!("{}f", "d/".repeat(32)), PathFlaw::DEEP.0),
            (&"n".repeat(256), "a name in it is longer than 255 bytes"),
        ] {
            assert_eq!(RelativePath::parse(path), Err(PathFlaw(flaw)), "{path:?}");
        }
        assert_eq!(RelativePath::parse_name("a/b"), Err(PathFlaw::DEEP));
    }

    proptest! {
        /// What is accepted leads into the directory that it is joined to, and nowhere else, and is written in one way only.
        #[test]
        fn an_accepted_path_stays_inside(text in r"([a-z.~ ]{0,3}|\.|\.\.|/|\\|\x00|//){0,8}") {
            let Ok(path) = RelativePath::parse(&text) else { return Ok(()) };
            let components: Vec<Component<'_>> = Path::new(path.as_str()).components().collect();
            prop_assert!(components.iter().all(|component| matches!(component, Component::Normal(_))));
            let names: Vec<&str> = components.iter().filter_map(|component| component.as_os_str().to_str()).collect();
            prop_assert_eq!(names.join("/"), text.clone());
            prop_assert!(Path::new("/root/of").join(path.as_str()).starts_with("/root/of"));
        }

        /// What is refused has a component that leads elsewhere or cannot be a name.
        #[test]
        fn a_path_of_plain_names_is_accepted(names in prop::collection::vec("[a-zA-Z0-9_ .-]{1,40}", 1..32)) {
            let is_plain = names.iter().all(|name| name != "." && name != "..");
            prop_assert_eq!(RelativePath::parse(&names.join("/")).is_ok(), is_plain);
        }
    }
}
