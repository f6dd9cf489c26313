"""The report about runs: what it says, and how it behaves in a headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from expect import expect_cli_error
from photo_toys import photos
from protosteer.cli import main
from protosteer.report import svg

RUN = "run split-digits --seeds 0,1 --set centroids=2 --set prompts=false --tasks 2 --test-per-class 6 --train-per-class 5"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small comparable runs of two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for rule in ("paper", "evidence"):
        words = f"{RUN} --method cpp --set rule={rule} --out {folder / rule}"
        assert main(words.split()) == 0
    return folder


@pytest.fixture(scope="module")
def page(runs: Path) -> Path:
    out = runs.parent / "report.html"
    assert main(["report", f"nearest <b>={runs / 'paper'}", f"ours={runs / 'evidence'}", "--tsne", "-o", str(out)]) == 0
    return out


def test_report_is_one_small_file_that_says_everything(page: Path, runs: Path) -> None:
    text = page.read_text()
    assert page.stat().st_size < 3_000_000 and "<b>=" not in text and "nearest &lt;b&gt;" in text
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "default-src 'none'" in text
    for heading in (
        "Results", "Settings that differ", "Accuracy after each task", "Accuracy matrix", "Forgetting per task",
        "Classes", "Most confused", "Reliability", "Forward passes and bytes", "t-SNE", "Time per task", "How it was run",
    ):  # fmt: skip
        assert f"<h2>{heading}" in text, heading
    assert "McNemar" in text and "commit" in text and text.count("data:image/jpeg") > 0
    expect_cli_error("bad-suffix", "report", runs / "paper", "-o", "page.txt")
    expect_cli_error("conflicting-options", "report", runs / "paper", "--test", runs)


def test_report_of_a_model_on_test_images(tmp_path: Path) -> None:
    model, out = tmp_path / "shop.protosteer", tmp_path / "shop.html"
    train, test = (photos(tmp_path / name, ["ant", "bee"], seed=k) for k, name in enumerate(("train", "test")))
    assert main(["learn", str(model), str(train), "--preset", "instant", "--backbone", "nano"]) == 0
    assert main(["report", str(model), "--test", str(test), "-o", str(out)]) == 0
    assert "Right, but least certain" in out.read_text()
    expect_cli_error("conflicting-options", "report", model)


def test_ranges_are_round_and_cover_the_values() -> None:
    for low, high in ((0.0, 0.0), (93.2, 97.5), (-3.0, 1.0), (1e5, 9e6), (5.0, 5.0), (0.001, 0.0013)):
        first, last, step = svg.nice_range(low, high)
        assert first <= low <= high <= last and first < last and (last - first) / step <= 10


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    from screenshot_page import browsing, find_browser

    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed")
    with browsing(executable) as found:
        yield found


@pytest.mark.slow
def test_page_in_a_browser(page: Path, browser) -> None:
    """Light and dark differ, a phone needs no sideways scrolling, values show on hover, tables sort."""
    errors: list[str] = []
    papers = set()
    for scheme, width in (("light", 1240), ("dark", 1240), ("light", 360)):
        tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: request.url.startswith(("file:", "data:")) or errors.append(request.url))
        tab.goto(page.as_uri())
        papers.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        dot = tab.locator("circle[data-tip]").first
        dot.hover()
        assert tab.locator("#tip").inner_text() == dot.get_attribute("data-tip")
        head = tab.locator("section:has(h2:text('Classes')) th").nth(1)
        column = tab.locator("section:has(h2:text('Classes')) td:nth-child(2)")
        for sign in (1, -1):
            head.click()
            numbers = [float(cell.split()[0]) for cell in column.all_inner_texts()]
            assert numbers == sorted(numbers, reverse=sign < 0)
        tab.close()
    assert not errors and len(papers) == 2
