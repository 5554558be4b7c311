//! From an address to a pinned listing: `s3://`, `gs://`, `az://`, `https://`.
//!
//! Listings are kept in the disk cache: a run with `--offline` reads what an earlier run has pinned and fetched.
//!
//! ```text
//! <cache>/stores/<digest of the address>.json   the objects that were listed last, with their versions
//! ```
//!
//! The address holds the endpoint. A listing that cannot be read is as good as none.

use std::{borrow::Cow, fs, path::PathBuf, sync::Arc};

use object_store::{RetryConfig, path::Path};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use url::Url;

use super::{
    super::{
        super::digest::hexadecimal,
        error::{Failure, RemoteError},
        interface::{RemoteFile, RemoteRepository},
        kept::replace,
        options::{RemoteOptions, default_directory},
        runtime::with_remedy,
        url_scheme::{StoreKind, is_loopback, service_of},
    },
    client::with_cause,
    connect::connect,
    http_listing,
    reader::Store,
};

/// The repository or file at an address. `None` if the address is of another kind.
///
/// # Errors
/// The address is malformed, or the service does not list it.
pub fn open_url(source: &str, options: &RemoteOptions) -> Option<Result<RemoteRepository, RemoteError>> {
    let service = service_of(source.split_once("://")?.0)?;
    Some(open(source, service, options))
}

/// A place in a store, of which nothing is known yet.
pub(super) struct StorePlace {
    pub(super) store: Store,
    pub(super) path: Path,
    is_file: bool,
}

/// The place at an address.
///
/// # Errors
/// The address is malformed, or its store cannot be reached without encryption.
pub(super) fn locate(
    source: &str,
    service: StoreKind,
    options: &RemoteOptions,
    retries: RetryConfig,
) -> Result<StorePlace, RemoteError> {
    let bad = |message: String| RemoteError::new(Failure::Unsupported, "", &without_secrets(source), message);
    let url = Url::parse(source).map_err(|error| bad(error.to_string()))?;
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| bad("expected a host or bucket".into()))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(bad("expected an address without ? and #: signed addresses are not supported".into()));
    }
    // The container of abfss://container@account is no user.
    if url.password().is_some() || service == StoreKind::Http && !url.username().is_empty() {
        let message = "expected no user and password in the address: it is shown by `ckfs status` and in /proc/mounts";
        return Err(bad(message.to_owned()));
    }
    if url.scheme() == "http" && !is_loopback(host) && !options.allow_http {
        return Err(bad("http:// is unencrypted: use https://, or --allow-http".into()));
    }
    let path = Path::from_url_path(url.path()).map_err(|error| bad(error.to_string()))?;
    let store = connect(&url, service, options, retries).map_err(|error| bad(with_remedy(with_cause(&error))))?;
    let is_file = !url.path().ends_with('/') && path.extension().is_some_and(|end| FILES.contains(&end));
    Ok(StorePlace { store, path, is_file })
}

fn open(source: &str, service: StoreKind, options: &RemoteOptions) -> Result<RemoteRepository, RemoteError> {
    // Repetitions are made above, for all services alike.
    let retries = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let StorePlace { store, path, is_file } = locate(source, service, options, retries)?;
    let label = without_secrets(source).trim_end_matches('/').to_owned();
    let kept = KeptObjects::new(format!("{}/{path}", store.address), options);
    if store.is_offline {
        let files = kept.files().ok_or_else(|| store.not_asked(&label))?;
        return Ok(RemoteRepository { url: label.clone(), label, revision: None, files, objects: Arc::new(store) });
    }
    let files = if is_file {
        vec![store.head(&path, "")?]
    } else if service == StoreKind::Http {
        http_listing::list(&store, &path)?
    } else {
        store.list(&path)?
    };
    if files.is_empty() {
        let message = "no object has this prefix".to_owned();
        return Err(RemoteError::new(Failure::NotFound, &store.host, &label, message));
    }
    kept.keep(&files);
    Ok(RemoteRepository { url: label.clone(), label, revision: None, files, objects: Arc::new(store) })
}

/// Endings of addresses of one file.
const FILES: [&str; 5] = ["safetensors", "pt", "bin", "pth", "ckpt"];

