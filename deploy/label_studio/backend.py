"""A machine learning backend for Label Studio: image classes that a protosteer service proposes and learns.

    protosteer serve shop.protosteer --allow-teach
    python backend.py --service http://127.0.0.1:8000 --port 9090

Label Studio asks for pre-annotations at /predict and tells of annotations at /webhook (older ones at /train); this
translates both for the service, which has the model. Pictures are taken from Label Studio alone, and from hosts
that are named by --image-host, so that a task cannot make it ask anybody else. In the environment:
PROTOSTEER_TOKEN, the service's token for teaching; LABEL_STUDIO_URL and LABEL_STUDIO_API_KEY, to fetch pictures;
BACKEND_SECRET, without which nothing is answered but /health: http://127.0.0.1:9090/SECRET is then the address.
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
AT_ONCE = 8  # pictures that are fetched and predicted at the same time; the service puts them together


class Trouble(Exception):
    """One line: what was wrong, and what to do."""


def field(record: dict[str, Any], name: str, kind: type[Any]) -> Any:
    """Return a field of a request, empty if it is absent or null; raise `Trouble` if it is of another kind."""
    value = record.get(name)
    return kind() if value is None else checked(value, name, kind)


def records(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a field that is a list of JSON objects."""
    return [checked(value, name, dict) for value in field(record, name, list)]


def checked(value: Any, name: str, kind: type[Any]) -> Any:
    """Return a value of the right kind; text with half of a character pair is of no kind."""
    if not isinstance(value, kind) or (isinstance(value, str) and not value.isascii() and SURROGATE.search(value)):
        raise Trouble(f"field '{name}' of the request is not a valid {kind.__name__}")
    return value


@dataclass(frozen=True)
class Config:
    """What a project's labelling interface says: which choices, of which picture of a task."""

    choices: str  # name of the tag
    picture: str  # name of the tag
    key: str  # of the picture in a task's data
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
                labels = frozenset(one.get("alias") or one.get("value") or "" for one in tag.iter("Choice"))
                return cls(name, picture, pictures[picture][1:], labels)
        raise Trouble("the labelling interface needs <Image name value='$...'> and <Choices toName> of it")

    def result(self, label: str) -> dict[str, Any]:
        value = {"choices": [label]}
        return {"from_name": self.choices, "to_name": self.picture, "type": "choices", "value": value}

    def chosen(self, annotation: dict[str, Any]) -> str | None:
        """The one class that a person chose; None of annotations that were skipped or name several."""
        if annotation.get("was_cancelled"):
            return None
        found = [
            label
            for region in records(annotation, "result")
            if region.get("from_name") == self.choices and region.get("type") == "choices"
            for label in field(field(region, "value", dict), "choices", list)
        ]
        return checked(found[0], "choices", str) if len(found) == 1 else None


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
    """Where pictures are. The key is sent to Label Studio and to nobody else."""

    url: str
    key: str | None
    image_hosts: frozenset[str] = frozenset()

    def picture(self, address: str) -> bytes:
        """address: as it stands in a task, such as /data/upload/1/cat.jpg."""
        own, asked = parsed(self.url), parsed(urljoined(self.url.rstrip("/") + "/", address))
        full, headers = asked.url, {}
        if place(asked) == place(own):
            headers = {"Authorization": f"Token {self.key}"} if self.key else {}
        elif asked.scheme not in ("http", "https") or asked.host not in self.image_hosts:
            raise Trouble(f"pictures of {asked.scheme}://{asked.netloc} are not fetched; allow it by --image-host")
        # A redirection could lead anywhere.
        with requests.get(full, headers=headers, timeout=SECONDS, stream=True, allow_redirects=False) as answer:
            if answer.status_code != 200:
                raise Trouble(f"{full} gives {answer.status_code}; is LABEL_STUDIO_API_KEY right?")
            data = b""
            for part in answer.iter_content(2**16):
                data += part
                if len(data) > PICTURE_BYTES:
                    raise Trouble(f"{full} is larger than {PICTURE_BYTES:,} bytes")
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
        """One picture that a person has put into a class; says what came of it.

        The one place that decides how annotations are learned.
        """
        known = any(one["name"] == label for one in self.classes())
        if known and self.predict(picture)["label"] == label:
            return "known so already"
        told = self.ask("POST", f"/corrections?class={quote(label, safe='')}", picture)
        return f"corrected from {told['taken_for']}" if known else "new class"

    def version(self) -> str:
        """Changes with what is known: Label Studio asks again for tasks that have only older predictions."""
        return f"protosteer-{hashlib.sha256(repr(self.classes()).encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Backend:
    service: Service
    studio: LabelStudio

    def predict(self, tasks: Sequence[dict[str, Any]], config: Config) -> list[dict[str, Any]]:
        """One prediction per task, in their order; without a result where there is none to give."""
        version = self.service.version()

        def one(task: dict[str, Any]) -> dict[str, Any]:
            return {"model_version": version, **self._proposal(task, config)}

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, tasks))

    def _proposal(self, task: dict[str, Any], config: Config) -> dict[str, Any]:
        try:
            row = self.service.predict(self._picture(task, config))
        except (Trouble, requests.RequestException) as error:
            logger.warning("task %a: %s", task.get("id"), error)
            return {"result": [], "score": 0.0}
        for best in row["top"]:
            if best["label"] in config.labels or not config.labels:
                known = not row["unknown"]  # of a picture unlike all classes nothing is proposed
                return {"result": [config.result(best["label"])] * known, "score": best["probability"]}
        return {"result": [], "score": 0.0}

    def learn(self, task: dict[str, Any], annotations: Iterable[dict[str, Any]], config: Config) -> list[str]:
        told = []
        for annotation in annotations:
            label = config.chosen(annotation)
            if label is not None:
                told.append(f"{label}: {self.service.learn(label, self._picture(task, config))}")
        return told

    def _picture(self, task: dict[str, Any], config: Config) -> bytes:
        address = field(field(task, "data", dict), config.key, str)
        if not address:
            raise Trouble(f"a task has no '{config.key}'")
        return self.studio.picture(address)


