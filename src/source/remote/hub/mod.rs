//! A thin client of the Hugging Face Hub, for reading only: plain HTTPS and ranges.
//!
//! Four requests are enough. A revision is pinned to a commit, and the tree of the commit is listed with the digests of its
//! files ([`Hub::repository`]). Each file is located once: the Hub answers with a signed address of its content network, or serves
//! small files itself. Then ranges are read from that address.
//!
//! * The Hub counts locations against a limit of some thousands per five minutes. So an address is kept per file, and renewed
//!   when its server refuses it: once, then the read fails.
//! * The token goes to hosts of the Hub and to no other. Redirects are followed here, not by the HTTP library, because the rule
//!   depends on the target.
//! * What the Hub refuses is explained, whether the API refuses or the address of a file.
//!
//! It does not cache, repeat reads, merge ranges or verify digests: those belong to the modules beside it.

mod client;
mod refusal;
mod settings;
mod snapshot;
mod tree;

pub use client::Hub;
pub use settings::{HubSettings, Token};
