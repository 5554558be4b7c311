//! What a reply has besides its body.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use http::Uri;
use object_store::{
    ClientOptions,
    client::{HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService},
};
use parking_lot::Mutex;

use super::{
    super::{
        error::RemoteError,
        reply::{compressed, request_id, retry_after},
    },
    client::{cause, client, follow},
    page::PageFilter,
};

/// What a reply has besides its body.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// HTTP status of the last reply.
    pub(super) status: Option<u16>,
    /// The pause that it asks for.
    pub(super) retry_after: Option<Duration>,
    /// The service's name for the request.
    pub(super) request_id: Option<String>,
    /// The error if its bytes are not those of the object.
    pub(super) compressed: Option<RemoteError>,
}

/// Receives what the replies of one call say. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct Observer(Arc<Mutex<Seen>>);

impl Observer {
    /// Status and headers of the last reply.
    pub(super) fn seen(&self) -> Seen {
        self.0.lock().clone()
    }

    fn note(&self, response: &HttpResponse) {
        let headers = response.headers();
        *self.0.lock() = Seen {
            status: Some(response.status().as_u16()),
            retry_after: retry_after(headers),
            request_id: request_id(headers),
            compressed: compressed(headers, "", ""),
        };
    }
}

/// What requests for credentials came to: all that a store sends for other purposes than a call.
#[derive(Clone, Debug, Default)]
pub(super) struct Credentials(Arc<Mutex<CredentialState>>);

#[derive(Debug, Default)]
struct CredentialState {
    /// Whether a service has given some.
    given: bool,
    /// What the last one said instead.
    failure: Option<String>,
}

impl Credentials {
    /// Why the last service for credentials gave none, and whether one has given some before.
    pub(super) fn failure(&self) -> Option<(String, bool)> {
        let state = self.0.lock();
        state.failure.clone().map(|failure| (failure, state.given))
    }

    fn note(&self, host: &str, result: &Result<HttpResponse, HttpError>) {
        let mut state = self.0.lock();
        state.failure = match result {
            Ok(reply) if reply.status().is_success() => {
                state.given = true;
                None
            }
            Ok(reply) => Some(format!("{host} answers with status {}", reply.status().as_u16())),
            Err(error) => Some(format!("{host}: {}", cause(error))),
        };
    }
}

/// Makes clients whose replies are observed. Calls have an observer of their own; requests without one are for credentials.
#[derive(Debug, Default)]
pub(super) struct ObservedConnector {
    pub(super) credentials: Credentials,
}

impl HttpConnector for ObservedConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(ObservedService { inner: client(options)?, credentials: self.credentials.clone() }))
    }
}

#[derive(Debug)]
struct ObservedService {
    inner: HttpClient,
    credentials: Credentials,
}

#[async_trait]
impl HttpService for ObservedService {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let Some(observer) = request.extensions().get::<Observer>().cloned() else {
            let host = request.uri().host().unwrap_or_default().to_owned();
            let result = follow(&self.inner, request).await;
            self.credentials.note(&host, &result);
            return result;
        };
        let filter = request.extensions().get::<PageFilter>().cloned();
        send_as_signed(request.uri_mut());
        let reply = follow(&self.inner, request).await?;
        observer.note(&reply);
        match filter {
            Some(filter) if reply.status().is_success() => filter.filter(reply).await,
            Some(_) | None => Ok(reply),
        }
    }
}

/// Writes the query of an address as signatures have it. The client signs a space as `%20` and sends it as `+`: servers that compare
/// the query as it was sent then refuse the signature.
fn send_as_signed(uri: &mut Uri) {
    let Some(query) = uri.query().filter(|query| query.contains(['+', '*', '%'])) else { return };
    let letter = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    let written = |text: &str| text.bytes().map(letter).collect::<String>();
    let pairs = url::form_urlencoded::parse(query.as_bytes());
    let pairs: Vec<String> = pairs.map(|(name, value)| format!("{}={}", written(&name), written(&value))).collect();
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = format!("{}?{}", uri.path(), pairs.join("&")).parse().ok();
    if parts.path_and_query.is_some()
        && let Ok(rewritten) = Uri::from_parts(parts)
    {
        *uri = rewritten;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_sent_as_they_are_signed() {
        for (sent, signed) in [
            ("list-type=2&prefix=a+b%2Fc%7Ed%2B*%2F", "list-type=2&prefix=a%20b%2Fc~d%2B%2A%2F"),
            ("list-type=2&prefix=a%2F", "list-type=2&prefix=a%2F"),
            ("restype=container", "restype=container"),
            ("prefix=%C3%BC", "prefix=%C3%BC"),
        ] {
            let mut uri: Uri = format!("http://127.0.0.1:9/bucket/x%20y?{sent}").parse().unwrap();
            send_as_signed(&mut uri);
            assert_eq!(uri.to_string(), format!("http://127.0.0.1:9/bucket/x%20y?{signed}"));
        }
    }
}
