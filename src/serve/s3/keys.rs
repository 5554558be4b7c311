//! The keys of a bucket in their order, from any place on: paths of a tree, of which only what is listed is looked at.
//!
//! Keys are ordered by their bytes. In a directory `a` the keys begin with `a/`, so `a.x` comes before them: entries are ordered by
//! their name, with a slash for directories.

use std::{num::NonZeroUsize, sync::Arc};

use ckfs_source::digest::hexadecimal;
use ckfs_volume::{Attr, Ino, NodeKind};
use lru::LruCache;
use parking_lot::Mutex;

use super::super::{
    gate::Visitor,
    tree::{NoNode, ServedTree},
};

/// Directories with more entries stay in order in memory, for the next page.
const REMEMBERED_ENTRIES_MIN: usize = 1000;

/// How many of them.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4).expect("not zero");

/// An entry by its part of keys.
#[derive(Debug)]
struct KeyEntry {
    /// Its name, with a slash for a directory.
    part: String,
    ino: Ino,
    is_directory: bool,
}

/// A directory, and whether all of it is shown.
type SortedPlace = (Ino, bool);

/// Large directories that were listed lately, in order.
#[derive(Debug)]
pub(crate) struct SortedDirectories(Mutex<LruCache<SortedPlace, Arc<[KeyEntry]>>>);

impl Default for SortedDirectories {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(REMEMBERED)))
    }
}

impl SortedDirectories {
    fn of(&self, tree: &ServedTree, visitor: Visitor, directory: Ino) -> Result<Arc<[KeyEntry]>, NoNode> {
        let place = (directory, visitor == Visitor::Trusted);
        let known = || self.0.lock();
        if let Some(entries) = known().get(&place) {
            return Ok(Arc::clone(entries));
        }
        let mut found = Vec::new();
        // A link leads to files that have keys of their own; an object is found by it nevertheless.
        for entry in tree.without_links(visitor, directory)? {
            let is_directory = entry.kind == NodeKind::Directory;
            let part = if is_directory { format!("{}/", entry.name) } else { entry.name };
            found.push(KeyEntry { part, ino: entry.ino, is_directory });
        }
        found.sort_by(|left, right| left.part.cmp(&right.part));
        let found: Arc<[KeyEntry]> = found.into();
        if found.len() >= REMEMBERED_ENTRIES_MIN && tree.fs.is_fixed(directory) {
            known().put(place, Arc::clone(&found));
        }
        Ok(found)
    }
}

/// Where a list begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListStart {
    /// After this key.
    pub(super) text: String,
    /// Whether it is after all keys that begin with it, too.
    pub(super) is_prefix: bool,
}

impl ListStart {
    /// The place that a token names.
    pub(super) fn of_token(token: &str) -> Option<Self> {
        let (kind, digits) = token.split_at_checked(1)?;
        if !matches!(kind, "k" | "p") || !digits.is_ascii() || digits.len() % 2 != 0 {
            return None;
        }
        let bytes: Option<Vec<u8>> =
            (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).ok()).collect();
        Some(Self { text: String::from_utf8(bytes?).ok()?, is_prefix: kind == "p" })
    }

    /// A token for this place.
    pub(super) fn token(&self) -> String {
        let kind = if self.is_prefix { "p" } else { "k" };
        kind.to_owned() + &hexadecimal(self.text.as_bytes())
    }
}

/// A row of a list.
#[derive(Clone, Debug)]
pub(super) struct KeyRow {
    pub(super) key: String,
    /// Those of an object; `None` of what all keys of a directory begin with.
    pub(super) attr: Option<Attr>,
}

/// The rows of a list, and where the next one begins if there is more.
#[derive(Debug, Default)]
pub(super) struct ListedKeys {
    pub(super) rows: Vec<KeyRow>,
    pub(super) next: Option<ListStart>,
}

/// Makes one list of at most `max` rows of keys that begin with `prefix`; `delimited`, directories below it are one row.
pub(super) struct KeyLister<'a> {
    pub(super) tree: &'a ServedTree,
    pub(super) sorted: &'a SortedDirectories,
    pub(super) visitor: Visitor,
    pub(super) prefix: &'a str,
    pub(super) delimited: bool,
    pub(super) max: usize,
}