def create_app(backend: Backend, host_names: Iterable[str] = (), secret: str | None = None) -> FastAPI:
    """Build the application.

    Args:
        backend: What answers.
        host_names: Names it may be asked by, besides localhost and IP addresses: the rules of the service.
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
        given = request.path_params.get("secret", "")
        if secret is not None and not secrets.compare_digest(given.encode(), secret.encode()):
            raise HTTPException(404, "no such address; has it the right BACKEND_SECRET?")

    @app.get("/")
    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "UP", "model_class": "protosteer"}

    routes = APIRouter(prefix="" if secret is None else "/{secret}", dependencies=[Depends(check_secret)])
    routes.add_api_route("/health", health)

    @routes.post("/setup")
    def setup(asked: dict[str, Any]) -> dict[str, str]:
        Config.read(field(asked, "schema", str))
        return {"model_version": backend.service.version()}

    @routes.post("/predict")
    def predict(asked: dict[str, Any]) -> dict[str, Any]:
        config = Config.read(field(asked, "label_config", str))
        return {"results": backend.predict(records(asked, "tasks"), config)}

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
    def train(asked: dict[str, Any]) -> dict[str, Any]:
        """As Label Studio called it before webhooks: all tasks that have annotations."""
        config = Config.read(field(asked, "label_config", str))
        told = [
            line
            for task in records(asked, "annotations")
            for line in backend.learn(task, records(task, "annotations"), config)
        ]
        return {"status": "ok", "result": told}

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
        help="a name it is asked by, besides localhost and IP addresses",
    )
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    studio = LabelStudio(
        os.environ.get("LABEL_STUDIO_URL", "http://127.0.0.1:8080"),
        os.environ.get("LABEL_STUDIO_API_KEY") or None,
        frozenset(name.lower() for name in given.image_host),
    )
    service = Service(given.service, os.environ.get("PROTOSTEER_TOKEN") or None)
    names, secret = [given.host, *given.host_name], os.environ.get("BACKEND_SECRET") or None
    app = create_app(Backend(service, studio), names, secret)
    uvicorn.run(app, host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
