//! A client for each kind of store, set up from the environment as the tools of its maker do it.

use std::{env, fs, sync::Arc};

use object_store::{
    ClientConfigKey, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    http::HttpBuilder,
};
use url::Url;

use super::{
    super::{
        options::RemoteOptions,
        retry::Backoff,
        runtime::install_tls,
        url_scheme::{StoreKind, is_loopback},
    },
    aws_profile::{self, ProfileProvider},
    observe::ObservedConnector,
    reader::Store,
};

/// The address of Azurite, the emulator of Azure, unless the next variable names another. `object_store` reads both.
const AZURITE: &str = "http://127.0.0.1:10000";
const AZURITE_VARIABLE: &str = "AZURITE_BLOB_STORAGE_URL";
/// Google's own tools read their store from this emulator.
const GOOGLE_EMULATOR_VARIABLE: &str = "STORAGE_EMULATOR_HOST";

/// The store at an address. It sends nothing yet.
///
/// # Errors
/// The environment's settings do not fit each other, or the client cannot start.
pub(super) fn connect(
    url: &Url,
    service: StoreKind,
    options: &RemoteOptions,
    retries: RetryConfig,
) -> object_store::Result<Store> {
    install_tls();
    match service {
        StoreKind::S3 => s3(url, options, retries),
        StoreKind::Google => google(url, options, retries),
        StoreKind::Azure => azure(url, options, retries),
        StoreKind::Http => http(url, options, retries),
    }
}

fn bucket_of(url: &Url) -> &str {
    url.host_str().unwrap_or_default()
}

fn s3(url: &Url, options: &RemoteOptions, retries: RetryConfig) -> object_store::Result<Store> {
    let bucket = bucket_of(url);
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
    if allows_http(endpoint.as_deref(), options) {
        builder = builder.with_config(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp), "true");
    }
    let connector = ObservedConnector::default();
    let credentials = connector.credentials.clone();
    let made = Arc::new(builder.with_retry(retries).with_http_connector(connector).build()?);
    let named = endpoint.as_deref().and_then(host_of);
    let address = named.as_ref().map_or_else(|| format!("s3://{bucket}"), |host| format!("s3://{bucket} at {host}"));
    let host = named.unwrap_or_else(|| format!("{bucket}.s3.amazonaws.com"));
    Ok(Store {
        inner: made.clone(),
        pages: Some(made),
        credentials,
        gate: gate_of(&host, options),
        is_offline: options.offline,
        address,
        host,
        advice: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a public \
                 bucket; AWS_REGION must be the bucket's",
        looked_for: "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, keys of the profile AWS_PROFILE (else default) in \
                     ~/.aws, AWS_WEB_IDENTITY_TOKEN_FILE, AWS_CONTAINER_CREDENTIALS_*_URI, and then asked the metadata \
                     service of a machine at AWS",
    })
}

fn google(url: &Url, options: &RemoteOptions, retries: RetryConfig) -> object_store::Result<Store> {
    let bucket = bucket_of(url);
    let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
    let mut base = builder.get_config_value(&GoogleConfigKey::BaseUrl).or_else(|| base_of_account(&builder));
    if base.is_none()
        && let Some(emulator) = emulator(env::var(GOOGLE_EMULATOR_VARIABLE).ok().as_deref())
    {
        // It asks for no credentials, and there may be none.
        builder = builder.with_base_url(&emulator).with_skip_signature(true);
        base = Some(emulator);
    }
    if allows_http(base.as_deref(), options) {
        builder = builder.with_config(GoogleConfigKey::Client(ClientConfigKey::AllowHttp), "true");
    }
    let connector = ObservedConnector::default();
    let credentials = connector.credentials.clone();
    let made = Arc::new(builder.with_retry(retries).with_http_connector(connector).build()?);
    let host = base.as_deref().and_then(host_of).unwrap_or_else(|| "storage.googleapis.com".to_owned());
    Ok(Store {
        inner: made.clone(),
        pages: Some(made),
        credentials,
        gate: gate_of(&host, options),
        is_offline: options.offline,
        address: format!("gs://{bucket} at {host}"),
        host,
        advice: "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
        looked_for: "GOOGLE_SERVICE_ACCOUNT, GOOGLE_SERVICE_ACCOUNT_KEY, GOOGLE_APPLICATION_CREDENTIALS, the file of `gcloud \
                     auth application-default login`, and then asked the metadata service of a machine at Google",
    })
}

/// The address of the store that a service account's file names, as those for emulators do.
fn base_of_account(builder: &GoogleCloudStorageBuilder) -> Option<String> {
    let path = builder.get_config_value(&GoogleConfigKey::ServiceAccount)?;
    let account: serde_json::Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    Some(account.get("gcs_base_url")?.as_str()?.to_owned())
}

/// The address of an emulator that may be written without `http://`.
fn emulator(text: Option<&str>) -> Option<String> {
    let text = text.map(|text| text.trim().trim_end_matches('/')).filter(|text| !text.is_empty())?;
    Some(if text.contains("://") { text.to_owned() } else { format!("http://{text}") })
}

