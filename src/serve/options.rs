//! What the settings for serving mean.

use std::{
    fmt, fs,
    io::{self, Read},
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    time::Duration,
};

use ckfs_config::{Config, Pattern, RepoName, WaitTime};
use sha2::{Digest, Sha256};

/// The port of HTTP, unless `--listen` says it.
const PORT: u16 = 8421;

/// How long answers that have begun go on after a signal to end.
const DRAIN: Duration = Duration::from_secs(20);

/// Most bytes of a file with a token.
const TOKEN_FILE_BYTES_MAX: u64 = 64 << 10;

/// Why a server does not serve, such as settings that are unusable.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ServeError(pub(super) String);

/// A secret that requests must have. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessToken(pub(super) String);

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

    /// Whether a text is the token. The time does not depend on where they differ.
    pub fn matches(&self, text: &str) -> bool {
        // Digests are compared, so that a difference early in the text shows nothing.
        Sha256::digest(self.0.as_bytes()) == Sha256::digest(text.as_bytes())
    }
}

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Where HTTP is answered.
    pub listen: SocketAddr,
    /// Where the requests of S3 are answered.
    pub s3: Option<SocketAddr>,
    /// The name of the repository, if the user says one.
    pub name: Option<RepoName>,
    /// The token that requests must have.
    pub token: Option<AccessToken>,
    /// Whether other machines may read without a token.
    pub allow_anyone: bool,
    /// Names of this server that clients of this machine may ask by, beside those of the machine.
    pub allowed: Vec<Pattern>,
    /// How long answers that have begun go on after a signal to end.
    pub drain: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
        let (s3, name, token, allowed) = (None, None, None, Vec::new());
        Self { listen, s3, name, token, allow_anyone: false, allowed, drain: DRAIN }
    }
}

impl ServeOptions {
    /// The options of a configuration. Reads the file with the token.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn of(config: &Config) -> Result<Self, ServeError> {
        let settings = &config.serve;
        let defaults = Self::default();
        let options = Self {
            listen: settings.listen.map_or(defaults.listen, |address| address.0),
            s3: settings.s3.map(|address| address.0),
            name: settings.name.clone(),
            token: settings.token_file.as_deref().map(read_token).transpose()?,
            allow_anyone: settings.allow_anyone.unwrap_or(false),
            allowed: settings.allow_host.clone(),
            drain: config.mount.drain.map_or(defaults.drain, WaitTime::duration),
        };
        let is_guarded = |address: SocketAddr| {
            address.ip().to_canonical().is_loopback() || options.token.is_some() || options.allow_anyone
        };
        let addresses = [("listen", Some(options.listen)), ("s3", options.s3)];
        let mut named = addresses.into_iter().filter_map(|(setting, address)| Some((setting, address?)));
        if let Some((setting, address)) = named.find(|(_, address)| !is_guarded(*address)) {
            return Err(ServeError(format!(
                "--{setting} {address}: other machines reach this address; --token-file FILE asks them for a token, --allow-anyone \
                 lets all of them read"
            )));
        }
        if let Some(name) = options.name.as_ref().filter(|_| config.views.len() > 1) {
            let (name, views) = (name.as_str(), config.views.len());
            let text = format!("--name {name}: there are {views} views, which are the repositories ckfs/VIEW");
            return Err(ServeError(text));
        }
        Ok(options)
    }
}

/// The token in the first line of a file.
fn read_token(path: &Path) -> Result<AccessToken, ServeError> {
    let refuse = |reason: String| ServeError(format!("--token-file {}: {reason}", path.display()));
    let unreadable = |error: io::Error| refuse(error.to_string());
    let mut text = Vec::new();
    let file = fs::File::open(path).map_err(unreadable)?;
    file.take(TOKEN_FILE_BYTES_MAX).read_to_end(&mut text).map_err(unreadable)?;
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
    let other = |found: &str| {
        let expected = "expected a token in the first line: printable ASCII without spaces";
        refuse(format!("{expected}, found {found}"))
    };
    match std::str::from_utf8(line) {
        Ok("") => Err(other("an empty line")),
        Ok(token) if token.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(AccessToken::new(token)),
        Ok(_) | Err(_) => Err(other("other characters")),
    }
}

#[cfg(test)]
mod tests {
    use ckfs_config::{ListenAddress, ServeSettings};

    use super::*;

    fn options(serve: ServeSettings) -> Result<ServeOptions, String> {
        ServeOptions::of(&Config { serve, ..Config::default() }).map_err(|error| error.to_string())
    }

    #[test]
    fn other_machines_need_a_token_or_the_users_word() {
        let listen = |text: &str| Some(ListenAddress(text.parse().unwrap()));
        for address in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "127.9.9.9:1"] {
            assert!(
                options(ServeSettings { listen: listen(address), ..ServeSettings::default() }).is_ok(),
                "{address}"
            );
        }
        for address in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"] {
            let open = ServeSettings { listen: listen(address), ..ServeSettings::default() };
            let error = options(open.clone()).unwrap_err();
            assert!(error.starts_with(&format!("--listen {address}: other machines")), "{error}");
            assert!(options(ServeSettings { allow_anyone: Some(true), ..open }).is_ok());
        }
    }

    #[test]
    fn a_token_is_the_first_line_of_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        let read = |text: &[u8]| {
            fs::write(&file, text).unwrap();
            read_token(&file).map(|token| token.matches("s3cret")).map_err(|error| error.to_string())
        };
        for text in [&b"s3cret"[..], b"s3cret\n", b" s3cret \r\nmore\n"] {
            assert_eq!(read(text), Ok(true));
        }
        assert_eq!(read(b"other"), Ok(false));
        for text in [&b""[..], b"\ns3cret", b"a b", b"\xff", "tök".as_bytes()] {
            assert!(read(text).unwrap_err().contains("expected a token in the first line"), "{text:?}");
        }
        assert!(read_token(&dir.path().join("absent")).is_err());
    }

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
