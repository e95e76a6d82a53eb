"""Reading the recipes' flags from a YAML file and the command line, whose flags win."""

import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from transformers import HfArgumentParser

from hfscale.errors import HfScaleError, UsageError
from hfscale.recipe.arguments import DataArguments, ModelArguments, RecipeTrainingArguments, ScalingArguments, one_line
from hfscale.utils.config_file import nearest, read_yaml_mapping, split_off_config, to_argv


class _Parser(HfArgumentParser):
    """Raises a UsageError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(re.sub(r"^argument (--\w+)\S*: ", r"\1: ", message))


EMBEDDED_DEFAULTS = {
    "block_size": "256",
    "per_device_train_batch_size": "4",
    "learning_rate": "2e-3",
    "base_global_batch_size": "4",
    "lr_scheduler_type": "cosine",
    "warmup_steps": "10",
    "max_steps": "90",
    "logging_steps": "10",
    "save_steps": "45",
    "max_eval_samples": "64",
    "weight_decay": "0.1",
}
"""Flags of the embedded default run, for what the user leaves open: a minute on two CPU cores."""

_NAMES_A_RUN = ("model_name_or_path", "config_name", "dataset_name", "train_file")
_EXCLUDES = {"num_train_epochs": "max_steps"}


GROUPS = (ModelArguments, DataArguments, ScalingArguments, RecipeTrainingArguments)
"""The flags that every recipe has."""


def parse_arguments(argv: Sequence[str] | None = None, *, also: Sequence[type] = ()) -> tuple[Any, ...]:
    """Read `--config FILE.yaml` and the command line, whose flags win.

    Args:
        argv (`Sequence[str]`, *optional*): the flags; absent: those of this process.
        also (`Sequence[type]`): further dataclasses of flags.

    Returns:
        One instance of each of `GROUPS`, then one of each of `also`.

    Raises:
        ConfigFileError: the YAML file is missing, broken or has an unknown key.
        UsageError: an unknown flag, a value of the wrong type or range, flags that contradict each other.
    """
    groups = (*GROUPS, *also)
    parser = _Parser(groups, allow_abbrev=False)
    known = {flag.name for group in groups for flag in fields(group) if flag.init}
    rest, config = split_off_config(list(sys.argv[1:] if argv is None else argv))
    from_file = to_argv(config, read_yaml_mapping(config, known)) if config else []
    for flag in (token.partition("=")[0] for token in rest):
        name = flag[2:].replace("-", "_")
        if flag.startswith("--") and not {name, name.removeprefix("no_")} & {*known, "help"}:
            mend = nearest(flag[2:], known, prefix="--") or "; --help lists all"
            raise UsageError(f"unknown flag {flag}{mend}")
    tokens = _embedded_defaults([*from_file, *rest]) + from_file + rest
    try:
        *parsed, left = parser.parse_args_into_dataclasses(args=tokens, return_remaining_strings=True)
    except HfScaleError:
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:  # what TrainingArguments makes of the values
        raise UsageError(one_line(error)) from error
    if left:
        raise UsageError(f"'{left[0]}' is no flag, and belongs to none: flags begin with --, and most take one value")
    _, data, _, training, *_ = parsed
    if data.streaming and training.max_steps < 0:
        raise UsageError("--streaming reads a text whose length is not known: give --max_steps")
    if data.streaming and "dataloader_num_workers" not in _given(tokens):
        # Where processes are in a stream is not known; `PlacedStream`'s thread, which reads ahead without them, is.
        training.dataloader_num_workers, training.dataloader_persistent_workers = 0, False
        training.dataloader_prefetch_factor = None
    return tuple(parsed)


def _given(tokens: Sequence[str]) -> set[str]:
    return {token.partition("=")[0][2:].replace("-", "_") for token in tokens if token.startswith("--")}


def _embedded_defaults(tokens: Sequence[str]) -> list[str]:
    """The flags of the embedded default run, where neither a model nor a text is named."""
    given = _given(tokens)
    if given.intersection(_NAMES_A_RUN):
        return []
    excluded = {_EXCLUDES[name] for name in given if name in _EXCLUDES}
    defaults = {flag: value for flag, value in EMBEDDED_DEFAULTS.items() if flag not in excluded}
    return [token for flag, value in defaults.items() for token in (f"--{flag}", value)]
