"""A picture of the web UI, taken by a headless Chromium from the real service on a model of photographs.

    python tools/screenshot_page.py --out docs/images/page.png

The model (backbone mini, nothing trained) knows six details of scikit-learn's two photographs, in two tasks. The web UI is
shown new details of them, and one of a class that it does not know. Needs `pip install 'protosteer[serve]' playwright` and a
Chromium that is installed; none is downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from fastapi import FastAPI
from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright
from sklearn.datasets import load_digits, load_sample_image

from protosteer.backbones import Backbone
from protosteer.data.datasets.sklearn_photos import FIELDS
from protosteer.learner import Learner
from protosteer.serve.app import Server, create_app
from protosteer.settings import Settings
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import learn_folder

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TASKS = {"January": ("zero", "one", "two"), "February": ("three", "four"), "March": ("five", "six")}
LEARNED = 1000  # images from which the model may learn; the others are new to it
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Nothing but the page may use the network.
QUIET = ("quic", "background-networking", "component-update", "sync")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", *(f"--disable-{feature}" for feature in QUIET)]
SIZE: ViewportSize = {"width": 1240, "height": 1240}


def find_browser() -> str | None:
    """The Chromium on this machine."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def draw_digits(folder: Path, name: str, count: int, new: bool = False) -> list[Path]:
    """Pictures of one digit as PNG files, 8 x 8 pixels each; `new` ones are never learned."""
    digits = load_digits()
    rows = np.flatnonzero(digits.target == NAMES.index(name))
    selection = rows[rows >= LEARNED][:count] if new else rows[rows < LEARNED][:count]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{row}.png" for row in selection]
    for row, path in zip(selection, paths, strict=True):
        Image.fromarray((digits.images[row] * 255 / 16).astype(np.uint8)).save(path)
    return paths


def learn_digits(
    folder: Path, settings: Settings, per_class: int = 80, tasks: Mapping[str, Sequence[str]] = TASKS
) -> Learner:
    """A learner of some digits, saved as digits.protosteer in `folder`."""
    learner = Learner(Backbone.load("nano"), settings)
    for task, classes in tasks.items():
        for name in classes:
            draw_digits(folder / task / name, name, per_class)
        learn_folder(learner, scan_folder(folder / task))
    learner.save(folder / "digits.protosteer")
    return learner


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Address of the app on a free port of this machine, until the block ends."""
    callback = socket.create_server(("127.0.0.1", 0))
    server = Server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [callback]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{callback.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        callback.close()


@contextmanager
def browsing(executable: str, flags: Sequence[str] = ()) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=[*FLAGS, *flags])
        yield browser
        browser.close()


def show(page: Page, address: str, pictures: Sequence[Path]) -> None:
    """Open the page and hand it the pictures; done when each has its answer."""
    page.goto(address)
    page.locator(".dot").first.wait_for()
    page.locator("#files").set_input_files(pictures)
    page.locator(f".cards:has(> .card:nth-child({min(len(pictures), 6)}) .scores)").wait_for()


def photograph(browser: Browser, address: str, pictures: Sequence[Path], out: Path) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
    show(page, address, pictures)
    page.locator(".card").nth(1).hover()
    page.screenshot(path=out)
    page.close()


def cut_details(folder: Path, name: str, count: int, seed: int) -> list[Path]:
    """Squares from anywhere in a region of a photograph, as PNG files."""
    photograph, left, top, right, bottom = FIELDS[name]
    region = load_sample_image(photograph)[top:bottom, left:right]
    draw, paths = np.random.default_rng(seed), []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        side = int(min(region.shape[:2]) * draw.uniform(0.6, 0.95))
        y, x = (int(draw.integers(0, length - side + 1)) for length in region.shape[:2])
        paths.append(folder / f"{name}-{number}.png")
        Image.fromarray(region[y : y + side, x : x + side]).save(paths[-1])
    return paths


def learn_details(folder: Path) -> Learner:
    """A learner of six details in two tasks, saved as garden.protosteer in `folder`."""
    learner = Learner(Backbone.load("mini"), Settings.preset("instant"))
    for task, classes in {"spring": ("roof", "gallery", "lake"), "summer": ("bush", "tree", "heart")}.items():
        for seed, name in enumerate(classes):
            cut_details(folder / task / name, name, 20, seed)
        learn_folder(learner, scan_folder(folder / task))
    learner.save(folder / "garden.protosteer")
    return learner


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    out = parser.parse_args(arguments).out
    executable = find_browser()
    if executable is None:
        raise SystemExit(f"no browser is installed; install one of: {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        learner = learn_details(folder)
        names = ("heart", "roof", "leaf", "tree")
        pictures = [path for name in names for path in cut_details(folder / "new", name, 1, 100)]
        app = create_app(learner, folder / "garden.protosteer", allow_teach=True, token="token")
        with serving(app) as address, browsing(executable) as browser:
            photograph(browser, address, pictures, out)
    with Image.open(out) as picture:
        picture.convert("RGB").quantize(256).save(out, optimize=True)
    print(f"wrote {out}: {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
