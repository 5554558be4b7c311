//! The socket of the plugin, and which function answers which call.

use std::{convert::Infallible, fs, io, path::Path, sync::Arc, thread};

use prost::Message;
use tokio::sync::oneshot;
use tonic::{Request, Response, Status, body::Body, codegen::http, server::Grpc, transport::Server};
use tonic_prost::ProstCodec;
use tower::service_fn;
use tracing::{info, warn};

use crate::{
    CsiOptions,
    daemons::wait_for_end,
    messages::{Capabilities, Capability, Probed, Rpc},
    node::NodePlugin,
    state::listen,
};

type Reply = http::Response<Body>;

/// Answers a request by the call that its path names.
async fn reply(node: Arc<NodePlugin>, request: http::Request<Body>) -> Result<Reply, Infallible> {
    let call = request.uri().path().strip_prefix("/csi.v1.").unwrap_or_default().to_owned();
    Ok(match call.as_str() {
        "Identity/GetPluginInfo" => answer(request, node, |node, (): &()| Ok(node.plugin_info())).await,
        "Identity/GetPluginCapabilities" => answer(request, node, |_, (): &()| Ok(())).await,
        "Identity/Probe" => answer(request, node, |_, (): &()| Ok(Probed { ready: Some(true) })).await,
        "Node/NodeGetInfo" => answer(request, node, |node, (): &()| Ok(node.info())).await,
        "Node/NodeGetCapabilities" => answer(request, node, |_, (): &()| Ok(capabilities())).await,
        "Node/NodePublishVolume" => answer(request, node, NodePlugin::publish).await,
        "Node/NodeUnpublishVolume" => answer(request, node, NodePlugin::unpublish).await,
        "Node/NodeGetVolumeStats" => answer(request, node, NodePlugin::stats).await,
        _ => Status::unimplemented(format!("{call}: not a call of this plugin")).into_http(),
    })
}

/// Of the node: `GET_VOLUME_STATS` and `VOLUME_CONDITION`.
fn capabilities() -> Capabilities {
    Capabilities { capabilities: [2, 4].map(|kind| Capability { rpc: Some(Rpc { kind }) }).into() }
}

/// Answers one call. Its work may wait for storage, and has a thread of its own.
async fn answer<Q, A>(
    request: http::Request<Body>,
    node: Arc<NodePlugin>,
    work: fn(&NodePlugin, &Q) -> Result<A, Status>,
) -> Reply
where
    Q: Message + Default + 'static,
    A: Message + 'static,
{
    let path = request.uri().path().to_owned();
    let call = service_fn(move |request: Request<Q>| {
        let (node, path) = (Arc::clone(&node), path.clone());
        async move {
            let done = tokio::task::spawn_blocking(move || work(&node, request.get_ref())).await;
            let result = done.unwrap_or_else(|error| Err(Status::internal(error.to_string())));
            if let Err(status) = &result {
                warn!("{path}: {:?}: {}", status.code(), status.message());
            }
            result.map(Response::new)
        }
    });
    Grpc::new(ProstCodec::<A, Q>::default()).unary(call, request).await
}

/// Answers calls until a signal ends this process. Volumes stay as they are. Signals must be blocked. `ready` is called once calls are
/// answered.
///
/// # Errors
/// The socket or the state directory.
pub fn serve(options: CsiOptions, ready: impl FnOnce()) -> io::Result<()> {
    let path = options
        .endpoint
        .strip_prefix("unix:")
        .map_or(&*options.endpoint, |rest| if rest.starts_with("///") { &rest[2..] } else { rest });
    let path = Path::new(path).to_owned();
    let node = Arc::new(NodePlugin::new(options)?);
    let listener = listen(&path)?;
    listener.set_nonblocking(true)?;
    let (end, ended) = oneshot::channel();
    thread::Builder::new().name("ckfs-signals".into()).spawn(move || {
        wait_for_end();
        let _ = end.send(());
    })?;
    let looked_after = Arc::clone(&node);
    thread::Builder::new().name("ckfs-adopt".into()).spawn(move || looked_after.adopt())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let incoming = futures_util::stream::poll_fn(move |context| {
            listener.poll_accept(context).map_ok(|(stream, _)| stream).map(Some)
        });
        let plugin = service_fn(move |request| reply(Arc::clone(&node), request));
        ready();
        let serving = Server::builder().serve_with_incoming(plugin, incoming);
        tokio::select! {
            result = serving => result.map_err(io::Error::other),
            _ = ended => Ok(()),
        }
    })?;
    info!("ends; volumes stay as they are");
    // A call that has not ended is asked again of the next plugin.
    runtime.shutdown_background();
    let _ = fs::remove_file(path);
    Ok(())
}
