//! What was typed, and nothing else: the flags that several commands share.
#![allow(clippy::doc_markdown, reason = "the documentation of flags is help text, printed as it is")]

use std::path::PathBuf;

use clap::Args;

use crate::{
    plan::{
        LayerRanges, Mesh, Pattern, Rename, Tied,
        config::{
            AllowKey, ByteCount, Devices, LayoutChoice, MadeWhole, MountKeys, ParamValue, PermissionBits, RenameKeys,
            ShardChoice, THREADS_MAX, TimeLimit, ViewKeys, Word,
        },
    },
    source::SourceIo,
    tensor::DType,
};

/// A parameter of a layout, as `name=value`.
fn parameter(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("expected name=value, found {text:?}"))?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

/// The patterns of a flag that may stand alone for all.
fn allow(patterns: &[Pattern]) -> Option<AllowKey> {
    match patterns {
        [] => None,
        patterns if patterns.iter().any(|pattern| pattern.text() == "*") => Some(AllowKey::All(true)),
        patterns => Some(AllowKey::Several(patterns.to_vec())),
    }
}

/// What the user wants to see.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "View")]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(super) struct ViewFlags {
    /// The devices: named axes with sizes.
    ///
    /// Device d is the row-major number of its coordinates, the last axis fastest. Under `--shard auto` the name of an axis
    /// says what it does: fsdp and dp_shard split axis 0 of the unstacked tensor, as torch.chunk does; tensor and tp split by
    /// row or column, by the tensor's role; expert and ep split the experts; data, dp, replica and dp_replicate replicate.
    #[arg(long, value_name = "AXIS=N,...")]
    mesh: Option<Word<Mesh>>,
    /// How tensors are named and shaped: canonical (default), hf, maxtext, maxtext-unscanned, vllm, or a file.
    ///
    /// canonical stacks layers on a new first axis (layers/scanned/wq) and shows them one by one too (layers/0/wq); hf keeps
    /// the repository's own names; maxtext and maxtext-unscanned give exactly what MaxText's converter makes; vllm gives
    /// the fused tensors of vLLM's ranks, and sharded_state/ to load them from. A file describes a layout of your own.
    #[arg(long, value_name = "NAME|FILE.toml")]
    layout: Option<Word<LayoutChoice>>,
    /// Sets a parameter of the layout, such as `vocab_size=152064`. May be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parameter)]
    set: Vec<(String, String)>,
    /// Casts all floats to this type, such as bf16, f16 or f32; `keep` leaves them as they are. Where neither is said the
    /// layout decides: those of MaxText cast to bf16, others keep.
    ///
    /// Rounding is to nearest, ties to even, bit for bit as torch and ml_dtypes do. Block-quantized fp8 weights are
    /// dequantized.
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Word<Option<DType>>>,
    /// How tensors are split over the mesh: auto (default), none, maxtext, or a file of rules.
    ///
    /// auto goes by the name of the mesh axis and the role of the tensor, and in the layouts of MaxText by its logical axes,
    /// which `maxtext` asks for explicitly.
    ///
    /// The file holds tables `[[shard_rules]]` with `match`, a pattern over names in the mount, and `spec`, per axis "-", a
    /// mesh axis, or a list of mesh axes; and `shard = "auto"` or `"none"` for names that no rule matches.
    #[arg(long, value_name = "auto|none|maxtext|FILE.toml")]
    shard: Option<Word<ShardChoice>>,
    /// Lists only these devices, as in 0-3,8; at most 65536. dcp/ and orbax/ are whole all the same.
    #[arg(long, value_name = "LIST")]
    devices: Option<Word<Devices>>,
    /// Puts layers one by one, not stacked, into files that bundle tensors.
    #[arg(long)]
    unscanned: bool,
    /// Refuses splits that are not even.
    #[arg(long)]
    even: bool,
    /// Accepts a checkpoint that lacks layers or tensors: any, or those that match the pattern. May be repeated.
    ///
    /// Layouts of rules leave out what would be made of them.
    ///
    /// In patterns `*` is any text and `?` one character; between slashes is a regular expression: '/rotary/'.
    #[arg(long, value_name = "PATTERN", num_args = 0..=1, require_equals = true, default_missing_value = "*")]
    allow_missing: Vec<Pattern>,
    /// Accepts tensors that no rule of the layout names, any or those that match the pattern; they are left out.
    ///
    /// canonical and hf show tensors of any name, but report those that their family does not know together with what is
    /// missing, for one is probably the other misspelt. This takes them out of that report.
    #[arg(long, value_name = "PATTERN", num_args = 0..=1, require_equals = true, default_missing_value = "*")]
    allow_unmapped: Vec<Pattern>,
    /// Renames what is shown, in any layout and in hf/: all matches of a regular expression, `$1` being its first group.
    ///
    /// May be repeated; each rule takes the names that those before it made. Two tensors of one name are refused.
    #[arg(long, value_name = "REGEX=>REPLACEMENT", value_parser = Rename::parse)]
    rename: Vec<Rename>,
    /// Drops a prefix from names, before other renames.
    #[arg(long, value_name = "PREFIX")]
    strip_prefix: Option<String>,
    /// Puts a prefix before names, after other renames.
    #[arg(long, value_name = "PREFIX")]
    add_prefix: Option<String>,
    /// Renames the repository's tensors before the layout sees them, as for a fine-tune with other prefixes.
    #[arg(long, value_name = "REGEX=>REPLACEMENT", value_parser = Rename::parse)]
    source_rename: Vec<Rename>,
    /// An output head that is the embedding: auto (default), alias or absent.
    ///
    /// auto shows it among the raw files of the layout canonical and holds each weight once in files that bundle tensors; alias
    /// has it everywhere, in hf/ too; absent has it nowhere that the repository does not store it. Layouts of rules (maxtext,
    /// vllm, files) say themselves whether they show it, and refuse the flag.
    #[arg(long, value_name = "auto|alias|absent")]
    tied: Option<Word<Tied>>,
    /// Shows the names that a PEFT model has with this LoRA adapter, and the adapter's own tensors; with `--layout hf`.
    #[arg(long, value_name = "ADAPTER_DIR")]
    lora: Option<PathBuf>,
    /// Shows only tensors that match a pattern, by their names in the repository or else in the mount. May be repeated.
    #[arg(long, value_name = "PATTERN")]
    include: Vec<Pattern>,
    /// Leaves out tensors that match a pattern. May be repeated.
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<Pattern>,
    /// Shows only these layers of the text model, as in 0..8 or 0..4,28.. (half open). config.json in hf/ follows.
    #[arg(long, value_name = "RANGES")]
    layers: Option<Word<LayerRanges>>,
    /// Numbers the layers that `--layers` leaves from 0.
    #[arg(long)]
    renumber: bool,
    /// Leaves out layers of multi-token prediction.
    #[arg(long)]
    no_mtp: bool,
    /// Leaves out towers for images and sound.
    #[arg(long)]
    text_only: bool,
    /// Largest chunk file under orbax/, as in 256M; by default 1 GiB. Larger shards are several chunks.
    #[arg(long, value_name = "SIZE")]
    chunk_bytes: Option<ByteCount>,
    /// Reads flags from a TOML file; flags given as well win.
    ///
    /// Keys are the flags' names with underscores: source, mountpoint, mesh, layout, dtype, shard, devices, unscanned, even,
    /// allow_missing (a boolean or patterns), allow_unmapped, chunk_bytes, strip_prefix, add_prefix, include and exclude (lists),
    /// layers, renumber, no_mtp, text_only, tied, lora; rules `[[cast]]`, `[[shard_rules]]`, `[[logical_rules]]`, and `[[rename]]`
    /// and `[[source_rename]]` with `match` and `to`; tables `[set]` and `[mount]`; and tables `[view.NAME]` for several views of
    /// the source, each under MNT/NAME/. Paths are relative to the file.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
}

