//! Requests to the Hub: token, redirects, refusals, waits.

use std::{error::Error, path::Path, time::Instant};

use bytes::Bytes;
use reqwest::{
    Method, Response, StatusCode, Url,
    header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, HeaderValue, LOCATION},
};
use serde::de::DeserializeOwned;
use tokio::time::timeout_at;

use super::{
    super::{
        super::digest::{SHA1_DIGITS, is_hex},
        error::{Failure, RemoteError, of_causes},
        interface::RemoteFile,
        kept::KeptTree,
        listing::Gathered,
        reply::{REDIRECTS_MAX, asked, may_follow, refusal, request_id, text_of},
        retry::{Backoff, Deadline, retry},
        runtime,
    },
    refusal::{Subject, refusal_of},
    settings::{HubSettings, may_connect},
    tree::{HubEntry, Revision, next_page},
};

/// Connections that stay open for the next request, for each host.
const IDLE_CONNECTIONS: usize = 64;
/// Most bytes of an answer of the API. A page of the tree has about 300 KB.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Hosts of the Hub itself. Its content network has other names, also below these.
const HUB_HOSTS: [&str; 2] = ["huggingface.co", "hf.co"];

/// A client of the Hub.
#[derive(Debug)]
pub struct Hub {
    pub(super) settings: HubSettings,
    http: reqwest::Client,
    pub(super) gate: Backoff,
    kept: KeptTree,
}

impl Hub {
    /// A client with these settings, behind a gate. It sends nothing yet. Listings are kept below `cache`, the directory of the
    /// disk cache.
    ///
    /// # Errors
    /// The HTTP client cannot start, for example without certificates.
    pub fn new(settings: HubSettings, cache: Option<&Path>, gate: Backoff) -> Result<Self, RemoteError> {
        let host = settings.endpoint.host_str().unwrap_or_default().to_owned();
        let http = runtime::http_client()
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            // One connection for each request in flight: a single one of HTTP/2 is slower than its link.
            .http1_only()
            .build();
        let http = http.map_err(|error| {
            let reason = runtime::with_remedy(causes(&error.without_url()));
            RemoteError::new(Failure::Unsupported, &host, "HTTP client", reason)
        })?;
        let kept = KeptTree::new(cache, &kept_name(&settings.endpoint));
        Ok(Self { settings, http, gate, kept })
    }

    /// The host, for messages.
    pub(super) fn host(&self) -> &str {
        self.settings.endpoint.host_str().unwrap_or_default()
    }

    /// The commit that a branch, tag or commit stands for now.
    ///
    /// # Errors
    /// [`RemoteError`]: refused with the way out, or unreachable.
    pub fn commit(&self, repo: &str, revision: &str, deadline: Deadline) -> Result<String, RemoteError> {
        if is_commit(revision) {
            return Ok(revision.to_owned());
        }
        if self.settings.offline {
            return self.kept.commit(repo, revision).ok_or_else(|| self.is_offline(&format!("{repo}@{revision}")));
        }
        let url = self.url(&["api", "models"], repo, &["revision", revision]);
        let (Revision { sha }, _) = self.api(repo, Subject::Revision(revision), &url, deadline)?;
        if is_commit(&sha) {
            self.kept.keep_commit(repo, revision, &sha);
            return Ok(sha);
        }
        let message = format!("expected a commit as `sha`, found {sha:?}");
        Err(RemoteError::new(Failure::Unsupported, self.host(), repo, message))
    }

    /// The files of a commit: those that are kept, else as the Hub lists them.
    pub(super) fn files(&self, repo: &str, commit: &str, deadline: Deadline) -> Result<Vec<RemoteFile>, RemoteError> {
        if let Some(files) = self.kept.files(repo, commit) {
            return Ok(files);
        }
        if self.settings.offline {
            return Err(self.is_offline(&format!("{repo}@{commit}")));
        }
        let files = self.tree(repo, commit, deadline)?;
        self.kept.keep_files(repo, commit, &files);
        Ok(files)
    }

