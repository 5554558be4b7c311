"""A client of the Container Storage Interface: calls by Python's `grpcio`, messages by the numbers of their fields in `csi.proto`."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Only this test needs it: it is no part of the large environment, and is put beside it once.
GRPCIO = "1.85.1"

# Name and type of each field by its number; `map` is of texts, `*` is repeated, a message has the name of another row.
MESSAGES: dict[str, dict[int, tuple[str, str]]] = {
    "Empty": {},
    "PluginInfo": {1: ("name", "string"), 2: ("vendor_version", "string")},
    "BoolValue": {1: ("value", "bool")},
    "Probed": {1: ("ready", "BoolValue")},
    "NodeInfo": {1: ("node_id", "string")},
    "Rpc": {1: ("type", "int32")},
    "Capability": {1: ("rpc", "Rpc")},
    "Capabilities": {1: ("capabilities", "*Capability")},
    "AccessMode": {1: ("mode", "int32")},
    "VolumeCapability": {1: ("block", "Empty"), 2: ("mount", "Empty"), 3: ("access_mode", "AccessMode")},
    "Publish": {
        1: ("volume_id", "string"),
        2: ("publish_context", "map"),
        4: ("target_path", "string"),
        5: ("volume_capability", "VolumeCapability"),
        6: ("readonly", "bool"),
        7: ("secrets", "map"),
        8: ("volume_context", "map"),
    },
    "Unpublish": {1: ("volume_id", "string"), 2: ("target_path", "string")},
    "StatsRequest": {1: ("volume_id", "string"), 2: ("volume_path", "string")},
    "Usage": {1: ("available", "int64"), 2: ("total", "int64"), 3: ("used", "int64"), 4: ("unit", "int32")},
    "Condition": {1: ("abnormal", "bool"), 2: ("message", "string")},
    "Volume": {2: ("volume_id", "string"), 3: ("volume_context", "map")},
    "CreateVolume": {1: ("name", "string")},
    "Created": {1: ("volume", "Volume")},
    "Stats": {1: ("usage", "*Usage"), 2: ("volume_condition", "Condition")},
}

CALLS = {
    "Identity/GetPluginInfo": ("Empty", "PluginInfo"),
    "Identity/GetPluginCapabilities": ("Empty", "Empty"),
    "Identity/Probe": ("Empty", "Probed"),
    "Node/NodeGetInfo": ("Empty", "NodeInfo"),
    "Node/NodeGetCapabilities": ("Empty", "Capabilities"),
    "Node/NodePublishVolume": ("Publish", "Empty"),
    "Node/NodeUnpublishVolume": ("Unpublish", "Empty"),
    "Node/NodeGetVolumeStats": ("StatsRequest", "Stats"),
    "Node/NodeStageVolume": ("Empty", "Empty"),
    "Controller/CreateVolume": ("Empty", "Empty"),
}


def import_grpc():
    """The module `grpc`, fetched once from the package index."""
    cache = Path(os.environ.get("CKFS_TEST_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckfs")
    place = cache / f"grpcio-{GRPCIO}-{sys.implementation.cache_tag}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock-grpcio", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([sys.executable, *words, "--upgrade", "--target", place, f"grpcio=={GRPCIO}"], check=True)
            (place / "complete").touch()
    sys.path.append(str(place))
    import grpc

    return grpc


def message_classes() -> dict[str, type]:
    file = descriptor_pb2.FileDescriptorProto(name="csi.proto", package="csi.v1", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in fields.items():
            row = message.field.add(name=field, number=number, label=3 if kind[0] == "*" or kind == "map" else 1)
            kind = kind.removeprefix("*")
            if kind == "map":
                entry = message.nested_type.add(name=field.title().replace("_", "") + "Entry")
                entry.options.map_entry = True
                for at, part in enumerate(("key", "value"), 1):
                    entry.field.add(name=part, number=at, label=1, type=9)
                row.type, row.type_name = 11, f".csi.v1.{name}.{entry.name}"
            elif kind in MESSAGES:
                row.type, row.type_name = 11, f".csi.v1.{kind}"
            else:
                row.type = {"int64": 3, "int32": 5, "bool": 8, "string": 9}[kind]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"csi.v1.{name}")) for name in MESSAGES}


class Client:
    def __init__(self, socket: Path) -> None:
        self.grpc, self.classes = import_grpc(), message_classes()
        # As Go's clients, which the kubelet has; grpcio's own is the path with percent signs, which no authority of HTTP may have.
        options = [("grpc.default_authority", "localhost")]
        self.channel = self.grpc.insecure_channel(f"unix://{socket}", options)

    def call(self, name: str, **fields: object):
        asked, answered = (self.classes[of] for of in CALLS[name])
        method = self.channel.unary_unary(f"/csi.v1.{name}", asked.SerializeToString, answered.FromString)
        return method(asked(**fields), timeout=280, wait_for_ready=True)

    def error(self, name: str, **fields: object) -> tuple[str, str]:
        try:
            answer = self.call(name, **fields)
        except self.grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError(f"{name} has succeeded: {answer}")

    def controller(self, address: str, attributes: dict[str, str]):
        """A controller whose volumes all have these attributes."""
        from concurrent.futures import ThreadPoolExecutor

        classes = self.classes
        create = lambda asked, _: classes["Created"](volume={"volume_id": asked.name, "volume_context": attributes})  # noqa: E731
        empty = lambda _, __: classes["Empty"]()  # noqa: E731
        kinds = classes["Capabilities"](capabilities=[{"rpc": {"type": 1}}])
        rows = {
            "CreateVolume": (create, "CreateVolume"),
            "DeleteVolume": (empty, "Empty"),
            "ControllerGetCapabilities": (lambda _, __: kinds, "Empty"),
        }
        handlers = {
            name: self.grpc.unary_unary_rpc_method_handler(work, classes[asked].FromString, lambda answer: answer.SerializeToString())
            for name, (work, asked) in rows.items()
        }
        server = self.grpc.server(ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers([self.grpc.method_handlers_generic_handler("csi.v1.Controller", handlers)])
        server.add_insecure_port(address)
        server.start()
        return server

    def close(self) -> None:
        self.channel.close()
