"""Dataclass fields that are options: what belongs to one, how a call gives their values, and how errors name them.

The options themselves are in `hfscale.planner.options`. A field's name is that of the flag (`lora_rank` is
`--lora-rank`), and its metadata are the help text, the unit, the group, the check of its values and other names under
which it is known.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from functools import cache
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hfscale.core.spelling import speaking, spelled
from hfscale.errors import UsageError

MODEL = "Model and training"
HARDWARE = "Hardware"
METHOD = "Precision, optimizer and memory"
LAYOUT = "Layout"
SEARCH = "Search and limits"
ISLANDS = "Islands (DiLoCo)"
INPUT = "Other inputs"
OUTPUT = "Output"
GROUPS = (MODEL, HARDWARE, METHOD, LAYOUT, SEARCH, ISLANDS, INPUT, OUTPUT)
"""The groups of options, in the order in which help shows them."""

Check = Callable[[str, Any], None]
"""A check of an option's value, which gets the option's name as its caller spells it."""


# -- what an option is ------------------------------------------------------------------------------------------------


REQUIRED = inspect.Parameter.empty
"""The default of an option that must be given."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The metadata of a field that is an option."""

    help: str
    """What it is, for `--help` and docstrings, without the full stop."""
    group: str
    """One of `GROUPS`."""
    unit: str | None = None
    """Unit of a number; help shows it in place of the type."""
    unset: str | None = None
    """What None stands for, as the rest of a sentence that begins with "by default"."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What `plan` or `estimate` adds to the help text."""
    check: Check | None = None
    """The check of values other than None."""
    aliases: tuple[str, ...] = ()
    """Further keywords of the Python functions that mean the same."""
    task: str | None = None
    """The task to which it belongs; `hfscale plan` rejects it with others."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of `plan` and `estimate` where they differ from the field's; None where the field's is looked up."""
    flag: str | None = None
    """Its flag, where that does not follow from its name."""
    text: bool = False
    """Whether the command line takes it as text, which the command parses."""
    flag_of: tuple[str, ...] = ("plan", "estimate")
    """The commands that have a flag for it."""

    def text_in(self, function: str, *, has_default: bool) -> str:
        """Return the help text of `plan` or `estimate`, without the full stop.

        Args:
            function (`str`): `plan` or `estimate`.
            has_default (`bool`): whether the default is another value than None.
        """
        parts = [self.help]
        if function in self.notes:
            parts.append(self.notes[function])
        if self.unset is not None and not has_default:
            parts.append(f"by default {self.unset}")
        return "; ".join(parts)


def option(
    default: Any = MISSING,
    *,
    help: str,
    group: str,
    plan: Any = MISSING,
    estimate: Any = MISSING,
    **metadata: Any,
) -> Any:
    """Return a dataclass field that is an option.

    Args:
        default (`Any`, *optional*): the field's default.
        help (`str`): see `Option`.
        group (`str`): see `Option`.
        plan (`Any`, *optional*): the default of `plan`, where it is another one.
        estimate (`Any`, *optional*): the default of `estimate`, where it is another one.
        metadata (`Any`): the other fields of `Option`.
    """
    defaults = {
        name: value
        for name, value in (("plan", plan), ("estimate", estimate))
        if value is not MISSING
    }
    declared = Option(help=help, group=group, defaults=defaults, **metadata)
    return field(default=default, metadata={"option": declared})


@cache
def options_of(cls: Any) -> dict[str, Option]:
    """Return the options among the fields of a dataclass, by name.

    Args:
        cls (`type`): the dataclass. A field that narrows the type of an inherited option stays this option.
    """
    found: dict[str, Option] = {}
    for base in reversed(cls.__mro__):
        for one in vars(base).get("__dataclass_fields__", {}).values():
            if "option" in one.metadata:
                found[one.name] = one.metadata["option"]
    return found


