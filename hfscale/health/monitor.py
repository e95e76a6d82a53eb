"""Measures the health of this rank, and compares all ranks at each log."""

import math
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hfscale.core import distributed
from hfscale.core.best_effort import best_effort
from hfscale.core.collectives import TRAINING
from hfscale.core.findings import Finding
from hfscale.core.phases import DATA_WAIT, step_seconds
from hfscale.health.gpu import GpuWatch
from hfscale.health.local_time import KEPT_STEPS, LocalTimer
from hfscale.health.loss import checksum, compare_learning_rates, compare_replicas
from hfscale.health.stragglers import DataWaitJudge, Numbers, StragglerJudge
from hfscale.trainer.collector import Arrays

GPU_EVERY_S = 10.0
READING_GPU = "reading the GPU"
"""Name of this work in warnings."""
OWN_S = [f"own_s_{number}" for number in range(KEPT_STEPS)]
"""Names of the exchanged seconds of own work, of the last steps, the newest last."""
OWN_SIZES = [f"own_size_{number}" for number in range(KEPT_STEPS)]
"""Names of the exchanged sizes of the batches of these steps."""


def gather_hosts() -> list[str]:
    """Return the host name of each rank, in rank order; every rank must call it."""
    return TRAINING.gather("start: hosts", socket.gethostname())


class GpuThread(threading.Thread):
    """Reads the GPU every ten seconds, in the background.

    Args:
        watch (`GpuWatch`): reads the GPU.
        every_s (`float`): seconds between two readings.
    """

    def __init__(self, watch: GpuWatch, every_s: float = GPU_EVERY_S) -> None:
        super().__init__(name="hfscale-gpu-watch", daemon=True)
        self.watch = watch
        self._every_s = every_s
        self._stop_now = threading.Event()
        self._found: list[Finding] = []

    def run(self) -> None:
        """Take a reading every `every_s` seconds until `stop` is called."""
        while not self._stop_now.wait(self._every_s):
            with best_effort(READING_GPU, "this rank's GPU", errors=(Exception,)):
                self._found += self.watch.look()

    def take(self) -> list[Finding]:
        """Return the findings since the last call."""
        found, self._found = self._found, []
        return found

    def stop(self) -> None:
        """End the thread and wait up to five seconds for it."""
        self._stop_now.set()
        if self.is_alive():
            self.join(5.0)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Holds what a comparison of all ranks has found at a log."""

    keys: Mapping[str, float]
    """The metric keys."""
    findings: Sequence[Finding]
    """New findings about the ranks, and about this rank's own GPU."""
    withdrawn: Sequence[Finding]
    """Earlier findings that do not hold any more."""
    loss: float | None
    """The first loss that is not finite, else that of rank 0; None: Trainer has logged no loss."""
    grad_norm: float | None
    """The same of the gradient norm."""


