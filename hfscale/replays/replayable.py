"""Says in which trainings a step can be computed twice: `check_can_replay`.

A replay calls `training_step` of the Trainer once more. What that moves is put back (`hfscale.replays.kept_state`),
but not what lies outside of the process or is left out there: generated completions, an environment, the place in a
data set. So a class may override `compute_loss` and its parts, and not what prepares the data of a step.
"""

from collections.abc import Iterator
from typing import Any

from transformers import Trainer

from hfscale.errors import UsageError
from hfscale.trainer.state import requested_optimizer
from hfscale.trainer.strategies import Strategy

_METHODS = ("training_step", "_prepare_inputs")
"""Methods of a Trainer by which it may draw data, generate, or keep its place."""

_CHECKED = {
    ("transformers.trainer", "Trainer"),
    # These offload activations around the step, and do nothing else
    ("trl.trainer.dpo_trainer", "DPOTrainer"),
    ("trl.trainer.kto_trainer", "KTOTrainer"),
    ("trl.trainer.reward_trainer", "RewardTrainer"),
    ("trl.trainer.sft_trainer", "SFTTrainer"),
}
"""Classes whose own `_METHODS` keep nothing from one micro-batch to the next: module and name."""

_OURS = "hfscale."


def check_can_replay(trainer: Trainer, asked: str) -> None:
    """Check that a step of a training can be computed twice.

    Args:
        trainer (`Trainer`): prepared for training.
        asked (`str`): the argument that asks for it, for the message.

    Raises:
        UsageError: the strategy, the arguments or the class of the Trainer do not allow it.
    """
    if trainer.args.torch_compile:
        raise UsageError(f"{asked}: a compiled model has no hooks; leave it out")
    problem = Strategy.of(trainer).why_effects_remain()
    if problem is not None:
        raise UsageError(f"{asked}: {problem}")
    check_effects(trainer, asked, "replayed")


def check_effects(trainer: Trainer, asked: str, verb: str) -> None:
    """Check that nothing but the known effects of a step happens until the optimizer steps.

    Args:
        trainer (`Trainer`): prepared for training.
        asked (`str`): the argument that asks for it, for the message.
        verb (`str`): what is to be done with a step, such as `replayed`.

    Raises:
        UsageError: weights are updated in the backward pass, or methods of the Trainer's class may keep a state.
    """
    optimizer = requested_optimizer(trainer.args)
    if "lomo" in optimizer or optimizer.endswith("layerwise"):
        raise UsageError(
            f"{asked}: optim={optimizer} updates weights in the backward pass, so that a step cannot be {verb}; "
            "leave it out, or use another optimizer"
        )
    for name in _unknown_overrides(trainer):
        raise UsageError(
            f"{asked}: {name} may keep state from one step to the next, so that a step cannot be {verb}; leave it out"
        )


def _unknown_overrides(trainer: Trainer) -> Iterator[str]:
    """Yield the class and the name of each method that was not checked."""
    for method in _METHODS:
        if _is_replaced(trainer, method):
            yield f"{type(trainer).__name__}.{method}, which was replaced on the instance,"
    for kind in type(trainer).__mro__:
        is_checked = (kind.__module__, kind.__name__) in _CHECKED
        if is_checked or kind.__module__.startswith(_OURS):
            continue
        for method in _METHODS:
            if method in vars(kind):
                yield f"{kind.__name__}.{method}"


def _is_replaced(trainer: Trainer, method: str) -> bool:
    """Return whether a program has set a method on the instance, below the wrappers that hfscale sets."""
    function: Any = vars(trainer).get(method)
    while function is not None and getattr(function, "__self__", None) is not trainer:
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if not home.startswith(_OURS):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
