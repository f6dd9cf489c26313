"""A model for programs that have neither protosteer nor torch: `export_onnx`.

The folder holds the frozen ViT as an ONNX graph whose prompts are inputs, the prototypes as plain arrays, labels and
preprocessing as JSON, and a runnable example. One graph serves every prompt. Each layer has L *slots* beside its
tokens; `enters` [B, S, L] says where a prompt token comes in:

- In layer i a slot takes `prompts[:, i]` where `enters[:, i]` is true, and keeps what the layer before left there
  elsewhere. Nothing attends to a slot into which nothing has come yet.
- Deep prompt: true in all of its layers. Late prompt: false in the layers before. Shallow: true in layer 1 alone.
- No prompt: false everywhere, or L = 0. So images with prompts of different shapes may share a batch.

The graph is put together here, operator by operator, rather than traced: torch's exporters take up to half a minute
for a small ViT, need onnxscript or are deprecated, and make a batch of fixed size out of one `len()` without saying so.
Before anything is written it is run and compared with the ViT itself.
"""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import protosteer
from protosteer.backbones import Backbone
from protosteer.errors import LearnerError, ProtosteerError, WeightsError
from protosteer.learner import Learner
from protosteer.method.vit import Block, ViT
from protosteer.photos import rejection
from protosteer.util.files import write_atomically, writing

FORMAT = "protosteer-onnx-1"
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2)  # of known images that are rejected; a threshold is written for each
_OPSET, _IR = 17, 8  # the oldest that have layer normalisation: runtimes since 2022 read the file
_MOST_BYTES = 2**31 - 2**20  # a protobuf message has less than 2 GiB
_TOLERANCE = 1e-3

_README = """\
# {classes} classes, exported by protosteer {version}

    pip install onnxruntime pillow
    python predict.py IMAGE...

`predict.py` needs onnxruntime, numpy (which comes with it) and Pillow, which reads the image files. It prints one line
per image: file, label, probability, similarity, and `unknown` if the model can tell.

| file | contents |
|---|---|
| `embedding.onnx` | the frozen network {backbone}; its prompts are inputs, its weights are inside |
| `prototypes.npz` | key and value centroids, prompts; `numpy.load(..., allow_pickle=False)` |
| `model.json` | labels, tasks, preprocessing, neighbours, temperature, thresholds for unknown images |

Inputs of the network: `images` [batch, 3, {size}, {size}], normalised; `prompts` [batch, {depth}, length, {dim}];
`enters` [batch, {depth}, length], true where a prompt token comes into a layer. No prompt: length 0, or false everywhere.
"""


def export_onnx(
    learner: Learner, folder: Path, on_message: Callable[[str], None] | None = None
) -> list[Path]:
    """Write the folder, whole or not at all; an earlier export there is replaced, anything else is refused."""
    _require_packages()
    if not learner.classes:
        raise LearnerError("nothing has been learned yet; there is nothing to export")
    folder = Path(os.path.realpath(folder))
    _check_place(folder)
    say = on_message or (lambda message: None)
    arrays = _arrays(learner)
    network = _network(learner.backbone)
    difference = _check(network, learner.backbone, arrays)
    say(f"embedding.onnx computes what {learner.backbone.name} does (greatest difference {difference:.0e})")
    template = resources.files("protosteer").joinpath("assets", "onnx_predict.py")
    contents = {
        "embedding.onnx": network,
        "prototypes.npz": _npz(arrays),
        "model.json": json.dumps(_about(learner), indent=2, ensure_ascii=False).encode() + b"\n",
        "predict.py": template.read_bytes(),
        "README.md": _readme(learner).encode(),
    }
    with writing(folder, "folder="):
        _replace_folder(folder, contents)
    return [folder / name for name in contents]


# What is written


def _arrays(learner: Learner) -> dict[str, np.ndarray]:
    """All that `predict.py` matches with; row 0 of the prompts is no prompt, equal prompts are one row."""
    index, tasks = learner.index, learner.memory.tasks
    owners = sorted({t for t in index.prompt_owners.tolist() if tasks[t].prompt is not None})
    rows = {owner: row for row, owner in enumerate(owners, start=1)}
    task_prompts = [rows.get(owner, 0) for owner in index.prompt_owners.tolist()]
    distinct = [prompt for prompt in (tasks[t].prompt for t in owners) if prompt is not None]
    prompts, enters = _slots(distinct, learner.backbone.depth, learner.backbone.dim)
    return {
        "keys": _numpy(index.keys),
        "key_tasks": index.key_tasks.numpy(),
        "values": _numpy(index.values),
        "value_classes": index.value_classes.numpy(),
        "class_tasks": index.class_tasks.numpy(),
        "task_prompts": np.array(task_prompts, dtype=np.int64),
        "prompts": prompts,
        "enters": enters,
    }


