"""What ranks tell each other about their health at each log: one small vector, and what it says."""

import math
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from hfscale.health.gpu import GpuWatch
from hfscale.health.local_time import KEPT_STEPS, LocalTimer
from hfscale.health.loss import checksum, compare_replicas
from hfscale.health.stragglers import DataWaitJudge, StragglerJudge
from hfscale.metrics.clocks import PhaseClock
from hfscale.utils import distributed
from hfscale.utils.findings import Finding

GPU_EVERY_S = 10.0
_HOST_BYTES = 64


def gather_hosts() -> list[str]:
    """The host name of each rank, in rank order; every rank must call it."""
    name = socket.gethostname().encode()[:_HOST_BYTES]
    rows = distributed.gather_rows([float(byte) for byte in name.ljust(_HOST_BYTES, b"\0")])
    return [bytes(int(value) for value in row).rstrip(b"\0").decode(errors="replace") for row in rows]


class GpuThread(threading.Thread):
    """Looks at the GPU every ten seconds, beside the training.

    Args:
        watch (`GpuWatch`): what looks.
    """

    def __init__(self, watch: GpuWatch, every_s: float = GPU_EVERY_S) -> None:
        super().__init__(name="hfscale-gpu-watch", daemon=True)
        self.watch, self._every_s = watch, every_s
        self._stop_now = threading.Event()
        self._found: list[Finding] = []

    def run(self) -> None:
        while not self._stop_now.wait(self._every_s):
            self._found += self.watch.look()

    def take(self) -> list[Finding]:
        """What was found since the last call."""
        found, self._found = self._found, []
        return found

    def stop(self) -> None:
        """The training is over."""
        self._stop_now.set()
        if self.is_alive():
            self.join(5.0)


class Monitor:
    """Measures this rank, and at each log compares all.

    Args:
        hosts (`Sequence[str]`): the host of each rank.
        timer (`LocalTimer`, *optional*): this rank's own work; None: stragglers are not looked for.
        gpu (`GpuThread`, *optional*): this rank's GPU.
        replicas (`Sequence[torch.nn.Parameter]`): weights that are the same on every rank; empty: none are.
        checksum_every (`int`): least steps between two checksums of them.
    """

    def __init__(
        self,
        *,
        hosts: Sequence[str],
        timer: LocalTimer | None = None,
        gpu: GpuThread | None = None,
        replicas: Sequence[torch.nn.Parameter] = (),
        checksum_every: int = 100,
    ) -> None:
        self._hosts, self._timer, self._gpu = hosts, timer, gpu
        self._replicas, self._checksum_every = list(replicas), checksum_every
        self._summed_at: int | None = None
        self._judge, self._waits = StragglerJudge(hosts), DataWaitJudge(hosts)
        self._clock = PhaseClock()
        self.own_s: Sequence[float] = ()
        """Seconds of each rank's own work in a step, as the last exchange told; empty where nothing was timed."""

    def batch_came(self) -> None:
        """This rank has waited for a batch until now."""
        self._clock.end("data")

    def step_began(self) -> None:
        """Every rank has its batches."""
        self._clock.end("step")

    def step_ended(self) -> None:
        """The step is done."""
        self._clock.end("step")
        if self._timer is not None:
            self._timer.span.next_step()

    def aside(self) -> None:
        """What was between steps now, a log, an evaluation or a save, is no wait for data."""
        self._clock.end("aside")

    def exchange(self, step: int, grad_norm: float | None) -> tuple[dict[str, float], list[Finding]]:
        """The keys of this log, and what is new and wrong; every rank must call it at the same step."""
        self._clock.end("aside")
        seconds = self._clock.take()
        times = self._timed_steps() if self._timer is not None else []
        row = [
            seconds.get("data", 0.0),
            seconds.get("data", 0.0) + seconds.get("step", 0.0),
            math.nan if grad_norm is None else grad_norm,
            self._checksum(step),
            *self._gpu_row(),
            *times,
        ]
        rows = distributed.gather_rows(row)
        waits, windows, norms, sums, heats, powers, throttled, *steps = zip(*rows, strict=True)
        judgement = self._judge.add([[step[rank] for step in steps] for rank in range(len(rows))])
        self.own_s = judgement.own_s
        found = [*judgement.findings, *self._waits.add(waits, windows)]
        if self._replicas:
            found += compare_replicas(sums, norms, self._hosts, step)
        if self._gpu is not None:
            found += [self._mine(finding) for finding in self._gpu.take()]
        keys = {} if judgement.skew is None else {"scaling/straggler_skew": judgement.skew}
        return keys | _gpu_keys(heats, powers, throttled), found

    def stop(self) -> None:
        """The training is over."""
        if self._timer is not None:
            self._timer.detach()
        if self._gpu is not None:
            self._gpu.stop()

    def _checksum(self, step: int) -> float:
        """NaN at logs that make none; all ranks make theirs at the same ones."""
        due = self._summed_at is None or step - self._summed_at >= self._checksum_every
        if not self._replicas or not due:
            return math.nan
        self._summed_at = step
        return checksum(self._replicas, step)

    def _timed_steps(self) -> list[float]:
        """Of as many steps on every rank."""
        assert self._timer is not None
        times = self._timer.span.read()
        return [math.nan] * (KEPT_STEPS - len(times)) + times

    def _gpu_row(self) -> list[float]:
        if self._gpu is None:
            return [math.nan] * 3
        now = self._gpu.watch.last
        values = (now.temperature_c, now.power_w, float(now.throttled is not None))
        return [math.nan if value is None else float(value) for value in values]

    def _mine(self, finding: Finding) -> Finding:
        rank = distributed.rank()
        return replace(finding, ranks=(rank,), host=self._hosts[rank])


def _gpu_keys(heats: Sequence[float], powers: Sequence[float], throttled: Sequence[float]) -> dict[str, float]:
    """Over the GPUs that tell: the hottest, the mean power of one, the share that is throttled."""
    known = {
        name: [value for value in values if math.isfinite(value)]
        for name, values in (("heat", heats), ("power", powers), ("throttled", throttled))
    }
    keys = {}
    if known["heat"]:
        keys["gpu/temperature_c_max"] = max(known["heat"])
    if known["power"]:
        keys["gpu/power_w"] = sum(known["power"]) / len(known["power"])
    if known["throttled"]:
        keys["gpu/throttled"] = sum(known["throttled"]) / len(known["throttled"])
    return keys
