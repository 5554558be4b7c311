//! Manifests: where the newest version of a database is.

use super::{
    cursor::{Block, Cursor},
    envelope,
    files::FileTable,
    node::NodeRef,
};
use crate::FormatError;

/// Name of the manifest.
pub const MANIFEST: &str = "manifest.ocdbt";

const NUMBERED_PREFIX: &str = "manifest.";
const NUMBERED_DIGITS: usize = 16;

/// Largest binary logarithm of the number of versions in one node.
const ARITY_LOG2_MAX: u8 = 16;

/// What place and length of a version without keys are.
const MISSING: u64 = u64::MAX;

/// One version of the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Its number, from 1 on.
    pub generation: u64,
    /// The root of its keys; `None` if there are no keys.
    pub root: Option<NodeRef>,
}

/// A manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Identifies the database.
    pub uuid: [u8; 16],
    /// The newest version; `None` only if the versions are in numbered manifests.
    pub latest: Option<Version>,
}

/// The number of a numbered manifest of this name.
pub fn numbered_generation(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(NUMBERED_PREFIX)?;
    let is_hex = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if digits.len() != NUMBERED_DIGITS || !is_hex {
        return None;
    }
    u64::from_str_radix(digits, 16).ok().filter(|generation| *generation > 0)
}

/// The name of the numbered manifest whose newest version is `generation`.
pub fn numbered_name(generation: u64) -> String {
    format!("{NUMBERED_PREFIX}{generation:0NUMBERED_DIGITS$x}")
}

impl Manifest {
    /// Reads [`MANIFEST`]. If it says that it is numbered, and so has no version, the versions are in the manifest with the greatest
    /// [`numbered_generation`] beside it, which [`Manifest::parse_numbered`] reads.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let body = envelope::open(bytes, Block::Manifest)?;
        let mut cursor = Cursor::new(&body, Block::Manifest);
        let uuid = cursor.array("database identifier")?;
        let is_numbered = match cursor.byte("manifest kind")? {
            0 => false,
            1 => true,
            found => return Err(cursor.block.wrong("manifest kind", "0 (single) or 1 (numbered)", found)),
        };
        // Limits of its writer.
        cursor.varint("inline value limit")?;
        cursor.varint("decoded node limit")?;
        let arity_log2 = cursor.byte("version tree arity")?;
        if !(1..=ARITY_LOG2_MAX).contains(&arity_log2) {
            return Err(cursor.block.wrong("version tree arity", format!("1 to {ARITY_LOG2_MAX} bits"), arity_log2));
        }
        match cursor.varint("compression method")? {
            0 => {}
            1 => drop(cursor.array::<4>("compression level")?),
            found => return Err(cursor.block.wrong("compression method", "0 (none) or 1 (zstd)", found)),
        }
        let mut latest = None;
        if !is_numbered {
            let files = FileTable::read(&mut cursor, "")?;
            latest = read_versions(&mut cursor, &files, arity_log2)?;
            check_older(&mut cursor, &files, arity_log2)?;
        }
        cursor.end()?;
        Ok(Self { uuid, latest })
    }

    /// Reads the numbered manifest of this generation, which belongs to `self`.
    ///
    /// # Errors
    /// [`FormatError`]: also if it is of another database or another generation.
    pub fn parse_numbered(&self, bytes: &[u8], generation: u64) -> Result<Self, FormatError> {
        let numbered = Self::parse(bytes)?;
        let wrong = |what, expected: String, found: String| Err(Block::Manifest.wrong(what, expected, found));
        let Some(latest) = &numbered.latest else {
            return wrong("kind", "versions".to_owned(), "a numbered manifest without".to_owned());
        };
        if numbered.uuid != self.uuid {
            // All digits, the first byte first.
            let hex = |uuid| format!("{:032x}", u128::from_le_bytes(uuid).swap_bytes());
            return wrong("database", hex(self.uuid), hex(numbered.uuid));
        }
        if latest.generation != generation {
            return wrong("generation", generation.to_string(), latest.generation.to_string());
        }
        Ok(numbered)
    }
}

/// A column of the numbers of versions, which must increase, from 1 on.
fn generations(cursor: &mut Cursor<'_>, rows: usize) -> Result<Vec<u64>, FormatError> {
    let generations = cursor.column(rows, "generation", u64::MAX)?;
    let mut before = 0;
    for generation in &generations {
        if *generation <= before {
            return Err(cursor.block.wrong("generation", format!("more than {before}"), generation));
        }
        before = *generation;
    }
    Ok(generations)
}

/// The newest of the versions that a manifest lists, of which there must be one.
fn read_versions(cursor: &mut Cursor<'_>, files: &FileTable, arity_log2: u8) -> Result<Option<Version>, FormatError> {
    let rows = cursor.count("number of versions", 1 << arity_log2)?;
    if rows == 0 {
        return Err(cursor.block.wrong("number of versions", "at least 1", 0));
    }
    let generations = generations(cursor, rows)?;
    let heights = cursor.take(rows, "root heights")?;
    let ids = files.ids(cursor, rows)?;
    let offsets = cursor.column(rows, "root offset", u64::MAX)?;
    let lengths = cursor.column(rows, "root length", u64::MAX)?;
    let keys = cursor.column(rows, "number of keys", u64::MAX)?;
    for what in ["bytes of the tree", "bytes of values"] {
        cursor.column(rows, what, u64::MAX)?;
    }
    cursor.take(rows.saturating_mul(8), "commit times")?;
    let mut latest = None;
    for row in 0..rows {
        let root = if offsets[row] == MISSING && lengths[row] == MISSING {
            if heights[row] != 0 || keys[row] != 0 {
                let found = format!("height {} and {} keys", heights[row], keys[row]);
                return Err(cursor.block.wrong("version without a root", "height 0 and no keys", found));
            }
            None
        } else {
            Some(NodeRef::root(files.location(cursor, ids[row], offsets[row], lengths[row])?, heights[row]))
        };
        latest = Some(Version { generation: generations[row], root });
    }
    Ok(latest)
}

/// Reads over where older versions are listed, which are not read: no more levels than generations of 63 bits have.
fn check_older(cursor: &mut Cursor<'_>, files: &FileTable, arity_log2: u8) -> Result<(), FormatError> {
    let rows = cursor.count("number of version nodes", u64::from(63 / arity_log2 - 1))?;
    generations(cursor, rows)?;
    let ids = files.ids(cursor, rows)?;
    let offsets = cursor.column(rows, "version node offset", u64::MAX)?;
    let lengths = cursor.column(rows, "version node length", u64::MAX)?;
    cursor.column(rows, "number of generations", u64::MAX)?;
    cursor.take(rows.saturating_mul(8), "commit times")?;
    for (row, height) in cursor.take(rows, "version node heights")?.iter().enumerate() {
        files.location(cursor, ids[row], offsets[row], lengths[row])?;
        if *height == 0 {
            return Err(cursor.block.wrong("version node height", "at least 1", height));
        }
    }
    Ok(())
}
