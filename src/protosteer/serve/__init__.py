"""HTTP service and web UI. `create_app` and `run` are in `protosteer.serve.app`.

A request passes through the modules in this order: `connections` (bytes to a request, within `limits`),
`middleware` (host name, headers, metrics), `routes`, `registry` (which of several models), `service`, `uploads`
(bytes to pixels), `batching` (pixels of many requests in one forward pass), `served_model` (an immutable model).
Changes go through `model_store`, which writes the model file before any request sees them, and `training_jobs`,
which trains prompts in the background. `page/` holds the web UI.
"""

from __future__ import annotations

from importlib.util import find_spec

from protosteer.errors import ProtosteerError


class MissingExtraError(ProtosteerError, ImportError):
    """The service's own dependencies are not installed."""


_absentees = [name for name in ("fastapi", "uvicorn", "httptools", "python_multipart") if find_spec(name) is None]
if _absentees:
    raise MissingExtraError(f"the service needs {', '.join(_absentees)}: pip install 'protosteer[serve]'")
