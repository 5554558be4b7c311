//! A small HTTP/1.1 server: a thread for each connection, a function for all requests, and faults on the way back.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    ops::Range,
    os::unix::fs::FileExt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Bytes of a body written at once.
const CHUNK: usize = 256 << 10;

/// A request, without body.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// The path, as sent: escapes are not resolved.
    pub path: String,
    pub query: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    /// The value of a parameter of the query.
    pub fn parameter(&self, name: &str) -> Option<String> {
        let pairs = self.query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        pairs.filter(|(key, _)| *key == name).map(|(_, value)| unescaped(value)).next()
    }

    /// The bytes that `Range: bytes=a-b` asks for, cut to a size. `None` if there is no such header.
    pub fn range(&self, size: u64) -> Option<Range<u64>> {
        let (first, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        let Ok(first) = first.parse::<u64>() else {
            return Some(size.saturating_sub(last.parse().unwrap())..size);
        };
        let end = if last.is_empty() { size } else { last.parse::<u64>().unwrap() + 1 };
        Some(first..end.min(size).max(first))
    }
}

/// Resolves `%2F` and the like.
pub fn unescaped(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let code = tail.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        if let (b'%', Some(code)) = (first, code) {
            bytes.push(code);
            rest = &tail[2..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).unwrap()
}

#[derive(Clone, Debug)]
pub enum Body {
    Text(String),
    File(Arc<File>, Range<u64>),
}

impl Body {
    pub fn len(&self) -> u64 {
        match self {
            Self::Text(text) => text.len() as u64,
            Self::File(_, range) => range.end - range.start,
        }
    }
}

/// What goes wrong with a reply.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Time before the first byte.
    pub delay: Duration,
    /// Bytes of the body after which the connection breaks.
    pub cut_after: Option<u64>,
    /// Bytes of the body after which nothing more comes, while the connection stays open.
    pub stall_after: Option<u64>,
    /// Bytes at a time, and the time between them.
    pub drip: Option<(usize, Duration)>,
    /// The line that all replies of a server share, if its rate is limited.
    pub line: Option<Arc<Line>>,
}

/// A line that carries so many bytes in a second, however many connections share it.
#[derive(Debug)]
pub struct Line {
    pub bytes_per_second: u64,
    free_at: Mutex<Instant>,
}

impl Line {
    pub fn new(bytes_per_second: u64) -> Arc<Self> {
        Arc::new(Self { bytes_per_second, free_at: Mutex::new(Instant::now()) })
    }

    /// Waits until the line has carried `bytes` bytes after those of earlier callers.
    fn carry(&self, bytes: usize) {
        let time = Duration::from_nanos(bytes as u64 * 1_000_000_000 / self.bytes_per_second);
        let done_at = {
            let mut free_at = self.free_at.lock().unwrap();
            // A sleep that was a little too long is made up for.
            let now = Instant::now();
            *free_at = (*free_at).max(now.checked_sub(Duration::from_millis(5)).unwrap_or(now)) + time;
            *free_at
        };
        thread::sleep(done_at.saturating_duration_since(Instant::now()));
    }
}

#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Body,
    pub faults: Faults,
}

impl Reply {
    pub fn new(status: u16, text: impl Into<String>) -> Self {
        Self { status, headers: Vec::new(), body: Body::Text(text.into()), faults: Faults::default() }
    }

    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// A file, or the requested range of it.
    pub fn file(request: &Request, file: &Arc<File>) -> Self {
        let size = file.metadata().unwrap().len();
        let (status, range) = match request.range(size) {
            Some(range) if range.is_empty() => {
                return Self::new(416, "").header("Content-Range", format!("bytes */{size}"));
            }
            Some(range) => (206, range),
            None => (200, 0..size),
        };
        let reply = Self {
            status,
            headers: Vec::new(),
            body: Body::File(Arc::clone(file), range.clone()),
            faults: Faults::default(),
        };
        let reply = reply.header("Accept-Ranges", "bytes");
        if status == 206 {
            reply.header("Content-Range", format!("bytes {}-{}/{size}", range.start, range.end - 1))
        } else {
            reply
        }
    }
}

/// What a server has done.
#[derive(Debug, Default)]
pub struct Record {
    /// Requests, in order of their arrival: method and path.
    pub requests: Mutex<Vec<String>>,
    /// Bytes of bodies.
    pub body_bytes: AtomicU64,
    pub connections: AtomicU64,
    pub count: AtomicU64,
}

impl Record {
    /// The requests that contain a text.
    pub fn with(&self, text: &str) -> Vec<String> {
        self.requests.lock().unwrap().iter().filter(|request| request.contains(text)).cloned().collect()
    }
}

