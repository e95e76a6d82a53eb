"""Reading the flags of a recipe from a YAML file and the command line, and the text of `--help`."""

import re
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from functools import wraps
from importlib import import_module
from itertools import pairwise
from typing import Any, NoReturn, get_args, get_type_hints

from transformers import HfArgumentParser, TrainingArguments

from hfscale.core.flags import (
    nearest,
    read_yaml_mapping,
    split_off_config,
    to_argv,
)
from hfscale.core.logging import is_main_process
from hfscale.core.spelling import plain_value, speaking, spelled
from hfscale.core.tables import read_table
from hfscale.errors import HfScaleError, UsageError
from hfscale.parallel.arguments import ParallelArguments
from hfscale.recipe.arguments import (
    DataArguments,
    RecipeTrainingArguments,
    ScalingArguments,
    SourceArguments,
    one_line,
)
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.rewards import RewardArguments

EMBEDDED: Mapping[str, Mapping[str, str]] = read_table("recipe/embedded.toml")
"""Task -> flags of the embedded default run, unless the user gives others."""

_OF_AXES = frozenset(axis.name for axis in fields(ParallelArguments))
_NAMES_A_RUN = ("model_name_or_path", "config_name", "dataset_name", "train_file", "data_mix")
_NAMES_TEXT = frozenset({"dataset_name", "train_file", "data_mix"})
_OF_A_DATASET = frozenset({"dataset_config_name", "dataset_train_split"})
_EXCLUDES = {"num_train_epochs": "max_steps"}

_TRL_CLASSES = {
    "sft": "SFTArguments",
    "dpo": "DPOArguments",
    "grpo": "GRPOArguments",
    "distillation": "DistillationArguments",
    "vision": "VisionArguments",
}
"""Task -> its training arguments in `hfscale.recipe.trl` or a module of its own, which need TRL."""
_MODULES = {"vision": "hfscale.recipe.vision"}
"""Task -> the module of its training arguments, if it is not `hfscale.recipe.trl`."""


