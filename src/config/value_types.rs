//! The values that users write as one word, each with its own spelling.

use std::{
    ffi::OsStr,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    str::FromStr,
    sync::{Arc, LazyLock},
};

use ckfs_layouts::embedded_layouts;
use ckfs_source::{Duplicates, SourceIo};
use ckfs_tensor::DType;
use serde::{Deserialize, Serialize};
use toml::de::DeValue;

use super::{
    DEVICES_LISTED_MAX, Mesh,
    layers::{parse_range, ranges},
    near::did_you_mean,
    value::{Choice, Fault, KeyForm, Numbers, SettingValue, Toml, deserialize, in_order, integer, read_as, read_word},
};

/// Most threads that serve requests.
pub const THREADS_MAX: u16 = 512;

/// Names of the layouts in the program: those that need no rules, and those that have files of them.
pub static LAYOUTS: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let mut names = vec!["canonical", "gguf", "hf", "stored"];
    names.extend(embedded_layouts().iter().map(|layout| layout.name.as_str()));
    names.sort_unstable();
    names
});

fn is_toml(text: &str) -> bool {
    Path::new(text).extension().is_some_and(|extension| extension == "toml")
}

impl SettingValue for Mesh {
    fn from_word(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.to_string().into())
    }

    /// Reads `"fsdp=4,tensor=2"` or `{ fsdp = 4, tensor = 2 }`, the axes in the order of the text.
    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        let at = value.span();
        let fault = |reason| Fault { at: at.clone(), reason };
        let text = value.get_ref().as_str().map(str::to_owned);
        let DeValue::Table(table) = value.into_inner() else {
            let expected = || "mesh: expected a text such as \"fsdp=4,tensor=2\", or a table of sizes".to_owned();
            return text.ok_or_else(expected).and_then(|text| Self::from_word(&text)).map_err(fault);
        };
        let axis = |(name, size): (toml::Spanned<String>, Toml<'_>)| {
            Ok(format!("{}={}", name.get_ref(), deserialize::<u64>(size)?))
        };
        let axes = in_order(table).into_iter().map(axis).collect::<Result<Vec<String>, _>>()?;
        let mesh = Self::from_word(&axes.join(",")).map_err(fault)?;
        // A quoted name may hold anything.
        if mesh.axes().len() == axes.len() {
            Ok(mesh)
        } else {
            Err(fault(format!("mesh: expected names of axes, found {axes:?}")))
        }
    }
}

/// A layout of the program, or a file from the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayoutChoice {
    /// One of [`LAYOUTS`].
    Named(&'static str),
    /// A file of rules.
    File {
        /// The file.
        path: PathBuf,
        /// Its content; empty until the file has been read.
        text: Arc<str>,
    },
}

impl LayoutChoice {
    /// The accepted words, for messages.
    pub fn expected() -> String {
        format!("expected {} or a file *.toml", LAYOUTS.join(", "))
    }

    /// The file of rules, if it is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Named(_) => None,
            Self::File { path, .. } => Some(path),
        }
    }
}

impl SettingValue for LayoutChoice {
    fn from_word(text: &str) -> Result<Self, String> {
        if is_toml(text) {
            return Ok(Self::File { path: text.into(), text: "".into() });
        }
        let name = LAYOUTS.iter().copied().find(|name| *name == text);
        name.map(Self::Named).ok_or_else(|| {
            let near = did_you_mean("layout", text, LAYOUTS.iter().copied());
            near.unwrap_or_else(|| format!("layout {text:?}: {}", Self::expected()))
        })
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        match self {
            Self::Named(name) => Ok((*name).into()),
            Self::File { path, .. } => path.to_toml(),
        }
    }

    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        if let Self::File { path, .. } = self { Some(path) } else { None }
    }
}

/// The float type of a word of this setting. The `other` accepted word is one for messages.
fn float_of(text: &str, setting: &str, other: &str) -> Result<DType, String> {
    let found = DType::from_user(text);
    found.filter(|dtype| dtype.is_float()).ok_or_else(|| {
        let floats = DType::ALL.iter().filter(|dtype| dtype.is_float());
        let names: Vec<String> =
            floats.flat_map(|dtype| [dtype.code().to_ascii_lowercase(), dtype.name().to_owned()]).collect();
        let near = did_you_mean("dtype", text, names.iter().map(String::as_str).chain([other]));
        let expected = || format!("{setting}: expected {other} or a float type such as bf16, found {text:?}");
        near.filter(|_| found.is_none()).unwrap_or_else(expected)
    })
}

