//! The user's request as data: a layout, a mesh, dtypes and sharding rules, resolved against a checkpoint to named
//! views with specs.
//!
//! [`Plan::build`] runs a layout, which makes [`draft::Draft`]s, gives each draft a spec, and does every check that is
//! possible before mount. All problems are reported together. The result is plain data: nothing is lowered and no
//! weight is read.
//!
//! What it deliberately does not do: lay out files (that is `image`) or know about the mount's tree (that is `volume`).

pub mod amplification;
mod build;
mod canonical;
pub mod draft;
mod expect;
pub mod expr;
pub mod family;
mod generated;
pub mod hf;
mod hole;
mod holes;
mod inverse;
pub mod kind;
pub mod layout_file;
pub mod layouts;
pub mod logical;
mod lora;
mod member;
mod name_group;
mod names;
mod naming;
mod needed;
mod options;
mod packed;
mod planned;
pub mod problem;
mod remote_bytes;
pub mod rename;
pub mod report;
mod select;
pub mod shard;
pub mod spec;
mod stored;
mod survey;
mod text_model;
mod unused;
pub mod values;

pub use draft::{Bundled, Draft, Roles};
pub use family::Family;
pub use generated::SHARD_BYTES_MAX;
pub use hf::{HfContent, HfFile};
pub use hole::Hole;
pub use kind::Kinds;
pub use layout_file::LayoutFile;
pub use layouts::Embedded;
pub use logical::LogicalRules;
pub use name_group::NameGroup;
pub use naming::{SELF_WORD, component};
pub use options::{Layout, ViewOptions};
pub use planned::{Decoded, Plan, PlannedTensor, Rank};
pub use problem::{PlanError, Problem};
pub use remote_bytes::{FETCHED_BYTES, RemoteBytes};
pub use select::Subset;
pub use shard::{AxisUse, Sharding, axis_use};
pub use spec::Spec;

pub use crate::config::{
    Allow, CastRule, DEVICES_LISTED_MAX, Dequantize, LayerRanges, LogicalRule, Mesh, MeshAxis, MeshError, Pattern,
    PatternError, Rename, ShardRule, Tied, mesh, pattern,
};
