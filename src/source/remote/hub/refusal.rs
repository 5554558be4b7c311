//! What the Hub refuses, and what the user can do about it.

use reqwest::{Response, StatusCode};

use super::{
    super::{
        super::digest::{SHA1_DIGITS, is_hex},
        error::Failure,
        reply::text_of,
    },
    settings::HubSettings,
};

/// What a request wanted, to explain its refusal.
#[derive(Clone, Copy, Debug)]
pub(super) enum Subject<'a> {
    Revision(&'a str),
    /// A file of a commit.
    File(&'a str, &'a str),
}

/// Longest text of the Hub that a message repeats.
const TEXT_CHARS_MAX: usize = 200;

/// The refusal that an answer is, if it is one: its kind, and the reason with the way out. Its body is not read.
pub(super) fn refusal_of(
    settings: &HubSettings,
    repo: &str,
    subject: Subject<'_>,
    answer: &Response,
) -> Option<(Failure, String)> {
    let status = answer.status();
    if !matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND) {
        return None;
    }
    let text: String =
        text_of(answer.headers(), "x-error-message").unwrap_or_default().chars().take(TEXT_CHARS_MAX).collect();
    let page = format!("{}/{repo}", settings.endpoint.as_str().trim_end_matches('/'));
    let token = settings.token.as_ref().map(|token| &token.origin);
    let no_repository = || match token {
        None => format!(
            "no such repository ({page}), or it is private: check the name, or set HF_TOKEN (there is none now)"
        ),
        Some(origin) => format!(
            "no such repository ({page}), or it is private and the token of {origin} has no access: check the name, or set \
             HF_TOKEN to another token"
        ),
    };
    let no_file = |path: &str| format!("no file {path:?} in this revision");
    Some(match (text_of(answer.headers(), "x-error-code"), status) {
        (Some("GatedRepo"), _) => {
            let message = match token {
                None => format!(
                    "gated: accept the licence at {page}, then set HF_TOKEN to a token of that account (there is none now)"
                ),
                Some(origin) => format!(
                    "gated, and the token of {origin} has no access: accept the licence at {page} with its account, or set \
                     HF_TOKEN to another token"
                ),
            };
            (Failure::Refused, message)
        }
        (Some("RevisionNotFound"), _) => {
            let (Subject::Revision(revision) | Subject::File(_, revision)) = subject;
            let gone = if is_hex(revision, SHA1_DIGITS) { " (it is gone if its history was written anew)" } else { "" };
            let message = format!("no branch, tag or commit {revision:?}{gone}; {page}/commits/main lists commits");
            (Failure::NotFound, message)
        }
        (Some("EntryNotFound"), _) => {
            let (Subject::Revision(path) | Subject::File(path, _)) = subject;
            (Failure::NotFound, no_file(path))
        }
        // The Hub answers 401 for what does not exist, too, so as not to tell what is private.
        (Some("RepoNotFound"), _) => (Failure::NotFound, no_repository()),
        (None, StatusCode::UNAUTHORIZED) if text.to_ascii_lowercase().contains("credentials") => {
            let message = token.map_or_else(
                || "the Hub asks for a token: set HF_TOKEN".to_owned(),
                |origin| {
                    format!("the Hub does not accept the token of {origin}: it is wrong or expired; set HF_TOKEN anew")
                },
            );
            (Failure::Refused, message)
        }
        (None, StatusCode::UNAUTHORIZED | StatusCode::NOT_FOUND) => match subject {
            Subject::File(path, _) if status == StatusCode::NOT_FOUND => (Failure::NotFound, no_file(path)),
            Subject::Revision(_) | Subject::File(..) => (Failure::NotFound, no_repository()),
        },
        _ => {
            let said = if text.is_empty() { text } else { format!(": {text}") };
            let token = token.map_or_else(
                || "there is no token: set HF_TOKEN if the repository needs one".to_owned(),
                |origin| format!("the token is that of {origin}"),
            );
            (Failure::Refused, format!("the Hub refuses{said}; {token}"))
        }
    })
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
            refusal_of(&settings, "org/name", Subject::File("config.json", commit), &answer.into()).unwrap().1
        };
        let gone = answer("RevisionNotFound");
        assert!(gone.contains(&format!("commit \"{commit}\" (it is gone")) && !gone.contains("config.json"), "{gone}");
        assert!(answer("EntryNotFound").contains("no file \"config.json\""));
    }
}
