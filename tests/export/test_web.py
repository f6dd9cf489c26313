"""The exported page predicts in a headless Chromium as the learner does, also without a network."""

import base64
import functools
import http.server
import io
import json
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra `onnx`)")

from test_onnx import digit_files, evidence_learner, mixed_learner, odd_images, pictures

from conftest import easy_task, tiny_backbone
from expect import expect_error
from protosteer.errors import ProtosteerError
from protosteer.export import web
from protosteer.learner import Learner
from protosteer.settings import Settings
from protosteer.util.files import file_hash
from protosteer.workflows.ood import Rejection

pytestmark = pytest.mark.slow

PREDICT = "data => protosteer.predict(new Blob([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))]))"
READABLE = {"turned.jpg", "bits.png", "palette.png", "ribbon.png", "dot.png"}  # by browsers, without rounding of alpha


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def runtime() -> dict[str, bytes]:
    """onnxruntime-web from the user's cache, where the command puts it, or from npm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PROTOSTEER_CACHE")
        try:
            return web.runtime_files(print)
        except ProtosteerError as error:
            pytest.skip(f"onnxruntime-web cannot be had: {error}")


@pytest.mark.parametrize("build", [evidence_learner, mixed_learner])
def test_the_page_predicts_as_the_learner_does(
    build: Callable[[Path], Learner], runtime: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    from screenshot_page import browsing, find_browser

    if not (executable := find_browser()):
        pytest.skip("no Chromium is installed")
    learner = build(tmp_path)
    monkeypatch.setattr(web, "runtime_files", lambda _: runtime)
    web.export_web(learner, tmp_path / "web", "<digits> & more")
    (tmp_path / "odd").mkdir()
    paths = pictures(digit_files(tmp_path / "test", list(range(10)), 100, 3))
    # As wide as three times its height, and the reverse: Pillow resizes these in another order.
    noise = np.random.default_rng(1).integers(0, 256, (300, 100, 3), dtype=np.uint8)
    for name, pixels in (("high", noise), ("wide", noise.transpose(1, 0, 2))):
        Image.fromarray(pixels).save(tmp_path / "test" / f"{name}.png")
        paths.append(str(tmp_path / "test" / f"{name}.png"))
    paths += [path for path in odd_images(tmp_path / "odd") if Path(path).name in READABLE]
    ours = learner.predict(paths)
    with browsing(executable) as browser:
        page = browser.new_page()
        with serving(tmp_path / "web") as address:
            page.goto(address)
            theirs = [page.evaluate(PREDICT, base64.b64encode(Path(path).read_bytes()).decode()) for path in paths]
            assert page.locator("h1").inner_text() == "<digits> & more"
        # The server is gone: all that follows comes from the service worker's cache.
        page.reload()
        page.set_input_files("#files", [paths[0], str(tmp_path / "web" / "README.md")])
        page.locator("#answers .bars").wait_for(timeout=120_000)
        assert page.locator("#answers h2").inner_text() == ours.labels[0]
        page.locator("#answers .bad").get_by_text("cannot read the picture").wait_for(timeout=120_000)
    assert [found["label"] for found in theirs] == ours.labels
    probabilities, similarities = ours.probabilities.amax(1).tolist(), ours.similarities.amax(1).tolist()
    assert [found["probability"] for found in theirs] == pytest.approx(probabilities, abs=1e-3)
    assert len(set(ours.passes.tolist())) >= 3, "images should take every way there is"
    rejection = Rejection(learner, 0.05)
    for found, label, greatest in zip(theirs, ours.labels, similarities, strict=True):
        if abs(greatest - rejection.threshold) > 1e-3:
            assert found["unknown"] == rejection.unknown(label, greatest)


def test_the_runtime_comes_from_the_registry_that_is_set_and_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOSTEER_CACHE", str(tmp_path / "cache"))
    archive = tmp_path / "registry" / "onnxruntime-web" / "-" / f"onnxruntime-web-{web.VERSION}.tgz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as package:
        for name in web.RUNTIME_FILES:
            member = tarfile.TarInfo(f"package/dist/{name}")
            member.size = len(name)
            package.addfile(member, io.BytesIO(name.encode()))
    with serving(tmp_path / "registry") as address:
        monkeypatch.setenv("npm_config_registry", f"{address}/")
        with expect_error("download-failed", ProtosteerError):
            web.runtime_files(print)
        assert not list((tmp_path / "cache").rglob("*.tgz"))
        monkeypatch.setattr(web, "SHA512", file_hash(archive, "sha512"))
        assert web.runtime_files(print) == {name: name.encode() for name in web.RUNTIME_FILES}
    assert web.runtime_files(print)["ort.wasm.bundle.min.mjs"]  # from the cache


def test_a_linked_page_has_no_runtime_and_replaces_an_earlier_export(tmp_path: Path) -> None:
    learner = Learner(tiny_backbone(), Settings.preset("instant"))
    learner.learn(easy_task(["ant", "bee"]))
    folder = tmp_path / "web"
    for _ in range(2):
        written = web.export_web(learner, folder, "insects", link=True)
    assert {path.name for path in written} == set(web.FILES) - set(web.RUNTIME_FILES) == set(os.listdir(folder))
    about = json.loads((folder / "model.json").read_bytes())
    assert about["labels"] == ["ant", "bee"] and about["runtime"].startswith(f"{web.CDN}/npm/onnxruntime-web@")
    assert web.CDN in (folder / "index.html").read_text()
    assert about["arrays"]["prompts"]["shape"][2] == 1, "WebGPU has no empty tensors"
    (folder / "notes.txt").write_text("precious")
    with expect_error("cannot-write", ProtosteerError, path=folder):
        web.export_web(learner, folder, "insects", link=True)