def _slots(prompts: list[Tensor], depth: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [S, L, D] of any shapes -> `prompts` [1 + P, depth, longest, D] and `enters`, row 0 for none."""
    longest = max((prompt.shape[1] for prompt in prompts), default=0)
    tokens = np.zeros((1 + len(prompts), depth, longest, dim), dtype=np.float32)
    enters = np.zeros(tokens.shape[:3], dtype=bool)
    for row, prompt in enumerate(prompts, start=1):
        layers, length = prompt.shape[:2]
        first = 0 if layers == 1 else depth - layers
        here = (row, slice(first, first + layers), slice(length))
        tokens[here] = _numpy(prompt)
        enters[here] = True
    return tokens, enters


def _about(learner: Learner) -> dict[str, Any]:
    backbone, memory = learner.backbone, learner.memory
    thresholds = {str(f): rejection.threshold(memory, f) for f in FRACTIONS if rejection.calibrated(memory)}
    return {
        "format": FORMAT,
        "protosteer": protosteer.__version__,
        "backbone": {"name": backbone.name, "fingerprint": backbone.fingerprint},
        "preprocessing": {**backbone.preprocessing.to_dict(), "canvas": backbone.preprocessing.canvas},
        "neighbours": learner.settings.neighbours,
        "temperature": learner.settings.temperature,
        "thresholds": thresholds,
        "own_thresholds": rejection.own_thresholds(memory),
        "tasks": learner.tasks,
        "labels": learner.classes,
    }


def _readme(learner: Learner) -> str:
    backbone = learner.backbone
    return _README.format(
        classes=len(learner.classes),
        version=protosteer.__version__,
        backbone=backbone.name,
        size=backbone.image_size,
        depth=backbone.depth,
        dim=backbone.dim,
    )


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().contiguous().numpy()


# The network


class _Graph:
    """An ONNX graph in the making; values are known by their names."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def constant(self, value: Tensor | np.ndarray | list[int] | float, name: str | None = None) -> str:
        """A number that is part of the file; integers are shapes and places, 64 bits wide."""
        from onnx import numpy_helper

        array = _numpy(value) if isinstance(value, Tensor) else np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        name = name or f"constant.{array.dtype}.{array.tolist()}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def op(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        from onnx import helper

        output = output or f"{kind}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def linear(self, x: str, weight: Tensor, bias: Tensor | None, name: str) -> str:
        product = self.op("MatMul", x, self.constant(weight.T, f"{name}.weight"))
        return product if bias is None else self.op("Add", product, self.constant(bias, f"{name}.bias"))

    def norm(self, x: str, norm: torch.nn.LayerNorm, name: str, output: str | None = None) -> str:
        scale, bias = (self.constant(getattr(norm, part), f"{name}.{part}") for part in ("weight", "bias"))
        return self.op("LayerNormalization", x, scale, bias, output=output, axis=-1, epsilon=norm.eps)

    def cut(self, x: str, start: int, end: int | None, axis: int = 1) -> str:
        """x[start:end] along an axis."""
        last = np.iinfo(np.int64).max if end is None else end
        return self.op("Slice", x, *(self.constant([number]) for number in (start, last, axis)))

    def take(self, x: str, place: int, axis: int) -> str:
        """x[place] along an axis, which goes away."""
        return self.op("Gather", x, self.constant(np.array(place)), axis=axis)

    def reshape(self, x: str, *shape: int) -> str:
        """0 keeps a length, -1 stands for what is left."""
        return self.op("Reshape", x, self.constant(list(shape)))

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.op("Unsqueeze", x, self.constant(list(axes)))


def _network(backbone: Backbone) -> bytes:
    """The contents of embedding.onnx."""
    from onnx import TensorProto, helper

    if 4 * backbone.parameters > _MOST_BYTES:
        raise WeightsError(
            f"{backbone.name} has {backbone.parameters:,} parameters, more than the 2 GiB that one ONNX file "
            "can hold; export a model with a smaller backbone"
        )
    graph, config = _Graph(), backbone.vit.config
    _forward(graph, backbone.vit)
    size = config.image_size
    slots: list[str | int | None] = ["batch", config.depth, "length"]
    inputs = [
        helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, size, size]),
        helper.make_tensor_value_info("prompts", TensorProto.FLOAT, [*slots, config.dim]),
        helper.make_tensor_value_info("enters", TensorProto.BOOL, slots),
    ]
    outputs = [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["batch", config.dim])]
    model = helper.make_model(
        helper.make_graph(graph.nodes, backbone.name, inputs, outputs, list(graph.constants.values())),
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR,
        producer_name="protosteer",
        producer_version=protosteer.__version__,
    )
    helper.set_model_props(model, {"backbone": backbone.name, "fingerprint": backbone.fingerprint})
    return model.SerializeToString()


