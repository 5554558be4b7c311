//! ckfs mounts a Hugging Face safetensors repository as a directory of virtual, sharded views.
//!
//! Two ideas carry the design. First, *tile, then gather*: every virtual tensor is a view, an expression over the
//! checkpoint's tensors, and is lowered to a tiling of disjoint strided copies before anything is read. Second, *nothing
//! changes after mount*: headers, names, views and sizes are fixed when the tree appears, so that a read can only fail
//! because bytes did not come or a source changed, and then it fails loudly.
//!
//! The layers, each using only those before it:
//!
//! | layer | holds |
//! | --- | --- |
//! | [`host`] | this machine: memory and its limits; beside the others, uses none of them |
//! | [`tensor`] | dtype, shape, region, view, tiling, decoder, kernels; pure |
//! | [`source`] | where bytes come from |
//! | [`mod@format`] | headers of container formats, bytes to description and back; pure |
//! | [`checkpoint`] | what is in a repo: tensor table, index, `config.json`, dialect |
//! | [`config`] | what the user typed, in whatever form: one table of settings, parsed, not yet meant |
//! | [`plan`] | what the user wants, as data: layouts, families, mesh, sharding, names |
//! | [`image`] | how a virtual file is laid out: one output format a file, all behind one trait |
//! | [`read`] | byte-range engine: span to pieces to bytes; tile cache; prefetch |
//! | [`volume`] | the file system without FUSE |
//! | [`host`] | this machine and process: log, signals, limits; uses no other layer |
//! | [`fuse`] | the only user of fuser: mount, convert, reply, unmount |
//! | [`cli`] | the only user of clap, anyhow and standard output |

pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod format;
pub mod fuse;
pub mod host;
pub mod image;
pub mod plan;
pub mod read;
pub mod source;
pub mod tensor;
pub mod volume;