    fn tree(&self, repo: &str, commit: &str, deadline: Deadline) -> Result<Vec<RemoteFile>, RemoteError> {
        let mut url = self.url(&["api", "models"], repo, &["tree", commit]);
        url.set_query(Some("recursive=true&limit=1000"));
        let (mut next, mut listing) = (Some(url), Gathered::default());
        let named = format!("{}/{repo}", self.settings.endpoint.as_str().trim_end_matches('/'));
        let refuse = |message: String| RemoteError::new(Failure::Unsupported, self.host(), repo, message);
        while let Some(url) = next {
            let (entries, headers): (Vec<HubEntry>, _) = self.api(repo, Subject::Revision(commit), &url, deadline)?;
            let count = entries.len();
            let files = entries.into_iter().filter_map(|entry| entry.file(&named).transpose());
            let added = files.collect::<Result<Vec<_>, _>>().and_then(|files| {
                let directories = count - files.len();
                listing.add(files, Vec::new(), directories)
            });
            added.map_err(refuse)?;
            next = next_page(&headers).and_then(|text| url.join(&text).ok());
            if let Some(next) = next.as_ref().filter(|next| !may_follow(&url, next)) {
                return Err(refuse(refusal(&url, next)));
            }
        }
        Ok(listing.files.into_values().collect())
    }

    /// The error of something that only the network has.
    pub(super) fn is_offline(&self, what: &str) -> RemoteError {
        let message = "not on this machine, and --offline or HF_HUB_OFFLINE forbids to ask the Hub; `ckfs fetch` brings it \
                       where the network may be used";
        RemoteError::new(Failure::Unsupported, self.host(), what, message)
    }

    /// An address of the Hub: words, the repository, words.
    pub(super) fn url(&self, before: &[&str], repo: &str, after: &[&str]) -> Url {
        let mut url = self.settings.endpoint.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend(before).extend(repo.split('/')).extend(after);
        }
        url
    }

    /// An answer of the API, with all repetitions.
    fn api<T: DeserializeOwned>(
        &self,
        repo: &str,
        subject: Subject<'_>,
        url: &Url,
        deadline: Deadline,
    ) -> Result<(T, HeaderMap), RemoteError> {
        let attempt = |until: Instant| {
            let url = url.clone();
            runtime::block_on(self.host(), async move {
                let Followed { mut answer, url, leads_out, .. } =
                    self.follow(Method::GET, repo, subject, url, until).await?;
                if leads_out {
                    let message = format!("redirects to {}, which is not the Hub", url.host_str().unwrap_or_default());
                    return Err(of_status(&answer, Failure::Unsupported, self.host(), repo, &message));
                }
                let headers = answer.headers().clone();
                let text = self.whole(repo, &mut answer, until).await?;
                let misread = |error| format!("the answer is not understood: {error}");
                let parsed = serde_json::from_slice(&text).map_err(misread);
                Ok((parsed.map_err(|text| RemoteError::new(Failure::Transient, self.host(), repo, text))?, headers))
            })?
        };
        retry(&self.gate, deadline, attempt, || false)
    }

    async fn whole(&self, repo: &str, answer: &mut Response, until: Instant) -> Result<Vec<u8>, RemoteError> {
        let mut text = Vec::new();
        while let Some(chunk) = next_chunk(answer, self.host(), repo, until).await? {
            text.extend_from_slice(&chunk);
            if text.len() > ANSWER_BYTES_MAX {
                let message = format!("the answer has more than {ANSWER_BYTES_MAX} bytes");
                return Err(RemoteError::new(Failure::Unsupported, self.host(), repo, message));
            }
        }
        Ok(text)
    }

    /// Sends a request and follows redirects between hosts of the Hub. The answer is a success, or a redirect to another host.
    pub(super) async fn follow(
        &self,
        method: Method,
        repo: &str,
        subject: Subject<'_>,
        mut url: Url,
        until: Instant,
    ) -> Result<Followed, RemoteError> {
        // Of the answers on the way, the first with a header counts: the Hub describes the file before it redirects.
        let mut described = HeaderMap::new();
        for _ in 0..REDIRECTS_MAX {
            let answer = self.send(method.clone(), &url, &HeaderMap::new(), repo, until).await?;
            for (name, value) in answer.headers() {
                if !described.contains_key(name) {
                    described.insert(name.clone(), value.clone());
                }
            }
            if let Some((failure, message)) = refusal_of(&self.settings, repo, subject, &answer) {
                return Err(of_status(&answer, failure, self.host(), repo, &message));
            }
            if answer.status().is_success() {
                return Ok(Followed { answer, described, url, leads_out: false });
            }
            let target = text_of(answer.headers(), LOCATION);
            let target = target.filter(|_| answer.status().is_redirection()).and_then(|text| url.join(text).ok());
            let Some(target) = target else {
                return Err(of_status(&answer, Failure::Unsupported, self.host(), repo, "an unexpected answer"));
            };
            if !may_follow(&url, &target) {
                let message = refusal(&url, &target);
                return Err(of_status(&answer, Failure::Refused, self.host(), repo, &message));
            }
            let is_hub = self.is_hub(&target);
            url = target;
            if !is_hub {
                return Ok(Followed { answer, described, url, leads_out: true });
            }
        }
        let message = format!("more than {REDIRECTS_MAX} redirects");
        Err(RemoteError::new(Failure::Unsupported, self.host(), repo, message))
    }

    /// Sends one request. Answers that mean "later" are errors; all others are returned.
    pub(super) async fn send(
        &self,
        method: Method,
        url: &Url,
        headers: &HeaderMap,
        what: &str,
        until: Instant,
    ) -> Result<Response, RemoteError> {
        let host = url.host_str().unwrap_or_default().to_owned();
        let failed = |failure, message: String| RemoteError::new(failure, &host, what, message);
        if !may_connect(url, self.settings.allow_http) {
            let message = "the address is not encrypted; --allow-http accepts that".to_owned();
            return Err(failed(Failure::Unsupported, message));
        }
        let mut request = self.http.request(method, url.clone()).headers(headers.clone());
        request = request.header(ACCEPT_ENCODING, "identity");
        if let Some(token) = &self.settings.token
            && self.is_hub(url)
        {
            let mut value = HeaderValue::try_from(format!("Bearer {}", token.text))
                .map_err(|_| failed(Failure::Refused, format!("the token of {} is malformed", token.origin)))?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        let answer = match timeout_at(until.into(), request.send()).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Err(of_transport(error, &host, what)),
            Err(_) => return Err(failed(Failure::Transient, "no answer in time".to_owned())),
        };
        let status = answer.status();
        if status == StatusCode::TOO_MANY_REQUESTS {
            let wait = asked(answer.headers());
            return Err(of_status(&answer, Failure::Busy(wait), &host, what, "rate limit"));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE
            && let Some(wait) = asked(answer.headers())
        {
            return Err(of_status(&answer, Failure::Busy(Some(wait)), &host, what, "the server is busy"));
        }
        if status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT {
            return Err(of_status(&answer, Failure::Transient, &host, what, "a fault of the server"));
        }
        Ok(answer)
    }

    /// Whether an address belongs to the Hub, so that it may see the token: the endpoint itself, or two names of the same Hub.
    pub(super) fn is_hub(&self, url: &Url) -> bool {
        let own = &self.settings.endpoint;
        let known = |url: &Url| {
            url.scheme() == "https"
                && url.port_or_known_default() == Some(443)
                && url.host_str().is_some_and(|host| HUB_HOSTS.contains(&host))
        };
        own.origin() == url.origin() || (known(own) && known(url))
    }
}

