"""The pages say what is true: their Python runs, their links lead somewhere, their tables list everything."""

import dataclasses
import importlib
import inspect
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from PIL import Image
from safetensors import safe_open
from sklearn.datasets import load_digits

import docs_reference
import draw_diagrams
import protosteer
from conftest import REPOSITORY
from photo_toys import digit_photos
from protosteer import errors
from protosteer.backbones import Backbone
from protosteer.cli import app as command_line
from protosteer.cli import main
from protosteer.learner import Learner
from protosteer.model.file import read
from protosteer.prediction import Prediction
from protosteer.settings import Settings
from protosteer.workflows.model_summary import describe

pytestmark = pytest.mark.slow


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
GENERATED = [REPOSITORY / "docs" / name for name in docs_reference.PAGES]  # when the site is built
README, HOW_TO, SERVICE, HTTP, DATA, EXTEND, MODEL_FILE, API = (
    REPOSITORY / name
    for name in (
        "README.md",
        "docs/how-to/python.md",
        "docs/how-to/serve.md",
        "docs/reference/http.md",
        "docs/how-to/data.md",
        "docs/how-to/extend.md",
        "docs/reference/model-file.md",
        "docs/reference/api.md",
    )
)

# A comment before a block says that it is not run, and why; weights other than ours need a download.
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*\Z")
OTHER_WEIGHTS = re.compile(r'Backbone\.load\((?!"(?:mini|nano)"\))')
# The README trains a prompt, which would take a test too long: here nothing is trained.
QUICKER = {"ps.Learner(backbone)": "ps.Learner(backbone, ps.Settings(prompts=False))"}

TRAINED = Settings.preset("best", epochs=1, batch_size=16, neck_hidden=16, augmentation="crop")
TOKEN = "open-sesame"
# Class folders that the pages speak of, and the digit that each shows.
FOLDERS = {
    "photos/january": {"zero": 0, "one": 1, "two": 2},
    "photos/february": {"three": 3, "four": 4},
    "photos/spring": {"cat": 0, "dog": 1},
    "photos/summer": {"fox": 2, "hen": 3},
    "more": {"nine": 9},
    "new": {"zero": 0, "four": 4, "nine": 9},
}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int  # of the page, from 1, where the code begins
    before: str  # text of the page up to the block

    @property
    def not_run(self) -> str | None:
        found = NOT_RUN.search(self.before)
        if found:
            return found[1]
        return "needs a download" if OTHER_WEIGHTS.search(self.code) else None


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = [Block(f[1], f[2], text[: f.start(2)].count("\n") + 1, text[: f.start()]) for f in fences]
    return [block for block in found if block.language == language]


def rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the table whose first heading is this one."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def unquoted(cell: str) -> str:
    assert cell.startswith("`") and cell.endswith("`"), cell
    return cell.strip("`")


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, which the test works in, with six images of each class in FOLDERS."""
    for folder, classes in FOLDERS.items():
        digit_photos(tmp_path / folder, classes, 6, skip=6 if folder == "new" else 0, side=8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def play(page: Path, replacing: dict[str, str] | None = None) -> dict[str, object]:
    """Runs the Python blocks of a page one after the other; returns the names that they leave."""
    names: dict[str, object] = {"__name__": page.stem}
    runnable = [block for block in blocks(page, "python") if not block.not_run]
    assert runnable
    whole = "".join(block.code for block in runnable)
    for old in replacing or {}:
        assert whole.count(old) == 1
    for block in runnable:
        code = block.code.replace('Backbone.load("mini")', 'Backbone.load("nano")')  # which is quicker
        for old, new in (replacing or {}).items():
            code = code.replace(old, new)
        # Moved down, so that an error names the line of the page.
        exec(compile("\n" * (block.line - 1) + code, str(page), "exec", dont_inherit=True), names)
    return names


# Python


def test_python_of_the_readme_runs(pictures):
    names = play(README, QUICKER)
    assert {"photos/spring", "photos/summer"} <= FOLDERS.keys()
    assert names["learner"].classes == ["dog", "fox", "hen"]
    assert len(names["prediction"]) == 18


def test_python_of_the_api_page_runs_and_gives_what_its_comments_say(pictures, capsys):
    for package in ("fastapi", "uvicorn", "python_multipart", "onnx", "onnxruntime"):
        pytest.importorskip(package)
    names = play(HOW_TO)
    page = HOW_TO.read_text(encoding="utf-8")
    assert f"found.counts  # {json_like(dict.fromkeys(['one', 'two', 'zero'], 6))}:" in page
    assert f"both.tasks  # {json_like(names['both'].tasks)}" in page
    assert "print(error)  # no class named 'cat'; there are: ..." in page
    assert "no class named 'cat'; there are: one, two, zero" in capsys.readouterr().out
    read_back = play(MODEL_FILE)
    assert read_back["intact"] is True
    assert read_back["classes"] == ["one", "two", "zero", "four", "three"] == names["learner"].classes
    assert read(Path("both.protosteer")).memory.classes == ["zero", "four", "three", "one", "two", "nil"]
    assert names["taught"].check is not None and len(names["unknown"]) == 18
    assert Path("alike.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in Path("exported").iterdir()} == {path.name for path in names["files"]}


def test_the_data_page_runs_from_list_to_cleanlab(pictures):
    for package in ("pyarrow", "cleanlab"):
        pytest.importorskip(package)
    names: dict[str, object] = {"__name__": "data"}
    wrong = Path("photos/january/one/99.png")
    digits = load_digits()
    Image.fromarray((255 - 15 * digits.images[digits.target == 0][20]).astype("uint8")).save(wrong)
    for block in sorted([*blocks(DATA, "python"), *blocks(DATA, "sh")], key=lambda block: block.line):
        if block.language == "python" and not block.not_run:
            exec(compile("\n" * (block.line - 1) + block.code, str(DATA), "exec", dont_inherit=True), names)
        for line in block.code.splitlines() if block.language == "sh" else ():
            assert main(line.split()[1:]) == 0, line
    assert names["suspects"][0] == (str(wrong), "one", "zero")
    assert names["grown"].classes_.tolist() == names["images"].learner_.classes == ["one", "two", "zero"]
    assert len(names["quality"]) == 6 and 0 < min(names["quality"]) < max(names["quality"]) < 1


def test_python_of_the_page_on_extensions_runs(pictures):
    from protosteer.methods import METHODS
    from protosteer.paper import losses
    from protosteer.settings import LOSSES

    try:
        names = play(EXTEND)
        assert len(names["run"].matrix) == 2 and names["accuracy"] == names["run"].matrix[-1]
    finally:
        METHODS.pop("own-means", None)
        losses.REGISTERED.pop("margin", None)
        LOSSES[:] = [name for name in LOSSES if name != "margin"]


def test_the_readme_is_short_and_its_numbers_stand_on_the_results_page():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    results = (REPOSITORY / "docs" / "results" / "index.md").read_text(encoding="utf-8")
    for _, _, accuracy, stored, _ in rows(README, "method"):
        for number in re.findall(r"\d+\.\d", accuracy) + [stored]:
            assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d,])", results), number


def json_like(value: object) -> str:
    return repr(value).replace("'", '"')


def test_every_public_name_resolves_and_is_in_the_api_reference():
    page = API.read_text(encoding="utf-8")
    for name in protosteer.__all__:
        value = getattr(protosteer, name)
        where = {"rejection": "workflows.ood", "__version__": "", "ProtosteerWarning": ""}.get(name)
        if where is None:
            where = f"{value.__module__.removeprefix('protosteer.')}.{name}".replace("backbones.backbone", "backbones")
        assert not where or f"::: protosteer.{where}\n" in page, name


def test_python_that_is_not_run_compiles_and_imports_what_exists():
    skipped = [block for page in (README, HOW_TO, DATA) for block in blocks(page, "python") if block.not_run]
    assert skipped
    for block in skipped:
        compile(block.code, "skipped", "exec")
        for module, names in re.findall(r"^from (protosteer\S*) import ([\w, ]+)", block.code, re.MULTILINE):
            for name in names.strip().split(", "):
                assert hasattr(importlib.import_module(module), name), name


def test_examples_in_docstrings_of_the_public_api_run():
    import doctest

    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    public = [getattr(protosteer, name) for name in ("Backbone", "Learner", "merge")] + [Settings.preset]
    for thing in public:
        names = {"Backbone": Backbone}
        runner.run(parser.get_doctest(inspect.getdoc(thing), names, thing.__qualname__, None, 0))
    assert runner.failures == 0 and runner.tries >= 15


# Tables


def test_every_command_is_on_the_page_about_python():
    page = HOW_TO.read_text(encoding="utf-8")
    commands = typer.main.get_command(command_line).commands
    headings = " ".join(re.findall(r"^## (.+)$", page, re.MULTILINE)).replace(",", "").split()
    for name in commands.keys() - {"reproduce", "report", "push", "pull"}:  # tools of the shell
        assert f"protosteer {name}" in page and name in headings, name


def test_settings_and_prediction_document_every_field():
    for kind in (Settings, Prediction):
        assert list(docs_reference.attributes(kind)) == [field.name for field in dataclasses.fields(kind)]


def test_generated_pages_list_everything():
    pages = {name: make() for name, make in docs_reference.PAGES.items() if name != "reference/openapi.md"}
    for name in typer.main.get_command(command_line).commands:
        assert f"\n## {name}\n" in pages["reference/cli.md"]
    kinds = {n for n, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, errors.ProtosteerError)}
    assert all(f"| `{kind}` |" in pages["reference/errors.md"] for kind in kinds)
    assert "| `unknown-dataset` | `DataError` | no data set is called '…'; … |" in pages["reference/errors.md"]
    assert "| `epochs` | `15` | ≥ 1, ≤ 100000 |" in pages["reference/settings.md"]


def test_the_table_of_limits_has_the_true_ones():
    pytest.importorskip("fastapi")
    from protosteer.serve.limits import Limits

    listed = {unquoted(name): float(value) for name, value, _ in rows(HTTP, "limit")}
    assert list(listed.items()) == list(dataclasses.asdict(Limits()).items())


def test_every_option_of_serve_is_on_the_service_page():
    page = SERVICE.read_text(encoding="utf-8")
    options = typer.main.get_command(command_line).commands["serve"].params
    names = [name for option in options for name in option.opts if name.startswith("--")]
    assert "--allow-teach" in names
    for name in names:
        assert re.search(rf"^\|[^|]*`{name}[` ]", page, re.MULTILINE), name


# Links


def anchors(page: Path) -> set[str]:
    """Headings as GitHub makes addresses of them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target in GENERATED:
            continue
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


