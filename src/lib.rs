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
//! | [`host`] | this machine and process: log, signals, memory and other limits; uses no other layer |
//! | [`tensor`] | dtype, shape, region, view, tiling, decoder, kernels; pure |
//! | [`source`] | where bytes come from |
//! | [`mod@format`] | headers of container formats, bytes to description and back; pure |
//! | [`checkpoint`] | what is in a repo: tensor table, index, `config.json`, dialect |
//! | [`config`] | what the user typed, in whatever form: one table of settings, parsed, not yet meant |
//! | [`plan`] | what the user wants, as data: layouts, families, mesh, sharding, names |
//! | [`image`] | how a virtual file is laid out: one output format a file, all behind one trait |
//! | [`read`] | byte-range engine: span to pieces to bytes; tile cache; prefetch |
//! | [`volume`] | the file system without FUSE |
//! | [`fuse`] | the only user of fuser: mount, convert, reply, unmount |
//! | [`cli`] | the only user of clap, anyhow and standard output |
//!
//! # How a byte gets from a source file to a reader
//!
//! At mount, once: `Checkpoint::open` reads headers into a table of logical tensors ([`checkpoint::TensorInfo`]), each with how it is
//! stored. The plan ([`plan::Plan`]) gives each output tensor a [`tensor::View`] over those. Each `image::OutputFormat` shows
//! its files as `image::VirtualFile`s, which know their length. The [`volume::Volume`] numbers all nodes; from then on nothing changes.
//!
//! At open: `fuse::adapter` calls [`volume::FileSystem`]; the volume takes the file's `image::Content`, usually an
//! [`image::FileImage`]: segments of literal bytes and of views, with cumulative ends. [`read::Engine`] makes of it a
//! [`read::OpenFile`], whose views are lowered to a [`tensor::Tiling`] when they are first read. Files that the policy of
//! `volume::materialize` names are materialized instead, by the same stages, and the kernel reads those by itself.
//!
//! At read: the engine finds the segments under the request, then four stages follow.
//!
//! 1. `runs`: a span of the view becomes [`tensor::Piece`]s, and those become spans of source files ([`source::ByteSpan`]).
//! 2. `schedule`: near spans are merged, large ones bounded, and all are put in order.
//! 3. `Source::fetch` ([`source::Source`]): the only stage that waits. It checks the file against what was pinned at mount
//!    (`source::Pin`). A local map is a fast way to fetch.
//! 4. `scatter`: [`tensor::Gather`] moves elements, and the piece's [`tensor::Decode`] decodes and converts them, into the reply or
//!    into a tile that later requests share. Where nothing is converted, the reply is mapped bytes that only the
//!    kernel may read (`source::KernelBytes`).
//!
//! # Where a new thing goes
//!
//! | to add | touch |
//! | --- | --- |
//! | a model family | `src/plan/families/<name>.toml`, and its line in `plan::family` |
//! | a layout | a file of the user's (`--layout FILE`), or `src/plan/layouts/<name>.toml` and its line in `plan::layouts` |
//! | an output format | `src/image/<name>.rs` with `impl OutputFormat`, and its line in `image::FORMATS` |
//! | a source | `src/source/<name>.rs` with `impl Source`; the conformance suite `tests/sources.rs` runs over it |
//! | a quantization scheme | `src/checkpoint/scheme/<name>.rs` with `impl Scheme`, and its line in `SCHEMES` |
//! | a setting | its row in `config::table`: flag, configuration file, mount option and help follow |
//! | a command | `src/cli/<name>.rs`, and its variant in `cli::Command` |

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