/// The name of the directory in which the listings of an endpoint are kept. Another scheme or path is another endpoint: its
/// listings are its own.
fn kept_name(endpoint: &Url) -> String {
    let host = endpoint.authority().replace(':', "_");
    match (endpoint.scheme(), endpoint.path().trim_matches('/')) {
        ("https", "") => host,
        (scheme, path) => format!("{scheme}_{host}_{path}"),
    }
}

/// Where a request has led.
#[derive(Debug)]
pub(super) struct Followed {
    pub(super) answer: Response,
    /// The headers of all answers; of one name, the first.
    pub(super) described: HeaderMap,
    /// The address of the answer, or the one outside the Hub that it leads to.
    pub(super) url: Url,
    /// Whether the address is outside the Hub. Nothing was sent there.
    pub(super) leads_out: bool,
}

/// Whether a revision is a complete commit.
pub(super) fn is_commit(revision: &str) -> bool {
    is_hex(revision, SHA1_DIGITS)
}

/// The next bytes of an answer.
pub(super) async fn next_chunk(
    answer: &mut Response,
    host: &str,
    what: &str,
    until: Instant,
) -> Result<Option<Bytes>, RemoteError> {
    match timeout_at(until.into(), answer.chunk()).await {
        Ok(Ok(chunk)) => Ok(chunk),
        Ok(Err(error)) => Err(of_transport(error, host, what)),
        Err(_) => Err(RemoteError::new(Failure::Transient, host, what, "the answer is not complete in time")),
    }
}

/// An error about an answer with a status.
pub(super) fn of_status(answer: &Response, failure: Failure, host: &str, what: &str, message: &str) -> RemoteError {
    let mut error = RemoteError::new(failure, host, what, message);
    error.status = Some(answer.status().as_u16());
    error.request_id = request_id(answer.headers());
    error
}

/// An error without an answer, or in the middle of one. The message never has the address, which may be signed.
fn of_transport(error: reqwest::Error, host: &str, what: &str) -> RemoteError {
    let (failure, message) = of_causes(causes(&error.without_url()));
    RemoteError::new(failure, host, what, message)
}

/// An error with its causes, each once.
fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        next = cause.source();
    }
    text
}