def _forward(graph: _Graph, vit: ViT) -> None:
    """What `ViT.forward` computes, with slots for prompts."""
    from onnx import TensorProto

    config = vit.config
    tokens, count = _embed_patches(graph, vit), 1 + config.registers + config.patches
    # Added to the similarities of a layer's queries and keys: 0 for tokens, which stand first, and slots in use.
    entered = graph.op(
        "CumSum", graph.op("Cast", "enters", to=TensorProto.FLOAT), graph.constant(np.array(1))
    )
    seen = graph.op("Greater", entered, graph.constant(0.0))
    hidden = graph.op("Where", seen, graph.constant(0.0), graph.constant(-math.inf))
    biases = graph.op("Pad", hidden, graph.constant([0, 0, count, 0, 0, 0]))  # [B, S, count + L]
    slots = graph.constant(0.0)
    for i, block in enumerate(vit.blocks):
        assert isinstance(block, Block)
        entering = graph.unsqueeze(graph.take("enters", i, 1), 2)
        slots = graph.op("Where", entering, graph.take("prompts", i, 1), slots)
        x = graph.op("Concat", tokens, slots, axis=1)
        bias = graph.unsqueeze(graph.take(biases, i, 1), 1, 2)
        alone = i == config.depth - 1 and config.pool == "token"  # nothing but the class token is asked for
        x = _block(graph, block, f"blocks.{i}", x, bias, queries=1 if alone else None)
        tokens, slots = graph.cut(x, 0, count), graph.cut(x, count, None)
    if config.pool == "token":
        graph.norm(graph.take(tokens, 0, 1), vit.norm, "norm", "embeddings")
    else:
        patches = graph.cut(tokens, count - config.patches, None)
        mean = graph.op("ReduceMean", patches, axes=[1], keepdims=0)
        graph.norm(mean, vit.fc_norm, "fc_norm", "embeddings")


def _embed_patches(graph: _Graph, vit: ViT) -> str:
    """As `ViT.embed_patches`: class token, registers and patches, [B, N, D]."""
    config, conv = vit.config, vit.patch_embed.proj
    first: Tensor = vit.cls_token
    positions: Tensor = vit.pos_embed
    if config.position_for_class:
        first, positions = first + positions[:, :1], positions[:, 1:]
    if config.registers:
        first = torch.cat([first, vit.reg_token], dim=1)
    weights = (graph.constant(getattr(conv, part), f"patch_embed.{part}") for part in ("weight", "bias"))
    size = config.patch_size
    patches = graph.op("Conv", "images", *weights, kernel_shape=[size, size], strides=[size, size])
    patches = graph.op("Transpose", graph.reshape(patches, 0, config.dim, -1), perm=[0, 2, 1])
    patches = graph.op("Add", patches, graph.constant(positions, "positions"))
    batch = graph.op("Shape", "images", start=0, end=1)
    shape = graph.op("Concat", batch, graph.constant([1, 1]), axis=0)
    return graph.op("Concat", graph.op("Expand", graph.constant(first, "first"), shape), patches, axis=1)


