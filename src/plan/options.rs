//! The meaning of settings: the options of a plan.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, LazyLock},
};

use ckfs_checkpoint::{Checkpoint, Container};
use ckfs_config::{
    Allow, CastRule, Dequantize, DtypeChoice, GgufType, LayoutChoice, LogicalRule, MergedLora, Mesh, ModelPart,
    Pattern, Quantize, Rename, Requantize, ShardChoice, ShardRule, Tied, ViewSettings,
};
use ckfs_layouts::LayoutTraits;
use ckfs_tensor::DType;

use super::{
    embedded::Embedded, family::Family, layout_file::LayoutFile, problem::PlanError, select::Subset, shard::Sharding,
};

/// How tensors are named and shaped.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Layout {
    /// Generic: layers stacked, short names, `[out, in]` kept.
    #[default]
    Canonical,
    /// The tensors of the GGUF file that llama.cpp's converter writes.
    Gguf,
    /// The repository's own names, as names of files.
    Hf,
    /// The checkpoint's own names and shapes, split as the trainer splits them.
    Stored,
    /// A layout in the program, as data: rules for each model family, chosen by `config.json`.
    Embedded(Embedded),
    /// A file from the user.
    File(Arc<LayoutFile>),
}

impl Layout {
    /// Its name; for a file, its path.
    pub fn name(&self) -> &str {
        match self {
            Self::Canonical => "canonical",
            Self::Gguf => "gguf",
            Self::Hf => "hf",
            Self::Stored => "stored",
            Self::Embedded(embedded) => &embedded.name,
            Self::File(file) => &file.label,
        }
    }

    /// What the program says of a layout in it; of any other, nothing.
    pub(crate) fn traits(&self) -> &'static LayoutTraits {
        static NONE: LazyLock<LayoutTraits> = LazyLock::new(LayoutTraits::default);
        if let Self::Embedded(embedded) = self { &embedded.0.traits } else { &NONE }
    }

    /// The chosen layout. The text of a file has been read.
    ///
    /// # Errors
    /// Everything wrong with the file.
    ///
    /// # Panics
    /// If the name is none of a layout.
    pub fn of(choice: &LayoutChoice) -> Result<Self, PlanError> {
        match choice {
            LayoutChoice::Named("canonical") => Ok(Self::Canonical),
            LayoutChoice::Named("gguf") => Ok(Self::Gguf),
            LayoutChoice::Named("hf") => Ok(Self::Hf),
            LayoutChoice::Named("stored") => Ok(Self::Stored),
            LayoutChoice::Named(name) => {
                Ok(Self::Embedded(Embedded::find(name).expect("the choice is of these names")))
            }
            LayoutChoice::File { path, text } => {
                LayoutFile::parse(&path.display().to_string(), text).map(|file| Self::File(Arc::new(file)))
            }
        }
    }
}

/// The word that tables have for layers, and another one: transformers 5.24 saves the text layers of Kimi K2.5 as
/// `language_model.model.blocks.N`, because its rename for the vision tower takes them too when it is turned round. Every other
/// program reads `layers.N`, and so does each layout here.
const RESPELLED: [&str; 2] = ["layers", "blocks"];

/// The rename that gives a known model's layers the word of its releases. `None` if they have it.
fn respelled(checkpoint: &Checkpoint) -> Option<Rename> {
    let family = Family::of(checkpoint)?;
    let has = |prefix: &str, word: &str| checkpoint.table().with_prefix(&format!("{prefix}{word}.")).next().is_some();
    let [word, other] = RESPELLED;
    // Without a prefix nothing says that the layers are those of the text model.
    let mut prefixes = family.prefixes.iter().filter(|prefix| !prefix.is_empty());
    let prefix = prefixes.find(|prefix| has(prefix, other) && !has(prefix, word))?;
    let pattern = format!("^{}", fancy_regex::escape(&format!("{prefix}{other}.")));
    Rename::new(&pattern, &format!("{prefix}{word}.")).ok()
}

