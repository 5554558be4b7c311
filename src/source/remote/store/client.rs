//! The HTTP client below a store: it follows redirects itself, so that credentials stay with the host that they are for.
//!
//! The client that `object_store` makes of its own follows them too, and removes no header but `Authorization` and cookies: a session
//! token of AWS would go to any host.

use std::{
    error::Error,
    net::SocketAddr,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use http::{Method, header::LOCATION};
use object_store::{
    ClientConfigKey as Key, ClientOptions,
    client::{HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpResponse},
};
use reqwest::{
    NoProxy, Proxy,
    dns::{Addrs, Name, Resolve, Resolving},
};
use url::Url;

use super::super::{
    reply::{REDIRECTS_MAX, is_redirect, may_follow, refusal, text_of, without_credentials},
    runtime::{CONNECT_TIMEOUT, http_client},
};

/// Longest time of one attempt. A slow reply goes on in the next.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(5);

/// A client with the options of a store.
///
/// # Errors
/// The options do not fit each other, or there are no certificates.
pub(super) fn client(options: &ClientOptions) -> object_store::Result<HttpClient> {
    let made = builder(options).and_then(reqwest::ClientBuilder::build);
    let inner = made.map_err(|error| object_store::Error::Generic { store: "HTTP client", source: Box::new(error) })?;
    Ok(HttpClient::new(inner))
}

fn builder(options: &ClientOptions) -> reqwest::Result<reqwest::ClientBuilder> {
    let text = |key| options.get_config_value(&key).filter(|text| !text.is_empty());
    let is_on = |key| text(key).is_some_and(|text| text == "true");
    let time = |key| humantime::parse_duration(&text(key)?).ok();
    let mut made = http_client()
        .referer(false)
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
        .timeout(REQUEST_TIMEOUT)
        .https_only(!is_on(Key::AllowHttp))
        .danger_accept_invalid_certs(is_on(Key::AllowInvalidCertificates));
    // That of services for credentials is shorter. What the environment says for other programs may be too short for any connection.
    if let Some(limit) = time(Key::ConnectTimeout).filter(|limit| *limit >= Duration::from_secs(1)) {
        made = made.connect_timeout(limit.min(CONNECT_TIMEOUT));
    }
    if let Some(limit) = time(Key::PoolIdleTimeout) {
        made = made.pool_idle_timeout(limit);
    }
    if let Some(count) = text(Key::PoolMaxIdlePerHost).and_then(|text| text.parse().ok()) {
        made = made.pool_max_idle_per_host(count);
    }
    if let Some(proxy) = text(Key::ProxyUrl) {
        let excludes = text(Key::ProxyExcludes).and_then(|text| NoProxy::from_string(&text));
        made = made.proxy(Proxy::all(proxy)?.no_proxy(excludes));
    }
    if let Some(certificate) = text(Key::ProxyCaCertificate) {
        made = made.tls_certs_merge([reqwest::Certificate::from_pem(certificate.as_bytes())?]);
    }
    if is_on(Key::Http2Only) {
        made = made.http2_prior_knowledge();
    } else if is_on(Key::Http1Only) {
        made = made.http1_only();
    }
    if is_on(Key::RandomizeAddresses) {
        made = made.dns_resolver(std::sync::Arc::new(Rotating::default()));
    }
    Ok(made)
}

/// Looks names up, and begins with another address each time: the requests are spread over the hosts of a store.
#[derive(Debug, Default)]
struct Rotating(std::sync::Arc<AtomicUsize>);

impl Resolve for Rotating {
    fn resolve(&self, name: Name) -> Resolving {
        let first = self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let mut all: Vec<SocketAddr> = found.collect();
            let count = all.len().max(1);
            all.rotate_left(first % count);
            Ok(Box::new(all.into_iter()) as Addrs)
        })
    }
}

/// A redirect that is not followed, in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct RefusedRedirect(String);

impl RefusedRedirect {
    /// The one among the causes of an error.
    pub(super) fn among<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref() {
                return Some(found);
            }
            next = error.source();
        }
        None
    }
}

/// Sends a request and follows redirects, without credentials to another host.
pub(super) async fn follow(client: &HttpClient, request: HttpRequest) -> Result<HttpResponse, HttpError> {
    let refused = |message: String| HttpError::new(HttpErrorKind::Unknown, RefusedRedirect(message));
    let (mut parts, body) = request.into_parts();
    // The body of any other request is meant for its host: those for tokens hold secrets.
    let follows = [Method::GET, Method::HEAD].contains(&parts.method);
    for _ in 0..=REDIRECTS_MAX {
        let reply = client.execute(HttpRequest::from_parts(parts.clone(), body.clone())).await?;
        let target = text_of(reply.headers(), LOCATION);
        let Some(target) = target.filter(|_| follows && is_redirect(reply.status())) else { return Ok(reply) };
        let from = Url::parse(&parts.uri.to_string()).map_err(|error| refused(error.to_string()))?;
        let to = from.join(target).map_err(|error| refused(format!("redirects to no address: {error}")))?;
        if !may_follow(&from, &to) {
            return Err(refused(refusal(&from, &to)));
        }
        if from.origin() != to.origin() {
            parts.headers = without_credentials(&parts.headers);
        }
        let uri = to[..url::Position::AfterQuery].parse();
        parts.uri = uri.map_err(|error| refused(format!("redirects to no address: {error}")))?;
    }
    Err(refused(format!("more than {REDIRECTS_MAX} redirects")))
}

/// The innermost causes of an error, without addresses: they may be signed.
pub(super) fn cause(error: &dyn Error) -> String {
    let mut all: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next {
        next = error.source();
        let text = error.to_string();
        // An outer error repeats the inner ones, after words of its own that may hold an address.
        if next.is_none() || !text.contains("://") && !text.contains('?') {
            all.push(text);
        }
    }
    let text = all.pop().unwrap_or_default();
    let without_query = |word: &str| word.split('?').next().unwrap_or_default().to_owned();
    text.split(' ').map(without_query).collect::<Vec<_>>().join(" ")
}

/// An error with its innermost cause.
pub(super) fn with_cause(error: &object_store::Error) -> String {
    let (text, cause) = (error.to_string(), cause(error));
    if text.contains(&cause) { text } else { format!("{text}: {cause}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_hold_no_signature() {
        let error = std::io::Error::other("GET https://h/k?X-Amz-Signature=secret failed");
        assert_eq!(cause(&error), "GET https://h/k failed");
    }
}
