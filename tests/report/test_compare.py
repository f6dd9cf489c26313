"""Comparison of runs: mean and spread over seeds, in three forms that agree."""

import csv
import io
from typing import Any

import pytest
from rich.console import Console

from protosteer.report import compare
from protosteer.report.tables import LABEL_WIDTH

LONG = "runs/split-cifar100-cpp-vit_base_patch16_224.augreg_in21k-50-epochs [red]a|b"
DIAGNOSIS = {
    "accuracy": 90.0, "not_retrieved": 1.0, "wrong_prompt_won": 2.0, "wrong_class": 7.0,
    "true_task_with_prompt": 97.0, "true_task_without_prompt": 96.0, "key_spread": 0.5, "value_spread": 0.4,
}  # fmt: skip


def seed(number: int, **changes: Any) -> dict[str, Any]:
    """Accuracies 90, 92, 94 for seeds 0, 1, 2: mean 92, sample deviation 2."""
    return {
        "seed": number, "matrix": [[99.0], [98.0, 97.0]], "last_accuracy": 90.0 + 2 * number,
        "avg_accuracy": 95.5, "last_forgetting": 3.0 - number, "avg_forgetting": 2.0,
        "last_image_accuracy": 80.0 + 2 * number, "avg_image_accuracy": 85.5, "passes_per_image": 2.5 + number,
        "calibration_error": 4.0,
        "retrieval_accuracy": 97.0, "bytes_per_task": 35000.0, "bytes_per_class": 13096.0,
        "trained_parameters": 1000, "train_seconds": 12345.0 + 10 * number, "eval_seconds": 12.5,
        "forward_passes": 100, "naive_forward_passes": 500,
        "diagnosis": {"mean": DIAGNOSIS | {"not_retrieved": 1.0 + number}, "tasks": []},
    } | changes  # fmt: skip


PLAIN = {"retrieval_accuracy": None, "passes_per_image": 1, "calibration_error": None, "diagnosis": None}
ROWS = {"ncm": [seed(0, **PLAIN)], "cpp": [seed(i) for i in range(3)], LONG: [seed(i) for i in range(3)]}


def lines(rows: Any, width: int) -> list[str]:
    """What a terminal shows of the tables."""
    console = Console(file=io.StringIO(), width=width)
    console.print(*compare.comparison_tables(rows), sep="\n")
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def as_csv(rows: Any) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(compare.comparison_csv(rows))))


def test_a_figure_that_one_seed_lacks_is_nobodys() -> None:
    (row,) = as_csv({"cpp": [seed(0), seed(1, retrieval_accuracy=None, diagnosis=None)]})
    assert "last_accuracy_mean" in row and "retrieval_accuracy_mean" not in row
    assert not [name for name in row if name.startswith("diagnosis_")]


def test_memory_as_the_paper_counts_it_is_shown_for_rows_that_have_it() -> None:
    plain, cpp = [seed(0)], [seed(0, prompt_bytes_per_task=36864.0, appendix_bytes_per_class=37478.4)]
    for form in (compare.comparison_markdown, compare.comparison_latex):
        assert "36,864" in form({"ncm": plain, "cpp": cpp}) and "37,478" in form({"cpp": cpp})
        assert "appendix" not in form({"ncm": plain})
    assert any("36,864" in line for line in lines({"ncm": plain, "cpp": cpp}, 120))


def test_the_tables_in_a_hundred_columns() -> None:
    found = [line.split() for line in lines(ROWS, 100)]
    assert ["ncm", "1", "90.00", "95.50", "80.00", "85.50", "3.00"] in found
    pairs = ["92.00", "±2.00", "95.50", "±0.00", "82.00", "±2.00", "85.50", "±0.00", "2.00", "±1.00"]
    assert ["cpp", "3", *pairs] in found
    assert ["ncm", "–", "1.00", "–"] in found and ["ncm", "13,096", "1,000", "12,345", "12.5"] in found
    assert ["cpp", "4.00", "±0.00", "3.50", "±1.00", "97.00", "±0.00"] in found
    assert ["cpp", "13,096", "1,000", "12,355", "±10", "12.5", "±0.0"] in found
    assert ["cpp", "90.00", "±0.00", "2.00", "±1.00", "2.00", "±0.00", "7.00", "±0.00"] in found
    assert ["cpp", "97.00", "±0.00", "96.00", "±0.00", "0.500", "±0.000", "0.400", "±0.000"] in found


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_label_breaks_a_table(width: int) -> None:
    found = lines(ROWS, width)
    text = " ".join(found)
    assert max(map(len, found)) <= width
    assert "…" not in text
    numbers = [word for word in text.split() if word[0] in "±0123456789" and "." in word]
    assert all(len(word.split(".")[1]) in (1, 2, 3) for word in numbers)  # none is torn
    whole = "".join(line[: LABEL_WIDTH + 1].strip() for line in found)
    assert whole.replace(" ", "").count(LONG.replace(" ", "")) == 5
    assert "retrieved" in text  # the longest word of a heading


