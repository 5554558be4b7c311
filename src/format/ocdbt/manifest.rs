//! Manifests and the tree of versions.

use std::ops::RangeInclusive;

use super::{
    cursor::{Block, Cursor, OcdbtError},
    envelope,
    files::{BlobLocation, FileTable},
    node::NodeRef,
};

/// Name of the manifest.
pub const MANIFEST: &str = "manifest.ocdbt";

const NUMBERED_PREFIX: &str = "manifest.";
const NUMBERED_DIGITS: usize = 16;

/// Largest binary logarithm of the number of versions in one node.
const ARITY_LOG2_MAX: u8 = 16;

/// What place and length of a version without keys are.
const MISSING: u64 = u64::MAX;

/// How a database is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreConfig {
    /// Identifies the database.
    pub uuid: [u8; 16],
    /// Whether the versions are in numbered manifests, and this one has none.
    pub is_numbered: bool,
    /// Binary logarithm of the most versions in one version node.
    pub version_arity_log2: u8,
}

/// One version of the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Its number, from 1 on.
    pub generation: u64,
    /// The root of its keys; `None` if there are no keys.
    pub root: Option<NodeRef>,
    /// When it was written, in nanoseconds since 1970.
    pub commit_nanoseconds: u64,
}

/// A node that lists older versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionRange {
    /// Number of its newest version.
    pub generation: u64,
    /// How many versions are below it.
    pub generations: u64,
    /// Levels below it.
    pub height: u8,
    /// Where the node is.
    pub location: BlobLocation,
}

/// A manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// How the database is stored.
    pub config: StoreConfig,
    /// The newest versions, oldest first. Empty if [`StoreConfig::is_numbered`], otherwise never.
    pub versions: Vec<Version>,
    /// Where older versions are listed.
    pub older: Vec<VersionRange>,
}

/// A node of the tree of versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionNode {
    /// Versions, oldest first.
    Versions(Vec<Version>),
    /// Nodes with versions, oldest first.
    Nodes(Vec<VersionRange>),
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
    /// Reads [`MANIFEST`]. If it says that it is numbered, the versions are in the manifest with the greatest
    /// [`numbered_generation`] beside it, which [`Manifest::parse_numbered`] reads.
    ///
    /// # Errors
    /// [`OcdbtError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, OcdbtError> {
        let body = envelope::open(bytes, Block::Manifest)?;
        let mut cursor = Cursor::new(&body, Block::Manifest);
        let config = StoreConfig::read(&mut cursor)?;
        if config.is_numbered {
            cursor.end()?;
            return Ok(Self { config, versions: Vec::new(), older: Vec::new() });
        }
        let files = FileTable::read(&mut cursor, "")?;
        let versions = read_versions(&mut cursor, &files, config.version_arity_log2)?;
        let rows = cursor.bounded("number of version nodes", height_max(config.version_arity_log2).into())?;
        let older = read_ranges(&mut cursor, &files, ckfs_tensor::to_usize(rows), None)?;
        cursor.end()?;
        if let Some(leaf) = older.iter().find(|range| range.height == 0) {
            return Err(cursor.wrong("version node height", "at least 1", leaf.height));
        }
        Ok(Self { config, versions, older })
    }

    /// Reads the numbered manifest of this generation, which belongs to `self`.
    ///
    /// # Errors
    /// [`OcdbtError`]: also if it is of another database or another generation.
    pub fn parse_numbered(&self, bytes: &[u8], generation: u64) -> Result<Self, OcdbtError> {
        let numbered = Self::parse(bytes)?;
        let wrong = |what, expected: String, found: String| Err(Block::Manifest.wrong(what, expected, found));
        if numbered.config.is_numbered {
            return wrong("kind", "versions".to_owned(), "a numbered manifest without".to_owned());
        }
        if numbered.config.uuid != self.config.uuid {
            return wrong("database", hex(self.config.uuid), hex(numbered.config.uuid));
        }
        match numbered.latest().map(|version| version.generation) {
            Some(found) if found == generation => Ok(numbered),
            found => wrong("generation", generation.to_string(), found.unwrap_or(0).to_string()),
        }
    }

    /// The newest version; `None` only if the versions are in numbered manifests.
    pub fn latest(&self) -> Option<&Version> {
        self.versions.last()
    }
}

/// All digits, the first byte first.
fn hex(uuid: [u8; 16]) -> String {
    let mut reversed = uuid;
    reversed.reverse();
    format!("{:032x}", u128::from_le_bytes(reversed))
}

impl StoreConfig {
    fn read(cursor: &mut Cursor<'_>) -> Result<Self, OcdbtError> {
        let uuid = cursor.array("database identifier")?;
        let is_numbered = match cursor.byte("manifest kind")? {
            0 => false,
            1 => true,
            found => return Err(cursor.wrong("manifest kind", "0 (single) or 1 (numbered)", found)),
        };
        // Limits of its writer.
        cursor.varint("inline value limit")?;
        cursor.varint("decoded node limit")?;
        let version_arity_log2 = read_arity(cursor)?;
        match cursor.varint("compression method")? {
            0 => {}
            1 => drop(cursor.array::<4>("compression level")?),
            found => return Err(cursor.wrong("compression method", "0 (none) or 1 (zstd)", found)),
        }
        Ok(Self { uuid, is_numbered, version_arity_log2 })
    }
}

