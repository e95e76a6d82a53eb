"""The command line: a table of the subcommands. The module of one is imported only when its command runs.

To add a subcommand, write `NAME_command.py` in the package of its capability, with `COMMAND`: a function with typer's
annotations, or a dictionary of such functions by the names of their subcommands; `EXAMPLES`, if there is one, is shown
at the end of its help. Then add lines to `COMMANDS` and `_MODULES`. Exit codes: 0 done, 1 the thing checked is bad,
2 wrong usage or a missing package.
"""

import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from hfscale import __version__
from hfscale.core.disk_errors import storage_error
from hfscale.core.logging import on_one_line, print_line
from hfscale.core.path_errors import path_error
from hfscale.core.spelling import speaking
from hfscale.core.versions import what_is_missing
from hfscale.errors import HfScaleError, UsageError

COMMANDS = {
    "plan": "Rank the layouts for a model on your GPUs: does it fit, how long, how much.",
    "estimate": "Memory and time of one layout, or of every row of a table of runs.",
    "checkpoints": "List, verify, convert, export or average checkpoints.",
    "tune": "Measure the best layouts of a plan on this machine, choose the fastest, correct later plans.",
    "lr": "Find the learning rate on narrow copies of a model, so that it holds at full width.",
    "sweep": "Run a recipe on 1, 2, 4 … GPUs: scaling efficiency, its causes, a baseline for later runs.",
    "run": "Start a training, and start it again from memory when a process dies.",
    "report": "Where the time and money of a run went, and what to change first.",
    "watch": "Show runs on a page that is updated while they go on.",
    "why": "Why do two runs differ: the first step, rank, module and operation, and what came before.",
    "autostop": "Run a command once when training has ended or the GPUs idle.",
    "check": "Check this node, and under a launcher all ranks and links, before a run.",
    "doctor": "What is installed here, whether it fits together, and what of hfscale works with it.",
    "plugins": "What axolotl, LLaMA-Factory and ms-swift are given so that they use the callback.",
    "configs": "List, show or copy the shipped Accelerate and DeepSpeed configs, recipes and their scripts.",
}

_MODULES = {
    "plan": "hfscale.planner.plan_command",
    "estimate": "hfscale.planner.estimate_command",
    "checkpoints": "hfscale.checkpoint.checkpoints_command",
    "tune": "hfscale.tune.tune_command",
    "lr": "hfscale.lr_scaling.lr_command",
    "sweep": "hfscale.report.sweep_command",
    "run": "hfscale.recovery.run_command",
    "report": "hfscale.report.report_command",
    "watch": "hfscale.report.watch_command",
    "why": "hfscale.why.why_command",
    "autostop": "hfscale.recovery.autostop_command",
    "check": "hfscale.check.check_command",
    "doctor": "hfscale.check.doctor_command",
    "plugins": "hfscale.plugins.plugins_command",
    "configs": "hfscale.core.configs_command",
}
"""The module of each command, as text: importing it would load what the command needs."""
_ALL = "--json"
"""Loads every command, to list them."""


def _error_of_usage() -> Any:
    """Return the base class of typer's errors: before typer 0.26 that of click."""
    try:
        from typer.exceptions import TyperException
    except ModuleNotFoundError:
        return import_module("click").ClickException
    return TyperException


