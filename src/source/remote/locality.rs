//! Tests whether a host is loopback.

use std::net::IpAddr;

/// Whether a host name of an address is this machine: `http://` to it leaves no trace on a network.
pub fn is_loopback(host: &str) -> bool {
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let host = host.strip_suffix('.').unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for host in ["localhost", "LOCALHOST.", "127.0.0.1", "127.8.9.1", "::1", "[::1]"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example.com", "127.0.0.1.example.com", "10.0.0.1", "::2", "example.com", ""] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
