"""Errors that a user can fix.

A message is one line: what is wrong, where, what to do. Programs and tests rely on `code` and `details`,
which stay the same when the English improves.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

MAX_LENGTH = 3000  # characters of a message


class ProtosteerError(Exception):
    """Base of every error that protosteer raises on purpose.

    Args:
        message: One line: what is wrong, where, what to do.
        code: A stable identifier of the mistake, such as "no-images"; the class's own by default.
        **details: What the message is about, such as `path=` or `name=`.

    Attributes:
        code: The stable identifier.
        details: The keyword arguments.
    """

    default_code: ClassVar[str] = "error"

    def __init__(self, message: str = "", *, code: str | None = None, **details: Any):
        # Names from untrusted files may hold line breaks and control characters; a message stays one line.
        line = re.sub(r"\s*[\r\n]+\s*", " ", message)
        if len(line) > MAX_LENGTH:  # the end says what to do
            line = f"{line[: MAX_LENGTH * 2 // 3]} ... {line[-MAX_LENGTH // 3 :]}"
        super().__init__("".join(c if c.isprintable() else "?" for c in line))
        self.code = code or self.default_code
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with code and details, so that an error crosses process boundaries complete."""
        return _rebuild, (type(self), self.args, self.code, self.details)


def _rebuild(kind: type[ProtosteerError], args: tuple[Any, ...], code: str, details: dict[str, Any]) -> ProtosteerError:
    return kind(*args, code=code, **details)


class SettingsError(ProtosteerError, ValueError):
    """A setting is unknown or has an impossible value."""

    default_code = "bad-setting"


class WeightsError(ProtosteerError):
    """Backbone weights are absent, unreadable or of another architecture."""

    default_code = "bad-weights"


class FingerprintMismatchError(WeightsError):
    """Weights do not have the fingerprint that was asked for."""

    default_code = "other-weights"


class DataError(ProtosteerError, ValueError):
    """Images or labels cannot be used as they are."""

    default_code = "bad-data"


class LearnerError(ProtosteerError):
    """The learner's state does not allow the operation."""

    default_code = "bad-operation"


class ModelFileError(ProtosteerError):
    """A model file is damaged, of another format, or belongs to another backbone."""

    default_code = "bad-model-file"


class TrainingError(ProtosteerError):
    """Training cannot continue, for instance because the loss is not finite."""

    default_code = "training-failed"


class RunError(ProtosteerError):
    """A run folder cannot be used as asked: it holds another run, or is in use."""

    default_code = "bad-run-folder"


class DistributedError(ProtosteerError):
    """Processes of a distributed job cannot meet, or one of them is lost."""

    default_code = "process-group-failed"


class ExecutorError(ProtosteerError):
    """An executor cannot run its jobs: Ray is missing or unreachable, or its workers die."""

    default_code = "executor-failed"


class ProtosteerWarning(UserWarning):
    """Something works but is probably not what the user wants."""
