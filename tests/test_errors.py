"""Errors: one line whatever they quote, and whole after crossing a process boundary."""

import pickle

import pytest

import protosteer.errors
from protosteer.errors import DataError, ProtosteerError

KINDS = [
    kind for kind in vars(protosteer.errors).values() if isinstance(kind, type) and issubclass(kind, ProtosteerError)
]


def test_a_message_stays_one_line_whatever_names_it_quotes():
    error = DataError("list.csv: no column 'a\nb\x1b[2J\u2028'; there are: c\rd", code="missing-column")
    assert str(error) == "list.csv: no column 'a b?[2J?'; there are: c d"


def test_a_message_stays_short_whatever_names_it_quotes():
    error = str(DataError(f"x.csv: no file {'y' * 100_000}; remove the row"))
    assert len(error) < 3100 and error.startswith("x.csv: no") and error.endswith("y; remove the row")


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_keeps_code_and_details_when_pickled(kind):
    assert kind("x").code == kind.default_code != ""
    copy = pickle.loads(pickle.dumps(kind("gone; fetch it", code="missing-file", path="a")))
    assert type(copy) is kind and str(copy) == "gone; fetch it"
    assert (copy.code, copy.details) == ("missing-file", {"path": "a"})


def test_codes_of_classes_differ():
    assert len({kind.default_code for kind in KINDS}) == len(KINDS)