def same_option(cls: type, name: str, default: Any, *, help: str, function: str) -> Any:
    """Return a dataclass field for a command's flag that has the unit, the group and the check of another's option.

    Args:
        cls (`type`): the dataclass that has this option.
        name (`str`): the option's name, which is that of the field too.
        default (`Any`): the field's default.
        help (`str`): what the flag is in this command.
        function (`str`): the command.
    """
    declared = options_of(cls)[name]
    own = Option(
        help=help,
        group=declared.group,
        unit=declared.unit,
        check=declared.check,
        flag_of=(function,),
    )
    return field(default=default, metadata={"option": own})


def flag_of(name: str) -> str:
    """Return the flag of an option or of another parameter, such as `--lora-rank` of `lora_rank`."""
    return f"--{name.replace('_', '-')}"


# -- values from a caller ---------------------------------------------------------------------------------------------


@cache
def _checks(cls: type) -> list[tuple[str, tuple[Any, ...], Check | None, bool]]:
    """Name, allowed values (empty where there is no list of them), check, and whether it may be None, of each option
    whose values are checked."""
    types = get_type_hints(cls)
    found = []
    for name, declared in options_of(cls).items():
        allowed = get_args(types[name]) if get_origin(types[name]) is Literal else ()
        if allowed or declared.check is not None:
            found.append((name, allowed, declared.check, NoneType in get_args(types[name])))
    return found


def check_options(values: Any) -> None:
    """Check each option of an object by itself.

    Args:
        values (`Any`): an instance of a dataclass with options. Those that are None are not checked if they may be.

    Raises:
        LayoutError: a size is not an integer, or out of range.
        UsageError: another value is unknown or out of range.
    """
    cls: Any = type(values)
    for name, allowed, check, is_optional in _checks(cls):
        value = getattr(values, name)
        if allowed and value not in allowed:
            raise UsageError(
                f"{spelled(name)} is {value!r}: use one of {', '.join(map(str, allowed))}"
            )
        if check is not None and not (value is None and is_optional):
            check(spelled(name), value)


Options = TypeVar("Options")


def default_of(cls: Any, name: str, function: str) -> Any:
    """Return the default of an option in a function; `REQUIRED` if it has none.

    Args:
        cls (`type`): the dataclass.
        name (`str`): the option.
        function (`str`): `plan` or `estimate`.
    """
    default = vars(cls)["__dataclass_fields__"][name].default
    found = options_of(cls)[name].defaults.get(function, default)
    return REQUIRED if found is MISSING else found


def make_options(cls: Callable[..., Options], function: str, given: Mapping[str, Any]) -> Options:
    """Return the options of a call, each of them checked.

    Args:
        cls (`type`): their dataclass.
        function (`str`): `plan` or `estimate`.
        given (`Mapping[str, Any]`): the values that the caller gave, by name.

    Raises:
        LayoutError: a size is out of range.
        UsageError: another value is unknown or out of range, or belongs to another task.
    """
    defaults = {name: default_of(cls, name, function) for name in options_of(cls)}
    values = {**defaults, **given}
    changed = [name for name, value in values.items() if value != defaults[name]]
    for name, default in defaults.items():
        if values[name] is None and default is None:
            values[name] = vars(cls)["__dataclass_fields__"][name].default
    chosen = cls(**values)
    check_options(chosen)
    if function == "plan":
        _check_task(options_of(cls), values["task"], changed)
    return chosen


def _check_task(declared: Mapping[str, Option], task: str, changed: Iterable[str]) -> None:
    """Check that the options of a task are given for this task only."""
    for name in changed:
        of_task = declared[name].task
        if of_task not in (None, task):
            raise UsageError(
                f"{spelled(name)} belongs to {spelled('task')} {of_task}, and the task is {task}: leave it out"
            )


