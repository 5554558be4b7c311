//! Who asks. A client with the token is trusted, and so is one of this machine where there is no token; all others are strangers.
//!
//! The name by which a client reached this server is by the rules of RFC 9112.
//!
//! A page of the web can have its own name lead to 127.0.0.1 once a browser has loaded it, and then read what answers there. The browser
//! still sends the page's name. So names that the public DNS can have are refused where a client of this machine is trusted without a
//! token.

use std::net::IpAddr;

use ckfs_config::Pattern;
use ckfs_volume::Attr;
use http::{
    HeaderMap, Request, Version,
    header::{AUTHORIZATION, HOST},
    uri::Authority,
};

use super::options::ServeOptions;

/// Who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Visitor {
    /// Has the token, or is on this machine where there is none. Sees all.
    Trusted,
    /// Any other. Sees what all users of this machine may read.
    Stranger,
}

/// The bit of the permissions for all other users to read.
const OTHERS_READ: u16 = 0o004;

/// The bit for all other users to pass a directory.
const OTHERS_PASS: u16 = 0o001;

impl Visitor {
    /// Whether the sources' permissions let this visitor read a file, or list a directory.
    pub(super) fn may_read(self, attr: &Attr) -> bool {
        self == Self::Trusted || attr.permission.mode & OTHERS_READ != 0
    }

    /// Whether this visitor may see the entries of a directory with their attributes.
    pub(super) fn may_list(self, attr: &Attr) -> bool {
        self.may_read(attr) && self.may_pass(attr)
    }

    /// Whether this visitor may go through a directory.
    pub(super) fn may_pass(self, attr: &Attr) -> bool {
        self == Self::Trusted || attr.permission.mode & OTHERS_PASS != 0
    }
}

/// Why a request is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoEntry {
    /// There is no token.
    Missing,
    /// It is another one.
    Wrong,
    /// There need be none, but the name of this server may be that of a page of the web.
    Name,
}

impl ServeOptions {
    /// Who a request without a token comes from, where there is one.
    ///
    /// # Errors
    /// [`NoEntry`] unless all are let in.
    pub(super) const fn admit_unsigned(&self) -> Result<Visitor, NoEntry> {
        if self.allow_anyone { Ok(Visitor::Stranger) } else { Err(NoEntry::Missing) }
    }

    /// Who a request comes from.
    ///
    /// # Errors
    /// [`NoEntry`] if the request must have a token, or another name.
    pub(super) fn admit(&self, headers: &HeaderMap, caller: &Caller) -> Result<Visitor, NoEntry> {
        let Some(token) = &self.token else {
            // A server that other machines reach was opened for them.
            if !caller.address.to_canonical().is_loopback() {
                return Ok(Visitor::Stranger);
            }
            return match (caller.is_of_this_machine(&self.allowed), self.allow_anyone) {
                (true, _) => Ok(Visitor::Trusted),
                (false, true) => Ok(Visitor::Stranger),
                (false, false) => Err(NoEntry::Name),
            };
        };
        match headers.get(AUTHORIZATION) {
            Some(value) => match value.to_str().ok().and_then(bearer) {
                Some(found) if token.matches(found) => Ok(Visitor::Trusted),
                Some(_) | None => Err(NoEntry::Wrong),
            },
            None => self.admit_unsigned(),
        }
    }
}

/// The token of `Bearer TOKEN`.
fn bearer(value: &str) -> Option<&str> {
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// Who sends a request.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub(super) address: IpAddr,
    /// The name by which it reached this server, in lower case and without a port; none of HTTP/1.0.
    pub(super) host: Option<String>,
}

/// Ends of names that the public DNS never has.
const PRIVATE_ENDS: [&str; 2] = [".localhost", ".internal"];

impl Caller {
    /// Who sends a request from an address.
    ///
    /// # Errors
    /// What was expected of `Host`.
    pub(super) fn of<B>(request: &Request<B>, address: IpAddr) -> Result<Self, &'static str> {
        let mut values = request.headers().get_all(HOST).iter();
        let host = match (values.next(), values.next()) {
            (None, _) if request.version() < Version::HTTP_11 => None,
            (None, _) => return Err("expected a Host header"),
            (Some(_), Some(_)) => return Err("expected one Host header, found several"),
            (Some(value), None) => {
                let name = value.to_str().ok().and_then(name_of);
                Some(name.ok_or("Host: expected NAME or NAME:PORT")?)
            }
        };
        // An address with a name in it counts in place of the header.
        let of_target =
            request.uri().authority().map(|target| name_of(target.as_str()).ok_or("expected http://NAME/PATH"));
        Ok(Self { address, host: of_target.transpose()?.or(host) })
    }

    /// Whether no page of the web can have sent the request, unless the name is one that the user allows.
    pub(super) fn is_of_this_machine(&self, allowed: &[Pattern]) -> bool {
        let Some(name) = self.host.as_deref() else { return true };
        let is_address = name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        let is_private = !name.contains('.') || PRIVATE_ENDS.iter().any(|end| name.ends_with(end));
        is_address || is_private || allowed.iter().any(|pattern| pattern.matches(name))
    }
}

