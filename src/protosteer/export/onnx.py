"""Export a model for programs that have neither protosteer nor torch: `export_onnx`.

The folder holds the frozen ViT as an ONNX graph, prototypes and prompts as plain arrays, labels and
preprocessing as JSON, and a program that predicts by the model's rule. Before anything is written the graph is
run and compared with the ViT itself.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Collection
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import protosteer
from protosteer.backbones import Backbone
from protosteer.errors import LearnerError, ProtosteerError
from protosteer.learner import Learner
from protosteer.paper.vit import shared_layers
from protosteer.util.files import replace_folder, writing
from protosteer.workflows import ood

FORMATS = {"paper": "protosteer-onnx-3", "evidence": "protosteer-onnx-5"}
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2)  # of known images that are rejected; a threshold is written for each
FILES = ("embedding.onnx", "prototypes.npz", "model.json", "predict.py", "README.md")
_TOLERANCE = 1e-3
_CHECKED_PROMPTS = 8  # at most

_README = """\
# {classes} classes, exported by protosteer {version}

    pip install onnxruntime pillow
    python predict.py IMAGE...

`predict.py` needs onnxruntime, numpy (which comes with it) and Pillow, which reads the image files. It prints
one line per image: file, label, probability, similarity, and `unknown` if the model can tell.

| file | contents |
|---|---|
| `embedding.onnx` | the frozen network {net.name}; its prompts are inputs, its weights are inside |
| `prototypes.npz` | {arrays}; `numpy.load(..., allow_pickle=False)` |
| `model.json` | labels, tasks, preprocessing, {numbers}, thresholds for unknown images |

Inputs of the network: `images` [batch, 3, {net.image_size}, {net.image_size}], normalised;
`prompts` [batch, {net.depth}, length, {net.dim}]; `enters` [batch, {net.depth}, length],
true where a prompt token comes into a layer. No prompt: length 0, or false everywhere.
"""
_CONTENTS = {
    "paper": {"arrays": "key and value centroids, prompts", "numbers": "neighbours, temperature"},
    "evidence": {
        "arrays": "class means and prototypes in each layer, value centroids, prompts",
        "numbers": "weights of layers, when an image needs further passes",
    },
}


def export_onnx(
    learner: Learner, folder: Path, on_message: Callable[[str], None] | None = None, option: str = "folder="
) -> list[Path]:
    """Write the folder atomically; replace an earlier export, and reject anything else.

    `option` is how the caller names the folder, for the error about a folder that cannot be written.
    """
    folder = export_folder(folder, FILES)
    arrays = learned_arrays(learner)
    graph = checked_network(learner, arrays, on_message)
    program = resources.files("protosteer").joinpath("assets", "onnx_predict.py")
    class_count, version = len(learner.classes), protosteer.__version__
    texts = _CONTENTS[learner.reader.rule]
    readme = _README.format(classes=class_count, version=version, net=learner.backbone, **texts)
    prototypes = io.BytesIO()
    np.savez(prototypes, allow_pickle=False, **arrays)
    contents = {
        "embedding.onnx": graph,
        "prototypes.npz": prototypes.getvalue(),
        "model.json": json.dumps(describe_model(learner), indent=2, ensure_ascii=False).encode() + b"\n",
        "predict.py": program.read_bytes(),
        "README.md": readme.encode(),
    }
    with writing(folder, option):
        replace_folder(folder, contents)
    return [folder / name for name in contents]


def checked_network(
    learner: Learner,
    arrays: dict[str, np.ndarray],
    on_message: Callable[[str], None] | None = None,
    compact: bool = False,
) -> bytes:
    """Return the network of a model as an ONNX file, after a comparison with the ViT itself; see `network`."""
    try:
        import onnxruntime  # noqa: F401

        from protosteer.export.onnx_graph import network
    except ImportError as error:
        message = f"exporting needs packages that are not here ({error}); pip install 'protosteer[onnx]'"
        raise ProtosteerError(message, code="missing-extra", extra="onnx") from error
    backbone = learner.backbone.reading(learner.reader.layers)
    graph = network(backbone, compact)
    difference = _check(graph, backbone, arrays)
    if on_message:
        name = learner.backbone.name
        on_message(f"embedding.onnx computes what {name} does (greatest difference {difference:.0e})")
    return graph


def learned_arrays(learner: Learner) -> dict[str, np.ndarray]:
    """Return the arrays of `predict.py` by name; row 0 of the prompts is no prompt, equal prompts share a row."""
    if not learner.classes:
        raise LearnerError("nothing has been learned yet; there is nothing to export", code="nothing-learned")
    index = learner.reader.index
    rows, distinct = _prompt_rows(learner)
    prompts, enters = slots(distinct, learner.backbone.depth, learner.backbone.dim)
    return {
        **learner.reader.export().arrays,
        "values": index.values.numpy(),
        "value_records": index.value_records.numpy(),
        "record_classes": index.record_classes.numpy(),
        "record_tasks": index.record_tasks.numpy(),
        "task_prompts": np.array(rows[: len(index.tasks)], dtype=np.int64) * index.prompted.numpy(),
        "prompts": prompts,
        "enters": enters,
    }


def _prompt_rows(learner: Learner) -> tuple[list[int], list[Tensor]]:
    """Return the row in the export of each prompt of the index, and the prompts from row 1 on."""
    places: dict[tuple[torch.Size, bytes], int] = {}
    rows, distinct = list[int](), list[Tensor]()
    for prompt in learner.reader.index.prompts:
        row = 0
        if prompt is not None:
            row = places.setdefault((prompt.shape, prompt.contiguous().numpy().tobytes()), 1 + len(places))
            if row > len(distinct):
                distinct.append(prompt)
        rows.append(row)
    return rows, distinct


def slots(prompts: list[Tensor], depth: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Lay prompts [S, L, D] of any shapes into `prompts` [1 + P, depth, L, D] and `enters`; row 0 is for none."""
    longest = max((prompt.shape[1] for prompt in prompts), default=0)
    tokens = np.zeros((1 + len(prompts), depth, longest, dim), dtype=np.float32)
    enters = np.zeros(tokens.shape[:3], dtype=bool)
    for row, prompt in enumerate(prompts, start=1):
        layers, length = prompt.shape[:2]
        start = shared_layers(prompt, depth)
        block = (row, slice(start, start + layers), slice(length))
        tokens[block] = prompt.numpy()
        enters[block] = True
    return tokens, enters