/// An address without what may be secret: a signature after `?`, and a password.
fn without_secrets(source: &str) -> String {
    let source = source.split(['?', '#']).next().unwrap_or(source);
    let Some((scheme, rest)) = source.split_once("://") else { return source.to_owned() };
    let authority = rest.split('/').next().unwrap_or(rest);
    match authority.rsplit_once('@') {
        Some((user, host)) if user.contains(':') || scheme.starts_with("http") => {
            format!("{scheme}://{host}{}", &rest[authority.len()..])
        }
        _ => source.to_owned(),
    }
}

/// What is kept.
#[derive(Debug, Serialize, Deserialize)]
struct Listing<'a> {
    address: Cow<'a, str>,
    files: Cow<'a, [RemoteFile]>,
}

/// The kept listing of one address.
#[derive(Debug)]
struct KeptObjects {
    address: String,
    /// The directory of the disk cache; `None` where there is none.
    cache: Option<PathBuf>,
    /// Its path below that.
    inside: PathBuf,
}

impl KeptObjects {
    /// The listing of an address in the cache that the options name.
    fn new(address: String, options: &RemoteOptions) -> Self {
        let dir = options.cache_dir.clone().or_else(default_directory);
        let name = format!("{}.json", hexadecimal(&Sha256::digest(address.as_bytes())));
        Self { address, cache: dir, inside: PathBuf::from("stores").join(name) }
    }

    fn keep(&self, files: &[RemoteFile]) {
        let listing = Listing { address: Cow::from(&self.address), files: Cow::from(files) };
        if let Ok(text) = serde_json::to_vec(&listing) {
            replace(self.cache.as_deref(), &self.inside, &text);
        }
    }

    fn files(&self) -> Option<Vec<RemoteFile>> {
        let text = fs::read(self.cache.as_ref()?.join(&self.inside)).ok()?;
        let listing: Listing<'_> = serde_json::from_slice(&text).ok()?;
        (listing.address == self.address).then(|| listing.files.into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::interface::Content, *};

    #[test]
    fn addresses_in_messages_hold_no_secret() {
        for (source, shown) in [
            ("https://h/a?X-Sig=s", "https://h/a"),
            ("https://user:sekrit@h:8/a/b", "https://h:8/a/b"),
            ("https://token@h/a", "https://h/a"),
            ("https://h/a@b:c", "https://h/a@b:c"),
            ("abfss://c@account.dfs.core.windows.net/a", "abfss://c@account.dfs.core.windows.net/a"),
            ("s3://b/k#x", "s3://b/k"),
        ] {
            assert_eq!(without_secrets(source), shown);
        }
    }

    #[test]
    fn addresses_with_a_password_are_refused_without_showing_it() {
        for source in ["http://user:sekrit@127.0.0.1:1/a/", "https://sekrit@h/a", "s3://user:sekrit@b/k"] {
            let error = open_url(source, &RemoteOptions::default()).unwrap().err().unwrap().to_string();
            assert!(error.contains("no user and password") && !error.contains("sekrit"), "{error}");
        }
    }

    #[test]
    fn a_listing_is_kept_and_a_damaged_one_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let options = RemoteOptions { cache_dir: Some(dir.path().to_owned()), ..RemoteOptions::default() };
        let kept = KeptObjects::new("s3://bucket at host/models".into(), &options);
        assert_eq!(kept.files(), None);
        let file = |path: &str, etag: Option<&str>| RemoteFile {
            path: path.into(),
            key: format!("models/{path}"),
            size_bytes: 7,
            content: Content::Version { object: format!("s3://bucket/models/{path}"), version: "etag 1".into() },
            etag: etag.map(str::to_owned),
            modified_seconds: Some(3),
        };
        let files = vec![file("a", Some("1")), file("b/c", None)];
        kept.keep(&files);
        assert_eq!(kept.files().as_ref(), Some(&files));
        assert_eq!(KeptObjects::new("s3://bucket at other/models".into(), &options).files(), None, "another endpoint");
        let path = dir.path().join(&kept.inside);
        // Other versions read it, too.
        let a = r#"{"path":"a","key":"models/a","size":7,"object":"s3://bucket/models/a","version":"etag 1","etag":"1","modified":3}"#;
        let b = r#"{"path":"b/c","key":"models/b/c","size":7,"object":"s3://bucket/models/b/c","version":"etag 1","modified":3}"#;
        let text = format!(r#"{{"address":"s3://bucket at host/models","files":[{a},{b}]}}"#);
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        for damage in ["", "{}", r#"{"address":"s3://other","files":[]}"#] {
            fs::write(&path, damage).unwrap();
            assert_eq!(kept.files(), None, "{damage}");
        }
    }
}
