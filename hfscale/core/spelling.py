"""How an error names a parameter: as its caller wrote it, which `spelled` looks up in one context variable.

| who speaks | `spelled("tp_size")` | `spelled("tp_size", 2)` |
|---|---|---|
| `python`: a program | `tp_size` | `tp_size=2` |
| `recipe`: its flags | `--tp_size` | `--tp_size 2` |
| `command`: the flags of `hfscale` | `--tp-size` | `--tp-size 2` |
| `launcher`: the keys of its config | `tp_size` | `tp_size: 2` |
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

Speaker = Literal["python", "recipe", "command", "launcher"]
"""Who wrote the parameters."""

_ASSIGNMENT: Mapping[Speaker, str] = {
    "python": "=",
    "recipe": " ",
    "command": " ",
    "launcher": ": ",
}
"""What stands between a parameter and its value."""
_UNGIVEN: Any = object()


@dataclass(frozen=True)
class _Voice:
    speaker: Speaker = "python"
    names: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> its name where the caller wrote another one, in words that underscores join."""


_PYTHON = _Voice()
_voice: ContextVar[_Voice] = ContextVar("_voice", default=_PYTHON)


def current_speaker() -> Speaker:
    """Return who wrote the parameters that errors name now."""
    return _voice.get().speaker


@contextmanager
def speaking(speaker: Speaker, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Let errors name parameters as this caller wrote them: a context manager, or a decorator of a function.

    Args:
        speaker (`str`): who wrote the parameters.
        names (`Mapping[str, str]`, *optional*): parameter -> the name that the caller knows it by, where it is another
            one.
    """
    token = _voice.set(_Voice(speaker, names or {}))
    try:
        yield
    finally:
        _voice.reset(token)


def spelled(parameter: str, value: Any = _UNGIVEN) -> str:
    """Return a parameter, or a parameter with a value, as its caller wrote it.

    Args:
        parameter (`str`): its name in Python.
        value (`Any`, *optional*): the value. Without it only the name is returned.
    """
    voice = _voice.get()
    name = voice.names.get(parameter, parameter)
    if voice.speaker == "recipe":
        name = f"--{name}"
    elif voice.speaker == "command":
        name = f"--{name.replace('_', '-')}"
    if value is _UNGIVEN:
        return name
    is_switch = voice.speaker == "command" and value is True
    if is_switch:
        return name
    return f"{name}{_ASSIGNMENT[voice.speaker]}{spelled_value(value)}"


def spelled_value(value: Any) -> str:
    """Return a value as its caller wrote it: a literal in Python, else text without quotes.

    Args:
        value (`Any`): the value.
    """
    if current_speaker() == "python":
        return repr(value)
    return plain_value(value)


def plain_value(value: Any) -> str:
    """Return a single value as it is written on the command line."""
    if isinstance(value, dict):
        return json.dumps(value)
    text = str(value)
    if isinstance(value, bool | None):
        return text.lower()
    return text
