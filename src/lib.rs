//! ckfs mounts a Hugging Face safetensors repository as a directory of virtual, sharded views.
//!
//! The design has two ideas. First, *tile, then gather*: every virtual tensor is a view, an expression over the
//! checkpoint's tensors. It is lowered to a tiling of disjoint strided copies before any of its bytes are read. Second,
//! *nothing changes after mount*: headers, names, views and sizes are fixed when the tree appears. A read can then fail only
//! because bytes did not come or a source changed, and it fails loudly.
//!
//! [`guide`] is for users: what is in a mount, what it promises, how it is run. This page is for those who change the program.
//!
//! The layers, each a crate of the workspace (`src/<layer>`) that uses only those before it:
//!
//! | layer | holds |
//! | --- | --- |
//! | [`host`] | this machine and process: log, signals, memory and other limits; uses no other layer |
//! | [`sync`] | what threads share: pools, the cache that makes each value once, recycled buffers; uses no other layer |
//! | [`tensor`] | dtype, shape, region, view, tiling, decoder, kernels; pure |
//! | [`source`] | where bytes come from |
//! | [`mod@format`] | headers of container formats, bytes to description and back; pure |
//! | [`checkpoint`] | the content of a repository: tensor table, index, `config.json`, dialect |
//! | [`config`] | the user's settings in any form: one table, parsed but not yet interpreted |
//! | [`plan`] | the user's request as data: layouts, families, mesh, sharding, names |
//! | [`image`] | the layout of virtual files: one module per output format, all behind one type |
//! | [`read`] | byte-range engine: span to pieces to bytes; tile cache; prefetch |
//! | [`volume`] | the file system without a transport: tree, lookup, listing, read |
//! | [`service`] | a volume that is alive: opened as a configuration says, with memory budget, watching of sources, prefetch, time limits of requests |
//! | [`fuse`] | the only user of fuser: mount, convert, reply, unmount |
//! | `serve` | HTTP, the Hub's and S3's requests; the only user of hyper |
//! | `csi` | the node plugin of Kubernetes; the only user of tonic |
//! | `python` | the module `ckfs` for Python, in process; the only user of pyo3. Not linked here: the interpreter loads it |
//! | [`cli`] | the only user of clap, anyhow and standard output |
//!
//! # How a byte gets from a source file to a reader
//!
//! At mount, once: [`Checkpoint::open`](checkpoint::Checkpoint::open) reads headers into a table of logical tensors
//! ([`checkpoint::TensorInfo`]), each with its [`checkpoint::Storage`]. The plan ([`plan::Plan`]) gives each output tensor a
//! [`tensor::View`] over those. Each [`image::OutputFormat`] lays out its files as [`image::VirtualFile`]s, which know their
//! length. The [`volume::Volume`] numbers all nodes. From then on nothing changes. [`Service::open`](service::Service::open) does all this
//! for a configuration and keeps the volume alive, for whatever asks for its files.
//!
//! At open: the FUSE adapter (`src/fuse/adapter/`) calls [`FileSystem::open`](volume::FileSystem::open). The volume takes the
//! file's [`image::FileContent`]. For tensors that is an [`image::FileImage`]: segments of literal bytes and of views, with
//! cumulative ends. The volume wraps it in a [`read::PreparedFile`]. The [`read::Engine`] lowers a view to a [`tensor::Tiling`] when
//! it is first read. A file that the [`volume::Policy`] selects is materialized by the same stages
//! ([`read::Materializing`]), and the kernel then reads it directly.
//!
//! At read: [`Engine::read`](read::Engine::read) finds the segments under the request. Four stages follow, each a file of
//! `src/read/`; `fill.rs` puts them together.
//!
//! 1. `plan_jobs.rs`: a span of the view becomes [`tensor::Piece`]s, and these become jobs that need bytes of source tensors.
//! 2. `schedule.rs`: the jobs become batches of [`source::ByteSpan`]s. Spans within a gap are merged, batches are bounded, and
//!    jobs are put in the order of their files. A mapped file needs no schedule: its map is a fast way to fetch.
//! 3. `fetch.rs`: [`Source::fetch_files`](source::Source::fetch_files) reads each batch. It is the only stage that waits. A remote
//!    file's bytes come through the disk cache ([`source::RemoteSource`]), those of a coded chunk through its decoder
//!    ([`source::DecodedChunks`]).
//! 4. `scatter.rs`: [`tensor::Gather`] moves elements, and the piece's [`tensor::Decode`] decodes and converts them. The
//!    target is the reply, or a tile that later requests share.
//!
//! After the stages [`Source::check`](source::Source::check) compares every touched file with its state at mount
//! ([`source::Pin`]): the bytes count only if the file is unchanged. A request for one unconverted run of a mapped file skips
//! the stages, but not the check. Its reply ([`source::Served`]) is mapped bytes that only the kernel may read
//! ([`source::KernelBytes`]).
//!
//! # Where a new thing goes
//!
//! | to add | touch |
//! | --- | --- |
//! | a model family | `src/plan/families/<name>.toml` |
//! | a layout | a file of the user's (`--layout FILE`), or a directory `src/plan/layouts/<name>`; a family of a layout is a file there |
//! | an output format | `src/image/<name>.rs` with its [`image::OutputFormat`], and its line in [`image::FORMATS`] |
//! | a remote service | `src/source/remote/<name>.rs` with `impl` [`source::remote::Objects`], and its scheme in `remote/url_scheme.rs`; disk cache, retries and limits apply to it |
//! | another way to read files | `src/source/<name>.rs` with `impl` [`source::Source`], and its line in [`source::pin_files`]; the conformance suite `tests/sources/local.rs` runs over it |
//! | a kind of checkpoint | `src/checkpoint/containers/<name>.rs`, and its variant of [`checkpoint::Container`], which the compiler follows to `open.rs` |
//! | a quantization scheme | a row in the file of its kind in `src/checkpoint/scheme`; one of no known kind: `<name>.rs` with a function `find`, and its line in [`checkpoint::scheme`] |
//! | another way in | an adapter over [`service::Service`]: it converts requests to [`volume::FileSystem`] calls and replies ([`service::Pending`]), and decides nothing; as `src/fuse` |
//! | a setting | its field in [`config::Settings`] and its row in [`config::SETTINGS`]: flag, key, mount option and help follow |
//! | a command | `src/cli/<name>.rs`, and its variant of `Command` in `src/cli/mod.rs` |
//! | a dtype | its row in `src/tensor/dtype.rs`; the compiler and a test name the conversions that it needs |
//!
//! A new file of Rust is also a `mod` line in the `mod.rs` beside it. The manifests of the layers hold them to their order;
//! `tests/layering.rs` holds the files of a layer to one without cycles, `unsafe` to a list of files, and each type name to one
//! meaning.

pub use ckfs_checkpoint as checkpoint;
pub use ckfs_cli as cli;
pub use ckfs_config as config;
#[cfg(feature = "csi")]
pub use ckfs_csi as csi;
pub use ckfs_format as format;
pub use ckfs_fuse as fuse;
pub use ckfs_host as host;
pub use ckfs_image as image;
pub use ckfs_plan as plan;
pub use ckfs_read as read;
#[cfg(feature = "serve")]
pub use ckfs_serve as serve;
pub use ckfs_service as service;
pub use ckfs_source as source;
pub use ckfs_sync as sync;
pub use ckfs_tensor as tensor;
pub use ckfs_volume as volume;

pub mod guide;
