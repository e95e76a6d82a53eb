"""Makes the flags of a command from options (`hfscale.planner.option_fields`)."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

from hfscale.core.options import options_of
from hfscale.core.spelling import speaking, spelled
from hfscale.errors import UsageError
from hfscale.planner.option_fields import GROUPS, REQUIRED, PlanOption, default_of, flag_of

_GROUPS_OF_GPUS = re.compile(r"[+;&]|^\s*\d+\s*([,x*:]|$)")
"""What a name of a GPU has that stands for several groups of them: `A100-80GB+H100-80GB`, `4xA100-80GB`, `4,4`."""
_ONE_KIND = (
    "one job on two kinds or groups of GPU is not planned: every GPU would wait for the slowest; give one kind and "
    "the number of all its GPUs, such as --gpu H100-80GB --gpus 8"
)


def check_one_kind(gpu: str) -> None:
    """Check that `--gpu` does not describe one job on several kinds of GPU.

    Args:
        gpu (`str`): the value of the flag.

    Raises:
        UsageError: it does.
    """
    if any(map(_GROUPS_OF_GPUS.search, gpu.split(","))):
        raise UsageError(f"{spelled('gpu')} is {gpu!r}: {_ONE_KIND}")


def parse_gpus(text: str | int) -> int:
    """Parse the value of `--gpus`.

    Args:
        text (`str` or `int`): the value.

    Raises:
        UsageError: it is no integer, or a list of numbers.
    """
    try:
        return int(text)
    except ValueError:
        pass
    given = f"{spelled('gpus')} is {text!r}"
    if re.search(r"\d", str(text)) and re.search(r"[,+x*/;& :]", str(text)):
        raise UsageError(f"{given}: {_ONE_KIND}")
    raise UsageError(f"{given}: it must be a valid integer")


def make_command(
    run: Callable[..., int],
    *classes: type,
    function: str,
    arguments: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Callable[..., int]:
    """Return a function with typer's annotations that collects the flags of a command.

    Args:
        run (`Callable[..., int]`): the command. It gets each argument, and for each of `classes` a dictionary of its
            options' values by name. While it runs, errors name options by their flags.
        classes (`type`): the dataclasses of the options. An option that has no flag in this command is left out.
        function (`str`): the name of the command.
        arguments (`Mapping[str, Any]`): annotations of the arguments that are no flags, by their names.
        defaults (`Mapping[str, Any]`, *optional*): defaults of flags that are others than those of the function.
    """
    flags: list[tuple[int, inspect.Parameter]] = []
    names = [
        [name for name, one in options_of(cls).items() if function in one.flag_of]
        for cls in classes
    ]
    for cls, of_class in zip(classes, names, strict=True):
        types = get_type_hints(cls)
        for name in of_class:
            declared = options_of(cls)[name]
            default = (defaults or {}).get(name, _default(cls, name, function))
            annotation = _flag(function, name, declared, types[name], default)
            flags.append((GROUPS.index(declared.group), _parameter(name, annotation, default)))
    flags.sort(key=lambda one: one[0])

    def command(**values: Any) -> int:
        with speaking("command"):
            return run(
                *(values[name] for name in arguments),
                *({name: values[name] for name in of_class} for of_class in names),
            )

    own = [_parameter(name, annotation, None) for name, annotation in arguments.items()]
    command.__signature__ = inspect.Signature([*own, *(flag for _, flag in flags)])  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _default(cls: type, name: str, function: str) -> Any:
    """The default of a flag; None for one that must be given, which the command itself reports."""
    default = default_of(cls, name, function)
    if default is REQUIRED:
        default = {field.name: field.default for field in fields(cls)}[name]
    return None if default is MISSING else default


def _flag(function: str, name: str, declared: PlanOption, kind: Any, default: Any) -> Any:
    """The annotation of a flag."""
    kind = str if declared.text else kind
    flag = flag_of(declared.flag or name)
    if default is None:
        if kind == bool | None:
            flag = f"{flag}/--no-{name}"
        kind = kind | None
    unit = declared.unit.upper() if declared.unit and declared.unit.isalpha() else declared.unit
    shown = typer.Option(
        flag,
        help=f"{declared.text_in(function, has_default=default is not None)}.",
        metavar=unit,
        rich_help_panel=declared.group,
    )
    return Annotated[kind, shown]
