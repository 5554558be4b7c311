//! Layouts as data: a TOML file of rules, from the user or from the program.
//!
//! A rule says how one leaf of the output tree comes from tensors of the repository. This is the short form. Worked
//! examples are in `examples/layouts/`, and [`expr`](super::expr) describes the language of expressions.
//!
//! ```toml
//! name = "my-llama"
//! dtype = "bf16"                  # of floats, unless the user asks for another
//!
//! [params]                        # what the user may set, with defaults
//! vocab_size = "config.vocab_size"
//!
//! [vars]                          # numbers that rules use
//! d = "config.head_dim ?? config.hidden_size / config.num_attention_heads"
//!
//! [[leaf]]                        # a leaf by itself
//! to = "tok_embeddings"
//! from = "model.embed_tokens.weight"
//! view = "cut_or_pad(x, 0, vocab_size)"
//! axes = "vocab embed"            # logical names of the axes, for `[[rule]]`s of sharding; `_` for none
//!
//! [group]                         # leaves of a layer, by the name of the group
//! layer = [
//!   { to = "attn.wq", from = "self_attn.q_proj.weight", view = "reshape(x, -1, d, extent(x, 1))", axes = "heads _ embed" },
//!   { to = "moe.up", from = "mlp.experts.{e}.up_proj.weight", stack = [{ var = "e", axis = 0, name = "expert" }] },
//! ]
//!
//! [[place]]                       # where a group goes: here all layers, stacked on a new axis 0
//! group = "layer"
//! to = "layers"
//! from = "model.layers.{l}"
//! stack = [{ var = "l", over = "0..config.num_hidden_layers", axis = 0, name = "layers" }]
//!
//! [[alias]]                       # tried where a name is not in the repository
//! name = "model."
//! on_disk = ["language_model.model."]
//!
//! [[ignore]]                      # tensors left out on purpose; any other that no rule uses is an error
//! names = "vision_tower.*"
//! ```
//!
//! * `from` is the name of a source, called `x` in `view`, or a table of several sources: `from = { q = "…", k = "…"
//!   }`.
//! * Names are templates: `{…}` holds an expression.
//! * `shape = "heads * d, D"` gives the extents that the source must have. For several sources it is a table: `shape =
//!   { q = "…", k = "…" }`. Another shape is refused. `_` is not compared, nor is an extent whose expression needs an
//!   absent member of `config.json`.
//! * `stack` makes axes, outermost first. `axis` is the number of the new axis in the finished leaf. It may be an
//!   expression over `rank` (that of the stacked views, without any stacked axes) and `outer` (the number of stacks
//!   further out). Without `axis` it is the number of the stack. Without `over`, the stack takes all numbers in the
//!   repository, from 0. A rule's own stacks are outside those of its place. A stack over nothing is left out.
//! * `after_stack = "reshape(x, -1, extent(x, -1))"` is a view of the finished stack, called `x`. `axes`, `tp` and `experts` then
//!   number the axes of its result.
//! * `each = { b = "0..4" }`, on rules and places, repeats them for each number instead of stacking. `let = { half =
//!   "…" }` on a place names expressions over those numbers for its leaves.
//! * `when` is a condition. `optional = true` leaves a leaf out if the repository has none of its sources. `dtype =
//!   "keep"` (or a type) overrides the layout's dtype for one leaf.
//! * `copy = true` says that another leaf holds the same: the way back does not read this one, nor miss it.
//! * `stage`, on rules and places, is the number of the pipeline stage that holds the leaves: the position of their
//!   devices along the mesh axis `pp`. Without it all stages do.
//! * `[inverse]` defines parameters and variables anew for the way back, from a checkpoint of this layout to the
//!   repository (`--layout hf`). There `exists`, `shape` and `count` ask about leaves. `shape` of a rule then gives the
//!   extents of the tensor to make, and a third operand of `mul` the factor that undoes the product.
//! * `[text_model]` with `model_type`, `architecture` and `names` (prefixes and their replacements) says how a repository
//!   of the text model alone is made on that way.
//! * `[[check]]` with `that` and `say` refuses a repository or parameters that fail the condition. With `warn = true`
//!   it only warns, unless the repository lacks a tensor or member that the condition needs.
//! * `tp` and `experts` number the axes of a leaf, before stacking, that tensor and expert parallelism split under
//!   `--shard auto`.
//! * `logical = true` makes the logical rules the default way to shard. `rules = "maxtext"` starts with MaxText's
//!   rules. Each `[[rule]]` with `logical` and `mesh` replaces the rules for its logical axis.
//! * `axes = ""` takes the names of a leaf's axes from its place, which lists them all in `bare`.
//! * `verified = false`, or a condition, warns that the result has not been compared with that of the imitated program.
//! * `flat = true` makes one file of each tensor, named by its whole dotted name.
//! * `sharded_state = true` adds the directory `sharded_state/` with a file for each rank of a serving engine. Lay out
//!   axes that fuse several parts rank by rank, with `mesh.tensor` in the rules: an even split then gives each rank its
//!   parts.
//!
//! What it deliberately does not do: read weights, or know any model.

