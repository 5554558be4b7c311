//! The configuration file: what the command line's flags say, as TOML, for one view or several.
//!
//! ```toml
//! source = "/data/models/llama"        # a path (relative to this file), or org/name[@revision]
//! mountpoint = "/mnt/llama"
//! dtype = "bf16"                       # keys of a view; tables of views inherit them
//!
//! [[cast]]                             # the first rule that matches a name wins over `dtype`
//! match = "*norm*"
//! dtype = "keep"
//!
//! [[shard_rules]]                      # the first rule that matches wins over `shard`
//! match = "layers.scanned.wq"
//! spec = ["-", ["tensor", "fsdp"]]     # per axis: "-", a mesh axis, or several, the first outermost
//!
//! [[rename]]                           # regular expressions over the names shown, all in order; `$1` is a group
//! match = "^layers\\."
//! to = "decoder.layers."
//!
//! [view.train]                         # under MNT/train/
//! mesh = "fsdp=4,tensor=2"
//!
//! [view.rollout]
//! mesh = "tensor=4"
//! layout = "hf"
//!
//! [mount]
//! allow_other = true
//! ```
//!
//! Unknown keys and malformed values are errors that name file and line. [`Config::to_toml`] writes the effective
//! configuration so that reading it back gives the same: every view in full, rules of other files taken in, paths absolute.

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

pub use super::time_limit::TimeLimit;
use super::{
    Allow, CastRule, DEVICES_LISTED_MAX, LayerRanges, Layout, LogicalRule, Mesh, Pattern, PlanError, Rename, ShardRule,
    Sharding, Subset, Tied, ViewOptions,
};
use crate::{source::SourceIo, tensor::DType};

/// Why a configuration is of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {reason}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The text is not as it must be.
    #[error("{}:{line}: {reason}", file.display())]
    Text {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// The configuration cannot be written as TOML.
    #[error("the configuration cannot be written as TOML: {reason}")]
    Unwritable {
        /// What stands in the way.
        reason: String,
    },
    /// A layout file is not as it must be, or cannot be read; the problems name it.
    #[error(transparent)]
    Layout(#[from] PlanError),
}

/// A value that is written as a word in the file and on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word<T>(pub T);

/// Parsing and writing of a [`Word`].
pub trait AsWord: Sized {
    /// Reads it.
    ///
    /// # Errors
    /// What is wrong, saying what was expected.
    fn from_word(text: &str) -> Result<Self, String>;

    /// Writes it, so that reading gives it back.
    fn to_word(&self) -> String;
}

impl<T: AsWord> FromStr for Word<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        T::from_word(text).map(Self)
    }
}

impl<T: AsWord> fmt::Display for Word<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_word())
    }
}

impl<'de, T: AsWord> Deserialize<'de> for Word<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::from_word(&String::deserialize(deserializer)?).map(Self).map_err(serde::de::Error::custom)
    }
}

impl<T: AsWord> Serialize for Word<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_word())
    }
}

impl AsWord for Mesh {
    fn from_word(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|error| error.to_string())
    }

    fn to_word(&self) -> String {
        self.to_string()
    }
}

/// A layout of the program, or a file of the user's that is yet to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayoutChoice {
    /// A layout.
    Layout(Layout),
    /// A file of rules.
    File(PathBuf),
}

impl AsWord for LayoutChoice {
    fn from_word(text: &str) -> Result<Self, String> {
        if Path::new(text).extension().is_some_and(|extension| extension == "toml") {
            return Ok(Self::File(text.into()));
        }
        Layout::find(text).map(Self::Layout).map_err(|error| error.to_string())
    }

    fn to_word(&self) -> String {
        match self {
            Self::Layout(layout) => layout.name().to_owned(),
            Self::File(path) => path.display().to_string(),
        }
    }
}

/// A value of a layout's parameter: a text, or a number or boolean as TOML writes it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged, expecting = "expected a text, a number or a boolean")]
pub enum ParamValue {
    /// A boolean.
    Bool(bool),
    /// A whole number.
    Integer(i64),
    /// Another number.
    Float(f64),
    /// A text.
    Text(String),
}

impl fmt::Display for ParamValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => value.fmt(f),
            Self::Integer(value) => value.fmt(f),
            Self::Float(value) => value.fmt(f),
            Self::Text(value) => value.fmt(f),
        }
    }
}

/// A dtype asked for: `None` is written `keep` and leaves elements as they are.
impl AsWord for Option<DType> {
    fn from_word(text: &str) -> Result<Self, String> {
        if text == "keep" {
            return Ok(None);
        }
        let dtype = DType::from_user(text).filter(|dtype| dtype.is_float());
        dtype.map(Some).ok_or_else(|| format!("dtype: expected keep or a float type such as bf16, found {text:?}"))
    }

    fn to_word(&self) -> String {
        self.map_or("keep", DType::name).to_owned()
    }
}

impl AsWord for SourceIo {
    fn from_word(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "mmap" => Ok(Self::Mmap),
            "pread" => Ok(Self::Pread),
            _ => Err(format!("source I/O: expected auto, mmap or pread, found {text:?}")),
        }
    }

    fn to_word(&self) -> String {
        match self {
            Self::Auto => "auto",
            Self::Mmap => "mmap",
            Self::Pread => "pread",
        }
        .to_owned()
    }
}

