//! Why a remote object could not be read.

use std::{fmt, time::Duration};

use super::super::ByteSpan;

/// The kind of a failed attempt, which decides what follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It may succeed if it is repeated: the connection broke, the server had a fault, the reply was short or not the requested
    /// one.
    Transient,
    /// The service asks for a pause, for this long if it says so. All threads pause.
    Busy(Option<Duration>),
    /// The object has another version than the pinned one.
    Changed {
        /// The pinned version.
        expected: String,
        /// The version of the reply, or the service's error.
        found: String,
    },
    /// There is no such object.
    NotFound,
    /// The service does not let this user read it.
    Refused,
    /// The service cannot do what is needed, for example reply with a part of an object.
    Unsupported,
}

/// A failed request. Never contains a token, a signature or a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteError {
    /// What follows from it.
    pub failure: Failure,
    /// Host of the service.
    pub host: String,
    /// The object, or what else was requested.
    pub what: String,
    /// The requested bytes, if it was an object.
    pub span: Option<ByteSpan>,
    /// HTTP status, if there was a reply.
    pub status: Option<u16>,
    /// The service's name for the request, if it gave one.
    pub request_id: Option<String>,
    /// What went wrong, in lower case, and what to do.
    pub message: String,
}

impl RemoteError {
    /// An error without reply.
    pub fn new(failure: Failure, host: &str, what: &str, message: impl Into<String>) -> Self {
        Self {
            failure,
            host: host.to_owned(),
            what: what.to_owned(),
            span: None,
            status: None,
            request_id: None,
            message: message.into(),
        }
    }

    /// The same error about the bytes of an object.
    #[must_use]
    pub fn of_span(self, span: ByteSpan) -> Self {
        Self { span: Some(span), ..self }
    }

    /// Whether the same request may succeed later.
    pub fn is_transient(&self) -> bool {
        match self.failure {
            Failure::Transient | Failure::Busy(_) => true,
            Failure::Changed { .. } | Failure::NotFound | Failure::Refused | Failure::Unsupported => false,
        }
    }
}

/// Why a connection failed, by what its causes say: plain words for the usual ones.
#[cfg(feature = "hub")]
pub(super) fn of_causes(causes: String) -> (Failure, String) {
    if causes.contains("invalid peer certificate") {
        let advice = "SSL_CERT_FILE names a file with the certificates of the authorities to trust";
        return (Failure::Refused, format!("{causes}; {advice}"));
    }
    let text = if causes.contains("dns error") || causes.contains("failed to lookup address") {
        "the name cannot be resolved (no network?)".to_owned()
    } else if causes.contains("Connection refused") {
        "it refuses connections".to_owned()
    } else {
        causes
    };
    (Failure::Transient, text)
}

impl RemoteError {
    /// What went wrong, with the reply's text.
    pub(super) fn reason(&self) -> String {
        let Self { message, status, request_id, .. } = self;
        match (status, request_id) {
            (Some(status), Some(id)) => format!("{message} (status {status}, request {id})"),
            (Some(status), None) => format!("{message} (status {status})"),
            (None, Some(id)) => format!("{message} (request {id})"),
            (None, None) => message.clone(),
        }
    }

    /// This error where its object and its span are named already.
    pub fn brief(&self) -> String {
        let colon = if self.host.is_empty() { "" } else { ": " };
        format!("{}{colon}{}", self.host, self.reason())
    }
}

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A malformed address has no host.
        if !self.host.is_empty() {
            write!(f, "{}: ", self.host)?;
        }
        f.write_str(&self.what)?;
        if let Some(span) = self.span {
            write!(f, ": bytes {span}")?;
        }
        write!(f, ": {}", self.reason())
    }
}

impl std::error::Error for RemoteError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_is_shown_once() {
        let error = RemoteError::new(Failure::Refused, "host", "key", "refused");
        assert_eq!(error.to_string(), "host: key: refused");
        let error = RemoteError { status: Some(403), request_id: Some("r1".into()), ..error };
        assert_eq!(error.brief(), "host: refused (status 403, request r1)");
        let error = error.of_span(ByteSpan::new(1, 2).unwrap());
        assert_eq!(error.to_string(), "host: key: bytes 1..2: refused (status 403, request r1)");
        assert_eq!(error.brief(), "host: refused (status 403, request r1)");
        let unknown = RemoteError::new(Failure::Unsupported, "", "s3://x", "malformed");
        assert_eq!((unknown.to_string().as_str(), unknown.brief().as_str()), ("s3://x: malformed", "malformed"));
    }
}
