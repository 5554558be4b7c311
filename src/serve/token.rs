//! The secret that requests must have.

use std::fmt;

use sha2::{Digest, Sha256};

/// A secret that requests must have. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessToken(String);

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessToken(..)")
    }
}

impl AccessToken {
    /// A token.
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// The text, for signatures that it makes.
    pub(super) fn secret(&self) -> &str {
        &self.0
    }

    /// Whether a text is the token. The time does not depend on where they differ.
    pub fn matches(&self, text: &str) -> bool {
        // Digests are compared, so that a difference early in the text shows nothing.
        Sha256::digest(self.0.as_bytes()) == Sha256::digest(text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_compared_as_a_whole_and_never_shown() {
        let token = AccessToken::new("secret");
        assert!(token.matches("secret"));
        for other in ["", "secre", "secrets", "Secret"] {
            assert!(!token.matches(other), "{other}");
        }
        assert_eq!(format!("{token:?}"), "AccessToken(..)");
    }
}