/// Which tensor files are made whole in memory when they are opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MadeWhole {
    /// None.
    None,
    /// Those of one tensor or a part of one: raw, `npy/`, `orbax/`.
    Tensors,
    /// Those, and files of many tensors but for who only goes through a directory for headers; not those of `dcp/`.
    #[default]
    Auto,
    /// Every one.
    All,
}

impl AsWord for MadeWhole {
    fn from_word(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "tensors" => Ok(Self::Tensors),
            "auto" => Ok(Self::Auto),
            "all" => Ok(Self::All),
            _ => Err(format!("files made whole: expected none, tensors, auto or all, found {text:?}")),
        }
    }

    fn to_word(&self) -> String {
        match self {
            Self::None => "none",
            Self::Tensors => "tensors",
            Self::Auto => "auto",
            Self::All => "all",
        }
        .to_owned()
    }
}

/// How tensors are sharded where no rule matches, or a file that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardChoice {
    /// By the layout's logical axes, or by the names of mesh axes and the roles of tensors.
    Auto,
    /// By logical axes, with MaxText's rules where the layout has none.
    Logical,
    /// Not at all.
    None,
    /// By the rules in a file, and by its `shard` key where none matches.
    File(PathBuf),
}

impl AsWord for ShardChoice {
    fn from_word(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            "maxtext" => Ok(Self::Logical),
            file if Path::new(file).extension().is_some_and(|extension| extension == "toml") => {
                Ok(Self::File(file.into()))
            }
            _ => Err(format!("shard: expected auto, none, maxtext or a file *.toml, found {text:?}")),
        }
    }

    fn to_word(&self) -> String {
        match self {
            Self::Auto => "auto".to_owned(),
            Self::None => "none".to_owned(),
            Self::Logical => "maxtext".to_owned(),
            Self::File(path) => path.display().to_string(),
        }
    }
}

/// Permission bits in octal digits: `0440`. Bits to write mean nothing on a mount that cannot be written to, and are kept here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermissionBits(pub u16);

impl AsWord for PermissionBits {
    fn from_word(text: &str) -> Result<Self, String> {
        let digits = text.strip_prefix("0o").unwrap_or(text);
        let bits = u16::from_str_radix(digits, 8).ok().filter(|bits| *bits <= 0o777 && !digits.starts_with('+'));
        bits.map(Self).ok_or_else(|| format!("mode: expected octal digits from 0 to 0777 such as 0440, found {text:?}"))
    }

    fn to_word(&self) -> String {
        format!("{:04o}", self.0)
    }
}

/// A list of devices, ascending: `0-3,8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices(pub Vec<u64>);

impl AsWord for Devices {
    fn from_word(text: &str) -> Result<Self, String> {
        let malformed = |part: &str| format!("devices: expected numbers and ranges such as 0-3,8, found {part:?}");
        let mut devices = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u64>().map_err(|_| malformed(part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(malformed(part));
            }
            if last - first >= DEVICES_LISTED_MAX - (devices.len() as u64).min(DEVICES_LISTED_MAX) {
                return Err(format!("devices: expected at most {DEVICES_LISTED_MAX}, found more in {text:?}"));
            }
            devices.extend(first..=last);
        }
        devices.sort_unstable();
        devices.dedup();
        Ok(Self(devices))
    }

    fn to_word(&self) -> String {
        let mut words: Vec<String> = Vec::new();
        let mut rest = self.0.as_slice();
        while let Some(first) = rest.first() {
            let run = rest.iter().zip(*first..).take_while(|(device, expected)| *device == expected).count();
            let last = rest[run - 1];
            words.push(if run == 1 { first.to_string() } else { format!("{first}-{last}") });
            rest = &rest[run..];
        }
        words.join(",")
    }
}

/// A number of bytes: `67108864`, `64M`, `1GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteCount(pub u64);

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || format!("expected a number of bytes such as 67108864, 64M or 1GiB, found {text:?}");
        let lower = text.trim().to_ascii_lowercase();
        let digits = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
        let shift = match lower[digits..].trim() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(malformed()),
        };
        let number: u64 = lower[..digits].parse().map_err(|_| malformed())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(malformed)
    }
}

impl<'de> Deserialize<'de> for ByteCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a number of bytes such as 67108864 or \"64M\"")]
        enum Either {
            Number(u64),
            Text(String),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(number) => Ok(Self(number)),
            Either::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

impl Serialize for ByteCount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

fn pattern_text<S: Serializer>(pattern: &Pattern, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(pattern.text())
}

/// A `[[cast]]` rule.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CastKeys {
    /// Names in the repository or in the mount.
    #[serde(rename = "match", serialize_with = "pattern_text")]
    pub pattern: Pattern,
    /// The dtype, or `keep`.
    pub dtype: Word<Option<DType>>,
}

/// A `[[rename]]` or `[[source_rename]]` rule.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "RawRename", into = "RawRename")]
pub struct RenameKeys(pub Rename);

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawRename {
    #[serde(rename = "match")]
    pattern: String,
    to: String,
}

impl TryFrom<RawRename> for RenameKeys {
    type Error = String;

    fn try_from(raw: RawRename) -> Result<Self, String> {
        Rename::new(&raw.pattern, &raw.to).map(Self)
    }
}

impl From<RenameKeys> for RawRename {
    fn from(RenameKeys(rename): RenameKeys) -> Self {
        Self { pattern: rename.pattern().to_owned(), to: rename.to().to_owned() }
    }
}

/// What an option applies to: all or nothing, or names by pattern.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged, expecting = "expected true, false, a pattern or a list of patterns")]
pub enum AllowKey {
    /// All, or nothing.
    All(bool),
    /// Names that match.
    One(Pattern),
    /// Names that match one of these.
    Several(Vec<Pattern>),
}

