"""Build the application from models, routes, error handlers and pages, and run its server."""

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
from protosteer.serve.limits import Limits, RequestError
from protosteer.serve.metrics import Metrics
from protosteer.serve.middleware import HostCheck, Observer, page_policy
from protosteer.serve.registry import ModelRegistry, check_names
from protosteer.serve.routes import add_routes
from protosteer.serve.service import Service
from protosteer.util.system import keep_freed_memory
from protosteer.util.text import printable

_CLIENT_GONE = 499  # nginx's status for a request whose client has disconnected
_STOP_SECONDS = 15  # after which uvicorn closes connections


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
    """Build the service for a model that was loaded from `path`; changes are written to that file.

    Args:
        learner: The model.
        path: Its file.
        name: Its name in addresses; the file's name without suffix by default.
        others: More models by name, each with its file. Limits hold for each model, the token for all.
        allow_teach: Let clients add, correct and forget classes; needs a token.
        token: The bearer token that such a client must send.
        reject: Share of known images that may count as unknown, unless a request names another.
        thumbnails: Show the model's thumbnails to every client.
        limits: Bounds of requests, connections and queues.
        host_names: Names that browsers may use for the service, besides localhost and any IP address.

    Raises:
        SettingsError: A model's name is bad or taken, or teaching is allowed without a token.
    """
    sources = [(Path(path).stem if name is None else name, learner, Path(path))]
    sources += [(key, model, Path(file)) for key, (model, file) in (others or {}).items()]
    check_names([(model_name, file) for model_name, _, file in sources])
    metrics = Metrics(model_name for model_name, *_ in sources)
    limits = limits or Limits()
    models = ModelRegistry(
        [Service(*source, allow_teach, token, reject, limits, metrics, thumbnails) for source in sources]
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
        redirect_slashes=False,  # a redirect would repeat whatever host the request names
        lifespan=lifespan,
    )
    app.state.models, app.state.service = models, models.first
    app.add_middleware(HostCheck, names=host_names)
    app.add_middleware(Observer, metrics=metrics)  # outside, so that it counts rejected requests too
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
    """Serve until Ctrl-C or SIGTERM.

    Args:
        app: The application that `create_app` returned.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        access_log: Log every request.
        on_ready: Called with the service's address once it listens.

    Raises:
        ProtosteerError: With code `cannot-listen`.
    """
    listener = _listen(host, port)
    keep_freed_memory()
    # A client could fill the disk with warnings about malformed requests.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    if access_log:
        logging.getLogger("protosteer.serve").setLevel(logging.INFO)
        logging.basicConfig(format="%(asctime)s %(message)s")
    if on_ready:
        address = f"[{host}]" if ":" in host else host
        on_ready(f"http://{address}:{listener.getsockname()[1]}/")
    try:
        Server(app).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises the signal again when all has ended well
        pass
    finally:
        listener.close()


class Server(uvicorn.Server):
    """Run the application on uvicorn with the limits of `Connection`."""

    def __init__(self, app: FastAPI):
        config = uvicorn.Config(
            app,
            http=Connection,
            lifespan="on",
            ws="none",
            proxy_headers=False,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=app.state.service.limits.idle_seconds,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the services before uvicorn waits for open requests."""
        self.config.app.state.models.stop()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"cannot listen on {host}, port {port}: {reason}; choose another host= or port="
        raise ProtosteerError(message, code="cannot-listen", host=host, port=port) from error
    # Small answers go out at once; connections inherit the option.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error with {"detail": one line}."""

    @app.exception_handler(ProtosteerError)
    async def answer_error(request: Request, error: ProtosteerError) -> Response:
        if isinstance(error, RequestError):
            return JSONResponse({"detail": str(error)}, error.status, error.headers)
        status = 422 if isinstance(error, DataError) else 409 if isinstance(error, LearnerError) else 500
        return JSONResponse({"detail": str(error)}, status)

    @app.exception_handler(RequestValidationError)
    async def answer_bad_option(request: Request, error: RequestValidationError) -> Response:
        fault = error.errors()[0]
        option = fault["loc"][-1]
        return JSONResponse({"detail": f"option {option} = {fault.get('input')!r}: {fault['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        target = printable(f"{request.method} {request.scope['path']}")
        detail = f"{target}: {error.detail}; /docs lists what there is"
        return JSONResponse({"detail": detail}, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def answer_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_GONE)


def _add_pages(app: FastAPI) -> None:
    folder = Path(__file__).with_name("page")

    def inline_script(script: re.Match[bytes]) -> bytes:
        return b"<script>%s</script>" % (folder / script[1].decode()).read_bytes()

    def add(route: str, name: str) -> None:
        """Inline the scripts of a page, so that its policy can allow them by their hashes."""
        content = re.sub(rb'<script src="(\w+\.js)"></script>', inline_script, (folder / name).read_bytes())
        kind, _ = mimetypes.guess_type(name)
        headers = {"Content-Security-Policy": page_policy(content)} if kind == "text/html" else {}
        answer = partial(Response, content, headers=headers, media_type=kind)
        app.add_api_route(route, lambda: answer(), include_in_schema=False)

    add("/", "page.html")
    add("/docs", "docs.html")
    add("/style.css", "style.css")