/// The user's request for one view of a checkpoint.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the user's")]
pub struct ViewOptions {
    /// The devices.
    pub mesh: Mesh,
    /// Mesh axes that are to split nothing.
    pub replicate: Vec<String>,
    /// Names and shapes.
    pub layout: Layout,
    /// Whether `layout` is the user's choice. Otherwise it depends on the checkpoint.
    pub chooses_layout: bool,
    /// Dtype of all floats. `None` leaves them as they are, or leaves the choice to the layout.
    pub dtype: Option<DType>,
    /// Dtype of decoded quantized tensors, if they are decoded whatever `dtype` says.
    pub dequantize: Option<Dequantize>,
    /// How weights are quantized.
    pub quantize: Option<Quantize>,
    /// Type of the matrices of a GGUF file. `None` leaves the choice to the first of them.
    pub gguf_type: Option<GgufType>,
    /// The form of codes that are stored already.
    pub requantize: Option<Requantize>,
    /// Tensors that are not quantized.
    pub quantize_ignore: Vec<Pattern>,
    /// The tensors that are quantized, of those that could be.
    pub quantize_only: Vec<Pattern>,
    /// Whether floats keep their dtype even if the layout has a dtype for them.
    pub keep_dtype: bool,
    /// Dtypes by pattern. The first match has precedence over `dtype`.
    pub casts: Vec<CastRule>,
    /// How specs are chosen.
    pub sharding: Sharding,
    /// Specs by pattern. The first match has precedence over `sharding`.
    pub shard_rules: Vec<ShardRule>,
    /// Whether bundles hold one tensor per source tensor instead of stacks of layers.
    pub unscanned: bool,
    /// Whether an uneven split is refused.
    pub even: bool,
    /// The devices to list, ascending; `None` lists all.
    pub devices: Option<Vec<u64>>,
    /// Whether missing layers are accepted, and leaves of a layout file whose tensors are missing.
    pub allow_missing: Allow,
    /// Whether tensors are accepted that no rule of a layout file, or no table of the family, names.
    pub allow_unmapped: Allow,
    /// Parameters of the layout, by name.
    pub set: BTreeMap<String, String>,
    /// Rules for logical axes. They replace the layout's rules for the same axes.
    pub logical_rules: Vec<LogicalRule>,
    /// Bytes of the largest chunk file in formats with chunks. `None` leaves the choice to the format.
    pub chunk_bytes_max: Option<u64>,
    /// Bytes of the largest weight file in a generated `hf/`.
    pub shard_bytes_max: Option<u64>,
    /// The selected tensors of the repository.
    pub subset: Subset,
    /// Renames of the shown names, in order.
    pub renames: Vec<Rename>,
    /// How an output head that is the embedding is shown.
    pub tied: Tied,
    /// Directory of a LoRA adapter, one of those with which the checkpoint was opened.
    pub lora: Option<PathBuf>,
    /// The LoRA adapter that is merged into the tensors: that of the checkpoint itself, or one with which it was opened.
    pub merge_lora: Option<MergedLora>,
}

impl ViewOptions {
    /// The meaning of settings. The files that they name have been read.
    ///
    /// # Errors
    /// Everything wrong with a layout file.
    pub fn new(settings: &ViewSettings) -> Result<Self, PlanError> {
        let allow = |allow: &Option<Allow>| allow.clone().unwrap_or_default();
        Ok(Self {
            mesh: settings.mesh.clone().unwrap_or_default(),
            replicate: settings.replicate.clone(),
            layout: settings.layout.as_ref().map(Layout::of).transpose()?.unwrap_or_default(),
            chooses_layout: settings.layout.is_some(),
            dtype: settings.dtype.and_then(|choice| choice.0),
            dequantize: settings.dequantize,
            quantize: settings.quantize,
            gguf_type: settings.gguf_type,
            requantize: settings.requantize,
            quantize_ignore: settings.quantize_ignore.clone(),
            quantize_only: settings.quantize_only.clone(),
            keep_dtype: settings.dtype == Some(DtypeChoice(None)),
            casts: settings.cast.clone(),
            sharding: match settings.shard {
                Some(ShardChoice::None) => Sharding::Replicate,
                Some(ShardChoice::Logical) => Sharding::Logical,
                // The settings read from the file have replaced this choice.
                Some(ShardChoice::Auto | ShardChoice::File(_)) | None => Sharding::Auto,
            },
            shard_rules: settings.shard_rules.clone(),
            unscanned: settings.unscanned.unwrap_or(false),
            even: settings.even.unwrap_or(false),
            devices: settings.devices.as_ref().map(|devices| devices.0.clone()),
            allow_missing: allow(&settings.allow_missing),
            allow_unmapped: allow(&settings.allow_unmapped),
            subset: Subset {
                source_renames: settings.source_rename.clone(),
                include: settings.include.clone(),
                exclude: settings.exclude.clone(),
                layers: settings.layers.clone(),
                renumber: settings.renumber.unwrap_or(false),
                no_mtp: settings.no_mtp.unwrap_or(settings.part == Some(ModelPart::Text)),
                text_only: settings.text_only.unwrap_or(settings.part == Some(ModelPart::Text)),
                part: settings.part,
            },
            renames: (settings.strip_prefix.iter().map(|prefix| Rename::strip_prefix(prefix)))
                .chain(settings.rename.iter().cloned())
                .chain(settings.add_prefix.iter().map(|prefix| Rename::add_prefix(prefix)))
                .collect(),
            tied: settings.tied.unwrap_or(Tied::Auto),
            lora: settings.lora.clone(),
            merge_lora: settings.merge_lora.clone(),
            set: settings.set.iter().map(|(name, value)| (name.clone(), value.text())).collect(),
            logical_rules: settings.logical_rules.clone(),
            chunk_bytes_max: settings.chunk_bytes.map(|bytes| bytes.0),
            shard_bytes_max: settings.max_shard_bytes.map(|bytes| bytes.0),
        })
    }

