//! What one place says, typed: a command line, a list of `-o`, a table of a file. Every field is empty where nothing is said.

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    Allow, ByteCount, CastRule, Dequantize, Devices, DtypeChoice, LayerRanges, LayoutChoice, LogicalRule, Materialize,
    Mesh, OwnerId, ParamValue, Pattern, PermissionBits, Rename, ShardChoice, ShardRule, ThreadCount, Tied, TimeLimit,
};
use crate::source::SourceIo;

/// All that may be said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// What to mount: a path, or `org/name[@revision]`.
    pub source: Option<String>,
    /// Where.
    pub mountpoint: Option<PathBuf>,
    /// The file that says more.
    pub config: Option<PathBuf>,
    /// What is to be seen.
    pub view: ViewSettings,
    /// How it is read, mounted and served.
    pub mount: MountSettings,
    /// Seconds that a daemon may take to be ready.
    pub start_seconds: Option<u64>,
}

/// One view.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ViewSettings {
    /// The devices.
    pub mesh: Option<Mesh>,
    /// Names and shapes.
    pub layout: Option<LayoutChoice>,
    /// Parameters of the layout.
    pub set: BTreeMap<String, ParamValue>,
    /// Dtype of all floats.
    pub dtype: Option<DtypeChoice>,
    /// What quantized tensors are decoded to.
    pub dequantize: Option<Dequantize>,
    /// Dtypes by pattern.
    pub cast: Vec<CastRule>,
    /// How specs are chosen.
    pub shard: Option<ShardChoice>,
    /// Specs by pattern.
    pub shard_rules: Vec<ShardRule>,
    /// Mesh axes of logical axes, in place of the layout's rules for the same axes.
    pub logical_rules: Vec<LogicalRule>,
    /// The devices to list.
    pub devices: Option<Devices>,
    /// Whether bundles hold one tensor per source tensor.
    pub unscanned: Option<bool>,
    /// Whether uneven splits are refused.
    pub even: Option<bool>,
    /// Whether missing layers and tensors are accepted.
    pub allow_missing: Option<Allow>,
    /// Whether tensors that no rule of the layout names are accepted.
    pub allow_unmapped: Option<Allow>,
    /// Renames of what is shown, in order.
    pub rename: Vec<Rename>,
    /// Dropped from names.
    pub strip_prefix: Option<String>,
    /// Put before names.
    pub add_prefix: Option<String>,
    /// Renames of the repository's tensors, in order, before layouts see them.
    pub source_rename: Vec<Rename>,
    /// How tied weights are shown.
    pub tied: Option<Tied>,
    /// Directory of a LoRA adapter.
    pub lora: Option<PathBuf>,
    /// Tensors to show.
    pub include: Vec<Pattern>,
    /// Tensors not to show.
    pub exclude: Vec<Pattern>,
    /// Layers of the text model.
    pub layers: Option<LayerRanges>,
    /// Whether the layers left are numbered from 0.
    pub renumber: Option<bool>,
    /// Without multi-token prediction.
    pub no_mtp: Option<bool>,
    /// Without towers for images and sound.
    pub text_only: Option<bool>,
    /// Bytes of the largest chunk file.
    pub chunk_bytes: Option<ByteCount>,
}

/// How to read, mount and serve: the same for all views.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MountSettings {
    /// How source files are read.
    pub source_io: Option<SourceIo>,
    /// How long a source may give no answer.
    pub source_timeout: Option<TimeLimit>,
    /// Whether symbolic links may lead out of the repository.
    pub follow_symlinks: Option<bool>,
    /// Bytes of transformed data kept in memory.
    pub cache_bytes: Option<ByteCount>,
    /// Threads that serve requests.
    pub threads: Option<ThreadCount>,
    /// Lets all users read.
    pub allow_other: Option<bool>,
    /// Permission bits of files, in place of what the sources allow.
    pub file_mode: Option<PermissionBits>,
    /// Permission bits of directories, likewise.
    pub dir_mode: Option<PermissionBits>,
    /// Owner of files and directories.
    pub uid: Option<OwnerId>,
    /// Group of files and directories.
    pub gid: Option<OwnerId>,
    /// The kernel's read-ahead in KiB.
    pub read_ahead_kb: Option<u32>,
    /// Lets the kernel read byte-identical files by itself.
    pub passthrough: Option<bool>,
    /// Tensor files, by path in the mount, that bypass the page cache.
    pub direct_io: Option<Allow>,
    /// Which tensor files are materialized, and where.
    pub materialize: Option<Materialize>,
    /// How long to try to unmount while files are open, before detaching.
    pub grace_seconds: Option<u64>,
    /// How long to serve open files after detaching.
    pub drain_seconds: Option<u64>,
    /// Where the daemon writes its log.
    pub log_file: Option<PathBuf>,
}
