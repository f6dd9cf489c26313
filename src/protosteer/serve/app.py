"""The routes of the service, and the server that runs them."""

from __future__ import annotations

import dataclasses
import json
import logging
import mimetypes
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

import protosteer
from protosteer.errors import DataError, LearnerError, ProtosteerError
from protosteer.learner import Learner
from protosteer.serve import answers, metrics
from protosteer.serve.connections import Connection
from protosteer.serve.limits import Limits, Refused
from protosteer.serve.middleware import Named, Observed, page_policy
from protosteer.serve.service import Service
from protosteer.util.system import keep_freed_memory
from protosteer.util.text import printable

_NOBODY = 499  # what a log calls a request whose client has gone
_STOP_SECONDS = 15  # after which uvicorn cuts connections

Top = Annotated[int, Query(ge=1, le=100, description="How many classes to name.")]
Reject = Annotated[float, Query(ge=0, lt=1, description="Share of known images that may count as unknown.")]
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def create_app(
    learner: Learner,
    path: str | Path,
    *,
    allow_teach: bool = False,
    token: str | None = None,
    reject: float = 0.05,
    limits: Limits | None = None,
    host_names: Iterable[str] = (),
) -> FastAPI:
    """The service for a model that was loaded from `path`, to which changes are written.

    reject: the share of known images that may count as unknown, where a request names no other.
    host_names: what browsers may call the service, beside localhost and any address.
    """
    service = Service(learner, Path(path), allow_teach, token, reject, limits or Limits())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()
        await service.join()

    app = FastAPI(
        title="protosteer",
        version=protosteer.__version__,
        summary="Recognise images, and teach new classes.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirection would name whatever host the request does
        lifespan=lifespan,
    )
    app.state.service = service
    app.add_middleware(Named, names=host_names)
    app.add_middleware(Observed, metrics=service.metrics)  # outside, so that refusals are counted
    _add_error_handlers(app)
    _add_predict(app, service)  # first, since routes are tried in this order
    _add_reports(app, service)
    _add_teaching(app, service)
    _add_pages(app)
    return app


