//! The values of settings for serving over the network.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::value::SettingValue;

/// An address to listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenAddress(pub SocketAddr);

impl SettingValue for ListenAddress {
    /// Reads `PORT`, `:PORT`, `localhost:PORT`, `IP:PORT` or `[IP]:PORT`. Names of other hosts would have to be looked up.
    fn from_word(text: &str) -> Result<Self, String> {
        let port = text.strip_prefix("localhost:").or_else(|| text.strip_prefix(':')).unwrap_or(text);
        if let Ok(port) = port.parse::<u16>() {
            return Ok(Self(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)));
        }
        let expected = || format!("expected PORT, or IP:PORT such as 127.0.0.1:8421, found {text:?}");
        text.parse().map(Self).map_err(|_| expected())
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.0.to_string().into())
    }
}

/// Longest name of a repository, as clients of the Hub have it.
const NAME_BYTES_MAX: usize = 96;

/// The name of a repository: `org/name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoName(String);

impl RepoName {
    /// Checks a name as clients of the Hub do.
    ///
    /// # Errors
    /// What was expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "expected ORG/NAME of letters, digits, -, _ and ., at most {NAME_BYTES_MAX} long, without -- and .., as clients \
                 of the Hub take it, found {text:?}"
            )
        };
        let is_part = |part: &str| {
            let known = part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
            known && !part.is_empty() && !part.starts_with(['-', '.']) && !part.ends_with(['-', '.'])
        };
        let valid = text.split('/').count() == 2
            && text.split('/').all(is_part)
            && text.len() <= NAME_BYTES_MAX
            && !text.contains("--")
            && !text.contains("..")
            && !text.to_ascii_lowercase().ends_with(".git");
        if valid { Ok(Self(text.to_owned())) } else { Err(expected()) }
    }

    /// The name, with a slash.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl SettingValue for RepoName {
    fn from_word(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.0.as_str().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_this_machine() {
        for (text, expected) in [
            ("8421", "127.0.0.1:8421"),
            (":8421", "127.0.0.1:8421"),
            ("localhost:0", "127.0.0.1:0"),
            ("0.0.0.0:1", "0.0.0.0:1"),
            ("[::1]:2", "[::1]:2"),
        ] {
            assert_eq!(ListenAddress::from_word(text).unwrap().0.to_string(), expected);
        }
        for text in ["", "x", "1.2.3.4", "99999", "1.2.3.4:99999", "example.org:80", "http://127.0.0.1:80"] {
            assert!(ListenAddress::from_word(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_are_those_that_clients_take() {
        for text in ["org/name", "ckfs/x.y_z-1", "a/b"] {
            assert_eq!(RepoName::parse(text).unwrap().as_str(), text);
        }
        let long = format!("a/{}", "b".repeat(95));
        for text in ["", "name", "a/b/c", "/b", "a/", "a b/c", "a/-b", "a/b.", "a/b--c", "a/b..c", "a/b.git", &long] {
            assert!(RepoName::parse(text).is_err(), "{text}");
        }
    }
}