impl From<&AllowKey> for Allow {
    fn from(key: &AllowKey) -> Self {
        match key {
            AllowKey::All(all) => (*all).into(),
            AllowKey::One(pattern) => Self::Matching(vec![pattern.clone()]),
            AllowKey::Several(patterns) => Self::Matching(patterns.clone()),
        }
    }
}

impl AsWord for Tied {
    fn from_word(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "alias" => Ok(Self::Alias),
            "absent" => Ok(Self::Absent),
            _ => Err(format!("tied: expected auto, alias or absent, found {text:?}")),
        }
    }

    fn to_word(&self) -> String {
        match self {
            Self::Auto => "auto",
            Self::Alias => "alias",
            Self::Absent => "absent",
        }
        .to_owned()
    }
}

impl AsWord for LayerRanges {
    fn from_word(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn to_word(&self) -> String {
        self.text()
    }
}

/// What splits one axis of a tensor, as written.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(untagged, expecting = "expected for each axis \"-\", a mesh axis, or a list of mesh axes")]
pub enum AxisKey {
    /// One mesh axis; `-` or nothing for none.
    One(String),
    /// Several, the first outermost.
    Several(Vec<String>),
}

impl AxisKey {
    fn names(&self) -> Vec<String> {
        match self {
            Self::One(name) if name.is_empty() || name == "-" => Vec::new(),
            Self::One(name) => vec![name.clone()],
            Self::Several(names) => names.clone(),
        }
    }
}

/// A `[[shard_rules]]` rule.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ShardKeys {
    /// Names in the mount.
    #[serde(rename = "match", serialize_with = "pattern_text")]
    pub pattern: Pattern,
    /// Per axis, what splits it.
    pub spec: Vec<AxisKey>,
}

/// A file of sharding rules, as `--shard FILE` takes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardFile {
    shard: Option<Word<ShardChoice>>,
    #[serde(default)]
    shard_rules: Vec<ShardKeys>,
}

