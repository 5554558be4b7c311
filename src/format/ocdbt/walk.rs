//! The way from the root to the wanted keys.
//!
//! ```
//! # use ckfs_format::{FormatError, ocdbt::{KeyRange, Manifest, NodeRef, Walk}};
//! # fn fetch(_: &[NodeRef]) -> Vec<Vec<u8>> { Vec::new() }
//! # fn list(manifest: &Manifest) -> Result<(), FormatError> {
//! let Some(version) = manifest.latest.as_ref() else { return Ok(()) };
//! let mut walk = Walk::new(version, vec![KeyRange::prefix(b"params.norm/")]);
//! loop {
//!     let nodes = walk.take_wanted(); // all of one level: independent of each other
//!     if nodes.is_empty() {
//!         return Ok(());
//!     }
//!     for (node, bytes) in nodes.iter().zip(fetch(&nodes)) {
//!         walk.read(node, &bytes, &mut |key, _| println!("{key:?}"))?;
//!     }
//! }
//! # }
//! ```

use super::{
    cursor::Block,
    manifest::Version,
    node::{Node, NodeRef, NodeValue},
};
use crate::FormatError;

/// Most nodes that one walk reads. A node may be referred to many times, so that few bytes could make a tree without end.
pub(crate) const NODES_MAX: u64 = 1 << 20;

/// Most keys that one walk finds.
const KEYS_MAX: u64 = 1 << 28;

/// A half-open range of keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyRange {
    start: Vec<u8>,
    end: Option<Vec<u8>>,
}

impl KeyRange {
    /// All keys.
    pub fn all() -> Self {
        Self { start: Vec::new(), end: None }
    }

    /// The keys that begin so.
    pub fn prefix(prefix: &[u8]) -> Self {
        // The next string that does not begin so: the last byte that can be raised is.
        let raised = prefix.iter().rposition(|byte| *byte < u8::MAX);
        let end = raised.map(|at| [&prefix[..at], &[prefix[at] + 1]].concat());
        Self { start: prefix.to_vec(), end }
    }

    /// This key alone.
    pub fn exact(key: &[u8]) -> Self {
        Self { start: key.to_vec(), end: Some([key, &[0]].concat()) }
    }

    fn ends_before(&self, key: &[u8]) -> bool {
        self.end.as_deref().is_some_and(|end| end <= key)
    }
}

/// A walk over the nodes of one version.
#[derive(Clone, Debug)]
pub struct Walk {
    /// Sorted by start, disjoint.
    ranges: Vec<KeyRange>,
    wanted: Vec<NodeRef>,
    nodes: u64,
    keys: u64,
}

impl Walk {
    /// A walk to the keys in any of `ranges`, which may overlap.
    pub fn new(version: &Version, mut ranges: Vec<KeyRange>) -> Self {
        ranges.sort_unstable();
        ranges.dedup_by(|next, kept| {
            let touches = !kept.ends_before(&next.start);
            if touches && kept.end.as_ref().is_some_and(|end| next.end.as_ref().is_none_or(|next| next > end)) {
                kept.end = next.end.take();
            }
            touches
        });
        let mut walk = Self { ranges, wanted: Vec::new(), nodes: 0, keys: 0 };
        walk.wanted = version.root.iter().filter(|_| walk.is_wanted(&[], None)).cloned().collect();
        walk
    }

    /// Takes the nodes that are to be read next, in the order of their keys. None are left when the walk is done.
    pub fn take_wanted(&mut self) -> Vec<NodeRef> {
        std::mem::take(&mut self.wanted)
    }

    /// Reads a node that [`Walk::take_wanted`] gave, of which `bytes` are the whole. Calls `found` for each wanted key in it, in
    /// order, with its value or where that is.
    ///
    /// # Errors
    /// [`FormatError`]: the node is damaged or not the one that was referred to, or there is more of the tree than is read.
    pub fn read(
        &mut self,
        reference: &NodeRef,
        bytes: &[u8],
        found: &mut dyn FnMut(&[u8], NodeValue<'_>),
    ) -> Result<(), FormatError> {
        let node = Node::parse(bytes, reference)?;
        for (key, value) in node.values() {
            if self.holds(key) {
                self.keys += 1;
                found(key, value);
            }
        }
        let children = node.children(|start, end| self.is_wanted(start, end));
        self.nodes += children.len() as u64;
        self.wanted.extend(children);
        for (what, found, limit) in [("nodes", self.nodes, NODES_MAX), ("keys", self.keys, KEYS_MAX)] {
            if found > limit {
                return Err(Block::Node.beyond(what, limit, found));
            }
        }
        Ok(())
    }

    /// The first range that does not end before `key`.
    fn range_at(&self, key: &[u8]) -> Option<&KeyRange> {
        self.ranges.get(self.ranges.partition_point(|range| range.ends_before(key)))
    }

    fn holds(&self, key: &[u8]) -> bool {
        self.range_at(key).is_some_and(|range| range.start.as_slice() <= key)
    }

    fn is_wanted(&self, start: &[u8], end: Option<&[u8]>) -> bool {
        self.range_at(start).is_some_and(|range| end.is_none_or(|end| range.start.as_slice() < end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(ranges: Vec<KeyRange>) -> Walk {
        Walk::new(&Version { generation: 1, root: None }, ranges)
    }

    #[test]
    fn ranges_are_merged_and_searched() {
        let ranges =
            vec![KeyRange::prefix(b"b/"), KeyRange::exact(b"d"), KeyRange::prefix(b"b/x"), KeyRange::exact(b"a")];
        let walk = walk(ranges);
        assert_eq!(walk.ranges.len(), 3);
        for (key, held) in [
            ("a", true),
            ("a0", false),
            ("b", false),
            ("b/", true),
            ("b/zz", true),
            ("b0", false),
            ("d", true),
            ("d\0", false),
            ("e", false),
        ] {
            assert_eq!(walk.holds(key.as_bytes()), held, "{key}");
        }
        assert!(walk.is_wanted(b"a0", Some(b"b0")));
        assert!(!walk.is_wanted(b"a0", Some(b"b/")));
        assert!(walk.is_wanted(b"c", None));
        assert!(!walk.is_wanted(b"e", None));
    }

    #[test]
    fn prefixes_have_ends() {
        assert_eq!(KeyRange::prefix(b"a\xff").end.unwrap(), b"b");
        assert_eq!(KeyRange::prefix(b"\xff").end, None);
        assert_eq!(KeyRange::prefix(b""), KeyRange::all());
        assert!(walk(vec![KeyRange::all(), KeyRange::exact(b"x")]).holds(b"zzz"));
        assert!(!walk(Vec::new()).is_wanted(b"", None));
    }
}
