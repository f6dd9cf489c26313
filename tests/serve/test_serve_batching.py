"""The queue in front of the model, by itself: rows go to whom they belong, and nothing gets stuck."""

import threading
import time

import pytest
import torch

from expect import expect_error

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from protosteer.serve.batching import Batcher
from protosteer.serve.limits import RequestError
from serve_toys import PATIENCE


class Model:
    """Says what stands in each image, once it is let go; fails at -1."""

    def __init__(self, held: bool = True) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.batches: list[list[int]] = []
        self.tops: list[int] = []
        if not held:
            self.go_on.set()

    def __call__(self, pixels: torch.Tensor, top: int) -> list[int]:
        self.entered.set()
        assert self.go_on.wait(PATIENCE)
        rows = pixels[:, 0, 0, 0].tolist()
        if -1 in rows:
            raise ValueError("below zero")
        self.batches.append(rows)
        self.tops.append(top)
        return rows


def images(*numbers: int) -> list[torch.Tensor]:
    return [torch.full((3, 1, 1), number) for number in numbers]


def submitted(queue: Batcher, *numbers: int, top: int = 1):
    with queue.reserve(len(numbers)):
        return queue.submit(images(*numbers), top)


def test_what_waits_is_taken_together_up_to_a_batch_in_whole_requests():
    model = Model()
    queue = Batcher(model, 100, 8)
    futures = [submitted(queue, 0)]
    assert model.entered.wait(PATIENCE)
    futures += [submitted(queue, 1, 2, 3, top=7), submitted(queue, 4, 5, 6, top=3), submitted(queue, 7, 8, 9)]
    futures += [submitted(queue, *range(10, 30))]  # larger than a batch
    model.go_on.set()
    assert [value for future in futures for value in future.result(PATIENCE)] == list(range(30))
    assert [len(batch) for batch in model.batches] == [1, 6, 3, 20]
    assert model.tops == [1, 7, 1, 1]  # the largest of each batch
    queue.stop(0)


def test_a_cancelled_request_is_dropped_and_a_failing_one_fails_alone():
    model = Model()
    queue = Batcher(model, 100, 8)
    first = submitted(queue, 0)
    assert model.entered.wait(PATIENCE)
    gone, good, bad, fine = (submitted(queue, n) for n in (1, 2, -1, 3))
    assert gone.cancel() and not first.cancel()
    model.go_on.set()
    assert [future.result(PATIENCE) for future in (first, good, fine)] == [[0], [2], [3]]
    with pytest.raises(ValueError, match="below zero"):
        bad.result(PATIENCE)
    assert submitted(queue, 5).result(PATIENCE) == [5]
    assert model.batches == [[0], [2], [3], [5]] and queue.length == 0
    queue.stop(0)


def test_room_is_taken_when_reserved_and_given_back():
    queue = Batcher(Model(held=False), 4, 8)
    queue._seconds_per_image = 1.5
    with queue.reserve(3):
        queue.check_room(1)
        with expect_error("http-503", RequestError) as refused, queue.reserve(2):
            pass
        assert refused.value.status == 503 and refused.value.headers["Retry-After"] == "5"
    with pytest.raises(ValueError, match="bad image"), queue.reserve(4):
        raise ValueError("bad image")
    with queue.reserve(4):
        assert queue.submit(images(1, 2, 3, 4), 1).result(PATIENCE) == [1, 2, 3, 4]
    queue.stop(0)


def test_a_lone_request_does_not_wait_and_one_in_company_does(monkeypatch):
    monkeypatch.setattr("protosteer.serve.batching._MAX_WAIT", 10 * PATIENCE)  # the end of the reservation ends it
    model = Model(held=False)
    queue = Batcher(model, 100, 8)
    assert submitted(queue, 0).result(PATIENCE) == [0]
    with queue.reserve(1):  # being decoded
        early = submitted(queue, 1)
        time.sleep(0.05)
        assert not early.done()
        late = queue.submit(images(2), 1)
    assert early.result(PATIENCE) == [1] and late.result(PATIENCE) == [2] and model.batches == [[0], [1, 2]]
    queue.stop(0)


@pytest.mark.parametrize("within", [PATIENCE, 0])
def test_stopping_answers_what_is_reserved_as_long_as_there_is_time(within):
    model = Model()
    queue = Batcher(model, 100, 1)
    first = submitted(queue, 0)
    assert model.entered.wait(PATIENCE)
    second = submitted(queue, 1)
    with queue.reserve(1):
        queue.stop(within)
        with expect_error("http-503", RequestError), queue.reserve(1):
            pass
        model.go_on.set()
        assert first.result(PATIENCE) == [0]
        third = queue.submit(images(2), 1)
    queue.join(PATIENCE)
    assert not queue._thread.is_alive() and queue.length == 0
    for number, future in enumerate([second, third], 1):
        if within:
            assert future.result(PATIENCE) == [number]
        else:
            with expect_error("http-503", RequestError):
                future.result(PATIENCE)