def flag_groups(task: str = "text") -> tuple[type, ...]:
    """Return the dataclasses of the flags that the recipes of a task have.

    Args:
        task (`str`): `text`, or `sft`, `dpo`, `grpo`, `distillation` or `vision` for TRL's trainers.

    Raises:
        UsageError: the task is unknown.
        MissingDependencyError: the task needs TRL, which is not installed or too old.
    """
    if task == "text":
        return (ModelArguments, DataArguments, ScalingArguments, RecipeTrainingArguments)
    if task not in _TRL_CLASSES:
        raise UsageError(f"task is {task!r}: use one of text, {', '.join(_TRL_CLASSES)}")
    module = import_module(_MODULES.get(task, "hfscale.recipe.trl"))
    training = getattr(module, _TRL_CLASSES[task])
    groups = (ModelArguments, SourceArguments, ScalingArguments, training)
    return (*groups, RewardArguments) if task == "grpo" else groups


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the reading of a value that may be `none`, under the name that argparse has for the type in errors."""

    @wraps(read, updated=())
    def value_or_none(text: str) -> Any:
        return None if text == "none" else read(text)

    return value_or_none


class _Parser(HfArgumentParser):
    """Raises a UsageError where argparse would print its usage and exit."""

    def add_argument(self, *names: Any, or_none: bool = False, **kwargs: Any) -> Any:
        """Add a flag; with `or_none` it may have the value `none`, as an option that can be switched off."""
        if or_none:
            kwargs["type"] = _or_none(kwargs["type"])
        return super().add_argument(*names, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(re.sub(r"^argument (--\w+)\S*: ", r"\1: ", message))


def _parser(groups: Any) -> _Parser:  # transformers gives dataclasses a type of their own
    return _Parser(groups, allow_abbrev=False, add_help=False)


@speaking("recipe")
def parse_arguments(
    argv: Sequence[str] | None = None, *, task: str = "text", also: Sequence[type] = ()
) -> tuple[Any, ...]:
    """Read `--config FILE.yaml` and the command line, whose flags win. `--help` prints all flags and exits.

    Args:
        argv (`Sequence[str]`, *optional*): the flags. Default: those of this process.
        task (`str`): `text` for `Trainer` and `ParallelTrainer`; `sft`, `dpo`, `grpo`, `distillation` or `vision` for
            TRL's trainers.
        also (`Sequence[type]`): further dataclasses of flags, such as `hfscale.ParallelArguments` or one of yours.

    Returns:
        `tuple`: the flags of the model (`ModelArguments`), of the data (`DataArguments`; `SourceArguments` with TRL),
        of the callbacks (`ScalingArguments`) and of the training (a subclass of `TrainingArguments`; with TRL of its
        `SFTConfig`, `DPOConfig`, `GRPOConfig` or `DistillationConfig`). With `grpo` a `RewardArguments` follows. The
        last are one of each of `also`.

    Raises:
        ConfigFileError: the YAML file is missing, broken or has an unknown key.
        UsageError: a flag is unknown, a value has the wrong type or range, or two flags contradict each other.
        MissingDependencyError: a flag needs a package that is not installed.
    """
    groups = (*flag_groups(task), *also)
    rest, config = split_off_config(list(sys.argv[1:] if argv is None else argv))
    if "--help" in rest or "-h" in rest:
        if is_main_process():
            print(help_text(task=task, also=also))
        sys.exit(0)
    parser = _parser(groups)
    known = {flag.name for group in groups for flag in fields(group) if flag.init}
    from_file = to_argv(config, _kept(read_yaml_mapping(config, known), rest)) if config else []
    for flag in (token.partition("=")[0] for token in rest):
        name = flag[2:].replace("-", "_")
        if flag.startswith("--") and not {name, name.removeprefix("no_")} & known:
            if name in _OF_AXES:
                raise UsageError(
                    f"{flag} is a flag of recipes/sharded/train.py and recipes/tp_pp/train.py, and this recipe is "
                    "data parallel: run one of these, or leave it out"
                )
            fix = nearest(flag[2:], known, prefix="--") or "; --help lists all"
            raise UsageError(f"unknown flag {flag}{fix}")
    _check_none_empty([*from_file, *rest])
    tokens = _embedded_defaults([*from_file, *rest], task) + from_file + rest
    try:
        *parsed, left = parser.parse_args_into_dataclasses(
            args=tokens, return_remaining_strings=True
        )
    except HfScaleError:
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:  # raised by TrainingArguments
        raise UsageError(one_line(error)) from error
    if left:
        raise UsageError(
            f"'{left[0]}' is not a flag and belongs to none: flags begin with --, and most take one value"
        )
    _, data_args, _, training_args, *_ = parsed
    if data_args.streaming and training_args.max_steps < 0:
        steps = spelled("max_steps")
        raise UsageError(f"{spelled('streaming')} reads a text of unknown length: give {steps}")
    if data_args.streaming and "dataloader_num_workers" not in _given(tokens):
        # The positions of worker processes in a stream are unknown; a thread in this process reads ahead instead.
        training_args.dataloader_num_workers = 0
        training_args.dataloader_persistent_workers = False
        training_args.dataloader_prefetch_factor = None
    return tuple(parsed)


def read_flags(
    values: Mapping[str, Any], *, task: str = "text", also: Sequence[type] = ()
) -> Namespace:
    """Read the flags of a recipe for planning, with their types and defaults.

    The dataclasses are not made, since `TrainingArguments` would set up the device. Flags that none of them has are
    left out.

    Args:
        values (`Mapping[str, Any]`): the flags that are given.
        task (`str`): the task of the recipe, as in `parse_arguments`.
        also (`Sequence[type]`): further dataclasses of flags.

    Returns:
        `Namespace`: every flag with its value; those of the embedded default run where no model and no data are named.

    Raises:
        UsageError: a value has the wrong type.
    """
    parser = _parser((*flag_groups(task), *also))
    tokens = to_argv("the flags", values)
    return parser.parse_known_args([*_embedded_defaults(tokens, task), *tokens])[0]


def _check_none_empty(tokens: Sequence[str]) -> None:
    """Refuse an empty value, which a shell makes of a variable that is not set: it would count as not given.

    One that takes a value back, which the file or an earlier flag has given, is allowed.

    Raises:
        UsageError: there is one.
    """
    flag = "the first argument"
    given: set[str] = set()
    for token in tokens:
        value = token
        if token.startswith("--"):
            flag, is_assigned, value = token.partition("=")
            if not is_assigned:
                continue
        if value:
            given |= _given([flag])
        elif not _given([flag]) & given:
            raise UsageError(
                f"{flag} is empty: set the variable that it is made of, or leave it out"
            )


def _given(tokens: Sequence[str]) -> set[str]:
    """Return the names of the flags among some command-line tokens."""
    return {
        token.partition("=")[0][2:].replace("-", "_") for token in tokens if token.startswith("--")
    }


def _kept(from_file: Mapping[str, Any], rest: Sequence[str]) -> Mapping[str, Any]:
    """Return the flags of a YAML file without its training text, if the command line names another one, and without
    its evaluations, if the command line leaves no text for them."""
    from_file = _without_evaluations(from_file, rest)
    given = _given(rest) & _NAMES_TEXT
    if not given or given & set(from_file):
        return from_file
    return {
        name: value for name, value in from_file.items() if name not in _NAMES_TEXT | _OF_A_DATASET
    }


def _without_evaluations(from_file: Mapping[str, Any], rest: Sequence[str]) -> Mapping[str, Any]:
    """Return the flags of a YAML file without those of evaluations, if `--validation_split_percentage 0` is given."""
    words = re.split("[ =]", " ".join(rest).replace("-", "_"))
    if ("__validation_split_percentage", "0") not in pairwise(words):
        return from_file
    if "validation_file" in from_file or "validation_file" in _given(rest):
        return from_file
    left = dict(from_file)
    for name in ("eval_strategy", "eval_steps"):
        left.pop(name, None)
    return left


def _embedded_defaults(tokens: Sequence[str], task: str) -> list[str]:
    """Return the flags of the embedded default run, if neither a model nor a text is named."""
    given = _given(tokens)
    if given.intersection(_NAMES_A_RUN):
        return []
    excluded = {_EXCLUDES[name] for name in given if name in _EXCLUDES}
    defaults = {flag: value for flag, value in EMBEDDED[task].items() if flag not in excluded}
    return [token for flag, value in defaults.items() for token in (f"--{flag}", value)]


_HELP_WIDTH = 100
_HELP_INDENT = 6
_USAGE = """\
usage: accelerate launch --config_file ACCELERATE.yaml {script} [--config FILE.yaml] [--FLAG VALUE ...]

  --config FILE.yaml
      Read flags from a YAML file, one `flag: value` per line; the flags on the command line win over it.
  -h, --help
      Print this text and exit.

