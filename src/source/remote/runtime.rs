//! The asynchronous runtime below the blocking interface, and TLS.
//!
//! It is made at the first use, which comes after the daemon was started: a forked process would lack its threads. A blocking
//! call runs its future on the calling thread; the runtime's two threads serve connections and timers.

use std::{future::Future, io, sync::OnceLock, time::Duration};

use tokio::runtime::{Builder, Runtime};

use super::error::{Failure, RemoteError};

/// Threads for connections and timers. The bytes are processed on the threads of the callers.
const THREADS: usize = 2;

/// Longest time to connect, TLS included.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time without a byte of a reply.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(15);

fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Result<Runtime, io::ErrorKind>> = OnceLock::new();
    let made = RUNTIME.get_or_init(|| {
        install_tls();
        let built = Builder::new_multi_thread().worker_threads(THREADS).thread_name("ckfs-net").enable_all().build();
        built.inspect_err(|error| tracing::error!("threads for the network: {error}")).map_err(|error| error.kind())
    });
    made.as_ref().map_err(|kind| io::Error::new(*kind, "threads for the network cannot be started"))
}

/// Runs a future to its end on this thread, for requests to a host.
///
/// # Errors
/// The runtime's threads cannot be started.
///
/// # Panics
/// If it is called from within the runtime.
pub(super) fn block_on<F: Future>(host: &str, future: F) -> Result<F::Output, RemoteError> {
    let failed = |error: io::Error| RemoteError::new(Failure::Unsupported, host, "HTTP client", error.to_string());
    Ok(runtime().map_err(failed)?.block_on(future))
}

/// Makes TLS use the `ring` library. To be called before a client is made.
pub fn install_tls() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        // Fails only if there is one already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// What all clients have in common: they follow no redirect, since each of their users judges by itself where one leads.
pub(crate) fn http_client() -> reqwest::ClientBuilder {
    install_tls();
    reqwest::Client::builder()
        .user_agent(concat!("ckfs/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
}

/// Why a client could not be made, with what helps.
pub(crate) fn with_remedy(reason: String) -> String {
    if reason.contains("CA certificates") {
        reason + "; install the package ca-certificates, or name a file of certificates by SSL_CERT_FILE"
    } else {
        reason
    }
}
