//! The token of a reply: that bytes were passed on.

/// Proof that a reply was called with the bytes of a read. A reply returns it, so that a read cannot succeed without one.
#[derive(Debug)]
#[must_use = "a read returns it to its caller"]
pub struct Replied(());

impl Replied {
    /// What a reply returns when it has taken the bytes, whatever it did with them.
    #[expect(clippy::new_without_default, reason = "only a reply makes one, and says so")]
    pub const fn new() -> Self {
        Self(())
    }
}

/// Why a read failed, and whether its reply was called before.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct ReadFailure<E> {
    /// Why it failed.
    pub error: E,
    /// The token, if the reply was called: a source changed during the read, and the bytes must not be trusted.
    pub replied: Option<Replied>,
}

impl<E> ReadFailure<E> {
    /// The same with another error.
    pub fn map<F>(self, to: impl FnOnce(E) -> F) -> ReadFailure<F> {
        ReadFailure { error: to(self.error), replied: self.replied }
    }
}

/// An error before the reply was called.
impl<E> From<E> for ReadFailure<E> {
    fn from(error: E) -> Self {
        Self { error, replied: None }
    }
}
