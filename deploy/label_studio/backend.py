"""A machine learning backend for Label Studio: image classes that a protosteer service proposes and learns.

    protosteer serve shop.protosteer --allow-teach
    python backend.py --service http://127.0.0.1:8000 --port 9090

Label Studio requests pre-annotations at /predict and reports annotations at /webhook (older versions at /train). The
backend passes both to the service, which has the model. Pictures are fetched only from Label Studio and from hosts that
you name by --image-host, so that a task cannot cause requests to other hosts. In the environment:
PROTOSTEER_TOKEN, the service's token for learning; LABEL_STUDIO_URL and LABEL_STUDIO_API_KEY, to fetch pictures;
BACKEND_SECRET: if set, the address is http://127.0.0.1:9090/SECRET, and without it only /health answers.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import secrets
import xml.etree.ElementTree as XML
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin

import requests
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from urllib3.util import Url, parse_url

from protosteer.serve.middleware import HostCheck

logger = logging.getLogger("protosteer.label_studio")

PICTURE_BYTES = 20 * 2**20  # as the service's own limit
SECONDS = 60
SURROGATE = re.compile("[\ud800-\udfff]")
AT_ONCE = 8  # pictures that are fetched and predicted at the same time; the service joins them to batches


class Trouble(Exception):
    """One line: what was wrong, and what to do."""


def field(record: dict[str, Any], name: str, kind: type[Any]) -> Any:
    """Return a field of a request, empty if it is absent or null; raise `Trouble` if it has another type."""
    value = record.get(name)
    return kind() if value is None else checked(value, name, kind)


def records(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a field that is a list of JSON objects."""
    return [checked(value, name, dict) for value in field(record, name, list)]


def checked(value: Any, name: str, kind: type[Any]) -> Any:
    """Check a value's type and return it; text with half of a surrogate pair is rejected."""
    if not isinstance(value, kind) or (isinstance(value, str) and not value.isascii() and SURROGATE.search(value)):
        raise Trouble(f"field '{name}' of the request is not a valid {kind.__name__}")
    return value


@dataclass(frozen=True)
class Config:
    """A project's labelling interface: which choices, for which picture of a task."""

    choices: str  # name of the tag
    picture: str  # name of the tag
    key: str  # the picture's key in a task's data
    labels: frozenset[str]  # empty: they come with the tasks

    @classmethod
    def read(cls, text: str) -> Config:
        try:
            root = XML.fromstring(text)
        except (XML.ParseError, ValueError) as error:
            raise Trouble(f"the labelling interface is not XML ({error}); save it again") from error
        pictures = {tag.get("name"): tag.get("value", "") for tag in root.iter("Image")}
        for tag in root.iter("Choices"):
            name, picture = tag.get("name"), tag.get("toName")
            if name and picture and pictures.get(picture, "").startswith("$"):
                labels = frozenset(choice.get("alias") or choice.get("value") or "" for choice in tag.iter("Choice"))
                return cls(name, picture, pictures[picture][1:], labels)
        raise Trouble("the labelling interface needs <Image name value='$...'> and <Choices toName> of it")

    def result(self, label: str) -> dict[str, Any]:
        value = {"choices": [label]}
        return {"from_name": self.choices, "to_name": self.picture, "type": "choices", "value": value}

    def choice(self, annotation: dict[str, Any]) -> str | None:
        """Return the class that a person chose; None if the annotation was skipped or names several."""
        if annotation.get("was_cancelled"):
            return None
        labels = [
            label
            for region in records(annotation, "result")
            if region.get("from_name") == self.choices and region.get("type") == "choices"
            for label in field(field(region, "value", dict), "choices", list)
        ]
        return checked(labels[0], "choices", str) if len(labels) == 1 else None


def urljoined(base: str, address: str) -> str:
    """Resolve an address; raise `Trouble` for characters that programs understand in different ways."""
    if re.search(r"[\\\s\x00-\x20\x7f-\x9f]", address) or SURROGATE.search(address):
        raise Trouble("addresses with backslashes, spaces or control characters are not fetched; encode them with %")
    try:
        return urljoin(base, address)
    except ValueError as error:
        raise Trouble(f"pictures of this address are not fetched ({error})") from error


