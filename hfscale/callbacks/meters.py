"""What `ScalingMetricsCallback` measures beside throughput: one meter per idea.

A meter sees each step begin and end, gives a few numbers per rank at each log, and makes keys of all ranks' numbers.
The numbers of all meters travel in one exchange. A number that is not known is NaN on the way and has no key.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState

from hfscale.errors import UnsupportedModelError
from hfscale.integrations.strategy import running_strategy
from hfscale.metrics.baseline import Match, Workload, find, read_baselines, user_file
from hfscale.metrics.communication import DdpCounters, Exposed, SampledSteps, find_ddp
from hfscale.metrics.efficiency import (
    FlopsModel,
    describe_workload,
    device_name,
    device_peak_tflops,
    training_dtype,
)
from hfscale.metrics.goodput import GoodputTracker
from hfscale.metrics.spending import Rate, rate
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

NAN = math.nan


@dataclass(frozen=True, kw_only=True)
class Window:
    """The stretch between two logs, all ranks together."""

    steps: int
    """Optimizer steps in it."""
    seconds: float
    """Of training, on the rank that took longest."""
    tokens: float
    """Trained on."""
    tokens_seen: int
    """Since step 0."""
    tokens_per_s_per_gpu: float
    """Tokens / seconds / processes."""
    sequence_length: int
    """Tokens per sequence."""


class Meter:
    """Measures nothing; the base of those that do."""

    width = 0
    """Numbers per rank."""
    watches_steps = False
    """Whether `step_begin` and `step_end` are to be called; known after `begin`."""

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """When training begins, on every rank."""

    def step_begin(self, state: TrainerState) -> None:
        """Before the first forward of an optimizer step."""

    def step_end(self, state: TrainerState) -> None:
        """After its update."""

    def row(self, state: TrainerState) -> list[float]:
        """This rank's numbers of the window that ends: `width` of them."""
        return []

    def keys(self, rows: Sequence[Sequence[float]], window: Window, state: TrainerState) -> dict[str, float]:
        """Metric keys from the numbers of every rank, in rank order."""
        return {}

    def end(self) -> None:
        """When training ends."""


class UtilisationMeter(Meter):
    """`scaling/mfu` and `scaling/hfu`; says once why they will be absent."""

    def __init__(self, peak_tflops: float | None) -> None:
        self._peak_tflops = peak_tflops
        self._flops: FlopsModel | None = None

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        args, model = trainer.args, trainer.model
        self._flops = None
        dtype = training_dtype(model, args)
        peak = self._peak_tflops or device_peak_tflops(args.device, dtype)
        if peak is None:
            device = args.device.type
            logger.info("scaling/mfu is left out: the %s peak of this %s is unknown (give peak_tflops)", dtype, device)
            return
        try:
            self._flops = FlopsModel.of(model, args, sizes=getattr(trainer, "whole_sizes", None))
            self._peak_flops, self._length = peak * 1e12, 0
        except UnsupportedModelError as error:
            logger.info("scaling/mfu is left out: %s", error)

    def keys(self, rows: Sequence[Sequence[float]], window: Window, state: TrainerState) -> dict[str, float]:
        if self._flops is None:
            return {}
        if window.sequence_length != self._length:  # the shape is asked layer by layer
            self._length = window.sequence_length
            self._peak_s = (
                self._flops.model_flops_per_token(self._length) / self._peak_flops,
                self._flops.hardware_flops_per_token(self._length) / self._peak_flops,
            )
        mfu, hfu = (window.tokens_per_s_per_gpu * peak_s for peak_s in self._peak_s)
        return {"scaling/mfu": mfu, "scaling/hfu": hfu}