impl KeyLister<'_> {
    /// The list from a place on.
    ///
    /// # Errors
    /// [`NoNode::Failed`]: a list without some of the keys would say that these are not there. [`NoNode::Denied`].
    pub(super) fn list(&self, start: &ListStart) -> Result<ListedKeys, NoNode> {
        let mut listed = ListedKeys::default();
        if self.max > 0 {
            self.walk(Ino::ROOT, "", start, &mut listed)?;
        }
        Ok(listed)
    }

    /// Adds the keys below a directory. Whether there is room for more.
    fn walk(&self, directory: Ino, above: &str, start: &ListStart, listed: &mut ListedKeys) -> Result<bool, NoNode> {
        if !self.visitor.may_list(&self.tree.fs.attr(directory)?) {
            // What was asked for is in it; else it is left out, as in every other list.
            return if self.prefix.starts_with(above) { Err(NoNode::Denied) } else { Ok(true) };
        }
        for entry in self.sorted.of(self.tree, self.visitor, directory)?.iter() {
            let key = format!("{above}{}", entry.part);
            let goes_on = if !entry.is_directory {
                if !key.starts_with(self.prefix) || !is_after(&key, start) {
                    continue;
                }
                let attr = Some(self.tree.fs.attr(entry.ino)?);
                self.add(KeyRow { key, attr }, listed)
            } else if !has_more(&key, start) || !(key.starts_with(self.prefix) || self.prefix.starts_with(&key)) {
                continue;
            } else if self.delimited && key.len() > self.prefix.len() {
                if !self.holds_keys(entry.ino)? {
                    continue;
                }
                self.add(KeyRow { key, attr: None }, listed)
            } else {
                self.walk(entry.ino, &key, start, listed)?
            };
            if !goes_on {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether there is a key below a directory: one of links only has none.
    fn holds_keys(&self, directory: Ino) -> Result<bool, NoNode> {
        let readable = self.visitor.may_list(&self.tree.fs.attr(directory)?);
        // A step that is not planned need not be for this: every step has files.
        if !readable || !self.tree.fs.is_fixed(directory) {
            return Ok(readable);
        }
        let entries = self.sorted.of(self.tree, self.visitor, directory)?;
        for entry in entries.iter() {
            if !entry.is_directory || self.holds_keys(entry.ino)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Adds a row, if there is room for it.
    fn add(&self, row: KeyRow, listed: &mut ListedKeys) -> bool {
        if listed.rows.len() < self.max {
            listed.rows.push(row);
            return true;
        }
        let last = listed.rows.last();
        listed.next = last.map(|row| ListStart { text: row.key.clone(), is_prefix: row.attr.is_none() });
        false
    }
}

/// Whether a key comes after the start of a list.
fn is_after(key: &str, ListStart { text, is_prefix }: &ListStart) -> bool {
    key > text.as_str() && !(*is_prefix && key.starts_with(text))
}

/// Whether some keys that begin with `prefix` may come after the start of a list.
fn has_more(prefix: &str, ListStart { text, is_prefix }: &ListStart) -> bool {
    !(*is_prefix && prefix.starts_with(text)) && (prefix > text.as_str() || text.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use std::{ops::ControlFlow, time::SystemTime};

    use ckfs_source::{ReadFailure, Replied, Served};
    use ckfs_volume::{
        BUFFER_BYTES, DirEntry, FileSystem, FsError, Handle, Metrics, NodeScope, Nodes, NodesRef, OpenedFile,
        Permission, StatFs, Upkeep,
    };

    use super::{
        super::super::{reads::ServedReads, tree::TreeVersion},
        *,
    };

    /// Two directories, 2 and 3, with one file each, 12 and 13; of one node the attributes cannot be told.
    struct Steps {
        gone: Ino,
        metrics: Metrics,
    }

    impl Nodes for Steps {
        fn lookup(&self, _: Ino, _: &[u8]) -> Result<Attr, FsError> {
            Err(FsError::NotFound)
        }

        fn attr(&self, ino: Ino) -> Result<Attr, FsError> {
            let kind = if ino.0 > 10 { NodeKind::File } else { NodeKind::Directory };
            let permission = Permission { uid: 0, gid: 0, mode: 0o555 };
            let (modified, buffer_bytes) = (SystemTime::UNIX_EPOCH, BUFFER_BYTES);
            let attr = Attr { ino, kind, size_bytes: 1, links: 1, modified, permission, buffer_bytes };
            if ino == self.gone { Err(FsError::Io) } else { Ok(attr) }
        }

        fn read_dir(
            &self,
            dir: Ino,
            from: u64,
            each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
        ) -> Result<(), FsError> {
            let steps = [("1", Ino(2), NodeKind::Directory), ("9", Ino(3), NodeKind::Directory)];
            let file = [("file", Ino(dir.0 + 10), NodeKind::File)];
            let entries: &[_] = if dir == Ino::ROOT { &steps } else { &file };
            // Numbers of entries that have gone are not used again.
            for (number, (name, ino, kind)) in (0..).step_by(7).zip(entries).filter(|(number, _)| *number >= from) {
                if each(DirEntry { name: name.as_bytes(), ino: *ino, kind: *kind, next: Some(number + 1) }).is_break() {
                    break;
                }
            }
            Ok(())
        }

        fn parent(&self, _: Ino) -> Result<Ino, FsError> {
            Ok(Ino::ROOT)
        }

        fn read_link(&self, _: Ino) -> Result<Vec<u8>, FsError> {
            Err(FsError::Invalid)
        }

        fn xattr(&self, _: Ino, _: &[u8]) -> Result<Vec<u8>, FsError> {
            Err(FsError::NoAttribute)
        }

        fn xattr_names(&self, _: Ino) -> Result<Vec<Vec<u8>>, FsError> {
            Ok(Vec::new())
        }

        fn stat_fs(&self) -> StatFs {
            StatFs { total_bytes: 0, nodes: 0 }
        }
    }

    impl FileSystem for Steps {
        fn nodes(&self, _: Ino, _: NodeScope) -> Option<NodesRef<'_>> {
            Some(NodesRef::All(self))
        }

        fn open(&self, _: Ino) -> Result<OpenedFile, FsError> {
            Err(FsError::Invalid)
        }

        fn read(
            &self,
            _: Ino,
            _: Handle,
            _: u64,
            _: usize,
            _: &mut dyn FnMut(Served<'_>) -> Replied,
        ) -> Result<Replied, ReadFailure<FsError>> {
            Err(FsError::Invalid.into())
        }

        fn release(&self, _: Ino, _: Handle) {}
    }

    impl Upkeep for Steps {
        fn metrics(&self) -> &Metrics {
            &self.metrics
        }
    }

    #[test]
    fn a_directory_with_gaps_in_parts_has_each_entry_once() {
        let reads = ServedReads::new(Arc::new(Steps { gone: Ino(99), metrics: Metrics::default() }), 1).unwrap();
        let tree = ServedTree::new(&Arc::new(reads), TreeVersion::Run(Box::new(|_| None)));
        let (mut names, mut from) = (Vec::new(), Some(0));
        while let Some(start) = from {
            let (entries, next) = tree.entries(Visitor::Trusted, Ino::ROOT, start, 1).unwrap();
            names.extend(entries.into_iter().map(|entry| entry.name));
            from = next;
        }
        assert_eq!(names, ["1", "9"]);
    }

    #[test]
    fn a_list_that_loses_a_step_fails_and_does_not_end_early() {
        let listed = |gone: Ino, delimited: bool| {
            let fs: Arc<dyn Upkeep> = Arc::new(Steps { gone, metrics: Metrics::default() });
            let reads = Arc::new(ServedReads::new(Arc::clone(&fs), 1).unwrap());
            let tree = ServedTree::new(&reads, TreeVersion::Run(Box::new(|_| None)));
            let sorted = SortedDirectories::default();
            let (tree, sorted, visitor) = (&tree, &sorted, Visitor::Trusted);
            let lister = KeyLister { tree, sorted, visitor, prefix: "", delimited, max: 10 };
            let listed = lister.list(&ListStart { text: String::new(), is_prefix: false })?;
            Ok(listed.rows.into_iter().map(|row| row.key).collect::<Vec<_>>())
        };
        assert_eq!(listed(Ino(99), false), Ok(vec!["1/file".to_owned(), "9/file".to_owned()]));
        assert_eq!(listed(Ino(99), true), Ok(vec!["1/".to_owned(), "9/".to_owned()]));
        // A directory, and a file of one.
        for (gone, delimited) in [(Ino(2), false), (Ino(12), false), (Ino(2), true)] {
            assert_eq!(listed(gone, delimited), Err(NoNode::failed()), "{gone:?} {delimited}");
        }
    }

    #[test]
    fn tokens_read_back_and_others_are_refused() {
        for (text, is_prefix) in [("a/ü", false), ("dev0/", true)] {
            let start = ListStart { text: text.to_owned(), is_prefix };
            assert_eq!(ListStart::of_token(&start.token()), Some(start));
        }
        for token in ["", "k1", "x61", "kzz", "kü", "kff", "k6"] {
            assert_eq!(ListStart::of_token(token), None, "{token}");
        }
    }

    #[test]
    fn a_directory_is_passed_over_when_all_its_keys_come_before() {
        let start = |is_prefix| move |key: &str| ListStart { text: key.to_owned(), is_prefix };
        let (after, done) = (start(false), start(true));
        for (start, prefix, expected) in [
            (after(""), "a/", true),
            (after("a/x"), "a/", true),
            (after("a/"), "a/", true),
            (after("b"), "a/", false),
            (after("a.x"), "a/", true),
            (after("a/x/y"), "a/w/", false),
            (done("a/"), "a/", false),
            (done("a/"), "a/b/", false),
            (done("a/"), "b/", true),
            (done("a/b/"), "a/", true),
        ] {
            assert_eq!(has_more(prefix, &start), expected, "{start:?} {prefix}");
        }
        assert!(is_after("b", &done("a/")) && !is_after("a/x", &done("a/")) && !is_after("a", &after("a")));
    }
}
