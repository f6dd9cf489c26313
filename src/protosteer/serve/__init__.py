"""The HTTP service and its page. `create_app` and `run` are in `protosteer.serve.app`.

A request goes through the files in this order: `connections` (bytes to a request, within `limits`),
`middleware` (whom it names), `routes`, `models` (which of several models), `service`, `uploads` (bytes to pixels, within `limits`),
`batching` (pixels of many requests in one call of the model), `snapshot` (what is served at one moment).
Changes go through `store`, which writes the model file before anybody sees them, and `jobs`, which trains
prompts in the background. `page/` has what browsers are given; scripts are put into their page at the start.
"""

from __future__ import annotations

from importlib.util import find_spec

from protosteer.errors import ProtosteerError


class MissingExtra(ProtosteerError, ImportError):
    """The service's own dependencies are not installed."""


_missing = [
    name for name in ("fastapi", "uvicorn", "httptools", "python_multipart") if find_spec(name) is None
]
if _missing:
    raise MissingExtra(f"the service needs {', '.join(_missing)}: pip install 'protosteer[serve]'")
