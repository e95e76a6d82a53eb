"""Dataclass fields that are options: what belongs to one, how a call gives their values, and how errors name them.

What all options have in common is in `hfscale.core.options`; those of plans are in `hfscale.planner.options`. A
field's name is that of the flag (`lora_rank` is `--lora-rank`), and its metadata are the help text, the unit, the
group, the check of its values and other names under which it is known.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar, get_type_hints

from hfscale.core.options import Option, check_options, describe, fill_in_options, options_of
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

# -- what an option is ------------------------------------------------------------------------------------------------


REQUIRED = inspect.Parameter.empty
"""The default of an option that must be given."""


@dataclass(frozen=True, kw_only=True)
class PlanOption(Option):
    """The metadata of a field that is an option of a plan."""

    group: str
    """One of `GROUPS`."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What `plan` or `estimate` adds to the help text."""
    task: str | tuple[str, ...] | None = None
    """The task, or the tasks, to which it belongs; `hfscale plan` rejects it with others."""
    needs: str | None = None
    """The option without which it has no effect; the commands reject it then."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of `plan` and `estimate` where they differ from the field's; None where the field's is looked up."""
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
        help (`str`): see `PlanOption`.
        group (`str`): see `PlanOption`.
        plan (`Any`, *optional*): the default of `plan`, where it is another one.
        estimate (`Any`, *optional*): the default of `estimate`, where it is another one.
        metadata (`Any`): the other fields of `PlanOption`.
    """
    defaults = {
        name: value
        for name, value in (("plan", plan), ("estimate", estimate))
        if value is not MISSING
    }
    declared = PlanOption(help=help, group=group, defaults=defaults, **metadata)
    return field(default=default, metadata={"option": declared})


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
    own = PlanOption(
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


def check_needs(cls: Any, function: str, given: Mapping[str, Any]) -> None:
    """Refuse options whose values have no effect, since the one that they need has its default.

    Args:
        cls (`type`): the dataclass of the options.
        function (`str`): `plan` or `estimate`.
        given (`Mapping[str, Any]`): the values that were typed, by name.

    Raises:
        UsageError: such an option has another value than its default.
    """
    for name, found in options_of(cls).items():
        if found.needs is None or name not in given:
            continue
        value, needed = given[name], found.needs
        if value == default_of(cls, name, function):
            continue
        if given[needed] == default_of(cls, needed, function):
            raise UsageError(
                f"{spelled(name, value)} has no effect without {spelled(needed)}: give both, or none"
            )


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
    check_options(type(chosen), vars(chosen))
    if function == "plan":
        _check_task(options_of(cls), values["task"], changed)
    return chosen


def _check_task(declared: Mapping[str, PlanOption], task: str, changed: Iterable[str]) -> None:
    """Check that the options of a task are given for this task only."""
    for name in changed:
        of_task = declared[name].task
        if of_task is None:
            continue
        tasks = (of_task,) if isinstance(of_task, str) else of_task
        if task not in tasks:
            raise UsageError(
                f"{spelled(name)} belongs to {spelled('task')} {' and '.join(tasks)}, and the task is {task}: leave "
                "it out"
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
        rows = described(cls, function.__name__)
        function.__doc__ = fill_in_options(function.__doc__ or "", rows)
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
        default = MISSING if default is REQUIRED else default
        has_default = default is not MISSING and default is not None
        text = declared.text_in(function, has_default=has_default)
        rows.append(describe(name, declared, types[name], default, text))
    return rows
