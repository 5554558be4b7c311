//! From an address to a pinned listing: `s3://`, `gs://`, `az://`, `https://`.

use std::sync::Arc;

use object_store::path::Path;
use url::Url;

use super::{
    super::{
        counters::RemoteCounters,
        error::{Failure, RemoteError},
        interface::{RemoteFile, RemoteRepository},
        locality::is_loopback,
        options::RemoteOptions,
        retry::{Deadline, Gate, retry},
        runtime::with_remedy,
    },
    connect::{Connection, Kind, connect},
    http_listing,
    observe::Observer,
    offline::{Kept, Offline},
    reader::{Store, with_cause},
};

/// The repository or file at an address. `None` if the address is of another kind.
///
/// # Errors
/// The address is malformed, or the service does not list it.
pub fn open_url(source: &str, options: &RemoteOptions) -> Option<Result<RemoteRepository, RemoteError>> {
    let kind = match source.split_once("://")?.0 {
        "s3" | "s3a" => Kind::S3,
        "gs" => Kind::Google,
        "az" | "abfs" | "abfss" => Kind::Azure,
        "http" | "https" => Kind::Http,
        _ => return None,
    };
    Some(open(source, kind, options))
}

fn open(source: &str, kind: Kind, options: &RemoteOptions) -> Result<RemoteRepository, RemoteError> {
    let bad = |message: String| RemoteError::new(Failure::Unsupported, "", without_query(source), message);
    let url = Url::parse(source).map_err(|error| bad(error.to_string()))?;
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| bad("expected a host or bucket".into()))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(bad("expected an address without ? and #: signed addresses are not supported".into()));
    }
    if url.scheme() == "http" && !is_loopback(host) && !options.allow_http {
        return Err(bad("http:// is unencrypted: use https://, or --allow-http".into()));
    }
    let path = Path::from_url_path(url.path()).map_err(|error| bad(error.to_string()))?;
    let last = Observer::default();
    let Connection { inner, address, host, advice } =
        connect(&url, kind, options, &last).map_err(|error| bad(with_remedy(with_cause(&error))))?;
    let label = without_query(source).trim_end_matches('/').to_owned();
    let kept = Kept::new(format!("{address}/{path}"), options);
    if options.offline {
        let objects = Offline::new(host);
        let files = kept.files().ok_or_else(|| objects.error(&label))?;
        return Ok(RemoteRepository { url: label.clone(), label, revision: None, files, objects: Arc::new(objects) });
    }
    let store = Arc::new(Store { inner, host, address, last, advice });
    let (gate, counters) = (Gate::default(), RemoteCounters::default());
    // A listing waits as long as its service asks for.
    let files = retry(&gate, &counters, Deadline::None, |_| list(&store, kind, &path), || false)?;
    if files.is_empty() {
        let message = "no object has this prefix".to_owned();
        return Err(RemoteError::new(Failure::NotFound, &store.host, &label, message));
    }
    kept.keep(&files);
    Ok(RemoteRepository { url: label.clone(), label, revision: None, files, objects: store })
}

fn list(store: &Store, kind: Kind, path: &Path) -> Result<Vec<RemoteFile>, RemoteError> {
    let is_file = ["safetensors", "pt", "bin", "pth"].iter().any(|end| path.extension() == Some(end));
    if is_file {
        return Ok(vec![store.head(path, "")?]);
    }
    if kind == Kind::Http { http_listing::list(store, path) } else { store.list(path) }
}

/// An address without what may be secret.
fn without_query(source: &str) -> &str {
    source.split(['?', '#']).next().unwrap_or(source)
}
