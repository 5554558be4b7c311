//! The server: listening, connections, and their end.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    panic::AssertUnwindSafe,
    pin::pin,
    sync::Arc,
    thread,
    time::Duration,
};

use ckfs_config::ThreadCount;
use ckfs_host::{
    Log, limits,
    systemd::{self, NotifyState},
};
use ckfs_service::{Alive, Heartbeat, panic_text, steps::StepPlace};
use futures_util::{
    FutureExt,
    future::{Either, select},
};
use http::{
    Request, StatusCode,
    header::{CONNECTION, EXPECT},
};
use http_body_util::BodyExt;
use hyper::{
    body::{Body, Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::sys::{
    resource::{Resource, getrlimit},
    socket::{Backlog, listen},
};
use tokio::{net::TcpStream, sync::watch, time::timeout};
use tokio_io_timeout::TimeoutWriter;

use super::{
    answer::{self, Reply},
    connections::{ConnectionPlace, Connections},
    hub,
    options::{ServeError, ServeOptions},
    reads::ServedReads,
    router::Router,
    served::ServedSource,
    supervisor,
};

/// Most connections, as far as the limit of open files allows.
const CONNECTIONS_MAX: u64 = 4096;

/// Open files that sources and the process need.
const OTHER_FILES: u64 = 512;

/// Least number of connections.
const CONNECTIONS_MIN: u64 = 64;

/// Bytes of a request's line and headers; also of a reply that waits in a connection beside its chunk.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// Headers of a request.
const HEADERS_MAX: usize = 64;

/// Time for the line and headers of a request, from the end of the answer before it: so long may a connection be idle.
const HEAD_LIMIT: Duration = Duration::from_mins(1);

/// Time without progress after which a client that takes no bytes is given up.
const WRITE_LIMIT: Duration = Duration::from_mins(1);

/// Time for what precedes the body of a reply, beyond the time limit of sources: none may wait forever.
const ANSWER_LIMIT: Duration = Duration::from_mins(10);

/// Pause after a connection that was not accepted, as at a limit of open files.
const PAUSE: Duration = Duration::from_millis(50);

/// Threads that talk to clients, at most. They never wait for storage.
const SPEAKERS_MAX: usize = 4;

impl ServeError {
    /// The address is taken, or is none of this machine.
    fn of_address(address: SocketAddr, error: &io::Error) -> Self {
        Self(format!("listen on {address}: {error}"))
    }

    /// A system call failed that was to do `what`.
    fn of_system(what: &str, error: &io::Error) -> Self {
        Self(format!("{what}: {error}{}", limits::hint()))
    }
}

/// A door that is bound to its addresses and not open yet: clients wait until it serves.
#[derive(Debug)]
pub struct Door {
    options: ServeOptions,
    http: Listening,
    s3: Option<Listening>,
}

/// A bound address.
#[derive(Debug)]
struct Listening {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listening {
    fn bind(address: SocketAddr) -> Result<Self, ServeError> {
        let refused = |error: io::Error| ServeError::of_address(address, &error);
        let listener = TcpListener::bind(address).map_err(refused)?;
        // Of std's 128 in the queue, a fleet that begins together fills all, and then each waits a second for its next try.
        listen(&listener, Backlog::MAXALLOWABLE).map_err(|error| refused(error.into()))?;
        listener.set_nonblocking(true).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Self { listener, address })
    }
}

impl Door {
    /// Binds the addresses, so that one that is taken is an error before anything is read.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn bind(options: ServeOptions) -> Result<Self, ServeError> {
        let http = Listening::bind(options.listen)?;
        let s3 = options.s3.map(Listening::bind).transpose()?;
        Ok(Self { options, http, s3 })
    }

    /// Where HTTP is answered.
    pub fn address(&self) -> SocketAddr {
        self.http.address
    }

    /// Where the requests of S3 are answered, if they are.
    pub fn s3_address(&self) -> Option<SocketAddr> {
        self.s3.as_ref().map(|listening| listening.address)
    }

    /// Serves a checkpoint or a run until a signal ends it. Calls `on_ready` with the names of the repositories once requests are
    /// answered. Signals that concern the log act on `log`. Returns whether every answer that had begun was sent, or some were cut off.
    ///
    /// The signals must be blocked before the first thread starts: see [`ckfs_host::signal::block`].
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn serve(self, service: &dyn Alive, log: &Log, on_ready: impl FnOnce(&[String])) -> Result<bool, ServeError> {
        let address = self.address();
        let reads = reads(service)?;
        let served = ServedSource::new(service, &reads, self.options.name.as_ref());
        let system = |what| move |error: io::Error| ServeError::of_system(what, &error);
        let signals = supervisor::signals().map_err(system("signals"))?;
        let speakers = thread::available_parallelism().map_or(1, usize::from).min(SPEAKERS_MAX);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(speakers)
            .thread_name("ckfs-http")
            .enable_io()
            .enable_time()
            .build()
            .map_err(system("start threads"))?;
        let connections = Arc::new(Connections::new(connections_max()));
        // Dropped when the server ends.
        let (serving, ending) = watch::channel(());
        let listening = [(self.http, None)].into_iter().chain(self.s3.map(|s3| (s3, Some(Arc::default()))));
        for (Listening { listener, address }, sorted) in listening {
            let router = Router { options: self.options.clone(), served: served.clone(), sorted };
            let _inside = runtime.enter();
            let listener = tokio::net::TcpListener::from_std(listener);
            let listener = listener.map_err(|error| ServeError::of_address(address, &error))?;
            runtime.spawn(accept(listener, Arc::new(router), Arc::clone(&connections), ending.clone()));
        }
        if let Some(heartbeat) = Heartbeat::of(&reads.watchdog) {
            runtime.spawn(beat(heartbeat));
        }
        let status = format!("serving {} at http://{address}", service.label());
        systemd::notify(&[NotifyState::Ready, NotifyState::Status(&status)]);
        service.note_reached(StepPlace::Address(format!("http://{}/files", reached(address))));
        on_ready(&served.ids());
        let all_sent = supervisor::run(&signals, serving, &connections, &**served.fs(), self.options.drain, log);
        // Cuts off what is left. Threads that wait for storage end with the process.
        runtime.shutdown_background();
        all_sent.map_err(system("wait for signals"))
    }
}

/// The threads that read files.
fn reads(service: &dyn Alive) -> Result<Arc<ServedReads>, ServeError> {
    let threads = service.config().mount.threads.map(ThreadCount::count);
    let threads = threads.unwrap_or_else(|| thread::available_parallelism().map_or(2, usize::from).clamp(2, 16));
    let reads = ServedReads::new(service.file_system(), threads);
    Ok(Arc::new(reads.map_err(|error| ServeError::of_system("start a thread", &error))?))
}

/// Gives signs of life: the threads that talk to clients run this. Systemd may take a message late, and none of them waits for that.
async fn beat(mut heartbeat: Heartbeat) {
    loop {
        tokio::time::sleep(heartbeat.period() / 4).await;
        let beating = tokio::task::spawn_blocking(move || {
            heartbeat.beat();
            heartbeat
        });
        let Ok(beaten) = beating.await else { return };
        heartbeat = beaten;
    }
}

/// The address by which programs of this machine reach one that is bound.
fn reached(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (Ipv4Addr::LOCALHOST, address.port()).into(),
        IpAddr::V6(ip) if ip.is_unspecified() => (Ipv6Addr::LOCALHOST, address.port()).into(),
        IpAddr::V4(_) | IpAddr::V6(_) => address,
    }
}

