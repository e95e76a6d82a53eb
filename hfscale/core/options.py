"""An option is declared once: a field of a dataclass, with its help, unit, check and flag in the field's metadata.

The options of a callback are a frozen dataclass that derives from `Options`. From its fields follow the keyword
arguments of the callback (`takes_options`), their description in `help()` and docs/api.md (`describe_options`), the
flags of the recipes (core/option_flags.py) and how an error names them (`names_of`).
`hfscale.planner.option_fields` does the same for the options of plans.
"""

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from hfscale.core.spelling import current_speaker, speaking, spelled_value
from hfscale.errors import ParameterError

Check = Callable[[str, Any], None]
"""A check of an option's value, which gets the option's name."""
Made = TypeVar("Made")
Owner = TypeVar("Owner")
Parameters = ParamSpec("Parameters")


# -- what an option is ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Option:
    """The metadata of a field that is an option."""

    help: str
    """What it is, for `--help` and docstrings, without the full stop."""
    details: str | None = None
    """What docstrings and docs add: whole sentences."""
    unit: str | None = None
    """Unit of a number; help shows it in place of the type."""
    unset: str | None = None
    """What None stands for, as the rest of a sentence that begins with "by default"."""
    check: Check | None = None
    """The check of values other than None."""
    aliases: tuple[str, ...] = ()
    """Further keywords of the Python functions that mean the same."""
    flag: str | None = None
    """Its flag without dashes, where that is another word than its name."""
    no_flag: str | None = None
    """Why the recipes have no flag for it."""
    flag_type: Any = None
    """The type of its flag, where the value is read from something else; None: its own type."""
    read: Callable[[Any], Any] | None = None
    """Reads the value from what the flag gives."""
    choices: tuple[str, ...] = ()
    """The values that a text may have; those of a `Literal` follow from the type."""


def as_option(help: str, **metadata: Any) -> dict[str, Any]:
    """Return the metadata of a field that is an option: `name: str = field(metadata=as_option("The name"))`.

    Args:
        help (`str`): see `Option`.
        metadata (`Any`): the other fields of `Option`.
    """
    return {"option": Option(help=help, **metadata)}


def option(default: Any, *, help: str, **metadata: Any) -> Any:
    """Return a dataclass field that is an option with a default.

    Args:
        default (`Any`): the field's default.
        help (`str`): see `Option`.
        metadata (`Any`): the other fields of `Option`.
    """
    return field(default=default, metadata=as_option(help, **metadata))


@functools.cache
def options_of(cls: Any) -> dict[str, Any]:
    """Return the options among the fields of a dataclass, by name.

    Args:
        cls (`type`): the dataclass. A field that narrows the type of an inherited option stays this option.
    """
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for one in vars(base).get("__dataclass_fields__", {}).values():
            if "option" in one.metadata:
                found[one.name] = one.metadata["option"]
    return found


# -- checks -----------------------------------------------------------------------------------------------------------


def positive(name: str, value: Any) -> None:
    """Check that a number is greater than 0."""
    if not value > 0:  # so that nan does not pass
        raise ParameterError(name, value, "it must be greater than 0")


def positive_or_none(name: str, value: Any) -> None:
    """Check that a number is greater than 0; the error says that it may also be None."""
    if not value > 0:
        raise ParameterError(name, value, f"it must be greater than 0, or {spelled_value(None)}")


def from_0(name: str, value: Any) -> None:
    """Check that a number is at least 0."""
    if not value >= 0:
        raise ParameterError(name, value, "it must be at least 0")


@functools.cache
def _checks(cls: type) -> list[tuple[str, tuple[Any, ...], Check | None, bool]]:
    """Name, allowed values (empty where there is no list of them), check, and whether it may be None, of each option
    whose values are checked."""
    types = get_type_hints(cls)
    found = []
    for name, one in options_of(cls).items():
        allowed = choices_of(one, types[name])
        if allowed or one.check is not None:
            found.append((name, allowed, one.check, NoneType in get_args(types[name])))
    return found


def choices_of(one: Option, kind: Any) -> tuple[Any, ...]:
    """Return the values that an option may have; empty where there is no list of them.

    Args:
        one (`Option`): what is declared of it.
        kind (`Any`): its type.
    """
    return get_args(kind) if get_origin(kind) is Literal else one.choices


def check_options(cls: type, values: Mapping[str, Any]) -> None:
    """Check the value of each option by itself.

    Args:
        cls (`type`): a dataclass with options.
        values (`Mapping[str, Any]`): option -> value, of some of them. Those that are None are not checked if they
            may be.

    Raises:
        UsageError: a value is unknown or out of range; `LayoutError` for a size of a plan.
    """
    for name, allowed, check, is_optional in _checks(cls):
        value = values.get(name)
        if value is None and (is_optional or name not in values):
            continue
        if allowed and value not in allowed:
            raise ParameterError(name, value, f"use one of {', '.join(map(str, allowed))}")
        if check is None:
            continue
        try:
            check(name, value)
        except (TypeError, AttributeError):  # the check compares it with a value of another type
            kind = type(value).__name__
            raise ParameterError(name, value, f"it cannot be of the type {kind}") from None


