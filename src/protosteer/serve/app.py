"""The application: its models, errors and pages, and the server that runs it."""

from __future__ import annotations

import logging
import mimetypes
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

import protosteer
from protosteer.errors import DataError, LearnerError, ProtosteerError
from protosteer.learner import Learner
from protosteer.serve.connections import Connection
from protosteer.serve.limits import Limits, Refused
from protosteer.serve.metrics import Metrics
from protosteer.serve.middleware import Named, Observed, page_policy
from protosteer.serve.registry import Models, check_names
from protosteer.serve.routes import add_routes
from protosteer.serve.service import Service
from protosteer.util.system import keep_freed_memory
from protosteer.util.text import printable

_NOBODY = 499  # what a log calls a request whose client has gone
_STOP_SECONDS = 15  # after which uvicorn cuts connections


def create_app(
    learner: Learner,
    path: str | Path,
    *,
    name: str | None = None,
    others: Mapping[str, tuple[Learner, str | Path]] | None = None,
    allow_teach: bool = False,
    token: str | None = None,
    reject: float = 0.05,
    thumbnails: bool = False,
    limits: Limits | None = None,
    host_names: Iterable[str] = (),
) -> FastAPI:
    """The service for a model that was loaded from `path`, to which changes are written.

    name: what the model is called where there are several; the name of its file, if not given.
    others: more models by name, each with its file; limits hold for each, the token for all.
    reject: the share of known images that may count as unknown, where a request names no other.
    thumbnails: show those that were kept when the model was taught, to whoever asks.
    host_names: what browsers may call the service, beside localhost and any address.
    """
    places = [(Path(path).stem if name is None else name, learner, Path(path))]
    places += [(other, its, Path(file)) for other, (its, file) in (others or {}).items()]
    check_names([(called, file) for called, _, file in places])
    metrics = Metrics(called for called, *_ in places)
    models = Models(
        [
            Service(*place, allow_teach, token, reject, limits or Limits(), metrics, thumbnails)
            for place in places
        ]
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        models.start()
        yield
        models.stop()
        await models.join()

    app = FastAPI(
        title="protosteer",
        version=protosteer.__version__,
        summary="Recognise images, and teach new classes.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirection would name whatever host the request does
        lifespan=lifespan,
    )
    app.state.models, app.state.service = models, models.first
    app.add_middleware(Named, names=host_names)
    app.add_middleware(Observed, metrics=metrics)  # outside, so that refusals are counted
    _add_error_handlers(app)
    add_routes(app, models)
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
    callback = _listen(host, port)
    keep_freed_memory()
    # A warning for every odd request would be a way to fill the disk.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    if access_log:
        logging.getLogger("protosteer.serve").setLevel(logging.INFO)
        logging.basicConfig(format="%(asctime)s %(message)s")
    if on_ready:
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"http://{shown}:{callback.getsockname()[1]}/")
    try:
        Server(app).run(sockets=[callback])
    except KeyboardInterrupt:  # uvicorn raises the signal again when all has ended well
        pass
    finally:
        callback.close()


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
        """The services stop before uvicorn begins to wait for open requests."""
        self.config.app.state.models.stop()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    try:
        callback = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ProtosteerError(
            f"cannot listen on {host}, port {port}: {reason}; choose another host= or port=",
            code="cannot-listen",
            host=host,
            port=port,
        ) from error
    # Small answers go out at once; connections take the option over from here.
    callback.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return callback


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
    folder = Path(__file__).with_name("page")

    def inside(script: re.Match[bytes]) -> bytes:
        return b"<script>%s</script>" % (folder / script[1].decode()).read_bytes()

    def add(route: str, name: str) -> None:
        """Scripts go out inside their page, so that its policy can allow them by what is in them."""
        content = re.sub(rb'<script src="(\w+\.js)"></script>', inside, (folder / name).read_bytes())
        kind, _ = mimetypes.guess_type(name)
        headers = {"Content-Security-Policy": page_policy(content)} if kind == "text/html" else {}
        answer = partial(Response, content, headers=headers, media_type=kind)
        app.add_api_route(route, lambda: answer(), include_in_schema=False)

    add("/", "page.html")
    add("/docs", "docs.html")
    add("/style.css", "style.css")
