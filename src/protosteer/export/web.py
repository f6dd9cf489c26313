"""Export a model as a static web page that predicts on the visitor's device: `export_web`.

The page runs the network by onnxruntime-web, on the graphics processor where the browser offers one, and scores as
`protosteer predict` does. It can be installed as an app, and works without a network after the first visit.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import os
import tarfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import protosteer
from protosteer.data.downloads import Remote, fetch
from protosteer.errors import DataError, ProtosteerError
from protosteer.export.onnx import checked_network, describe_model, export_folder, learned_arrays
from protosteer.learner import Learner
from protosteer.util.files import cache_dir, file_hash, replace_folder, replacing, writing

FORMAT = "protosteer-web-1"
RUNTIME = "onnxruntime-web"
VERSION = "1.30.0"
SHA512 = (
    "ab4cbe26baedba45d2cec05610c71c55fa97db92d19a8b171c5f8269126683ca"
    "590a5cdc57bb2f35ce2b298de32f4d956fb42644c0ecd528a0a91e025c07ca61"
)
REGISTRY = "https://registry.npmjs.org"
CDN = "https://cdn.jsdelivr.net"
# A browser loads one pair: WebGPU where there is a graphics processor, else the smaller one.
RUNTIME_FILES = (
    "ort.wasm.bundle.min.mjs",
    "ort-wasm-simd-threaded.wasm",
    "ort.webgpu.bundle.min.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)
PAGE_FILES = ("index.html", "app.js", "image.js", "model.js", "style.css", "icon.svg", "sw.js")
FILES = (*PAGE_FILES, *RUNTIME_FILES, "model.json", "arrays.bin", "embedding.onnx", "manifest.webmanifest", "README.md")
# Unit vectors and the like: single precision changes no answer, and these arrays grow with the classes.
_SINGLE = ("points", "whitened", "means")
_README = """\
# {title}: {classes} classes, exported by protosteer {version}

A static web page that recognises {classes} classes on the visitor's device. To try it:

    python -m http.server

Then open http://localhost:8000. To publish it, copy this folder to any static web host. With HTTPS the page can be
installed as an app, and works without a network after the first visit.

Other programs on the page can call `await protosteer.predict(blob)`.

