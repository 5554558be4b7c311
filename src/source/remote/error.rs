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
    /// No byte arrived within the time limit.
    TimedOut,
    /// The object has another version than the pinned one.
    Changed {
        /// The pinned version.
        expected: String,
        /// The version of the reply, or what the service said instead.
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
    /// The object, or what else was asked for.
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
            Failure::Transient | Failure::Busy(_) | Failure::TimedOut => true,
            Failure::Changed { .. } | Failure::NotFound | Failure::Refused | Failure::Unsupported => false,
        }
    }
}

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A malformed address has no host.
        if !self.host.is_empty() {
            write!(f, "{}: ", self.host)?;
        }
        write!(f, "{}", self.what)?;
        if let Some(span) = self.span {
            write!(f, ": bytes {span}")?;
        }
        write!(f, ": {}", self.message)?;
        match (self.status, &self.request_id) {
            (Some(status), Some(id)) => write!(f, " (status {status}, request {id})"),
            (Some(status), None) => write!(f, " (status {status})"),
            (None, Some(id)) => write!(f, " (request {id})"),
            (None, None) => Ok(()),
        }
    }
}

impl std::error::Error for RemoteError {}
