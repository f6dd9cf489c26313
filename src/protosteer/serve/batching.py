"""Batch the images of many requests: one forward pass over many images is cheaper than many over one.

One thread empties one bounded queue. A request first reserves room for its images, so that a full queue is
noticed before anything is decoded. It then submits all its images at once and gets one future. Cancelling the
future removes the images, unless the model has started on them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from protosteer.serve.limits import RequestError, stopping_error

_MAX_WAIT = 0.003  # seconds that a small batch waits for images that are being decoded
_MIN_FILL = 0.25  # share of a batch from which it does not wait
_MAX_RETRY_AFTER = 60  # seconds

Row = dict[str, Any]  # the prediction for one image


@dataclass(eq=False)
class Ticket:
    """Images [3, h, w] of one request, and the future of their rows."""

    canvases: Sequence[Tensor]
    top: int
    answer: Future[list[Row]] = field(default_factory=Future)


class Batcher:
    """Collect images of many requests into batches, for `predict`: pixels [n, 3, h, w] and `top` to n rows."""

    def __init__(self, predict: Callable[[Tensor, int], list[Row]], capacity: int, batch: int):
        self._predict, self._capacity, self._batch = predict, capacity, batch
        self._changed = threading.Condition()
        self._tickets: deque[Ticket] = deque()
        self.length = 0  # images in the queue
        self._reserved = 0  # images with a reservation that are not in the queue yet
        self._seconds_per_image = 0.0
        self._thread: threading.Thread | None = None
        self._deadline = math.inf  # finite once `stop` was called

    @property
    def _stopping(self) -> bool:
        return self._deadline < math.inf

    def check_room(self, count: int = 1) -> None:
        """Raise `RequestError` 503 if `count` more images do not fit."""
        if self._stopping:
            raise stopping_error()
        load = self.length + self._reserved
        if load + count > self._capacity:
            seconds = math.ceil(load * self._seconds_per_image)
            message = f"queue full: {load} of {self._capacity} images are waiting; retry later"
            raise RequestError(503, message, retry_after=min(max(1, seconds), _MAX_RETRY_AFTER))

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve room for images that are submitted, or turn out bad, before the `with` block ends."""
        with self._changed:
            self.check_room(count)
            self._reserved += count
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= count
                self._changed.notify()

    def submit(self, canvases: Sequence[Tensor], top: int) -> Future[list[Row]]:
        """Enqueue images [3, h, w] that have a reservation; return the future of their rows."""
        ticket = Ticket(canvases, top)
        with self._changed:
            self._tickets.append(ticket)
            self.length += len(canvases)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="predict", daemon=True)
                self._thread.start()
            self._changed.notify()
        return ticket.answer

    def stop(self, within: float) -> None:
        """Accept nothing more; answer what is reserved for `within` seconds, then reject it. Return at once."""
        with self._changed:
            self._deadline = min(self._deadline, time.monotonic() + within)
            self._changed.notify()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Process one batch; return False at the end. Nothing refers to its images afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: self._tickets or (self._stopping and not self._reserved))
            if not self._tickets:
                return False
            if self._reserved and self.length < _MIN_FILL * self._batch:
                self._changed.wait_for(lambda: not self._reserved or self.length >= self._batch, _MAX_WAIT)
            tickets = self._next_batch()
        if tickets:
            began = time.monotonic()
            self._answer(tickets)
            seconds = (time.monotonic() - began) / sum(len(ticket.canvases) for ticket in tickets)
            self._seconds_per_image = 0.8 * self._seconds_per_image + 0.2 * seconds
        return True

    def _next_batch(self) -> list[Ticket]:
        """Remove whole tickets, up to a batch of images; empty if all were cancelled."""
        batch: list[Ticket] = []
        images = 0
        while self._tickets and (not batch or images + len(self._tickets[0].canvases) <= self._batch):
            ticket = self._tickets.popleft()
            self.length -= len(ticket.canvases)
            if ticket.answer.set_running_or_notify_cancel():
                batch.append(ticket)
                images += len(ticket.canvases)
        return batch

    def _answer(self, tickets: Sequence[Ticket]) -> None:
        try:
            if time.monotonic() >= self._deadline:
                raise stopping_error()
            pixels = torch.stack([canvas for ticket in tickets for canvas in ticket.canvases])
            rows = iter(self._predict(pixels, max(ticket.top for ticket in tickets)))
        except Exception as error:
            if len(tickets) == 1:
                tickets[0].answer.set_exception(error)
            else:
                for ticket in tickets:  # one request's images must not fail the others
                    self._answer([ticket])
        else:
            for ticket in tickets:
                ticket.answer.set_result(list(islice(rows, len(ticket.canvases))))
