//! Who asks. A client with the token is trusted, and so is one of this machine where there is no token; all others are strangers.

use ckfs_config::Pattern;
use ckfs_volume::Attr;
use http::{HeaderMap, header::AUTHORIZATION};

use super::{
    host::Caller,
    options::{AccessToken, ServeOptions},
};

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

/// Decides who asks.
#[derive(Debug)]
pub(super) struct Gate {
    token: Option<AccessToken>,
    allow_anyone: bool,
    /// Names by which clients of this machine may ask as well.
    allowed: Vec<Pattern>,
}

impl Gate {
    pub(super) fn new(options: &ServeOptions) -> Self {
        let ServeOptions { token, allow_anyone, allowed, .. } = options.clone();
        Self { token, allow_anyone, allowed }
    }

    /// The token, if there is one.
    pub(super) const fn token(&self) -> Option<&AccessToken> {
        self.token.as_ref()
    }

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

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

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
        let gate = Gate { token: token.map(AccessToken::new), allow_anyone, allowed: Vec::new() };
        let headers = sent.map(|text| (AUTHORIZATION, text.parse().unwrap())).into_iter().collect();
        gate.admit(&headers, &Caller { address, host: Some(name.to_owned()) })
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
}
