"""The flags of the recipes that follow from the options of callbacks."""

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hfscale.core.options import Option, check_options, choices_of, names_of, options_of

Made = TypeVar("Made")


def flag(help: str, default: object = None, **metadata: object) -> Any:
    """Return a dataclass field that `HfArgumentParser` shows as a flag.

    Args:
        help (`str`): the text that `--help` prints.
        default (`object`, *optional*): the value of a flag that is not given.
        metadata (`object`): further keys of the field's metadata, such as `choices`.
    """
    return field(default=default, metadata={"help": help, **metadata})


def flags_of(cls: type) -> dict[str, str]:
    """Return option -> flag without dashes, of the options that have a flag in the recipes.

    Args:
        cls (`type`): a dataclass with options.
    """
    declared = options_of(cls).items()
    return {name: one.flag or name for name, one in declared if one.no_flag is None}


def with_flags_of(*classes: type) -> Callable[[type[Made]], type[Made]]:
    """Return a decorator that gives a class a field for each flag of some options; `dataclass` goes above it.

    Args:
        classes (`type`): the dataclasses of the options.
    """

    def decorate(cls: type[Made]) -> type[Made]:
        types: dict[str, Any] = {}
        for owner in classes:
            hints = get_type_hints(owner)
            defaults = {one.name: one.default for one in fields(owner)}
            for name, its_flag in flags_of(owner).items():
                declared = options_of(owner)[name]
                types[its_flag], made = _flag_field(declared, hints[name], defaults[name])
                setattr(cls, its_flag, made)
        cls.__annotations__ = types | cls.__annotations__
        return cls

    return decorate


def _flag_field(declared: Option, kind: Any, default: Any) -> tuple[Any, Any]:
    """The type and the field of a flag."""
    text = f"{declared.help}."
    if declared.unset is not None:
        text += f" Default: {declared.unset}."
    metadata: dict[str, Any] = {}
    choices = choices_of(declared, kind)
    if choices:
        metadata["choices"] = choices
        kind = str
    if declared.flag_type is not None:
        return declared.flag_type | None, flag(text, **metadata)
    if get_origin(kind) is not None and NoneType not in get_args(kind):  # several values
        return list[get_args(kind)[0]] | None, flag(text, **metadata)  # type: ignore[misc]
    if default is MISSING:
        return kind | None, flag(text, **metadata)
    if default is not None and NoneType in get_args(kind):
        metadata["or_none"] = True
        text += " none switches it off."
    return kind, flag(text, default, **metadata)


def options_from(cls: type, arguments: Any) -> dict[str, Any]:
    """Return the options that flags give, by name: keyword arguments of the callback that takes them.

    Args:
        cls (`type`): the dataclass of the options.
        arguments (`Any`): an object with the flags.

    Raises:
        UsageError: a value cannot be read.
    """
    found: dict[str, Any] = {}
    types = get_type_hints(cls)
    with names_of(cls):
        for name, its_flag in flags_of(cls).items():
            value = getattr(arguments, its_flag)
            read = options_of(cls)[name].read
            if value is None and NoneType not in get_args(types[name]):
                continue  # not given
            found[name] = value if read is None else read(value)
    return found


def options_taken_by(callback: Any) -> type:
    """Return the dataclass of the options that a callback's `__init__` takes.

    Args:
        callback (`type`): a class whose `__init__` takes options.
    """
    cls: type = callback.__init__.options
    return cls


def from_flags(callback: Callable[..., Made], arguments: Any, **others: Any) -> Made:
    """Return a callback with the options that flags give.

    Args:
        callback (`type`): a class whose `__init__` takes options.
        arguments (`Any`): an object with the flags.
        others (`Any`): options that do not come from flags.

    Raises:
        UsageError: a value cannot be read, is unknown or is out of range.
    """
    return callback(**options_from(options_taken_by(callback), arguments), **others)


def check_flags(arguments: Any, *classes: type) -> None:
    """Check the value of each flag by itself.

    Args:
        arguments (`Any`): an object with the flags.
        classes (`type`): the dataclasses of their options.

    Raises:
        UsageError: a value cannot be read, is unknown or is out of range.
    """
    for cls in classes:
        given = options_from(cls, arguments)
        with names_of(cls):
            check_options(cls, given)
