"""Models go to the Hub and come back: the real client against a local stand-in of the Hub."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY, easy_task, tiny_backbone
from protosteer.backbones import Backbone
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.sharing import MODEL_FILE, model_card, without_local_names

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLIENT = """
import sys
from protosteer.cli import main
from protosteer.learner import Learner
print(main(["push", "shop.protosteer", "me/shop", "--private"]))
print(main(["pull", "me/shop", "copy.protosteer"]), main(["pull", "me/shop", "copy.protosteer"]))
print(main(["pull", "me/none"]), main(["pull", "me/bad"]), main(["pull", "not a name"]))
print(Learner.from_pretrained("me/shop").classes)
"""


class Hub(BaseHTTPRequestHandler):
    """Answers what `create_repo`, `create_commit`, `model_info` and `hf_hub_download` ask for."""

    files: dict[str, bytes]
    created: list[dict[str, Any]]

    def log_message(self, *_: object) -> None: ...

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        root = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer(json.dumps({"url": f"{root}/me/shop"}).encode())
        elif self.path == "/api/validate-yaml":
            self.answer(b'{"errors": [], "warnings": []}')
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self.answer(json.dumps({"files": files}).encode())
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[f"me/shop/{line['value']['path']}"] = base64.b64decode(line["value"]["content"])
            done = {"commitUrl": f"{root}/me/shop/commit/{COMMIT}", "commitOid": COMMIT, "pullRequestUrl": None}
            self.answer(json.dumps(done).encode())

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            repo = self.path.removeprefix("/api/models/").partition("/revision")[0]
            if any(name.startswith(f"{repo}/") for name in self.files):
                return self.answer(json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode())
            return self.answer(b"{}", 404, X_Error_Code="RepoNotFound")
        repo, _, rest = self.path.removeprefix("/").partition("/resolve/")
        data = self.files.get(f"{repo}/{rest.partition('/')[2]}")
        if data is None:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound")
        return self.answer(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"')

    do_HEAD = do_GET


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    kind = type("OneHub", (Hub,), {"files": {"me/bad/model.protosteer": b"no model"}, "created": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        server.shutdown()


def learned(backbone: Backbone) -> Learner:
    learner = Learner(backbone, Settings.preset("instant"))
    learner.learn(easy_task(["ant", "bee|<b>"]))
    return learner


def test_a_model_goes_to_the_hub_and_comes_back(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    address, kind = hub
    learned(Backbone.load("nano")).save(tmp_path / "shop.protosteer")
    environment = os.environ | {
        "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub"), "HF_TOKEN": "hf_none",
        "PYTHONPATH": str(REPOSITORY / "src"), "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert lines[0] == f"{address}/me/shop", done.stderr
    assert kind.created[0]["name"] == "shop" and (kind.created[0].get("private") or kind.created[0].get("visibility"))
    assert "\n0 2\n2 2 2\n['ant', 'bee|<b>']" in done.stdout, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "exists" in errors[0] and "no such repository" in errors[1] and "USER/NAME" in errors[3]
    assert set(kind.files) >= {"me/shop/README.md", f"me/shop/{MODEL_FILE}"}
    assert (tmp_path / "copy.protosteer").read_bytes() == kind.files[f"me/shop/{MODEL_FILE}"]
    assert Learner.load(tmp_path / "copy.protosteer").classes == ["ant", "bee|<b>"]


def test_a_card_says_what_the_model_is_and_a_pushed_file_has_no_local_names() -> None:
    learner = learned(tiny_backbone())
    learner.correct(easy_task(["ant"], per_class=1)[0], "bee|<b>")
    card = model_card(learner.model, learner.reader, "me/shop", "mit")
    for part in ("2 classes", 'license: "mit"', learner.backbone.fingerprint, "leave-one-out", "bee&#124;&#60;b&#62;"):
        assert part in card
    assert "<b>" not in card
    model = learner.model
    model.backbone["weights"] = "/home/me/weights.safetensors"
    bare = without_local_names(model)
    assert b"/home/me" in model.pack() and b"/home/me" not in bare.pack()
    assert [task.metadata.file for task in bare.memory.tasks] == [None] * len(learner.tasks)