/// How bytes are read and made.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Reading")]
pub(super) struct EngineFlags {
    /// How source files are read: auto (mapped, except on network file systems), mmap or pread.
    #[arg(long, value_name = "auto|mmap|pread")]
    source_io: Option<Word<SourceIo>>,
    /// How long a source may give no answer, as in 5s, 500ms or 2m; by default 60s.
    ///
    /// After that time whoever waits for bytes of that file gets an error (EIO in a mount), and so does whoever asks for them
    /// next, until the storage answers again. Storage that is slow but gives bytes is waited for. Other files go on.
    #[arg(long, value_name = "TIME")]
    source_timeout: Option<TimeLimit>,
    /// Reads files to which symbolic links lead out of the repository.
    ///
    /// Without it weights are read all the same, with a warning, but config.json, the tokenizer and all other files are left
    /// out. In the Hugging Face cache the repository's own blobs/ belong to it.
    #[arg(long)]
    follow_symlinks: bool,
    /// Memory for transformed data, as in 512M; by default 1/8 of the memory, at least 256 MiB or 1/4 of it, at most 16 GiB.
    ///
    /// The memory is that of the machine, or the least limit of the control groups that ckfs runs in (containers, systemd's
    /// MemoryMax=). Materialized files count too. A size for which the memory is too small is obeyed, with a warning.
    #[arg(long, value_name = "SIZE")]
    cache_bytes: Option<ByteCount>,
    /// Threads that serve requests, and as many that compute ahead; by default one per core, from 2 to 16, at most one per
    /// 32 MiB of memory.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(THREADS_MAX)))]
    threads: Option<u16>,
}