@contextmanager
def python_options(
    cls: Callable[..., Options], function: str, given: Mapping[str, Any]
) -> Iterator[Options]:
    """Return the options of a call from Python; while the context lasts, errors name them as the caller did.

    Args:
        cls (`type`): their dataclass.
        function (`str`): `plan` or `estimate`.
        given (`Mapping[str, Any]`): the keyword arguments, whose names may be aliases.

    Raises:
        TypeError: a keyword is unknown, missing, or given under two names.
        UsageError: as `make_options`.
    """
    declared = options_of(cls)
    names = {alias: name for name, one in declared.items() for alias in one.aliases}
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for keyword, value in given.items():
        name = names.get(keyword, keyword)
        if name not in declared:
            raise TypeError(f"{function}() got an unexpected keyword argument {keyword!r}")
        if name in values:
            raise TypeError(
                f"{function}() got {written[name]!r} and {keyword!r}, which mean the same"
            )
        values[name] = value
        written[name] = keyword
    missing = [
        name
        for name in declared
        if name not in values and default_of(cls, name, function) is REQUIRED
    ]
    if missing:
        raise TypeError(f"{function}() misses the keyword arguments {', '.join(missing)}")
    with speaking("python", written):
        yield make_options(cls, function, values)


# -- signatures and docstrings ----------------------------------------------------------------------------------------


Function = TypeVar("Function", bound=Callable[..., Any])
OPTIONS_LINE = "        **options: the options, see below.\n"
"""The line of a docstring that a description of each option replaces."""


def with_options(cls: type) -> Callable[[Function], Function]:
    """Return a decorator that gives a function the signature and the docstring of its options.

    Args:
        cls (`type`): the dataclass of the options, which the function takes as keywords.
    """

    def decorate(function: Function) -> Function:
        types = get_type_hints(cls)
        own = inspect.signature(function)
        taken = [
            parameter
            for parameter in own.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        names = options_of(cls)
        defaults = {name: default_of(cls, name, function.__name__) for name in names}
        for name in sorted(names, key=lambda name: defaults[name] is not REQUIRED):
            annotation = types[name] | None if defaults[name] is None else types[name]
            taken.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=defaults[name],
                    annotation=annotation,
                )
            )
        function.__signature__ = own.replace(parameters=taken)  # type: ignore[attr-defined]
        entries = [
            textwrap.fill(
                f"{name} ({kind}): {text}",
                width=119,
                initial_indent=" " * 8,
                subsequent_indent=" " * 12,
                break_on_hyphens=False,
            )
            for name, kind, _, text in described(cls, function.__name__)
        ]
        function.__doc__ = (function.__doc__ or "").replace(OPTIONS_LINE, "\n".join(entries) + "\n")
        return function

    return decorate


def described(cls: type, function: str) -> list[tuple[str, str, str, str]]:
    """Return name, type, default and description of each option of a function, for its documentation.

    Args:
        cls (`type`): the dataclass.
        function (`str`): `plan` or `estimate`.
    """
    types = get_type_hints(cls)
    rows = []
    for name, declared in sorted(
        options_of(cls).items(), key=lambda item: GROUPS.index(item[1].group)
    ):
        default = default_of(cls, name, function)
        members = (
            [types[name]]
            if get_origin(types[name]) is Literal
            else get_args(types[name]) or (types[name],)
        )
        kinds = [_type_name(member) for member in members if member is not NoneType]
        kind = " or ".join(f"`{one}`" for one in kinds) + (
            ", *optional*" if default is None else ""
        )
        text = declared.text_in(function, has_default=default is not None)
        if re.match(r"[A-Z][a-z]*\b", text):  # not ZeRO or GPUs
            text = text[0].lower() + text[1:]
        if bool in members:
            text = f"whether {text}"
        if get_origin(types[name]) is Literal:
            text += "; one of " + ", ".join(f"`{value}`" for value in get_args(types[name]))
        if declared.unit is not None and declared.unit not in text.lower():
            text += f" ({declared.unit})"
        if declared.aliases:
            text += f"; also called {' and '.join(f'`{alias}`' for alias in declared.aliases)}"
        rows.append((name, kind, "" if default in (REQUIRED, None) else repr(default), f"{text}."))
    return rows


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "str"
    origin = get_origin(kind) or kind
    return str(origin.__name__)