/// A requested dtype, to which floats are cast; `None` keeps theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DtypeChoice(pub Option<DType>);

impl SettingValue for DtypeChoice {
    fn from_word(text: &str) -> Result<Self, String> {
        if text == "keep" { Ok(Self(None)) } else { float_of(text, "dtype", "keep").map(|dtype| Self(Some(dtype))) }
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.0.map_or("keep", DType::name).into())
    }
}

/// The dtype of decoded quantized tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dequantize {
    /// The dtype that each would have without quantization: the model's.
    Own,
    /// This one.
    To(DType),
}

/// How weights are quantized on read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantize {
    /// E4M3 in blocks of 128 x 128, as DeepSeek's.
    Fp8Block,
    /// The same with scales that are powers of two.
    Fp8BlockUe8m0,
    /// E4M3 with a scale for each row.
    Fp8Channel,
    /// E4M3 with a scale for the matrix.
    Fp8Tensor,
    /// E4M3 with an exponent for 32, as compressed-tensors makes and stores it.
    Mxfp8,
    /// The same as sglang makes and stores it.
    Mxfp8Sglang,
    /// E2M1 with an exponent for 32.
    Mxfp4,
    /// E2M1 with an E4M3 scale for 16 and a factor, as compressed-tensors stores it.
    Nvfp4,
    /// The same as `ModelOpt` stores it.
    Nvfp4Modelopt,
    /// Integers of 8 bits with a scale for each row.
    Int8Channel,
    /// Integers of 4 bits with a scale for this many neighbours in a row.
    Int4(u64),
    /// Integers of some bits with a scale and a bias for this many neighbours in a row, as `mlx_lm` stores them.
    Mlx(u8, u64),
    /// E2M1 with an exponent for 32, as `mlx_lm` stores it.
    MlxMxfp4,
}

impl Quantize {
    /// The words of all schemes but those with a number.
    const WORDS: [(&'static str, Self); 13] = [
        ("fp8-block", Self::Fp8Block),
        ("fp8-block:ue8m0", Self::Fp8BlockUe8m0),
        ("fp8-channel", Self::Fp8Channel),
        ("fp8-tensor", Self::Fp8Tensor),
        ("mxfp8", Self::Mxfp8),
        ("mxfp8:sglang", Self::Mxfp8Sglang),
        ("mxfp4", Self::Mxfp4),
        ("nvfp4", Self::Nvfp4),
        ("nvfp4:modelopt", Self::Nvfp4Modelopt),
        ("int8-channel", Self::Int8Channel),
        ("int4", Self::Int4(INT4_GROUP)),
        ("mlx:4bit-g64", Self::Mlx(4, 64)),
        ("mlx:mxfp4", Self::MlxMxfp4),
    ];

    /// The words of all schemes but those with a number.
    pub fn words() -> impl Iterator<Item = &'static str> + Clone {
        Self::WORDS.iter().map(|(word, _)| *word)
    }

    /// The accepted words, for messages.
    fn expected() -> String {
        let words: Vec<&str> = Self::words().collect();
        format!("{} or int4-gN", words.join(", "))
    }

    /// Its word.
    pub fn word(self) -> String {
        let known = Self::WORDS.iter().find(|(_, scheme)| *scheme == self).map(|(word, _)| (*word).to_owned());
        match (known, self) {
            (Some(word), _) => word,
            (None, Self::Int4(group)) => format!("int4-g{group}"),
            (None, Self::Mlx(bits, group)) => format!("mlx:{bits}bit-g{group}"),
            (None, other) => format!("{other:?}"),
        }
    }
}

/// Elements that share a scale by default: those of compressed-tensors' preset W4A16.
const INT4_GROUP: u64 = 128;

/// Most elements that share a scale.
const INT4_GROUP_MAX: u64 = 1 << 16;

