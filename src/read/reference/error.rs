//! Why the reference gives no bytes.

use std::error::Error;

/// Why the reference gives no bytes, as users read it.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct ReferenceError {
    text: String,
    /// The error of the reader of tensor bytes.
    #[source]
    cause: Option<Box<dyn Error + Send + Sync>>,
}

impl ReferenceError {
    pub(super) fn new(text: String) -> Self {
        Self { text, cause: None }
    }

    pub(super) fn of_read(text: String, cause: Box<dyn Error + Send + Sync>) -> Self {
        Self { text, cause: Some(cause) }
    }
}
