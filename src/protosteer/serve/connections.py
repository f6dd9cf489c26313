"""Limit the number of connections, the time to send headers or read an answer, and the length of headers.

A connection is idle until the headers of a request are complete; then the application's limits apply; after the
answer it is idle again. An idle connection has a deadline that single bytes do not extend, and is closed if a new
connection needs its slot.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from protosteer.serve.limits import Limits, RequestError
from protosteer.util.system import max_open_files

_LINGER = 1.0  # seconds for a rejected client to read the reason; what it still sends is ignored


class Connection(HttpToolsProtocol):
    """Apply `Limits` to one connection: count its bytes, its time and its neighbours."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits: Limits = config.app.state.service.limits
        self._unparsed = 0  # bytes since the parser last reported headers or a piece of a body
        self._rejection: RequestError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._idle_since = time.monotonic()
        self.origin: str | None = None

    @property
    def is_idle(self) -> bool:
        """Return True if no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or answer 503 and close it."""
        super().connection_made(transport)
        self.origin = _origin(self.client[0]) if self.client else None
        self._wait(self._limits.head_seconds)
        neighbours = [c for c in self.connections if isinstance(c, Connection) and c is not self]
        siblings = [connection for connection in neighbours if connection.origin == self.origin]
        is_full = not _make_room(neighbours, _slots(self._limits))
        if is_full or (self.origin and not _make_room(siblings, self._limits.connections_per_address)):
            self._send_error(RequestError(503, "too many connections are open; try again later", retry_after=1))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse in pieces, so that no header grows beyond its limit."""
        limit = self._limits.head_bytes
        while data and not self._rejection and not self.transport.is_closing():
            room = limit - self._unparsed
            piece, data = data[:room], data[room:]
            self._unparsed += len(piece)
            super().data_received(piece)
            if self._unparsed >= limit and not self._rejection:
                self._reject(RequestError(431, f"the headers are longer than {limit:,} bytes; send fewer"))

    def on_url(self, url: bytes) -> None:
        """Reject an address that is too long."""
        super().on_url(url)
        self._check_line(414, "the address", len(self.url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Reject a header that is too long."""
        self._check_line(431, "a header", len(name) + len(value))
        super().on_header(name, value)

    def _check_line(self, status: int, part: str, length: int) -> None:
        if length > (limit := self._limits.line_bytes):
            self._rejection = RequestError(status, f"{part} is longer than {limit:,} bytes; shorten it")
            raise self._rejection

    def on_headers_complete(self) -> None:
        """End the wait for headers."""
        self._unparsed = 0
        super().on_headers_complete()
        if not self.flow.write_paused:  # a client that reads no answer gains no time by asking more
            self._stop_waiting()

    def on_body(self, body: bytes) -> None:
        """Count a piece of the body as progress."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Count the end of a request as progress."""
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if self.is_idle:  # else the next request has arrived already
            self._wait(self.timeout_keep_alive + self._limits.head_seconds)

    def pause_writing(self) -> None:
        """Set a deadline: the client does not read its answer."""
        super().pause_writing()
        self._set_deadline(self._limits.answer_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Lift the deadline: the client reads again."""
        super().resume_writing()
        if not self.is_idle:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Reject a request that the parser does not accept: beyond our limits, or not HTTP."""
        self._reject(self._rejection or RequestError(400, "the request is not valid HTTP/1.1; send one that is"))

    def timeout_keep_alive_handler(self) -> None:
        """Accept nothing more; let an answer that is being sent arrive."""
        self.transport.close()
        self._set_deadline(self._limits.answer_seconds, self.transport.abort)

    def _wait(self, seconds: float) -> None:
        self._idle_since = time.monotonic()
        self._set_deadline(seconds, self._time_out)

    def _time_out(self) -> None:
        if self._unparsed:
            seconds = self._limits.head_seconds
            self._reject(RequestError(408, f"the headers took longer than {seconds:g} s to arrive; send them at once"))
        else:
            self.timeout_keep_alive_handler()

    def _stop_waiting(self) -> None:
        if self._deadline:
            self._deadline.cancel()

    def _set_deadline(self, seconds: float, action: Any) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(seconds, action)

    def _reject(self, rejection: RequestError) -> None:
        self._rejection = rejection
        if self.cycle and not self.cycle.response_complete:  # the application must not answer too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        self._unset_keepalive_if_required()
        self._send_error(rejection)
        # A client that is still sending would lose the answer if the connection was closed now.
        self.transport.write_eof()
        self._set_deadline(_LINGER, self.transport.abort)

    def _send_error(self, rejection: RequestError) -> None:
        body = json.dumps({"detail": str(rejection)}).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        headers |= rejection.headers
        lines = [f"HTTP/1.1 {rejection.status} {HTTPStatus(rejection.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)


def _make_room(neighbours: Sequence[Connection], slots: float) -> bool:
    """Return True if there is a slot for one more connection; if needed, close the one idle for longest."""
    if len(neighbours) < slots:
        return True
    idle_connections = [connection for connection in neighbours if connection.is_idle]
    if not idle_connections:
        return False
    min(idle_connections, key=lambda connection: connection._idle_since).transport.abort()
    return True


def _slots(limits: Limits) -> float:
    """Return the number of connections: at most half of the files that the process may open."""
    return min(limits.connections, max_open_files() // 2)


def _origin(address: str) -> str | None:
    """Return the identity of a client: its address, or its /64 network in IPv6.

    None for this machine, where a proxy forwards the requests of many clients.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.is_loopback:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(ip), 64), strict=False))
    return str(ip)