def _block(graph: _Graph, block: Block, name: str, x: str, bias: str, queries: int | None) -> str:
    """As `Block.forward`, for x [B, N, D] whose prompts are already among the tokens."""
    attention = block.attn
    dim = attention.proj.in_features
    joint = graph.norm(x, block.norm1, f"{name}.norm1")
    joint = graph.linear(joint, attention.qkv.weight, attention.qkv.bias, f"{name}.attn.qkv")
    joint = graph.reshape(joint, 0, 0, 3, attention.heads, dim // attention.heads)
    joint = graph.op("Transpose", joint, perm=[2, 0, 3, 1, 4])
    q, k, v = (graph.take(joint, part, 0) for part in range(3))  # [B, heads, N, D / heads]
    if queries is not None:
        q, x = graph.cut(q, 0, queries, axis=2), graph.cut(x, 0, queries)
    q = graph.op("Mul", q, graph.constant((dim // attention.heads) ** -0.5))
    similarity = graph.op("MatMul", q, graph.op("Transpose", k, perm=[0, 1, 3, 2]))
    weights = graph.op("Softmax", graph.op("Add", similarity, bias), axis=-1)
    out = graph.op("Transpose", graph.op("MatMul", weights, v), perm=[0, 2, 1, 3])
    out = graph.reshape(out, 0, 0, dim)
    out = graph.linear(out, attention.proj.weight, attention.proj.bias, f"{name}.attn.proj")
    x = graph.op("Add", x, _scaled(graph, out, block.ls1, f"{name}.ls1"))
    out = graph.norm(x, block.norm2, f"{name}.norm2")
    out = graph.linear(out, block.mlp.fc1.weight, block.mlp.fc1.bias, f"{name}.mlp.fc1")
    out = graph.linear(_gelu(graph, out), block.mlp.fc2.weight, block.mlp.fc2.bias, f"{name}.mlp.fc2")
    return graph.op("Add", x, _scaled(graph, out, block.ls2, f"{name}.ls2"))


def _scaled(graph: _Graph, x: str, scale: torch.nn.Module, name: str) -> str:
    gamma = getattr(scale, "gamma", None)
    return x if gamma is None else graph.op("Mul", x, graph.constant(gamma, f"{name}.gamma"))


def _gelu(graph: _Graph, x: str) -> str:
    """x (1 + erf(x / sqrt 2)) / 2."""
    error = graph.op("Erf", graph.op("Div", x, graph.constant(math.sqrt(2))))
    product = graph.op("Mul", x, graph.op("Add", error, graph.constant(1.0)))
    return graph.op("Mul", product, graph.constant(0.5))


def _check(network: bytes, backbone: Backbone, arrays: dict[str, np.ndarray], most: int = 8) -> float:
    """The greatest difference between normalised embeddings of the graph and of the ViT, on noise, prompt by prompt."""
    import onnxruntime

    session = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"])
    rows = np.unique(np.linspace(0, len(arrays["prompts"]) - 1, most).round().astype(int))
    generator = torch.Generator().manual_seed(0)
    size = backbone.image_size
    images = torch.randn(len(rows), 3, size, size, generator=generator)
    prompts, enters = arrays["prompts"][rows], arrays["enters"][rows]
    feed = {"images": images.numpy(), "prompts": prompts, "enters": enters}
    ours = []
    for image, tokens, entering in zip(images, prompts, enters, strict=True):
        used = tokens[entering.any(axis=1)][:, entering.any(axis=0)]
        prompt = torch.from_numpy(used).to(backbone.device) if used.size else None
        with torch.no_grad():
            ours.append(backbone.vit(image[None].to(backbone.device), prompt).float().cpu())
    theirs = torch.from_numpy(session.run(None, feed)[0])
    difference = float((F.normalize(theirs, dim=1) - F.normalize(torch.cat(ours), dim=1)).abs().max())
    if not difference <= _TOLERANCE:
        raise ProtosteerError(
            f"onnxruntime {onnxruntime.__version__} computes other embeddings than {backbone.name} (difference "
            f"{difference:.1e}), so nothing was written; try another version of onnxruntime"
        )
    return difference


def _require_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise ProtosteerError(
            f"exporting needs packages that are not here ({error}); pip install 'protosteer[onnx]'"
        ) from error


# The folder


def _check_place(folder: Path) -> None:
    """Refuse to replace what is not an earlier export, or holds more than that."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ProtosteerError(f"{folder} is a file; name a folder that does not exist yet")
    if folder == Path.cwd():
        raise ProtosteerError(f"{folder} is the folder you are in; name one inside it, such as exported")
    found = {path.name for path in folder.iterdir()}
    ours = {"embedding.onnx", "prototypes.npz", "model.json", "predict.py", "README.md", "__pycache__"}
    if found and not _is_export(folder):
        raise ProtosteerError(f"{folder} is not empty and not an earlier export; name another folder")
    if found - ours:
        raise ProtosteerError(
            f"{folder} is an earlier export but holds {min(found - ours)} too; move that away, or name another folder"
        )


def _is_export(folder: Path) -> bool:
    try:
        about = json.loads((folder / "model.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and str(about.get("format", "")).startswith("protosteer-onnx-")


def _replace_folder(folder: Path, contents: dict[str, bytes]) -> None:
    """Build a folder beside the wanted one and rename it: there is the old one or the new one, never a mixture."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    new, old = beside.with_suffix(beside.suffix + ".tmp"), beside.with_suffix(beside.suffix + ".old")
    try:
        new.mkdir()
        for name, data in contents.items():
            write_atomically(new / name, data)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
