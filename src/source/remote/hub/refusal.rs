//! What the Hub refuses, and what the user can do about it.

use std::fmt;

use reqwest::{Response, StatusCode};

use super::{
    super::super::digest::{SHA1_DIGITS, is_hex},
    settings::{HubSettings, Token},
};

/// Which token went with a refused request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TokenState {
    /// None.
    Absent,
    /// One from this variable or file.
    From(String),
}

impl TokenState {
    pub(super) fn of(token: Option<&Token>) -> Self {
        token.map_or(Self::Absent, |token| Self::From(token.origin.clone()))
    }
}

/// The reason of a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The licence must be accepted first.
    Gated,
    /// There is no such repository, or the token does not see it.
    RepositoryNotFound,
    /// There is no such branch, tag or commit.
    RevisionNotFound(String),
    /// The commit has no such file.
    FileNotFound(String),
    /// The token itself is wrong.
    BadToken,
    /// Anything else, in the Hub's words.
    Other(String),
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The page of the repository.
    page: String,
    pub(super) reason: Reason,
    /// With which token it was requested.
    token: TokenState,
}

/// What a request wanted, to explain its refusal.
#[derive(Clone, Copy, Debug)]
pub(super) enum Subject<'a> {
    Revision(&'a str),
    /// A file of a commit.
    File(&'a str, &'a str),
}

/// Longest text of the Hub that a message repeats.
const TEXT_CHARS_MAX: usize = 200;

impl Refusal {
    /// The refusal that an answer is, if it is one. Its body is not read.
    pub(super) fn of(settings: &HubSettings, repo: &str, subject: Subject<'_>, answer: &Response) -> Option<Self> {
        let status = answer.status();
        if !matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND) {
            return None;
        }
        let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
        let text: String = header("x-error-message").unwrap_or_default().chars().take(TEXT_CHARS_MAX).collect();
        let reason = match (header("x-error-code"), status) {
            (Some("GatedRepo"), _) => Reason::Gated,
            (Some("RevisionNotFound"), _) => {
                let (Subject::Revision(revision) | Subject::File(_, revision)) = subject;
                Reason::RevisionNotFound(revision.to_owned())
            }
            (Some("EntryNotFound"), _) => {
                let (Subject::Revision(path) | Subject::File(path, _)) = subject;
                Reason::FileNotFound(path.to_owned())
            }
            // The Hub answers 401 for what does not exist, too, so as not to tell what is private.
            (Some("RepoNotFound"), _) => Reason::RepositoryNotFound,
            (None, StatusCode::UNAUTHORIZED) if text.to_ascii_lowercase().contains("credentials") => Reason::BadToken,
            (None, StatusCode::UNAUTHORIZED | StatusCode::NOT_FOUND) => match subject {
                Subject::File(path, _) if status == StatusCode::NOT_FOUND => Reason::FileNotFound(path.to_owned()),
                Subject::Revision(_) | Subject::File(..) => Reason::RepositoryNotFound,
            },
            _ => Reason::Other(text),
        };
        let page = format!("{}/{repo}", settings.endpoint.as_str().trim_end_matches('/'));
        let token = TokenState::of(settings.token.as_ref());
        Some(Self { page, reason, token })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { page, reason, token } = self;
        match (reason, token) {
            (Reason::Gated, TokenState::Absent) => write!(
                f,
                "gated: accept the licence at {page}, then set HF_TOKEN to a token of that account (there is none now)"
            ),
            (Reason::Gated, TokenState::From(origin)) => write!(
                f,
                "gated, and the token of {origin} has no access: accept the licence at {page} with its account, or set \
                 HF_TOKEN to another token"
            ),
            (Reason::RepositoryNotFound, TokenState::Absent) => write!(
                f,
                "no such repository ({page}), or it is private: check the name, or set HF_TOKEN (there is none now)"
            ),
            (Reason::RepositoryNotFound, TokenState::From(origin)) => write!(
                f,
                "no such repository ({page}), or it is private and the token of {origin} has no access: check the name, or \
                 set HF_TOKEN to another token"
            ),
            (Reason::RevisionNotFound(revision), _) => {
                let gone =
                    if is_hex(revision, SHA1_DIGITS) { " (it is gone if its history was written anew)" } else { "" };
                write!(f, "no branch, tag or commit {revision:?}{gone}; {page}/commits/main lists commits")
            }
            (Reason::FileNotFound(path), _) => write!(f, "no file {path:?} in this revision"),
            (Reason::BadToken, TokenState::From(origin)) => {
                write!(f, "the Hub does not accept the token of {origin}: it is wrong or expired; set HF_TOKEN anew")
            }
            (Reason::BadToken, TokenState::Absent) => f.write_str("the Hub asks for a token: set HF_TOKEN"),
            (Reason::Other(text), token) => {
                f.write_str("the Hub refuses")?;
                if !text.is_empty() {
                    write!(f, ": {text}")?;
                }
                match token {
                    TokenState::Absent => f.write_str("; there is no token: set HF_TOKEN if the repository needs one"),
                    TokenState::From(origin) => write!(f, "; the token is that of {origin}"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_that_is_gone_is_named_and_not_its_file() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let answer = |code: &str| {
            let answer = http::Response::builder().status(404).header("x-error-code", code).body("").unwrap();
            let endpoint = "https://hub.test".parse().unwrap();
            let settings = HubSettings { endpoint, token: None, offline: false, allow_http: false };
            Refusal::of(&settings, "org/name", Subject::File("config.json", commit), &answer.into())
                .unwrap()
                .to_string()
        };
        let gone = answer("RevisionNotFound");
        assert!(gone.contains(&format!("commit \"{commit}\" (it is gone")) && !gone.contains("config.json"), "{gone}");
        assert!(answer("EntryNotFound").contains("no file \"config.json\""));
    }
}
