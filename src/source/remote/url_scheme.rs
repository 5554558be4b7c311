//! The schemes of addresses, the one list that help, messages and the program use; and hosts that are this machine.

use std::net::IpAddr;

/// A kind of service that holds files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// S3, and what speaks its protocol.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
    /// A web server.
    Http,
}

/// Each scheme, its service, and whether help names it: one for each service.
const URL_SCHEMES: [(&str, StoreKind, bool); 8] = [
    ("s3", StoreKind::S3, true),
    ("s3a", StoreKind::S3, false),
    ("gs", StoreKind::Google, true),
    ("az", StoreKind::Azure, true),
    ("abfs", StoreKind::Azure, false),
    ("abfss", StoreKind::Azure, false),
    ("https", StoreKind::Http, true),
    ("http", StoreKind::Http, false),
];

/// The service of a scheme, as it stands before `://`.
pub(crate) fn service_of(scheme: &str) -> Option<StoreKind> {
    URL_SCHEMES.iter().find(|(name, ..)| *name == scheme).map(|(_, service, _)| *service)
}

/// The schemes for help and messages: `s3://, gs://, az:// or https://`.
pub fn url_schemes() -> String {
    let shown = URL_SCHEMES.iter().filter(|(.., is_shown)| *is_shown);
    let mut shown: Vec<String> = shown.map(|(name, ..)| format!("{name}://")).collect();
    let last = shown.pop().unwrap_or_default();
    format!("{} or {last}", shown.join(", "))
}

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
    fn one_scheme_of_each_service_is_shown() {
        assert_eq!(url_schemes(), "s3://, gs://, az:// or https://");
        for service in [StoreKind::S3, StoreKind::Google, StoreKind::Azure, StoreKind::Http] {
            let shown = URL_SCHEMES.iter().filter(|(_, of, is_shown)| *of == service && *is_shown);
            assert_eq!(shown.count(), 1, "{service:?}");
        }
        assert_eq!((service_of("abfss"), service_of("ftp"), service_of("S3")), (Some(StoreKind::Azure), None, None));
    }

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