/// Schemes that need data to calibrate, and so are no function of the weights.
const CALIBRATED: [&str; 5] = ["gptq", "awq", "smoothquant", "autoround", "spinquant"];

impl SettingValue for Quantize {
    fn from_word(text: &str) -> Result<Self, String> {
        if let Some((_, scheme)) = Self::WORDS.iter().find(|(word, _)| *word == text) {
            return Ok(*scheme);
        }
        if let Some(group) = text.strip_prefix("int4-g") {
            let group = group.parse().ok().filter(|group: &u64| group.is_multiple_of(8));
            let group = group.filter(|group| (8..=INT4_GROUP_MAX).contains(group));
            return group.map(Self::Int4).ok_or_else(|| {
                format!("quantize: {text:?}: expected a group of 8 to {INT4_GROUP_MAX} elements, a multiple of 8, as in int4-g32")
            });
        }
        if let Some(variant) = text.strip_prefix("mlx:").filter(|variant| variant.contains("bit")) {
            let (bits, group) = variant.split_once("bit-g").unwrap_or_default();
            let known = |text: &str, known: &[u64]| text.parse().ok().filter(|number| known.contains(number));
            let bits = known(bits, &[2, 3, 4, 5, 6, 8]).and_then(|bits| u8::try_from(bits).ok());
            let found = bits.zip(known(group, &[32, 64, 128])).map(|(bits, group)| Self::Mlx(bits, group));
            return found.ok_or_else(|| {
                format!(
                    "quantize: {text:?}: expected 2, 3, 4, 5, 6 or 8 bits and a group of 32, 64 or 128, as in mlx:4bit-g64, or \
                     mlx:mxfp4"
                )
            });
        }
        let calibrated = CALIBRATED.iter().find(|name| text.to_ascii_lowercase().starts_with(**name));
        if let Some(name) = calibrated {
            return Err(format!(
                "quantize: {name} needs data to calibrate, so that its codes do not follow from the weights alone: expected {}, \
                 which do",
                Self::expected()
            ));
        }
        let near = did_you_mean("scheme", text, Self::words());
        Err(near.unwrap_or_else(|| format!("quantize: expected {}, found {text:?}", Self::expected())))
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.word().into())
    }
}

impl SettingValue for Dequantize {
    fn from_word(text: &str) -> Result<Self, String> {
        if text == "own" { Ok(Self::Own) } else { float_of(text, "dequantize", "own").map(Self::To) }
    }

    /// `true` is the flag without a type.
    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected true or a float type such as bf16")]
        enum Key {
            Flag(bool),
            Word(String),
        }
        read_as(value, |key| match key {
            Key::Flag(true) => Ok(Self::Own),
            Key::Flag(false) => Err("dequantize: expected true or a float type such as bf16, found false".to_owned()),
            Key::Word(word) => Self::from_word(&word),
        })
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(match self {
            Self::Own => "own",
            Self::To(dtype) => dtype.name(),
        }
        .into())
    }
}

/// Enums of words: each choice with its word, and each list with its name for messages.
macro_rules! choices {
    ($($(#[$meta:meta])* pub enum $name:ident: $what:literal {
        $($(#[$of:meta])* $choice:ident = $word:literal,)*
    })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$of])* $choice,)* }

        impl Choice for $name {
            const WHAT: &'static str = $what;
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, Self::$choice)),*];
        }
    )*};
}

