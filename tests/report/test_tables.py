"""Tables: every figure in its place, on terminals of any usual width."""

import io
from typing import Any

import pytest
from rich.console import Console

from protosteer.report import tables

FORGETS = [[100.0], [60.0, 90.0], [50.0, 40.0, 80.0]]


def lines(*parts: object, width: int = 200) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(*parts, sep="\n")
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def words(*parts: object, width: int = 200) -> list[list[str]]:
    return [line.split() for line in lines(*parts, width=width)]


def many(tasks: int, value: float = 98.76) -> list[list[float]]:
    return [[value] * (i + 1) for i in range(tasks)]


DIAGNOSIS = {
    "accuracy": 90.0, "true_task_with_prompt": 97.0, "true_task_without_prompt": 96.0, "not_retrieved": 1.04,
    "wrong_prompt_won": 2.0, "wrong_class": 6.96, "key_spread": 0.5, "value_spread": float("nan"),
}  # fmt: skip


def figures(tasks: int, **changes: Any) -> dict[str, Any]:
    return {
        "seed": 0, "matrix": many(tasks), "last_accuracy": 91.119, "avg_accuracy": 94.0,
        "last_forgetting": -0.25, "avg_forgetting": 1.5, "last_image_accuracy": 88.0, "avg_image_accuracy": 89.0,
        "passes_per_image": 2.73, "calibration_error": 3.456,
        "prompts_per_image": 1.73, "retrieval_accuracy": 97.2, "bytes_per_task": 35000.0,
        "bytes_per_class": 3500.0, "trained_parameters": 7351296, "train_seconds": 12345.6, "eval_seconds": 9.87,
        "forward_passes": 2500, "naive_forward_passes": 10000,
        "diagnosis": {
            "mean": DIAGNOSIS, "tasks": [{"task": f"task-{i + 1}", **DIAGNOSIS} for i in range(tasks)]
        },
    } | changes  # fmt: skip


def test_a_table_has_a_line_per_run() -> None:
    row = {"last_accuracy": 95.254, "avg_accuracy": 97.0, "last_forgetting": -0.5, "passes_per_image": 1.5,
           "calibration_error": None, "bytes_per_class": 13096.0}  # fmt: skip
    found = words(tables.metrics_table({"baseline": row, "[red]cpp": row}))
    assert ["baseline", "95.25", "%", "97.00", "%", "-0.50", "–", "1.50", "13,096"] in found
    assert any(line[:1] == ["[red]cpp"] for line in found)


def test_a_matrix_has_a_line_per_moment() -> None:
    found = words(*tables.matrix_tables(FORGETS, "baseline"))
    assert ["after", "task", "3", "50.0", "40.0", "80.0"] in found
    assert ["after", "task", "1", "100.0"] in found


@pytest.mark.parametrize(
    ("tasks", "width", "value", "cell"),
    [(10, 80, 98.76, "98.8"), (12, 100, 98.76, "98.8"), (20, 80, 98.76, "99"), (20, 100, 100.0, "100")],
)
def test_a_large_matrix_gets_narrower(tasks: int, width: int, value: float, cell: str) -> None:
    found = words(*tables.matrix_tables(many(tasks, value)), width=width)
    for i in range(1, tasks + 1):
        assert ["after", str(i), *[cell] * i] in found
    assert [str(i) for i in range(1, tasks + 1)] in found


def test_more_than_twenty_tasks_share_out_their_columns() -> None:
    matrix = [[float(j) for j in range(i + 1)] for i in range(23)]
    found = words(*tables.matrix_tables(matrix), width=80)
    assert ["after", "23", *(str(j) for j in range(20))] in found
    assert ["after", "23", "20", "21", "22"] in found
    assert ["after", "21", "20"] in found and len([line for line in found if line[:1] == ["after"]]) == 26


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_run_report_says_all_and_nothing_is_cut(width: int) -> None:
    parts = tables.run_report(figures(10))
    text = [" ".join(line) for line in words(*parts, width=width)]
    for line in (
        "mean over tasks mean over images",
        "Last accuracy (%) 91.12 88.00",
        "Avg accuracy (%) 94.00 89.00",
        "Last forgetting (points) -0.25",
        "Avg forgetting (points) 1.50",
        "Task retrieved (%) 97.20",
        "Calibration error (%) 3.46",
        "Passes per image 2.73",
        "Prompts per image 1.73",
        "Trained parameters 7,351,296",
        "Learning (s) 12,346",
        "Testing (s) 9.9",
        "Forward passes in tests 2,500",
        "Forward passes, naive protocol 10,000",
        "Forward passes, made / naive 0.25",
        "task-10 90.0 1.0 2.0 7.0 97.0 96.0 0.500",
        "mean 90.0 1.0 2.0 7.0 97.0 96.0 0.500",
    ):
        assert line in text
    assert "…" not in "".join(text)
    assert max(map(len, lines(*parts, width=width))) <= width


