"""Assert errors by their code and details, never by their wording."""

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from _pytest.capture import CaptureResult

from protosteer.cli import main
from protosteer.errors import ProtosteerError


@contextmanager
def expect_error(
    code: str, kind: type[ProtosteerError] = ProtosteerError, **details: Any
) -> Iterator[pytest.ExceptionInfo[ProtosteerError]]:
    """Expect an error of this kind with this code, whose details contain these, and a message of one line."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"code is {error.code!r}: {error}"
    assert {name: error.details.get(name) for name in details} == details and str(error) and "\n" not in str(error)


def expect_cli_error(code: str | None, *words: object, **details: Any) -> str:
    """Run a command that must fail with exit code 2, one line on standard error and this error code.

    Returns what was said on standard error. A wrong command line has the code "usage" unless it has its own;
    None stands for any error of the library.
    """
    errors: list[Exception] = []
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        exit_code = main([str(word) for word in words], on_error=errors.append)
    assert exit_code == 2, said.getvalue()
    (error,) = errors
    assert code is not None or isinstance(error, ProtosteerError)
    found_code = getattr(error, "code", "cannot-write" if isinstance(error, OSError) else "usage")
    assert code in (None, found_code), f"code is {found_code!r}: {error}"
    found = getattr(error, "details", {})
    assert {name: found.get(name) for name in details} == details
    assert sum(line.startswith("error: ") for line in said.getvalue().splitlines()) == 1
    assert "Traceback" not in said.getvalue()
    return said.getvalue()


def run_cli(capsys: pytest.CaptureFixture[str], *words: object) -> CaptureResult[str]:
    """Run a command that must succeed; return what was printed since output was read last."""
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr()