/// The name of `NAME` or `NAME:PORT`.
fn name_of(text: &str) -> Option<String> {
    let authority: Authority = text.parse().ok()?;
    let name = authority.host();
    let port = text.strip_prefix(name)?;
    let is_port = port.strip_prefix(':').is_none_or(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    // What ends the name of a host is no part of it.
    let name = name.strip_suffix('.').unwrap_or(name);
    (is_port && !name.is_empty()).then(|| name.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::{super::options::AccessToken, *};

    const NEAR: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const FAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

    fn admit(token: Option<&str>, allow_anyone: bool, sent: Option<&str>, peer: IpAddr) -> Result<Visitor, NoEntry> {
        admit_by("localhost", token, allow_anyone, sent, peer)
    }

    fn admit_by(
        name: &str,
        token: Option<&str>,
        allow_anyone: bool,
        sent: Option<&str>,
        address: IpAddr,
    ) -> Result<Visitor, NoEntry> {
        let token = token.map(AccessToken::new);
        let options = ServeOptions { token, allow_anyone, ..ServeOptions::default() };
        let headers = sent.map(|text| (AUTHORIZATION, text.parse().unwrap())).into_iter().collect();
        options.admit(&headers, &Caller { address, host: Some(name.to_owned()) })
    }

    #[test]
    fn a_page_of_the_web_is_not_taken_for_a_program_of_this_machine() {
        let page = |token, anyone, sent, peer| admit_by("rebind.example", token, anyone, sent, peer);
        assert_eq!(page(None, false, None, NEAR), Err(NoEntry::Name));
        assert_eq!(page(None, true, None, NEAR), Ok(Visitor::Stranger));
        assert_eq!(page(None, true, None, FAR), Ok(Visitor::Stranger));
        assert_eq!(page(Some("secret"), false, None, NEAR), Err(NoEntry::Missing));
        assert_eq!(page(Some("secret"), false, Some("Bearer secret"), NEAR), Ok(Visitor::Trusted));
    }

    #[test]
    fn the_token_decides_and_without_one_the_machine() {
        let token = Some("secret");
        for (token, anyone, sent, peer, expected) in [
            (None, false, None, NEAR, Ok(Visitor::Trusted)),
            (None, true, Some("Bearer x"), NEAR, Ok(Visitor::Trusted)),
            (None, true, None, FAR, Ok(Visitor::Stranger)),
            (token, false, None, NEAR, Err(NoEntry::Missing)),
            (token, false, None, FAR, Err(NoEntry::Missing)),
            (token, false, Some("Bearer secret"), FAR, Ok(Visitor::Trusted)),
            (token, false, Some("bearer secret"), NEAR, Ok(Visitor::Trusted)),
            (token, true, None, NEAR, Ok(Visitor::Stranger)),
            (token, true, None, FAR, Ok(Visitor::Stranger)),
            (token, true, Some("Bearer wrong"), NEAR, Err(NoEntry::Wrong)),
            (token, false, Some("Bearer secre"), NEAR, Err(NoEntry::Wrong)),
            (token, false, Some("Bearer secrets"), NEAR, Err(NoEntry::Wrong)),
            (token, false, Some("Basic secret"), NEAR, Err(NoEntry::Wrong)),
            (token, false, Some("secret"), NEAR, Err(NoEntry::Wrong)),
            (token, false, Some("Bearer "), NEAR, Err(NoEntry::Wrong)),
        ] {
            assert_eq!(admit(token, anyone, sent, peer), expected, "{token:?} {anyone} {sent:?} {peer}");
        }
    }

    fn caller(target: &str, version: Version, hosts: &[&[u8]]) -> Result<Option<String>, &'static str> {
        let mut request = Request::builder().uri(target).version(version);
        for host in hosts {
            request = request.header(HOST, *host);
        }
        Caller::of(&request.body(()).unwrap(), Ipv4Addr::LOCALHOST.into()).map(|caller| caller.host)
    }

    #[test]
    fn a_request_of_http_1_1_has_one_valid_host() {
        for (host, expected) in [
            ("localhost", "localhost"),
            ("Models.Example.com.:80", "models.example.com"),
            ("127.0.0.1:8421", "127.0.0.1"),
            ("[::1]:8421", "[::1]"),
            ("a_b", "a_b"),
            ("a:", "a"),
        ] {
            assert_eq!(caller("/", Version::HTTP_11, &[host.as_bytes()]), Ok(Some(expected.to_owned())), "{host}");
        }
        for host in [&b""[..], b".", b":80", b"a b", b"a/b", b"a:b", b"a:1:2", b"user@a", b"[::1", b"\xff", b"a\\b"] {
            assert!(caller("/", Version::HTTP_11, &[host]).is_err(), "{host:?}");
            assert!(caller("/", Version::HTTP_10, &[host]).is_err(), "{host:?}");
        }
        assert_eq!(caller("/", Version::HTTP_11, &[]), Err("expected a Host header"));
        assert_eq!(caller("/", Version::HTTP_10, &[]), Ok(None));
        for version in [Version::HTTP_10, Version::HTTP_11] {
            assert_eq!(caller("/", version, &[b"a", b"a"]), Err("expected one Host header, found several"));
        }
        assert_eq!(caller("http://b:1/x", Version::HTTP_11, &[b"a"]), Ok(Some("b".to_owned())));
    }

    #[test]
    fn names_of_the_public_dns_are_not_of_this_machine() {
        let allowed = [Pattern::parse("*.example.com").unwrap()];
        for (host, expected) in [
            ("localhost", true),
            ("ckfs.localhost", true),
            ("host.docker.internal", true),
            ("127.0.0.1", true),
            ("10.1.2.3", true),
            ("[::1]", true),
            ("[::ffff:127.0.0.1]", true),
            ("desk", true),
            ("models.example.com", true),
            ("example.com", false),
            ("rebind.example.org", false),
            ("127.0.0.1.example.org", false),
            ("localhost.example.org", false),
            ("evil-localhost.example", false),
        ] {
            let caller = Caller { address: Ipv4Addr::LOCALHOST.into(), host: Some(host.to_owned()) };
            assert_eq!(caller.is_of_this_machine(&allowed), expected, "{host}");
        }
        assert!(Caller { address: Ipv4Addr::LOCALHOST.into(), host: None }.is_of_this_machine(&[]));
    }
}