# The service


@pytest.fixture(scope="module")
def learner() -> Learner:
    """What the service page speaks of: january and february, learned in no time."""
    digits = load_digits()
    learner = Learner(Backbone.load("nano"), TRAINED)
    for name in ("january", "february"):
        classes = FOLDERS[f"photos/{name}"]
        images = [Image.fromarray((255 - 15 * digits.images[i]).astype("uint8")) for i in range(100)]
        labels = {digit: label for label, digit in classes.items()}
        chosen = [i for i in range(100) if digits.target[i] in labels]
        learner.learn(([images[i] for i in chosen], [labels[digits.target[i]] for i in chosen]), name)
    return learner


@pytest.fixture
def service(learner, tmp_path):
    for package in ("fastapi", "uvicorn", "python_multipart"):
        pytest.importorskip(package)
    from protosteer.serve.app import create_app

    learner.save(tmp_path / "shop.protosteer")
    return create_app(learner.copy(), tmp_path / "shop.protosteer", allow_teach=True, token=TOKEN)


@pytest.fixture
def port(service) -> Iterator[int]:
    """Where the service really listens."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(service, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def test_every_route_is_on_the_page_of_the_http_api_with_an_example(service):
    page = HTTP.read_text(encoding="utf-8")
    routes = [(method.upper(), path) for path, way in service.openapi()["paths"].items() for method in way]
    assert ("POST", "/predict") in routes and ("DELETE", "/classes/{name}") in routes
    assert "`POST /models/{model}/predict`".replace("{model}", "evens") in page  # the others are alike
    for method, path in routes:
        if path.startswith("/models/{model}/"):
            continue
        assert f"| `{method} {path}` |" in page
        section = page.partition(f"\n### {method} {path}\n")[2].partition("\n##")[0]
        assert f"http://127.0.0.1:8000{path.partition('{')[0]}" in section and "curl -s" in section, path
    for path in ("/", "/docs", "/openapi.json"):
        assert f"`GET {path}`" in page


def test_answers_on_the_service_page_have_fields_that_exist(service, learner, tmp_path):
    schemas = service.openapi()["components"]["schemas"].values()
    known = {name for schema in schemas for name in schema["properties"]}
    known |= set(keys(describe(read(tmp_path / "shop.protosteer"), learner.reader)))
    shown = {name for block in blocks(HTTP, "json") for name in re.findall(r'"(\w+)":', block.code)}
    assert {"predictions", "unknown", "guarantee", "seconds_left", "totals"} <= shown
    assert shown <= known


def keys(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_metrics_on_the_service_page_exist(service):
    from fastapi.testclient import TestClient

    with TestClient(service, base_url="http://localhost") as client:
        client.get("/healthz")
        text = client.get("/metrics").text
    (shown,) = [block.code for block in blocks(HTTP, "text") if block.code.startswith("protosteer_")]
    for name in re.findall(r"^\w+", shown, re.MULTILINE):
        assert re.search(rf"^{name}\b", text, re.MULTILINE), name


def test_the_client_of_the_service_page_works(pictures, port, capsys):
    play(SERVICE, {"http://127.0.0.1:8000": f"http://127.0.0.1:{port}"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["01.png", "01.png"]
    assert lines[2].startswith("done the class has a prompt of its own now")
    assert lines[3].startswith("exact: ")


def test_the_schema_and_the_javascript_of_the_model_file_page_read_a_model(learner, tmp_path):
    learner.save(tmp_path / "shop.protosteer")
    (schema,) = blocks(MODEL_FILE, "json")
    (program,) = blocks(MODEL_FILE, "js")
    header = json.loads(safe_open(tmp_path / "shop.protosteer", framework="np").metadata()["protosteer"])["header"]
    known = json.loads(schema.code)["properties"]
    assert header.keys() <= known.keys() and header["backbone"].keys() <= known["backbone"]["properties"].keys()
    assert all(task.keys() <= known["tasks"]["items"]["properties"].keys() for task in header["tasks"])
    pytest.importorskip("jsonschema").validate(header, json.loads(schema.code))
    if node := shutil.which("node"):
        (tmp_path / "read.js").write_text(program.code, encoding="utf-8")
        command = [node, str(tmp_path / "read.js"), str(tmp_path / "shop.protosteer")]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert [line.partition(":")[0] for line in lines] == learner.classes
        assert all(re.fullmatch(r"\w+: \d+ prototypes of \d+ images", line) for line in lines)


def test_diagrams_are_what_the_script_draws():
    for scheme in draw_diagrams.COLOURS:
        for name in ("method", "operations"):
            drawn = getattr(draw_diagrams, name)(scheme)
            assert (REPOSITORY / "docs" / "images" / f"{name}-{scheme}.svg").read_text(encoding="utf-8") == drawn


def test_the_tutorial_quotes_the_method_that_it_walks_through():
    """A block is run, or stands in the file word for word, but for indentation and blank lines."""

    def words(code: str) -> str:
        return "\n".join(line.strip() for line in code.splitlines() if line.strip())

    page, methods = REPOSITORY / "docs" / "how-to" / "add-a-method.md", REPOSITORY / "src" / "protosteer" / "methods"
    sources = [words((methods / name).read_text(encoding="utf-8")) for name in ("ncm.py",)]
    quoted = [block for block in blocks(page, "python") if not block.before.rstrip().endswith("<!-- run -->")]
    assert len(quoted) == 5
    for block in quoted:
        assert any(words(block.code) in source for source in sources), f"line {block.line}"
    (run,) = (block for block in blocks(page, "python") if block not in quoted)
    exec(compile(run.code, str(page), "exec"), {})
