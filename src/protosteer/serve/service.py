"""Serve one model: predict, learn and correct for requests, within limits."""

from __future__ import annotations

import asyncio
import hmac
from pathlib import Path
from typing import Any

import torch
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, Request

from protosteer.corrections import ImageFile
from protosteer.errors import DataError, SettingsError
from protosteer.learner import Learner
from protosteer.model.records import TaskRecord
from protosteer.serve.batching import Batcher, Row
from protosteer.serve.limits import Limits, RequestError
from protosteer.serve.metrics import Metrics
from protosteer.serve.model_store import Store
from protosteer.serve.schemas import Corrected, LearnResult
from protosteer.serve.training_jobs import Jobs
from protosteer.serve.uploads import Uploads, shorten_name
from protosteer.util.files import STALE, remove_leftovers
from protosteer.util.text import check_name
from protosteer.workflows.ood import check_fraction

_DRAIN_SECONDS = 3.0  # to answer what is in the queue when the service stops
_JOIN_SECONDS = 5.0  # to finish a batch or a training step


class Service:
    """Connect uploads, the queue, the model store and training jobs of one model."""

    def __init__(
        self,
        name: str,
        learner: Learner,
        path: Path,
        allow_teach: bool,
        token: str | None,
        reject: float,
        limits: Limits,
        metrics: Metrics,
        thumbnails: bool = False,
    ):
        if allow_teach and not token:
            message = "teaching over HTTP needs a token: give one, or do not allow teaching"
            raise SettingsError(message, code="token-required")
        check_fraction(reject)
        self.name, self.limits, self.metrics = name, limits, metrics
        self.teaching, self.reject = allow_teach, reject
        self.store = Store(learner, path, allow_teach, thumbnails)
        self.uploads = Uploads(learner.backbone.preprocessing, limits)
        self.batcher = Batcher(self._predict, limits.queue, limits.batch)
        self.jobs = Jobs(self.store, limits.jobs)
        self._token = (token or "").encode()

    def _predict(self, pixels: torch.Tensor, top: int) -> list[Row]:
        rows = self.store.current.predict(pixels, top)
        self.metrics.batch(self.name, len(rows))
        return rows

    async def predict(self, request: Request, top: int, reject: float) -> list[Row]:
        """Predict the images of a request; return one row per image, in the order sent."""
        self.batcher.check_room()  # before anything is received
        async with self.uploads.receive(request) as files:
            with self.batcher.reserve(len(files)):
                canvases = await self.uploads.decode(files)
                answer = asyncio.wrap_future(self.batcher.submit(canvases, top))
        rows = await _await_answer(request, answer)
        current = self.store.current
        rejection = current.rejection(reject) if current.calibrated else None
        return [
            {
                "name": file.filename,
                "unknown": rejection and rejection.unknown(row["label"], row["greatest"]),
                **{name: value for name, value in row.items() if name != "greatest"},
                "top": row["top"][:top],
            }
            for file, row in zip(files, rows, strict=True)
        ]

    async def learn(self, request: Request, name: str, train: bool) -> LearnResult:
        """Learn a class from the images of a request; `train` also queues a training job."""
        _check_class(name)
        if train:
            self.store.check_trainable(name)
        job = self.jobs.admit(name) if train else None
        try:
            async with self.uploads.receive(request) as files:
                pixels = torch.stack(await self.uploads.decode(files))
            image_bytes = sum(file.size or 0 for file in files)
            record = await asyncio.to_thread(self.store.add, name, pixels, image_bytes)
        except BaseException:
            if job:
                self.jobs.drop(job)
            raise
        if job:
            self.jobs.start(job, record, pixels)
        return LearnResult(class_=name, task=record.name, images=len(pixels), job=job)

    async def correct(self, request: Request, name: str) -> Corrected:
        """Correct the model with the one image of a request."""
        _check_class(name)
        async with self.uploads.receive(request) as files:
            if len(files) != 1:
                raise RequestError(422, f"{len(files)} images cannot be one correction; send them one by one")
            (pixels,) = await self.uploads.decode(files)
            image = await _image_file(files[0])
        return await asyncio.to_thread(self.store.correct, name, pixels, image)

    async def confirm(self, request: Request) -> list[TaskRecord]:
        """Learn the images of a request, each as the class that is predicted for it."""
        async with self.uploads.receive(request) as files:
            pixels, images = await self.uploads.decode(files), [await _image_file(file) for file in files]
        return await asyncio.to_thread(self.store.confirm, pixels, images)

    def authorise(self, token: str | None) -> None:
        """Raise `RequestError` unless teaching is allowed and the token is right."""
        if not self.teaching:
            raise RequestError(403, "this server is read-only; start it with allow_teach=True to allow changes")
        if token is None or not hmac.compare_digest(token.encode("latin-1"), self._token):
            raise RequestError(401, "no token, or a wrong one; send the header 'Authorization: Bearer TOKEN'")

    def start(self) -> None:
        """Remove leftovers of killed writers, which may hold classes that were forgotten since."""
        if self.teaching:  # else this process writes nothing
            remove_leftovers(self.store.path.parent, self.store.path.name, older_than=STALE)

    def stop(self) -> None:
        """Accept nothing more. Return at once; may be called more than once."""
        self.batcher.stop(_DRAIN_SECONDS)
        self.store.stop()
        self.jobs.stop()

    async def join(self) -> None:
        """Wait for running work, then release threads."""
        await asyncio.to_thread(self.batcher.join, _JOIN_SECONDS)
        await asyncio.to_thread(self.jobs.join, _JOIN_SECONDS)
        await asyncio.to_thread(self.store.settle, _JOIN_SECONDS)
        self.uploads.close()


def _check_class(name: str) -> None:
    try:
        check_name(name, "the class")
    except DataError as error:
        raise RequestError(422, str(error)) from error


async def _image_file(file: UploadFile) -> ImageFile:
    await file.seek(0)  # it has been decoded
    return ImageFile(await file.read(), shorten_name(file.filename or ""))


async def _await_answer(request: Request, answer: asyncio.Future[list[Row]]) -> list[Row]:
    """Return the answer; raise ClientDisconnect if the client disconnects first."""
    disconnect = asyncio.ensure_future(request.receive())  # the body is complete: the next message is the disconnect
    futures: set[asyncio.Future[Any]] = {answer, disconnect}
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        disconnect.cancel()
        answer.cancel()