_ERROR_OF_USAGE = _error_of_usage()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. An error is printed as one line on standard error, never as a traceback.

    Args:
        argv (`Sequence[str]`, *optional*): the command and its arguments. Default: those of this process.

    Returns:
        `int`: the exit code.
    """
    try:
        return _run(argv)
    finally:
        _end_output()


def _end_output() -> None:
    """Write what is left to standard output. A reader that has gone, as `head` does, is no error."""
    if sys.stdout is None:  # it was closed before Python started
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would try it again at its end, and print an error
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        _check_none_empty(arguments)
        app = _build(arguments[0])
        with speaking("command"):
            code = app(args=arguments, prog_name="hfscale", standalone_mode=False)
    except HfScaleError as error:
        message = on_one_line(str(error))
        print_line(f"hfscale: error: {message}")
        return error.exit_code
    except _ERROR_OF_USAGE as error:
        print_line(
            f"hfscale: error: {_usage_message(error)} (see hfscale {_help_path(arguments)}--help)"
        )
        return 2
    except ImportError:
        missing = what_is_missing("ScalingCallback")
        if missing is None:
            raise
        print_line(f"hfscale: error: {missing} (see hfscale doctor)")
        return 1
    except OSError as error:
        known = path_error(error) or storage_error(error)
        if known is None:
            raise
        print_line(f"hfscale: error: {on_one_line(str(known))}")
        return known.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return int(code or 0)


def _check_none_empty(arguments: Sequence[str]) -> None:
    """Refuse an empty word, which a shell makes of a variable that is not set; those after `--` are another command's.

    Raises:
        UsageError: there is one.
    """
    before = "hfscale"
    for word in arguments:
        if word == "--":
            return
        if not word or (word.startswith("--") and word.endswith("=")):
            named = word.removesuffix("=") or before
            raise UsageError(f"what follows {named} is empty: set the variable, or leave it out")
        before = word


def _usage_message(error: Any) -> str:
    """Return typer's message in one line.

    It leaves out the value of an option, which is in the exception that caused it.
    """
    message = " ".join(error.format_message().split())
    option = re.match(r"Invalid value for '([^']+)'", message)
    if option is None or error.__cause__ is None:
        return message
    from pydantic import ValidationError

    if not isinstance(error.__cause__, ValidationError):
        return message
    found = error.__cause__.errors()[0]
    expected = re.sub("Value error, .* is not one of", "it must be one of", found["msg"])
    expected = expected.replace("Input should", "it must").partition(", unable")[0].rstrip(".")
    return f"{option[1]} is {found['input']!r}: {expected}"


def _build(requested: str) -> typer.Typer:
    """Build the app with the requested command loaded and the others as lines of the help."""
    app = typer.Typer(
        help="Scale any Hugging Face Trainer run: plan it, launch it, keep it alive, know what it costs.",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.callback()(_global_options)
    for name, summary in COMMANDS.items():
        module = import_module(_MODULES[name]) if requested in (name, _ALL) else None
        command = _not_loaded if module is None else module.COMMAND
        if callable(command):
            examples = "\n".join(getattr(module, "EXAMPLES", ()))
            app.command(name, cls=_Command, help=summary, epilog=examples)(command)
            continue
        group = typer.Typer(rich_markup_mode=None)
        for subcommand, function in command.items():
            group.command(subcommand)(function)
        app.add_typer(group, name=name, help=summary)
    return app


class _Command(TyperCommand):
    """A command whose help shows its options by groups, and then the examples of its module, one a line."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            group = (
                "Arguments"
                if is_argument
                else getattr(parameter, "rich_help_panel", None) or "Options"
            )
            if record is not None:
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=34)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.epilog.splitlines()))


def _print_version(requested: bool) -> None:
    if requested:
        print(f"hfscale {__version__}")
        raise typer.Exit


def _print_capabilities(context: typer.Context, requested: bool) -> None:
    if requested:
        from hfscale.capabilities import capabilities

        print(json.dumps(capabilities(context.command)))
        raise typer.Exit


def _global_options(
    version: bool = typer.Option(
        False,
        "--version",
        is_eager=True,
        callback=_print_version,
        help="Print the version and exit.",
    ),
    as_json: bool = typer.Option(
        False,
        _ALL,
        is_eager=True,
        callback=_print_capabilities,
        help="List what hfscale can do as JSON.",
    ),
) -> None:
    """Read the options that are given before the command."""


def _not_loaded() -> None:
    raise AssertionError("the requested command is always loaded")


def _help_path(arguments: list[str]) -> str:
    return f"{arguments[0]} " if arguments[0] in COMMANDS else ""
