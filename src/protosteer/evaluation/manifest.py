"""The manifest of a run: what was run, on what data, with what weights, on what machine."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import protosteer
from protosteer.backbones import Backbone
from protosteer.backbones.precision import FP32
from protosteer.methods import METHODS, Method
from protosteer.settings import RETIRED, Values
from protosteer.streams import Stream, StreamOptions
from protosteer.util.distributed import process_group
from protosteer.util.files import file_hash
from protosteer.util.system import processor_name

FORMAT = 1
_PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "kornia", "pillow")


def configuration(method: type[Method], settings: Values, backbone: Backbone, stream: Stream) -> dict[str, Any]:
    """Describe all that determines the results except the seed; equal configurations are one experiment."""
    weights = {key: value for key, value in backbone.describe().items() if key != "source"}
    weights["precision"] = backbone.precision
    chosen = {key: value for key, value in settings.to_dict().items() if key != "seed"}
    found = {"stream": stream.about, "method": method.name, "settings": chosen, "backbone": weights}
    return found | _plugin(method)


def _plugin(method: type[Method]) -> dict[str, Any]:
    """Identify the file of a method from outside this package, which no commit of ours covers."""
    file = getattr(sys.modules.get(method.__module__), "__file__", None)
    if method.__module__.split(".")[0] == protosteer.__name__ or file is None:
        return {}
    return {"plugin": {"file": Path(file).name, "sha256": file_hash(Path(file), "sha256")}}


def upgraded(configuration: dict[str, Any]) -> dict[str, Any]:
    """Convert a configuration of an older version.

    Retired settings that had no effect are removed. Settings that came later get what the older version did, which is
    their default unless the method says otherwise; precision fp32.
    """
    settings = configuration.get("settings", {})
    kept = {name: v for name, v in settings.items() if name not in RETIRED or v != RETIRED[name]}
    method = METHODS.get(configuration.get("method", ""))
    values = {**method.preset("paper"), **method.older_settings} if method else {}
    defaults = method.settings_from(values).to_dict() if method else {}
    added = {name: v for name, v in defaults.items() if name not in kept and name != "seed"}
    stream = configuration.get("stream", {})
    options = {**StreamOptions().to_dict(), **stream.get("options", {})}
    backbone = {"precision": FP32, **configuration.get("backbone", {})}
    changed = {"stream": {**stream, "options": options}, "settings": {**kept, **added}, "backbone": backbone}
    return {**configuration, **changed}


def circumstances(device: torch.device) -> dict[str, Any]:
    """Describe what may change results in their last bits: versions, machine, threads."""
    return {
        "versions": {
            "protosteer": protosteer.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        "commit": commit(),
        "machine": {
            "system": platform.system(),
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        },
        "threads": torch.get_num_threads(),
        "processes": process_group().size,
    }


@functools.cache
def commit() -> dict[str, Any] | None:
    """Return the git commit of this package, and whether its files are as committed; None outside a checkout."""
    folder = Path(protosteer.__file__).resolve().parent
    try:
        if not _git(folder, "ls-files", "__init__.py"):  # an installed copy may lie in another checkout
            return None
        return {"hash": _git(folder, "rev-parse", "HEAD"), "clean": not _git(folder, "status", "-s", ".")}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """List the values that differ in two trees of plain data, such as `settings.epochs: 50 -> 15`."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in [*old, *(key for key in new if key not in old)]:
            place = f"{path}.{key}" if path else str(key)
            found += differences(old.get(key), new.get(key), place)
        return found
    if isinstance(old, list) and isinstance(new, list) and old and len(old) == len(new):
        return [line for i in range(len(old)) for line in differences(old[i], new[i], f"{path}[{i}]")]
    return [] if old == new else [f"{path}: {old!s:.60} -> {new!s:.60}"]