The page runs {runtime} {runtime_version} (MIT licence, Copyright (c) Microsoft Corporation){place}.
"""


def export_web(
    learner: Learner,
    folder: Path,
    title: str,
    link: bool = False,
    on_message: Callable[[str], None] | None = None,
    option: str = "folder=",
) -> list[Path]:
    """Write the folder atomically; replace an earlier export, and reject anything else.

    Args:
        learner: The model.
        folder: The folder to write.
        title: The title of the page.
        link: Load onnxruntime-web from a CDN; else it is downloaded from npm, once, and put into the folder.
        on_message: Receives one line per step.
        option: How the caller names the folder, for the error about a folder that cannot be written.

    Raises:
        LearnerError: Nothing has been learned.
        ProtosteerError: The folder holds something else, or onnxruntime-web cannot be downloaded.
    """
    folder = export_folder(folder, FILES)
    arrays = _pad_prompts(learned_arrays(learner))
    runtime = {} if link else runtime_files(on_message or (lambda _: None))
    graph = checked_network(learner, arrays, on_message, compact=True)
    table, data = pack(arrays)
    place = f"{CDN}/npm/{RUNTIME}@{VERSION}/dist/" if link else "./"
    about = {**describe_model(learner), "format": FORMAT, "runtime": place, "arrays": table}
    contents = {
        "model.json": json.dumps(about, ensure_ascii=False, allow_nan=False).encode(),
        "arrays.bin": data,
        "embedding.onnx": graph,
        **runtime,
        "manifest.webmanifest": json.dumps(_manifest(title), ensure_ascii=False).encode(),
        "README.md": _README.format(
            title=title,
            classes=len(learner.classes),
            version=protosteer.__version__,
            runtime=RUNTIME,
            runtime_version=VERSION,
            place=f" from {CDN}" if link else "; its files begin with `ort`",
        ).encode(),
    }
    contents |= _page(contents, title, link)
    with writing(folder, option):
        replace_folder(folder, contents)
    return [folder / name for name in contents]


def runtime_files(say: Callable[[str], None]) -> dict[str, bytes]:
    """Return the files of onnxruntime-web that the page needs, from the cache or from npm's registry."""
    registry = os.environ.get("npm_config_registry") or REGISTRY  # noqa: SIM112 (npm's own name)
    remote = Remote(f"{RUNTIME}-{VERSION}.tgz", None, (f"{registry.rstrip('/')}/{RUNTIME}/-",))
    archive = cache_dir() / "npm" / remote.name
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with replacing(archive, math.inf):  # another process may be at it
            if not (archive.is_file() and file_hash(archive, "sha512") == SHA512):
                fetch(remote, archive.parent, say)
            if file_hash(archive, "sha512") != SHA512:
                archive.unlink()
                raise DataError(f"{remote.urls[0]} is not the file that is pinned", code="bad-checksum")
        with tarfile.open(archive) as package:
            members = {name: package.extractfile(f"package/dist/{name}") for name in RUNTIME_FILES}
            return {name: member.read() for name, member in members.items() if member}
    except (DataError, OSError) as error:
        message = (
            f"{error}; put the package {RUNTIME} {VERSION} of npm at {archive}, set npm_config_registry, "
            "or pass link=True"
        )
        raise ProtosteerError(message, code="download-failed", name=RUNTIME) from error


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """Join arrays in one little-endian file; return a table of type, shape and offset by name, and the file."""
    table: dict[str, Any] = {}
    parts: list[bytes] = []
    size = 0
    for name, array in arrays.items():
        kind = {"f": "f8" if array.dtype.itemsize == 8 else "f4", "i": "i4", "b": "u1"}[array.dtype.kind]
        if name.endswith(_SINGLE):
            kind = "f4"
        data = array.astype(f"<{kind}").tobytes()
        data += bytes(-len(data) % 8)
        table[name] = {"type": kind, "shape": list(array.shape), "offset": size}
        parts.append(data)
        size += len(data)
    return table, b"".join(parts)


def _pad_prompts(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Give prompts at least one slot, which nothing enters if there are none: WebGPU has no empty tensors."""
    if arrays["prompts"].shape[2]:
        return arrays
    widths = ((0, 0), (0, 0), (0, 1))
    return arrays | {
        "prompts": np.pad(arrays["prompts"], (*widths, (0, 0))),
        "enters": np.pad(arrays["enters"], widths),
    }


def _manifest(title: str) -> dict[str, Any]:
    return {
        "name": title,
        "short_name": title[:12],
        "start_url": "./",
        "display": "standalone",
        "background_color": "#f5f4f0",
        "theme_color": "#12696b",
        "icons": [{"src": "icon.svg", "sizes": "any", "type": "image/svg+xml", "purpose": "any maskable"}],
    }


def _page(contents: Mapping[str, bytes], title: str, link: bool) -> dict[str, bytes]:
    """Return the page's own files with the export's name, size and version filled in."""
    assets = resources.files("protosteer").joinpath("assets", "web")
    page = {name: assets.joinpath(name).read_bytes() for name in PAGE_FILES}
    size = sum(len(contents[name]) for name in ("model.json", "arrays.bin", "embedding.onnx"))
    size += sum(len(contents.get(name, b"")) for name in RUNTIME_FILES[:2])
    digest = hashlib.sha256()
    for name, data in {**contents, **page}.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    cache_names = ["./", *(name for name in PAGE_FILES if name not in ("index.html", "sw.js")), "manifest.webmanifest"]
    values = {
        "title": html.escape(title),
        "megabytes": str(math.ceil(size / 1e6)),
        "cdn": f" {CDN}" if link else "",
        "version": digest.hexdigest(),
        "files": json.dumps(cache_names),
    }
    for name in ("index.html", "sw.js"):
        text = page[name].decode()
        for key, value in values.items():
            text = text.replace("{{" + key + "}}", value)
        page[name] = text.encode()
    return page
