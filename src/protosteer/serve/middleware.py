"""Around every request: whom it names, how it is counted, timed, maybe logged; headers that keep browsers safe."""

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

from protosteer.serve.limits import Refused
from protosteer.serve.metrics import Metrics

logger = logging.getLogger("protosteer.serve")

_METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
# For answers that bring no policy of their own: a browser that is shown one as a page does nothing with it.
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
    """What a page of ours may do: run the script and apply the style that stand in it, and ask its own service."""

    def sources(tag: bytes) -> str:
        found = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(own).digest()).decode()}'" for own in found
        )

    return (
        f"default-src 'none'; script-src {sources(b'script')}; style-src 'self' {sources(b'style')}; "
        "img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Named:
    """Takes requests that name this service, and paths that are text.

    A site whose name begins to point at this machine (DNS rebinding) has its own name in the header Host.
    Addresses cannot be turned in this way, so that all of them are taken.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]):
        self.app = app
        self.names = {"localhost", *(name.lower().rstrip(".") for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check_host(scope)
                _check_path(scope)
            except Refused as refused:
                answer = JSONResponse({"detail": str(refused)}, refused.status, refused.headers)
                await answer(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        given = Headers(scope=scope).getlist("host")
        if not given and scope["http_version"] == "1.0":
            return
        if len(given) != 1:
            raise Refused(400, f"the request has {len(given)} headers 'Host'; send one")
        name = re.sub(r":\d*$", "", given[0].lower()).rstrip(".")
        if name not in self.names and not _is_address(name):
            raise Refused(
                421,
                f"this service does not know itself as '{name}'; ask for it by its address, "
                f"or start it with host_names=['{name}']",
            )


def _is_address(name: str) -> bool:
    bracketed = name.startswith("[") and name.endswith("]")
    try:
        ipaddress.IPv6Address(name[1:-1]) if bracketed else ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True


def _check_path(scope: Scope) -> None:
    """Else two names that are not text would become the same one."""
    try:
        unquote_to_bytes(scope.get("raw_path", b"")).decode()
    except UnicodeDecodeError:
        raise Refused(400, "the address is not UTF-8; encode names as UTF-8, then with % signs") from None


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
                    headers.setdefault(name, value)
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
        model = scope.get("state", {}).get("model", "")  # known to the route alone
        self.metrics.request(model, method, route, status, seconds)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s %s %d %.1f ms", method, quote(scope["path"]), status, 1000 * seconds)
