//! The user's request as data: a layout, a mesh, dtypes and sharding rules, resolved against a checkpoint to named
//! views with specs.
//!
//! [`Plan::build`] runs a layout, which makes [`draft::Draft`]s, gives each draft a spec, and does every check that is
//! possible before mount. All problems are reported together. The result is plain data: nothing is lowered and no
//! weight is read.
//!
//! | place | holds |
//! | --- | --- |
//! | `build` | the stages of [`Plan::build`], in order |
//! | `select`, `lora`, `merge`, `values` | which tensors of the checkpoint are wanted, under which names and in which dtype |
//! | `experts` | one form of the experts of a layer, however they are named and fused |
//! | `canonical`, `family`, `modules`, `stored` | layouts by tables: names and roles of known families, of transformers' modules, or of a trainer |
//! | `library` | what the models' own library says: buffers, and what stays in float32 |
//! | [`layout_file`], [`Embedded`], [`expr`] | layouts by rules, and the language of the rules |
//! | `inverse` | the way back from a layout to a repository |
//! | `name` | names of tensors, their groups, and renames |
//! | `split` | specs, and the rules that split axes over the mesh |
//! | `check` | what is missing, unexpected or without effect; all problems |
//! | `repository` | the files of `hf/` |
//! | `need` | which source bytes the devices need |
//! | [`report`] | a plan as text, JSON and HTML |
//!
//! What it deliberately does not do: lay out files (that is `image`) or know about the mount's tree (that is `volume`).

mod build;
mod canonical;
mod check;
pub mod draft;
mod embedded;
mod experts;
pub mod expr;
pub mod family;
mod gguf;
mod inverse;
mod layer_lists;
pub mod layout_file;
pub mod library;
mod lora;
mod merge;
mod modules;
mod name;
mod need;
mod numbered;
mod options;
mod peft;
mod planned;
pub mod quantize;
pub mod report;
mod repository;
mod select;
mod split;
mod stored;
pub mod values;

pub use check::problem::{self, Hole, PlanError, Problem};
pub use draft::{Bundled, Draft, Roles};
pub use embedded::Embedded;
pub use family::Family;
pub use gguf::GgufFile;
pub use layout_file::LayoutFile;
pub use name::{
    name_group::NameGroup,
    naming::{SELF_WORD, component},
    rename,
};
pub use need::remote_bytes::{FETCHED_BYTES, RemoteBytes};
pub use options::{Layout, ViewOptions};
pub use planned::{Amplification, DecodedScheme, MergedAdapter, Plan, PlannedTensor, Rank, TensorKinds, Whole};
pub use repository::hf::{self, HfContent, HfFile};
pub use select::Subset;
pub use split::{
    logical::{self, LogicalRules},
    shard::{self, AxisUse, Sharding},
    spec::{self, Spec},
};

use self::{
    check::{expect, holes, narrow, survey, unused, widths},
    name::{member, name_group, names, naming, parsed},
    need::{leaf, needed, page_reads},
    repository::{generated, text_model},
    split::{blocks, packed, shard::axis_use, styles, whole},
};
pub use ckfs_config::{
    Allow, CastRule, DEVICES_LISTED_MAX, Dequantize, LayerRanges, LogicalRule, Mesh, MeshAxis, Pattern, PatternError,
    Rename, ShardRule, Tied, mesh, pattern,
};
