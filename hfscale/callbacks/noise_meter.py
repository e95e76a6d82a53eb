"""`scaling/noise_scale`, from the steps that are logged."""

import math
from collections.abc import Sequence

from transformers import Trainer, TrainerState

from hfscale.callbacks.meters import NAN, Meter, Window
from hfscale.integrations.strategy import running_strategy
from hfscale.integrations.trainer import global_batch_size, saved_state
from hfscale.metrics.noise_scale import LeafProbe, NoiseScale, ReduceScatterProbe, Sample, advice
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

MIN_STEPS_BETWEEN = 50
"""A look costs about 3% of a step of two small micro-batches; and what is looked for moves over thousands of steps."""
_LEAF = ("single", "ddp")  # checked against a known answer; under DeepSpeed nobody has


class NoiseScaleMeter(Meter):
    """Opens a probe for each step that will be logged; says why where the strategy has none."""

    width = 1

    def __init__(self) -> None:
        self.min_steps_between = MIN_STEPS_BETWEEN
        """Steps between two that are looked at, however often is logged."""
        self._probe: LeafProbe | ReduceScatterProbe | None = None
        self.advice: str | None = None
        """What the noise scale says about the batch, once there is one."""

    def begin(self, trainer: Trainer, state: TrainerState) -> None:
        self._trainer, self.advice, self._seen_step = trainer, None, -self.min_steps_between
        self._scale = NoiseScale(saved_state(state, "noise_scale"))
        self._batch = global_batch_size(trainer)
        reason = self._make_probe(trainer)
        self.watches_steps = self._probe is not None
        if self._probe is None:
            logger.info("scaling/noise_scale is left out: %s", reason)

    def _make_probe(self, trainer: Trainer) -> str:
        args, strategy = trainer.args, running_strategy(trainer)
        self._probe = None
        if args.fp16:
            return "the loss is scaled under fp16, and the gradients with it"
        if trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
            return "ranks that share a sequence or a matrix see parts of gradients"
        if self._batch <= args.per_device_train_batch_size:
            return "it takes two micro-batches per step, from two ranks or by gradient accumulation"
        if strategy in _LEAF:
            self._probe = LeafProbe(trainer.model)
        elif strategy == "fsdp2":
            try:
                self._probe = ReduceScatterProbe(trainer.model_wrapped)
            except ValueError as error:
                return f"FSDP2 takes no reduce-scatter of ours: {error}"
        return f"no route is known under {strategy}"

    def step_begin(self, state: TrainerState) -> None:
        step = state.global_step + 1
        is_logged = bool(state.logging_steps) and step % state.logging_steps == 0
        assert self._probe is not None
        if is_logged and step - self._seen_step >= self.min_steps_between:
            self._probe.open()
            self._seen_step = step

    def step_end(self, state: TrainerState) -> None:
        assert self._probe is not None
        if state.global_step == self._seen_step:
            self._probe.close()

    def row(self, state: TrainerState) -> list[float]:
        """|G_s|^2 of this rank: n x the sum of squares, as each of a step's n exchanges carries 1/n of the mean."""
        self._parts = self._trainer.current_gradient_accumulation_steps
        seen = self._probe.read(self._parts) if self._probe is not None else None
        # A log by epoch is of another step than the one looked at, and has that step's gradient norm.
        if seen is None or state.global_step != self._seen_step:
            return [NAN]
        total, self._parts = seen
        return [self._parts * total]

    def keys(self, rows: Sequence[Sequence[float]], window: Window, state: TrainerState) -> dict[str, float]:
        norm = state.log_history[-1].get("grad_norm") if state.log_history else None
        squares = [row[0] for row in rows]
        if norm is not None and all(map(math.isfinite, [*squares, norm])):
            passes = self._trainer.current_gradient_accumulation_steps
            per_rank = self._trainer.args.per_device_train_batch_size * passes
            self._scale.add(
                Sample(
                    small_square=sum(squares) / len(squares),
                    big_square=float(norm) ** 2,
                    small_batch=per_rank / self._parts,
                    big_batch=per_rank * len(squares),
                )
            )
        value = self._scale.value()
        if value is None:
            return {}
        self.advice = advice(value, self._batch)
        return {"scaling/noise_scale": value}