def parsed(address: str) -> Url:
    """Parse an address as `requests` does."""
    try:
        url = parse_url(address)
    except ValueError as error:
        raise Trouble(f"pictures of this address are not fetched ({error})") from error
    if url.auth is not None:
        raise Trouble("addresses with a user name are not fetched; remove what is before the @")
    return url


def place(url: Url) -> tuple[str | None, str | None, int | None]:
    """Return scheme, host and port."""
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme or "")


@dataclass(frozen=True)
class LabelStudio:
    """The source of pictures. The key is sent to Label Studio only."""

    url: str
    key: str | None
    image_hosts: frozenset[str] = frozenset()

    def picture(self, address: str) -> bytes:
        """Fetch the picture at an address of a task, such as /data/upload/1/cat.jpg."""
        studio_url, url = parsed(self.url), parsed(urljoined(self.url.rstrip("/") + "/", address))
        full_url, headers = url.url, {}
        if place(url) == place(studio_url):
            headers = {"Authorization": f"Token {self.key}"} if self.key else {}
        elif url.scheme not in ("http", "https") or url.host not in self.image_hosts:
            raise Trouble(f"pictures of {url.scheme}://{url.netloc} are not fetched; allow it by --image-host")
        # A redirection could lead anywhere.
        with requests.get(full_url, headers=headers, timeout=SECONDS, stream=True, allow_redirects=False) as answer:
            if answer.status_code != 200:
                raise Trouble(f"{full_url} gives {answer.status_code}; is LABEL_STUDIO_API_KEY right?")
            data = b""
            for part in answer.iter_content(2**16):
                data += part
                if len(data) > PICTURE_BYTES:
                    raise Trouble(f"{full_url} is larger than {PICTURE_BYTES:,} bytes")
            return data


@dataclass(frozen=True)
class Service:
    """A protosteer service. url: with /models/NAME at its end for one of several models."""

    url: str
    token: str | None

    def ask(self, method: str, route: str, picture: bytes | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        files = [("images", ("picture", picture))] if picture is not None else None
        address = self.url.rstrip("/") + route
        answer = requests.request(method, address, headers=headers, files=files, timeout=SECONDS)
        if not answer.ok:
            raise Trouble(f"the service says {answer.status_code}: {_detail(answer)}")
        return answer.json()

    def predict(self, picture: bytes) -> dict[str, Any]:
        return self.ask("POST", "/predict?top=100", picture)["predictions"][0]

    def classes(self) -> list[dict[str, Any]]:
        return self.ask("GET", "/classes")["classes"]

    def learn(self, label: str, picture: bytes) -> str:
        """Learn a picture that a person has put into a class, if it is misclassified; return what was done.

        All annotations are learned here.
        """
        is_known = any(entry["name"] == label for entry in self.classes())
        if is_known and self.predict(picture)["label"] == label:
            return "known so already"
        correction = self.ask("POST", f"/corrections?class={quote(label, safe='')}", picture)
        return f"corrected from {correction['taken_for']}" if is_known else "new class"

    def version(self) -> str:
        """Return a version that changes with the classes: Label Studio requests newer predictions by it."""
        return f"protosteer-{hashlib.sha256(repr(self.classes()).encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Backend:
    service: Service
    studio: LabelStudio

    def predict(self, tasks: Sequence[dict[str, Any]], config: Config) -> list[dict[str, Any]]:
        """Predict tasks, in their order; a prediction may have no result."""
        version = self.service.version()

        def predict_task(task: dict[str, Any]) -> dict[str, Any]:
            return {"model_version": version, **self._proposal(task, config)}

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(predict_task, tasks))

    def _proposal(self, task: dict[str, Any], config: Config) -> dict[str, Any]:
        try:
            row = self.service.predict(self._picture(task, config))
        except (Trouble, requests.RequestException) as error:
            logger.warning("task %a: %s", task.get("id"), error)
            return {"result": [], "score": 0.0}
        for entry in row["top"]:
            if entry["label"] in config.labels or not config.labels:
                is_known = not row["unknown"]  # nothing is proposed for a picture unlike all classes
                return {"result": [config.result(entry["label"])] * is_known, "score": entry["probability"]}
        return {"result": [], "score": 0.0}

    def learn(self, task: dict[str, Any], annotations: Iterable[dict[str, Any]], config: Config) -> list[str]:
        answers = []
        for annotation in annotations:
            label = config.choice(annotation)
            if label is not None:
                answers.append(f"{label}: {self.service.learn(label, self._picture(task, config))}")
        return answers

    def _picture(self, task: dict[str, Any], config: Config) -> bytes:
        address = field(field(task, "data", dict), config.key, str)
        if not address:
            raise Trouble(f"a task has no '{config.key}'")
        return self.studio.picture(address)


