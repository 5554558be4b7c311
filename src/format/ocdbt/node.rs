//! Nodes of the B+tree.
//!
//! Keys are stored without what they share with the key before, and without what the nodes above say that all keys below
//! share. Here they are whole.

use std::ops::Range;

use ckfs_host::parse_room::{HeldRoom, ParseRoom, ParseRoomFull};

use super::{
    cursor::{Block, Cursor},
    envelope,
    files::{BlobLocation, FileTable},
};
use crate::FormatError;

/// Longest key, in bytes.
pub(crate) const KEY_BYTES_MAX: u16 = u16::MAX;

/// Most bytes of all keys of one node. A key takes a few bytes of the node and may be 64 KiB long.
const KEYS_BYTES_MAX: usize = 256 << 20;

/// Most entries of one node, as the format has it.
const ENTRIES_MAX: u64 = 1 << 20;
/// Bytes that an entry takes in memory besides its key.
const ROW_BYTES: usize = 128;

/// Longest value inside a node, in bytes, as the format has it.
const INLINE_BYTES_MAX: u64 = 1 << 20;

/// A reference to a node, with what is known of it before it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRef {
    /// Where the node is.
    pub location: BlobLocation,
    /// Levels below it: 0 for a leaf.
    pub height: u8,
    /// What all keys below begin with, and their nodes do not repeat.
    prefix: Vec<u8>,
    /// No key below is less.
    pub(super) start: Vec<u8>,
    /// All keys below are less, if given.
    pub(super) end: Option<Vec<u8>>,
}

impl NodeRef {
    /// The root of a version.
    pub(super) fn root(location: BlobLocation, height: u8) -> Self {
        Self { location, height, prefix: Vec::new(), start: Vec::new(), end: None }
    }
}

/// The value of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeValue<'a> {
    /// These bytes.
    Inline(&'a [u8]),
    /// The bytes of this place.
    At(&'a BlobLocation),
}

/// A node that was read.
#[derive(Debug)]
pub(super) struct Node<'a> {
    reference: &'a NodeRef,
    keys: Vec<u8>,
    /// Where each key ends in `keys`.
    ends: Vec<usize>,
    inline: Vec<u8>,
    /// Of a leaf: places in the inline bytes, or in files.
    values: Vec<Result<Range<usize>, BlobLocation>>,
    /// Of an interior node, each with the number of bytes of its first key that are its prefix.
    children: Vec<(BlobLocation, usize)>,
    held: HeldRoom,
}

impl<'a> Node<'a> {
    /// Reads the node that `reference` refers to, which `bytes` are.
    pub(super) fn parse(bytes: &[u8], reference: &'a NodeRef) -> Result<Self, FormatError> {
        let expected = reference.location.len_bytes;
        if expected != bytes.len() as u64 {
            let (block, found) = (Block::Node, bytes.len());
            return Err(FormatError(format!("{block}: expected {expected} bytes by its header, found {found}")));
        }
        let body = envelope::open(bytes, Block::Node)?;
        let mut cursor = Cursor::new(&body, Block::Node);
        let height = cursor.byte("height")?;
        if height != reference.height {
            return Err(cursor.block.wrong("height", reference.height, height));
        }
        let files = FileTable::read(&mut cursor, &reference.location.base)?;
        let rows = cursor.count("number of entries", ENTRIES_MAX)?;
        if rows == 0 {
            return Err(cursor.block.wrong("number of entries", "at least 1", 0));
        }
        let mut node = Self {
            reference,
            keys: Vec::new(),
            ends: Vec::with_capacity(rows),
            inline: Vec::new(),
            values: Vec::new(),
            children: Vec::new(),
            held: ParseRoom::of_process().hold(),
        };
        node.hold(body.len() + rows * ROW_BYTES)?;
        let prefix_lens = node.read_keys(&mut cursor, rows, height > 0)?;
        if height > 0 {
            node.children = read_children(&mut cursor, &files, prefix_lens)?;
        } else {
            node.read_values(&mut cursor, &files, rows)?;
        }
        cursor.end()?;
        Ok(node)
    }

    /// Counts bytes that the node takes in memory.
    fn hold(&mut self, bytes: usize) -> Result<(), FormatError> {
        let what = "bytes of memory of all nodes that are read now";
        let full = |ParseRoomFull { found, limit }| Block::Node.beyond(what, limit, found);
        self.held.grow(bytes as u64).map_err(full)
    }

    /// Reads the keys. Gives, for an interior node, how much of each key its child does not repeat.
    fn read_keys(
        &mut self,
        cursor: &mut Cursor<'_>,
        rows: usize,
        is_interior: bool,
    ) -> Result<Vec<usize>, FormatError> {
        let mut shared = vec![0];
        shared.extend(cursor.lengths(rows - 1, "key prefix length", KEY_BYTES_MAX)?);
        let suffixes = cursor.lengths(rows, "key suffix length", KEY_BYTES_MAX)?;
        let subtree_rows = if is_interior { rows } else { 0 };
        let mut prefix_lens = cursor.lengths(subtree_rows, "subtree prefix length", KEY_BYTES_MAX)?;
        let prefix = &self.reference.prefix;
        for (row, (shared, suffix)) in shared.into_iter().zip(suffixes).enumerate() {
            let before = self.span(row.checked_sub(1));
            let kept = prefix.len() + shared;
            if row > 0 && kept > before.len() {
                return Err(cursor.block.wrong(
                    "key prefix length",
                    format!("at most {}", before.len() - prefix.len()),
                    shared,
                ));
            }
            let len = kept + suffix;
            if len > usize::from(KEY_BYTES_MAX) {
                return Err(cursor.block.wrong("key length", format!("at most {KEY_BYTES_MAX}"), len));
            }
            let start = self.keys.len();
            if start + len > KEYS_BYTES_MAX {
                let (limit, found) = (KEYS_BYTES_MAX as u64, (start + len) as u64);
                return Err(cursor.block.beyond("bytes of keys", limit, found));
            }
            self.hold(len)?;
            match row {
                0 => self.keys.extend_from_slice(prefix),
                _ => self.keys.extend_from_within(before.start..before.start + kept),
            }
            self.keys.extend_from_slice(cursor.take(suffix, "keys")?);
            self.ends.push(self.keys.len());
            if row > 0 && self.keys[start..] <= self.keys[before] {
                return Err(cursor.block.wrong(
                    "order of keys",
                    "increasing keys",
                    format!("key {row} not above the one before"),
                ));
            }
            if let Some(subtree) = prefix_lens.get_mut(row) {
                if prefix.len() + *subtree > len {
                    return Err(cursor.block.wrong(
                        "subtree prefix length",
                        format!("at most {}", len - prefix.len()),
                        *subtree,
                    ));
                }
                *subtree += prefix.len();
            }
        }
        self.check_bounds(cursor)?;
        Ok(prefix_lens)
    }