mod leaf;
mod names;
mod place;
mod read;
mod resolve;
mod scope;
mod targets;

use std::{collections::BTreeMap, sync::Arc};

use ckfs_config::DtypeChoice;
use ckfs_tensor::DType;
use serde::Deserialize;

pub(super) use self::targets::{StoredNames, Targets};
use super::{
    draft::Draft,
    expr::{Expr, TextTemplate},
    logical::{LogicalRule, LogicalRules},
    name_group::NameGroup,
    text_model::TextModel,
};

/// A text of the file as what it means, and where it stands.
#[derive(Clone, Debug, Default)]
pub(super) struct AtLine<T> {
    pub it: T,
    pub at: Span,
}

/// First byte in the file, and the one after the last.
pub(super) type Span = (usize, usize);

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stack {
    pub var: AtLine<Arc<str>>,
    pub over: Option<AtLine<(Expr, Expr)>>,
    #[serde(default, deserialize_with = "read::expression")]
    pub axis: Option<AtLine<Expr>>,
    /// The logical name of the axis, which may have `_` around it.
    #[serde(default)]
    name: String,
}

impl Stack {
    fn name(&self) -> &str {
        self.name.trim_matches('_')
    }
}

/// Extents that a source must have. `None` accepts any extent.
pub(super) type Extents = Vec<Option<Expr>>;

pub(super) type Each = BTreeMap<String, AtLine<(Expr, Expr)>>;

/// The sources of a leaf, by their names in expressions.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    named: Vec<(Arc<str>, TextTemplate)>,
    at: Span,
    /// Whether it is one without a name of its own.
    is_one: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LeafRule {
    pub to: AtLine<TextTemplate>,
    #[serde(default)]
    pub from: Sources,
    /// Extents that sources must have, by the name of the source.
    #[serde(default, deserialize_with = "read::shapes")]
    pub shape: Vec<(String, AtLine<Extents>)>,
    pub view: Option<AtLine<Expr>>,
    /// The view of the finished stack, which is called `x`.
    pub after_stack: Option<AtLine<Expr>>,
    #[serde(default, deserialize_with = "read::words")]
    pub axes: Option<Vec<String>>,
    #[serde(default)]
    pub stack: Vec<Stack>,
    #[serde(default)]
    pub each: Each,
    pub when: Option<AtLine<Expr>>,
    /// The pipeline stage that holds the leaf.
    pub stage: Option<AtLine<Expr>>,
    #[serde(default)]
    pub optional: bool,
    /// Whether another leaf holds the same elements.
    #[serde(default)]
    pub copy: bool,
    pub dtype: Option<AtLine<DtypeChoice>>,
    pub tp: Option<usize>,
    pub experts: Option<usize>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Placement {
    #[serde(deserialize_with = "read::groups")]
    pub group: AtLine<Vec<String>>,
    pub to: Option<AtLine<TextTemplate>>,
    pub from: Option<AtLine<TextTemplate>>,
    #[serde(default)]
    pub stack: Vec<Stack>,
    #[serde(default)]
    pub each: Each,
    /// Names for expressions over the variables of `each`.
    #[serde(default, rename = "let")]
    pub bindings: BTreeMap<String, AtLine<Expr>>,
    pub when: Option<AtLine<Expr>>,
    /// The pipeline stage that holds the leaves, unless they have their own.
    pub stage: Option<AtLine<Expr>>,
    #[serde(default, deserialize_with = "read::words")]
    pub bare: Option<Vec<String>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ignore {
    pub names: AtLine<TextTemplate>,
    pub when: Option<AtLine<Expr>>,
    #[serde(default)]
    pub each: Each,
}

/// A condition that must or should hold, and the message if it does not.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Check {
    pub that: AtLine<Expr>,
    pub say: AtLine<TextTemplate>,
    #[serde(default)]
    pub warn: bool,
}

/// A prefix of names in the rules, with the prefixes that repositories have in its place.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Alias {
    pub name: String,
    pub on_disk: Vec<String>,
}

