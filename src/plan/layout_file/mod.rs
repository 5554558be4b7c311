//! Layouts as data: a TOML file of rules, a user's own or one of those in the program.
//!
//! A rule says how one leaf of the wanted tree comes from tensors of the repository. In short (worked examples are in
//! `examples/layouts/`, the language of expressions is described in [`expr`](super::expr)):
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
//! * `from` is the name of a source, called `x` in `view`, or a table of several: `from = { q = "…", k = "…" }`.
//! * Names are templates: `{…}` holds an expression.
//! * `shape = "heads * d, D"` gives the extents that the source must have, or a table does for several sources:
//!   `shape = { q = "…", k = "…" }`. Another shape is refused. `_`, or an extent for which `config.json` lacks something, is not compared.
//! * `stack` makes axes, outermost first. `axis` is the number of the new axis in the finished leaf; it may be an expression
//!   over `rank` (that of what is stacked, without any stacked axes) and `outer` (how many stacks are further out), and is
//!   the number of the stack where it is left out. Without `over`, all numbers that the repository has, from 0, are taken.
//!   A rule's own stacks are outside those of its place. What is stacked over nothing is left out.
//! * `each = { b = "0..4" }`, on rules and places, repeats them for each number instead; `let = { half = "…" }` on a place
//!   names expressions over those numbers for its leaves.
//! * `when` is a condition, `optional = true` leaves a leaf out where the repository has none of its sources,
//!   `dtype = "keep"` (or a type) holds for one leaf against the layout's.
//! * `[[check]]` with `that` and `say` refuses a repository, or parameters, for which the condition does not hold; with
//!   `warn = true` it only warns, unless the repository lacks what the condition needs.
//! * `tp` and `experts` number the axes of a leaf, before stacking, that tensor and expert parallelism split under
//!   `--shard auto`.
//! * `logical = true` makes the logical rules the default way to shard, `rules = "maxtext"` begins them with MaxText's, and each
//!   `[[rule]]` with `logical` and `mesh` replaces what is there for its axis.
//! * `axes = ""` leaves the names of a leaf's axes to its place, which gives them all by `bare`.
//! * `verified = false`, or a condition, warns that the result has not been compared with that of the program imitated.
//! * `flat = true` makes one file of each tensor, named by its whole dotted name.
//! * `sharded_state = true` adds the directory `sharded_state/` with a file for each rank of a serving engine. Axes that hold
//!   several things fused are then best laid out rank by rank, with `mesh.tensor` in the rules: an even split gives each
//!   rank its part.
//!
//! What it deliberately does not do: read weights, or know any model.

mod read;
mod resolve;

use std::{collections::BTreeMap, sync::Arc};

use super::{
    draft::Draft,
    expr::{Expr, Template},
    logical::LogicalRules,
    name_group::NameGroup,
};
use crate::tensor::DType;

/// An expression, and the line on which it stands.
#[derive(Clone, Debug)]
pub(super) struct Placed<T> {
    pub it: T,
    pub line: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Stack {
    pub var: Arc<str>,
    pub over: Option<Placed<(Expr, Expr)>>,
    pub axis: Option<Placed<Expr>>,
    pub name: String,
    pub line: usize,
}

/// Extents that a source must have, `None` for any.
pub(super) type Extents = Vec<Option<Expr>>;

pub(super) type Each = Vec<(Arc<str>, Placed<(Expr, Expr)>)>;

#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub to: Placed<Template>,
    pub from: Vec<(Arc<str>, Template)>,
    pub from_line: usize,
    /// Extents that sources must have, by the name of the source.
    pub shape: Vec<(Arc<str>, Placed<Extents>)>,
    pub view: Option<Placed<Expr>>,
    pub axes: Option<Vec<String>>,
    pub stack: Vec<Stack>,
    pub each: Each,
    pub when: Option<Placed<Expr>>,
    pub optional: bool,
    pub dtype: Option<Keep>,
    pub tp: Option<usize>,
    pub experts: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Place {
    pub groups: Vec<String>,
    pub to: Option<Placed<Template>>,
    pub from: Option<Placed<Template>>,
    pub stack: Vec<Stack>,
    pub each: Each,
    /// Names for expressions over the variables of `each`.
    pub bindings: Vec<(Arc<str>, Placed<Expr>)>,
    pub when: Option<Placed<Expr>>,
    pub bare: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Ignore {
    pub names: Placed<Template>,
    pub when: Option<Placed<Expr>>,
    pub each: Each,
}

/// What a leaf's own dtype says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// The source's type.
    Source,
    /// This type.
    As(DType),
}

/// A condition that must hold, or should, and what to say if it does not.
#[derive(Clone, Debug)]
pub(super) struct Check {
    pub that: Placed<Expr>,
    pub say: Placed<Template>,
    pub warn: bool,
}

/// A layout file, read and checked.
#[derive(Clone, Debug)]
pub struct LayoutFile {
    /// Where it comes from, for messages.
    label: String,
    text: String,
    name: String,
    description: String,
    verified: Option<Placed<Expr>>,
    model_types: Vec<String>,
    dtype: Option<DType>,
    flat: bool,
    logical: bool,
    sharded_state: bool,
    rules: LogicalRules,
    params: BTreeMap<String, Placed<Expr>>,
    vars: BTreeMap<String, Placed<Expr>>,
    aliases: Vec<(String, Vec<String>)>,
    ignores: Vec<Ignore>,
    checks: Vec<Check>,
    leaves: Vec<Leaf>,
    groups: BTreeMap<String, Vec<Leaf>>,
    places: Vec<Place>,
}

impl PartialEq for LayoutFile {
    fn eq(&self, other: &Self) -> bool {
        self.label == other.label && self.text == other.text
    }
}

impl Eq for LayoutFile {}

/// What a layout makes of a repository.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The leaves.
    pub drafts: Vec<Draft>,
    /// The parameters and their values, as text.
    pub params: Vec<(String, String)>,
    /// Whether the result has been compared with that of the program that the layout imitates, as far as the file says.
    pub verified: bool,
    /// Names that rules leave out on purpose.
    pub left_out: Vec<NameGroup>,
    /// Things worth knowing that are no errors.
    pub warnings: Vec<String>,
}

/// What is accepted although it is not as the layout says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Allowed {
    /// Leaves whose sources are missing are left out.
    pub missing: super::Allow,
    /// Tensors that no rule names are left out.
    pub unmapped: super::Allow,
}

impl LayoutFile {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it comes from.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// What it says of itself.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Values of `model_type` in `config.json` that it is for.
    pub fn model_types(&self) -> &[String] {
        &self.model_types
    }

    /// Dtype of floats where the user asks for none.
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Whether each tensor is one file named by its whole dotted name.
    pub fn flat(&self) -> bool {
        self.flat
    }

    /// Whether specs come from logical axes unless the user says otherwise.
    pub fn shards_logically(&self) -> bool {
        self.logical
    }

    /// Whether a serving engine reads the shards as the state of its ranks.
    pub fn sharded_state(&self) -> bool {
        self.sharded_state
    }

    /// Its rules for logical axes.
    pub fn rules(&self) -> &LogicalRules {
        &self.rules
    }

    /// Names of its parameters.
    pub fn params(&self) -> impl Iterator<Item = &str> {
        self.params.keys().map(String::as_str)
    }
}