def test_thirty_methods_of_as_many_seeds_take_a_line_each_in_eighty_columns() -> None:
    rows = {f"a-method-{i:02}": [seed(n) for n in range(3)] for i in range(30)}
    found = lines(rows, 80)
    assert max(map(len, found)) <= 80 and "over 3 seeds" in found[0]
    for name in rows:
        assert [name, "92.00", "±2.00", "95.50", "±0.00"] in [line.split()[:5] for line in found]
    torn = [line for line in found if line.split()[:1] and line.split()[0].startswith("±")]
    assert not torn
    assert "1 seed" in lines({"x": [seed(0)]}, 80)[0]


def test_both_averages_have_names() -> None:
    heading = " ".join(lines(ROWS, 100)[:7])
    assert heading.count("mean over") == 4 and heading.count("tasks") == heading.count("images") == 2
    markdown = compare.comparison_markdown(ROWS).splitlines()[0]
    for name in ("Last", "Avg"):
        for what in ("tasks", "images"):
            assert f"{name} accuracy (%), mean over {what}" in markdown


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace(r"\|", "/").strip("|").split("|")]


def test_markdown_is_two_tables_with_the_figures() -> None:
    figures, diagnosis = compare.comparison_markdown(ROWS).split("\n\n")
    for table in (figures, diagnosis):
        found = table.splitlines()
        assert len(found) == 2 + len(ROWS) and r"a\|b" in found[-1]
        assert len({len(cells(line)) for line in found}) == 1
        assert cells(found[1])[:2] == ["---", "---:"]
    _, _, ncm, cpp, _ = map(cells, figures.splitlines())
    assert " ".join(ncm) == "ncm 1 90.00 95.50 80.00 85.50 3.00 – 1.00 – 13,096 1,000 12,345 12.5"
    assert cpp[2] == "92.00 ± 2.00" and cpp[12] == "12,355 ± 10"
    _, _, ncm, cpp, _ = map(cells, diagnosis.splitlines())
    assert set(ncm[2:]) == {"–"} and cpp[2:5] == ["90.00 ± 0.00", "2.00 ± 1.00", "2.00 ± 0.00"]


def test_csv_has_every_figure_as_a_plain_number() -> None:
    ncm, cpp, last = as_csv(ROWS)
    assert last["run"] == LONG
    figures = set(seed(0)) - {"seed", "matrix", "diagnosis"}
    columns = {f"{name}_{kind}" for name in figures for kind in ("mean", "std")}
    causes = {f"diagnosis_{name}_{kind}" for name in DIAGNOSIS for kind in ("mean", "std")}
    assert set(cpp) == {"run", "n", "class_orders", "seeds"} | columns | causes
    assert float(cpp["last_accuracy_mean"]) == 92.0 and float(cpp["last_accuracy_std"]) == 2.0
    assert cpp["train_seconds_mean"] == "12355" and cpp["diagnosis_not_retrieved_std"] == "1"
    assert cpp["seeds"] == "3" and ncm["seeds"] == "1"
    assert ncm["last_accuracy_std"] == ncm["retrieval_accuracy_mean"] == ncm["diagnosis_accuracy_mean"] == ""


def test_each_kind_of_diagnosis_has_its_tables() -> None:
    evidence = {
        "accuracy": 91.0, "task_not_tried": 2.0, "coarse_wrong": 3.0, "fine_wrong": 4.0, "coarse_accuracy": 90.0,
        "true_task_accuracy": 96.0, "confidence": 89.0, "passes": 1.6,
    }  # fmt: skip
    classes = {"accuracy": 80.0, "same_task": 5.0, "other_task": 15.0}
    kinds = {"ours": evidence, "cpp": DIAGNOSIS, "ncm": classes}
    rows = {name: [seed(0, diagnosis={"mean": kind, "tasks": []})] for name, kind in kinds.items()}
    found = [line.split() for line in lines(rows, 80)]
    for line in (
        ["ours", "91.00", "2.00", "3.00", "4.00"],
        ["ours", "90.00", "96.00", "89.00", "1.60"],
        ["cpp", "90.00", "1.00", "2.00", "7.00"],
        ["ncm", "80.00", "5.00", "15.00"],
    ):
        assert line in found
    order = [line[0] for line in found if line and line[0] in kinds]
    assert order == [*kinds] * 3 + ["cpp", "cpp", "ours", "ours", "ncm"]
    assert as_csv(rows)[0]["diagnosis_fine_wrong_mean"] == "4"


