"""A service that costs nothing: a tiny model, its file, and pictures to send."""

from __future__ import annotations

import functools
import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from PIL import Image

from conftest import easy_task, tiny_backbone
from protosteer.learner import Learner
from protosteer.serve.app import Server, _listen, create_app
from protosteer.settings import Settings

QUICK = Settings.preset("paper", epochs=2, batch_size=8, neck_hidden=16, augmentation="crop", centroids=2)
TOKEN = "open sesame"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
PATIENCE = 120.0  # seconds: a busy machine makes tests slow, not wrong
SPRING, SUMMER = ["ant", "bee"], ["cat", "dog"]


def taught(settings: Settings = QUICK) -> Learner:
    """Two tasks of two classes each."""
    return _taught(settings).copy()


@functools.cache
def _taught(settings: Settings) -> Learner:
    learner = Learner(tiny_backbone(), settings)
    for classes in (SPRING, SUMMER):
        learner.learn(easy_task(classes), name=f"{classes[0]} task")
    return learner


def service(folder: Path, learner: Learner | None = None, teach: bool = True, **options: Any) -> FastAPI:
    """The app of a model that lies in `folder`; teaching is allowed unless told otherwise."""
    learner = learner or taught()
    learner.save(folder / "toy.protosteer")
    given = {"allow_teach": True, "token": TOKEN} if teach else {}
    given["host_names"] = ["testserver"]  # what TestClient calls it
    return create_app(learner, folder / "toy.protosteer", **{**given, **options})


@contextmanager
def served(app: FastAPI) -> Iterator[tuple[int, Server]]:
    """Its port, and the server; both end with the block."""
    listener = _listen("127.0.0.1", 0)
    server = Server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()


def pictures(name: str, count: int = 8, seed: int = 50) -> torch.Tensor:
    """New images of a class, uint8 [count, 3, 16, 16]."""
    return easy_task([name], count, seed)[0]


def encoded(pixels: torch.Tensor, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, kind)
    return buffer.getvalue()


def form(pixels: torch.Tensor, stem: str = "picture") -> list[tuple[str, tuple[str, bytes]]]:
    """Images [n, 3, h, w] as a client sends them."""
    return [("images", (f"{stem} {i}.png", encoded(image))) for i, image in enumerate(pixels)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition never holds"
        time.sleep(0.005)
