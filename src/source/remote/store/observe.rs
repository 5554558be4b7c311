//! What a reply said besides its bytes.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use object_store::{
    ClientOptions,
    client::{HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector},
};

use super::super::{encoding::compressed, error::RemoteError, retry_after::wait_of};

/// What a reply said besides its bytes.
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
    /// What the last reply said.
    pub(super) fn seen(&self) -> Seen {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Forgets what replies to earlier calls said.
    pub(super) fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Seen::default();
    }

    fn note(&self, response: &HttpResponse) {
        let header = |name: &str| response.headers().get(name)?.to_str().ok().map(str::trim);
        let request_id = ["x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid", "x-request-id"];
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Seen {
            status: Some(response.status().as_u16()),
            retry_after: header("retry-after").and_then(|text| wait_of(text, header("date"))),
            request_id: request_id.iter().find_map(|name| header(name)).map(printable),
            compressed: compressed(response.headers(), "", ""),
        };
    }
}

/// A name from a server, short and without characters that a terminal would obey.
fn printable(text: &str) -> String {
    text.chars().filter(char::is_ascii_graphic).take(80).collect()
}

/// Makes clients whose replies are observed. Calls without an observer of their own are noted in `last`.
#[derive(Debug, Default)]
pub(super) struct ObservedConnector {
    pub(super) last: Observer,
}

impl HttpConnector for ObservedConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(ObservedService { inner, last: self.last.clone() }))
    }
}

#[derive(Debug)]
struct ObservedService {
    inner: HttpClient,
    last: Observer,
}

#[async_trait]
impl HttpService for ObservedService {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let observer = request.extensions().get::<Observer>().unwrap_or(&self.last).clone();
        let response = self.inner.execute(request).await?;
        observer.note(&response);
        Ok(response)
    }
}