def test_csv_keeps_figures_that_no_table_knows() -> None:
    (row,) = as_csv({"x": [seed(0, replayed_images=7)]})
    assert row["replayed_images_mean"] == "7"


def test_an_unknown_spread_is_no_number() -> None:
    unknown = {"mean": DIAGNOSIS | {"value_spread": float("nan")}, "tasks": []}
    rows = {"x": [seed(i, diagnosis=unknown) for i in range(2)]}
    assert "nan" not in compare.comparison_markdown(rows) + compare.comparison_csv(rows)


TESTS = {
    "ncm": {"accuracy": 80.0, "accuracy_low": 77.5, "accuracy_high": 82.25},
    "cpp": {
        "accuracy": 82.0, "accuracy_low": 79.0, "accuracy_high": 84.0, "pairs": 3, "difference": 2.0,
        "difference_low": 1.0, "difference_high": 3.0, "mcnemar_p": 0.0123, "mcnemar_holm_p": 0.0246, "t_p": None,
        "wilcoxon_p": 0.25,
    },
}  # fmt: skip


def test_tests_are_in_every_form() -> None:
    rows = {name: ROWS[name] for name in TESTS}
    cells_of_cpp = ["82.00 [79.00, 84.00]", "2.00 [1.00, 3.00]", "3", "0.0123", "0.0246", "–", "0.25"]
    last = compare.comparison_markdown(rows, TESTS).split("\n\n")[2].splitlines()
    assert cells(last[-1]) == ["cpp", *cells_of_cpp] and cells(last[2])[1:3] == ["80.00 [77.50, 82.25]", "–"]
    ncm, cpp = csv.DictReader(io.StringIO(compare.comparison_csv(rows, TESTS)))
    assert cpp["test_mcnemar_p"] == "0.0123" and ncm["test_mcnemar_p"] == cpp["test_t_p"] == ""
    console = Console(file=io.StringIO(), width=140)
    console.print(compare.comparison_tests(TESTS))
    text = " ".join(console.file.getvalue().split())
    assert " ".join(cells_of_cpp[:2]) in text and "Pairs 0" not in text
    console.print(compare.comparison_tests(TESTS | {"other": TESTS["ncm"] | {"pairs": 0}}))
    assert "Pairs 0: no run" in " ".join(console.file.getvalue().split())


def test_latex_escapes_and_has_as_many_cells_in_every_row() -> None:
    rows = {"a_b & 5 % #1 ^ \\x": ROWS["cpp"], "ncm": ROWS["ncm"]}
    text = compare.comparison_latex(rows, {})
    about, *tables = text.split("\n\n")
    assert about.startswith("% Mean and standard deviation over a_b & 5 % #1 ^ \\x: 3 seeds; ncm: ")
    for table in tables:
        title, begin, rule, *rest = table.strip().splitlines()
        assert title.startswith("% ") and rule == r"\toprule" and rest[-1] == r"\end{tabular}"
        body = [line for line in rest if line.endswith(r" \\")]
        columns = begin.removeprefix(r"\begin{tabular}{").rstrip("}")
        counts = {len(line.replace(r"\&", "and").split(" & ")) for line in body}
        assert len(body) == 3 and counts == {len(columns)} and len(columns) < 10
        longest = max(len(line) for cell in body[0].split(" & ") for line in cell.split(r"\\"))
        assert longest < 16 + len(r"\shortstack[r]{}")
    assert "Blurry" not in text and "Cost" in text
    blurry = compare.comparison_latex({"ncm": [seed(0, blurred_images=10.0, anytime_accuracy=90.0)]})
    assert "% Blurry task boundaries" in blurry
    body = [line for line in tables[0].splitlines() if line.endswith(r" \\")]
    assert body[1].startswith(r"a\_b \& 5 \% \#1 \textasciicircum{} \textbackslash{}x & 3 & 92.00 $\pm$ 2.00")
    assert "–" not in text and "±" not in text
    tested = compare.comparison_latex(rows, {"ncm": TESTS["ncm"]})
    assert tested.count(r"\begin{tabular}") == text.count(r"\begin{tabular}") + 1
    assert "difference from ncm" in tested.split("\n\n")[-1].splitlines()[0]


def test_transfer_has_a_table_if_a_run_has_it() -> None:
    more = {"clipped_forgetting": 4.0, "backward_transfer": -3.0, "task_incremental_accuracy": 99.0}
    found = [line.split() for line in lines({"cpp": [seed(0, **more)]}, 80)]
    assert ["cpp", *(f"{value:.2f}" for value in (seed(0)["avg_forgetting"], 4.0, -3.0, 99.0))] in found
