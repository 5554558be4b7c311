"""Makes src/plan/library/tensor_parallel.toml from transformers' own tensor-parallel plans.

Each configuration class of transformers may hold a `base_model_tp_plan`: how the modules of its model are split. This script
writes those plans by model type, with the modules grouped in blocks: a block is what must be cut as a whole.

    tensor_parallel.py           writes the file
    tensor_parallel.py --check   compares it, and exits with 1 if it differs

The table of families beside this script compares with it what the program makes of each model type.
"""

import functools
import re
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "src/plan/library/tensor_parallel.toml"

# Styles that cut a weight, in the order of the file. The others leave it whole.
STYLES = (
    "colwise",
    "rowwise",
    "packed_colwise",
    "packed_rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "embedding_colwise",
    "replicate",
)
# Of these, each side needs the other.
COLUMNS, ROWS = {"colwise", "packed_colwise"}, {"rowwise"}
# Fused experts that are stored with their inputs first.
TRANSPOSED = ({"packed_rowwise"}, {"colwise"})


@functools.cache
def plans():
    """The plan of each model type that has one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = {}
    for model_type in CONFIG_MAPPING.keys():
        plan = getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None)
        if plan:
            found[model_type] = dict(plan)
    return found


def is_closed(styles):
    """Whether a block has both sides, or neither."""
    one, other = (TRANSPOSED if "packed_rowwise" in styles else (COLUMNS, ROWS))
    return bool(styles & one) == bool(styles & other)


def blocks(plan):
    """The blocks of a layer by their module, and what is outside the layers. Each holds module names by style."""
    layer, top = {}, {}
    for key, style in plan.items():
        if style not in STYLES:
            continue
        words = key.split(".")
        if "*" not in words:
            top.setdefault(style, []).append(key)
            continue
        *root, leaf = words[words.index("*") + 1 :]
        layer.setdefault(".".join(root), []).append((leaf, style))
    merged = {}
    while layer:
        # The innermost module first. A side without the other belongs to the module around it.
        root = max(layer, key=lambda root: (root.count(".") if root else -1, root))
        leaves = list(dict.fromkeys(layer.pop(root)))
        outer, _, inner = root.rpartition(".")
        if is_closed({style for _, style in leaves}) or not outer:
            merged[root] = leaves
        else:
            layer.setdefault(outer, []).extend((f"{inner}.{leaf}", style) for leaf, style in leaves)
    # An outermost module with one side only: the other is in a module within it.
    for root in [root for root in merged if not is_closed({style for _, style in merged[root]})]:
        for inner in [inner for inner in merged if inner.startswith(root + ".")]:
            merged[root] += [(f"{inner.removeprefix(root + '.')}.{leaf}", style) for leaf, style in merged.pop(inner)]
        assert is_closed({style for _, style in merged[root]}), (root, merged[root])
    merged = dict(sorted(merged.items()))
    by_style = {root: {} for root in merged}
    for root, leaves in merged.items():
        for leaf, style in leaves:
            by_style[root].setdefault(style, []).append(leaf)
    return by_style, top


def rows(styles):
    def names(style):
        return ", ".join(f'"{name}"' for name in styles[style])

    return ", ".join(f"{style} = [{names(style)}]" for style in STYLES if style in styles)


def text():
    """The file."""
    import transformers

    alike = {}
    for model_type, plan in sorted(plans().items()):
        layer, top = blocks(plan)
        lines = [f'"{root}" = {{ {rows(styles)} }}' for root, styles in layer.items()]
        body = (tuple(lines), rows(top))
        if lines or top:
            alike.setdefault(body, []).append(model_type)
    out = [
        f"# How transformers {transformers.__version__} splits the modules of its models for tensor parallelism, by model type: the class",
        "# attribute base_model_tp_plan of each configuration. Made by tests/families/tensor_parallel.py, which also compares it.",
        "# The modules of a layer are grouped in blocks: a block is cut as a whole or not at all.",
    ]
    for (lines, top), model_types in sorted(alike.items(), key=lambda item: item[1]):
        out += ["", "[[plan]]", "model_types = ["]
        out += [f'  "{model_type}",' for model_type in model_types]
        out.append("]")
        if top:
            out.append(f"top = {{ {top} }}")
        if lines:
            out += ["[plan.layer]", *lines]
    return "\n".join(out) + "\n"


# First words within a layer that are one block together.
TOGETHER = {"fc1", "fc2", "intermediate", "output", "ffn", "ffn_output"}


def starred(name):
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def block_of(name):
    *path, _ = name.split(".")
    if "*" not in path:
        return None
    if "experts" in path:
        at = path.index("experts") + 1
        return ".".join(path[: at + (path[at : at + 1] == ["*"])])
    at = path.index("*") + 1
    # A matrix of the layer itself is of one block with its like.
    word = path[at] if at < len(path) else ""
    is_own = at + 1 >= len(path) or word in TOGETHER
    return ".".join([*path[:at], "mlp" if is_own else word])


def wrong_cuts(tensors, plan):
    """What is wrong with the cuts of a repository's tensors, as `plan --json` shows them over one axis."""
    found = {}
    for tensor in tensors:
        axis = next((at for at, mesh in enumerate(tensor["spec"]) if mesh), None)
        found[starred(tensor["name"])] = (axis, len(tensor["shape"]))
    of_whole = re.compile("gather|split|embed")
    gathered = [re.escape(key).replace(r"\*", r"[^.]+") for key, style in plan.items() if of_whole.search(style)]
    sides, alone = {}, {}
    for name, (axis, rank) in found.items():
        block, stem = block_of(name), name.removesuffix(".weight")
        if block is None or rank != 2 or axis is None or name.endswith("bias"):
            continue
        is_alone = any(re.search(rf"(^|\.){key}$", stem) for key in gathered)
        (alone if is_alone else sides).setdefault(block, set()).add(axis)
    for block, axes in sides.items():
        # A module that needs no other may be the other side. Another part of the model may have one of its name.
        if len(axes | alone.get(block, set())) == 1:
            yield f"{block}: only axis {axes.pop()} is cut"
    axes_of = {"colwise": 0, "rowwise": 1, "colwise_gather_output": 0, "rowwise_split_input": 1, "embedding_rowwise": 0}
    for key, style in plan.items():
        wanted = axes_of.get(style)
        hits = [name for name in found if starred(name).removesuffix(".weight").endswith("." + key)]
        for name in hits:
            axis, rank = found[name]
            if wanted is None or rank != 2 or axis == wanted:
                continue
            block = block_of(name)
            beside = [other for other in found if block_of(other) == block]
            cut = [other for other in beside if found[other][1] == 2 and found[other][0] is not None]
            if axis is not None or (cut and block is not None):
                yield f"{name}: {style}, cut along {axis}, beside {cut}"


def plan_of(config):
    """The plan for a `config.json`: those of the model types in it."""
    known = plans()
    found = dict(known.get(config["model_type"], {}))
    for part in config.values():
        if isinstance(part, dict):
            found |= known.get(part.get("model_type"), {})
    return found


def main():
    made = text()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if made == TABLE.read_text() else f"{TABLE} is not what this version of transformers says")
    TABLE.write_text(made)


if __name__ == "__main__":
    main()
