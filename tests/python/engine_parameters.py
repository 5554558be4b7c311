"""The parameters that vLLM and SGLang register for a quantized layer, by their own sources.

    python tests/python/engine_parameters.py VLLM SGLANG tests/python/engine_parameters.json

VLLM and SGLANG are unpacked wheels, `vllm-0.33.0` and `sglang-0.5.23`. Neither is imported: both need a GPU's libraries. `create_weights`
of a method is cut out of its file and run as it is written, with torch, with what it calls of the library's own files for parameters,
and with nothing in the place of kernels. A row is what a loader copies tensors of a repository into: name, dtype and shape.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import sys
import types
from pathlib import Path
from typing import Any, Callable

import torch
from compressed_tensors.quantization import QuantizationStrategy

# Sizes of the layers. Each partition of outputs is a multiple of 128, as blocks that are fused need.
HIDDEN, QUERY, KEY, INTER, EXPERTS, EXPERT_INTER = 256, 256, 128, 384, 4, 128

LINEAR = {
    "self_attn.qkv_proj": (HIDDEN, [QUERY, KEY, KEY]),
    "self_attn.o_proj": (QUERY, [HIDDEN]),
    "mlp.gate_up_proj": (HIDDEN, [INTER, INTER]),
    "mlp.down_proj": (INTER, [HIDDEN]),
}
"""Inputs and outputs of the linear layers of a model like Llama."""


class Nothing(type):
    """A class that has every member, and is what each call of it returns."""

    def __getattr__(cls, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})

    def __call__(cls, *_: object, **__: object) -> Nothing:
        return Nothing("result", (), {})

    def __bool__(cls) -> bool:
        return False


def nothing(name: str) -> Nothing:
    return Nothing.__new__(Nothing, name, (), {})


class Settings(types.SimpleNamespace):
    """`self` of a method: what it has no setting for is nothing."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)


class Layer(Settings):
    """Notes the parameters that are registered."""

    def __init__(self) -> None:
        super().__init__(tp_size=1)
        self.parameters_by_name: dict[str, torch.Tensor] = {}

    def register_parameter(self, name: str, parameter: Any) -> None:
        if isinstance(parameter, torch.Tensor):
            self.parameters_by_name[name] = parameter
            setattr(self, name, parameter)


class Parameter:
    """In the place of one of the library's classes of parameters, which add how ranks cut them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, data: torch.Tensor, **_: object) -> torch.Tensor:
        return data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parameter) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class WithoutImports(ast.NodeTransformer):
    """Names that a function imports are looked up as all others."""

    def visit_Import(self, _: ast.Import) -> ast.Pass:
        return ast.Pass()

    def visit_ImportFrom(self, _: ast.ImportFrom) -> ast.Pass:
        return ast.Pass()


GIVEN: dict[str, object] = {
    "torch": torch,
    "math": math,
    "QuantizationStrategy": QuantizationStrategy,
    "get_tensor_model_parallel_world_size": lambda: 1,
}
"""What is no part of a library's own files for parameters."""


class Library:
    """The sources of a library."""

    def __init__(self, root: Path, helpers: list[str]) -> None:
        self.root = root
        # What methods call besides kernels: definitions and constants of these files.
        self.helpers = [ast.parse((root / path).read_text()) for path in helpers]

    def top(self, name: str, tree: ast.Module) -> ast.stmt | None:
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return node
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
        return None

    def namespace(self, node: ast.AST, known: dict[str, object], file: ast.Module) -> dict[str, object]:
        """What names of a function mean."""
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - known.keys()
        for name in sorted(names - set(dir(builtins))):
            known[name] = nothing(name)
            found = next((top for tree in (file, *self.helpers) if (top := self.top(name, tree))), None)
            if name in GIVEN:
                known[name] = GIVEN[name]
            elif name.endswith("Parameter"):
                known[name] = Parameter(name)
            elif isinstance(found, (ast.FunctionDef, ast.Assign, ast.AnnAssign)):
                self.namespace(found, known, file)
                self.run(found, known)
        return known

    def run(self, node: ast.stmt, namespace: dict[str, object]) -> None:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            WithoutImports().visit(node)
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
        module = ast.fix_missing_locations(ast.Module([node], []))
        exec(compile(module, "<source>", "exec"), namespace)

    def method(self, path: str, of: str, name: str = "create_weights") -> Callable[..., None]:
        """A method of a class."""
        tree = ast.parse((self.root / path).read_text())
        found = self.top(of, tree)
        assert isinstance(found, ast.ClassDef), f"{path}: no class {of}"
        create = next(part for part in found.body if isinstance(part, ast.FunctionDef) and part.name == name)
        namespace = self.namespace(create, {}, tree)
        self.run(create, namespace)
        return namespace[name]


