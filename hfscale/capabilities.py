"""What hfscale can do, as one JSON object for programs: `hfscale --json`."""

from typing import Any

import typer
from typer.core import TyperGroup

import hfscale
from hfscale.core.records import METRIC_PREFIXES
from hfscale.core.shipped import list_configs

EXIT_CODES = {
    "0": "done",
    "1": "the thing checked is bad, or it cannot be done",
    "2": "wrong usage, or a package is missing",
    "75": "a training was preempted and saved: start the same command again",
}


def capabilities(commands: Any) -> dict[str, Any]:
    """Return commands with their options, public Python names, shipped files and prefixes of metric keys.

    Args:
        commands (`click.Group`): the command line with all its commands loaded.
    """
    return {
        "version": hfscale.__version__,
        "commands": _commands(commands),
        "exit_codes": EXIT_CODES,
        "python": list(hfscale.__all__),
        "shipped": [
            {"name": one.name, "kind": one.kind, "summary": one.summary} for one in list_configs()
        ],
        "metric_prefixes": list(METRIC_PREFIXES),
    }


def _commands(group: Any, prefix: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            found += _commands(command, f"{prefix}{name} ")
            continue
        context = typer.Context(command, info_name=name)
        parameters = [
            _parameter(one, context) for one in command.get_params(context) if one.name != "help"
        ]
        found.append(
            {
                "name": f"{prefix}{name}",
                "summary": " ".join((command.help or "").split()),
                "arguments": [one for one in parameters if not one["options"]],
                "options": [one for one in parameters if one["options"]],
            }
        )
    return found


def _parameter(parameter: Any, context: typer.Context) -> dict[str, Any]:
    is_option = parameter.param_type_name == "option"
    usage, text = parameter.get_help_record(context) or (parameter.name, "")
    default = (
        parameter.default
        if isinstance(parameter.default, str | int | float | bool | None)
        else None
    )
    return {
        "usage": usage,
        "options": [*parameter.opts, *parameter.secondary_opts] if is_option else [],
        "required": parameter.required,
        "repeatable": parameter.multiple or parameter.nargs == -1,
        "default": default,
        "help": " ".join(text.split()),
    }
