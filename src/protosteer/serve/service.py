"""The parts of a running service, and what a request for prediction or teaching does with them."""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from starlette.requests import ClientDisconnect, Request

from protosteer.errors import SettingsError
from protosteer.learner import Learner
from protosteer.method.memory import TaskRecord
from protosteer.photos.rejection import check_fraction
from protosteer.photos.teaching import speakable
from protosteer.serve.batching import Batcher, Row
from protosteer.serve.jobs import Jobs
from protosteer.serve.limits import Limits, Refused
from protosteer.serve.metrics import Metrics
from protosteer.serve.store import Store
from protosteer.serve.uploads import Upload, decode, receive

_NAME_LENGTH = 200
_DRAIN_SECONDS = 3.0  # for what is in the queue when the service stops
_JOIN_SECONDS = 5.0  # for a batch or a training step that is under way then


class Service:
    def __init__(
        self,
        learner: Learner,
        path: Path,
        allow_teach: bool,
        token: str | None,
        reject: float,
        limits: Limits,
    ):
        if allow_teach and not token:
            raise SettingsError("teaching over HTTP needs a token: give one, or do not allow teaching")
        check_fraction(reject)
        self.limits = limits
        self.teaching = allow_teach
        self.reject = reject
        self.metrics = Metrics()
        self.store = Store(learner, path, writable=allow_teach)
        self.batcher = Batcher(self._predict, limits.queue, limits.batch, self.metrics.batch)
        self.jobs = Jobs(self.store, limits.jobs)
        self._token = (token or "").encode()
        self._preprocessing = learner.backbone.preprocessing
        self._threads = min(8, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="decode")
        self._uploads = 0

    def _predict(self, pixels: torch.Tensor, top: int) -> list[Row]:
        return self.store.current.predict(pixels, top)

    async def predict(self, request: Request, top: int, reject: float) -> list[Row]:
        """One row per image that was sent, in their order."""
        self.batcher.check_room()  # before anything is received
        async with self._received(request) as uploads:
            with self.batcher.reserve(len(uploads)):
                canvases = await self._decode(uploads)
                answer = asyncio.wrap_future(self.batcher.submit(canvases, top))
            names = [upload.name for upload in uploads]
        rows = await _unless_gone(request, answer)
        rejection = self.store.current.rejection(reject)
        return [
            {
                "name": name,
                "unknown": None if rejection is None else rejection.unknown(row["label"], row["similarity"]),
                **row,
                "top": row["top"][:top],
            }
            for name, row in zip(names, rows, strict=True)
        ]

    async def teach(self, request: Request, name: str, train: bool) -> tuple[TaskRecord, str | None]:
        """The new class's record, and the job that trains it further."""
        _check_name(name)
        self.store.check_new(name)
        if train:
            self.store.check_trainable()
        job = self.jobs.admit(name) if train else None
        try:
            async with self._received(request) as uploads:
                pixels = torch.stack(await self._decode(uploads))
                image_bytes = sum(upload.bytes for upload in uploads)
            record = await asyncio.to_thread(self.store.add, name, pixels, image_bytes)
        except BaseException:
            if job:
                self.jobs.drop(job)
            raise
        if job:
            self.jobs.start(job, record, pixels)
        return record, job.status.id if job else None

    def authorise(self, token: str | None) -> None:
        if not self.teaching:
            raise Refused(403, "teaching is not allowed here; start the service with allow_teach=True")
        if token is None or not hmac.compare_digest(token.encode("latin-1"), self._token):
            raise Refused(401, "no token, or a wrong one; send the header 'Authorization: Bearer TOKEN'")

    def stop(self) -> None:
        """Take nothing more and end soon. Returns at once; may be called more than once."""
        self.batcher.stop(_DRAIN_SECONDS)
        self.jobs.stop()

    async def join(self) -> None:
        await asyncio.to_thread(self.batcher.join, _JOIN_SECONDS)
        await asyncio.to_thread(self.jobs.join, _JOIN_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def _received(self, request: Request) -> AsyncIterator[list[Upload]]:
        """The images that were sent; their files are closed at the end."""
        if self._uploads >= self.limits.uploads:
            raise Refused(503, f"{self._uploads} uploads are under way; try again later", retry_after=1)
        self._uploads += 1
        uploads: list[Upload] = []
        try:
            uploads = await receive(request, self.limits)
            yield uploads
        finally:
            self._uploads -= 1
            for upload in uploads:
                upload.file.close()

    async def _decode(self, uploads: list[Upload]) -> list[torch.Tensor]:
        return await decode(uploads, self._preprocessing, self.limits, self._pool, self._threads)


async def _unless_gone(request: Request, answer: asyncio.Future[list[Row]]) -> list[Row]:
    """The answer, or ClientDisconnect if there is nobody left to give it to."""
    gone = asyncio.ensure_future(request.receive())  # all was received: the next message is the end
    either: set[asyncio.Future[Any]] = {answer, gone}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        gone.cancel()
        answer.cancel()


def _check_name(name: str) -> None:
    if not name.strip():
        raise Refused(422, "the class has no name; POST to /classes/NAME")
    if len(name) > _NAME_LENGTH:
        raise Refused(422, f"the class's name has {len(name)} characters; use at most {_NAME_LENGTH}")
    if not speakable(name):
        raise Refused(422, "the class's name has control characters; leave them out")