A flag may also be written with hyphens (--block-size) or with an equals sign (--block_size=256). A list takes
several values. Most true|false flags may be given without a value, which means true. Defaults are in brackets.

Without --model_name_or_path, --config_name, --dataset_name, --train_file and --data_mix the recipe trains a
small Llama on the source files of the Python standard library, with these defaults:
{embedded}
"""
_TITLES = {
    ModelArguments: "Model",
    SourceArguments: "Data",
    DataArguments: "Data",
    ScalingArguments: "Learning rate, checkpoints, health and metrics (hfscale)",
    ParallelArguments: "Parallel axes",
}


def help_text(*, task: str = "text", also: Sequence[type] = ()) -> str:
    """Return the text of a recipe's `--help`: hfscale's flags by group first, then those of the libraries.

    Args:
        task (`str`): the task of the recipe, as in `parse_arguments`.
        also (`Sequence[type]`): further dataclasses of flags.
    """
    model, data, scaling, training, *rewards = flag_groups(task)
    defaults = " ".join(f"--{flag} {value}" for flag, value in EMBEDDED[task].items())
    sections = [_USAGE.format(script=sys.argv[0], embedded=textwrap.fill(defaults, _HELP_WIDTH))]
    for group in (model, data, scaling, *rewards, *also):
        sections += _section(_TITLES.get(group, group.__name__), group, fields(group))
    # Transformers has over a hundred flags, so what a recipe adds and changes comes first.
    of_recipes = {
        name
        for base in training.__mro__
        if base.__module__.startswith("hfscale.")
        for name in vars(base).get("__annotations__", ())
    }
    of_transformers = {flag.name for flag in fields(TrainingArguments)}
    own = [flag for flag in fields(training) if flag.name in of_recipes]
    others = [flag for flag in fields(training) if flag.name not in of_recipes]
    of_library = [flag for flag in others if flag.name not in of_transformers]
    sections += _section("Training: flags and defaults of the recipes", training, own)
    if of_library:
        sections += _section(
            f"Training: flags of {training.__mro__[2].__name__}", training, of_library
        )
    inherited = [flag for flag in others if flag.name in of_transformers]
    sections += _section(
        "Training: all other flags of transformers' TrainingArguments", training, inherited
    )
    return "\n".join(sections)


def _section(title: str, group: type, flags: Iterable[Field[Any]]) -> list[str]:
    """Return the help of some flags of a dataclass, below a title."""
    types = get_type_hints(group)
    lines = [f"{title}:", ""]
    for flag in flags:
        if not flag.init:
            continue
        default = flag.default if flag.default_factory is MISSING else flag.default_factory()
        default = default.value if isinstance(default, Enum) else default
        values = default if isinstance(default, list | tuple) else (default,)
        shown = "" if default in (None, MISSING, "") else f" [{' '.join(map(plain_value, values))}]"
        text = " ".join(str(flag.metadata.get("help", "")).replace("%%", "%").split()) + shown
        indent = " " * _HELP_INDENT
        lines.append(f"  --{flag.name} {_value_name(types[flag.name], flag)}")
        lines += textwrap.wrap(text, _HELP_WIDTH, initial_indent=indent, subsequent_indent=indent)
    return [*lines, ""]


def _value_name(kind: Any, flag: Field[Any]) -> str:
    """Return what `--help` writes for the value of a flag of this type: its choices, or the kind of value."""
    kinds = [part for part in get_args(kind) or (kind,) if part is not type(None)]
    # transformers declares choices as enumerations, hfscale in the metadata of the field.
    if any(isinstance(part, type) and issubclass(part, Enum) for part in kinds):
        return "{" + ",".join(str(choice.value) for choice in kinds[0]) + "}"
    if flag.metadata.get("choices"):
        return "{" + ",".join(flag.metadata["choices"]) + "}"
    names = {bool: "true|false", int: "N", float: "X"}
    name = "VALUE"
    if len(kinds) == 1:
        name = names.get(kinds[0], name)
    if "list" in str(kind) and str not in kinds:
        return f"{name} ..."
    return name