def create_app(backend: Backend, host_names: Iterable[str] = (), secret: str | None = None) -> FastAPI:
    """Build the application.

    Args:
        backend: Answers the requests.
        host_names: Allowed host names of requests, besides localhost and IP addresses, as in the service.
        secret: First part of the path of all routes but /health; None for no secret.
    """
    app = FastAPI(title="protosteer for Label Studio", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HostCheck, names=host_names)

    @app.exception_handler(Trouble)
    async def trouble(request: Request, error: Trouble) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": "the request is not a JSON object; send what Label Studio sends"}, 422)

    @app.exception_handler(requests.RequestException)
    async def away(request: Request, error: requests.RequestException) -> JSONResponse:
        return JSONResponse({"detail": f"the service or Label Studio does not answer ({error})"}, 503)

    def check_secret(request: Request) -> None:
        secret_in_path = request.path_params.get("secret", "")
        if secret is not None and not secrets.compare_digest(secret_in_path.encode(), secret.encode()):
            raise HTTPException(404, "no such address; has it the right BACKEND_SECRET?")

    @app.get("/")
    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "UP", "model_class": "protosteer"}

    routes = APIRouter(prefix="" if secret is None else "/{secret}", dependencies=[Depends(check_secret)])
    routes.add_api_route("/health", health)

    @routes.post("/setup")
    def setup(request: dict[str, Any]) -> dict[str, str]:
        Config.read(field(request, "schema", str))
        return {"model_version": backend.service.version()}

    @routes.post("/predict")
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        config = Config.read(field(request, "label_config", str))
        return {"results": backend.predict(records(request, "tasks"), config)}

    @routes.post("/webhook", status_code=201)
    def webhook(event: dict[str, Any]) -> dict[str, Any]:
        if event.get("action") not in ("ANNOTATION_CREATED", "ANNOTATION_UPDATED"):
            return {
                "status": "ok",
                "result": [],
            }  # annotations are learned at once: there is no training to start
        config = Config.read(field(field(event, "project", dict), "label_config", str))
        annotation = field(event, "annotation", dict)
        return {"status": "ok", "result": backend.learn(field(event, "task", dict), [annotation], config)}

    @routes.post("/train", status_code=201)
    def train(request: dict[str, Any]) -> dict[str, Any]:
        """Learn from all tasks that have annotations: what Label Studio called before it had webhooks."""
        config = Config.read(field(request, "label_config", str))
        answers = [
            line
            for task in records(request, "annotations")
            for line in backend.learn(task, records(task, "annotations"), config)
        ]
        return {"status": "ok", "result": answers}

    app.include_router(routes)
    return app


def _detail(answer: requests.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.reason


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--service", default="http://127.0.0.1:8000", help="address of `protosteer serve`")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9090)
    parser.add_argument("--image-host", action="append", default=[], help="a host of pictures beside Label Studio")
    parser.add_argument(
        "--host-name",
        action="append",
        default=[],
        help="an allowed host name of requests, besides localhost and IP addresses",
    )
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    studio = LabelStudio(
        os.environ.get("LABEL_STUDIO_URL", "http://127.0.0.1:8080"),
        os.environ.get("LABEL_STUDIO_API_KEY") or None,
        frozenset(name.lower() for name in options.image_host),
    )
    service = Service(options.service, os.environ.get("PROTOSTEER_TOKEN") or None)
    names, secret = [options.host, *options.host_name], os.environ.get("BACKEND_SECRET") or None
    app = create_app(Backend(service, studio), names, secret)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