type Handler = dyn Fn(&Request) -> Reply + Send + Sync;

/// A server. It ends when this is dropped.
pub struct Server {
    pub port: u16,
    pub record: Arc<Record>,
    stop: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Server {
    pub fn start(handler: Arc<Handler>) -> Self {
        Self::start_at(0, handler)
    }

    /// Starts at a port; 0 is any.
    pub fn start_at(port: u16, handler: Arc<Handler>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let record = Arc::new(Record::default());
        let stop = Arc::new(AtomicBool::new(false));
        let open: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let server = Self { port, record: Arc::clone(&record), stop: Arc::clone(&stop), open: Arc::clone(&open) };
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let Ok(stream) = stream else { continue };
                record.connections.fetch_add(1, Ordering::Relaxed);
                open.lock().unwrap().extend(stream.try_clone());
                let (handler, record) = (Arc::clone(&handler), Arc::clone(&record));
                thread::Builder::new()
                    .stack_size(256 << 10)
                    .spawn(move || drop(serve(stream, &*handler, &record)))
                    .unwrap();
            }
        });
        server
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        // So that the listener sees it.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn serve(stream: TcpStream, handler: &Handler, record: &Record) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut output = stream.try_clone()?;
    let mut input = BufReader::new(stream);
    loop {
        let Some(request) = read_request(&mut input)? else { return Ok(()) };
        record.count.fetch_add(1, Ordering::Relaxed);
        let query = if request.query.is_empty() { String::new() } else { format!("?{}", request.query) };
        record.requests.lock().unwrap().push(format!("{} {}{query}", request.method, request.path));
        let reply = handler(&request);
        if !write_reply(&mut output, &request, &reply, record)? {
            return output.shutdown(Shutdown::Both);
        }
    }
}

fn read_request(input: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if input.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_ascii_whitespace();
    let (method, target) = (words.next().unwrap_or_default().to_owned(), words.next().unwrap_or_default().to_owned());
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let mut headers = Vec::new();
    let mut length = 0;
    loop {
        let mut line = String::new();
        input.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        let (name, value) = (name.to_ascii_lowercase(), value.trim().to_owned());
        if name == "content-length" {
            length = value.parse().unwrap();
        }
        headers.push((name, value));
    }
    io::copy(&mut input.take(length), &mut io::sink())?;
    Ok(Some(Request { method, path: path.to_owned(), query: query.to_owned(), headers }))
}

/// Writes a reply. Returns whether the connection stays.
fn write_reply(output: &mut TcpStream, request: &Request, reply: &Reply, record: &Record) -> io::Result<bool> {
    let Faults { delay, cut_after, stall_after, drip, line } = &reply.faults;
    thread::sleep(*delay);
    let len = reply.body.len();
    let mut head = format!("HTTP/1.1 {} Stub\r\nContent-Length: {len}\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.extend([name.as_str(), ": ", value.as_str(), "\r\n"]);
    }
    head.push_str("\r\n");
    output.write_all(head.as_bytes())?;
    if request.method == "HEAD" {
        return Ok(true);
    }
    let last = cut_after.or(*stall_after).unwrap_or(len).min(len);
    let (step, pause) = drip.unwrap_or((CHUNK, Duration::ZERO));
    let mut buffer = vec![0; step];
    let mut done = 0;
    while done < last {
        let part = usize::try_from((last - done).min(step as u64)).unwrap();
        match &reply.body {
            Body::Text(text) => {
                let start = usize::try_from(done).unwrap();
                buffer[..part].copy_from_slice(&text.as_bytes()[start..start + part]);
            }
            Body::File(file, range) => file.read_exact_at(&mut buffer[..part], range.start + done)?,
        }
        if let Some(line) = line {
            line.carry(part);
        }
        output.write_all(&buffer[..part])?;
        record.body_bytes.fetch_add(part as u64, Ordering::Relaxed);
        done += part as u64;
        thread::sleep(pause);
    }
    if cut_after.is_some() {
        return Ok(false);
    }
    if stall_after.is_some() {
        let begun = Instant::now();
        // Until the client gives up, or long enough for every test.
        output.set_read_timeout(Some(Duration::from_millis(200)))?;
        while begun.elapsed() < Duration::from_mins(2) {
            match output.peek(&mut [0]) {
                Ok(0) => break,
                Ok(_) => thread::sleep(Duration::from_millis(100)),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(_) => break,
            }
        }
        return Ok(false);
    }
    Ok(true)
}
