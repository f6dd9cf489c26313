"""What `inspect` prints: every figure once, in words and units of people, at any usual width."""

import io
from typing import Any

import pytest
from rich.console import Console

from protosteer.report import model_summary
from protosteer.report.model_summary import human_bytes, overview


def printed(description: dict[str, Any], width: int = 160, **options: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width)
    for part in overview(description, **options):
        console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def one_class(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "images": 20,
        "keys": 5,
        "values": 4,
        "points": None,
        "bytes": 12_345,
        "held_out": 2,
    } | changes


def one_task(name: str, classes: list[str], **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "learned": "2026-11-16", "classes": [one_class(c) for c in classes], "images": 1_234,
        "image_bytes": None, "bytes": 56_789, "prompt": {"layers": 12, "length": 1, "bytes": 9_216},
        "trained": True, "few_shot": False, "corrected": None, "confirmed": False, "compacted": False, "unfinished": False, "independent": False, "loss": 1.2, "accuracy": 95.0,
    } | changes  # fmt: skip


def described(tasks: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    tasks = [one_task("spring", ["cat", "dog"])] if tasks is None else tasks
    totals = {
        "classes": 2, "tasks": len(tasks), "images": 1_234, "centroids": 18, "points": 0, "bytes": 56_789,
        "bytes_per_class": 28_394.5, "bytes_per_task": 56_789.0, "image_bytes": 30_000_000,
        "times_smaller": 512.4, "first_learned": "2026-11-16", "last_learned": "2026-12-01",
    } | changes.pop("totals", {})  # fmt: skip
    return {
        "file": {"path": "pets.protosteer", "bytes": 58_560},
        "backbone": {
            "name": "nano", "fingerprint": "0123456789abcdef", "dim": 192, "depth": 6, "image_size": 32,
            "preprocessing": {}, "weights": None,
        },
        "precision": ["fp32"],
        "settings": {"all": {}, "changed": [{"name": "epochs", "value": 10, "default": 50}]},
        "totals": totals,
        "rule": "paper", "evidence": None, "notes": [],
        "rejection": {"calibrated": True, "images": 4, "held_out": 4},
        "tasks": tasks,
        "confusable": [{"a": "cat", "b": "dog", "similarity": 0.8125}],
    } | changes  # fmt: skip


def line_of(text: str, heading: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(heading)]
    return " ".join(found.removeprefix(heading).split())


def test_the_header_says_what_is_true_of_the_whole_model() -> None:
    text = printed(described())
    assert line_of(text, "Model") == "pets.protosteer, 58.6 kB"
    assert line_of(text, "Knows") == "2 classes from 1,234 images, in 1 task, as 18 centroids"
    assert line_of(text, "Learned") == "from 2026-11-16 to 2026-12-01"
    assert line_of(text, "Independent") == "0 of 1 task (learned from their own images alone)"
    assert line_of(text, "Size") == (
        "28.4 kB per class, 56.8 kB per task; the file is 512 times smaller than the images (30.0 MB)"
    )
    assert line_of(text, "Unknown images") == "can be rejected, with thresholds from 4 held-out images"
    assert line_of(text, "Backbone") == "nano (0123456789ab), 32-pixel images, 6 layers, 192 dimensions"
    assert line_of(text, "Precision") == "fp32"
    assert line_of(text, "Settings") == "epochs 10"


def test_by_evidence_the_header_says_what_calibrates() -> None:
    views = [{"prompt": False, "weight": 6.0}, {"prompt": True, "weight": 2.0}]
    prompt = {"layers": 12, "length": 1, "bytes": 9_216}
    evidence = {"domain_prompt": prompt, "views": views, "left_out": 1_000}
    task = one_task("spring", [], unfinished=True, trained=False)
    tasks = [task | {"classes": [one_class("cat", points=17)]}]
    text = printed(described(tasks, evidence=evidence, totals={"points": 17}, notes=["do this", "and that"]))
    assert line_of(text, "Knows").endswith("as 17 prototypes")
    assert line_of(text, "Rule") == "evidence (the default classifier)"
    assert line_of(text, "Shared prompt") == "9.2 kB; predictions weigh 75 % without it, 25 % with it"
    assert line_of(text, "Probabilities") == "calibrated by leave-one-out on 1,000 images"
    assert line_of(text, "Unknown images") == "can be rejected, with thresholds from leave-one-out"
    assert line_of(text, "Note") == "do this" and " and that" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "cat spring 20 17 12.3 kB" in rows and "Held out" not in text
    assert "spring 2026-11-16 1 1,234 56.8 kB 9.2 kB prompt to come" in rows
    bare = {"domain_prompt": None, "views": views[:1], "left_out": 0}
    rejection = {"calibrated": False, "images": 0, "held_out": 0}
    text = printed(described(evidence=bare, rejection=rejection))
    assert line_of(text, "Shared prompt") == "none"
    assert line_of(text, "Probabilities") == "not calibrated, as no class has two images"
    assert line_of(text, "Unknown images") == "cannot be rejected, as no class has two images"


def test_what_is_not_known_is_not_told() -> None:
    unknown = dict.fromkeys(("image_bytes", "times_smaller", "first_learned", "last_learned"))
    changes = {
        "file": {"path": "m", "bytes": None},
        "rejection": {"calibrated": False, "images": 0, "held_out": 0},
        "backbone": described()["backbone"] | {"dim": None, "depth": None, "weights": "/w/x.safetensors"},
        "settings": {"all": {}, "changed": []},
    }
    text = printed(described(totals=unknown, **changes))
    assert line_of(text, "Model") == "m"
    assert line_of(text, "Size") == "28.4 kB per class, 56.8 kB per task"
    assert line_of(text, "Learned") == "dates not recorded"
    assert line_of(text, "Unknown images") == "cannot be rejected, as no images were held out"
    assert line_of(text, "Backbone") == "nano (0123456789ab), 32-pixel images, weights from /w/x.safetensors"
    assert line_of(text, "Settings") == "defaults"
    assert "None" not in text


def test_a_model_of_few_small_images_may_be_larger_than_they_are() -> None:
    text = printed(described(totals={"image_bytes": 20_000, "times_smaller": 0.25}))
    assert "the file is 4.0 times larger than the images (20.0 kB)" in text


def test_a_line_per_task_says_how_it_was_learned() -> None:
    tasks = [
        one_task("spring", ["cat", "dog"], independent=True),
        one_task("summer", ["eel"], learned=None),
        one_task("owl", ["owl"], few_shot=True, trained=False),
        one_task("plain", ["gnu"], prompt=None, trained=False),
    ]
    rows = [" ".join(line.split()) for line in printed(described(tasks)).splitlines()]
    assert "spring 2026-11-16 2 1,234 56.8 kB 9.2 kB trained alone" in rows
    assert "summer – 1 1,234 56.8 kB 9.2 kB trained" in rows
    assert "owl 2026-11-16 1 1,234 56.8 kB 9.2 kB few-shot" in rows
    assert "plain 2026-11-16 1 1,234 56.8 kB – no training" in rows
    assert "Independent 1 of 4 tasks (learned from their own images alone)" in rows


def test_a_line_per_class_and_its_task_beside_the_first() -> None:
    tasks = [one_task("spring", ["cat", "dog"]), one_task("summer", ["eel"])]
    rows = [line.split() for line in printed(described(tasks)).splitlines()]
    assert ["cat", "spring", "20", "2", "9", "12.3", "kB"] in rows
    assert ["dog", "20", "2", "9", "12.3", "kB"] in rows
    assert ["eel", "summer", "20", "2", "9", "12.3", "kB"] in rows


def test_long_lists_end_early_unless_all_is_asked_for() -> None:
    tasks = [one_task(f"task {i}", [f"name-{i}"]) for i in range(model_summary.MAX_ROWS + 1)]
    short, whole = printed(described(tasks)), printed(described(tasks), all_classes=True)
    last = model_summary.MAX_ROWS
    assert f"name-{last - 1}" in short and f"name-{last}" not in short
    assert "… and 1 more class\n" in short and "… and 1 more task\n" in short
    assert f"name-{last}" in whole and "more class" not in whole
    exact = printed(described(tasks[:-1]))
    assert "more" not in exact


def test_pairs_are_called_alike_and_their_bars_are_as_long_as_their_cosines() -> None:
    pairs = [
        {"a": "cat", "b": "dog", "similarity": 1.0},
        {"a": "cat", "b": "eel", "similarity": 0.5},
        {"a": "dog", "b": "eel", "similarity": -0.125},
    ]
    text = printed(described(confusable=pairs))
    rows = [line.split() for line in text.splitlines()]
    bars = {tuple(row[:3]): row[3:] for row in rows if len(row) > 2}
    assert bars[("cat", "dog", "1.000")] == ["━" * model_summary.BAR_WIDTH]
    assert bars[("cat", "eel", "0.500")] == ["━" * (model_summary.BAR_WIDTH // 2)]
    assert bars[("dog", "eel", "-0.125")] == []
    assert "Most alike" in text and "confused" not in text


def test_a_model_without_tasks() -> None:
    nothing = {"classes": 0, "images": 0, "centroids": 0, "bytes_per_class": None, "bytes_per_task": None}
    text = printed(described([], totals=nothing, confusable=[]))
    assert line_of(text, "Size") == "nothing has been learned"
    assert "Tasks" not in text and "alike" not in text


@pytest.mark.parametrize("width", [60, 80, 160])
def test_nothing_is_lost_on_narrow_terminals(width: int) -> None:
    long = "a-very-long-class-name-without-any-place-to-break-it"
    tasks = [one_task("the first batch of 2026", [long, "dog"], images=1_234_567)]
    description = described(tasks, confusable=[{"a": long, "b": "dog", "similarity": 0.5}])
    text = printed(description, width)
    assert max(map(len, text.splitlines())) <= width
    for figure in ("1,234,567", "56.8 kB", "12.3 kB", "2026-11-16", "0.500"):
        assert figure in text
    letters = "".join(line.split()[0] for line in text.split("Most alike")[1].splitlines() if line.strip())
    assert long in letters


def test_names_from_others_do_nothing_to_the_terminal() -> None:
    odd = "\x1b[31m[red]x[/red]\r\n\udcff"
    tasks = [one_task(odd, [odd], learned="[bold]\x07")]
    backbone = described()["backbone"] | {"name": odd}
    pairs = [{"a": odd, "b": odd, "similarity": 0.5}]
    text = printed(described(tasks, confusable=pairs, backbone=backbone))
    assert text.count("?[31m[red]x[/red]???") == 6 and "[bold]?" in text
    assert not set(text) & set("\x1b\r\x07\udcff")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"), (999, "999 bytes"), (999.6, "1.0 kB"), (1_000, "1.0 kB"), (13_096, "13.1 kB"),
        (99_949, "99.9 kB"), (99_950, "100 kB"), (999_499, "999 kB"), (999_500, "1.0 MB"),
        (242_000_000, "242 MB"), (1_500_000_000, "1.5 GB"), (2_000_000_000_000, "2,000 GB"),
    ],
)  # fmt: skip
def test_bytes_in_the_units_of_people(size: float, text: str) -> None:
    assert human_bytes(size) == text
