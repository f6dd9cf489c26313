"""Around every request: it is counted, timed, maybe logged, answered with headers that keep pages safe."""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protosteer.serve.metrics import Metrics

logger = logging.getLogger("protosteer.serve")

_METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
_HEADERS = {
    # The page is one file with its own style and script; nothing comes from any other host.
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Observed:
    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.append(name, value)
            await send(message)

        try:
            await self.app(scope, receive, told)
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], quote(scope["path"]))
            if status:
                raise
            detail = f"the service failed ({type(error).__name__}); its log says more"
            await JSONResponse({"detail": detail}, 500)(scope, receive, told)
        finally:
            self._note(scope, status, time.perf_counter() - began)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path_format", "none")
        self.metrics.request(method, route, status, seconds)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s %s %d %.1f ms", method, quote(scope["path"]), status, 1000 * seconds)