# -- the options of a callback ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a callback, each of them checked. A subclass checks in `check` what concerns several of them."""

    def __post_init__(self) -> None:
        with names_of(type(self)):
            check_options(type(self), vars(self))
            self.check()

    def check(self) -> None:
        """Check what concerns several options."""

    def error(self, name: str, rule: str) -> ParameterError:
        """Return the error that an option has a value that it cannot have.

        Args:
            name (`str`): the option.
            rule (`str`): which values it may have, or what to do.
        """
        with names_of(type(self)):
            return ParameterError(name, getattr(self, name), rule)


@contextmanager
def names_of(*classes: type) -> Iterator[None]:
    """Let errors name the options of these dataclasses by their flags, where the caller has given flags.

    Args:
        classes (`type`): the dataclasses.
    """
    flags: dict[str, str] = {}
    if current_speaker() != "python":
        for cls in classes:
            flags |= {name: one.flag for name, one in options_of(cls).items() if one.flag}
    with speaking(current_speaker(), flags):
        yield


def takes_options(
    cls: Callable[Parameters, Made],
) -> Callable[[Callable[[Owner, Made], None]], Callable[Concatenate[Owner, Parameters], None]]:
    """Return a decorator for the `__init__` of a class whose arguments are options.

    The decorated method gets one object with the options; type checkers and `help()` see the options themselves.

    Args:
        cls (`type`): the dataclass of the options.
    """

    def decorate(
        init: Callable[[Owner, Made], None],
    ) -> Callable[Concatenate[Owner, Parameters], None]:
        signature = inspect.signature(cls)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(init)
        def initialize(self: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # that of the dataclass would name another class
                raise TypeError(f"{type(self).__name__}() {error}") from None
            with names_of(cls):  # type: ignore[arg-type]
                init(self, cls(*args, **kwargs))

        parameters = [itself, *signature.parameters.values()]
        initialize.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        initialize.options = cls  # type: ignore[attr-defined]
        return initialize

    return decorate


# -- documentation ----------------------------------------------------------------------------------------------------


OPTIONS_LINE = "        **options: the options, see below.\n"
"""The line of a docstring that a description of each option replaces."""


def fill_in_options(docstring: str, rows: Sequence[tuple[str, str, str, str]]) -> str:
    """Return a docstring with a description of each option.

    Args:
        docstring (`str`): a docstring with `OPTIONS_LINE`.
        rows (`Sequence`): what `describe_options` returns.
    """
    entries = [
        textwrap.fill(
            f"{name} ({kind}): {text}",
            width=119,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
            break_on_hyphens=False,
        )
        for name, kind, _, text in rows
    ]
    return docstring.replace(OPTIONS_LINE, "\n".join(entries) + "\n")


def describe_options(cls: type) -> list[tuple[str, str, str, str]]:
    """Return name, type, default and description of each option of a callback, for its documentation.

    Args:
        cls (`type`): the dataclass of the options.
    """
    types = get_type_hints(cls)
    rows = []
    for one in fields(cls):
        declared: Option = one.metadata["option"]
        text = declared.help
        if declared.unset is not None:
            text += f"; by default {declared.unset}"
        row = describe(one.name, declared, types[one.name], one.default, text)
        if declared.details is not None:
            row = (*row[:3], f"{row[3]} {declared.details}")
        rows.append(row)
    return rows


def describe(
    name: str, declared: Option, kind: Any, default: Any, text: str
) -> tuple[str, str, str, str]:
    """Return name, type, default and description of an option, for documentation.

    Args:
        name (`str`): its name.
        declared (`Option`): what is declared of it.
        kind (`Any`): its type.
        default (`Any`): its default; `MISSING` if it has none.
        text (`str`): its help text.
    """
    values = choices_of(declared, kind)
    is_union = get_origin(kind) in (Union, UnionType)
    members = get_args(kind) if is_union else (kind,)
    names = [f"`{_type_name(member)}`" for member in members if member is not NoneType]
    shown = " or ".join(names)
    if default is None or NoneType in members:
        shown += ", *optional*"
    if re.match(r"[A-Z][a-z]*\b", text):  # not ZeRO or GPUs
        text = text[0].lower() + text[1:]
    if bool in members:
        text = f"whether {text}"
    if values:
        text += "; one of " + ", ".join(f"`{value}`" for value in values)
    if declared.unit is not None and declared.unit not in text.lower():
        text += f" ({declared.unit})"
    if declared.aliases:
        text += f"; also called {' and '.join(f'`{alias}`' for alias in declared.aliases)}"
    has_default = default is not MISSING and default is not None
    return name, shown, repr(default) if has_default else "", f"{text}."


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "str"
    if get_origin(kind) is None:
        return str(kind.__name__)
    inner = ", ".join(map(_type_name, get_args(kind)))
    return f"{get_origin(kind).__name__}[{inner}]"
