//! The user's settings in any form: flags, options of mount(8), a TOML file. Parsed, but not yet interpreted.
//!
//! One table, [`SETTINGS`], has a row for each setting: its name, its group, the value after its flag, its help, and
//! its field in [`Settings`]. All forms follow from the row:
//!
//! | form | made from the row by |
//! | --- | --- |
//! | flags, their help and errors | `cli::flags` |
//! | keys of files, their errors with file and line, `.ckfs/config.toml` | [`file`](FileSettings) |
//! | options of `-o` and of `mount.ckfs` | [`options`] |
//! | keyword arguments of Python | [`keywords`] |
//! | precedence: flags, then `-o`, then the file's table of a view, then its top | [`Settings::over`], [`Config::gather`] |
//! | relative paths, which begin where they were written | `Settings::rebase` |
//!
//! To add a setting, add a field with its row to `table.rs`, then use the field. The type of the
//! field determines how a word or a TOML value is read and written ([`value`]). A new kind of value is one `impl` there
//! or in `value_types.rs`. A closed list of words is a [`value::Choice`].
//!
//! Parsing does no I/O: only `load.rs` reads the files that settings name. The layers above interpret layout files,
//! match a mesh with a checkpoint, and measure the memory.

mod excerpt;
mod file;
pub mod keywords;
mod layers;
mod load;
mod merged;
pub mod mesh;
mod near;
pub mod options;
pub mod pattern;
mod python_dict;
pub mod rename;
mod rules;
mod steps;
mod table;
#[cfg(test)]
mod tests;
mod time_limit;
pub mod value;
mod value_types;

pub use excerpt::excerpt;
pub use file::{ConfigError, FileSettings};
pub use layers::{LayerRanges, ranges};
pub use merged::{Config, ViewConfig};
pub use mesh::{DEVICES_LISTED_MAX, Mesh, MeshAxis};
pub use near::{did_you_mean, folded, nearest};
pub use pattern::{Allow, Pattern, PatternError};
pub use rename::Rename;
pub use rules::{CastRule, LogicalRule, ShardRule};
pub use steps::{Average, Steps};
pub use table::{
    Arity, FORMER, FieldAccess, Group, KEYS, MountSettings, SETTINGS, ServeSettings, Setting, SettingScope, Settings,
    ViewSettings, former,
};
pub use time_limit::{BoundedTime, TimeLimit, WaitTime, parse_age};
pub use value_types::{
    ByteCount, Dequantize, Devices, DtypeChoice, GgufType, HfCache, LAYOUTS, LayoutChoice, ListenAddress, Materialize,
    MergedLora, ModelPart, OwnerId, ParamValue, PermissionBits, Prefetch, Quantize, RepoName, Requantize, ShardChoice,
    THREADS_MAX, ThreadCount, Tied, WholeNumber,
};
