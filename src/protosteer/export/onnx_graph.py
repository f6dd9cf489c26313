"""A frozen ViT as an ONNX graph whose prompts are inputs: `network`.

One graph serves every prompt. Each layer has L *slots* beside its tokens; `enters` [B, S, L] says where a
prompt token comes in:

- In layer i a slot takes `prompts[:, i]` where `enters[:, i]` is true, and keeps what the layer before left
  there elsewhere. Nothing attends to a slot into which nothing has come yet.
- Deep prompt: true in all of its layers. Late prompt: false in the layers before. Shallow: true in layer 1.
- No prompt: false everywhere, or L = 0. So images with prompts of different shapes may share a batch.

The graph is put together here, operator by operator, rather than traced: torch's exporters take up to half a
minute for a small ViT, need onnxscript or are deprecated, and make a batch of fixed size out of one `len()`
without saying so.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import protosteer
from protosteer.backbones import Backbone
from protosteer.backbones.layer_features import FeatureSpace, feature_spaces
from protosteer.errors import WeightsError
from protosteer.paper.vit import Attention, Block, LayerScale, Mlp, PatchEmbed, ViT, is_changed

_OPSET, _IR = 17, 8  # the oldest that have layer normalisation: runtimes since 2022 read the file
_MAX_BYTES = 2**31 - 2**20  # a protobuf message has less than 2 GiB
# The layers whose weights are written; the operators of any other layer are unknown.
_WRITTEN = (
    ViT, PatchEmbed, Block, Attention, Mlp, LayerScale,
    nn.Conv2d, nn.Identity, nn.LayerNorm, nn.Linear, nn.ModuleList,
)  # fmt: skip


def network(backbone: Backbone, compact: bool = False) -> bytes:
    """Build the graph `images`, `prompts`, `enters` -> `embeddings`; return the bytes of its file.

    compact: Store matrices in half precision if that changes no number, as for weights that came so; the network
        computes in single precision all the same.
    """
    if 4 * backbone.parameters > _MAX_BYTES:
        raise WeightsError(
            f"{backbone.name} has {backbone.parameters:,} parameters, more than the 2 GiB that one ONNX file "
            "can hold; export a model with a smaller backbone",
            code="weights-too-large",
        )
    for name, module in backbone.vit.named_modules():
        if type(module) not in _WRITTEN or is_changed(module):
            raise WeightsError(
                f"{backbone.name}: {name} is not the ViT's own layer (LoRA, adapter or hook); merge what it does into the "
                "weights, then export",
                code="changed-backbone",
                layer=name,
            )
    graph, config = _Graph(compact), backbone.vit.config
    _forward(graph, backbone.vit, backbone.layers)
    size = config.image_size
    slots: list[str | int | None] = ["batch", config.depth, "length"]
    inputs = [
        helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, size, size]),
        helper.make_tensor_value_info("prompts", TensorProto.FLOAT, [*slots, config.dim]),
        helper.make_tensor_value_info("enters", TensorProto.BOOL, slots),
    ]
    outputs = [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["batch", backbone.width])]
    model = helper.make_model(
        helper.make_graph(graph.nodes, backbone.name, inputs, outputs, list(graph.constants.values())),
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR,
        producer_name="protosteer",
        producer_version=protosteer.__version__,
    )
    helper.set_model_props(model, {"backbone": backbone.name, "fingerprint": backbone.fingerprint})
    return model.SerializeToString()


class _Graph:
    """An ONNX graph under construction; values are identified by their names."""

    def __init__(self, compact: bool = False) -> None:
        self.compact = compact
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def constant(self, value: Tensor | np.ndarray | list[int] | float, name: str | None = None) -> str:
        """Add numbers to the file; integers are shapes and places, 64 bits wide."""
        array = value.detach().float().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        name = name or f"constant.{array.dtype}.{array.tolist()}"
        if self.compact and array.ndim > 1 and array.dtype == np.float32 and name not in self.constants:
            with np.errstate(over="ignore"):
                half = array.astype(np.float16)
            if np.array_equal(half, array):
                half_name = f"{name}.half"
                self.constants[half_name] = numpy_helper.from_array(half, half_name)
                return self.op("Cast", half_name, to=TensorProto.FLOAT)
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def op(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
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
        """Return x[start:end] along an axis."""
        stop = np.iinfo(np.int64).max if end is None else end
        return self.op("Slice", x, *(self.constant([number]) for number in (start, stop, axis)))

    def take(self, x: str, place: int, axis: int) -> str:
        """Return x[place] along an axis, which is removed."""
        return self.op("Gather", x, self.constant(np.array(place)), axis=axis)

    def reshape(self, x: str, *shape: int) -> str:
        """Reshape x; 0 keeps a length, -1 infers it."""
        return self.op("Reshape", x, self.constant(list(shape)))

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.op("Unsqueeze", x, self.constant(list(axes)))


def _forward(graph: _Graph, vit: ViT, layers: str) -> None:
    """Add the operators of `ViT.forward`, or of `layer_features` if layers are "several", with slots for prompts."""
    config = vit.config
    spaces = feature_spaces(config)[1:] if layers == "several" else ()
    features_by_space: dict[FeatureSpace, str] = {}
    layer_norm = torch.nn.LayerNorm(config.dim)
    tokens, count = _embed_patches(graph, vit), 1 + config.registers + config.patches
    # Added to the similarities of a layer's queries and keys: 0 for tokens, which are first, and used slots.
    entries = graph.op("Cast", "enters", to=TensorProto.FLOAT)
    entry_counts = graph.op("CumSum", entries, graph.constant(np.array(1)))
    is_visible = graph.op("Greater", entry_counts, graph.constant(0.0))
    slot_biases = graph.op("Where", is_visible, graph.constant(0.0), graph.constant(-math.inf))
    biases = graph.op("Pad", slot_biases, graph.constant([0, 0, count, 0, 0, 0]))  # [B, S, count + L]
    slots = graph.constant(0.0)
    for i, block in enumerate(vit.blocks):
        assert isinstance(block, Block)
        mask = graph.unsqueeze(graph.take("enters", i, 1), 2)
        slots = graph.op("Where", mask, graph.take("prompts", i, 1), slots)
        x = graph.op("Concat", tokens, slots, axis=1)
        bias = graph.unsqueeze(graph.take(biases, i, 1), 1, 2)
        is_final = i == config.depth - 1 and config.pool == "token"  # nothing but the class token is asked for
        x = _block(graph, block, f"blocks.{i}", x, bias, queries=1 if is_final else None)
        tokens, slots = graph.cut(x, 0, count), graph.cut(x, count, None)
        for space in (space for space in spaces if space.layer == i + 1):
            token = _pool(graph, tokens, count - config.patches, space.pool)
            features_by_space[space] = graph.norm(token, layer_norm, "layers")
    norm = (vit.norm, "norm") if config.pool == "token" else (vit.fc_norm, "fc_norm")
    features = graph.norm(_pool(graph, tokens, count - config.patches, config.pool), *norm)
    graph.op("Concat", features, *(features_by_space[space] for space in spaces), output="embeddings", axis=1)


def _pool(graph: _Graph, tokens: str, patches: int, pool: str) -> str:
    """Add the class token, or the mean of the tokens from `patches` on: [B, D]."""
    if pool == "token":
        return graph.take(tokens, 0, 1)
    return graph.op("ReduceMean", graph.cut(tokens, patches, None), axes=[1], keepdims=0)


def _embed_patches(graph: _Graph, vit: ViT) -> str:
    """Add `ViT.embed_patches`: class token, registers and patches, [B, N, D]."""
    config, conv = vit.config, vit.patch_embed.proj
    prefix: Tensor = vit.cls_token
    positions: Tensor = vit.pos_embed
    if config.position_for_class:
        prefix, positions = prefix + positions[:, :1], positions[:, 1:]
    if config.registers:
        prefix = torch.cat([prefix, vit.reg_token], dim=1)
    weights = (graph.constant(getattr(conv, part), f"patch_embed.{part}") for part in ("weight", "bias"))
    size = config.patch_size
    patches = graph.op("Conv", "images", *weights, kernel_shape=[size, size], strides=[size, size])
    patches = graph.op("Transpose", graph.reshape(patches, 0, config.dim, -1), perm=[0, 2, 1])
    patches = graph.op("Add", patches, graph.constant(positions, "positions"))
    batch = graph.op("Shape", "images", start=0, end=1)
    shape = graph.op("Concat", batch, graph.constant([1, 1]), axis=0)
    return graph.op("Concat", graph.op("Expand", graph.constant(prefix, "first"), shape), patches, axis=1)


def _block(graph: _Graph, block: Block, name: str, x: str, bias: str, queries: int | None) -> str:
    """Add `Block.forward`, for x [B, N, D] whose prompts are already among the tokens."""
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
    x = graph.op("Add", x, _scale(graph, out, block.ls1, f"{name}.ls1"))
    out = graph.norm(x, block.norm2, f"{name}.norm2")
    out = graph.linear(out, block.mlp.fc1.weight, block.mlp.fc1.bias, f"{name}.mlp.fc1")
    out = graph.linear(_gelu(graph, out), block.mlp.fc2.weight, block.mlp.fc2.bias, f"{name}.mlp.fc2")
    return graph.op("Add", x, _scale(graph, out, block.ls2, f"{name}.ls2"))


def _scale(graph: _Graph, x: str, scale: torch.nn.Module, name: str) -> str:
    gamma = getattr(scale, "gamma", None)
    return x if gamma is None else graph.op("Mul", x, graph.constant(gamma, f"{name}.gamma"))


def _gelu(graph: _Graph, x: str) -> str:
    """Build x (1 + erf(x / sqrt 2)) / 2."""
    error = graph.op("Erf", graph.op("Div", x, graph.constant(math.sqrt(2))))
    product = graph.op("Mul", x, graph.op("Add", error, graph.constant(1.0)))
    return graph.op("Mul", product, graph.constant(0.5))