class CommunicationMeter(Meter):
    """`scaling/comm_fraction`: by DDP's counters, or by profiled steps on the first and the last rank."""

    width = 2

    def __init__(self) -> None:
        self.hides: float | None = None
        """Communication time / backward time, where DDP tells it."""
        self.shares: list[float] = []
        """Of each rank's time, exchanging or waiting for others; empty where not every rank knows."""
        self._ddp: DdpCounters | None = None
        self._sampled: SampledSteps | None = None

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        self._ddp, self._sampled, self.watches_steps = None, None, False
        if trainer.args.world_size == 1:
            return
        ddp = find_ddp(trainer.model_wrapped)
        if ddp is not None:
            self._ddp = DdpCounters(ddp)
        elif trainer.args.process_index in (0, trainer.args.world_size - 1):
            self._sampled = SampledSteps()
        self.watches_steps = self._sampled is not None

    def step_begin(self, state: TrainerState) -> None:
        assert self._sampled is not None
        self._sampled.step_begin()

    def step_end(self, state: TrainerState) -> None:
        assert self._sampled is not None
        self._sampled.step_end()

    def end(self) -> None:
        if self._sampled is not None:
            self._sampled.stop()

    def row(self, state: TrainerState) -> list[float]:
        exposed: Exposed | None = None
        if self._ddp is not None:
            exposed = self._ddp.read()
        elif self._sampled is not None:
            exposed = self._sampled.last
        if exposed is None:
            return [NAN, NAN]
        # A profiled step has its own length; DDP's seconds are shares of a usual step, which the window will tell.
        share = -exposed.seconds if exposed.step_s is None else exposed.seconds / exposed.step_s
        return [share, NAN if exposed.hides is None else exposed.hides]

    def keys(self, rows: Sequence[Sequence[float]], window: Window, state: TrainerState) -> dict[str, float]:
        step_s = window.seconds / window.steps
        shares = [min(-row[0] / step_s if row[0] <= 0 else row[0], 1.0) for row in rows if not math.isnan(row[0])]
        self.shares = shares if len(shares) == len(rows) else []
        self.hides = min((row[1] for row in rows if not math.isnan(row[1])), default=None)
        return {"scaling/comm_fraction": min(shares)} if shares else {}


class EfficiencyMeter(Meter):
    """`scaling/efficiency`: tokens/s/GPU over those of a recorded baseline of the same work."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._match: Match | None = None
        self.workload: Workload | None = None
        """What the run does; None before the first log."""

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        self._trainer, self.workload, self._match = trainer, None, None
        path = self._path or user_file()
        is_given = self._path is not None or path.is_file()
        # The main process logs it; another machine need not have the file.
        self._baselines = read_baselines(path) if is_given and state.is_world_process_zero else None

    def keys(self, rows: Sequence[Sequence[float]], window: Window, state: TrainerState) -> dict[str, float]:
        if self.workload is None:
            self._look_up(window)
        if self._match is None:
            return {}
        return {"scaling/efficiency": self._match.efficiency(window.tokens_per_s_per_gpu)}

    def _look_up(self, window: Window) -> None:
        args = self._trainer.args
        self.workload = describe_workload(
            self._trainer.model,
            args,
            sequence_length=window.sequence_length,
            tokens_per_gpu=round(window.tokens / window.steps / args.world_size),
        )
        if self._baselines is None:
            return
        found = find(self._baselines, self.workload, args.world_size)
        if isinstance(found, Match):
            self._match = found
            logger.info("scaling/efficiency is against %s", found.describe())
        else:
            logger.info("scaling/efficiency is left out: %s", found)

    def facts(self) -> dict[str, Any]:
        """For the timeline."""
        args = self._trainer.args
        facts: dict[str, Any] = {
            **(asdict(self.workload) if self.workload is not None else {}),
            "world_size": args.world_size,
            "strategy": running_strategy(self._trainer),
            "global_batch_size": self._trainer.get_total_train_batch_size(args),
        }
        if self._match is not None:
            facts["baseline"] = self._match.describe()
        return facts


class SpendingMeter(Meter):
    """`scaling/goodput`, `scaling/usd` and `scaling/usd_per_million_tokens`, by the ledger of the run."""

    def __init__(self, usd_per_gpu_hour: float | None) -> None:
        self._usd_per_gpu_hour = usd_per_gpu_hour
        self.goodput_tracker: GoodputTracker | None = None
        """Opened by the callback, which knows how the run was launched."""
        self.rate: Rate | None = None
        """What an hour costs; None where nobody knows."""

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        self.rate = rate(device_name(trainer.args.device), self._usd_per_gpu_hour)
        if self.rate is not None and self._usd_per_gpu_hour is None:
            logger.info(
                "scaling/usd is at %.4g USD per GPU and hour: %s (give usd_per_gpu_hour for your own price)",
                self.rate.usd_per_gpu_hour,
                self.rate.source,
            )

    def keys(self, rows: Sequence[Sequence[float]], window: Window, state: TrainerState) -> dict[str, float]:
        keys: dict[str, float] = {}
        if self.goodput_tracker is None:
            return keys
        goodput = self.goodput_tracker.goodput()
        if goodput is not None:
            keys["scaling/goodput"] = goodput
        if self.rate is not None:
            keys["scaling/usd"] = self.goodput_tracker.gpu_hours() * self.rate.usd_per_gpu_hour
            if window.tokens_seen:
                keys["scaling/usd_per_million_tokens"] = keys["scaling/usd"] / window.tokens_seen * 1e6
        return keys
