//! A web server for one page: HTTP/1.1, one request a connection.
//!
//! Own code: `tiny_http` (0.12, of 2022) sets no limit to connections, headers or waiting, and a server on `hyper` brings a runtime.
//! Everything is bounded here: connections, bytes of a request, its time and that of the reply. Where all connections are taken, the
//! oldest is closed, so that idle ones do not keep others out.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::text::CONTENT_TYPE;

/// Connections at a time.
const CONNECTIONS_MAX: usize = 32;

/// Bytes of a request's line and headers.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// Time for a request, and for its reply.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// Pause after a connection that was not accepted, as at a limit of open files.
const PAUSE: Duration = Duration::from_millis(100);

/// The text of the page, made for each request.
pub(super) type Page = dyn Fn() -> String + Send + Sync;

/// Open connections, the oldest first.
type Open = Arc<Mutex<VecDeque<(u64, TcpStream)>>>;

/// Serves the page until the process ends.
pub(super) fn serve(listener: &TcpListener, page: &Arc<Page>) {
    let open = Open::default();
    for number in 0_u64.. {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(PAUSE);
            continue;
        };
        let Ok(copy) = stream.try_clone() else { continue };
        {
            let mut open = open.lock();
            if open.len() >= CONNECTIONS_MAX
                && let Some((_, oldest)) = open.pop_front()
            {
                let _ = oldest.shutdown(Shutdown::Both);
            }
            open.push_back((number, copy));
        }
        let (open_here, page) = (Arc::clone(&open), Arc::clone(page));
        let answering = thread::Builder::new().name("ckfs-http".into()).spawn(move || {
            // A reader that has gone away needs no answer.
            let _ = answer(&stream, &*page);
            let _ = stream.shutdown(Shutdown::Both);
            open_here.lock().retain(|(other, _)| *other != number);
        });
        if answering.is_err() {
            open.lock().retain(|(other, _)| *other != number);
            thread::sleep(PAUSE);
        }
    }
}

/// A request that does not get the page: the status, and a text.
type Refusal = (&'static str, &'static str);

const NOT_FOUND: Refusal = ("404 Not Found", "the metrics are at /metrics\n");
const WRONG_METHOD: Refusal = ("405 Method Not Allowed", "expected GET or HEAD\n");
const MALFORMED: Refusal = ("400 Bad Request", "expected a request of HTTP/1\n");
const TOO_LARGE: Refusal = ("431 Request Header Fields Too Large", "expected at most 8 KiB\n");

/// Reads a request and answers it.
fn answer(mut stream: &TcpStream, page: &Page) -> io::Result<()> {
    stream.set_write_timeout(Some(REQUEST_LIMIT))?;
    let until = Instant::now() + REQUEST_LIMIT;
    let mut request = Vec::new();
    let judged = loop {
        if let Some(end) = request.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break judge(&request[..end]);
        }
        if request.len() >= REQUEST_BYTES_MAX {
            break Err(TOO_LARGE);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        stream.set_read_timeout(Some(left))?;
        let mut part = [0; 1024];
        match stream.read(&mut part)? {
            0 => return Ok(()),
            len => request.extend_from_slice(&part[..len]),
        }
    };
    let (status, body, with_body) = match judged {
        Ok(with_body) => ("200 OK", page(), with_body),
        Err((status, text)) => (status, text.to_owned(), true),
    };
    let allow = if judged == Err(WRONG_METHOD) { "Allow: GET, HEAD\r\n" } else { "" };
    let mut reply = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {}\r\n{allow}Connection: close\r\n\r\n",
        body.len()
    );
    if with_body {
        reply.push_str(&body);
    }
    stream.write_all(reply.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    // Closing with unread bytes would reset the connection, and the reader would lose the reply.
    stream.set_read_timeout(Some(PAUSE))?;
    let mut rest = [0; 4096];
    let until = Instant::now() + REQUEST_LIMIT;
    while Instant::now() < until && stream.read(&mut rest)? > 0 {}
    Ok(())
}

/// Judges a request by its line; headers mean nothing here. Whether the page is sent, or its headers alone.
fn judge(request: &[u8]) -> Result<bool, Refusal> {
    let line = request.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return Err(MALFORMED) };
    let words: Vec<&str> = line.split(' ').collect();
    let [method, target, version] = words[..] else { return Err(MALFORMED) };
    if !version.starts_with("HTTP/1.") || method.is_empty() {
        return Err(MALFORMED);
    }
    if !matches!(method, "GET" | "HEAD") {
        return Err(WRONG_METHOD);
    }
    if target.split('?').next() == Some("/metrics") { Ok(method == "GET") } else { Err(NOT_FOUND) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_judged_by_their_line() {
        for (request, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: x", Ok(true)),
            ("HEAD /metrics?x=1 HTTP/1.0", Ok(false)),
            ("GET / HTTP/1.1", Err(NOT_FOUND)),
            ("GET /metrics/ HTTP/1.1", Err(NOT_FOUND)),
            ("POST /metrics HTTP/1.1", Err(WRONG_METHOD)),
            ("GET /metrics", Err(MALFORMED)),
            ("GET /metrics HTTP/2", Err(MALFORMED)),
            ("", Err(MALFORMED)),
            ("GET  /metrics HTTP/1.1", Err(MALFORMED)),
        ] {
            assert_eq!(judge(request.as_bytes()), expected, "{request}");
        }
        assert_eq!(judge(b"\xff\xfe x y"), Err(MALFORMED));
    }
}
