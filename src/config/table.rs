//! The table of settings: what is known of each, the structs that hold them, and for each field its row.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use ckfs_source::{Duplicates, SourceIo};

use self::{
    Arity::{Flag, Optional, Required},
    Group::{Logging, Mount, Place, Reading, Serve, View},
};
use super::{
    Allow, Average, ByteCount, CastRule, Dequantize, Devices, DtypeChoice, GgufType, HfCache, LayerRanges,
    LayoutChoice, ListenAddress, LogicalRule, Materialize, MergedLora, Mesh, ModelPart, OwnerId, ParamValue, Pattern,
    PermissionBits, Prefetch, Quantize, Rename, RepoName, Requantize, ShardChoice, ShardRule, Steps, ThreadCount, Tied,
    TimeLimit, WaitTime, WholeNumber,
    near::did_you_mean,
    value::{Fault, KeyForm, SettingField, Toml},
};

/// The subject of a setting: its heading in the help, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Source and mountpoint.
    Place,
    /// The content of a view.
    View,
    /// Reading and making of bytes.
    Reading,
    /// Mounting and serving.
    Mount,
    /// Serving over the network.
    Serve,
    /// Logging.
    Logging,
}

impl Group {
    /// The groups of which all commands that open a checkpoint take the settings.
    pub const READERS: &[Self] = &[Self::View, Self::Reading];

    /// Its heading in the help of a command, and with the commands that take its settings.
    pub fn headings(self) -> [&'static str; 2] {
        match self {
            Self::Place => ["Arguments", "Arguments"],
            Self::View => ["View", "View (commands that take SOURCE)"],
            Self::Reading => ["Reading", "Reading (commands that take SOURCE)"],
            Self::Mount => ["Mount", "Mount (ckfs mount)"],
            Self::Serve => ["Serving", "Serving (ckfs serve)"],
            Self::Logging => ["Logging", "Logging (all commands)"],
        }
    }

    /// A setting with a flag and a key.
    const fn row(self, name: &'static str, arity: Arity, field: FieldAccess) -> Setting {
        let scope = match self {
            Self::Place => SettingScope::Top,
            Self::View => SettingScope::View,
            Self::Reading | Self::Mount | Self::Logging => SettingScope::Mount,
            Self::Serve => SettingScope::Serve,
        };
        Setting {
            name,
            group: self,
            arity,
            field,
            help: "",
            more: "",
            default: None,
            key: None,
            is_flag: true,
            is_common: false,
            is_served: false,
            scope,
        }
    }
}

/// The place of a setting in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingScope {
    /// Above all tables.
    Top,
    /// Above all tables, for every view, or in the table of one.
    View,
    /// In the table `[mount]`.
    Mount,
    /// In the table `[serve]`.
    Serve,
    /// Nowhere.
    None,
}

