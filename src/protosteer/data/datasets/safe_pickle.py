"""Read plain data and arrays from a pickle without unpickling: nothing is called, looked up or imported.

Python's own unpickler calls what a file names, and numpy's part of it can be made to take a file's bytes for
pointers. This reader executes only the opcodes of lists, dictionaries, strings, numbers and arrays, and rejects
all others. It copies the numbers of an array from the file, never more than the file has, and compares the few
names that a pickled array mentions as strings.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

_MAKERS = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_DTYPE, _ENCODE = "numpy.dtype", "_codecs.encode"  # Python 3 writes bytes for Python 2 with the latter
_FROM_BUFFER = "numpy._core.numeric._frombuffer"
_NAMES = frozenset((*_MAKERS, _DTYPE, _ENCODE, _FROM_BUFFER, "numpy.ndarray"))
_DTYPES = {"u1": np.dtype("u1"), "i4": np.dtype("<i4"), "i8": np.dtype("<i8")}

_LITERALS = frozenset((
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE",
    "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
))  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONTAINERS: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Named(str):
    """A global name in the file; a string in the file never becomes one."""


class _Unfilled:
    """An array whose state has not been read."""


def read_pickled(file: BinaryIO) -> Any:
    """Read a pickle of plain data and arrays; raise `ValueError` if it is damaged or holds anything else."""
    try:
        return _Reader().read(file)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged: {type(error).__name__} {error}") from error


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def read(self, file: BinaryIO) -> Any:
        for code, argument, _ in pickletools.genops(file):
            self._step(code.name, argument)
        return self.stack.pop()

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _CONTAINERS:
            stack.append(_CONTAINERS[name]())
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in _TUPLES:
            stack.append(tuple(self._pop(len(stack) - _TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._pop(self.marks.pop())))
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(len(stack) - 1 if name == "APPEND" else self.marks.pop())
            _of(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(len(stack) - 2 if name == "SETITEM" else self.marks.pop())
            for key, value in zip(items[::2], items[1::2], strict=True):
                _of(stack[-1], dict)[_of(key, str)] = value
        elif name == "GLOBAL":
            stack.append(_parse_name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_parse_name(*self._pop(len(stack) - 2)))
        elif name in ("REDUCE", "BUILD"):
            target, operand = self._pop(len(stack) - 2)
            stack.append(_call(target, operand) if name == "REDUCE" else _fill(target, operand))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"it has the instruction {name}, which plain data and arrays do not need")

    def _pop(self, start: int) -> list[Any]:
        """Pop everything from `start` on."""
        if not 0 <= start <= len(self.stack):
            raise IndexError("the stack is too short")
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} should")
    return value


def _parse_name(module: str, name: str) -> _Named:
    full_name = f"{_of(module, str)}.{_of(name, str)}"
    if full_name not in _NAMES:
        raise ValueError(f"it asks for {full_name[:100]!r}, which plain data and arrays do not need; do not trust it")
    return _Named(full_name)


def _call(name: Any, arguments: Any) -> Any:
    """Return the result of calling a named function, without calling it."""
    _of(name, _Named)
    _of(arguments, tuple)
    if name in _MAKERS:
        return _Unfilled()
    if name == _DTYPE:
        return _DTYPES[_of(arguments[0], str).lstrip("|<")]
    if name == _ENCODE:
        return _of(arguments[0], str).encode("latin1")
    if name == _FROM_BUFFER:
        data, dtype, shape, order = arguments
        return _array(data, dtype, shape, order)
    raise ValueError(f"it calls {name}")


def _fill(value: Any, state: Any) -> Any:
    """Return an array with its numbers, or a dtype, whose state must be little-endian."""
    if isinstance(value, _Unfilled):
        _, shape, dtype, by_columns, data = _of(state, tuple)
        return _array(data, dtype, shape, "F" if by_columns else "C")
    if not isinstance(value, np.dtype) or _of(state, tuple)[1] not in ("|", "<"):
        raise TypeError(f"a {type(value).__name__} is given a state")
    return value


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, np.dtype):
        raise TypeError("an array without a dtype")
    sizes: Sequence[int] = [_of(size, int) for size in _of(shape, tuple)]
    content = data.encode("latin1") if type(data) is str else bytes(memoryview(data))  # a string of Python 2
    if min(sizes, default=0) < 0 or math.prod(sizes) * dtype.itemsize != len(content):
        raise ValueError("an array is not as long as its sizes say")
    return np.frombuffer(content, dtype).reshape(sizes, order="F" if order == "F" else "C")
