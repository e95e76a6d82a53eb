"""Keeps the completions that a Trainer has generated for several steps in the checkpoints between these steps.

TRL's trainers that generate (GRPO, RLOO, SDFT and others) train on the completions of one generation in several steps
if `steps_per_generation` is above the accumulation steps, or `num_iterations` above 1. They count the micro-batches
from 0 in each launch, and checkpoints hold neither the count nor the completions. So a launch that resumes between two
generations would generate from other weights, and from then on in the middle of what the sampler gives as one batch of
prompts.

Here the checkpoint keeps, for each rank, the count and the completions. Where a launch cannot use them (another number
of processes, a checkpoint of plain Trainer), it counts from the right number, generates again from the prompts of the
interrupted generation, and says so.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import TrainingArguments

from hfscale.checkpoint.contents import outer_state_name
from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import micro_batches_of_pass

logger = get_logger(__name__)

NAME = "hfscale_generated"
"""The files of a rank are `hfscale_generated_RANK.json` and `hfscale_generated_outer_RANK.safetensors`."""

_BUFFER = "_buffered_inputs"
_COUNTERS = ("_step", "_buffer_step")
"""Attributes in which trainers of TRL count the micro-batches of a launch: GRPO and most others, and IW-OPD."""
_KNOWN = (torch.Tensor, str, int, float, bool, type(None))


class GeneratedBatches:
    """Reads and sets what a Trainer has generated and not trained on to the end.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer with a buffer of generated batches.
        counter (`str`): its attribute that counts micro-batches.
    """

    def __init__(self, adapter: TrainerAdapter, counter: str) -> None:
        self._adapter = adapter
        self._trainer = adapter.trainer
        self._counter = counter

    def _launch(self) -> dict[str, int]:
        """Return what must be equal in the launch that resumes, for the completions to be those of its ranks."""
        args = self._trainer.args
        return {
            "world_size": distributed.world_size(),
            "batch": args.per_device_train_batch_size,
            "period": micro_batches_per_generation(args),
        }

    def _unfinished(self) -> Any:
        """Return the generated batches if the next micro-batch is one of them, else None."""
        count = getattr(self._trainer, self._counter)
        is_used_up = count % micro_batches_per_generation(self._trainer.args) == 0
        return None if is_used_up else getattr(self._trainer, _BUFFER)

    # --- the checkpoint ---------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint of this step keeps, as JSON values; tensors are in `tensors` by their numbers."""
        batches = self._unfinished()
        problem = None if batches is None else why_not_kept(batches)
        return {
            "count": getattr(self._trainer, self._counter),
            "launch": self._launch(),
            "batches": None if batches is None or problem else describe(batches, []),
            "problem": problem,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the tensors of the batches, on the CPU."""
        batches = self._unfinished()
        if batches is None or why_not_kept(batches):
            return {}
        found: list[torch.Tensor] = []
        describe(batches, found)
        copies = (tensor.detach().to("cpu", copy=True).contiguous() for tensor in found)
        return {str(number): copy for number, copy in enumerate(copies)}

    # --- the resume -------------------------------------------------------------------------------------------------

    def read(self, checkpoint: Path) -> tuple[dict[str, Any] | None, str | None]:
        """Read what a checkpoint keeps of this rank.

        Args:
            checkpoint (`Path`): the folder of the checkpoint.

        Returns:
            `tuple`: `saved` with the batches themselves, and why they cannot be used, as a clause; one is None.

        Raises:
            CheckpointError: the files are broken.
        """
        path = checkpoint / f"{NAME}_{distributed.rank()}.json"
        if not path.is_file():
            return None, "the checkpoint does not hold them"
        try:
            saved: dict[str, Any] = read_json(path)
            if saved["launch"] != self._launch():
                return None, "they are those of another number of processes, batch or generation"
            if saved["problem"] is not None:
                return None, str(saved["problem"])
            saved["count"] = int(saved["count"])
            if saved["batches"] is not None:
                tensors = safetensors.torch.load_file(checkpoint / outer_state_name(NAME))
                saved["batches"] = restore(saved["batches"], tensors, self._trainer.args.device)
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{path} or its tensors cannot be read ({type(error).__name__}): use another checkpoint"
            ) from None
        return saved, None

    def resume(self, saved: dict[str, Any]) -> None:
        """Continue with what `read` returned.

        Args:
            saved (`dict[str, Any]`): the count and the batches.
        """
        self._set(saved["count"], saved["batches"])

    def generate_again(self, reason: str) -> None:
        """Continue without the batches: those that the generation still had to give are generated again.

        Args:
            reason (`str`): why they cannot be used, as a clause.
        """
        trainer = self._trainer
        count = micro_batches_of_pass(trainer, trainer.state.global_step)
        period = micro_batches_per_generation(trainer.args)
        self._set(count, None)
        if count % period:
            logger.warning(
                "the checkpoint was saved after %d of the %d micro-batches of one generation, and its completions "
                "cannot be used (%s): others are generated from the same prompts",
                count % period,
                period,
                reason,
            )

    def start_generation(self) -> None:
        """Generate for the next micro-batch, which is the first one of its batch of prompts."""
        self._set(0, None)

    def _set(self, count: int, batches: Any) -> None:
        self._adapter.set_attributes({self._counter: count, _BUFFER: batches})


def keep_generated_batches(adapter: TrainerAdapter) -> None:
    """Keep what a Trainer generates in the checkpoints of its training, and resume with it.

    Call it when a training begins. A Trainer that keeps no generated batches is left alone.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.

    Raises:
        CheckpointError: the files of a rank are broken; raised on every rank.
    """
    trainer = adapter.trainer
    if _BUFFER not in vars(trainer):
        return
    counter = next((name for name in _COUNTERS if name in vars(trainer)), None)
    if counter is None:
        return
    generated = GeneratedBatches(adapter, counter)
    adapter.announced.json[NAME] = generated.saved
    adapter.announced.tensors[NAME] = generated.tensors
    checkpoint = adapter.resumes_from
    if checkpoint is None:
        return
    if trainer.args.ignore_data_skip:
        generated.start_generation()
        return
    with TRAINING.agreed("start: generated batches"):  # the files of one rank may be broken
        saved, problem = generated.read(Path(checkpoint))
    # All ranks generate together
    problem = next(filter(None, TRAINING.gather("start: generated batches", problem)), None)
    if saved is not None and problem is None:
        generated.resume(saved)
    else:
        generated.generate_again(str(problem))


def micro_batches_per_generation(args: TrainingArguments) -> int:
    """Return for how many micro-batches of a rank a trainer of TRL generates at once, counting those it repeats.

    Args:
        args (`TrainingArguments`): those of the trainer.
    """
    batches = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    return int(batches) * int(getattr(args, "num_iterations", None) or 1)


def why_not_kept(value: Any) -> str | None:
    """Return why a value cannot be kept in a checkpoint, as a clause; None if it can.

    Args:
        value (`Any`): tensors and plain values in lists, tuples and dictionaries.
    """
    kinds = (type(part).__name__ for part in _leaves(value) if not isinstance(part, _KNOWN))
    unknown = next(kinds, None)
    return None if unknown is None else f"no checkpoint keeps a {unknown}"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def describe(value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Describe a value as JSON, with the number of each tensor in its place.

    Args:
        value (`Any`): a value that can be kept.
        tensors (`list[torch.Tensor]`): gets its tensors, in the order of their numbers.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": str(len(tensors) - 1), "on_cpu": value.device.type == "cpu"}
    if isinstance(value, Mapping):
        return {"items": [[key, describe(part, tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [describe(part, tensors) for part in value]}
    return {"value": value}


def restore(described: dict[str, Any], tensors: Mapping[str, torch.Tensor], device: Any) -> Any:
    """Return the value that was described.

    Args:
        described (`dict[str, Any]`): what `describe` returned.
        tensors (`Mapping[str, torch.Tensor]`): its tensors by number.
        device (`torch.device`): gets those that were not on the CPU.
    """
    if "tensor" in described:
        tensor = tensors[described["tensor"]]
        return tensor if described["on_cpu"] else tensor.to(device)
    if "items" in described:
        return {key: restore(part, tensors, device) for key, part in described["items"]}
    for kind in (list, tuple):
        if kind.__name__ in described:
            return kind(restore(part, tensors, device) for part in described[kind.__name__])
    return described["value"]