/// The connections that the limit of open files leaves room for.
fn connections_max() -> usize {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
    let max = files.saturating_sub(OTHER_FILES).clamp(CONNECTIONS_MIN, CONNECTIONS_MAX);
    usize::try_from(max).expect("a few thousand")
}

/// Accepts connections until the server ends.
async fn accept(
    listener: tokio::net::TcpListener,
    router: Arc<Router>,
    connections: Arc<Connections>,
    mut ending: watch::Receiver<()>,
) {
    let for_connections = ending.clone();
    let mut ending = pin!(ending.changed());
    loop {
        let accepted = match select(pin!(listener.accept()), ending.as_mut()).await {
            Either::Left((accepted, _)) => accepted,
            Either::Right(_) => return,
        };
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!("a connection is not accepted: {error}");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        // All are in use: this one is closed.
        let Some(place) = connections.enter() else { continue };
        let _ = socket.set_nodelay(true);
        tokio::spawn(speak(socket, peer.ip(), Arc::clone(&router), place, for_connections.clone()));
    }
}

/// The life of a connection.
async fn speak(
    socket: TcpStream,
    peer: IpAddr,
    router: Arc<Router>,
    place: ConnectionPlace,
    mut ending: watch::Receiver<()>,
) {
    let place = Arc::new(place);
    let for_requests = Arc::clone(&place);
    let service = service_fn(move |request: Request<Incoming>| {
        let (router, busy) = (Arc::clone(&router), for_requests.busy());
        async move {
            let reply = guarded(&router, request, peer).await;
            Ok::<_, Infallible>(answer::finished(reply).map(|body| body.marked(busy)))
        }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .half_close(false);
    let mut socket = TimeoutWriter::new(socket);
    socket.set_timeout(Some(WRITE_LIMIT));
    let mut connection = pin!(builder.serve_connection(TokioIo::new(Box::pin(socket)), service));
    let (draining, closed) = (pin!(ending.changed()), pin!(place.close.notified()));
    // Otherwise it has ended, or another one needs its place.
    if let Either::Right((Either::Left(_), _)) = select(connection.as_mut(), select(draining, closed)).await {
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }
}

/// Answers a request, and takes in a body that the answer did not need: if some of it is still on its way, the connection would be
/// closed after the answer, when the client may have sent its next request already.
async fn guarded(router: &Router, request: Request<Incoming>, peer: IpAddr) -> Reply {
    let (parts, mut body) = request.into_parts();
    // Such a client sends its body only when it is asked to.
    let asks_first = parts.headers.contains_key(EXPECT);
    let reply = caught(router, Request::from_parts(parts, &mut body), peer).await;
    if body.is_end_stream() || reply.headers().contains_key(CONNECTION) {
        return reply;
    }
    if !asks_first && timeout(HEAD_LIMIT, is_taken_in(&mut body)).await.unwrap_or(false) {
        return reply;
    }
    answer::with_header(reply, CONNECTION, "close")
}

/// Whether a body ends within the bytes that bodies have.
async fn is_taken_in(body: &mut Incoming) -> bool {
    let mut left = hub::PATHS_BYTES_MAX;
    if body.size_hint().lower() > left as u64 {
        return false;
    }
    while let Some(frame) = body.frame().await {
        let bytes = frame.map_or(usize::MAX, |frame| frame.data_ref().map_or(0, Bytes::len));
        let Some(less) = left.checked_sub(bytes) else { return false };
        left = less;
    }
    true
}

/// Answers a request; a panic is that request's error.
async fn caught(router: &Router, request: Request<&mut Incoming>, peer: IpAddr) -> Reply {
    let shown = format!("{} {}", request.method(), request.uri().path());
    let answered = timeout(ANSWER_LIMIT, AssertUnwindSafe(router.answer(request, peer)).catch_unwind()).await;
    match answered {
        Ok(Ok(reply)) => {
            tracing::debug!("{peer}: {shown}: {}", reply.status().as_u16());
            reply
        }
        Ok(Err(panic)) => {
            let cause = panic_text(panic.as_ref());
            router.served.fs().metrics().note_panic(&shown, cause);
            tracing::error!("{shown}: request handler panicked: {cause}");
            answer::failed(StatusCode::INTERNAL_SERVER_ERROR, "an error in ckfs; its log says more")
        }
        Err(_) => answer::failed(StatusCode::GATEWAY_TIMEOUT, "no answer in time"),
    }
}