/// How to mount and serve.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Mount")]
pub(super) struct MountFlags {
    /// Lets all users in; others than root need `user_allow_other` in /etc/fuse.conf.
    ///
    /// Each file can then be read by those that can read the source files that it is made of, and by nobody else: permission bits,
    /// owner and group of the sources and of the directories above them carry over. `ckfs plan` says who that is.
    #[arg(long)]
    allow_other: bool,
    /// Permission bits of all files, in octal as in 0440, in place of what the sources allow.
    ///
    /// Only the bits to read count: the mount cannot be written to, and no file is a program.
    #[arg(long, value_name = "MODE")]
    file_mode: Option<Word<PermissionBits>>,
    /// Permission bits of all directories, as in 0550, in place of what the sources allow; bits to write do not count.
    #[arg(long, value_name = "MODE")]
    dir_mode: Option<Word<PermissionBits>>,
    /// Owner of all files, who may then read them; .ckfs/ stays with the user that mounts.
    #[arg(long, value_name = "UID", value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    uid: Option<u32>,
    /// Group of all files, whose members may then read them; .ckfs/ stays with the user that mounts.
    #[arg(long, value_name = "GID", value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    gid: Option<u32>,
    /// The kernel's read-ahead in KiB.
    #[arg(long, value_name = "KIB")]
    read_ahead: Option<u32>,
    /// Never lets the kernel read byte-identical files by itself.
    #[arg(long)]
    no_passthrough: bool,
    /// Which tensor files are made whole in memory when they are opened, for the kernel to read by itself.
    ///
    /// With `tensors` those of one tensor or a part of one: raw, npy/ and orbax/. With `auto`, the default, also those of many
    /// outside dcp/, unless their directory was just listed or another of its files was just opened and closed again: whoever
    /// did that looks for headers, and the file that is opened once more is then made. With `all` every one. Only files from
    /// 1 MiB to half of the cache are; they are made by all threads at once, and given up a minute after they were closed.
    /// Needs root, as passthrough does; otherwise, and where there is no room, files are made as they are read.
    #[arg(long, value_name = "none|tensors|auto|all")]
    whole: Option<Word<MadeWhole>>,
    /// Reads of tensor files bypass the kernel's page cache: of all, or of those whose path matches, as in `orbax/*`.
    ///
    /// The first read of a file is then about twice as fast and takes no page cache; but each later one makes the bytes anew,
    /// small reads cost a request each, and each mmap of a file drops the pages of those who have mapped it. For loaders that
    /// read each file once from end to end.
    #[arg(long, value_name = "PATTERN", num_args = 0..=1, require_equals = true, default_missing_value = "*")]
    direct_io: Vec<Pattern>,
    /// Copies each tensor file that was opened to an unnamed file in this directory, for the kernel to read by itself.
    ///
    /// Once a file was closed and its copy is made, in the background, opening it again gives the copy: its reads and memory maps
    /// are as fast as those of any file there. Needs the space (a 20th of the file system is left free) and, as
    /// passthrough does, root. Copies end with the mount; they are made by reading the whole file once more.
    #[arg(long, value_name = "DIR")]
    materialize: Option<PathBuf>,
    /// How long to try to unmount while files are open, before detaching.
    #[arg(long, value_name = "SECONDS")]
    grace: Option<u64>,
    /// How long to serve open files after detaching.
    #[arg(long, value_name = "SECONDS")]
    drain: Option<u64>,
}