/// Declares the keys of a view once, for the top of the file and for its `[view.NAME]` tables.
macro_rules! view_keys {
    ($($(#[$doc:meta])* $key:ident: $kind:ty,)*) => {
        /// The keys of one view, as far as they are given.
        #[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
        #[serde(deny_unknown_fields)]
        pub struct ViewKeys {
            $($(#[$doc])* #[serde(skip_serializing_if = "Option::is_none")] pub $key: Option<$kind>,)*
            /// Dtypes by pattern.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            pub cast: Vec<CastKeys>,
            /// Specs by pattern.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            pub shard_rules: Vec<ShardKeys>,
            /// Mesh axes of logical axes, in place of the layout's rules for the same axes.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            pub logical_rules: Vec<LogicalRule>,
            /// Parameters of the layout.
            #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
            pub set: BTreeMap<String, ParamValue>,
            /// Renames of what is shown, in order.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            pub rename: Vec<RenameKeys>,
            /// Renames of the repository's tensors, in order, before layouts see them.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            pub source_rename: Vec<RenameKeys>,
            /// Tensors to show.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            pub include: Vec<Pattern>,
            /// Tensors not to show.
            #[serde(default, skip_serializing_if = "Vec::is_empty")]
            pub exclude: Vec<Pattern>,
        }

        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct FileKeys {
            source: Option<String>,
            mountpoint: Option<PathBuf>,
            $($key: Option<$kind>,)*
            #[serde(default)]
            cast: Vec<CastKeys>,
            #[serde(default)]
            shard_rules: Vec<ShardKeys>,
            #[serde(default)]
            logical_rules: Vec<LogicalRule>,
            #[serde(default)]
            set: BTreeMap<String, ParamValue>,
            #[serde(default)]
            rename: Vec<RenameKeys>,
            #[serde(default)]
            source_rename: Vec<RenameKeys>,
            #[serde(default)]
            include: Vec<Pattern>,
            #[serde(default)]
            exclude: Vec<Pattern>,
            #[serde(default)]
            mount: MountKeys,
            #[serde(default)]
            view: BTreeMap<String, ViewKeys>,
        }

        impl FileKeys {
            fn top(&self) -> ViewKeys {
                ViewKeys {
                    $($key: self.$key.clone(),)*
                    cast: self.cast.clone(),
                    shard_rules: self.shard_rules.clone(),
                    logical_rules: self.logical_rules.clone(),
                    set: self.set.clone(),
                    rename: self.rename.clone(),
                    source_rename: self.source_rename.clone(),
                    include: self.include.clone(),
                    exclude: self.exclude.clone(),
                }
            }
        }

        impl ViewKeys {
            /// These keys, and those of `base` where these are not given. Rules come before those of `base`.
            #[must_use]
            pub fn over(mut self, base: &Self) -> Self {
                $(if self.$key.is_none() { self.$key.clone_from(&base.$key); })*
                self.cast.extend_from_slice(&base.cast);
                self.shard_rules.extend_from_slice(&base.shard_rules);
                self.logical_rules.extend_from_slice(&base.logical_rules);
                self.rename.extend_from_slice(&base.rename);
                self.source_rename.extend_from_slice(&base.source_rename);
                self.include.extend_from_slice(&base.include);
                self.exclude.extend_from_slice(&base.exclude);
                for (name, value) in &base.set {
                    self.set.entry(name.clone()).or_insert_with(|| value.clone());
                }
                self
            }
        }
    };
}

view_keys! {
    /// The devices.
    mesh: Word<Mesh>,
    /// Names and shapes.
    layout: Word<LayoutChoice>,
    /// Dtype of all floats.
    dtype: Word<Option<DType>>,
    /// How specs are chosen.
    shard: Word<ShardChoice>,
    /// The devices to list.
    devices: Word<Devices>,
    /// Whether bundles hold one tensor per source tensor.
    unscanned: bool,
    /// Whether uneven splits are refused.
    even: bool,
    /// Whether missing layers and tensors are accepted.
    allow_missing: AllowKey,
    /// Whether tensors that no rule of the layout names are accepted.
    allow_unmapped: AllowKey,
    /// Dropped from names.
    strip_prefix: String,
    /// Put before names.
    add_prefix: String,
    /// How tied weights are shown.
    tied: Word<Tied>,
    /// Directory of a LoRA adapter.
    lora: PathBuf,
    /// Layers of the text model.
    layers: Word<LayerRanges>,
    /// Whether the layers left are numbered from 0.
    renumber: bool,
    /// Without multi-token prediction.
    no_mtp: bool,
    /// Without towers for images and sound.
    text_only: bool,
    /// Bytes of the largest chunk file.
    chunk_bytes: ByteCount,
}

/// Most threads that serve requests.
pub const THREADS_MAX: u16 = 512;

fn thread_count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<usize>, D::Error> {
    let found = u64::deserialize(deserializer)?;
    let count = u16::try_from(found).ok().filter(|count| (1..=THREADS_MAX).contains(count));
    let malformed = || serde::de::Error::custom(format!("threads: expected 1 to {THREADS_MAX}, found {found}"));
    count.map(|count| Some(usize::from(count))).ok_or_else(malformed)
}

/// The `[mount]` table: how to mount and serve, the same for all views.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MountKeys {
    /// Lets all users read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_other: Option<bool>,
    /// Permission bits of files, in place of what the sources allow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<Word<PermissionBits>>,
    /// Permission bits of directories, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dir_mode: Option<Word<PermissionBits>>,
    /// Owner of files and directories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group of files and directories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Whether symbolic links may lead out of the repository.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub follow_symlinks: Option<bool>,
    /// Threads that serve requests, at most [`THREADS_MAX`].
    #[serde(default, deserialize_with = "thread_count", skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// The kernel's read-ahead in KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_ahead_kb: Option<u32>,
    /// Bytes of transformed data kept in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_bytes: Option<ByteCount>,
    /// Lets the kernel read byte-identical files by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passthrough: Option<bool>,
    /// Directory for copies of tensor files, which the kernel then reads by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub materialize: Option<PathBuf>,
    /// Which tensor files are made whole in memory when they are opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole: Option<Word<MadeWhole>>,
    /// Tensor files, by path in the mount, that bypass the page cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct_io: Option<AllowKey>,
    /// How source files are read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_io: Option<Word<SourceIo>>,
    /// How long a source may give no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_timeout: Option<TimeLimit>,
    /// How long to try to unmount while files are open, before detaching.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_seconds: Option<u64>,
    /// How long to serve open files after detaching.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain_seconds: Option<u64>,
    /// Where the daemon writes its log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_file: Option<PathBuf>,
}

impl MountKeys {
    /// These keys, and those of `base` where these are not given.
    #[must_use]
    pub fn over(self, base: &Self) -> Self {
        Self {
            allow_other: self.allow_other.or(base.allow_other),
            file_mode: self.file_mode.or_else(|| base.file_mode.clone()),
            dir_mode: self.dir_mode.or_else(|| base.dir_mode.clone()),
            uid: self.uid.or(base.uid),
            gid: self.gid.or(base.gid),
            follow_symlinks: self.follow_symlinks.or(base.follow_symlinks),
            threads: self.threads.or(base.threads),
            read_ahead_kb: self.read_ahead_kb.or(base.read_ahead_kb),
            cache_bytes: self.cache_bytes.or(base.cache_bytes),
            passthrough: self.passthrough.or(base.passthrough),
            direct_io: self.direct_io.or_else(|| base.direct_io.clone()),
            materialize: self.materialize.or_else(|| base.materialize.clone()),
            whole: self.whole.or_else(|| base.whole.clone()),
            source_io: self.source_io.or_else(|| base.source_io.clone()),
            source_timeout: self.source_timeout.or(base.source_timeout),
            grace_seconds: self.grace_seconds.or(base.grace_seconds),
            drain_seconds: self.drain_seconds.or(base.drain_seconds),
            log_file: self.log_file.or_else(|| base.log_file.clone()),
        }
    }
}

/// One view of the configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ViewConfig {
    /// Name of its directory; empty for the only view, at the root of the mount.
    pub name: String,
    /// Its keys, those of the top included.
    pub keys: ViewKeys,
}

/// A configuration, with everything inherited and all files it refers to taken in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// What to mount: an absolute path, or `org/name[@revision]`.
    pub source: Option<String>,
    /// Where; absolute.
    pub mountpoint: Option<PathBuf>,
    /// The views, at least one; only a single one may be without a name.
    pub views: Vec<ViewConfig>,
    /// How to mount.
    pub mount: MountKeys,
}

impl Default for Config {
    /// One view at the root, nothing said.
    fn default() -> Self {
        Self { source: None, mountpoint: None, views: vec![ViewConfig::default()], mount: MountKeys::default() }
    }
}

fn read_toml<T: serde::de::DeserializeOwned>(text: &str, file: &Path) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = 1 + text.get(..at).unwrap_or_default().matches('\n').count();
        ConfigError::Text { file: file.to_owned(), line, reason: error.message().replace('\n', "; ") }
    })
}