/// The value of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arity {
    /// None: the flag stands for this word.
    Flag(&'static str),
    /// A value, with this placeholder.
    Required(&'static str),
    /// An optional value, with the first word as placeholder. Without a value the flag stands for the second word.
    Optional(&'static str, &'static str),
}

/// Access to the field of a setting.
#[derive(Clone, Copy, Debug)]
pub struct FieldAccess {
    /// The form of its key's value.
    pub form: KeyForm,
    /// Takes a word of the command line.
    pub add: fn(&mut Settings, &OsStr) -> Result<(), String>,
    /// Takes a value of a file.
    pub read: fn(&mut Settings, Toml<'_>) -> Result<(), Fault>,
    /// The value for a file.
    pub write: fn(&Settings) -> Result<Option<toml::Value>, String>,
    /// Takes from other settings the values that are empty here.
    pub over: fn(&mut Settings, &Settings),
    /// Lets relative paths begin at a directory.
    pub rebase: fn(&mut Settings, &Path),
}

/// One setting: a row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The flag's name, with dashes. `-o` and files have underscores in their place.
    pub name: &'static str,
    /// Its heading.
    pub group: Group,
    /// Its value.
    pub arity: Arity,
    /// The field.
    pub field: FieldAccess,
    /// The help, in a sentence or two.
    pub help: &'static str,
    /// More help, as paragraphs.
    pub more: &'static str,
    /// The default, if it is always the same.
    pub default: Option<&'static str>,
    /// Its name in files, if it differs.
    key: Option<&'static str>,
    /// Whether there is a flag, and an option of `-o`.
    pub is_flag: bool,
    /// Whether the short help shows it.
    pub is_common: bool,
    /// Whether `serve` takes it too, though it is one of `mount`.
    is_served: bool,
    /// Its place in a file.
    pub scope: SettingScope,
}

impl Setting {
    /// Whether commands that take the settings of these groups take it as a flag.
    pub fn is_taken_with(&self, groups: &[Group]) -> bool {
        let also = self.is_served && groups.contains(&Group::Serve);
        self.is_flag && (groups.contains(&self.group) || also)
    }

    /// Whether mount(8) takes it as an option of `-o`.
    pub(crate) fn is_option(&self) -> bool {
        self.is_flag && self.group != Group::Serve
    }

    /// Its name among the options of `-o`.
    pub fn option(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Its key in a file.
    pub(crate) fn toml_key(&self) -> String {
        self.key.map_or_else(|| self.option(), str::to_owned)
    }

    /// Whether its flag may be repeated.
    pub fn repeats(&self) -> bool {
        self.field.form != KeyForm::Word
    }

    /// The flag as the help shows it, with its value.
    pub fn usage(&self) -> String {
        match self.arity {
            Arity::Flag(_) => format!("--{}", self.name),
            Arity::Required(value) => format!("--{} <{value}>", self.name),
            Arity::Optional(value, _) => format!("--{}[=<{value}>]", self.name),
        }
    }
}

/// Access to a field of the settings, or of a part of them.
macro_rules! at {
    ([$($part:ident)?] $field:ident: $kind:ty) => {
        FieldAccess {
            form: <$kind>::FORM,
            add: |settings, text| settings.$($part.)?$field.add(text),
            read: |settings, value| settings.$($part.)?$field.read(value),
            write: |settings| settings.$($part.)?$field.write(),
            over: |settings, base| settings.$($part.)?$field.over(&base.$($part.)?$field),
            rebase: |settings, base| settings.$($part.)?$field.rebase(base),
        }
    };
}

/// A struct of settings, and the rows of its fields. `at` is its place in [`Settings`]; `with` are other structs in it.
macro_rules! settings {
    (
        $(#[$of:meta])*
        struct $name:ident, $rows:ident at $place:tt $(with $($part:ident: $parts:ty),*)?;
        $(
            $(#[$doc:meta])*
            $field:ident: $kind:ty = $group:ident.row($flag:literal, $arity:expr)$(, $with:ident: $value:expr)*;
        )*
    ) => {
        $(#[$of])*
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct $name {
            $($(#[doc = "More of them."] pub $part: $parts,)*)?
            $($(#[$doc])* pub $field: $kind,)*
        }

        const $rows: &[Setting] = &[$(Setting {
            $($with: $value,)*
            ..$group.row($flag, $arity, at!($place $field: $kind))
        }),*];
    };
}

/// Placeholder for settings without a flag.
const NO_FLAG: Arity = Required("");

settings! {
    /// All settings.
    struct Settings, TOP at [] with view: ViewSettings, mount: MountSettings, serve: ServeSettings;

    /// The source: a path, or `org/name[@revision]`.
    source: Option<String> = Place.row("source", NO_FLAG), is_flag: false;
    /// The mountpoint.
    mountpoint: Option<PathBuf> = Place.row("mountpoint", NO_FLAG), is_flag: false;
    /// The repository with the configuration and the tokenizer that the source lacks.
    config_from: Option<String> = Reading.row("config-from", Required("SOURCE")),
        help: "The repository whose config.json and tokenizer the source takes over: a directory or org/name[@revision].",
        more: "For a checkpoint that holds weights only. With --layout hf the weights of MaxText and Megatron get the names and \
               shapes of this model, and hf/ is a complete repository.",
        scope: SettingScope::Top;
    /// The repository with the tensors that the source lacks.
    fill_from: Option<String> = Reading.row("fill-from", Required("SOURCE")),
        help: "The repository that gives what a checkpoint of another layout lacks, such as a vision tower; with --layout hf.",
        scope: SettingScope::Top;
    /// The model that a run began with.
    base: Option<String> = Reading.row("base", Required("MODEL")),
        help: "The model that a run began with, where the run publishes versions of weights as differences (weight_v000007, as slime and \
               miles write them).",
        more: "A version is the base with all differences until then, or the newest whole version with those since. Each tensor is made \
               when it is read and compared with its published digest: one that differs is EIO. With --steps all versions are the steps of a \
               run; SOURCE may also be the directory of one version, beside those that it builds on.",
        scope: SettingScope::Top;
    /// The file with further settings.
    config: Option<PathBuf> = View.row("config", Required("FILE")),
        help: "Reads flags from a TOML file; flags given as well win.",
        more: "Keys are the flags' names with underscores, some with their unit: {keys}; and tables `[view.NAME]` for several views of the source, \
               each under MNT/NAME/. Paths are relative to the file.",
        scope: SettingScope::None, is_common: true;
    /// Longest time until a daemon must be ready.
    start_limit: Option<TimeLimit> = Mount.row("timeout", Required("TIME")),
        help: "How long the daemon may take to be ready, as in 90 (seconds) or 10min.",
        default: Some("300"), scope: SettingScope::None;
}

settings! {
    /// One view.
    struct ViewSettings, VIEW at [view];

    /// The devices.
    mesh: Option<Mesh> = View.row("mesh", Required("AXIS=N,...")),
        help: "The devices: named axes with sizes.",
        more: "Device d is the row-major number of its coordinates, the last axis fastest. Under `--shard auto` the name of an \
               axis says what it does: fsdp and dp_shard split axis 0 of the unstacked tensor, as torch.chunk does; tensor and \
               tp split by row or column, by the tensor's role; expert and ep split the experts; data, dp, replica and \
               dp_replicate replicate. An axis that splits nothing is refused, unless `--replicate` names it.",
        is_common: true;
    /// Mesh axes along which every device holds the same.
    replicate: Vec<String> = View.row("replicate", Required("AXIS")),
        help: "A mesh axis that is to split nothing: every device along it holds the same. May be repeated.";
    /// Names and shapes.
    layout: Option<LayoutChoice> = View.row("layout", Required("NAME|FILE.toml")),
        help: "Names and shapes of tensors: canonical (default), gguf, hf, stored, maxtext[-unscanned], \
               megatron[-unscanned], sglang, torchtitan, transformers, vllm, or a file.",
        more: "canonical stacks layers on a new first axis (layers/scanned/wq) and shows them one by one too (layers/0/wq); hf \
               keeps the repository's own names, and gives them back to a checkpoint of MaxText, Megatron-Core or torchtitan; \
               gguf gives the file that llama.cpp's converter writes; stored keeps a trainer's own names and shapes, the default for checkpoints of Orbax and torch.distributed.checkpoint; maxtext and \
               maxtext-unscanned give exactly what MaxText's converter makes; megatron and megatron-unscanned give the tensors of \
               Megatron-Core's distributed checkpoints; torchtitan and transformers give the names of the modules of torchtitan \
               0.3 and transformers 5, cut as FSDP2 does; vllm and sglang give the fused tensors of those engines' ranks, and \
               sharded_state/ to load them from. A file describes a layout of your own. Without this setting a repository of Hugging Face has canonical, \
               and every other checkpoint stored.",
        is_common: true;
    /// Parameters of the layout.
    set: BTreeMap<String, ParamValue> = View.row("set", Required("NAME=VALUE")),
        help: "Sets a parameter of the layout, such as `vocab_size=152064`. May be repeated.";
    /// Dtype of all floats.
    dtype: Option<DtypeChoice> = View.row("dtype", Required("TYPE")),
        help: "Casts all floats to this type, such as bf16, f16 or f32; `keep` leaves them as they are. Where neither is said \
               the layout decides: those of MaxText cast to bf16, others keep.",
        more: "Rounding is to nearest, ties to even, bit for bit as numpy with ml_dtypes does through f32. Quantized weights are decoded. What the \
               model's own code keeps in float32 stays as it is stored, but for the layouts of MaxText.",
        is_common: true;
    /// Dtype of decoded quantized tensors.
    dequantize: Option<Dequantize> = View.row("dequantize", Optional("TYPE", "own")),
        help: "Decodes quantized weights, to this type or to the model's own, and leaves all else as it is stored.",
        more: "Layouts of MaxText and vLLM do so by themselves. Scales, zero points and other operands of the decoding are hidden.",
        is_common: true;
    /// How weights are quantized.
    quantize: Option<Quantize> = View.row("quantize", Required("SCHEME")),
        help: "Shows the weights of linear layers as codes and scales, computed on read: fp8-block, fp8-channel, fp8-tensor, mxfp8, mxfp4, \
               nvfp4, int8-channel, int4 or mlx:4bit-g64.",
        more: "Variants: fp8-block:ue8m0 has scales that are powers of two; mxfp8:sglang and nvfp4:modelopt have the names of those programs; \
               int4-g32 has a scale for 32 elements, int4 for 128; mlx has 2 to 6 or 8 bits and groups of 32, 64 or 128, \
               and mlx:mxfp4. Codes and scales are bit for bit those of the converters; hf/ is then a quantized \
               repository. With the layouts canonical, hf and stored. What is quantized already is decoded first.",
        is_common: true;
    /// Type of the matrices of a GGUF file.
    gguf_type: Option<GgufType> = View.row("gguf-type", Required("f32|f16|bf16|q8_0")),
        help: "Type of the matrices of gguf/model.gguf. By default that of the first one in the repository: bf16, or else f16.",
        more: "As with llama.cpp's converter norms, vectors and routers are F32, and a matrix that q8_0 does not fit is F16.";
    /// The form of codes that are stored already.
    requantize: Option<Requantize> = View.row("requantize", Required("keep:compressed-tensors|keep:modelopt|keep:fp8|keep:mxfp4")),
        help: "Shows stored codes in the form of another library, permuted and never made anew; hf/ is then a repository of it.",
        more: "keep:compressed-tensors takes AWQ, GPTQ, ModelOpt's NVFP4, fp8 in blocks and gpt-oss's MXFP4; keep:modelopt takes NVFP4 of \
               compressed-tensors, keep:fp8 its blocks, keep:mxfp4 the experts of gpt-oss. With the layouts canonical, hf and stored.";
    /// Tensors that are not quantized.
    quantize_ignore: Vec<Pattern> = View.row("quantize-ignore", Required("PATTERN")),
        help: "Leaves tensors as they are under --quantize, by their names or those of their modules. May be repeated.",
        more: "In patterns `{0-3}` is any number of these: 'model.layers.{0-1}.*' leaves the first two layers.";
    /// The tensors that are quantized, of those that could be.
    quantize_only: Vec<Pattern> = View.row("quantize-only", Required("PATTERN")),
        help: "Quantizes only the linear layers that match a pattern, as '*.experts.*'. May be repeated.";
    /// Dtypes by pattern.
    cast: Vec<CastRule> = View.row("cast", NO_FLAG), is_flag: false;
    /// Choice of specs.
    shard: Option<ShardChoice> = View.row("shard", Required("auto|none|maxtext|FILE.toml")),
        help: "How tensors are split over the mesh: auto (default), none, maxtext, or a file of rules.",
        more: "auto goes by the name of the mesh axis and the role of the tensor, and in the layouts of MaxText by its logical \
               axes, which `maxtext` asks for explicitly.\n\n\
               The file holds tables `[[shard_rules]]` with `match`, a pattern over names in the mount, and `spec`, per axis \
               \"-\", a mesh axis, or a list of mesh axes; and `shard = \"auto\"` or `\"none\"` for names that no rule matches.",
        is_common: true;
    /// Specs by pattern.
    shard_rules: Vec<ShardRule> = View.row("shard-rules", NO_FLAG), is_flag: false;
    /// Mesh axes of logical axes. They replace the layout's rules for the same axes.
    logical_rules: Vec<LogicalRule> = View.row("logical-rules", NO_FLAG), is_flag: false;
    /// The devices to list.
    devices: Option<Devices> = View.row("devices", Required("LIST")),
        help: "Lists only these devices, as in 0-3,8 or 0..4,8 (half open); at most 65536. dcp/ and orbax/ are whole all the same.",
        is_common: true;
    /// Whether bundles hold one tensor per source tensor.
    unscanned: Option<bool> = View.row("unscanned", Flag("true")),
        help: "Puts layers one by one, not stacked, into files that bundle tensors.";
    /// Whether uneven splits are refused.
    even: Option<bool> = View.row("even", Flag("true")),
        help: "Refuses splits that are not even.";
    /// Whether missing layers and tensors are accepted.
    allow_missing: Option<Allow> = View.row("allow-missing", Optional("PATTERN", "*")),
        help: "Accepts a checkpoint that lacks layers or tensors: any, or those that match the pattern. May be repeated.",
        more: "Layouts of rules leave out the tensors that need them. The index may name tensors that no file has.\n\n\
               In patterns `*` is any text and `?` one character; between slashes is a regular expression: '/rotary/'.";
    /// Whether tensors are accepted that no rule of the layout names.
    allow_unmapped: Option<Allow> = View.row("allow-unmapped", Optional("PATTERN", "*")),
        help: "Accepts tensors that no rule of the layout names, any or those that match the pattern; they are left out.",
        more: "canonical and hf show tensors of any name, but report those that their family does not know together with what \
               is missing, because one is probably the other, misspelt. This takes them out of that report.";
    /// Renames of the shown names, in order.
    rename: Vec<Rename> = View.row("rename", Required("REGEX=>REPLACEMENT")),
        help: "Renames the shown tensors, in any layout and in hf/: all matches of a regular expression, `$1` being its first group.",
        more: "May be repeated; each rule takes the names that those before it made. Two tensors of one name are refused.";
    /// Prefix to drop from names.
    strip_prefix: Option<String> = View.row("strip-prefix", Required("PREFIX")),
        help: "Drops a prefix from names, before other renames.";
    /// Prefix to put before names.
    add_prefix: Option<String> = View.row("add-prefix", Required("PREFIX")),
        help: "Puts a prefix before names, after other renames.";
    /// Renames of the repository's tensors, in order, before layouts see them.
    source_rename: Vec<Rename> = View.row("source-rename", Required("REGEX=>REPLACEMENT")),
        help: "Renames the repository's tensors before the layout sees them, as for a fine-tune with other prefixes.",
        more: "Expressions may look ahead and behind. The _checkpoint_conversion_mapping of a model of transformers, with its braces, \
               is one rule: the first expression that matches a name counts.";
    /// Treatment of tied weights.
    tied: Option<Tied> = View.row("tied", Required("auto|alias|absent")),
        help: "An output head that is the embedding: auto (default), alias or absent.",
        more: "auto shows it among the raw files of the layout canonical and holds each weight once in files that bundle \
               tensors; alias has it everywhere, in hf/ too; absent has it nowhere that the repository does not store it. \
               Layouts of rules (maxtext, vllm, sglang, files) say themselves whether they show it, and refuse the flag. A head that is stored and \
               differs from the embedding, though config.json ties them, is a tensor of its own in every layout and hf/ says so; absent \
               leaves it out of every layout but hf/.";
    /// Directory of a LoRA adapter.
    lora: Option<PathBuf> = View.row("lora", Required("ADAPTER_DIR")),
        help: "Shows the names that a PEFT model has with this LoRA adapter (a directory, hf://org/name, s3:// ...), and the adapter's own \
               tensors; with `--layout hf`.";
    /// Directory of a LoRA adapter that is merged into the tensors.
    merge_lora: Option<MergedLora> = View.row("merge-lora", Required("ADAPTER_DIR|self")),
        help: "Merges a LoRA adapter of PEFT (a directory, hf://org/name, s3:// ...) into the tensors on read, in every layout: W + scale * \
               (B @ A) in f32, the products of a row of B and a column of A added from the first to the last, then rounded once to the \
               dtype that is shown. What cannot be merged so, as DoRA or a quantized base, is refused. self is the adapter that a \
               training checkpoint holds beside its base under PEFT's names (base_layer, lora_A.default); its adapter_config.json is \
               beside the weights, in lora_adapter/, or in --config-from.";
    /// Tensors to show.
    include: Vec<Pattern> = View.row("include", Required("PATTERN")),
        help: "Shows only tensors that match a pattern, by their names in the repository or else in the mount. May be repeated.";
    /// Tensors not to show.
    exclude: Vec<Pattern> = View.row("exclude", Required("PATTERN")),
        help: "Leaves out tensors that match a pattern. May be repeated.";
    /// Layers of the text model.
    layers: Option<LayerRanges> = View.row("layers", Required("RANGES")),
        help: "Shows only these layers of the text model, as in 0..8 or 0..4,28.. (half open), or 0-7. config.json in hf/ follows.";
    /// Whether the remaining layers are numbered from 0.
    renumber: Option<bool> = View.row("renumber", Flag("true")),
        help: "Numbers the layers that `--layers` leaves from 0.";
    /// Whether to leave out multi-token prediction.
    no_mtp: Option<bool> = View.row("no-mtp", Flag("true")),
        help: "Leaves out layers of multi-token prediction.";
    /// Whether to leave out towers for images and sound.
    text_only: Option<bool> = View.row("text-only", Flag("true")),
        help: "Leaves out towers for images and sound.";
    /// The part of the model to show.
    part: Option<ModelPart> = View.row("part", Required("text|vision|audio|encoder|mtp|draft")),
        help: "Shows one part of the model alone; hf/ is a repository of it, which the part's own class or an engine loads.",
        more: "mtp and draft keep names and config.json of the whole; draft has also the embedding and the head that the predictors of \
               further tokens share with the model, as engines read draft models. The others have those of their class. A \
               part that the model does not have is refused with those that it has.";
    /// Bytes of the largest chunk file.
    chunk_bytes: Option<ByteCount> = View.row("chunk-bytes", Required("SIZE")),
        help: "Largest chunk file under orbax/, as in 256M; by default 1 GiB. Larger shards are several chunks.";
    /// Bytes of the largest weight file of a generated repository.
    max_shard_bytes: Option<ByteCount> = View.row("max-shard-bytes", Required("SIZE")),
        help: "Largest weight file under a generated hf/, as in 2G; by default 5 GB. A larger tensor is a file by itself.",
        more: "hf/ is generated where the source is no repository, as with --config-from. The files of a repository stay as they are.";
}

settings! {
    /// Reading, mounting and serving: the same for all views.
    struct MountSettings, MOUNT at [mount];

    /// Access to source files.
    source_io: Option<SourceIo> = Reading.row("source-io", Required("auto|mmap|pread")),
        help: "How source files are read: auto (mapped, but pread on network file systems and FUSE), mmap or pread.";
    /// Longest time without an answer from a source.
    source_timeout: Option<TimeLimit> = Reading.row("source-timeout", Required("TIME")),
        help: "How long a source may give no answer, as in 5s, 500ms or 2min; by default 60s.",
        more: "After that time every request that waits for bytes of that file ends with an error (EIO in a mount), and so do later \
               requests, until the storage answers again. Storage that is slow but gives bytes is waited for. Other files go on. For \
               remote sources it is the longest wait of one read for all its bytes, repetitions included.";
    /// Whether the whole training state of a checkpoint is shown.
    training_state: Option<bool> = Reading.row("training-state", Flag("true")),
        help: "Shows the whole training state of a checkpoint of Orbax or torch: optimizer state, counters, and what is no tensor.",
        more: "By default the model alone is read (of Orbax the tensors under `params`, of torch those that are not under `optimizer`); `plan` lists what is left out. \
               What is no tensor passes through dcp/ of a DCP checkpoint, and orbax/ of one of Orbax, in the layout `stored`.";
    /// Which copy of a tensor counts.
    duplicates: Option<Duplicates> = Reading.row("duplicates", Required("index|last|refuse")),
        help: "Which copy of a tensor counts if several files hold one: the index's, that of the last file, or none.",
        more: "transformers and vLLM read every tensor of the files that the index names, in the order of the files' names: the last copy \
               stays. Without this setting the index's copy is taken if it is the last one too; else copies are refused. With `index`, \
               tensors that the index does not name are left out.";
    /// The variant of the weights.
    variant: Option<String> = Reading.row("variant", Required("NAME")),
        help: "The variant of the weights, such as fp16 for model.fp16.safetensors and its index; by default that without a name.";
    /// Whether a checkpoint may be read that its saver has not marked as finished.
    allow_unfinished: Option<bool> = Reading.row("allow-unfinished", Flag("true")),
        help: "Reads a checkpoint of Orbax that nothing marks as finished, such as a copy without commit_success.txt.",
        more: "A finished step still comes first. All chunks must be there: those that Orbax may leave out, since they hold one value, are \
               not told from those that are lost. Without it such a checkpoint is refused.";
    /// What is averaged; without it the source is shown as it is.
    average: Option<Average> = Reading.row("average", Required("last=N|STEP=WEIGHT,...")),
        help: "Shows the weighted average of steps of a run: the N newest, or these; SOURCE is then the run.",
        more: "Each element is w1 * x1 + w2 * x2 + ... in f32, in the order given (last=N: by number, each weight 1/N), rounded once to \
               the dtype that is shown. Weights may be negative. What is equal in all, integers too, stays as it is; integers and float64 \
               that differ are refused, and so are other names, shapes or configurations, and quantized weights. With --steps each step is the \
               average of the last N up to it. A file may have sources of any kind: [[average]] with source and weight.",
        scope: SettingScope::Top;
    /// The steps of a run to show; without it the source is one checkpoint.
    steps: Option<Steps> = Reading.row("steps", Required("all|latest|latest=N")),
        help: "SOURCE is the directory of a run, and each of its steps is shown by its number: all of them, the newest, or the N newest.",
        more: "A step is shown when its trainer has finished it (Orbax, torch.distributed.checkpoint, transformers, Megatron, verl, SkyRL, \
               prime-rl), never before. `ckfs plan` without this flag lists the steps of a run, and why one is not finished. A mount shows \
               MNT/STEP/ with the tree of the step's checkpoint, and MNT/latest, a link to the newest; `serve` the same below /files/, and \
               each step as a revision of the repository; `export` and `verify` go through the steps.",
        is_common: true;
    /// Time between two looks for new steps where nothing tells of them.
    steps_poll: Option<TimeLimit> = Reading.row("steps-poll", Required("TIME")),
        help: "How often to look for new steps where nothing tells of them: on network file systems and at services; by default 60s.",
        more: "On local file systems new steps are seen at once.";
    /// Whether symbolic links may lead out of the repository.
    follow_symlinks: Option<bool> = Reading.row("follow-symlinks", Flag("true")),
        help: "Reads files to which symbolic links lead out of the repository.",
        more: "Without it weights are read all the same, with a warning, but config.json, the tokenizer and all other files are \
               left out. In the Hugging Face cache the repository's own blobs/ belong to it.";
    /// Whether remote sources use only what this machine has.
    offline: Option<bool> = Reading.row("offline", Flag("true")),
        help: "Uses no network: a remote source is what the caches of this machine have.",
        more: "HF_HUB_OFFLINE does the same for names of the Hub.",
        is_common: true;
    /// Directory of the disk cache of remote sources.
    cache_dir: Option<PathBuf> = Reading.row("cache-dir", Required("DIR")),
        help: "Where bytes of remote sources are kept; by default CKFS_CACHE_DIR, else ~/.cache/ckfs.",
        more: "Views, mounts and later runs share it, also at the same time. XDG_CACHE_HOME moves the default. `ckfs cache` shows \
               and checks it.",
        is_common: true;
    /// Most bytes of the disk cache.
    cache_disk_bytes: Option<ByteCount> = Reading.row("cache-disk-bytes", Required("SIZE")),
        help: "Most disk space of the cache of remote sources, as in 200G; by default half of its file system.",
        more: "By default a 20th of the file system stays free, with a SIZE a 100th and at most 1 GiB. What was not used for the longest time is removed first, never what \
               a reader needs now. Where there is no room, bytes pass to readers without being kept.";
    /// Whether remote bytes are fetched before they are read.
    prefetch: Option<Prefetch> = Reading.row("prefetch", Required("auto|on|off")),
        help: "Whether a mount fetches what the listed devices will read before it is read: auto (if --devices lists a part), on, \
               off.",
        more: "Readers always go first. It concerns remote sources only; `ckfs fetch` does the same without a mount.";
    /// What is done with the cache of the Hub's own client.
    hf_cache: Option<HfCache> = Reading.row("hf-cache", Required("read|share")),
        help: "Whether complete files of the Hub are placed into the Hugging Face cache, for other programs: read (they are not), share.",
        more: "Each is placed whole, after its bytes were compared with the Hub's digest. When all files of the revision that ckfs \
               reads are there, the snapshot appears, and transformers finds it offline. A 20th of the file system stays free.";
    /// Whether remote sources may be unencrypted.
    allow_http: Option<bool> = Reading.row("allow-http", Flag("true")),
        help: "Accepts http:// of other machines for remote sources: unencrypted, and without proof of who answers.";
    /// The tensor files to materialize, and where.
    materialize: Option<Materialize> = Reading.row("materialize", Required("auto|memory|none|DIR")),
        help: "Which tensor files a mount materializes: makes once, completely, for the kernel to read by itself.",
        more: "`auto`, the default: in memory, files of one tensor that is converted or gathered, from 1 MiB to half of the cache, when \
               they are opened (those of orbax/ when they are opened again, see --direct-io); and \
               bundles (safetensors/, pt/) if all that the mount lists fit three quarters of the cache together, in pieces as \
               their tensors are read, so that a program that reads only headers causes next to nothing. Never dcp/, of which \
               each rank reads its parts. `memory`: every file from 1 MiB to half of the cache. `none`: no file. A directory: \
               every tensor file, to an unnamed file there, after it was closed; a 20th of the file system stays free. `ckfs \
               plan` shows what that comes to. Needs root and Linux 6.9, as passthrough does, and a directory on no file system \
               that is stacked on others (overlay); else the mount warns and writes nothing there. Where there is no room, and for an open with \
               O_DIRECT, files are made as they are read. Files in memory are given up a minute after they were closed.";
    /// Bytes of transformed data kept in memory.
    cache_bytes: Option<ByteCount> = Reading.row("cache-bytes", Required("SIZE")),
        help: "Memory for transformed data, as in 512M; by default 1/8 of the memory, at least 256 MiB or 1/4 of it, at most \
               16 GiB.",
        more: "The memory is that of the machine, or the least limit of the control groups that ckfs runs in (containers, \
               systemd's MemoryMax=). Materialized files count too. A size for which the memory is too small is obeyed, with a \
               warning.";
    /// Threads that serve requests.
    threads: Option<ThreadCount> = Reading.row("threads", Required("N")),
        help: "Threads that serve requests, and as many that compute ahead; by default one per core, from 2 to 16, at most \
               one per 32 MiB of memory.";
    /// Whether a missing mountpoint is made.
    mkdir: Option<bool> = Mount.row("mkdir", Flag("true")),
        help: "Makes the mountpoint, and the directories above it, if it is missing.",
        more: "`ckfs umount` leaves the directory. A mount that fails to start removes what it made.",
        is_common: true;
    /// The command to run for each new step.
    on_step: Option<String> = Mount.row("on-step", Required("COMMAND")),
        help: "With --steps: runs this command of the shell for each new step, one after the other.",
        more: "CKFS_STEP is the number of the step and CKFS_STEP_PATH its directory in the mount, as in `--on-step 'eval.sh \
               \"$CKFS_STEP_PATH/hf\"'`; `serve` sets CKFS_STEP_URL, its address below /files/. Steps that are there at the start are not \
               new. `ckfs status` shows exit codes; what the command prints goes to the log.",
        is_served: true;
    /// Whether all users may read.
    allow_other: Option<bool> = Mount.row("allow-other", Flag("true")),
        help: "Lets all users read; users other than root need `user_allow_other` in /etc/fuse.conf.",
        more: "A user can then read a file exactly if that user can read the source files that it is made of: \
               permission bits, owner and group of the sources and of the directories above them carry over. `ckfs plan` lists \
               those users.",
        is_common: true;
    /// Whether another process keeps the mount when the daemon is killed, and starts the next one.
    keeper: Option<bool> = Mount.row("keeper", Flag("true")),
        help: "A second, idle process keeps the mount when the daemon is killed, and starts the next daemon: readers wait, and go on.",
        more: "From Linux 6.9 on also reads go on that the daemon had begun; before, files that were open end with an error. It needs a \
               state directory ($XDG_STATE_HOME or $HOME). A service of systemd has its descriptor store for this, as the units of this \
               program do. Not with --steps.";
    /// Permission bits of files. They replace those that follow from the sources.
    file_mode: Option<PermissionBits> = Mount.row("file-mode", Required("MODE")),
        help: "Permission bits of all files, in octal as in 0440, in place of what the sources allow.",
        more: "Only the bits to read count: the mount cannot be written to, and no file is a program.",
        is_served: true;
    /// Permission bits of directories, likewise.
    dir_mode: Option<PermissionBits> = Mount.row("dir-mode", Required("MODE")),
        help: "Permission bits of all directories, as in 0550, in place of what the sources allow; bits to write do not count.",
        is_served: true;
    /// Owner of files and directories.
    uid: Option<OwnerId> = Mount.row("uid", Required("UID")),
        help: "Owner of all files, with the right to read them; .ckfs/ stays with the user that mounts.";
    /// Group of files and directories.
    gid: Option<OwnerId> = Mount.row("gid", Required("GID")),
        help: "Group of all files, with the right to read them; .ckfs/ stays with the user that mounts.";
    /// The kernel's read-ahead in KiB.
    read_ahead_kb: Option<WholeNumber<0, { u32::MAX }>> = Mount.row("read-ahead", Required("KIB")),
        help: "The kernel's read-ahead in KiB.",
        key: Some("read_ahead_kb");
    /// Whether the kernel reads byte-identical files directly.
    passthrough: Option<bool> = Mount.row("no-passthrough", Flag("false")),
        help: "Never lets the kernel read byte-identical files by itself.",
        key: Some("passthrough");
    /// Tensor files, by path in the mount, that bypass the page cache.
    direct_io: Option<Allow> = Mount.row("direct-io", Optional("PATTERN", "*")),
        help: "Reads of tensor files bypass the kernel's page cache: of all, or of those whose path matches, as in `orbax/*`.",
        more: "The first read of a file is then about twice as fast and takes no page cache; but each later one makes the bytes \
               anew, small reads cost a request each, and each mmap of a file drops the pages that other processes have mapped. For \
               loaders that read each file once from end to end. Without this option, and unless `--materialize` is `memory` or a \
               directory, that is so for the first open of files from 1 MiB on that are read once: those of orbax/, those of dcp/ \
               if each device of the mesh has its own, and those of unchanged bytes.";
    /// Longest time to try to unmount while files are open, before detaching.
    grace: Option<WaitTime> = Mount.row("grace", Required("TIME")),
        help: "How long to try to unmount while files are open, before detaching, as in 5 (seconds) or 2min.",
        key: Some("grace_seconds");
    /// Longest time to serve open files after detaching.
    drain: Option<WaitTime> = Mount.row("drain", Required("TIME")),
        help: "How long to serve open files after detaching, as in 20 (seconds) or 10min; `serve`: answers that have begun, after a signal to end.",
        key: Some("drain_seconds"), is_served: true;
    /// File for the daemon's log.
    log_file: Option<PathBuf> = Logging.row("log-file", Required("FILE")),
        help: "Appends the log to this file instead of standard error. A daemon in the background logs by default to the \
               system's log, else to a file of its own: see `ckfs mount --help`.";
}

settings! {
    /// Serving over the network.
    struct ServeSettings, SERVE at [serve];

    /// Where HTTP is answered.
    listen: Option<ListenAddress> = Serve.row("listen", Required("ADDR")),
        help: "Answers HTTP at this address, as in 127.0.0.1:8421, which is the default. A port alone is one of 127.0.0.1; port 0 is any free one.",
        more: "An address that other machines reach needs --token-file or --allow-anyone.",
        is_common: true;
    /// Where the requests of S3 are answered.
    s3: Option<ListenAddress> = Serve.row("s3", Required("ADDR")),
        help: "Answers the read requests of S3 at this address too, as in 127.0.0.1:8422: path style, one bucket `ckfs`, keys as under /files/.",
        more: "Signatures are not checked, unless --token-file is set: then the access key is `ckfs`, and its secret the token.",
        is_common: true;
    /// The name of the repository.
    name: Option<RepoName> = Serve.row("name", Required("ORG/NAME")),
        help: "The name of hf/ as a repository; by default the source's own org/name, else ckfs/DIRECTORY.",
        more: "The views of a file are ckfs/VIEW.",
        is_common: true;
    /// The file with the token that requests must have.
    token_file: Option<PathBuf> = Serve.row("token-file", Required("FILE")),
        help: "Answers only requests that have the token in the first line of this file, as `Authorization: Bearer TOKEN`.",
        more: "Clients of the Hub send it as HF_TOKEN. /healthz and /readyz need none.",
        is_common: true;
    /// Whether other machines may read without a token.
    allow_anyone: Option<bool> = Serve.row("allow-anyone", Flag("true")),
        help: "Lets every machine that reaches the address read, without a token, what all users of this machine may read.",
        more: "Files whose sources are not readable for all users, and .ckfs/, are answered for requests with the token, or from this machine \
               where no token is set. --file-mode and --dir-mode replace the permissions of the sources.";
    /// Names of this server that clients of this machine may ask by.
    allow_host: Vec<Pattern> = Serve.row("allow-host", Required("PATTERN")),
        help: "Answers programs of this machine also where they ask by this name, as in models.example.com or '*.example.com'. May be repeated.",
        more: "Without a token a server of this machine is asked by an address, localhost, or a name that the public DNS cannot have \
               (without a dot, or below .localhost and .internal): a page in a browser could have any other name lead here. A proxy \
               that passes its own name on needs this.";
}

/// Every setting. The order is that of the help and of files that the program writes.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    let mut rows = [VIEW, TOP, MOUNT, SERVE].concat();
    rows.sort_by_key(|row| row.group);
    rows
});

/// Settings of former versions: name, and the present equivalent. Such a flag, option or key is refused with this text.
pub const FORMER: &[(&str, &str)] = &[(
    "whole",
    "is now `materialize`: `auto` for `auto` and `tensors`, `memory` for `all`, `none` for `none`, or a directory",
)];

/// The message for a name of a former version, with underscores or dashes.
pub fn former(name: &str) -> Option<String> {
    let (_, now) = FORMER.iter().find(|(former, _)| former.replace('-', "_") == name.replace('-', "_"))?;
    Some(format!("`{name}` {now}"))
}

/// The message for a name that no `what` has, of which there are these.
pub(super) fn unknown(what: &str, name: &str, names: impl Iterator<Item = String>) -> String {
    if let Some(now) = former(name) {
        return format!("{what} {now}");
    }
    let names: Vec<String> = names.collect();
    let near = did_you_mean(what, name, names.iter().map(String::as_str));
    near.unwrap_or_else(|| format!("unknown {what} {name:?}; there are: {}", names.join(", ")))
}

/// The keys of a file in words, for the help.
pub static KEYS: LazyLock<String> = LazyLock::new(|| {
    let of = |form: KeyForm| {
        let rows = SETTINGS.iter().filter(|row| matches!(row.scope, SettingScope::Top | SettingScope::View));
        rows.filter(move |row| row.field.form == form).map(Setting::toml_key).collect::<Vec<_>>()
    };
    let tables = |form| of(form).into_iter().map(|key| format!("`[[{key}]]`")).collect::<Vec<_>>().join(", ");
    format!(
        "{}, {} (a boolean or patterns), {} (lists); rules {}, where a rename has `match` and `to`, or `mapping`; tables {}, `[serve]` with the flags of `ckfs serve`, and `[mount]`, with the options of mounts: {}",
        of(KeyForm::Word).join(", "),
        of(KeyForm::Allow).join(" and "),
        of(KeyForm::List).join(" and "),
        tables(KeyForm::Rules),
        of(KeyForm::Table).into_iter().map(|key| format!("`[{key}]`")).collect::<Vec<_>>().join(", "),
        SETTINGS
            .iter()
            .filter(|row| row.scope == SettingScope::Mount)
            .map(Setting::toml_key)
            .collect::<Vec<_>>()
            .join(", "),
    )
});
