//! Where the bytes of a checkpoint come from.
//!
//! A source is a fixed list of files. Each file is pinned when the source is made: its length and identity are fixed from then
//! on. The interface, [`Source`], is narrow: a file returns spans of bytes, exactly or as an error. A source whose files
//! are mapped provides its maps ([`Source::maps`]). Then contiguous reads ([`Maps::with_kernel_bytes`]) and conversions
//! ([`Maps::with`]) need no copy. What only remote files ([`RemoteSource`]) and decoded chunks ([`DecodedChunks`]) have is apart from
//! it in the same way.
//!
//! A file that differs from the pinned one is *poisoned*: from then on every access to it is an error. It is never trusted
//! again within this process, since it is unknown which of its bytes were read before and which after the change.
//!
//! A file whose storage does not answer *stalls* ([`stall`]): every access to it is an error until the requested bytes come.
//! After that it works as before.
//!
//! Files of a repository are opened beneath its directory ([`RootDir`]), so that no link adds a file from elsewhere to it. The
//! permissions of a file are read once, when it is opened ([`permission`]).
//!
//! A source does not list a repository, know tensors, merge neighbouring spans, or cache. Those belong to the layers above.

pub mod calendar;
mod compared;
mod content_name;
pub mod digest;
mod error;
mod health;
mod interface;
mod kernel_bytes;
pub mod local;
mod memory;
pub mod page_size;
pub mod permission;
pub mod remote;
mod root_dir;
mod span;
pub mod stall;
mod survey;
mod unique;
pub mod waits;

pub use compared::ComparedFiles;
pub use content_name::{ContentName, this_process, this_start};
pub use error::{Poison, SourceError};
pub use health::Health;
pub use interface::{
    Coded, DecodedChunks, Duplicates, FetchPart, FileFetch, Maps, Pin, ReadFailure, RemoteSource, Replied, Source,
};
pub use kernel_bytes::{KernelBytes, Served};
pub use local::{DirectoryWatch, LocalFiles, SourceIo, Woken, is_on_network};
pub use memory::BufferMemory;
pub use remote::pin_files;
pub use root_dir::{FoundFile, Opened, RootDir, check_open_file_limit, private_directory};
pub use span::{ByteSpan, FileId};
pub use stall::{Stall, WaitGuard, WaitRegistry, Waiting};
pub use waits::{Wait, Waits};