    /// The keys must be those that the node above promises.
    fn check_bounds(&self, cursor: &Cursor<'_>) -> Result<(), FormatError> {
        let reference = self.reference;
        let last = self.ends.len() - 1;
        let show = |key: &[u8]| format!("{:?}", String::from_utf8_lossy(key));
        if self.key(0) < reference.start.as_slice() {
            return Err(cursor.block.wrong(
                "first key",
                format!("at least {}", show(&reference.start)),
                show(self.key(0)),
            ));
        }
        match &reference.end {
            Some(end) if self.key(last) >= end.as_slice() => {
                Err(cursor.block.wrong("last key", format!("less than {}", show(end)), show(self.key(last))))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn read_values(&mut self, cursor: &mut Cursor<'_>, files: &FileTable, rows: usize) -> Result<(), FormatError> {
        let lengths = cursor.column(rows, "value length", u64::MAX)?;
        let kinds = cursor.take(rows, "value kinds")?;
        if let Some(found) = kinds.iter().find(|kind| **kind > 1) {
            return Err(cursor.block.wrong("value kind", "0 (inline) or 1 (elsewhere)", found));
        }
        // Each kind is 0 or 1.
        let elsewhere = kinds.iter().map(|kind| usize::from(*kind)).sum();
        let ids = files.ids(cursor, elsewhere)?;
        let offsets = cursor.column(elsewhere, "value offset", u64::MAX)?;
        let mut places = ids.into_iter().zip(offsets);
        self.values.reserve_exact(rows);
        for (len, kind) in lengths.into_iter().zip(kinds) {
            if *kind == 1 {
                let (id, offset) = places.next().expect("there is a place for each value of kind 1");
                self.values.push(Err(files.location(cursor, id, offset, len)?));
                continue;
            }
            if len > INLINE_BYTES_MAX {
                return Err(cursor.block.beyond("inline value length", INLINE_BYTES_MAX, len));
            }
            let start = self.inline.len();
            self.inline.extend_from_slice(cursor.take(ckfs_tensor::to_usize(len), "inline values")?);
            self.values.push(Ok(start..self.inline.len()));
        }
        Ok(())
    }

    /// Where key number `row` is; an empty range for no row.
    fn span(&self, row: Option<usize>) -> Range<usize> {
        row.map_or(0..0, |row| row.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[row])
    }

    fn key(&self, row: usize) -> &[u8] {
        &self.keys[self.span(Some(row))]
    }

    /// The keys with their values, if this is a leaf.
    pub(super) fn values(&self) -> impl Iterator<Item = (&[u8], NodeValue<'_>)> {
        self.values.iter().enumerate().map(|(row, value)| {
            let value = match value {
                Ok(span) => NodeValue::Inline(&self.inline[span.clone()]),
                Err(location) => NodeValue::At(location),
            };
            (self.key(row), value)
        })
    }

    /// The children in whose range of keys `is_wanted` is interested: it is given the first key and the end, if there is one.
    pub(super) fn children(&self, is_wanted: impl Fn(&[u8], Option<&[u8]>) -> bool) -> Vec<NodeRef> {
        let wanted = self.children.iter().enumerate().filter_map(|(row, (location, prefix_len))| {
            let start = self.key(row);
            let is_last = row + 1 == self.children.len();
            let end = if is_last { self.reference.end.as_deref() } else { Some(self.key(row + 1)) };
            is_wanted(start, end).then(|| NodeRef {
                location: location.clone(),
                height: self.reference.height - 1,
                prefix: start[..*prefix_len].to_vec(),
                start: start.to_vec(),
                end: end.map(<[u8]>::to_vec),
            })
        });
        wanted.collect()
    }
}

fn read_children(
    cursor: &mut Cursor<'_>,
    files: &FileTable,
    prefix_lens: Vec<usize>,
) -> Result<Vec<(BlobLocation, usize)>, FormatError> {
    let rows = prefix_lens.len();
    let ids = files.ids(cursor, rows)?;
    let offsets = cursor.column(rows, "node offset", u64::MAX)?;
    let lengths = cursor.column(rows, "node length", u64::MAX)?;
    for what in ["number of keys", "bytes of the tree", "bytes of values"] {
        cursor.column(rows, what, u64::MAX)?;
    }
    let child = |(row, len)| Ok((files.location(cursor, ids[row], offsets[row], lengths[row])?, len));
    prefix_lens.into_iter().enumerate().map(child).collect()
}
