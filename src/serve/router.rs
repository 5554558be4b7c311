//! Which request is answered by what.

use std::{net::IpAddr, sync::Arc};

use ckfs_service::OpenProblem;
use http::{Method, Request, StatusCode, header::CONNECTION};
use hyper::body::Incoming;

use super::{
    answer::{self, HTML, Reply, TEXT},
    files,
    gate::{Caller, Visitor},
    hub::{self, HubCall, HubRequest},
    listing::escaped,
    options::ServeOptions,
    path,
    s3::{self, SortedDirectories},
    served::ServedSource,
};

/// Content type of the metrics.
const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The start of paths of files.
const FILES: &str = "/files";

/// What answers the requests of an address.
pub(super) struct Router {
    pub(super) options: ServeOptions,
    pub(super) served: ServedSource,
    /// Of an address of S3.
    pub(super) sorted: Option<Arc<SortedDirectories>>,
}

impl Router {
    /// Answers a request.
    pub(super) async fn answer(&self, request: Request<&mut Incoming>, peer: IpAddr) -> Reply {
        match (Caller::of(&request, peer), &self.sorted) {
            (Ok(caller), None) => self.answer_http(request, &caller).await,
            (Ok(caller), Some(sorted)) => {
                let answered = s3::answer((&self.options, &self.served), sorted, request, &caller).await;
                answered.unwrap_or_else(|reply| reply)
            }
            // Nobody knows where such a request ends for a proxy before this server.
            (Err(text), _) => answer::with_header(answer::failed(StatusCode::BAD_REQUEST, text), CONNECTION, "close"),
        }
    }

    async fn answer_http(&self, request: Request<&mut Incoming>, caller: &Caller) -> Reply {
        let (parts, body) = request.into_parts();
        let (method, path) = (&parts.method, parts.uri.path());
        // Probes of orchestrators have no token.
        let admitted = self.options.admit(&parts.headers, caller);
        let is_read = method == Method::GET || method == Method::HEAD;
        match path {
            "/healthz" if is_read => return answer::of_text(StatusCode::OK, TEXT, "alive\n"),
            "/readyz" if is_read => return readiness(&self.served, admitted.unwrap_or(Visitor::Stranger)).await,
            _ => {}
        }
        let visitor = match admitted {
            Ok(visitor) => visitor,
            Err(reason) => return answer::not_admitted(reason, caller),
        };
        let below = path.strip_prefix(FILES).filter(|rest| rest.is_empty() || rest.starts_with('/'));
        let of_hub = if below.is_none() { HubRequest::parse(path) } else { None };
        let is_post = of_hub.as_ref().is_some_and(HubRequest::is_post);
        // There is none, whatever is asked of it.
        let is_other = matches!(of_hub, Some(HubRequest::Other { .. }));
        if is_post && method != Method::POST {
            return answer::wrong_method("POST");
        }
        if !is_post && !is_read && !is_other {
            return answer::wrong_method("GET, HEAD");
        }
        if let Some(below) = below {
            let answered = files::answer(&self.served, visitor, below, method, &parts.headers).await;
            return answered.unwrap_or_else(|reply| reply);
        }
        if let Some(asked) = of_hub {
            let query = parts.uri.query().unwrap_or_default();
            let call = HubCall { visitor, method, headers: &parts.headers, query };
            return hub::answer(&self.served, asked, &call, body).await.unwrap_or_else(|reply| reply);
        }
        match path {
            "/" => answer::of_text(StatusCode::OK, HTML, self.front_page(visitor).await),
            "/metrics" => match self.served.metrics_text().await {
                Ok(text) => answer::of_text(StatusCode::OK, METRICS, text),
                Err(error) => answer::failed(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
            },
            _ => answer::failed(StatusCode::NOT_FOUND, "no such path; files are below /files/"),
        }
    }

    /// The page at the root: what is here.
    async fn front_page(&self, visitor: Visitor) -> String {
        let mut rows = String::new();
        for repository in self.served.repositories(visitor).await {
            let (id, place) = (escaped(&repository.id), path::encoded(&repository.root.path));
            let commit = &repository.commit;
            rows.extend(["<li>repository <a href=\"/files/", &place, "/\">", &id, "</a>, commit ", commit, "\n"]);
        }
        // The path of the source is for those who may see all.
        let label = match visitor {
            Visitor::Trusted => escaped(self.served.label()),
            Visitor::Stranger => "ckfs".to_owned(),
        };
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{label}</title>\n<h1>{label}</h1>\n<ul>\n<li><a \
             href=\"/files/\">files</a>\n{rows}<li><a href=\"/metrics\">metrics</a>, <a href=\"/readyz\">health</a>\n</ul>\n"
        )
    }
}

/// Whether files can be read; while something is wrong, what.
async fn readiness(served: &ServedSource, visitor: Visitor) -> Reply {
    let problems = served.problems().await;
    if problems.is_empty() {
        return answer::of_text(StatusCode::OK, TEXT, "ready\n");
    }
    // Paths and causes are for those who may see all.
    let row = |problem: &OpenProblem| match visitor {
        Visitor::Trusted => format!("{}: {}: {}\n", problem.kind, problem.file, problem.cause),
        Visitor::Stranger => format!("{}\n", problem.kind),
    };
    let text: String = problems.iter().map(row).collect();
    answer::of_text(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("degraded\n{text}"))
}