fn azure(url: &Url, options: &RemoteOptions, retries: RetryConfig) -> object_store::Result<Store> {
    let mut builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str());
    let value = |key| builder.get_config_value(&key).filter(|value| !value.is_empty());
    let is_emulator = value(AzureConfigKey::UseEmulator).is_some_and(|value| is_true(&value));
    let emulator = || env::var(AZURITE_VARIABLE).unwrap_or_else(|_| AZURITE.to_owned());
    let endpoint = if is_emulator { Some(emulator()) } else { value(AzureConfigKey::Endpoint) };
    // az://container/path, or abfss://container@account.dfs.core.windows.net/path
    let (container, named) = match url.username() {
        "" => (bucket_of(url), None),
        container => (container, url.host_str().map(str::to_owned)),
    };
    let account = || format!("{}.blob.core.windows.net", value(AzureConfigKey::AccountName).unwrap_or_default());
    let host = endpoint.as_deref().and_then(host_of).or(named).unwrap_or_else(account);
    if allows_http(endpoint.as_deref(), options) {
        builder = builder.with_config(AzureConfigKey::Client(ClientConfigKey::AllowHttp), "true");
    }
    let connector = ObservedConnector::default();
    let credentials = connector.credentials.clone();
    let made = Arc::new(builder.with_retry(retries).with_http_connector(connector).build()?);
    Ok(Store {
        inner: made.clone(),
        pages: Some(made),
        credentials,
        gate: gate_of(&host, options),
        is_offline: options.offline,
        address: format!("az://{container} at {host}"),
        host,
        advice: "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or a SAS token, or AZURE_SKIP_SIGNATURE=true \
                 for a public container",
        looked_for: "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, AZURE_STORAGE_TOKEN, AZURE_CLIENT_ID with \
                     AZURE_CLIENT_SECRET or AZURE_FEDERATED_TOKEN_FILE, and then asked the metadata service of a machine at \
                     Azure",
    })
}

/// Whether a value means yes, to `object_store` too.
fn is_true(value: &str) -> bool {
    ["1", "true", "on", "yes", "y"].contains(&value.trim().to_ascii_lowercase().as_str())
}

fn http(url: &Url, options: &RemoteOptions, retries: RetryConfig) -> object_store::Result<Store> {
    let base = &url[..url::Position::BeforePath];
    let mut builder = HttpBuilder::new().with_url(base);
    if allows_http(Some(base), options) {
        builder = builder.with_config(ClientConfigKey::AllowHttp, "true");
    }
    let connector = ObservedConnector::default();
    let credentials = connector.credentials.clone();
    let made = Arc::new(builder.with_retry(retries).with_http_connector(connector).build()?);
    let host = host_of(base).unwrap_or_default();
    Ok(Store {
        inner: made,
        pages: None,
        credentials,
        gate: gate_of(&host, options),
        is_offline: options.offline,
        address: format!("{}://{host}", url.scheme()),
        host,
        advice: "the server wants credentials, which ckfs has not",
        looked_for: "nothing",
    })
}

fn gate_of(host: &str, options: &RemoteOptions) -> Backoff {
    Backoff::new(host, options.timeout, &options.waits, Arc::default())
}

fn host_of(endpoint: &str) -> Option<String> {
    let url = Url::parse(endpoint).ok()?;
    let host = url.host_str()?;
    Some(url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")))
}

/// Without encryption only this machine is spoken to, unless the user allows others.
fn allows_http(endpoint: Option<&str>, options: &RemoteOptions) -> bool {
    let url = endpoint.and_then(|endpoint| Url::parse(endpoint).ok());
    let plain = url.is_some_and(|url| url.scheme() == "http" && url.host_str().is_some_and(is_loopback));
    plain || options.allow_http
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_named_by_its_store_and_container() {
        let named = |text: &str, kind| {
            let url = Url::parse(text).unwrap();
            let made = connect(&url, kind, &RemoteOptions::default(), RetryConfig::default()).unwrap();
            (made.address, made.host)
        };
        let of = |address: &str, host: &str| (address.to_owned(), host.to_owned());
        let host = "account.dfs.core.windows.net";
        let address = format!("abfss://weights@{host}/models");
        assert_eq!(named(&address, StoreKind::Azure), of(&format!("az://weights at {host}"), host));
        let address = named("http://localhost:81/models", StoreKind::Http);
        assert_eq!(address, of("http://localhost:81", "localhost:81"));
    }

    #[test]
    fn an_emulator_is_written_with_or_without_its_scheme() {
        assert_eq!(emulator(Some("localhost:4443")).as_deref(), Some("http://localhost:4443"));
        assert_eq!(emulator(Some("http://localhost:4443/")).as_deref(), Some("http://localhost:4443"));
        assert_eq!((emulator(None), emulator(Some(" "))), (None, None));
    }
}
