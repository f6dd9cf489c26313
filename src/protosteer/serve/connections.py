"""Connections: how many there may be, how long each may take to ask or to read, how long its headers may be.

A connection waits until the headers of a request are there; then the request is the app's, which has limits of
its own; after the answer the connection waits again. One that waits does nothing for anybody: it has a time
limit that no drip of bytes prolongs, and where all places are taken it gives its own to whoever comes next.
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

from protosteer.serve.limits import Limits, Refused
from protosteer.util.system import most_open_files

_LINGER = 1.0  # seconds for a refused client to read why; what it still sends is not looked at


class Connection(HttpToolsProtocol):
    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits: Limits = config.app.state.service.limits
        self._unfinished = 0  # bytes since the parser last told of headers or of a piece of a body
        self._refusal: Refused | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._since = time.monotonic()  # when it last began to wait
        self.origin: str | None = None

    @property
    def waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.origin = _origin(self.client[0]) if self.client else None
        self._wait(self._limits.head_seconds)
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
        same = [one for one in others if one.origin == self.origin]
        full = not _make_room(others, _places(self._limits))
        if full or (self.origin and not _make_room(same, self._limits.connections_per_address)):
            self._tell(Refused(503, "too many connections are open; try again later", retry_after=1))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    # What arrives

    def data_received(self, data: bytes) -> None:
        """In pieces, so that a header is never longer than what is left of its limit."""
        most = self._limits.head_bytes
        while data and not self._refusal and not self.transport.is_closing():
            room = most - self._unfinished
            piece, data = data[:room], data[room:]
            self._unfinished += len(piece)
            super().data_received(piece)
            if self._unfinished >= most and not self._refusal:
                self._refuse(Refused(431, f"the headers are longer than {most:,} bytes; send fewer"))

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.line_bytes:
            self._refusal = Refused(
                414, f"the address is longer than {self._limits.line_bytes:,} bytes; shorten it"
            )
            raise self._refusal

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) + len(value) > self._limits.line_bytes:
            self._refusal = Refused(
                431, f"a header is longer than {self._limits.line_bytes:,} bytes; shorten it"
            )
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        super().on_headers_complete()
        if not self.flow.write_paused:  # who reads no answer gains no time by asking more
            self._stop_waiting()

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished = 0
        super().on_message_complete()

    # What is answered

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.waiting:  # else the next request is here already
            self._wait(self.timeout_keep_alive + self._limits.head_seconds)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._set_deadline(self._limits.answer_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.waiting:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """What the parser does not take: by our own limits, or because it is not HTTP."""
        self._refuse(self._refusal or Refused(400, "the request is not valid HTTP/1.1; send one that is"))

    # Time

    def timeout_keep_alive_handler(self) -> None:
        """Nothing more is taken; an answer that is still on its way may arrive."""
        self.transport.close()
        self._set_deadline(self._limits.answer_seconds, self.transport.abort)

    def _wait(self, seconds: float) -> None:
        self._since = time.monotonic()
        self._set_deadline(seconds, self._too_late)

    def _too_late(self) -> None:
        if self._unfinished:
            seconds = self._limits.head_seconds
            self._refuse(
                Refused(408, f"the headers took longer than {seconds:g} s to arrive; send them at once")
            )
        else:
            self.timeout_keep_alive_handler()

    def _stop_waiting(self) -> None:
        if self._deadline:
            self._deadline.cancel()

    def _set_deadline(self, seconds: float, then: Any) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(seconds, then)

    # Refusals

    def _refuse(self, refusal: Refused) -> None:
        self._refusal = refusal
        if self.cycle and not self.cycle.response_complete:  # the app is not to answer as well
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        self._unset_keepalive_if_required()
        self._tell(refusal)
        # Hanging up on a client that is still sending would take the answer away from it.
        self.transport.write_eof()
        self._set_deadline(_LINGER, self.transport.abort)

    def _tell(self, refusal: Refused) -> None:
        body = json.dumps({"detail": str(refusal)}).encode()
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **refusal.headers,
        }
        lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)


def _make_room(others: Sequence[Connection], most: float) -> bool:
    """Whether there is a place for one more; if need be, that of the one that has waited longest."""
    if len(others) < most:
        return True
    waiting = [one for one in others if one.waiting]
    if not waiting:
        return False
    min(waiting, key=lambda one: one._since).transport.abort()
    return True


def _places(limits: Limits) -> float:
    """Half of the files that the process may open, at most: uploads and models need some too."""
    return min(limits.connections, most_open_files() // 2)


def _origin(address: str) -> str | None:
    """Who counts as one client: an address, or the network that is one customer's in IPv6.

    On this machine it is nobody in particular: a proxy brings the clients of all the world.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.is_loopback:
        return None
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
    return str(parsed)
