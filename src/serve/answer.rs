//! Replies that are no files.

use http::{
    HeaderName, HeaderValue, Response, StatusCode,
    header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, SERVER, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS},
};

use super::{
    body::ReplyBody,
    gate::{Caller, NoEntry},
};

/// A reply.
pub(super) type Reply = Response<ReplyBody>;

/// A reply, or the one that says why there is no other.
pub(super) type Answered = Result<Reply, Reply>;

/// Content type of text.
pub(super) const TEXT: &str = "text/plain; charset=utf-8";
/// Of JSON.
pub(super) const JSON: &str = "application/json";
/// Of a page.
pub(super) const HTML: &str = "text/html; charset=utf-8";

/// A reply of a text.
pub(super) fn of_text(status: StatusCode, content_type: &'static str, text: impl Into<String>) -> Reply {
    of_body(status, content_type, ReplyBody::of(text.into()))
}

/// A reply of a body.
pub(super) fn of_body(status: StatusCode, content_type: &'static str, body: ReplyBody) -> Reply {
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

/// A reply without a body.
pub(super) fn empty(status: StatusCode) -> Reply {
    let mut reply = Response::new(ReplyBody::empty());
    *reply.status_mut() = status;
    reply
}

/// With a header; one that is none of HTTP is left out.
pub(super) fn with_header(mut reply: Reply, name: HeaderName, value: &str) -> Reply {
    if let Ok(value) = HeaderValue::from_str(value) {
        reply.headers_mut().insert(name, value);
    }
    reply
}

/// An error in words.
pub(super) fn failed(status: StatusCode, text: &str) -> Reply {
    of_text(status, TEXT, format!("{text}\n"))
}

/// A method that is not answered.
pub(super) fn wrong_method(allowed: &'static str) -> Reply {
    let text = format!("expected {allowed}: everything here is read-only");
    with_header(failed(StatusCode::METHOD_NOT_ALLOWED, &text), ALLOW, allowed)
}

/// What to say to a client that asked by a name that is not taken for one of this machine.
pub(super) fn other_name(caller: &Caller) -> String {
    let name = caller.host.as_deref().unwrap_or_default();
    format!(
        "expected localhost or an address, found the name {name}, which a page of the web may have; if it is yours, serve with \
         --allow-host {name}"
    )
}

/// A request that is not let in.
pub(super) fn not_admitted(reason: NoEntry, caller: &Caller) -> Reply {
    let error_message = HeaderName::from_static("x-error-message");
    let (text, of_hub) = match reason {
        NoEntry::Name => {
            let text = other_name(caller);
            return with_header(failed(StatusCode::MISDIRECTED_REQUEST, &text), error_message, &text);
        }
        NoEntry::Missing => ("expected a token: Authorization: Bearer TOKEN", "a token is needed: set HF_TOKEN"),
        // Clients of the Hub know this text; they report another 401 as a repository that does not exist.
        NoEntry::Wrong => ("expected another token", "Invalid credentials in Authorization header"),
    };
    let reply = with_header(failed(StatusCode::UNAUTHORIZED, text), WWW_AUTHENTICATE, "Bearer realm=\"ckfs\"");
    with_header(reply, error_message, of_hub)
}

/// Every reply has these headers.
pub(super) fn finished(mut reply: Reply) -> Reply {
    let headers = reply.headers_mut();
    headers.insert(SERVER, HeaderValue::from_static(concat!("ckfs/", env!("CARGO_PKG_VERSION"))));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    // A server that starts with other settings serves other bytes at the same address: the entity tag tells.
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-cache"));
    reply
}