def rows(layer: Layer) -> dict[str, list]:
    return {name: [str(found.dtype).removeprefix("torch."), list(found.shape)] for name, found in layer.parameters_by_name.items()}


def linear(library: Library, path: str, of: str, settings: Settings) -> dict[str, dict[str, list]]:
    made = {}
    for name, (inputs, outputs) in LINEAR.items():
        layer = Layer()
        library.method(path, of)(
            settings, layer=layer, input_size_per_partition=inputs, output_partition_sizes=outputs, input_size=inputs,
            output_size=sum(outputs), params_dtype=torch.bfloat16, weight_loader=None,
        )  # fmt: skip
        made[name] = rows(layer)
    return made


def experts(library: Library, path: str, of: str, settings: Settings) -> dict[str, list]:
    layer = Layer()
    library.method(path, of)(
        settings, layer=layer, num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size_per_partition=EXPERT_INTER,
        params_dtype=torch.bfloat16, weight_loader=None, intermediate_size_full=EXPERT_INTER,
    )  # fmt: skip
    return rows(layer)


CT = "compressed_tensors/"
BLOCK = {"block_quant": True, "weight_block_size": [128, 128], "moe_block_shape": [128, 128]}
FP8 = {"is_static_input_scheme": False, "weight_block_size": None}
INT = {"symmetric": True, "use_batch_invariant": True, "_kernel_backends_being_used": set()}
TWO = types.SimpleNamespace(w13_num_shards=2, has_bias=False, is_act_and_mul=True)


def channel_or_tensor(strategy: str) -> dict:
    args = types.SimpleNamespace(strategy=QuantizationStrategy(strategy))
    return {**FP8, "strategy": QuantizationStrategy(strategy), "weight_quant": args, "static_input_scales": False, "moe": TWO}


def vllm(root: Path) -> dict:
    base = "vllm/model_executor/layers/quantization/"
    library = Library(root, [base + "utils/fp8_utils.py", base + "utils/w8a8_utils.py", base + "utils/mxfp8_utils.py",
                             base + CT + "utils.py"])  # fmt: skip
    # By scheme: the file, the class, what the method finds in `self`.
    of_linear = {
        "fp8-block": ("fp8.py", "Fp8LinearMethod", {**BLOCK, "act_q_static": False}),
        "fp8-channel": (CT + "schemes/compressed_tensors_w8a8_fp8.py", "CompressedTensorsW8A8Fp8", channel_or_tensor("channel")),
        "fp8-tensor": (CT + "schemes/compressed_tensors_w8a8_fp8.py", "CompressedTensorsW8A8Fp8", channel_or_tensor("tensor")),
        "mxfp8": (CT + "schemes/compressed_tensors_w8a8_mxfp8.py", "CompressedTensorsW8A8Mxfp8", {}),
        "mxfp4": (CT + "schemes/compressed_tensors_w4a4_mxfp4.py", "CompressedTensorsW4A4Mxfp4", {"group_size": 32}),
        "nvfp4": (CT + "schemes/compressed_tensors_w4a4_nvfp4.py", "CompressedTensorsW4A4Fp4", {"group_size": 16, "use_a16": True}),
        "int8-channel": (CT + "schemes/compressed_tensors_wNa16.py", "CompressedTensorsWNA16",
                         {**INT, "num_bits": 8, "group_size": -1, "pack_factor": 4, "strategy": "channel"}),
        "int4-g32": (CT + "schemes/compressed_tensors_wNa16.py", "CompressedTensorsWNA16",
                     {**INT, "num_bits": 4, "group_size": 32, "pack_factor": 8, "strategy": "group"}),
    }  # fmt: skip
    moe = CT + "compressed_tensors_moe/compressed_tensors_moe_"
    of_experts = {
        "fp8-block": ("fp8.py", "Fp8MoEMethod", {**BLOCK, "moe": TWO, "weight_scale_refine": None, "weight_scale_name": "weight_scale_inv"}),
        "fp8-channel": (moe + "w8a8_fp8.py", "CompressedTensorsW8A8Fp8MoEMethod", channel_or_tensor("channel")),
        "fp8-tensor": (moe + "w8a8_fp8.py", "CompressedTensorsW8A8Fp8MoEMethod", channel_or_tensor("tensor")),
        "mxfp8": (moe + "w8a8_mxfp8.py", "CompressedTensorsW8A8Mxfp8MoEMethod", {"moe": TWO}),
        "mxfp4": (moe + "w4a4_mxfp4.py", "CompressedTensorsW4A4Mxfp4MoEMethod", {"moe": TWO, "group_size": 32}),
        "nvfp4": (moe + "w4a4_nvfp4.py", "CompressedTensorsW4A4Nvfp4MoEMethod", {"moe": TWO, "group_size": 16}),
        "nvfp4:modelopt": ("modelopt.py", "ModelOptNvFp4FusedMoE", {
            "moe": TWO, "quant_config": types.SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)}),
    }  # fmt: skip
    return {
        "linear": {scheme: linear(library, base + path, of, Settings(**found)) for scheme, (path, of, found) in of_linear.items()},
        "experts": {scheme: experts(library, base + path, of, Settings(**found)) for scheme, (path, of, found) in of_experts.items()},
    }


