//! From an address to a pinned listing: `s3://`, `gs://`, `az://`, `https://`.

use std::{env, sync::Arc, time::Duration};

use object_store::{
    ClientConfigKey, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    http::HttpBuilder,
    path::Path,
};
use url::Url;

use super::{
    super::{
        counters::RemoteCounters,
        error::{Failure, RemoteError},
        interface::{RemoteFile, RemoteRepository},
        locality::is_loopback,
        options::RemoteOptions,
        retry::{Deadline, Gate, retry},
        runtime::{CONNECT_TIMEOUT, READ_TIMEOUT, install_tls},
    },
    aws_profile::{self, ProfileProvider},
    http_listing,
    observe::{ObservedConnector, Observer},
    offline::{Kept, Offline},
    reader::Store,
};

/// Longest time of one attempt. A slow reply goes on in the next.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(5);

/// A kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    S3,
    Google,
    Azure,
    Http,
}

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
    let (inner, address, host, advice) = store(&url, kind, options, &last)?;
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

/// A store with its address, its host, and what to do if it refuses.
type Made = (Arc<dyn ObjectStore>, String, String, &'static str);

fn store(url: &Url, kind: Kind, options: &RemoteOptions, last: &Observer) -> Result<Made, RemoteError> {
    install_tls();
    let bucket = url.host_str().unwrap_or_default();
    let failed = |error: object_store::Error| {
        RemoteError::new(Failure::Unsupported, bucket, without_query(url.as_str()), error.to_string())
    };
    let retries = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let connector = ObservedConnector { last: last.clone() };
    let scheme = url.scheme();
    match kind {
        Kind::S3 => {
            let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
            let profile = aws_profile::load();
            if env::var_os("AWS_ACCESS_KEY_ID").is_none()
                && let Some(provider) = ProfileProvider::of(&profile)
            {
                builder = builder.with_credentials(Arc::new(provider));
            }
            for (key, name) in [(AmazonS3ConfigKey::Region, "region"), (AmazonS3ConfigKey::Endpoint, "endpoint_url")] {
                if builder.get_config_value(&key).is_none()
                    && let Some(value) = profile.get(name)
                {
                    builder = builder.with_config(key, value);
                }
            }
            let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
            let host = endpoint.as_deref().and_then(host_of).unwrap_or_else(|| format!("{bucket}.s3.amazonaws.com"));
            for (key, value) in client(endpoint.as_deref(), options) {
                builder = builder.with_config(AmazonS3ConfigKey::Client(key), value);
            }
            let made = builder.with_retry(retries).with_http_connector(connector).build().map_err(failed)?;
            // Another endpoint is another store, with other objects of the same names.
            let address = endpoint.as_deref().and_then(host_of);
            let address = address.map_or_else(|| format!("s3://{bucket}"), |host| format!("s3://{bucket} at {host}"));
            let advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_SIGNATURE=true \
                          for a public bucket; AWS_REGION must be the bucket's";
            Ok((Arc::new(made), address, host, advice))
        }
        Kind::Google => {
            let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
            let base = builder.get_config_value(&GoogleConfigKey::BaseUrl);
            for (key, value) in client(base.as_deref(), options) {
                builder = builder.with_config(GoogleConfigKey::Client(key), value);
            }
            let host = base.as_deref().and_then(host_of).unwrap_or_else(|| "storage.googleapis.com".to_owned());
            let made = builder.with_retry(retries).with_http_connector(connector).build().map_err(failed)?;
            let advice = "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket";
            Ok((Arc::new(made), format!("gs://{bucket} at {host}"), host, advice))
        }
        Kind::Azure => {
            let mut builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str());
            let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
            for (key, value) in client(endpoint.as_deref(), options) {
                builder = builder.with_config(AzureConfigKey::Client(key), value);
            }
            let account = builder.get_config_value(&AzureConfigKey::AccountName).unwrap_or_default();
            let host =
                endpoint.as_deref().and_then(host_of).unwrap_or_else(|| format!("{account}.blob.core.windows.net"));
            let made = builder.with_retry(retries).with_http_connector(connector).build().map_err(failed)?;
            let advice = "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or a SAS token, or \
                          AZURE_SKIP_SIGNATURE=true for a public container";
            Ok((Arc::new(made), format!("az://{bucket} at {host}"), host, advice))
        }
        Kind::Http => {
            let base = &url[..url::Position::BeforePath];
            let mut builder = HttpBuilder::new().with_url(base);
            for (key, value) in client(Some(base), options) {
                builder = builder.with_config(key, value);
            }
            let made = builder.with_retry(retries).with_http_connector(connector).build().map_err(failed)?;
            let host = url.port().map_or_else(|| bucket.to_owned(), |port| format!("{bucket}:{port}"));
            Ok((Arc::new(made), format!("{scheme}://{host}"), host, "the server wants credentials, which ckfs has not"))
        }
    }
}

fn host_of(endpoint: &str) -> Option<String> {
    let url = Url::parse(endpoint).ok()?;
    let host = url.host_str()?;
    Some(url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")))
}

/// Settings of the client. Without encryption only this machine is spoken to, unless the user allows others.
fn client(endpoint: Option<&str>, options: &RemoteOptions) -> Vec<(ClientConfigKey, String)> {
    let seconds = |time: Duration| format!("{} seconds", time.as_secs());
    let url = endpoint.and_then(|endpoint| Url::parse(endpoint).ok());
    let plain = url.is_some_and(|url| url.scheme() == "http" && url.host_str().is_some_and(is_loopback));
    let mut settings = vec![
        (ClientConfigKey::ConnectTimeout, seconds(CONNECT_TIMEOUT)),
        (ClientConfigKey::ReadTimeout, seconds(READ_TIMEOUT)),
        (ClientConfigKey::Timeout, seconds(REQUEST_TIMEOUT)),
        (ClientConfigKey::UserAgent, concat!("ckfs/", env!("CARGO_PKG_VERSION")).to_owned()),
    ];
    if plain || options.allow_http {
        settings.push((ClientConfigKey::AllowHttp, "true".to_owned()));
    }
    settings
}
