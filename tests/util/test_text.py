"""Words for people."""

import pytest

from protosteer.util.text import counted, listed, one_line, printable, similar_names, suggestion


@pytest.mark.parametrize(
    ("number", "thing", "text"),
    [(0, "image", "0 images"), (1, "class", "1 class"), (2, "class", "2 classes"), (12_000, "task", "12,000 tasks")],
)
def test_plurals(number: int, thing: str, text: str) -> None:
    assert counted(number, thing) == text


def test_long_lists_are_cut() -> None:
    assert listed([]) == "none" and listed(["a", "b"], limit=2) == "a, b"
    assert listed([str(i) for i in range(12)], limit=3) == "0, 1, 2 and 9 more"


def test_the_nearest_word_is_suggested_or_else_all() -> None:
    assert suggestion("cifar10O", ["mnist", "cifar100"]) == "did you mean 'cifar100'?"
    assert suggestion("zebra", ["mnist", "cifar100"]) == "there are: mnist, cifar100"


def test_names_of_others_stay_on_one_line() -> None:
    assert printable("Fuß ☃ 熊") == "Fuß ☃ 熊" and printable("a\tb\u2028c") == "a?b?c"
    assert one_line("two\n  lines") == "two lines"


def test_names_that_are_probably_typing_errors() -> None:
    known = ["tiger lily", "colt's foot", "house", "type 1", "cat", "熊"]
    alike = ["Tiger_Lily", "tiger lilly", "colts foot", "huose", "houses"]
    expected = ["tiger lily", "tiger lily", "colt's foot", "house", "house"]
    assert similar_names(alike, known) == list(zip(alike, expected, strict=True))
    assert similar_names(["type 2", "car", "lion", "☃", "狗", *known], known) == []
    assert similar_names(["rose", "Rose"], []) == [("Rose", "rose")]
