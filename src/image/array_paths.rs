//! Directories above arrays whose names have slashes. Orbax joins the keys of an array by dots, and stores it at the path that
//! comes out: `params.mlp/linear.w` is `linear.w` in the directory `params.mlp`.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::name_tree::NAME_BYTES_MAX;

/// A directory above arrays.
#[derive(Debug, Default)]
pub(super) struct Above {
    /// Its path from the directory of all arrays.
    path: String,
    /// The directory that has it; `None` is the directory of all arrays.
    pub(super) parent: Option<usize>,
    /// Numbers of the directories in it, by name.
    pub(super) directories: Vec<usize>,
    /// Numbers of the arrays in it, by name.
    pub(super) arrays: Vec<usize>,
}

impl Above {
    /// Its own name.
    pub(super) fn name(&self) -> &str {
        last(&self.path)
    }
}

/// The last part of a path.
pub(super) fn last(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, last)| last)
}

/// All directories above arrays.
#[derive(Debug, Default)]
pub(super) struct ArrayPaths {
    pub(super) directories: Vec<Above>,
    /// Those in the directory of all arrays, by name.
    pub(super) top: Vec<usize>,
    /// By the number of an array.
    of_array: HashMap<usize, usize>,
}

impl ArrayPaths {
    /// The directories above arrays with these names, which are sorted.
    pub(super) fn new<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let mut paths = Self::default();
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        for (array, name) in names.enumerate() {
            let Some((path, _)) = name.rsplit_once('/') else { continue };
            let directory = paths.directory(path, &mut numbers);
            paths.directories[directory].arrays.push(array);
            paths.of_array.insert(array, directory);
        }
        paths
    }

    fn directory(&mut self, path: &str, numbers: &mut BTreeMap<String, usize>) -> usize {
        if let Some(number) = numbers.get(path) {
            return *number;
        }
        let parent = path.rsplit_once('/').map(|(parent, _)| self.directory(parent, numbers));
        let number = self.directories.len();
        self.directories.push(Above { path: path.to_owned(), parent, ..Above::default() });
        match parent {
            Some(parent) => self.directories[parent].directories.push(number),
            None => self.top.push(number),
        }
        numbers.insert(path.to_owned(), number);
        number
    }

    /// The directory that has an array; `None` is the directory of all arrays.
    pub(super) fn of_array(&self, array: usize) -> Option<usize> {
        self.of_array.get(&array).copied()
    }

    /// The directories in one of these, or in that of all arrays.
    pub(super) fn inside(&self, directory: Option<usize>) -> &[usize] {
        directory.map_or(&self.top, |directory| &self.directories[directory].directories)
    }

    /// The directory of this name in one of these, or in that of all arrays.
    pub(super) fn find(&self, directory: Option<usize>, name: &[u8]) -> Option<usize> {
        let mut inside = self.inside(directory).iter().copied();
        inside.find(|number| self.directories[*number].name().as_bytes() == name)
    }
}

/// Whether an array can be stored at the path that its name is.
fn is_path(name: &str) -> bool {
    let fits = |part: &str| !matches!(part, "" | "." | "..") && part.len() <= NAME_BYTES_MAX;
    !name.contains('\0') && name.split('/').all(fits)
}

/// The names of arrays with those replaced by their escaped forms that are no paths, or would be inside another array.
pub(super) fn with_paths(names: Vec<(String, String)>) -> Vec<String> {
    let clashes = {
        let all: HashSet<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
        let is_inside = |name: &str| name.match_indices('/').any(|(at, _)| all.contains(&name[..at]));
        names.iter().map(|(name, _)| !is_path(name) || is_inside(name)).collect::<Vec<_>>()
    };
    names.into_iter().zip(clashes).map(|((name, escaped), clashes)| if clashes { escaped } else { name }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_are_directories_where_they_can_be() {
        let rows: [(&[&str], &[&str]); 4] = [
            (&["a/b", "a/c.d", "e"], &["a/b", "a/c.d", "e"]),
            (&["a", "a/b", "a.b/c"], &["a", "a%2Fb", "a.b/c"]),
            (&["/a", "a//b", "../x", "x/..", "a/./b", "..."], &["%/a", "a%/%/b", "%", "%", "%", "..."]),
            (&["100%", "a\0"], &["100%", "%"]),
        ];
        for (names, expected) in rows {
            let escaped = |name: &str| match name {
                "a/b" => "a%2Fb",
                "/a" => "%/a",
                "a//b" => "a%/%/b",
                _ => "%",
            };
            let found = with_paths(names.iter().map(|name| ((*name).to_owned(), escaped(name).to_owned())).collect());
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn directories_have_arrays_and_directories() {
        let names = ["a", "b/c/d", "b/c/e", "b/f", "g"];
        let paths = ArrayPaths::new(names.into_iter());
        assert_eq!(paths.top.len(), 1);
        let b = paths.find(None, b"b").unwrap();
        let c = paths.find(Some(b), b"c").unwrap();
        assert_eq!((&*paths.directories[b].arrays, &*paths.directories[c].arrays), (&[3][..], &[1, 2][..]));
        assert_eq!((paths.of_array(0), paths.of_array(2)), (None, Some(c)));
        assert_eq!((paths.directories[c].parent, paths.directories[c].name()), (Some(b), "c"));
        assert_eq!(paths.find(None, b"c"), None);
    }
}