def run(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    access_log: bool = False,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until Ctrl-C or a signal to end. on_ready: is given the address; port 0 takes a free one."""
    listener = _listen(host, port)
    keep_freed_memory()
    # A warning for every odd request would be a way to fill the disk.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    if access_log:
        logging.getLogger("protosteer.serve").setLevel(logging.INFO)
        logging.basicConfig(format="%(asctime)s %(message)s")
    if on_ready:
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"http://{shown}:{listener.getsockname()[1]}/")
    try:
        Server(app).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises the signal again when all has ended well
        pass
    finally:
        listener.close()


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI):
        config = uvicorn.Config(
            app,
            http=Connection,
            lifespan="on",
            ws="none",
            proxy_headers=False,
            log_level="error",  # as above
            access_log=False,
            server_header=False,
            timeout_keep_alive=app.state.service.limits.idle_seconds,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The service stops before uvicorn begins to wait for open requests."""
        self.config.app.state.service.stop()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ProtosteerError(
            f"cannot listen on {host}, port {port}: {reason}; choose another host= or port="
        ) from error
    # Small answers go out at once; connections take the option over from here.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _add_error_handlers(app: FastAPI) -> None:
    """Every error is {"detail": one line}."""

    @app.exception_handler(ProtosteerError)
    async def ours(request: Request, error: ProtosteerError) -> Response:
        if isinstance(error, Refused):
            return JSONResponse({"detail": str(error)}, error.status, error.headers)
        status = 422 if isinstance(error, DataError) else 409 if isinstance(error, LearnerError) else 500
        return JSONResponse({"detail": str(error)}, status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        option = first["loc"][-1]
        return JSONResponse({"detail": f"option {option} = {first.get('input')!r}: {first['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        asked = printable(f"{request.method} {request.scope['path']}")
        detail = f"{asked}: {error.detail}; /docs lists what there is"
        return JSONResponse({"detail": detail}, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_NOBODY)


def _add_pages(app: FastAPI) -> None:
    def add(route: str, name: str) -> None:
        content = Path(__file__).with_name(name).read_bytes()
        kind, _ = mimetypes.guess_type(name)
        headers = {"Content-Security-Policy": page_policy(content)} if kind == "text/html" else {}
        answer = partial(Response, content, headers=headers, media_type=kind)
        app.add_api_route(route, lambda: answer(), include_in_schema=False)

    add("/", "page.html")
    add("/docs", "docs.html")
    add("/style.css", "style.css")


def _add_reports(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", response_model=answers.Health)
    async def health() -> Any:
        """Whether the service runs."""
        return {"status": "ok"}

    @app.get("/classes", response_model=answers.Classes)
    def classes() -> Any:
        """All classes, in the order in which they were learned."""
        return {"classes": service.store.current.classes()}

    @app.get("/model", response_model=answers.Model)
    def model() -> Any:
        """What the model holds: tasks, classes, bytes, settings, backbone."""
        current = service.store.current
        return {
            **current.description,
            "teaching": service.teaching,
            "reject": service.reject,
            "calibrated": current.calibrated,
            "trainable": current.trainable(),
        }

    @app.get("/map", response_model=answers.Map)
    def map_of_classes() -> Any:
        """Where the classes lie in two dimensions, coordinates in [-1, 1]."""
        current = service.store.current
        places = [{"name": n, "task": t, "x": x, "y": y} for n, t, x, y in current.projection.classes]
        return {"classes": places, "tasks": current.memory.task_names}

    @app.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> Any:
        """Counters in Prometheus' text format."""
        gauges = {
            "protosteer_queue_images": ("Images that wait for the model.", service.batcher.length),
            "protosteer_jobs": ("Trainings that wait or run.", service.jobs.open),
            "protosteer_classes": ("Classes of the model.", len(service.store.current.memory.classes)),
        }
        return Response(service.metrics.text(gauges), media_type=metrics.CONTENT_TYPE)


def _add_predict(app: FastAPI, service: Service) -> None:
    @app.post(
        "/predict",
        response_model=answers.Predictions,
        openapi_extra=answers.IMAGES,
        responses=answers.errors(408, 413, 422, 503),
    )
    async def predict(request: Request, top: Top = 5, reject: Reject = service.reject) -> Any:
        """What is on each image: send one or several."""
        rows = await service.predict(request, top, reject)
        # As it is: checking every answer against its model would take longer than all the rest here.
        body = json.dumps({"predictions": rows}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return Response(body.encode("utf-8", "replace"), media_type="application/json")


def _add_teaching(app: FastAPI, service: Service) -> None:
    async def authorised(bearer: Bearer) -> None:
        service.authorise(bearer.credentials if bearer else None)

    allowed = [Depends(authorised)]

    @app.post(
        "/classes/{name:path}",
        status_code=201,
        response_model=answers.Taught,
        openapi_extra=answers.IMAGES,
        responses=answers.errors(401, 403, 408, 409, 413, 422, 503, 507),
        dependencies=allowed,
    )
    async def teach(request: Request, name: str, train: bool = False) -> Any:
        """Teach a class from a few images: it is known at once. train: give it a prompt of its own, later."""
        return await service.teach(request, name, train)

    @app.get("/jobs/{id}", response_model=answers.JobStatus, responses=answers.errors(404, 422))
    async def job(id: str) -> Any:
        """How far a training is."""
        return service.jobs.get(id)

    @app.delete(
        "/classes/{name:path}",
        response_model=answers.Forgotten,
        responses=answers.errors(401, 403, 404, 409, 422, 507),
        dependencies=allowed,
    )
    def forget(name: str) -> Any:
        """Forget a class; the answer says what that guarantees."""
        return dataclasses.asdict(service.store.forget(name))