impl ViewFlags {
    /// As keys of a configuration.
    pub(super) fn keys(&self) -> ViewKeys {
        ViewKeys {
            mesh: self.mesh.clone(),
            layout: self.layout.clone(),
            dtype: self.dtype.clone(),
            shard: self.shard.clone(),
            devices: self.devices.clone(),
            unscanned: self.unscanned.then_some(true),
            even: self.even.then_some(true),
            allow_missing: allow(&self.allow_missing),
            allow_unmapped: allow(&self.allow_unmapped),
            strip_prefix: self.strip_prefix.clone(),
            add_prefix: self.add_prefix.clone(),
            tied: self.tied.clone(),
            lora: self.lora.clone(),
            layers: self.layers.clone(),
            renumber: self.renumber.then_some(true),
            no_mtp: self.no_mtp.then_some(true),
            text_only: self.text_only.then_some(true),
            rename: self.rename.iter().cloned().map(RenameKeys).collect(),
            source_rename: self.source_rename.iter().cloned().map(RenameKeys).collect(),
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            chunk_bytes: self.chunk_bytes,
            cast: Vec::new(),
            shard_rules: Vec::new(),
            logical_rules: Vec::new(),
            set: self.set.iter().map(|(name, value)| (name.clone(), ParamValue::Text(value.clone()))).collect(),
        }
    }
}

impl EngineFlags {
    /// As keys of a configuration.
    pub(super) fn keys(&self) -> MountKeys {
        MountKeys {
            source_io: self.source_io.clone(),
            source_timeout: self.source_timeout,
            follow_symlinks: self.follow_symlinks.then_some(true),
            cache_bytes: self.cache_bytes,
            threads: self.threads.map(usize::from),
            ..MountKeys::default()
        }
    }
}

impl MountFlags {
    /// As keys of a configuration.
    pub(super) fn keys(&self) -> MountKeys {
        MountKeys {
            allow_other: self.allow_other.then_some(true),
            file_mode: self.file_mode.clone(),
            dir_mode: self.dir_mode.clone(),
            uid: self.uid,
            gid: self.gid,
            read_ahead_kb: self.read_ahead,
            passthrough: self.no_passthrough.then_some(false),
            direct_io: allow(&self.direct_io),
            materialize: self.materialize.clone(),
            whole: self.whole.clone(),
            grace_seconds: self.grace,
            drain_seconds: self.drain,
            ..MountKeys::default()
        }
    }
}

/// The flags by which commands choose and read a view.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct SourceFlags {
    #[command(flatten)]
    pub(super) view: ViewFlags,
    #[command(flatten)]
    pub(super) engine: EngineFlags,
}
