"""The page in a headless Chromium, against the real service."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect

from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import Centroids
from protosteer.serve.app import create_app
from protosteer.settings import Settings
from protosteer.workflows.folder_scan import scan_folder
from protosteer.workflows.learn_folder import TaskSlot
from protosteer.workflows.ood import threshold
from protosteer.workflows.thumbnails import MAX_THUMBNAILS, keep_thumbnails
from screenshot_page import SIZE, browsing, draw_digits, find_browser, learn_digits, photograph, serving

pytestmark = pytest.mark.slow


PATIENCE = 120_000  # milliseconds: a busy machine makes tests slow, not wrong
expect.set_options(timeout=PATIENCE)

TOKEN = "let me in"
CLASSES = ["zero", "one", "two", "three", "four", "five", "six"]
NASTY = "<img src=x onerror=alert(1)> / <b>bold</b>"
PHONE = {"width": 360, "height": 740}
# Every text that is seen, with the contrast to what is behind it (WCAG 2.1, relative luminance).
CONTRASTS = """() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parts(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, svg = node.closest("svg");
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest(".unseen, script, noscript")) continue;
    const style = getComputedStyle(node), ink = light(parts(svg ? style.fill : style.color)), paper = light(behind(svg ?? node));
    found.push([walker.currentNode.data.trim(), (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05)]);
  }
  return found;
}"""
GIVE = """(kind, target, files) => {
  const data = new DataTransfer();
  for (const [name, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  document.querySelector(target).dispatchEvent(kind === "paste"
    ? new ClipboardEvent(kind, { ...options, clipboardData: data }) : new DragEvent(kind, { ...options, dataTransfer: data }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed")
    with browsing(executable, ["--use-fake-device-for-media-stream"]) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def learner(folder: Path) -> Learner:
    """LearnResult without prompts, which takes a second, but set up as a model whose prompts can be trained."""
    learner = learn_digits(folder, Settings.preset("paper", prompts=False), per_class=40)
    learner.settings = dataclasses.replace(learner.settings, prompts=True, epochs=1, batch_size=8)
    learner.save(folder / "digits.protosteer")
    return learner


@pytest.fixture(scope="module")
def address(learner: Learner, folder: Path) -> Iterator[str]:
    with serving(create_app(learner, folder / "digits.protosteer", allow_teach=True, token=TOKEN)) as found:
        yield found


Open = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens pages that may reach their own service only and may complain about nothing but `refusals`."""
    refusals, complaints, asked, pages = [], [], [], []

    def open_page(address: str, *expected: str, **options: object) -> Page:
        refusals.extend(expected)
        page = browser.new_page(**options)
        pages.append(page)
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        home = re.match(r"http://[^/]+/", f"{address}/")[0]
        page.on("request", lambda request: asked.append((home, request.url)))
        page.goto(address)
        expect(page.locator(".dot, .panel").first).to_be_visible()
        return page

    yield open_page
    for page in pages:
        page.close()
    # a browser notes each failed request by itself
    noted = re.compile(rf"Failed to load resource: .*({'|'.join(refusals)})" if refusals else "(?!)")
    assert [text for text in complaints if not noted.match(text)] == []
    assert asked
    assert [url for at, url in asked if not url.startswith((at, "blob:", "data:"))] == []


def new(folder: Path, name: str, count: int = 1) -> list[Path]:
    return draw_digits(folder / "new", name, count, new=True)


def choose(page: Page, paths: list[Path]) -> None:
    page.locator("#files").set_input_files(paths)
    expect(page.locator(".card.stale, .waiting")).to_have_count(0)


def expect_titles(page: Page, texts: list[str]) -> None:
    expect(page.locator(".card h3")).to_have_text(texts, use_inner_text=True)


def give(page: Page, kind: str, target: str, paths: list[Path]) -> None:
    """Drop or paste files, as the browser would tell the page of it."""
    files = [[path.name, list(path.read_bytes())] for path in paths]
    page.evaluate(f"([kind, target, files]) => ({GIVE})(kind, target, files)", [kind, target, files])


def test_the_header_says_what_the_model_is(visit, address):
    page = visit(address)
    expect(page.get_by_role("heading", level=1)).to_have_text("digits.protosteer")
    expect(page.locator("#facts")).to_contain_text("7 classes")
    page.locator("#about summary").click()
    expect(page.locator("#more-facts")).to_contain_text("3 tasks")
    expect(page.locator("#more-facts")).to_contain_text("backbone nano")
    assert page.title() == "digits.protosteer · protosteer"


def test_chosen_pictures_get_the_answers_of_the_model(visit, address, folder, learner):
    paths = [path for name in ("five", "zero", "six", "two") for path in new(folder, name)]
    page = visit(address)
    choose(page, paths)
    expected = learner.predict(paths)
    limit = threshold(learner, 0.05)
    assert expected.labels == ["five", "zero", "six", "two"]
    facts = (expected.labels, expected.scores, expected.probabilities, expected.candidates)
    for card, label, scores, shares, tried in zip(page.locator(".card").all(), *facts, strict=True):
        expect(card.locator("h3 .label")).to_have_text(label)
        expect(card.locator("h3 .badge")).to_have_count(int(scores.max() < limit))
        best = scores.argsort(descending=True)[:3].tolist()
        rows = card.locator("tbody tr")
        expect(rows.locator("th")).to_have_text([learner.classes[i] for i in best], use_inner_text=True)
        numbers = [text for i in best for text in (f"{scores[i]:.2f}", f"{100 * shares[i]:.1f} %")]
        expect(rows.locator(".number")).to_have_text(numbers, use_inner_text=True)
        widths = [box["width"] for box in (bar.bounding_box() for bar in rows.locator(".track i").all())]
        track = rows.locator(".track").first.bounding_box()["width"]
        assert [w / track for w in widths] == pytest.approx(scores[best].tolist(), abs=0.03)
        expect(card.locator(".tried p")).to_have_text(f"tried: {', '.join(tried)}")
    expect(page.get_by_role("status").first).to_contain_text("4 pictures.")


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_pictures_can_be_dropped_and_pasted(visit, address, folder, kind):
    page = visit(address)
    give(page, kind, "body", new(folder, "five") + new(folder, "zero"))
    expect(page.locator(".card .scores")).to_have_count(2)
    expect_titles(page, ["five", "zero"])
    give(page, kind, "body", new(folder, "six"))
    expect(page.locator(".card .scores")).to_have_count(3)
    expect_titles(page, ["six", "five", "zero"])  # the newest first
    page.get_by_role("button", name="Remove five-").click()
    expect_titles(page, ["six", "zero"])
    page.get_by_role("button", name="Remove all").click()
    expect(page.locator(".card, .shot")).to_have_count(0)


def test_a_bad_file_is_named_and_the_others_are_answered(visit, address, folder):
    bad = folder / "notes.txt"
    bad.write_text("this is no picture")
    page = visit(address, "422")
    choose(page, [*new(folder, "five"), bad, *new(folder, "zero"), *new(folder, "six")])
    expect_titles(page, ["five", "No answer", "zero", "six"])
    failed = page.locator(".card.failed")
    expect(failed).to_have_count(1)
    expect(failed.locator(".problem")).to_contain_text("notes.txt")


def test_the_map_has_every_class_and_the_pictures_tied_to_their_cards(visit, address, folder):
    page = visit(address)
    names = page.locator(".plot text[data-of]")
    expect(names).to_have_count(len(CLASSES))
    assert sorted(names.all_text_contents()) == sorted(CLASSES)
    expect(page.locator(".dot").first).to_have_attribute("aria-label", "one, January")
    expect(page.locator(".legend li")).to_have_text(["January", "February", "March"], use_inner_text=True)
    choose(page, new(folder, "zero") + new(folder, "six"))
    expect(page.locator(".plot svg > .shot")).to_have_count(2)
    card = page.locator(".card").nth(1)
    card.hover()
    expect(page.locator(".over text")).to_have_text("six")
    tie = page.locator(".over line")
    point = page.locator(".plot svg > .shot").first.get_attribute("transform")  # the newest is drawn last
    assert [float(tie.get_attribute(k)) for k in ("x2", "y2")] == pytest.approx(
        [float(x) for x in re.findall(r"[\d.]+", point)], abs=0.1
    )
    page.locator(".plot svg > .shot").last.hover(force=True)
    expect(page.locator(".card").first).to_have_class(re.compile("linked"))
    expect(card).not_to_have_class(re.compile("linked"))
    page.get_by_text("The map as a table").click()
    rows = page.locator("#map-table tbody tr")
    expect(rows).to_have_count(len(CLASSES) + 2)
    expect(rows.first).to_contain_text("answer zero")


def test_by_evidence_probabilities_come_first(visit, tmp_path):
    learner = learn_digits(tmp_path, Settings.preset("instant"), per_class=40)
    paths = [path for name in ("zero", "nine") for path in new(tmp_path, name)]
    expected, limit = learner.predict(paths), threshold(learner, 0.05)
    shares, similarities = expected.probabilities, expected.similarities
    with serving(create_app(learner, tmp_path / "digits.protosteer", allow_teach=True, token=TOKEN)) as found:
        page = visit(found)
        choose(page, paths)
        for i, card in enumerate(page.locator(".card").all()):
            best = expected.scores[i].argsort(descending=True)[:3].tolist()
            expect(card.locator("thead th.number")).to_have_text(["Probability", "Similarity"], use_inner_text=True)
            rows = card.locator("tbody tr")
            numbers = [x for c in best for x in (f"{100 * shares[i, c]:.1f} %", f"{similarities[i, c]:.2f}")]
            expect(rows.locator(".number")).to_have_text(numbers, use_inner_text=True)
            widths = [box["width"] for box in (bar.bounding_box() for bar in rows.locator(".track i").all())]
            track = rows.locator(".track").first.bounding_box()["width"]
            assert [w / track for w in widths] == pytest.approx(shares[i, best].tolist(), abs=0.03)
            expect(card.locator(".tried p")).to_have_text("1 forward pass")
            expect(card.locator(".tried p")).to_be_hidden()
            expect(card.locator("h3 .badge")).to_have_count(int(similarities[i].max() < limit))
        expect(page.locator(".card h3").last).to_contain_text("if known: ")
        page.get_by_text("How to read an answer").click()
        expect(page.locator("#reading-probability")).to_contain_text("of ten answers with 90 %")
        expect(page.locator("#train-choice")).to_be_hidden()


def test_unknown_pictures_have_a_badge(visit, address, folder, learner):
    paths = new(folder, "nine", 12)
    unknown = (learner.predict(paths).scores.amax(1) < threshold(learner, 0.05)).tolist()
    assert any(unknown)
    page = visit(address)
    choose(page, paths)
    page.get_by_role("button", name="Show all 12 pictures").click()
    for card, badge in zip(page.locator(".card").all(), unknown, strict=True):
        expect(card.locator(".badge")).to_have_count(int(badge))
    expect(page.locator(".plot svg > .shot.unknown")).to_have_count(sum(unknown))
    first = page.locator(".card:has(.badge) h3").first
    expect(first).to_have_text(re.compile(r"unknown\s+closest:\s+\w+"), use_inner_text=True)


def examples(page: Page, name: str, token: str, paths: list[Path]) -> None:
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_label("Name of the class").fill(name)
    page.locator("#example-files").set_input_files(paths)
    page.get_by_role("button", name="Add", exact=True).click()


def delete(page: Page, name: str) -> None:
    page.get_by_role("button", name=f"Delete {name}", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()


def test_a_class_is_taught_recognised_at_once_and_deleted_again(visit, address, folder):
    page = visit(address, "401", "409")
    shown = new(folder, "nine", 3)
    choose(page, shown)
    expect(page.locator(".card h3", has_text="nine")).to_have_count(0)
    taught = draw_digits(folder / "nines", "nine", 5)
    examples(page, "nine", "wrong", taught)
    expect(page.locator("#teach-answer")).to_contain_text("This is not the service's token")
    expect(page.locator("#examples li")).to_have_count(5)  # nothing that was chosen is lost
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator("#teach-answer")).to_contain_text("“nine” was learned from 5 pictures")
    expect(page.locator(".card h3", has_text="nine")).to_have_count(3)
    expect(page.locator(".plot .dot")).to_have_count(8)
    expect(page.locator(".rows li.new")).to_contain_text("nine · 5 images")
    assert page.evaluate("[sessionStorage.token, localStorage.length]") == [TOKEN, 0]

    examples(page, "nine", TOKEN, taught)
    expect(page.locator("#teach-answer")).to_contain_text("“nine” was learned from 5 pictures")
    page.get_by_label("Token", exact=True).fill("wrong")
    delete(page, "nine")
    expect(page.get_by_role("dialog")).to_contain_text("This is not the service's token")
    page.keyboard.press("Escape")
    page.get_by_label("Token", exact=True).fill(TOKEN)
    delete(page, "nine")
    expect(page.get_by_role("dialog")).to_contain_text("“nine” is deleted")
    expect(page.get_by_role("dialog")).to_contain_text("as if this had never been learned")
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    expect(page.locator(".plot .dot")).to_have_count(7)
    expect(page.get_by_role("button", name="Delete nine")).to_have_count(0)
    expect(page.locator(".card h3", has_text="nine")).to_have_count(0)


def test_a_class_is_taught_from_the_camera(visit, evident, tmp_path):
    page = visit(evident[0], permissions=["camera"])
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.get_by_label("Name of the class").fill("fake device")
    page.get_by_role("button", name="Use the camera").click()
    expect(page.locator("#video")).to_have_js_property("videoWidth", 640)  # the fake device's
    for count in (1, 2, 3):
        page.get_by_role("button", name="Take a picture").click()
        expect(page.locator("#examples li")).to_have_count(count)
    page.screenshot(path=tmp_path / "camera.png")
    page.get_by_role("button", name="Stop the camera").click()
    expect(page.locator("#viewfinder")).to_be_hidden()
    page.get_by_role("button", name="Add", exact=True).click()
    expect(page.locator("#teach-answer")).to_contain_text("“fake device” was learned from 3 pictures")
    page.get_by_role("button", name="Take a photo").click()  # to ask about
    page.get_by_role("button", name="Take a picture").click()
    expect(page.locator(".card h3 .label")).to_have_text("fake device")
    page.get_by_role("button", name="Stop the camera").click()
    expect(page.locator(".rows li.new")).to_contain_text("3 of 3 recognised; more pictures would help")
    delete(page, "fake device")
    expect(page.get_by_role("dialog")).to_contain_text("is deleted")


@pytest.mark.parametrize(
    ("error", "words"),
    [("NotAllowedError", "does not let this page use the camera"), ("NotFoundError", "No camera was found")],
)
def test_a_camera_that_cannot_be_used_is_told_in_one_line(visit, evident, error, words):
    page = visit(evident[0])
    refused = f"() => Promise.reject(new DOMException('', '{error}'))"
    page.evaluate(f"() => {{ navigator.mediaDevices.getUserMedia = {refused}; }}")
    page.get_by_role("button", name="Use the camera").click()
    expect(page.locator("#teach-answer.problem")).to_contain_text(words)
    expect(page.locator("#viewfinder")).to_be_hidden()


def test_without_a_camera_in_the_browser_there_is_no_button(visit, evident):
    page = visit(evident[0])
    page.add_init_script("Object.defineProperty(navigator, 'mediaDevices', { value: undefined })")
    page.reload()
    expect(page.locator("#rows li").first).to_be_visible()
    expect(page.locator("#camera")).to_be_hidden()


def wrongly_answered(learner: Learner, folder: Path) -> tuple[Path, str]:
    """A new picture whose answer is another digit's, and what it is."""
    for name in CLASSES:
        paths = new(folder, name, 40)
        for path, label in zip(paths, learner.predict(paths).labels, strict=True):
            if label != name:
                return path, name
    raise AssertionError("all are right")


@pytest.fixture(scope="module")
def evident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Learner, Path]]:
    """The address of a model by evidence, the model, and its folder."""
    folder = tmp_path_factory.mktemp("evident")
    learner = learn_digits(folder, Settings.preset("instant"), per_class=20)
    with serving(create_app(learner, folder / "digits.protosteer", allow_teach=True, token=TOKEN)) as found:
        yield found, learner, folder


def test_a_wrong_answer_is_corrected_at_once_logged_and_taken_back(visit, evident):
    address, learner, folder = evident
    path, name = wrongly_answered(learner, folder)
    page = visit(address, "401")
    choose(page, [path])
    card = page.locator(".card")
    wrong = card.locator("h3 .label").inner_text()
    card.get_by_role("button", name="another").click()
    card.get_by_role("combobox").fill(name)
    card.get_by_role("button", name="Correct", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    card.get_by_role("button", name="Correct", exact=True).click()
    page.get_by_role("dialog").get_by_role("textbox").fill("wrong")
    page.get_by_role("dialog").get_by_role("button", name="Go on").click()
    expect(card.locator(".fix .problem")).to_contain_text("This is not the service's token")
    card.get_by_role("combobox").press("Enter")  # what was typed is still there
    page.get_by_role("dialog").get_by_role("textbox").fill(TOKEN)
    page.get_by_role("dialog").get_by_role("textbox").press("Enter")
    expect(card.locator("h3 .label")).to_have_text(name)
    expect(card.locator(".fix .good")).to_contain_text(f"Told: not “{wrong}” but “{name}”.")
    expect(page.locator("#facts")).to_contain_text("1 correction")
    row = page.locator("#log li")
    expect(row).to_contain_text(path.name)
    expect(row).to_contain_text(f"taken for {wrong}, is {name}")
    expect(page.locator(".legend")).not_to_contain_text("correction")  # of no class that is on the map
    page.reload()  # the log needs the token, which the tab has kept
    expect(row).to_have_count(1)
    row.get_by_role("button", name="Undo").click()
    expect(page.locator("#corrections")).to_be_hidden()
    choose(page, [path])
    expect(card.locator("h3 .label")).to_have_text(wrong)


def test_the_second_likeliest_is_one_click_and_a_new_class_can_be_typed(visit, evident):
    address, _, folder = evident
    page = visit(address)
    page.get_by_label("Token", exact=True).fill(TOKEN)
    choose(page, new(folder, "zero") + new(folder, "nine"))
    first, second = page.locator(".card").all()
    likely = first.locator("tbody th").nth(1).inner_text()
    first.locator(".no-it-is").get_by_role("button", name=likely, exact=True).click()
    expect(first.locator("h3 .label")).to_have_text(likely)
    first.get_by_role("button", name="Undo").click()
    expect(first.locator(".fix p")).to_have_text("Taken back.")
    expect(first.locator("h3 .label")).to_have_text("zero")
    second.get_by_role("button", name="another").click()
    second.get_by_role("combobox").fill(NASTY)
    second.get_by_role("combobox").press("Enter")
    expect(second.locator("h3 .label")).to_have_text(NASTY)
    expect(page.locator(".rows li.new small")).to_contain_text("correction · 1 image")
    second.get_by_role("button", name="Undo").click()
    expect(page.locator(".rows li")).to_have_count(7)


def test_many_answers_are_confirmed_corrected_at_once_and_saved(visit, evident):
    address, learner, folder = evident
    page = visit(address)
    page.get_by_label("Token", exact=True).fill(TOKEN)
    paths = new(folder, "zero", 2) + new(folder, "nine", 2)
    choose(page, paths)
    cards = page.locator(".card")
    first = cards.first.locator("h3 .label").inner_text()
    cards.first.get_by_role("button", name="Yes, right").click()
    expect(cards.first.locator(".fix .good")).to_contain_text(f"Told: it is “{first}”.")
    expect(cards.first.get_by_role("button", name="Yes, right")).to_be_hidden()
    expect(page.locator("#log li")).to_contain_text(f"confirmed: {first}")
    before = page.locator("#log li").count()
    cards.nth(1).get_by_role("checkbox").check()
    page.get_by_role("button", name="The answers are right").click()
    expect(page.locator("#log li")).to_have_count(before + 1)
    for card in cards.all()[2:]:
        card.locator(".thumb").click()  # selects the picture
    bulk = page.locator("#bulk")
    expect(bulk).to_contain_text("All 2 selected pictures are")
    bulk.get_by_role("combobox").fill("Three ")  # nearly the name of a class
    bulk.get_by_role("button", name="Correct all").click()
    expect(bulk.locator(".problem")).to_contain_text("“Three” would be a new class.")
    bulk.get_by_role("combobox").fill("nines")
    bulk.get_by_role("button", name="Correct all").click()
    expect(bulk).to_be_hidden()
    expect(page.locator(".rows li.new")).to_contain_text("nines")
    assert [card.locator("h3 .label").inner_text() for card in cards.all()[2:]] == ["nines", "nines"]
    page.get_by_role("button", name="Least certain first").click()
    shown = [card.locator("tbody tr.first .number").first.inner_text() for card in cards.all()]
    assert shown == sorted(shown, key=lambda text: float(text.split()[0]))
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    rows = Path(download.value.path()).read_text().splitlines()
    assert rows[0] == "path,label,probability,similarity,unknown,error" and len(rows) == 5
    while page.locator("#log li").count():
        count = page.locator("#log li").count()
        page.locator("#log li").first.get_by_role("button", name="Undo").click()
        expect(page.locator("#log li")).to_have_count(count - 1)


def test_a_name_that_is_nearly_known_is_asked_about(visit, evident):
    address, _, folder = evident
    page = visit(address)
    page.get_by_label("Token", exact=True).fill(TOKEN)
    choose(page, new(folder, "nine"))
    card = page.locator(".card")
    card.get_by_role("button", name="another").click()
    card.get_by_role("combobox").fill("threes")
    card.get_by_role("combobox").press("Enter")
    expect(card.locator(".fix .problem")).to_contain_text("“threes” would be a new class.")
    card.get_by_role("button", name="It is “three”").click()
    expect(card.locator(".fix .good")).to_contain_text("three")
    card.get_by_role("button", name="Undo").click()
    expect(card.locator(".fix p")).to_have_text("Taken back.")


def test_how_far_a_probability_can_be_trusted_is_told(visit, evident, folder):
    address, learner, _ = evident
    page = visit(address)
    checked = learner.reader.loo_predictions()
    expect(page.locator("#reliability-words")).to_contain_text(
        f"{len(checked.correct)} learned pictures, each predicted as if it had not been learned: {int(checked.correct.sum())} of"
    )
    filled = ((checked.confidence * 15).long().clamp(max=14)).unique().tolist()
    expect(page.locator(".diagram circle")).to_have_count(len(filled))
    choose(page, new(folder, "zero"))
    sure = (checked.confidence * 15).long().clamp(max=14) == 14
    assert float(learner.predict(new(folder, "zero")).probabilities.max()) > 14 / 15
    expect(page.locator(".card")).to_contain_text(
        f"Such a probability was right for {int(checked.correct[sure].sum())} of {int(sure.sum())} learned pictures"
    )


def test_a_class_shows_its_prototypes_where_thumbnails_were_kept(visit, tmp_path):
    learner = learn_digits(tmp_path, Settings.preset("instant"), per_class=20, tasks={"May": ("zero", "one")})
    path = tmp_path / "digits.protosteer"
    keep_thumbnails(path, TaskSlot.prepare(learner, scan_folder(tmp_path / "May"), None, 0.1))
    with serving(create_app(learner, path, thumbnails=True)) as address:
        page = visit(address)
        page.get_by_role("button", name="Pictures of zero").click()
        shown = page.get_by_role("dialog").locator("img")
        expect(shown).to_have_count(MAX_THUMBNAILS)
        expect(shown.last).to_have_js_property("complete", True)
        assert shown.first.evaluate("image => image.naturalWidth") > 0
        page.screenshot(path=tmp_path / "thumbs.png")
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Pictures of zero")).to_be_focused()
        page.close()
    with serving(create_app(learner, path)) as address:  # shown to nobody, unless that was asked for
        page = visit(address)
        expect(page.locator("#rows li")).to_have_count(2)
        expect(page.get_by_role("button", name="Pictures of zero")).to_have_count(0)
        page.close()


def test_training_in_the_background_is_followed_to_its_end(visit, address, folder):
    page = visit(address)
    page.get_by_label("Also train").check()
    examples(page, "eight", TOKEN, draw_digits(folder / "eights", "eight", 5))
    expect(page.locator(".jobs .good")).to_have_text("Training for “eight” is done.")
    delete(page, "eight")
    expect(page.get_by_role("dialog")).to_contain_text("“eight” is deleted")


def test_progress_and_failure_of_a_training_are_told(visit, address, folder):
    page = visit(address)
    training = {"id": "1", "class": "eight", "done": 3, "total": 9, "seconds_left": 5.0, "state": "training"}
    failed = training | {"state": "failed", "message": "the loss is not finite"}
    taught = {"class": "eight", "task": "eight", "images": 5, "job": "1"}
    steps = iter([training, failed])
    page.route("**/classes/*", lambda route: route.fulfill(status=201, json=taught))
    page.route("**/jobs/1", lambda route: route.fulfill(json=next(steps)))
    examples(page, "eight", TOKEN, draw_digits(folder / "eights", "eight", 5))
    expect(page.locator(".jobs")).to_contain_text("about 5 seconds left")
    assert page.locator(".jobs progress").evaluate("bar => [bar.value, bar.max]") == [3, 9]
    expect(page.locator(".jobs .problem")).to_contain_text("the loss is not finite")


def test_names_are_text_whatever_they_look_like(visit, address, folder):
    page = visit(address)
    give(page, "paste", "body", [])  # nothing to take
    page.get_by_label("Name of the class").focus()
    give(page, "paste", "#class-name", draw_digits(folder / "nines", "nine", 3))  # examples, not questions
    expect(page.locator("#examples li")).to_have_count(3)
    give(page, "drop", "#teach .drop", draw_digits(folder / "nines", "nine", 5)[3:])
    examples(page, NASTY, TOKEN, [])
    expect(page.locator("#teach-answer")).to_contain_text("was learned from 5 pictures")
    choose(page, new(folder, "nine"))
    expect(page.locator(".card h3 .label")).to_have_text(NASTY)
    assert page.locator("img[src=x], main b:has-text('bold')").count() == 0
    delete(page, NASTY)
    expect(page.get_by_role("dialog")).to_contain_text("is deleted")


def test_all_of_it_works_from_the_keyboard(visit, address, folder):
    page = visit(address)

    focused = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"

    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate(focused) == name:
                return
        raise AssertionError(f"Tab does not reach {name}")

    page.on("filechooser", lambda chooser: chooser.set_files(new(folder, "five")))
    tab_to("Choose pictures")
    page.keyboard.press("Enter")
    expect(page.locator(".card .scores")).to_have_count(1)
    tab_to("one, January")  # one stop for the whole map; arrows go on from there
    expect(page.locator(".over text")).to_have_text("one")
    page.keyboard.press("Tab")
    assert not page.evaluate("document.getElementById('plot').contains(document.activeElement)")
    page.keyboard.press("Shift+Tab")
    expect(page.locator(".over text")).to_have_text("one")
    for key in ("ArrowUp", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.classList[0]") in ("dot", "shot")
    expect(page.locator(".over text")).not_to_have_text("one")
    tab_to("Delete zero")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    assert page.evaluate(focused) == "Cancel"  # the harmless one
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert page.evaluate(focused) == "Delete zero"


def test_every_control_has_a_name(visit, address, folder):
    page = visit(address)
    choose(page, new(folder, "five"))
    page.locator("#example-files").set_input_files(new(folder, "nine"))
    for role in ("button", "textbox", "searchbox", "checkbox", "link", "region", "navigation", "img"):
        for node in page.get_by_role(role).all():
            assert re.match(rf"- '?{role} \"", node.aria_snapshot()), (role, node.aria_snapshot())


def test_a_busy_service_is_asked_again(visit, address, folder):
    page = visit(address, "503")
    answers = iter([True, True, False])

    def busy(route: Route) -> None:
        if next(answers):
            route.fulfill(status=503, headers={"Retry-After": "1"}, json={"detail": "the queue is full"})
        else:
            route.continue_()

    page.route("**/predict?*", busy)
    page.locator("#files").set_input_files(new(folder, "five"))
    expect(page.locator(".card")).to_contain_text("asking again in 1 second")
    expect(page.locator(".card .label")).to_have_text("five")


def test_a_service_that_is_gone_is_said_to_be_so_and_can_be_tried_again(visit, address, folder):
    page = visit(address, "500", "ERR_FAILED")
    page.route("**/predict?*", lambda route: route.fulfill(status=500, body="<html>a proxy's page</html>"))
    choose(page, new(folder, "five"))
    expect(page.locator(".card .problem")).to_have_text("The service answered with error 500.")
    page.unroute("**/predict?*")
    page.route("**/predict?*", lambda route: route.abort())
    choose(page, new(folder, "six"))
    expect(page.locator(".card .problem").first).to_contain_text("The service does not answer")
    page.unroute("**/predict?*")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".card .label")).to_have_text("six")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_text_is_legible_and_fits_a_phone(visit, address, folder, scheme, path, tmp_path):
    bad = folder / "notes.txt"
    bad.write_text("this is no picture")
    page = visit(address + path, "422", viewport=PHONE, color_scheme=scheme, reduced_motion="reduce")
    if path == "/":
        choose(page, [*new(folder, "five"), bad, *new(folder, "nine", 3)])
        page.get_by_text("How to read an answer").click()
        page.get_by_text("The map as a table").click()
        page.get_by_role("button", name="Add", exact=True).click()
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert {text: round(ratio, 2) for text, ratio in contrasts if ratio < 4.5} == {}
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    picture = page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert picture[:4] == b"\x89PNG"


def test_without_teaching_classes_are_listed_and_nothing_else(visit, learner, folder):
    bare = Learner(learner.backbone, learner.settings)
    for task in learner.memory.tasks:
        classes = task.classes.with_rows("held_out", [None] * len(task.classes))
        bare.memory.add(dataclasses.replace(task, classes=classes))
    bare.save(folder / "bare.protosteer")
    with serving(create_app(bare, folder / "bare.protosteer")) as address:
        page = visit(address)
        expect(page.locator(".rows li")).to_have_count(7)
        expect(page.get_by_text("protosteer serve MODEL --allow-teach")).to_be_visible()
        expect(page.locator("#teach")).to_be_hidden()
        expect(page.locator("#reliability")).to_be_hidden()
        assert page.get_by_role("button", name="Delete").count() == 0
        expect(page.get_by_text("pictures cannot be detected")).to_be_visible()
        choose(page, new(folder, "nine", 3))
        expect(page.locator(".badge")).to_have_count(0)
        expect(page.locator(".fix").first).to_be_hidden()
        page.close()


def test_another_model_can_be_chosen_and_answers_for_the_pictures(visit, learner, folder, tmp_path):
    few = Learner(learner.backbone, learner.settings)
    few.memory.add(learner.memory.tasks[0])
    few.save(folder / "few.protosteer")
    learner.save(folder / "all.protosteer")
    others = {NASTY.replace("/", "|"): (few, folder / "few.protosteer")}
    app = create_app(learner, folder / "all.protosteer", others=others, allow_teach=True, token=TOKEN)
    with serving(app) as address:
        page = visit(address)
        expect(page.locator(".rows li")).to_have_count(7)
        choose(page, new(folder, "six", 2))
        expect(page.locator(".card .label")).to_have_text(["six", "six"])
        page.get_by_label("Model", exact=True).select_option(index=1)
        expect(page.get_by_role("heading", level=1)).to_have_text("few.protosteer")
        expect(page.locator(".rows li")).to_have_count(len(few.classes))
        expect(page.locator(".card .label", has_text="six")).to_have_count(0)
        page.reload()  # the address names it
        expect(page.get_by_role("heading", level=1)).to_have_text("few.protosteer")
        expect(page.get_by_label("Model", exact=True)).to_have_value(next(iter(others)))
        page.get_by_label("Name of the class").fill("nine")
        page.get_by_label("Token", exact=True).fill(TOKEN)
        page.locator("#example-files").set_input_files(new(folder, "nine", 5))
        page.get_by_role("button", name="Add", exact=True).click()
        expect(page.locator(".rows li")).to_have_count(len(few.classes) + 1)
        page.screenshot(path=tmp_path / "chooser.png")
        page.close()
        page = visit(f"{address}/?model=nothing", "404")
        expect(page.locator("#trouble")).to_contain_text("no model is named 'nothing'; there are: all,")
        page.close()


def test_a_large_model_shows_names_on_request(visit, learner, folder):
    large = Learner(learner.backbone, learner.settings)
    means = torch.randn(300, 1, learner.backbone.dim, generator=torch.Generator().manual_seed(0))
    nothing, one = torch.zeros_like(means[0]), torch.ones(1, dtype=torch.int64)
    records = [
        ClassRecord(f"species {i:03d}", mean.clone(), Centroids(mean.clone(), nothing.clone(), one.clone()))
        for i, mean in enumerate(means)
    ]
    for first in range(0, 300, 10):
        large.memory.add(TaskRecord(f"month {first // 10}", ClassTable.of(records[first : first + 10]), None))
    large.save(folder / "large.protosteer")
    with serving(create_app(large, folder / "large.protosteer")) as address:
        page = visit(address)
        expect(page.locator(".dot")).to_have_count(300)
        expect(page.locator(".plot text")).to_have_count(0)
        page.locator(".dot").nth(17).focus()
        expect(page.locator(".over text")).to_have_text("species 017")
        expect(page.locator(".rows li")).to_have_count(201)
        page.get_by_label("Filter the classes").fill("month 12")
        expect(page.locator(".rows li")).to_have_count(10)
        expect(page.locator("#class-count")).to_have_text("10 of 300 classes")
        looks = page.locator(".legend path").evaluate_all("paths => paths.map((p) => p.outerHTML)")
        assert len(set(looks)) == len(looks) == 30  # no two tasks look the same
        # Of very many classes the map shows some, and those that someone asks about.
        page.evaluate(
            """() => { const many = [...Array(25000).keys()].map((i) => ({ ...state.map.classes[i % 300], name: `kind ${i}` }));
                       Object.assign(state.map, { classes: many }); state.fresh = "kind 7"; drawMap(); }"""
        )
        expect(page.locator("#map-about")).to_contain_text("2,001 of 25,000 classes")
        expect(page.locator(".dot")).to_have_count(2001)
        expect(page.locator(".dot[aria-label^='kind 7,']")).to_have_count(1)
        page.get_by_text("The map as a table").click()
        expect(page.locator("#map-table tbody tr")).to_have_count(2001)
        page.close()


def test_the_docs_page_shows_every_route(visit, address):
    page = visit(address + "/docs")
    with page.expect_response("**/openapi.json") as answer:
        page.reload()
    paths = json.loads(answer.value.body())["paths"]
    told = {path: methods for path, methods in paths.items() if not path.startswith("/models/{model}/")}
    routes = sorted(f"{method.upper()} {path}" for path, methods in told.items() for method in methods)
    expect(page.locator("section")).to_have_count(len(routes))
    expect(page.locator(".contents a")).to_have_count(len(routes))
    assert sorted(page.locator(".contents a").all_inner_texts()) == routes
    teach = page.locator("section", has=page.get_by_role("heading", name="POST /classes/{name}"))
    expect(teach.locator("pre")).to_contain_text(f'curl -X POST "{address}/classes/red%20fox"')
    expect(teach.locator("pre")).to_contain_text('-H "Authorization: Bearer $TOKEN"')
    expect(teach.locator("pre")).to_contain_text("-F images=@one.jpg")
    predict = page.locator("section", has=page.get_by_role("heading", name="POST /predict"))
    expect(predict).to_contain_text("candidates, passes, top (label, task, probability, similarity), position")
    expect(predict.get_by_text("/models/{model}/predict")).to_be_visible()
    page.get_by_role("link", name="Try it with pictures").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("digits.protosteer")


def test_the_picture_for_the_docs_can_be_taken(browser, address, folder, tmp_path):
    photograph(browser, address, new(folder, "five") + new(folder, "nine"), tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (SIZE["width"], SIZE["height"])
