"""What a run does beside its steps: which layouts run with it, what is written for the recipe, and what it costs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfscale.core.spelling import spelled
from hfscale.errors import ParameterError, UsageError
from hfscale.facts import support
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import catalogue
from hfscale.planner.job import Job, strategy_of
from hfscale.planner.launchable import describe
from hfscale.planner.network import datasheet_network_gb_s
from hfscale.planner.options import PlanOptions

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
"""Files that a folder with a trained model contains in addition to its config.json."""
STORED_BYTES = 2
"""Bytes of a parameter in the files of a model: most are stored in bf16."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """How long the nodes read the weights of a model at the start, at least."""

    bytes: float
    """Bytes of the weights."""
    read_s: float | None
    """Seconds without `load_once`; None where a node reads a part that was not computed."""
    read_once_s: float
    """Seconds with it."""

    def to_dict(self) -> dict[str, float | None]:
        """Return `start` in the JSON of `hfscale plan --json`, as a dictionary."""
        return {
            "weights_bytes": self.bytes,
            "read_s": self.read_s,
            "read_once_s": self.read_once_s,
        }


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What the options of a plan ask for beside its steps."""

    base_width: int | None
    """The width at which the learning rate was tuned."""
    skip_bad_batches: int | None
    """How many bad batches the run may leave out."""
    gc_every_steps: int | None
    """Steps between agreed collections of garbage."""
    load_once: str | None
    """Folder of each node for the weights."""
    storage_gb_s: float | None
    """Rate of the shared file system, GB/s, for all nodes together; None: not known."""
    reads_weights: bool
    """Whether the model has weights that are read, and is not trained from scratch."""
    grows_batch: bool
    """Whether the global batch grows."""

    @property
    def flags(self) -> dict[str, Any]:
        """Return the flags for the recipe."""
        values = {
            "base_width": self.base_width,
            "skip_bad_batches": self.skip_bad_batches,
            "gc_every_steps": self.gc_every_steps,
            "load_once": self.load_once,
        }
        return {name: value for name, value in values.items() if value is not None}

    def why_not(self, job: Job) -> str | None:
        """Explain why a job does not run with it.

        Args:
            job (`Job`): the run.
        """
        asked = replace(
            describe(job),
            base_width=self.base_width,
            skip_bad_batches=self.skip_bad_batches,
            batch_schedule=self.grows_batch,
        )
        return support.why_not(asked, "base_width", "skip_bad_batches")

    def start(self, job: Job) -> Start | None:
        """Return how long the nodes read the weights, at least; None where that is not known or nothing is read.

        Every node reads all weights, also those of which its ranks keep parts (huggingface/transformers#48239); under
        FSDP2 rank 0 alone does, and with `ParallelTrainer` a rank reads its parts. No node reads or receives faster
        than its network.

        Args:
            job (`Job`): the run.
        """
        if self.storage_gb_s is None or not self.reads_weights:
            return None
        size = float(STORED_BYTES * job.shape.total_parameters)
        nodes = -(-job.layout.world_size // job.gpus_per_node)
        strategy = strategy_of(job)
        readers = 1 if strategy == "fsdp2" else nodes
        per_gpu = job.network_gb_s or datasheet_network_gb_s(job.gpu, job.gpus_per_node)
        of_node_s = size / (per_gpu * job.gpus_per_node * 1e9)
        storage_s = size / (self.storage_gb_s * 1e9)
        read_s = None if strategy == "parallel" else max(readers * storage_s, of_node_s)
        return Start(
            bytes=size,
            read_s=read_s,
            read_once_s=max(storage_s, of_node_s),
        )

    @property
    def assumptions(self) -> list[str]:
        """Return what the step time leaves out, one line each."""
        found = []
        if self.base_width is not None:
            given = spelled("base_width", self.base_width)
            found.append(
                f"{given}: initial values and learning rates change, and neither memory nor the step's time"
            )
        if self.skip_bad_batches is not None:
            given = spelled("skip_bad_batches", self.skip_bad_batches)
            found.append(
                f"{given}: each step waits once for the GPU, which the step's time does not include (not measured on "
                "GPUs; docs/bad_batches.md)"
            )
        if self.gc_every_steps is not None:
            given = spelled("gc_every_steps", self.gc_every_steps)
            found.append(
                f"{given}: the step's time includes no garbage collection, with or without it"
            )
        return found


def extras_of(model: str | ModelShape, shape: ModelShape, options: PlanOptions) -> Extras:
    """Return what the options of a plan ask for beside its steps.

    Args:
        model (`str` or `ModelShape`): the model as it was given.
        shape (`ModelShape`): its shape.
        options (`PlanOptions`): the options of the plan.

    Raises:
        UsageError: an option does not go with the model, the task or the framework.
    """
    found = Extras(
        base_width=options.base_width,
        skip_bad_batches=options.skip_bad_batches,
        gc_every_steps=options.gc_every_steps,
        load_once=options.load_once,
        storage_gb_s=options.storage_gb_s,
        reads_weights=not (isinstance(model, str) and trains_from_scratch(model)),
        grows_batch=options.batch_schedule is not None,
    )
    if options.stack != "hf" and found.flags:
        name, value = next(iter(found.flags.items()))
        other = spelled("stack", options.stack)
        raise UsageError(f"{spelled(name, value)} is hfscale's, and {other} is not: leave it out")
    if found.base_width is not None:
        _check_width(found, shape, options)
    return found


def _check_width(found: Extras, shape: ModelShape, options: PlanOptions) -> None:
    assert found.base_width is not None
    given = spelled("base_width", found.base_width)
    if options.task != "text":
        task = spelled("task", options.task)
        raise UsageError(f"{given} is for models that are trained from scratch, not for {task}")
    if found.reads_weights:
        raise UsageError(
            f"{given} is for models that are trained from scratch: give a folder with a config.json and no weights"
        )
    if found.base_width > shape.hidden:
        rule = f"it must be at most the hidden size of the model, {shape.hidden}"
        raise ParameterError("base_width", found.base_width, rule)


def trains_from_scratch(model: str) -> bool:
    """Return whether a model is a config alone: a `config.json`, or its folder without weights.

    Args:
        model (`str`): the model as it was given.
    """
    path = Path(model)
    folder = path.parent if path.is_file() else path
    is_built_in = model.casefold() in catalogue() and not path.exists()
    if is_built_in or not folder.is_dir():
        return False
    return not any(True for kind in WEIGHTS for _ in folder.glob(kind))
