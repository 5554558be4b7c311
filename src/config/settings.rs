//! The settings from one place: a command line, a list of `-o`, or a table of a file. A field without a setting is
//! empty.

use std::{collections::BTreeMap, path::PathBuf};

use ckfs_source::{Duplicates, SourceIo};

use super::{
    Allow, Average, ByteCount, CastRule, Dequantize, Devices, DtypeChoice, GgufType, HfCache, LayerRanges,
    LayoutChoice, ListenAddress, LogicalRule, Materialize, MergedLora, Mesh, ModelPart, OwnerId, ParamValue, Pattern,
    PermissionBits, Prefetch, Quantize, Rename, RepoName, Requantize, ShardChoice, ShardRule, Steps, ThreadCount, Tied,
    TimeLimit, WaitTime,
};

/// All settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// The source: a path, or `org/name[@revision]`.
    pub source: Option<String>,
    /// The repository with the configuration and the tokenizer that the source lacks.
    pub config_from: Option<String>,
    /// The repository with the tensors that the source lacks.
    pub fill_from: Option<String>,
    /// The model that a run began with.
    pub base: Option<String>,
    /// The mountpoint.
    pub mountpoint: Option<PathBuf>,
    /// The file with further settings.
    pub config: Option<PathBuf>,
    /// The content of a view.
    pub view: ViewSettings,
    /// Reading, mounting and serving.
    pub mount: MountSettings,
    /// Serving over the network.
    pub serve: ServeSettings,
    /// Longest time until a daemon must be ready.
    pub start_limit: Option<TimeLimit>,
}

/// One view.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ViewSettings {
    /// The devices.
    pub mesh: Option<Mesh>,
    /// Mesh axes along which every device holds the same.
    pub replicate: Vec<String>,
    /// Names and shapes.
    pub layout: Option<LayoutChoice>,
    /// Parameters of the layout.
    pub set: BTreeMap<String, ParamValue>,
    /// Dtype of all floats.
    pub dtype: Option<DtypeChoice>,
    /// Dtype of decoded quantized tensors.
    pub dequantize: Option<Dequantize>,
    /// How weights are quantized.
    pub quantize: Option<Quantize>,
    /// Type of the matrices of a GGUF file.
    pub gguf_type: Option<GgufType>,
    /// The form of codes that are stored already.
    pub requantize: Option<Requantize>,
    /// Tensors that are not quantized.
    pub quantize_ignore: Vec<Pattern>,
    /// The tensors that are quantized, of those that could be.
    pub quantize_only: Vec<Pattern>,
    /// Dtypes by pattern.
    pub cast: Vec<CastRule>,
    /// Choice of specs.
    pub shard: Option<ShardChoice>,
    /// Specs by pattern.
    pub shard_rules: Vec<ShardRule>,
    /// Mesh axes of logical axes. They replace the layout's rules for the same axes.
    pub logical_rules: Vec<LogicalRule>,
    /// The devices to list.
    pub devices: Option<Devices>,
    /// Whether bundles hold one tensor per source tensor.
    pub unscanned: Option<bool>,
    /// Whether uneven splits are refused.
    pub even: Option<bool>,
    /// Whether missing layers and tensors are accepted.
    pub allow_missing: Option<Allow>,
    /// Whether tensors are accepted that no rule of the layout names.
    pub allow_unmapped: Option<Allow>,
    /// Renames of the shown names, in order.
    pub rename: Vec<Rename>,
    /// Prefix to drop from names.
    pub strip_prefix: Option<String>,
    /// Prefix to put before names.
    pub add_prefix: Option<String>,
    /// Renames of the repository's tensors, in order, before layouts see them.
    pub source_rename: Vec<Rename>,
    /// Treatment of tied weights.
    pub tied: Option<Tied>,
    /// Directory of a LoRA adapter.
    pub lora: Option<PathBuf>,
    /// Directory of a LoRA adapter that is merged into the tensors.
    pub merge_lora: Option<MergedLora>,
    /// Tensors to show.
    pub include: Vec<Pattern>,
    /// Tensors not to show.
    pub exclude: Vec<Pattern>,
    /// Layers of the text model.
    pub layers: Option<LayerRanges>,
    /// Whether the remaining layers are numbered from 0.
    pub renumber: Option<bool>,
    /// Whether to leave out multi-token prediction.
    pub no_mtp: Option<bool>,
    /// Whether to leave out towers for images and sound.
    pub text_only: Option<bool>,
    /// The part of the model to show.
    pub part: Option<ModelPart>,
    /// Bytes of the largest chunk file.
    pub chunk_bytes: Option<ByteCount>,
    /// Bytes of the largest weight file of a generated repository.
    pub max_shard_bytes: Option<ByteCount>,
}