def sglang(root: Path) -> dict:
    base = "sglang/srt/layers/quantization/"
    library = Library(root, [base + "fp8_utils.py", base + "utils.py", base + "compressed_tensors/utils.py", base + "modelopt_quant.py"])

    def block(size: list[int]) -> types.SimpleNamespace:
        return types.SimpleNamespace(weight_block_size=size, activation_scheme="dynamic")

    def fp8(size: list[int], use_mxfp8: bool) -> dict[str, dict[str, list]]:
        method, made = library.method(base + "fp8.py", "Fp8LinearMethod", "create_fp8_weight_"), {}
        for name, (inputs, outputs) in LINEAR.items():
            layer = Layer()
            method(
                layer, block_quant=True, quant_config=block(size), use_mxfp8=use_mxfp8, output_size_per_partition=sum(outputs),
                input_size_per_partition=inputs, output_partition_sizes=outputs, input_size=inputs, output_size=sum(outputs),
                params_dtype=torch.bfloat16, weight_loader=None, is_checkpoint_fp8_serialized=True,
            )  # fmt: skip
            made[name] = rows(layer)
        return made

    fp4 = types.SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16)
    of_linear = {
        "fp8-channel": ("compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py", "CompressedTensorsW8A8Fp8", channel_or_tensor("channel")),
        "fp8-tensor": ("compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py", "CompressedTensorsW8A8Fp8", channel_or_tensor("tensor")),
        "nvfp4:modelopt": ("modelopt_quant.py", "ModelOptNvFp4A16LinearMethod", {"quant_config": fp4}),
        "nvfp4": ("compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py", "CompressedTensorsW4A16Fp4", {"group_size": 16}),
        "int8-channel": ("compressed_tensors/schemes/compressed_tensors_wNa16.py", "CompressedTensorsWNA16",
                         {**INT, "num_bits": 8, "group_size": -1, "pack_factor": 4, "strategy": "channel"}),
        "int4-g32": ("compressed_tensors/schemes/compressed_tensors_wNa16.py", "CompressedTensorsWNA16",
                     {**INT, "num_bits": 4, "group_size": 32, "pack_factor": 8, "strategy": "group"}),
    }  # fmt: skip
    made = {scheme: linear(library, base + path, of, Settings(**found)) for scheme, (path, of, found) in of_linear.items()}
    return {"linear": {"fp8-block": fp8([128, 128], False), "mxfp8:sglang": fp8([1, 32], True), **made}, "experts": {}}


if __name__ == "__main__":
    made = {"vllm 0.33.0": vllm(Path(sys.argv[1])), "sglang 0.5.23": sglang(Path(sys.argv[2]))}
    lines = [f'"{engine}": {{' + ",\n".join(f'\n "{kind}": {{' + ",".join(f'\n  "{scheme}": {json.dumps(table)}'
             for scheme, table in all_of.items()) + "\n }" for kind, all_of in kinds.items()) + "\n}" for engine, kinds in made.items()]  # fmt: skip
    Path(sys.argv[3]).write_text("{" + ",\n".join(lines) + "}\n")
