//! The files of a volume over the network: HTTP, the read requests of the Hub, and read-only S3. The only user of hyper.
//!
//! ```text
//! connection -> gate: who asks? -> router -> files | repositories | buckets -> file reply -> chunks -> threads that read
//! ```
//!
//! A door as FUSE is one: it converts requests to calls of a [`FileSystem`](ckfs_volume::FileSystem) and its answers to replies, and
//! decides nothing. Requests that wait for bytes go through [`ckfs_service::Requests`], as those of the kernel do.
//!
//! | module | holds |
//! | --- | --- |
//! | `server`, `connections` | [`Door`]: listening, the life of connections, their bounds, draining |
//! | `supervisor` | signals and the end |
//! | `options`, `gate` | [`ServeOptions`]: addresses, names, token; who asks, by which name, and may see what |
//! | `router`, `answer`, `path` | which request is answered by what; replies; paths of requests |
//! | `files`, `listing` | `/files/`: files and directories |
//! | `hub`, `repositories` | repositories as clients of the Hub read them; commits and entity tags are those of [`ckfs_service::identity`] |
//! | `s3` | the bucket `ckfs`: lists of keys, objects, signatures |
//! | `conditions` | preconditions and ranges of requests; pure |
//! | `file_reply`, `body` | a file as a reply, in chunks that are made when the client has taken those before |
//! | `served`, `steps` | what is served: one checkpoint, or the steps of a run, each a revision of its repositories |
//! | `reads`, `tree` | threads that open and read files of a volume |
//!
//! A chunk leaves this process only after the read that made it has succeeded, its check of the sources included: a client never gets
//! other bytes, and the last bytes of a reply that fails never come. So bytes are copied once into memory of the door, from the page
//! cache or from a tile, rather than sent from a map.

mod answer;
mod body;
mod conditions;
mod connections;
mod file_reply;
mod files;
mod gate;
mod hub;
mod listing;
mod options;
mod path;
mod reads;
mod repositories;
mod router;
mod s3;
mod served;
mod server;
mod steps;
mod supervisor;
mod tree;

pub use options::{AccessToken, ServeError, ServeOptions};
pub use server::Door;
