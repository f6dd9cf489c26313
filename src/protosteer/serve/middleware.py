"""Check the host of every request, count and log it, and add security headers to every answer."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import logging
import re
import time
from collections.abc import Iterable
from urllib.parse import quote, unquote_to_bytes

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protosteer.serve.limits import RequestError
from protosteer.serve.metrics import Metrics

logger = logging.getLogger("protosteer.serve")

NAMED_MODEL = "/models/{model}"  # prefix of the routes of a model that is named
_METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
# For answers without a policy of their own: a browser that shows one as a page runs nothing.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(self), display-capture=(), geolocation=(), microphone=()",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def page_policy(page: bytes) -> str:
    """Return a content security policy that allows a page its own inline scripts and styles, and its own service."""

    def sources(tag: bytes) -> str:
        contents = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
        hashes = (base64.b64encode(hashlib.sha256(content).digest()).decode() for content in contents)
        return " ".join(f"'sha256-{value}'" for value in hashes)

    return (
        f"default-src 'none'; script-src {sources(b'script')}; style-src 'self' {sources(b'style')}; "
        "img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class HostCheck:
    """Reject requests for another host, and paths that are not UTF-8.

    A site that lets its name point at this machine (DNS rebinding) sends its own name in the header Host.
    IP addresses cannot be rebound, so all of them are accepted.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]):
        self.app = app
        self.names = {"localhost", *(name.lower().rstrip(".") for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a valid request on."""
        if scope["type"] == "http":
            try:
                self._check_host(scope)
                _check_path(scope)
            except RequestError as error:
                answer = JSONResponse({"detail": str(error)}, error.status, error.headers)
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        hosts = Headers(scope=scope).getlist("host")
        if not hosts and scope["http_version"] == "1.0":
            return
        if len(hosts) != 1:
            raise RequestError(400, f"the request has {len(hosts)} headers 'Host'; send one")
        name = re.sub(r":\d*$", "", hosts[0].lower()).rstrip(".")
        if name not in self.names and not _is_address(name):
            raise RequestError(
                421,
                f"unknown host name '{name}'; use the IP address, or start the server with host_names=['{name}']",
            )


def _is_address(name: str) -> bool:
    bracketed = name.startswith("[") and name.endswith("]")
    try:
        ipaddress.IPv6Address(name[1:-1]) if bracketed else ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True


def _check_path(scope: Scope) -> None:
    """Reject a path that is not UTF-8: two such names could decode to the same text."""
    try:
        unquote_to_bytes(scope.get("raw_path", b"")).decode()
    except UnicodeDecodeError:
        raise RequestError(400, "the address is not UTF-8; encode names as UTF-8, then with % signs") from None


class Observer:
    """Count, time and log requests; turn unexpected exceptions into answers; add security headers."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and record how it was answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], quote(scope["path"]))
            if status:
                raise
            detail = f"the service failed ({type(error).__name__}); its log says more"
            await JSONResponse({"detail": detail}, 500)(scope, receive, send_with_headers)
        finally:
            self._record(scope, status, time.perf_counter() - began)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = getattr(scope.get("route"), "path_format", "none")
        if "model" in scope.get("path_params", {}):  # newer versions of FastAPI name the route without its prefix
            route = NAMED_MODEL + route.removeprefix(NAMED_MODEL)
        service = scope.get("state", {}).get("service")  # set by the route
        self.metrics.request(service.name if service else "", method, route, status, seconds)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s %s %d %.1f ms", method, quote(scope["path"]), status, 1000 * seconds)