EVIDENCE = {
    "accuracy": 90.0, "task_not_tried": 1.04, "coarse_wrong": 2.0, "fine_wrong": 6.96, "coarse_accuracy": 88.0,
    "true_task_accuracy": 95.0, "confidence": 91.23, "passes": 1.618,
}  # fmt: skip
CLASSES = {"accuracy": 90.0, "same_task": 4.0, "other_task": 6.0}


@pytest.mark.parametrize(
    ("kind", "cells"), [(EVIDENCE, "90.0 1.0 2.0 7.0 88.0 95.0 91.2 1.62"), (CLASSES, "90.0 4.0 6.0")]
)
def test_a_diagnosis_has_the_figures_of_its_kind(kind: dict[str, float], cells: str) -> None:
    told = {"mean": kind, "tasks": [{"task": f"task-{i + 1}", **kind} for i in range(2)]}
    parts = tables.run_report(figures(2, diagnosis=told))
    text = [" ".join(line) for line in words(parts[-1], width=80)]
    assert f"task-2 {cells}" in text and f"mean {cells}" in text and "…" not in "".join(text)


def moment(passes: float) -> dict[str, float | None]:
    return {"accuracy_over_tasks": 95.0, "accuracy_over_images": 94.0, "forgetting": 1.0, "calibration_error": 4.0,
            "retrieval_accuracy": None, "passes_per_image": passes, "bytes": 7}  # fmt: skip


@pytest.mark.parametrize("width", [80, 100])
def test_a_report_of_several_seeds_has_means_and_deviations(width: int) -> None:
    moments = [[moment(1.0), moment(1.5), moment(p)] for p in (2.0, 3.0)]
    other = {"mean": DIAGNOSIS | {"not_retrieved": 3.04}, "tasks": [{"task": "task-1", **DIAGNOSIS}] * 3}
    second = {"seed": 7, "last_accuracy": 93.119, "forward_passes": 3500, "diagnosis": other}
    seeds = [figures(3, after_each_task=moments[0]), figures(3, after_each_task=moments[1], **second)]
    parts = tables.run_report({"mean": {}, "std": {}, "seeds": seeds})
    text = [" ".join(line) for line in words(*parts, width=width)]
    for line in (
        "Accuracy (%) after each task, seed 7",
        "after 3 95.00 ±0.00 94.00 ±0.00 1.00 ±0.00 4.00 ±0.00 2.50 ±0.71",
        "Last accuracy (%) 92.12 ±1.41 88.00 ±0.00",
        "Forward passes in tests 3,000 ±707",
        "Forward passes, made / naive 0.30",
        "mean 90.0 2.0 2.0 7.0 97.0 96.0 0.500",
    ):
        assert line in text
    assert len(parts) == 6


def test_a_report_leaves_out_what_the_method_has_not() -> None:
    parts = tables.run_report(figures(2, diagnosis=None, retrieval_accuracy=None, prompts_per_image=None))
    text = "\n".join(lines(*parts))
    assert len(parts) == 3
    assert "retrieved" not in text and "Prompts" not in text and "Bytes per task" in text


def test_numbers_know_their_deviation() -> None:
    assert tables.Metric("x").number(1.234, 0.056) == "1.23 ±0.06"
    assert tables.Metric("x").number(1.234, 0.0) == "1.23 ±0.00"
    assert tables.Metric("x", decimals=0).number(1234.0, 0.0) == "1,234"
    assert tables.Metric("x", "s", decimals=1).number(1234.5, 12.3) == "1,234 ±12"
    assert tables.Metric("x").number(None, 1.0) == tables.Metric("x").number(float("nan"), 1.0) == "–"