class Monitor:
    """Measures this rank for the exchange of a log, and compares all ranks on rank 0.

    Args:
        hosts (`Sequence[str]`): the host of each rank.
        timer (`LocalTimer`, *optional*): times this rank's own work; None: stragglers are not looked for.
        gpu (`GpuThread`, *optional*): reads this rank's GPU.
        replicas (`Sequence[torch.nn.Parameter]`): weights that are the same on every rank; empty: there are none.
        checksum_every (`int`): least number of steps between two checksums of these weights.
        have_equal_gradients (`bool`): whether the gradients are the same on every rank too.
    """

    def __init__(
        self,
        *,
        hosts: Sequence[str],
        timer: LocalTimer | None = None,
        gpu: GpuThread | None = None,
        replicas: Sequence[torch.nn.Parameter] = (),
        checksum_every: int = 100,
        have_equal_gradients: bool = True,
    ) -> None:
        self._hosts = hosts
        self._timer = timer
        self._gpu = gpu
        self._replicas = list(replicas)
        self._checksum_every = checksum_every
        self._have_equal_gradients = have_equal_gradients
        self._last_checksum_step: int | None = None
        self._straggler_judge = StragglerJudge(hosts)
        self._data_wait_judge = DataWaitJudge(hosts)
        self.own_s: Sequence[float] = ()
        """On rank 0, the seconds of each rank's own work in a step, as of the last log; empty where nothing was
        timed."""
        self.temperatures_c: Sequence[float] = ()
        """On rank 0, the temperature of each rank's GPU as of the last log, °C; empty unless every rank has one."""

    def step_ended(self) -> None:
        """Report that the step has ended."""
        if self._timer is not None:
            self._timer.span.next_step()

    def numbers(
        self,
        step: int,
        loss: float | None,
        grad_norm: float | None,
        seconds: Mapping[str, float],
        learning_rate: float | None = None,
    ) -> dict[str, float]:
        """Return what this rank contributes to the exchange of a log.

        Args:
            step (`int`): the step of this log.
            loss (`float`, *optional*): the loss that Trainer logs on this rank; None if it logs none.
            grad_norm (`float`, *optional*): the gradient norm on this rank; None if there is none.
            seconds (`Mapping[str, float]`): seconds of each phase since the previous log.
            learning_rate (`float`, *optional*): the learning rate on this rank; None if Trainer logs none.

        Returns:
            `dict[str, float]`: the numbers by name, the same names on every rank and at every log.
        """
        return {
            "data_wait_s": seconds.get(DATA_WAIT, 0.0),
            "step_s": step_seconds(seconds),
            "has_loss": float(loss is not None),
            "loss": 0.0 if loss is None else loss,
            "has_grad_norm": float(grad_norm is not None),
            "grad_norm": math.nan if grad_norm is None else grad_norm,
            "learning_rate": math.nan if learning_rate is None else learning_rate,
            "checksum": self._checksum(step),
            **self._gpu_numbers(),
            **self._timed_steps(),
        }

    def _compare_replicas(self, step: int, columns: Arrays) -> list[Finding]:
        """Compare what is equal on all replicas. Other learning rates explain other weights, so they come first."""
        found = compare_learning_rates(columns["learning_rate"], step)
        if found:
            return found
        norms = columns["grad_norm"]
        if not self._have_equal_gradients:
            norms = np.full(len(self._hosts), math.nan)
        return compare_replicas(columns["checksum"], norms, self._hosts, step)

    def judge(self, step: int, columns: Arrays) -> dict[str, Any]:
        """Compare all ranks, on rank 0 only.

        Args:
            step (`int`): the step of this log.
            columns (`Mapping[str, ndarray]`): the numbers of every rank, by name.

        Returns:
            `dict[str, Any]`: the fields of `Comparison`, as JSON can represent them.
        """
        judgement = self._straggler_judge.add(
            self._by_rank(columns, OWN_S), self._by_rank(columns, OWN_SIZES)
        )
        self.own_s = judgement.own_s
        temperatures = columns["temperature_c"]
        self.temperatures_c = temperatures.tolist() if np.isfinite(temperatures).all() else ()
        found = [
            *judgement.findings,
            *self._data_wait_judge.add(columns["data_wait_s"], columns["step_s"]),
        ]
        if self._replicas:
            found += self._compare_replicas(step, columns)
        keys = {}
        if judgement.skew is not None:
            keys["scaling/straggler_skew"] = judgement.skew
        if judgement.slow_ratio is not None:
            keys["scaling/straggler_ratio"] = judgement.slow_ratio
        keys |= _gpu_keys(columns["temperature_c"], columns["power_w"], columns["throttled"])
        return {
            "keys": keys,
            "findings": [finding.to_dict() for finding in found],
            "withdrawn": [finding.to_dict() for finding in judgement.withdrawn],
            "loss": _worst(columns, "loss"),
            "grad_norm": _worst(columns, "grad_norm"),
        }

    def comparison(self, judgement: Mapping[str, Any]) -> Comparison:
        """Return what rank 0 has judged, with the findings of this rank's own GPU.

        Args:
            judgement (`Mapping[str, Any]`): what `judge` has returned on rank 0.
        """
        found = [Finding.from_dict(fields) for fields in judgement["findings"]]
        if self._gpu is not None:
            rank = distributed.rank()
            found += [
                replace(finding, ranks=(rank,), host=self._hosts[rank])
                for finding in self._gpu.take()
            ]
        return Comparison(
            keys=judgement["keys"],
            findings=found,
            withdrawn=[Finding.from_dict(fields) for fields in judgement["withdrawn"]],
            loss=judgement["loss"],
            grad_norm=judgement["grad_norm"],
        )

    def stop(self) -> None:
        """Remove the timer's hooks and end the GPU thread."""
        if self._timer is not None:
            self._timer.detach()
        if self._gpu is not None:
            self._gpu.stop()

    def _checksum(self, step: int) -> float:
        """Return the checksum of the replicas where one is due, else NaN; it is due at the same logs on all ranks."""
        due = (
            self._last_checksum_step is None
            or step - self._last_checksum_step >= self._checksum_every
        )
        if not self._replicas or not due:
            return math.nan
        self._last_checksum_step = step
        return checksum(self._replicas, step)

    def _timed_steps(self) -> dict[str, float]:
        """Return times and sizes of the last steps, padded with NaN; empty if nothing is timed on any rank."""
        if self._timer is None:
            return {}
        times, sizes = self._timer.span.read_with_sizes()
        padding = [math.nan] * (KEPT_STEPS - len(times))
        numbers = dict(zip(OWN_S, padding + times, strict=True))
        numbers |= zip(OWN_SIZES, padding + sizes, strict=True)
        return numbers

    def _by_rank(self, columns: Arrays, names: Sequence[str]) -> Numbers:
        """Return exchanged numbers as (ranks, names); without columns where nothing was timed."""
        known = [columns[name] for name in names if name in columns]
        if not known:
            return np.empty((len(self._hosts), 0))
        return np.stack(known, axis=1)

    def _gpu_numbers(self) -> dict[str, float]:
        """Return the last reading of this rank's GPU; NaN where there is none."""
        if self._gpu is None:
            return dict.fromkeys(("temperature_c", "power_w", "throttled"), math.nan)
        now = self._gpu.watch.last
        return {
            "temperature_c": math.nan if now.temperature_c is None else now.temperature_c,
            "power_w": math.nan if now.power_w is None else now.power_w,
            "throttled": float(now.throttled is not None),
        }


def _worst(columns: Arrays, name: str) -> float | None:
    """Return the first value that is not finite, else the first; None if no rank has a value."""
    values = columns[name][columns[f"has_{name}"] > 0]
    bad = values[~np.isfinite(values)]
    return next(map(float, [*bad[:1], *values[:1]]), None)


def _gpu_keys(temperatures: Numbers, powers: Numbers, throttled: Numbers) -> dict[str, float]:
    """Return the highest temperature, the mean power and the share that is throttled, of the GPUs that report it."""

    def known(values: Numbers) -> Numbers:
        return values[np.isfinite(values)]

    keys = {}
    if len(known(temperatures)):
        keys["gpu/temperature_c_max"] = float(known(temperatures).max())
    if len(known(powers)):
        keys["gpu/power_w"] = float(known(powers).mean())
    if len(known(throttled)):
        keys["gpu/throttled"] = float(known(throttled).mean())
    return keys