fn read_arity(cursor: &mut Cursor<'_>) -> Result<u8, OcdbtError> {
    let arity_log2 = cursor.byte("version tree arity")?;
    if (1..=ARITY_LOG2_MAX).contains(&arity_log2) {
        Ok(arity_log2)
    } else {
        Err(cursor.wrong("version tree arity", format!("1 to {ARITY_LOG2_MAX} bits"), arity_log2))
    }
}

/// Largest height of a version node: generations have 63 bits.
const fn height_max(arity_log2: u8) -> u8 {
    63 / arity_log2 - 1
}

/// Generations must increase, from 1 on.
fn check_generations(cursor: &Cursor<'_>, generations: &[u64]) -> Result<(), OcdbtError> {
    let mut before = 0;
    for generation in generations {
        if *generation <= before {
            return Err(cursor.wrong("generation", format!("more than {before}"), generation));
        }
        before = *generation;
    }
    Ok(())
}

fn read_versions(cursor: &mut Cursor<'_>, files: &FileTable, arity_log2: u8) -> Result<Vec<Version>, OcdbtError> {
    let rows = cursor.count("number of versions", 1 << arity_log2)?;
    if rows == 0 {
        return Err(cursor.wrong("number of versions", "at least 1", 0));
    }
    let generations = cursor.column(rows, "generation", u64::MAX)?;
    check_generations(cursor, &generations)?;
    let heights = cursor.take(rows, "root heights")?.to_vec();
    let ids = files.ids(cursor, rows)?;
    let offsets = cursor.column(rows, "root offset", u64::MAX)?;
    let lengths = cursor.column(rows, "root length", u64::MAX)?;
    let keys = cursor.column(rows, "number of keys", u64::MAX)?;
    for what in ["bytes of the tree", "bytes of values"] {
        cursor.column(rows, what, u64::MAX)?;
    }
    let mut versions = Vec::with_capacity(rows);
    for row in 0..rows {
        let commit_nanoseconds = u64::from_le_bytes(cursor.array("commit time")?);
        let root = if offsets[row] == MISSING && lengths[row] == MISSING {
            if heights[row] != 0 || keys[row] != 0 {
                let found = format!("height {} and {} keys", heights[row], keys[row]);
                return Err(cursor.wrong("version without a root", "height 0 and no keys", found));
            }
            None
        } else {
            let location = files.location(cursor, ids[row], offsets[row], lengths[row])?;
            Some(NodeRef::root(location, heights[row], keys[row]))
        };
        versions.push(Version { generation: generations[row], root, commit_nanoseconds });
    }
    Ok(versions)
}

/// References to version nodes: those of a node of this height, or of a manifest, which says each one's height.
fn read_ranges(
    cursor: &mut Cursor<'_>,
    files: &FileTable,
    rows: usize,
    height: Option<u8>,
) -> Result<Vec<VersionRange>, OcdbtError> {
    if rows > cursor.left() {
        return Err(cursor.truncated("number of version nodes"));
    }
    let generations = cursor.column(rows, "generation", u64::MAX)?;
    check_generations(cursor, &generations)?;
    let ids = files.ids(cursor, rows)?;
    let offsets = cursor.column(rows, "version node offset", u64::MAX)?;
    let lengths = cursor.column(rows, "version node length", u64::MAX)?;
    let counts = cursor.column(rows, "number of generations", u64::MAX)?;
    cursor.take(rows.saturating_mul(8), "commit times")?;
    let heights = match height {
        Some(height) => vec![height; rows],
        None => cursor.take(rows, "version node heights")?.to_vec(),
    };
    let row = |row: usize| {
        let location = files.location(cursor, ids[row], offsets[row], lengths[row])?;
        Ok(VersionRange { generation: generations[row], generations: counts[row], height: heights[row], location })
    };
    (0..rows).map(row).collect()
}

impl VersionNode {
    /// Reads the node that `range` refers to.
    ///
    /// # Errors
    /// [`OcdbtError`]: also if the node is not the one that was referred to.
    pub fn parse(bytes: &[u8], range: &VersionRange) -> Result<Self, OcdbtError> {
        let body = envelope::open(bytes, Block::VersionNode)?;
        let mut cursor = Cursor::new(&body, Block::VersionNode);
        let arity_log2 = read_arity(&mut cursor)?;
        let height = cursor.byte("height")?;
        if height != range.height {
            return Err(cursor.wrong("height", range.height, height));
        }
        let files = FileTable::read(&mut cursor, &range.location.base)?;
        let node = match height.checked_sub(1) {
            None => Self::Versions(read_versions(&mut cursor, &files, arity_log2)?),
            Some(below) => {
                let rows = cursor.count("number of version nodes", 1 << arity_log2)?;
                Self::Nodes(read_ranges(&mut cursor, &files, rows, Some(below))?)
            }
        };
        cursor.end()?;
        match node.generations() {
            Some(generations) if *generations.end() == range.generation => Ok(node),
            found => {
                let found = found.map_or(0, |generations| *generations.end());
                Err(cursor.wrong("newest generation", range.generation, found))
            }
        }
    }

    /// The numbers of the versions below; `None` for a node without any, which is not read.
    fn generations(&self) -> Option<RangeInclusive<u64>> {
        let (first, last) = match self {
            Self::Versions(versions) => (versions.first()?.generation, versions.last()?.generation),
            Self::Nodes(ranges) => (ranges.first()?.generation, ranges.last()?.generation),
        };
        Some(first..=last)
    }
}