choices! {
    /// A part of a model that is shown alone.
    pub enum ModelPart: "part" {
        /// The text model.
        Text = "text",
        /// The tower for images.
        Vision = "vision",
        /// The tower for sound.
        Audio = "audio",
        /// The encoder.
        Encoder = "encoder",
        /// What predicts further tokens.
        Mtp = "mtp",
        /// The same, with the embedding and the head that it shares with the model.
        Draft = "draft",
    }

    /// The form in which codes that are stored already are shown.
    pub enum Requantize: "form of codes" {
        /// That of compressed-tensors.
        CompressedTensors = "keep:compressed-tensors",
        /// That of `ModelOpt`.
        ModelOpt = "keep:modelopt",
        /// That of DeepSeek and transformers for 8-bit floats in blocks.
        Fp8 = "keep:fp8",
        /// That of gpt-oss.
        Mxfp4 = "keep:mxfp4",
    }

    /// The type of the matrices of a GGUF file.
    pub enum GgufType: "gguf_type" {
        /// F32.
        F32 = "f32",
        /// F16.
        F16 = "f16",
        /// BF16.
        Bf16 = "bf16",
        /// Blocks of 32 integers of 8 bits with a scale.
        Q8_0 = "q8_0",
    }

    /// Whether the bytes that the listed devices will read are fetched from remote sources before they are read.
    #[derive(Default)]
    pub enum Prefetch: "prefetch" {
        /// If `--devices` lists a part of the mesh.
        #[default]
        Auto = "auto",
        /// Always.
        On = "on",
        /// Never.
        Off = "off",
    }

    /// What is done with the cache of the Hugging Face Hub's own client.
    #[derive(Default)]
    pub enum HfCache: "use of the Hugging Face cache" {
        /// It is read.
        #[default]
        Read = "read",
        /// Complete, verified files of the Hub are placed there too.
        Share = "share",
    }

    /// Treatment of an output head that is the embedding.
    #[derive(Default)]
    pub enum Tied: "tied" {
        /// As an alias in the raw tree of the layout canonical; bundles and `hf/` hold each weight once.
        #[default]
        Auto = "auto",
        /// As a separate tensor everywhere, also in bundles and `hf/`.
        Alias = "alias",
        /// Not at all, unless the repository stores it and its configuration does not say that it is the embedding.
        Absent = "absent",
    }
}

impl Choice for Duplicates {
    const WHAT: &'static str = "treatment of duplicates";
    const WORDS: &'static [(&'static str, Self)] =
        &[("index", Self::Index), ("last", Self::Last), ("refuse", Self::Refuse)];
}

impl Choice for SourceIo {
    const WHAT: &'static str = "source I/O";
    const WORDS: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("mmap", Self::Mmap), ("pread", Self::Pread)];
}

/// The tensor files to materialize, and where. A materialized file is made once, completely, and the kernel reads it by
/// itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Materialize {
    /// None.
    None,
    /// In memory: files of one tensor, and bundles if all of them fit together.
    #[default]
    Auto,
    /// In memory: every file that fits.
    Memory,
    /// On a disk, in this directory: every file, after it is closed.
    Dir(PathBuf),
}

impl SettingValue for Materialize {
    fn from_os(text: &OsStr) -> Result<Self, String> {
        match text.to_str() {
            Some("none") => Ok(Self::None),
            Some("auto") => Ok(Self::Auto),
            Some("memory") => Ok(Self::Memory),
            Some("") => Err("materialize: expected auto, memory, none or a directory, found nothing".to_owned()),
            // A directory of such a name is written with a slash.
            Some(word @ ("all" | "tensors" | "whole" | "dir")) => {
                Err(format!("materialize: expected auto, memory, none or a directory such as ./{word}, found {word:?}"))
            }
            Some(word) if word.contains("://") => {
                Err(format!("materialize: expected auto, memory, none or a directory, found the address {word:?}"))
            }
            Some(_) | None => Ok(Self::Dir(text.into())),
        }
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        match self {
            Self::None => Ok("none".into()),
            Self::Auto => Ok("auto".into()),
            Self::Memory => Ok("memory".into()),
            Self::Dir(dir) => dir.to_toml(),
        }
    }

    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        if let Self::Dir(dir) = self { Some(dir) } else { None }
    }
}

/// The adapter that is merged into the tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MergedLora {
    /// The one that a training checkpoint holds beside its base.
    Own,
    /// The one in this directory, or at this address.
    Dir(PathBuf),
}

impl MergedLora {
    /// The path as it is given; `self` for the adapter beside the base.
    pub fn path(&self) -> &Path {
        if let Self::Dir(dir) = self { dir } else { Path::new("self") }
    }
}

impl SettingValue for MergedLora {
    fn from_os(text: &OsStr) -> Result<Self, String> {
        if text == "self" { Ok(Self::Own) } else { PathBuf::from_os(text).map(Self::Dir) }
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        self.path().to_path_buf().to_toml()
    }

    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        if let Self::Dir(dir) = self { Some(dir) } else { None }
    }
}

