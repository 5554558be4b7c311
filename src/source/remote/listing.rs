//! A listing while its pages come: bounded, and with each path once.

use std::collections::BTreeMap;

use super::interface::RemoteFile;

/// Most objects below a prefix.
const OBJECTS_MAX: usize = 100_000;
/// Most pages of a listing. A page has 1000 objects at most services.
const PAGES_MAX: usize = 250;
/// Most pages in a row without an object. Those of deleted objects may be empty.
const EMPTY_PAGES_MAX: usize = 100;
/// Objects that a message names.
const SHOWN: usize = 3;

/// An object that is passed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PassedOver {
    pub(super) key: String,
    pub(super) reason: &'static str,
}

/// The files of the pages so far.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    pub(super) files: BTreeMap<String, RemoteFile>,
    passed: Vec<PassedOver>,
    pages: usize,
    empty: usize,
}

impl Gathered {
    /// Adds a page, which has so many `others` besides, such as directories.
    ///
    /// # Errors
    /// The listing has no end, or more objects than a repository has.
    pub(super) fn add(&mut self, files: Vec<RemoteFile>, passed: Vec<PassedOver>, others: usize) -> Result<(), String> {
        self.pages += 1;
        self.empty = if files.is_empty() && others == 0 { self.empty + 1 } else { 0 };
        if self.pages > PAGES_MAX || self.empty > EMPTY_PAGES_MAX {
            let (pages, count) = (self.pages, self.files.len());
            return Err(format!("{pages} pages with {count} objects, and no end: the service lists without end"));
        }
        self.passed.extend(passed);
        for file in files {
            if let Some(twice) = self.files.insert(file.path.clone(), file) {
                return Err(format!("the service lists {:?} twice", twice.key));
            }
        }
        if self.files.len() + self.passed.len() > OBJECTS_MAX {
            return Err(format!("more than {OBJECTS_MAX} objects: not a model repository"));
        }
        Ok(())
    }

    /// What there is so far, in words.
    pub(super) fn so_far(&self) -> String {
        format!("{} objects in {} pages so far", self.files.len(), self.pages)
    }

    /// The files, sorted by path, and what is passed over. An object at the path of a directory is no file.
    pub(super) fn finish(mut self) -> (Vec<RemoteFile>, Vec<PassedOver>) {
        let is_directory = |path: &str| {
            let below = format!("{path}/");
            self.files.range(below.clone()..).next().is_some_and(|(next, _)| next.starts_with(&below))
        };
        let directories: Vec<String> = self.files.keys().filter(|path| is_directory(path)).cloned().collect();
        for path in directories {
            if let Some(file) = self.files.remove(&path).filter(|file| file.size_bytes > 0) {
                self.passed.push(PassedOver { key: file.key, reason: "objects below it make it a directory" });
            }
        }
        // As Hadoop marks a directory.
        self.files.retain(|path, file| file.size_bytes > 0 || !path.ends_with("_$folder$"));
        (self.files.into_values().collect(), self.passed)
    }
}

/// The warnings about skipped objects.
pub(super) fn passed_text(passed: &[PassedOver]) -> Option<String> {
    let shown: Vec<String> = passed
        .iter()
        .take(SHOWN)
        .map(|PassedOver { key, reason }| format!("{:?} ({reason})", key.chars().take(120).collect::<String>()))
        .collect();
    let more = passed.len().saturating_sub(shown.len());
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!passed.is_empty()).then(|| format!("objects whose keys name no file are passed over: {}{more}", shown.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::{super::interface::Content, *};

    fn file(path: &str, size_bytes: u64) -> RemoteFile {
        RemoteFile {
            path: path.to_owned(),
            key: format!("p/{path}"),
            size_bytes,
            content: Content::Version { object: path.to_owned(), version: "1".to_owned() },
            etag: None,
            modified_seconds: None,
        }
    }

    #[test]
    fn objects_in_place_of_directories_are_no_files() {
        let mut listing = Gathered::default();
        let objects =
            [("original", 0), ("original/a", 1), ("original-b", 1), ("d", 5), ("d/x", 1), ("e_$folder$", 0), ("f", 0)];
        listing.add(objects.iter().map(|(path, size)| file(path, *size)).collect(), Vec::new(), 0).unwrap();
        let (files, passed) = listing.finish();
        let paths: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["d/x", "f", "original-b", "original/a"]);
        let text = passed_text(&passed).unwrap();
        assert!(text.contains("\"p/d\" (objects below it make it a directory)"), "{text}");
        assert_eq!(passed_text(&[]), None);
    }

    #[test]
    fn many_pages_of_directories_are_no_end() {
        let mut listing = Gathered::default();
        (0..2 * EMPTY_PAGES_MAX).for_each(|_| listing.add(Vec::new(), Vec::new(), 1000).unwrap());
        listing.add(vec![file("a", 1)], Vec::new(), 0).unwrap();
        assert_eq!(listing.files.len(), 1);
    }

    #[test]
    fn a_listing_without_end_is_refused() {
        let mut listing = Gathered::default();
        listing.add(vec![file("a", 1)], Vec::new(), 0).unwrap();
        let error = listing.add(vec![file("a", 1)], Vec::new(), 0).unwrap_err();
        assert!(error.contains("twice"), "{error}");
        let mut listing = Gathered::default();
        let error = (0..=EMPTY_PAGES_MAX).find_map(|_| listing.add(Vec::new(), Vec::new(), 0).err()).unwrap();
        assert!(error.contains("without end"), "{error}");
        let mut listing = Gathered::default();
        let add = |number: usize| listing.add(vec![file(&number.to_string(), 1)], Vec::new(), 0).err();
        let error = (0..=PAGES_MAX).find_map(add).unwrap();
        assert!(error.contains("without end"), "{error}");
    }
}
