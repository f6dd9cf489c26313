"""Assert errors by their code and details, never by their wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

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
    assert {name: error.details.get(name) for name in details} == details
    assert str(error) and "\n" not in str(error)