/// Sharding of tensors that no rule matches, or a file with rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardChoice {
    /// By the layout's logical axes, or by the names of mesh axes and the roles of tensors.
    Auto,
    /// By logical axes, with MaxText's rules where the layout has none.
    Logical,
    /// Not at all.
    None,
    /// By the rules in a file, and by its `shard` key where none matches. Holds the path until the file has been read.
    File(PathBuf),
}

impl SettingValue for ShardChoice {
    fn from_word(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            "maxtext" => Ok(Self::Logical),
            file if is_toml(file) => Ok(Self::File(file.into())),
            _ => Err(did_you_mean("sharding", text, ["auto", "none", "maxtext"].into_iter())
                .unwrap_or_else(|| format!("shard: expected auto, none, maxtext or a file *.toml, found {text:?}"))),
        }
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        match self {
            Self::Auto => Ok("auto".into()),
            Self::None => Ok("none".into()),
            Self::Logical => Ok("maxtext".into()),
            Self::File(path) => path.to_toml(),
        }
    }

    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        if let Self::File(path) = self { Some(path) } else { None }
    }
}

/// Permission bits in octal digits: `0440`. Bits to write have no effect on a read-only mount, and are kept here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermissionBits(pub u16);

impl SettingValue for PermissionBits {
    fn from_word(text: &str) -> Result<Self, String> {
        let digits = text.strip_prefix("0o").unwrap_or(text);
        let bits = u16::from_str_radix(digits, 8).ok().filter(|bits| *bits <= 0o777 && !digits.starts_with('+'));
        bits.map(Self).ok_or_else(|| format!("mode: expected octal digits from 0 to 0777 such as 0440, found {text:?}"))
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(format!("{:04o}", self.0).into())
    }
}

/// A whole number from `LEAST` to `MOST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WholeNumber<const LEAST: u32, const MOST: u32>(pub(crate) u32);

/// The number of a user or group. The greatest 32-bit number is not one.
pub type OwnerId = WholeNumber<0, { u32::MAX - 1 }>;

/// A number of threads, from 1 to [`THREADS_MAX`].
pub type ThreadCount = WholeNumber<1, { THREADS_MAX as u32 }>;

impl<const LEAST: u32, const MOST: u32> WholeNumber<LEAST, MOST> {
    /// The number.
    pub fn number(self) -> u32 {
        self.0
    }