    /// These options for a checkpoint: the layout is `stored` for a trainer's if the user chose none, the layout `hf` takes from a
    /// trainer's names what wraps the model, and layers have the word of the model's releases, if the user gave no rename.
    pub fn for_checkpoint(&self, checkpoint: &Checkpoint) -> Cow<'_, Self> {
        if !self.chooses_layout && self.layout == Layout::Canonical && !checkpoint.is_repository() {
            return Cow::Owned(Self { layout: Layout::Stored, ..self.clone() });
        }
        let rename = self.unwrapping(checkpoint).or_else(|| self.respelling(checkpoint));
        let Some(rename) = rename else { return Cow::Borrowed(self) };
        let mut options = self.clone();
        options.subset.source_renames.push(rename);
        Cow::Owned(options)
    }

    /// The rename that gives layers the word of the model's releases, where the layout goes by names of repositories and the user gave
    /// no rename.
    pub(super) fn respelling(&self, checkpoint: &Checkpoint) -> Option<Rename> {
        if self.takes_names() && checkpoint.container() == Container::Safetensors {
            respelled(checkpoint)
        } else {
            None
        }
    }

    /// Whether the layout goes by names, which the user has not changed.
    fn takes_names(&self) -> bool {
        self.subset.source_renames.is_empty() && !matches!(self.layout, Layout::Stored | Layout::File(_))
    }

    /// The rename that takes away what wraps the model in the names, where the layout goes by names of repositories and the user gave
    /// no rename. The words of a repository with a configuration of its own must be certain to be wrappers, or hide the names that
    /// its model has.
    pub(super) fn unwrapping(&self, checkpoint: &Checkpoint) -> Option<Rename> {
        // The leaves of Orbax are found under any prefix.
        let is_asked = self.takes_names() && checkpoint.container() != Container::Orbax;
        let (rule, is_certain) = checkpoint.proposed_rename().filter(|_| is_asked)?;
        let rename = Rename::parse(&rule).ok()?;
        let is_state = checkpoint.container() != Container::Safetensors || checkpoint.companion().is_some();
        if is_state {
            return Some(rename);
        }
        let family = Family::of(checkpoint);
        let is_own = |name: &str| family.is_some_and(|family| family.has_layer(name));
        let mut names = checkpoint.tensors().map(|(_, info)| info.name);
        // The code of a repository may wrap its layers by itself.
        let has_code = checkpoint.config().is_some_and(|config| config.get("auto_map").is_some());
        let reveals = names.any(|name| rename.apply(name).ok().flatten().is_some_and(|name| is_own(&name)));
        let hides = || !checkpoint.tensors().any(|(_, info)| is_own(info.name));
        ((is_certain && !has_code) || (reveals && hides())).then_some(rename)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use ckfs_config::{Config, LAYOUTS};

    const EVERY_VIEW_KEY: &[(&str, &str)] = include!("../config/every_view_key.in");

    #[test]
    fn every_layout_that_settings_know_is_in_the_program() {
        let named = |name: &&'static str| Layout::of(&LayoutChoice::Named(name)).unwrap().name().to_owned();
        assert_eq!(LAYOUTS.iter().map(named).collect::<Vec<_>>(), *LAYOUTS);
    }

    #[test]
    fn every_setting_of_a_view_has_an_effect() {
        let settings = |text: &str| {
            let config = Config::of_text(text, Path::new("x.toml"), Path::new("/base")).unwrap();
            // Options have no equality; their debug output shows every field.
            format!("{:?}", ViewOptions::new(&config.views[0].settings).unwrap())
        };
        for (key, text) in EVERY_VIEW_KEY {
            assert_ne!(settings(text), settings(""), "{key} has no effect");
        }
    }
}
