"""Measures exposed communication: the part of a step in which ranks communicate and compute nothing.

Under DDP, DDP's own counters measure it; only the steps that they sample cost anything. For FSDP, ZeRO, tensor
parallelism, and 1-bit Adam and LAMB, which communicate in the optimizer step, two micro-batches of one step in about a
thousand are profiled on a few ranks (`hfscale.metrics.communication_profile`).

On every fast rank, waiting for a slow rank looks like communication. Of several ranks, the smallest number is
therefore the time of the network, and the rest is skew.
"""

import math

from accelerate.utils import DynamoBackend
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerState

from hfscale.core.logging import get_logger
from hfscale.metrics.communication_profile import Exposed, SampledSteps
from hfscale.metrics.meters.meter import Meter, Window, or_nan
from hfscale.metrics.profiler import ProfilerCallback
from hfscale.trainer.collector import Columns
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

DDP_SAMPLE_EVERY_STEPS = 20
"""In each sampled step, DDP waits for the GPU events of the previous step."""
_MODES_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile. torch works around crashes of CUPTI with CUDA graphs (`start_trace` in
torch/profiler/profiler.py); a training is not to depend on that for a metric."""


class CommunicationMeter(Meter):
    """Measures `scaling/comm_fraction`, by DDP's counters or by profiled steps on the first and the last rank."""

    def __init__(self) -> None:
        self.comm_over_backward: float | None = None
        """Communication time over backward time, where DDP measures it."""
        self.shares: list[float] = []
        """Share of its time that each rank communicates or waits; empty unless every rank has measured it."""
        self._ddp: DdpCounters | None = None
        self._sampled: SampledSteps | None = None

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        """With several ranks, use DDP's counters, or else profile steps on the first and the last rank."""
        self._trainer = trainer
        self._ddp = None
        self._sampled = None
        if trainer.args.world_size > 1:
            if Strategy.of(trainer).equal_gradients:
                ddp = Strategy.of(trainer).ddp()
                self._ddp = None if ddp is None else DdpCounters(ddp)
            if self._ddp is None and trainer.args.process_index in (0, trainer.args.world_size - 1):
                self._sampled = self._sampled_steps()
        self.watches_steps = self._sampled is not None

    def _sampled_steps(self) -> SampledSteps | None:
        """Return what profiles steps, or None where a profile could make the run fail."""
        compiled = self._trainer.accelerator.state.dynamo_plugin
        if compiled.backend != DynamoBackend.NO and compiled.mode in _MODES_WITH_CUDA_GRAPHS:
            logger.info(
                "scaling/comm_fraction is not logged: the mode %s of torch.compile uses CUDA graphs, which are not "
                "profiled",
                compiled.mode,
            )
            return None
        return SampledSteps(self._trainer.args.device)

    def step_begin(self, state: TrainerState) -> None:
        assert self._sampled is not None
        callbacks = self._trainer.callback_handler.callbacks
        is_traced = any(
            isinstance(c, ProfilerCallback) and state.global_step + 1 in c.steps for c in callbacks
        )
        if not is_traced:
            self._sampled.step_begin(self._trainer.current_gradient_accumulation_steps)

    def substep_end(self, state: TrainerState) -> None:
        assert self._sampled is not None
        self._sampled.substep_end()

    def step_end(self, state: TrainerState) -> None:
        assert self._sampled is not None
        self._sampled.step_end()

    def end(self) -> None:
        """Discard a profiled step that has begun."""
        if self._sampled is not None:
            self._sampled.stop()

    def numbers(self, state: TrainerState) -> dict[str, float]:
        """Return the exposed communication in seconds, the length of the measured step in seconds, and a ratio.

        The ratio is communication time over the time of the backward that can hide it.
        """
        exposed: Exposed | None = None
        if self._ddp is not None:
            exposed = self._ddp.read()
        elif self._sampled is not None:
            exposed = self._sampled.last
        return {
            "exposed_comm_s": or_nan(exposed.seconds if exposed is not None else None),
            "exposed_comm_step_s": or_nan(exposed.step_s if exposed is not None else None),
            "comm_over_backward": or_nan(
                exposed.comm_over_backward if exposed is not None else None
            ),
        }

    def keys(self, columns: Columns, window: Window, state: TrainerState) -> dict[str, float]:
        """Return the smallest share of the ranks: the other ranks also wait for slower ones in their collectives."""
        mean_step_s = window.seconds / window.steps
        shares = [
            min(exposed_s / (mean_step_s if math.isnan(step_s) else step_s), 1.0)
            for exposed_s, step_s in zip(
                columns["exposed_comm_s"], columns["exposed_comm_step_s"], strict=True
            )
            if not math.isnan(exposed_s)
        ]
        self.shares = shares if len(shares) == len(columns["exposed_comm_s"]) else []
        known = [ratio for ratio in columns["comm_over_backward"] if not math.isnan(ratio)]
        self.comm_over_backward = min(known, default=None)
        return {"scaling/comm_fraction": min(shares)} if shares else {}


class DdpCounters:
    """Reads DDP's own measurements of its communication.

    DDP has no public methods for it: the two with a leading underscore are called here and nowhere else.
    `tests/metrics/test_communication.py` fails if they change.

    Args:
        ddp (`DistributedDataParallel`): the wrapper; it is set to measure one step in `DDP_SAMPLE_EVERY_STEPS`.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        ddp._set_ddp_runtime_logging_sample_rate(DDP_SAMPLE_EVERY_STEPS)

    def read(self) -> Exposed | None:
        """Return the communication of the last sampled step, or None if there was none yet."""
        data = self._ddp._get_ddp_logging_data()
        comm_s = data.get("backward_comm_time", 0) * 1e-9
        overlap_s = data.get("backward_compute_comm_overlap_time", 0) * 1e-9
        backward_s = data.get("backward_compute_time", 0) * 1e-9
        if comm_s <= 0 or backward_s <= 0:
            return None
        return Exposed(seconds=max(comm_s - overlap_s, 0.0), comm_over_backward=comm_s / backward_s)
