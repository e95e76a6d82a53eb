"""Reward functions for GRPO: loading those that a user names, and the one of the embedded default."""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hfscale.core.flags import nearest
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.recipe.arguments import errors_name_flag

RewardFunction = Callable[..., list[float]]
"""Called by TRL as `function(prompts=…, completions=…, **columns)` with lists; returns one number per completion."""


@dataclass(kw_only=True)
class RewardArguments:
    """Which functions reward the completions.

    Raises:
        UsageError: no function is named.
    """

    reward_functions: list[str] | None = field(
        default=None,
        metadata={
            "help": "Python functions as path.py:name or package.module:name; TRL calls them with lists of "
            "completions and of every column of the dataset, and adds up what they return."
        },
    )

    def __post_init__(self) -> None:
        if not self.reward_functions:
            named = spelled("reward_functions")
            raise UsageError(
                f"{named} is missing: name at least one Python function, such as rewards.py:is_correct"
            )

    def load_functions(self) -> list[RewardFunction]:
        """Import the reward functions. The code of the files that the user names runs in this process.

        Raises:
            UsageError: a file or module cannot be imported, or has no such function.
        """
        return [_load(name) for name in self.reward_functions or ()]


def _load(name: str) -> RewardFunction:
    given = spelled("reward_functions", name)
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name:
        raise UsageError(f"{given} is not of the form path.py:name or package.module:name")
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"{given}: {place} does not exist")
    with errors_name_flag("--reward_functions", name):
        module = (
            _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        named = [other for other, value in vars(module).items() if callable(value)]
        hint = nearest(function_name, named)
        raise UsageError(f"{given}: {place} has no function {function_name}{hint}")
    return function  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def similarity_to_answer(
    completions: Sequence[Any], answer: Sequence[str], **columns: Any
) -> list[float]:
    """Reward completions for characters in the order of the answer, by `difflib`'s ratio from 0 to 1.

    Args:
        completions (`list`): the completions, as texts or as lists with one message.
        answer (`list[str]`): the column `answer` of the dataset, one per completion.
        columns: the prompts and the other columns.
    """
    texts = [
        completion if isinstance(completion, str) else completion[0]["content"]
        for completion in completions
    ]
    pairs = zip(texts, answer, strict=True)
    return [
        difflib.SequenceMatcher(None, text, wanted, autojunk=False).ratio()
        for text, wanted in pairs
    ]
