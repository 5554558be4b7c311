//! Where the Hub is and with which token, from the same variables in the same order as in the Hub's own client.

use std::{fmt, fs, path::PathBuf};

use reqwest::Url;

use super::super::{
    error::{Failure, RemoteError},
    url_scheme::is_loopback,
};

/// The Hub, unless `HF_ENDPOINT` names another.
const ENDPOINT: &str = "https://huggingface.co";

/// A token and its origin. The text is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    pub(super) text: String,
    /// The variable or the file.
    pub origin: String,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("origin", &self.origin).finish_non_exhaustive()
    }
}

/// How to reach the Hub.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// The Hub's address, without a final slash.
    pub endpoint: Url,
    /// The token, if there is one.
    pub token: Option<Token>,
    /// Whether `HF_HUB_OFFLINE` forbids every request.
    pub offline: bool,
    /// Whether addresses `http://` of other machines are accepted.
    pub allow_http: bool,
}

/// Whether the value of a variable of the Hub's client means yes.
fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

/// `HF_HOME`, or its default.
fn home(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    variable("HF_HOME").or_else(|| {
        let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
        Some(cache?.join("huggingface"))
    })
}

impl HubSettings {
    /// The settings of the environment. `variable` returns a variable's value unless it is empty.
    ///
    /// # Errors
    /// [`RemoteError`] if `HF_ENDPOINT` is no address.
    pub fn from_environment(variable: impl Fn(&str) -> Option<PathBuf>, allow_http: bool) -> Result<Self, RemoteError> {
        let text = |name: &str| variable(name)?.into_os_string().into_string().ok();
        let yes = |name: &str| text(name).is_some_and(|value| is_true(&value));
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = parse_endpoint(&endpoint, allow_http)?;
        let token = if yes("HF_HUB_DISABLE_IMPLICIT_TOKEN") { None } else { find_token(&variable) };
        let offline = yes("HF_HUB_OFFLINE") || yes("TRANSFORMERS_OFFLINE");
        Ok(Self { endpoint, token, offline, allow_http })
    }
}

fn parse_endpoint(text: &str, allow_http: bool) -> Result<Url, RemoteError> {
    let wrong = |reason: String| RemoteError::new(Failure::Unsupported, "HF_ENDPOINT", text, reason);
    let url = Url::parse(text.trim().trim_end_matches('/')).map_err(|error| wrong(error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(wrong("expected https://host".to_owned()));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong("expected no user in the address; the token belongs into HF_TOKEN".to_owned()));
    }
    if !may_connect(&url, allow_http) {
        return Err(wrong("http:// is for this machine only, unless --allow-http is given".to_owned()));
    }
    Ok(url)
}

/// Whether an address may be used: encrypted, of this machine, or explicitly allowed.
pub(super) fn may_connect(url: &Url, allow_http: bool) -> bool {
    url.scheme() == "https" || (url.scheme() == "http" && (allow_http || url.host_str().is_some_and(is_loopback)))
}

fn find_token(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<Token> {
    for name in ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"] {
        let text = variable(name).and_then(|value| value.into_os_string().into_string().ok());
        if let Some(text) = text.as_deref().and_then(cleaned) {
            return Some(Token { text, origin: name.to_owned() });
        }
    }
    let file = variable("HF_TOKEN_PATH").or_else(|| Some(home(variable)?.join("token")))?;
    let text = cleaned(&fs::read_to_string(&file).ok()?)?;
    Some(Token { text, origin: file.display().to_string() })
}

/// A token without blanks around it. `None` if nothing is left, or if it cannot be part of a request.
fn cleaned(text: &str) -> Option<String> {
    let text = text.trim();
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<HubSettings, RemoteError> {
        HubSettings::from_environment(
            |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value)),
            false,
        )
    }

    #[test]
    fn tokens_come_from_the_environment_then_from_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        fs::write(&file, "from_file\n").unwrap();
        let home = dir.path().to_str().unwrap();
        let path = file.to_str().unwrap();
        let token = |pairs: &[(&str, &str)]| of(pairs).unwrap().token.map(|token| (token.text, token.origin));
        let said = |text: &str, origin: &str| Some((text.to_owned(), origin.to_owned()));
        assert_eq!(token(&[("HF_TOKEN", " a \n"), ("HF_HOME", home)]), said("a", "HF_TOKEN"));
        assert_eq!(token(&[("HF_HOME", home)]), said("from_file", path));
        assert_eq!(token(&[("HF_TOKEN_PATH", path)]), said("from_file", path));
        assert_eq!(token(&[("HF_TOKEN", "a"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
        assert_eq!(token(&[("HF_TOKEN", "a\nb")]), None);
        assert_eq!(token(&[]), None);
        let shown = format!("{:?}", of(&[("HF_TOKEN", "secret")]).unwrap());
        assert!(!shown.contains("secret"), "{shown}");
    }

    #[test]
    fn endpoints_are_encrypted_or_of_this_machine() {
        let endpoint = |text: &str| of(&[("HF_ENDPOINT", text)]).map(|found| found.endpoint.to_string());
        assert_eq!(of(&[]).unwrap().endpoint.as_str(), "https://huggingface.co/");
        assert_eq!(endpoint("https://mirror.example/hf/").unwrap(), "https://mirror.example/hf");
        for local in ["http://127.0.0.1:8080", "http://localhost:1/", "http://[::1]:2"] {
            endpoint(local).unwrap();
        }
        for wrong in ["http://mirror.example", "ftp://host", "nonsense", "https://user:secret@host"] {
            endpoint(wrong).unwrap_err();
        }
        let http = [("HF_ENDPOINT", "http://mirror.example")];
        let variable = |name: &str| http.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value));
        HubSettings::from_environment(variable, true).unwrap();
    }

    #[test]
    fn offline_is_read_as_the_client_reads_it() {
        for (value, expected) in [("1", true), ("yes", true), ("TRUE", true), ("on", true), ("0", false), ("x", false)]
        {
            assert_eq!(of(&[("HF_HUB_OFFLINE", value)]).unwrap().offline, expected, "{value}");
        }
    }
}
