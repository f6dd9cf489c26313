"""Images of many requests go through the model together: one pass over many is cheaper than many over one.

There is one bounded queue and one thread that empties it. A request first reserves room for its images, so
that a full queue is noticed before anything is decoded. It then hands over all its images at once and gets
one future. Cancelling the future takes the images out again if the model has not begun with them.
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

from protosteer.serve.limits import Refused, stopping

# Seconds that a small batch waits for images that are being decoded at this moment.
_PATIENCE = 0.003
# A batch that is so full is not worth a wait.
_FULL_ENOUGH = 0.25
_LONGEST_RETRY = 60

Row = dict[str, Any]  # what is said of one image


@dataclass(eq=False)
class Ticket:
    """The images of one request, and where their rows will be found."""

    canvases: Sequence[Tensor]
    top: int
    answer: Future[list[Row]] = field(default_factory=Future)


class Batcher:
    """`predict(pixels [n, 3, h, w], top)` gives n rows."""

    def __init__(self, predict: Callable[[Tensor, int], list[Row]], capacity: int, batch: int):
        self._predict = predict
        self._capacity = capacity
        self._batch = batch
        self._changed = threading.Condition()
        self._tickets: deque[Ticket] = deque()
        self.length = 0  # images in the queue
        self._coming = 0  # images with a reservation that are not yet in the queue
        self._seconds_per_image = 0.0
        self._thread: threading.Thread | None = None
        self._deadline = math.inf  # when to give up; finite from `stop` on

    @property
    def _stopping(self) -> bool:
        return self._deadline < math.inf

    def check_room(self, count: int = 1) -> None:
        if self._stopping:
            raise stopping()
        waiting = self.length + self._coming
        if waiting + count > self._capacity:
            seconds = math.ceil(waiting * self._seconds_per_image)
            raise Refused(
                503,
                f"{waiting} images are waiting and {self._capacity} may; try again later",
                retry_after=min(max(1, seconds), _LONGEST_RETRY),
            )

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Room in the queue for images to come; at the end of the `with` block they are in it, or bad."""
        with self._changed:
            self.check_room(count)
            self._coming += count
        try:
            yield
        finally:
            with self._changed:
                self._coming -= count
                self._changed.notify()

    def submit(self, canvases: Sequence[Tensor], top: int) -> Future[list[Row]]:
        """Enter images that have a reservation."""
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
        """Take nothing more, answer what is reserved for so many seconds, then refuse it. Returns at once."""
        with self._changed:
            self._deadline = min(self._deadline, time.monotonic() + within)
            self._changed.notify()

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """One batch, if there is more to come; nothing refers to its images when this returns."""
        with self._changed:
            self._changed.wait_for(lambda: self._tickets or (self._stopping and not self._coming))
            if not self._tickets:
                return False
            if self._coming and self.length < _FULL_ENOUGH * self._batch:
                self._changed.wait_for(lambda: not self._coming or self.length >= self._batch, _PATIENCE)
            tickets = self._take()
        if tickets:
            began = time.monotonic()
            self._answer(tickets)
            latest = (time.monotonic() - began) / sum(len(ticket.canvases) for ticket in tickets)
            self._seconds_per_image = 0.8 * self._seconds_per_image + 0.2 * latest
        return True

    def _take(self) -> list[Ticket]:
        """Whole tickets, up to a batch of images; none if all were cancelled."""
        taken: list[Ticket] = []
        images = 0
        while self._tickets and (not taken or images + len(self._tickets[0].canvases) <= self._batch):
            ticket = self._tickets.popleft()
            self.length -= len(ticket.canvases)
            if ticket.answer.set_running_or_notify_cancel():
                taken.append(ticket)
                images += len(ticket.canvases)
        return taken

    def _answer(self, tickets: Sequence[Ticket]) -> None:
        try:
            if time.monotonic() >= self._deadline:
                raise stopping()
            pixels = torch.stack([canvas for ticket in tickets for canvas in ticket.canvases])
            rows = iter(self._predict(pixels, max(ticket.top for ticket in tickets)))
        except Exception as error:
            if len(tickets) == 1:
                tickets[0].answer.set_exception(error)
            else:
                for ticket in tickets:  # it must not fail requests that have no part in it
                    self._answer([ticket])
        else:
            for ticket in tickets:
                ticket.answer.set_result(list(islice(rows, len(ticket.canvases))))