/// Reading, mounting and serving: the same for all views.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MountSettings {
    /// Access to source files.
    pub source_io: Option<SourceIo>,
    /// Longest time without an answer from a source.
    pub source_timeout: Option<TimeLimit>,
    /// Which copy of a tensor counts.
    pub duplicates: Option<Duplicates>,
    /// The variant of the weights.
    pub variant: Option<String>,
    /// Whether symbolic links may lead out of the repository.
    pub follow_symlinks: Option<bool>,
    /// Whether remote sources use only what this machine has.
    pub offline: Option<bool>,
    /// Directory of the disk cache of remote sources.
    pub cache_dir: Option<PathBuf>,
    /// Most bytes of the disk cache.
    pub cache_disk_bytes: Option<ByteCount>,
    /// Whether remote bytes are fetched before they are read.
    pub prefetch: Option<Prefetch>,
    /// What is done with the cache of the Hub's own client.
    pub hf_cache: Option<HfCache>,
    /// Whether remote sources may be unencrypted.
    pub allow_http: Option<bool>,
    /// Whether the whole training state of a checkpoint is shown.
    pub training_state: Option<bool>,
    /// Whether a checkpoint may be read that its saver has not marked as finished.
    pub allow_unfinished: Option<bool>,
    /// What is averaged; without it the source is shown as it is.
    pub average: Option<Average>,
    /// The steps of a run to show; without it the source is one checkpoint.
    pub steps: Option<Steps>,
    /// Time between two looks for new steps where nothing tells of them.
    pub steps_poll: Option<TimeLimit>,
    /// The command to run for each new step.
    pub on_step: Option<String>,
    /// Bytes of transformed data kept in memory.
    pub cache_bytes: Option<ByteCount>,
    /// Threads that serve requests.
    pub threads: Option<ThreadCount>,
    /// Whether a missing mountpoint is made.
    pub mkdir: Option<bool>,
    /// Whether all users may read.
    pub allow_other: Option<bool>,
    /// Permission bits of files. They replace those that follow from the sources.
    pub file_mode: Option<PermissionBits>,
    /// Permission bits of directories, likewise.
    pub dir_mode: Option<PermissionBits>,
    /// Owner of files and directories.
    pub uid: Option<OwnerId>,
    /// Group of files and directories.
    pub gid: Option<OwnerId>,
    /// The kernel's read-ahead in KiB.
    pub read_ahead_kb: Option<u32>,
    /// Whether the kernel reads byte-identical files directly.
    pub passthrough: Option<bool>,
    /// Tensor files, by path in the mount, that bypass the page cache.
    pub direct_io: Option<Allow>,
    /// The tensor files to materialize, and where.
    pub materialize: Option<Materialize>,
    /// Longest time to try to unmount while files are open, before detaching.
    pub grace: Option<WaitTime>,
    /// Longest time to serve open files after detaching.
    pub drain: Option<WaitTime>,
    /// File for the daemon's log.
    pub log_file: Option<PathBuf>,
    /// Whether another process keeps the mount when the daemon is killed, and starts the next one.
    pub keeper: Option<bool>,
}

/// Serving over the network.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServeSettings {
    /// Where HTTP is answered.
    pub listen: Option<ListenAddress>,
    /// Where the requests of S3 are answered.
    pub s3: Option<ListenAddress>,
    /// The name of the repository.
    pub name: Option<RepoName>,
    /// The file with the token that requests must have.
    pub token_file: Option<PathBuf>,
    /// Whether other machines may read without a token.
    pub allow_anyone: Option<bool>,
    /// Names of this server that clients of this machine may ask by.
    pub allow_host: Vec<Pattern>,
}