fn read_file(file: &Path) -> Result<String, ConfigError> {
    fs::read_to_string(file).map_err(|error| ConfigError::Read { file: file.to_owned(), reason: error.to_string() })
}

/// The line of the first line of `text` that starts with `start`, for errors that no parser finds.
fn line_of(text: &str, start: &str) -> usize {
    text.lines().position(|line| line.trim_start().starts_with(start)).map_or(1, |line| line + 1)
}

fn valid_view_name(name: &str) -> bool {
    let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty() && !name.starts_with('.') && name.len() <= 255 && name.chars().all(valid)
}

impl Config {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// [`ConfigError`], naming the line.
    pub fn load(file: &Path) -> Result<Self, ConfigError> {
        let base = std::path::absolute(file)
            .map_err(|error| ConfigError::Read { file: file.to_owned(), reason: error.to_string() })?;
        Self::parse(&read_file(file)?, file, base.parent().unwrap_or(Path::new("/")))
    }

    /// Reads a configuration from a text; `file` is its name for messages and relative paths start at `base`.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn parse(text: &str, file: &Path, base: &Path) -> Result<Self, ConfigError> {
        let keys: FileKeys = read_toml(text, file)?;
        let top = keys.top().with_files(base)?;
        let mut views = Vec::with_capacity(keys.view.len().max(1));
        for (name, own) in &keys.view {
            if !valid_view_name(name) {
                let reason =
                    format!("view {name:?}: expected a name of letters, digits, _, - and ., not starting with .");
                return Err(ConfigError::Text { file: file.to_owned(), line: line_of(text, "[view."), reason });
            }
            views.push(ViewConfig { name: name.clone(), keys: own.clone().with_files(base)?.over(&top) });
        }
        if views.is_empty() {
            views.push(ViewConfig { name: String::new(), keys: top });
        }
        let mut mount = keys.mount;
        mount.log_file = mount.log_file.map(|path| base.join(path));
        mount.materialize = mount.materialize.map(|path| base.join(path));
        // A name of the hub's cache stays one, unless there is a directory of that name beside the file.
        let source = keys.source.map(|source| {
            let path = base.join(&source);
            if path.exists() { path.display().to_string() } else { source }
        });
        Ok(Self { source, mountpoint: keys.mountpoint.map(|path| base.join(path)), views, mount })
    }

    /// Lets the keys of a command line win over those of the file, in every view.
    ///
    /// # Errors
    /// [`ConfigError`] if a file of rules cannot be read.
    pub fn overlay(&mut self, keys: &ViewKeys, mount: &MountKeys, base: &Path) -> Result<(), ConfigError> {
        let keys = keys.clone().with_files(base)?;
        for view in &mut self.views {
            view.keys = keys.clone().over(&view.keys);
        }
        self.mount = mount.clone().over(&self.mount);
        Ok(())
    }

    /// The configuration as a text that reads back as the same; without the mountpoint if that is no text.
    ///
    /// # Errors
    /// [`ConfigError::Unwritable`] if a path is no text, or a number is beyond those of TOML.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        #[derive(Serialize)]
        struct Effective<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            source: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            mountpoint: Option<&'a Path>,
            #[serde(flatten)]
            top: Option<&'a ViewKeys>,
            #[serde(skip_serializing_if = "BTreeMap::is_empty")]
            view: BTreeMap<&'a str, &'a ViewKeys>,
            #[serde(skip_serializing_if = "Option::is_none")]
            mount: Option<&'a MountKeys>,
        }
        let unnamed = self.views.iter().find(|view| view.name.is_empty());
        let named = self.views.iter().filter(|view| !view.name.is_empty());
        let effective = Effective {
            source: self.source.as_deref(),
            mountpoint: self.mountpoint.as_deref().filter(|path| path.to_str().is_some()),
            top: unnamed.map(|view| &view.keys),
            view: named.map(|view| (view.name.as_str(), &view.keys)).collect(),
            mount: Some(&self.mount).filter(|keys| **keys != MountKeys::default()),
        };
        toml::to_string(&effective).map_err(|error| ConfigError::Unwritable { reason: error.to_string() })
    }
}

impl ViewKeys {
    /// Takes in the rules of the file that `shard` names.
    fn with_files(mut self, base: &Path) -> Result<Self, ConfigError> {
        if let Some(Word(LayoutChoice::File(file))) = &self.layout {
            let file = base.join(file);
            let layout = Layout::find(&file.display().to_string())?;
            self.layout = Some(Word(LayoutChoice::Layout(layout)));
        }
        self.lora = self.lora.map(|dir| base.join(dir));
        let Some(Word(ShardChoice::File(file))) = &self.shard else { return Ok(self) };
        let file = base.join(file);
        let text = read_file(&file)?;
        let rules: ShardFile = read_toml(&text, &file)?;
        self.shard = match rules.shard {
            None => Some(Word(ShardChoice::Auto)),
            Some(Word(ShardChoice::File(_))) => {
                let reason = "shard: expected auto or none in a file of rules, found a file".to_owned();
                return Err(ConfigError::Text { file, line: line_of(&text, "shard"), reason });
            }
            choice @ Some(Word(ShardChoice::Auto | ShardChoice::None | ShardChoice::Logical)) => choice,
        };
        self.shard_rules.extend(rules.shard_rules);
        Ok(self)
    }

