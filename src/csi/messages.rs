//! The messages of the Container Storage Interface, version 1, as far as Identity and Node need them. Fields have the numbers of
//! `csi.proto`; what is never looked at is left out. `()` is a message of
//! which no field matters, and `bool` is `google.protobuf.BoolValue`.

use std::collections::HashMap;

use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PluginInfo {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) vendor_version: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Probed {
    #[prost(message, optional, tag = "1")]
    pub(crate) ready: Option<bool>,
}

/// How a volume is to be used. A block device is refused; of a mount nothing matters, as all are read-only.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct VolumeCapability {
    #[prost(message, optional, tag = "1")]
    pub(crate) block: Option<()>,
    #[prost(message, optional, tag = "2")]
    pub(crate) mount: Option<()>,
}

/// Never shown: it has secrets.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub(crate) struct PublishRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(string, tag = "4")]
    pub(crate) target_path: String,
    #[prost(message, optional, tag = "5")]
    pub(crate) volume_capability: Option<VolumeCapability>,
    #[prost(map = "string, string", tag = "7")]
    pub(crate) secrets: HashMap<String, String>,
    #[prost(map = "string, string", tag = "8")]
    pub(crate) volume_context: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct UnpublishRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(string, tag = "2")]
    pub(crate) target_path: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StatsRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(string, tag = "2")]
    pub(crate) volume_path: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct VolumeUsage {
    #[prost(int64, tag = "2")]
    pub(crate) total: i64,
    #[prost(int64, tag = "3")]
    pub(crate) used: i64,
    #[prost(int32, tag = "4")]
    pub(crate) unit: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct VolumeCondition {
    #[prost(bool, tag = "1")]
    pub(crate) abnormal: bool,
    #[prost(string, tag = "2")]
    pub(crate) message: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Stats {
    #[prost(message, repeated, tag = "1")]
    pub(crate) usage: Vec<VolumeUsage>,
    #[prost(message, optional, tag = "2")]
    pub(crate) condition: Option<VolumeCondition>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Rpc {
    #[prost(int32, tag = "1")]
    pub(crate) kind: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Capability {
    #[prost(message, optional, tag = "1")]
    pub(crate) rpc: Option<Rpc>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Capabilities {
    #[prost(message, repeated, tag = "1")]
    pub(crate) capabilities: Vec<Capability>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct NodeInfo {
    #[prost(string, tag = "1")]
    pub(crate) node_id: String,
}