/// A layout file, read and checked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(clippy::struct_excessive_bools, reason = "each is a member of the file")]
pub struct LayoutFile {
    pub(crate) name: String,
    #[serde(default, rename = "description")]
    _description: String,
    #[serde(default, deserialize_with = "read::expression")]
    verified: Option<AtLine<Expr>>,
    /// Values of `model_type` in `config.json` to which it applies.
    #[serde(default)]
    pub(crate) model_types: Vec<String>,
    /// Dtype of floats where the user asks for none.
    dtype: Option<AtLine<DtypeChoice>>,
    /// Whether each tensor is one file named by its whole dotted name.
    #[serde(default)]
    pub(crate) flat: bool,
    /// Whether specs come from logical axes unless the user says otherwise.
    #[serde(default)]
    pub(crate) logical: bool,
    /// Whether a serving engine reads the shards as the state of its ranks.
    #[serde(default)]
    pub(crate) sharded_state: bool,
    #[serde(rename = "rules")]
    base_rules: Option<AtLine<Arc<str>>>,
    #[serde(default)]
    pub(super) params: BTreeMap<String, AtLine<Expr>>,
    #[serde(default)]
    vars: BTreeMap<String, AtLine<Expr>>,
    /// Other definitions of parameters and variables, for the inverse.
    #[serde(default)]
    inverse: BTreeMap<String, AtLine<Expr>>,
    /// The text model by itself, if the rules are for a larger model.
    pub(super) text_model: Option<TextModel>,
    #[serde(default)]
    pub(super) alias: Vec<Alias>,
    #[serde(default)]
    ignore: Vec<Ignore>,
    #[serde(default)]
    check: Vec<Check>,
    #[serde(default)]
    leaf: Vec<LeafRule>,
    #[serde(default)]
    group: BTreeMap<String, Vec<LeafRule>>,
    #[serde(default)]
    place: Vec<Placement>,
    #[serde(default)]
    rule: Vec<LogicalRule>,
    /// Its rules for logical axes.
    #[serde(skip)]
    pub(crate) rules: LogicalRules,
    /// Its origin, for messages.
    #[serde(skip)]
    pub(crate) label: String,
    #[serde(skip)]
    text: String,
    /// Whether it is in the program: then nobody can open it.
    #[serde(skip)]
    is_embedded: bool,
}

impl PartialEq for LayoutFile {
    fn eq(&self, other: &Self) -> bool {
        self.label == other.label && self.text == other.text
    }
}

impl Eq for LayoutFile {}

/// The output of a layout for a repository.
#[derive(Clone, Debug, Default)]
pub struct Resolved {
    /// The leaves.
    pub drafts: Vec<Draft>,
    /// The parameters and their values, as text.
    pub params: Vec<(String, String)>,
    /// Names that rules leave out on purpose.
    pub left_out: Vec<NameGroup>,
    /// For the inverse of a layout: patterns of the names that rules leave out.
    pub ignored: Vec<super::Pattern>,
    /// For the inverse of a layout: leaves that hold what others hold.
    pub copies: Vec<String>,
    /// Remarks that are not errors.
    pub warnings: Vec<String>,
}

impl LayoutFile {
    /// Dtype of floats where the user asks for none.
    pub(super) fn dtype(&self) -> Option<DType> {
        self.dtype.as_ref().and_then(|dtype| dtype.it.0)
    }

    /// This file as one in the program.
    pub(super) fn embedded(self) -> Self {
        Self { is_embedded: true, ..self }
    }
}