    /// What a plan is built from.
    pub fn options(&self) -> ViewOptions {
        ViewOptions {
            mesh: self.mesh.as_ref().map_or_else(Mesh::default, |mesh| mesh.0.clone()),
            layout: match &self.layout {
                Some(Word(LayoutChoice::Layout(layout))) => layout.clone(),
                // Files have been taken in.
                Some(Word(LayoutChoice::File(_))) | None => Layout::default(),
            },
            dtype: self.dtype.as_ref().and_then(|dtype| dtype.0),
            keep_dtype: self.dtype.as_ref().is_some_and(|dtype| dtype.0.is_none()),
            casts: self
                .cast
                .iter()
                .map(|rule| CastRule { pattern: rule.pattern.clone(), dtype: rule.dtype.0 })
                .collect(),
            sharding: match self.shard {
                Some(Word(ShardChoice::None)) => Sharding::Replicate,
                Some(Word(ShardChoice::Logical)) => Sharding::Logical,
                Some(Word(ShardChoice::Auto | ShardChoice::File(_))) | None => Sharding::Auto,
            },
            shard_rules: self
                .shard_rules
                .iter()
                .map(|rule| ShardRule {
                    pattern: rule.pattern.clone(),
                    spec: rule.spec.iter().map(AxisKey::names).collect(),
                })
                .collect(),
            unscanned: self.unscanned.unwrap_or(false),
            even: self.even.unwrap_or(false),
            devices: self.devices.as_ref().map(|devices| devices.0.0.clone()),
            allow_missing: self.allow_missing.as_ref().map_or(Allow::Nothing, Allow::from),
            allow_unmapped: self.allow_unmapped.as_ref().map_or(Allow::Nothing, Allow::from),
            subset: Subset {
                source_renames: self.source_rename.iter().map(|RenameKeys(rename)| rename.clone()).collect(),
                include: self.include.clone(),
                exclude: self.exclude.clone(),
                layers: self.layers.as_ref().map(|layers| layers.0.clone()),
                renumber: self.renumber.unwrap_or(false),
                no_mtp: self.no_mtp.unwrap_or(false),
                text_only: self.text_only.unwrap_or(false),
            },
            renames: (self.strip_prefix.iter().map(|prefix| Rename::strip_prefix(prefix)))
                .chain(self.rename.iter().map(|RenameKeys(rename)| rename.clone()))
                .chain(self.add_prefix.iter().map(|prefix| Rename::add_prefix(prefix)))
                .collect(),
            tied: self.tied.as_ref().map_or(Tied::Auto, |tied| tied.0),
            lora: self.lora.clone(),
            set: self.set.iter().map(|(name, value)| (name.clone(), value.to_string())).collect(),
            logical_rules: self.logical_rules.clone(),
            chunk_bytes_max: self.chunk_bytes.map(|bytes| bytes.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(text, Path::new("x.toml"), Path::new("/base"))
    }

    #[test]
    fn views_inherit_and_rules_of_their_own_come_first() {
        let config = parse(
            r#"
            source = "org/name"
            mountpoint = "mnt"
            dtype = "bf16"
            [[cast]]
            match = "*norm*"
            dtype = "keep"
            [view.train]
            mesh = "fsdp=4,tensor=2"
            devices = "0-3,6"
            [[view.train.cast]]
            match = "final_norm"
            dtype = "f32"
            [[view.train.shard_rules]]
            match = "wq"
            spec = ["fsdp", "-", "", ["tensor", "fsdp"]]
            [view.rollout]
            layout = "hf"
            dtype = "keep"
            [mount]
            cache_bytes = "64M"
            log_file = "log"
            "#,
        )
        .unwrap();
        assert_eq!(config.source.as_deref(), Some("org/name"));
        assert_eq!(config.mountpoint.as_deref(), Some(Path::new("/base/mnt")));
        assert_eq!(config.mount.cache_bytes, Some(ByteCount(64 << 20)));
        assert_eq!(config.mount.log_file.as_deref(), Some(Path::new("/base/log")));
        let [rollout, train] = &config.views[..] else { panic!("{config:?}") };
        let (rollout, train) = (rollout.keys.options(), train.keys.options());
        assert_eq!((rollout.layout, rollout.dtype), (Layout::Hf, None));
        assert_eq!(train.dtype, Some(DType::BF16));
        let casts: Vec<_> = train.casts.iter().map(|rule| (rule.pattern.text(), rule.dtype)).collect();
        assert_eq!(casts, [("final_norm", Some(DType::F32)), ("*norm*", None)]);
        assert_eq!(train.devices, Some(vec![0, 1, 2, 3, 6]));
        let spec: Vec<Vec<String>> = vec![vec!["fsdp".into()], vec![], vec![], vec!["tensor".into(), "fsdp".into()]];
        assert_eq!(train.shard_rules[0].spec, spec);
    }

    #[test]
    fn what_is_written_reads_back_as_the_same() {
        let texts = [
            "",
            "source = \"/x\"\nmesh = \"fsdp=2\"\nunscanned = true\neven = false\nchunk_bytes = \"64M\"\n",
            "dtype = \"keep\"\nshard = \"none\"\n[[shard_rules]]\nmatch = \"/a\\\\.b/\"\nspec = [\"-\", [\"a\", \"b\"]]\n",
            "mesh = \"a=2\"\n[[cast]]\nmatch = \"*\"\ndtype = \"f16\"\n[view.x]\n[view.y]\nmesh = \"b=3\"\n\
             [mount]\nthreads = 3\nsource_io = \"pread\"\ndrain_seconds = 4\n",
        ];
        for text in texts {
            let config = parse(text).unwrap();
            let written = config.to_toml().unwrap();
            assert_eq!(parse(&written).unwrap(), config, "{written}");
        }
    }

    /// The keys that a table takes, by what its parser answers to another.
    fn keys_of(table: &str) -> Vec<String> {
        let error = parse(&format!("{table}\nnonsense = 1")).unwrap_err().to_string();
        let (_, keys) = error.split_once("expected one of ").unwrap();
        keys.split(", ").map(|key| key.trim_matches('`').to_owned()).collect()
    }

    /// Every key, in a table or as a line, with a value that is not the default.
    const EVERY_VIEW_KEY: [(&str, &str); 26] = [
        ("mesh", "mesh = 'fsdp=2,tensor=3'"),
        ("layout", "layout = 'maxtext'"),
        ("dtype", "dtype = 'bf16'"),
        ("shard", "shard = 'none'"),
        ("devices", "devices = '0-1,4'"),
        ("unscanned", "unscanned = true"),
        ("even", "even = true"),
        ("allow_missing", "allow_missing = ['a.*', '/b$/']"),
        ("allow_unmapped", "allow_unmapped = true"),
        ("strip_prefix", "strip_prefix = 'model.'"),
        ("add_prefix", "add_prefix = 'a$1.'"),
        ("tied", "tied = 'absent'"),
        ("lora", "lora = 'adapter'"),
        ("layers", "layers = '..2,5,7..'"),
        ("renumber", "renumber = true"),
        ("no_mtp", "no_mtp = true"),
        ("text_only", "text_only = true"),
        ("chunk_bytes", "chunk_bytes = '64M'"),
        ("include", "include = ['*.weight', '/[ab]/']"),
        ("exclude", "exclude = ['*.bias']"),
        ("cast", "[[cast]]\nmatch = '*norm*'\ndtype = 'keep'"),
        ("shard_rules", "[[shard_rules]]\nmatch = 'wq'\nspec = ['-', 'fsdp', ['tensor', 'fsdp'], '']"),
        ("logical_rules", "[[logical_rules]]\nlogical = 'embed'\nmesh = ['fsdp', 'tensor']"),
        ("set", "[set]\nscan = false\nvocab_size = 7\nscale = 1.5\nname = 'a \"b\"'"),
        ("rename", "[[rename]]\nmatch = '^a\\.(\\d)'\nto = 'b.$1'"),
        ("source_rename", "[[source_rename]]\nmatch = '\"'\nto = ''"),
    ];

    const EVERY_MOUNT_KEY: [(&str, &str); 18] = [
        ("allow_other", "allow_other = true"),
        ("file_mode", "file_mode = '0440'"),
        ("dir_mode", "dir_mode = '0750'"),
        ("uid", "uid = 1000"),
        ("gid", "gid = 0"),
        ("follow_symlinks", "follow_symlinks = true"),
        ("threads", "threads = 3"),
        ("read_ahead_kb", "read_ahead_kb = 128"),
        ("cache_bytes", "cache_bytes = '1GiB'"),
        ("passthrough", "passthrough = false"),
        ("materialize", "materialize = 'copies'"),
        ("whole", "whole = 'all'"),
        ("direct_io", "direct_io = ['full/*', '/npy/']"),
        ("source_io", "source_io = 'pread'"),
        ("source_timeout", "source_timeout = '5s'"),
        ("grace_seconds", "grace_seconds = 0"),
        ("drain_seconds", "drain_seconds = 4"),
        ("log_file", "log_file = 'log'"),
    ];

    #[test]
    fn every_key_is_written_and_reads_back_as_the_same() {
        let known = |rows: &[(&'static str, &str)]| rows.iter().map(|(key, _)| *key).collect::<Vec<_>>();
        let sorted = |mut keys: Vec<String>| {
            keys.sort();
            keys
        };
        let views = sorted(known(&EVERY_VIEW_KEY).into_iter().map(str::to_owned).collect());
        assert_eq!(sorted(keys_of("[view.x]")), views);
        assert_eq!(keys_of("[mount]"), known(&EVERY_MOUNT_KEY));
        let above = ["mount", "mountpoint", "source", "view"].map(str::to_owned).to_vec();
        assert_eq!(sorted(keys_of("")), sorted([views, above].concat()));

        let same = |text: &str| {
            let config = parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            let written = config.to_toml().unwrap();
            let again = parse(&written).unwrap_or_else(|error| panic!("{written}: {error}"));
            assert_eq!(again, config, "{written}");
            // What a plan is built from has no equality; this shows all of it.
            let options =
                |config: &Config| format!("{:?}", config.views.iter().map(|v| v.keys.options()).collect::<Vec<_>>());
            assert_eq!(options(&again), options(&config), "{written}");
            (options(&config), config.mount)
        };
        let nothing = same("");
        for (key, text) in EVERY_VIEW_KEY {
            assert_ne!(same(text).0, nothing.0, "{key} means nothing");
            let in_view = text.replacen("[[", "[[view.x.", 1).replacen("[set]", "[view.x.set]", 1);
            let in_view = if in_view.starts_with('[') { in_view } else { format!("[view.x]\n{in_view}") };
            assert_eq!(same(&in_view).0, same(text).0, "{key}");
        }
        for (key, text) in EVERY_MOUNT_KEY {
            assert_ne!(same(&format!("[mount]\n{text}")).1, nothing.1, "{key} means nothing");
        }
        let lines = |rows: &[(&str, &str)]| rows.iter().flat_map(|(_, text)| [text, "\n"]).collect::<String>();
        same(&format!(
            "source = 'o/n'\nmountpoint = 'm'\n{}[mount]\n{}",
            lines(&EVERY_VIEW_KEY),
            lines(&EVERY_MOUNT_KEY)
        ));
    }

    #[test]
    fn errors_name_file_and_line() {
        let rows = [
            ("mesh = \"fsdp=2\"\nmehs = \"x\"\n", "x.toml:2: unknown field `mehs`"),
            ("\n\nmesh = \"fsdp\"\n", "x.toml:3: mesh: expected name=size, found \"fsdp\""),
            ("dtype = \"i32\"", "x.toml:1: dtype: expected keep or a float type such as bf16, found \"i32\""),
            ("layout = \"x\"", "x.toml:1: layout \"x\": expected canonical, hf, "),
            ("shard = \"x\"", "x.toml:1: shard: expected auto, none, maxtext or a file *.toml, found \"x\""),
            ("devices = \"3-1\"", "x.toml:1: devices: expected numbers and ranges such as 0-3,8, found \"3-1\""),
            ("[[cast]]\nmatch = \"/(/\"\ndtype = \"f32\"", "x.toml:2: pattern \"/(/\": "),
            ("[[cast]]\nmatch = \"a\"", "x.toml:1: missing field `dtype`"),
            ("[[shard_rules]]\nmatch = \"a\"\nspec = [1]", "x.toml:3: expected for each axis"),
            ("[mount]\ncache_bytes = \"1X\"", "x.toml:2: expected a number of bytes such as"),
            ("[mount]\nfile_mode = '0448'", "x.toml:2: mode: expected octal digits from 0 to 0777 such as 0440"),
            ("[mount]\ndir_mode = '7777'", "x.toml:2: mode: expected octal digits"),
            ("[mount]\nthread = 1", "x.toml:2: unknown field `thread`"),
            ("[mount]\nthreads = 20000", "x.toml:2: threads: expected 1 to 512, found 20000"),
            ("[view.a]\nsource = \"x\"", "x.toml:2: unknown field `source`"),
            ("a = 1\n[view.\"../x\"]\n", "x.toml:1: unknown field `a`"),
            ("\n[view.\"../x\"]\n", "x.toml:2: view \"../x\": expected a name"),
            ("mesh = ", "x.toml:1: "),
        ];
        for (text, expected) in rows {
            let found = parse(text).unwrap_err().to_string();
            assert!(found.starts_with(expected), "{text:?}: {found}");
        }
    }

    #[test]
    fn flags_win_over_the_file() {
        let mut config = parse("dtype = \"f16\"\nmesh = \"a=2\"\n[view.x]\n[view.y]\ndtype = \"f32\"\n").unwrap();
        let flags = ViewKeys { dtype: Some(Word(Some(DType::BF16))), ..ViewKeys::default() };
        let mount = MountKeys { threads: Some(3), ..MountKeys::default() };
        config.overlay(&flags, &mount, Path::new("/")).unwrap();
        for view in &config.views {
            let options = view.keys.options();
            assert_eq!((options.dtype, options.mesh.devices()), (Some(DType::BF16), 2));
        }
        assert_eq!(config.mount.threads, Some(3));
    }

    #[test]
    fn rules_of_a_file_are_taken_in() {
        let directory = tempfile::tempdir().unwrap();
        let rules = "shard = \"none\"\n[[shard_rules]]\nmatch = \"wq\"\nspec = [\"fsdp\"]\n";
        fs::write(directory.path().join("rules.toml"), rules).unwrap();
        let load = |text: &str| Config::parse(text, Path::new("x.toml"), directory.path());
        let config = load("shard = \"rules.toml\"").unwrap();
        assert_eq!(config.views[0].keys.shard, Some(Word(ShardChoice::None)));
        assert_eq!(config.views[0].keys.shard_rules.len(), 1);
        assert_eq!(load(&config.to_toml().unwrap()).unwrap(), config);
        fs::write(directory.path().join("rules.toml"), "shard = \"other.toml\"").unwrap();
        assert!(load("shard = \"rules.toml\"").unwrap_err().to_string().contains("rules.toml:1: shard: expected auto"));
        assert!(load("shard = \"absent.toml\"").unwrap_err().to_string().contains("absent.toml: No such file"));
    }

    #[test]
    fn words_are_read_and_written() {
        for (text, written) in [("0-3,8", "0-3,8"), ("5,4,4,3", "3-5"), ("7", "7"), ("1,3,5-6", "1,3,5-6")] {
            assert_eq!(text.parse::<Word<Devices>>().unwrap().to_string(), written);
        }
        for bad in ["", "a", "1-", "-1", "1,,2", "0-99999999999"] {
            assert!(bad.parse::<Word<Devices>>().is_err(), "{bad}");
        }
        for (text, bytes) in [("0", 0), ("512", 512), ("64M", 64 << 20), ("1 GiB", 1 << 30), ("2kb", 2048)] {
            assert_eq!(text.parse(), Ok(ByteCount(bytes)), "{text}");
        }
        for bad in ["", "x", "1X", "-1", "99999999999999999999", "99999999999T"] {
            assert!(bad.parse::<ByteCount>().is_err(), "{bad}");
        }
    }
}