def describe_model(learner: Learner) -> dict[str, Any]:
    """Return labels, tasks, preprocessing and the numbers of the rule, as plain data for JSON."""
    backbone, fractions = learner.backbone, FRACTIONS if ood.is_calibrated(learner) else ()
    rows, _ = _prompt_rows(learner)
    header = learner.reader.export().header
    for view in header.get("views", []):
        view["prompt"] = 0 if view["prompt"] is None else rows[view["prompt"]]
    return {
        "format": FORMATS[learner.reader.rule],
        "protosteer": protosteer.__version__,
        "backbone": {"name": backbone.name, "fingerprint": backbone.fingerprint},
        "preprocessing": {**backbone.preprocessing.to_dict(), "canvas": backbone.preprocessing.canvas},
        "rule": learner.reader.rule,
        **header,
        "thresholds": {str(f): limit for f in fractions if (limit := ood.threshold(learner, f)) > -math.inf},
        "own_thresholds": ood.class_thresholds(learner),
        "tasks": learner.tasks,
        "labels": learner.classes,
    }


def _check(graph: bytes, backbone: Backbone, arrays: dict[str, np.ndarray]) -> float:
    """Return the greatest difference between normalised embeddings of graph and ViT, on noise, prompt by prompt."""
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    rows = np.unique(np.linspace(0, len(arrays["prompts"]) - 1, _CHECKED_PROMPTS).round().astype(int))
    size, generator = backbone.image_size, torch.Generator().manual_seed(0)
    images = torch.randn(len(rows), 3, size, size, generator=generator)
    prompts, enters = arrays["prompts"][rows], arrays["enters"][rows]
    feed = {"images": images.numpy(), "prompts": prompts, "enters": enters}
    ours = []
    for image, tokens, entry_mask in zip(images, prompts, enters, strict=True):
        tokens_in_use = tokens[entry_mask.any(axis=1)][:, entry_mask.any(axis=0)]
        prompt = torch.from_numpy(tokens_in_use).to(backbone.device) if tokens_in_use.size else None
        with torch.no_grad():
            ours.append(backbone.embed(image[None], prompt).float().cpu())
    pair = (torch.cat(ours), torch.from_numpy(session.run(None, feed)[0]))
    ours_units, graph_units = (F.normalize(embedding.unflatten(1, (-1, backbone.dim)), dim=2) for embedding in pair)
    difference = float((graph_units - ours_units).abs().max())
    if not difference <= _TOLERANCE:
        raise ProtosteerError(
            f"onnxruntime {onnxruntime.__version__} computes other embeddings than {backbone.name} "
            f"(difference {difference:.1e}), so nothing was written; try another version of onnxruntime",
            code="onnx-mismatch",
        )
    return difference


def export_folder(folder: Path, names: Collection[str]) -> Path:
    """Return a folder's real path; reject a folder that is not an earlier export, or holds other files too."""
    folder = Path(os.path.realpath(folder))
    entries = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    fault = None
    if folder.exists() and not folder.is_dir():
        fault = "is a file; name a folder that does not exist yet"
    elif folder == Path.cwd():
        fault = "is the folder you are in; name one inside it, such as exported"
    elif entries and not _is_export(folder):
        fault = "is not empty and not an earlier export; name another folder"
    elif strays := entries - {*names, "__pycache__"}:
        fault = f"is an earlier export but holds {min(strays)} too; move that away, or name another folder"
    if fault:
        raise ProtosteerError(f"{folder} {fault}", code="cannot-write", path=folder)
    return folder


def _is_export(folder: Path) -> bool:
    try:
        about = json.loads((folder / "model.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(about, dict) and str(about.get("format", "")).startswith(("protosteer-onnx-", "protosteer-web-"))