    /// The number, as one of things in memory.
    pub fn count(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl<const LEAST: u32, const MOST: u32> SettingValue for WholeNumber<LEAST, MOST> {
    fn from_word(text: &str) -> Result<Self, String> {
        let found = text.parse().ok().filter(|number| (LEAST..=MOST).contains(number));
        let expected = || format!("expected a whole number from {LEAST} to {MOST}, found {}", text.escape_debug());
        found.map(Self).ok_or_else(expected)
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(i64::from(self.0).into())
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        read_as(value, |number: u64| Self::from_word(&number.to_string()))
    }
}

/// A list of devices, ascending: `0-3,8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices(pub Vec<u64>);

impl Devices {
    /// In the form that [`SettingValue::from_word`] reads.
    pub fn text(&self) -> String {
        ranges(&self.0)
    }
}

impl SettingValue for Devices {
    fn from_word(text: &str) -> Result<Self, String> {
        let malformed =
            |part: &str| format!("devices: expected numbers and ranges such as 0-3,8 or 0..4, found {part:?}");
        let mut devices = Vec::new();
        for part in text.split(',').map(str::trim) {
            // The number of the last device is not known here: a list has an end.
            let range = parse_range(part).filter(|_| !part.ends_with("..")).ok_or_else(|| malformed(part))?;
            if range.end - range.start > DEVICES_LISTED_MAX - (devices.len() as u64).min(DEVICES_LISTED_MAX) {
                return Err(format!("devices: expected at most {DEVICES_LISTED_MAX}, found more in {text:?}"));
            }
            devices.extend(range);
        }
        devices.sort_unstable();
        devices.dedup();
        Ok(Self(devices))
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        read_as(value, |numbers: Numbers| Self::from_word(&numbers.text()))
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.text().into())
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

impl SettingValue for ByteCount {
    fn from_word(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        integer(self.0)
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        read_word(value, "a number of bytes such as 67108864 or \"64M\"")
    }
}

/// The value of a layout's parameter: a text, or a number or boolean as in TOML.
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

impl ParamValue {
    /// As `--set` reads it.
    pub fn text(&self) -> String {
        match self {
            Self::Bool(value) => value.to_string(),
            Self::Integer(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Text(value) => value.clone(),
        }
    }
}

impl SettingValue for ParamValue {
    const SEVERAL: KeyForm = KeyForm::Table;

    fn from_word(text: &str) -> Result<Self, String> {
        Ok(Self::Text(text.to_owned()))
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        toml::Value::try_from(self).map_err(|error| error.to_string())
    }
}

/// An address to listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenAddress(pub SocketAddr);

impl SettingValue for ListenAddress {
    /// Reads `PORT`, `:PORT`, `localhost:PORT`, `IP:PORT` or `[IP]:PORT`. Names of other hosts would have to be looked up.
    fn from_word(text: &str) -> Result<Self, String> {
        let port = text.strip_prefix("localhost:").or_else(|| text.strip_prefix(':')).unwrap_or(text);
        if let Ok(port) = port.parse::<u16>() {
            return Ok(Self(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)));
        }
        let expected = || format!("expected PORT, or IP:PORT such as 127.0.0.1:8421, found {text:?}");
        text.parse().map(Self).map_err(|_| expected())
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.0.to_string().into())
    }
}

/// Longest name of a repository, as clients of the Hub have it.
const NAME_BYTES_MAX: usize = 96;

/// The name of a repository: `org/name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoName(String);

impl RepoName {
    /// Checks a name as clients of the Hub do.
    ///
    /// # Errors
    /// What was expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "expected ORG/NAME of letters, digits, -, _ and ., at most {NAME_BYTES_MAX} long, without -- and .., as clients \
                 of the Hub take it, found {text:?}"
            )
        };
        let is_part = |part: &str| {
            let known = part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
            known && !part.is_empty() && !part.starts_with(['-', '.']) && !part.ends_with(['-', '.'])
        };
        let valid = text.split('/').count() == 2
            && text.split('/').all(is_part)
            && text.len() <= NAME_BYTES_MAX
            && !text.contains("--")
            && !text.contains("..")
            && !text.to_ascii_lowercase().ends_with(".git");
        if valid { Ok(Self(text.to_owned())) } else { Err(expected()) }
    }

    /// The name, with a slash.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl SettingValue for RepoName {
    fn from_word(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.0.as_str().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_this_machine() {
        for (text, expected) in [
            ("8421", "127.0.0.1:8421"),
            (":8421", "127.0.0.1:8421"),
            ("localhost:0", "127.0.0.1:0"),
            ("0.0.0.0:1", "0.0.0.0:1"),
            ("[::1]:2", "[::1]:2"),
        ] {
            assert_eq!(ListenAddress::from_word(text).unwrap().0.to_string(), expected);
        }
        for text in ["", "x", "1.2.3.4", "99999", "1.2.3.4:99999", "example.org:80", "http://127.0.0.1:80"] {
            assert!(ListenAddress::from_word(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_whole_number_may_be_its_first_and_its_last() {
        let found = |text: &str| ThreadCount::from_word(text).map(WholeNumber::count).ok();
        assert_eq!(
            (found("0"), found("1"), found("512"), found("513")),
            (None, Some(1), Some(usize::from(THREADS_MAX)), None)
        );
        assert_eq!(OwnerId::from_word("4294967294").map(WholeNumber::number), Ok(u32::MAX - 1));
        assert!(OwnerId::from_word("4294967295").is_err() && OwnerId::from_word("-1").is_err());
    }

    #[test]
    fn names_are_those_that_clients_take() {
        for text in ["org/name", "ckfs/x.y_z-1", "a/b"] {
            assert_eq!(RepoName::parse(text).unwrap().as_str(), text);
        }
        let long = format!("a/{}", "b".repeat(95));
        for text in ["", "name", "a/b/c", "/b", "a/", "a b/c", "a/-b", "a/b.", "a/b--c", "a/b..c", "a/b.git", &long] {
            assert!(RepoName::parse(text).is_err(), "{text}");
        }
    }
}
