"""The queue in front of the model, by itself: rows go to whom they belong, and nothing gets stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from protosteer.serve.batching import Batcher
from protosteer.serve.limits import Refused


def values(pixels: torch.Tensor, top: int) -> list[int]:
    """A model that says what stands in the image."""
    return [int(value) for value in pixels[:, 0, 0, 0]]


def images(*numbers: int) -> list[torch.Tensor]:
    return [torch.full((3, 1, 1), number) for number in numbers]


def batcher(predict: Callable = values, capacity: int = 100, batch: int = 8, sizes: list | None = None):
    return Batcher(predict, capacity, batch, (sizes if sizes is not None else []).append)


class Held:
    """A model that waits to be let go."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.seen: list[int] = []

    def __call__(self, pixels: torch.Tensor, top: int) -> list[int]:
        self.entered.set()
        assert self.go_on.wait(10)
        self.seen += values(pixels, top)
        return values(pixels, top)


def submitted(queue: Batcher, *numbers: int):
    with queue.reserve(len(numbers)):
        return queue.submit(images(*numbers), top=1)


def test_rows_go_to_whom_they_belong():
    sizes: list[int] = []
    queue = batcher(sizes=sizes)

    requests = [range(first, first + 1 + first % 5) for first in range(0, 2000, 7)]

    def ask(numbers: range) -> bool:
        return submitted(queue, *numbers).result(10) == list(numbers)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, requests))
    assert sum(sizes) == sum(map(len, requests)) and max(sizes) <= 8
    queue.stop(0)


def test_what_waits_is_taken_together_up_to_a_batch_in_whole_requests():
    model, sizes = Held(), []
    queue = batcher(model, sizes=sizes)
    futures = [submitted(queue, 0)]
    assert model.entered.wait(10)
    futures += [submitted(queue, 1, 2, 3), submitted(queue, 4, 5, 6), submitted(queue, *range(7, 10))]
    futures += [submitted(queue, *range(10, 30))]  # larger than a batch
    model.go_on.set()
    assert [value for future in futures for value in future.result(10)] == list(range(30))
    assert sizes == [1, 6, 3, 20]
    queue.stop(0)


def test_the_largest_top_of_a_batch_is_asked_for():
    asked: list[int] = []
    model = Held()
    queue = batcher(lambda pixels, top: asked.append(top) or model(pixels, top))
    first = submitted(queue, 0)
    assert model.entered.wait(10)
    with queue.reserve(2):
        later = [queue.submit(images(1), 3), queue.submit(images(2), 7)]
    model.go_on.set()
    assert [future.result(10) for future in (first, *later)] == [[0], [1], [2]] and asked == [1, 7]
    queue.stop(0)


def test_a_cancelled_request_is_dropped():
    model = Held()
    queue = batcher(model)
    first = submitted(queue, 0)
    assert model.entered.wait(10)
    second, third = submitted(queue, 1), submitted(queue, 2)
    assert second.cancel() and not first.cancel()
    model.go_on.set()
    assert first.result(10) == [0] and third.result(10) == [2]
    assert model.seen == [0, 2] and queue.length == 0
    queue.stop(0)


def test_one_request_does_not_fail_another():
    def picky(pixels: torch.Tensor, top: int) -> list[int]:
        if 13 in values(pixels, top):
            raise ValueError("thirteen")
        return values(pixels, top)

    model = Held()
    queue = batcher(lambda pixels, top: picky(pixels, top) and model(pixels, top))
    submitted(queue, 0)
    assert model.entered.wait(10)
    good, bad, fine = (submitted(queue, n) for n in (1, 13, 3))
    model.go_on.set()
    assert good.result(10) == [1] and fine.result(10) == [3]
    with pytest.raises(ValueError, match="thirteen"):
        bad.result(10)
    assert submitted(queue, 5).result(10) == [5]
    queue.stop(0)


def test_room_is_taken_when_reserved_and_given_back():
    queue = batcher(capacity=4)
    with queue.reserve(3):
        queue.check_room(1)
        with (
            pytest.raises(Refused, match="3 images are waiting and 4 may") as refused,
            queue.reserve(2),
        ):
            pass
        assert refused.value.status == 503 and int(refused.value.headers["Retry-After"]) >= 1
    with pytest.raises(ValueError, match="bad image"), queue.reserve(4):
        raise ValueError("bad image")
    with queue.reserve(4):
        assert queue.submit(images(1, 2, 3, 4), 1).result(10) == [1, 2, 3, 4]
    queue.stop(0)


def test_a_lone_request_does_not_wait_and_one_in_company_does(monkeypatch):
    monkeypatch.setattr("protosteer.serve.batching._PATIENCE", 5.0)
    queue = batcher()
    began = time.monotonic()
    assert submitted(queue, 1).result(10) == [1]
    assert time.monotonic() - began < 4
    sizes: list[int] = []
    queue = batcher(sizes=sizes)
    with queue.reserve(1):  # being decoded
        early = submitted(queue, 1)
        time.sleep(0.05)
        assert not early.done()
        late = queue.submit(images(2), 1)
    assert early.result(10) == [1] and late.result(10) == [2] and sizes == [2]
    assert time.monotonic() - began < 4
    queue.stop(0)


def test_stopping_answers_what_waits():
    model = Held()
    queue = batcher(model, batch=1)
    futures = [submitted(queue, n) for n in range(4)]
    with queue.reserve(1):
        queue.stop(within=20)
        with pytest.raises(Refused, match="stopping"), queue.reserve(1):
            pass
        model.go_on.set()
        futures.append(queue.submit(images(4), 1))
    assert [future.result(10) for future in futures] == [[0], [1], [2], [3], [4]]
    queue.join(10)
    assert not queue._thread.is_alive()


def test_stopping_refuses_what_it_has_no_time_for():
    model = Held()
    queue = batcher(model, batch=1)
    first = submitted(queue, 0)
    assert model.entered.wait(10)
    with queue.reserve(1):
        second = submitted(queue, 1)
        queue.stop(within=0)
        model.go_on.set()
        queue.join(10)
        third = queue.submit(images(2), 1)
    assert first.result(10) == [0] and queue.length == 0
    for future in (second, third):
        with pytest.raises(Refused, match="stopping"):
            future.result(10)


def test_retry_after_follows_the_speed_of_the_model():
    queue = batcher(capacity=50)
    queue._seconds_per_image = 0.5
    with queue.reserve(50), pytest.raises(Refused) as refused:
        queue.check_room()
    assert refused.value.headers["Retry-After"] == "25"
