"""Derives one bottleneck from the measured numbers of a run, and says what to change first.

A bottleneck is reported if the scaling efficiency is below 70%, or if a share of the step is above its own limit. Of
all causes that the numbers show, the largest is named. Looking at the network first is the wrong order: a slow data
loader, one slow rank or too little work per GPU look the same from outside (torchtitan's FSDP keeps 97 to 98% from 8
to 128 H100s, arXiv 2410.06511, so losing a third needs another reason).
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfscale.core.findings import UNEVEN_BATCHES_FIX, Finding
from hfscale.core.logging import get_logger

logger = get_logger(__name__)

EFFICIENCY_FLOOR = 0.70
DATA_WAIT_LIMIT = 0.10
COMM_LIMIT = 0.15
SKEW_LIMIT = 1.10
BUBBLE_LIMIT = 0.15
RECOMPUTE_LIMIT = 0.28
"""Full recomputation executes 8/6 of the FLOPs of the layers, which is a quarter of the step. Only a larger share is
reported without a low efficiency."""
EXPLAINS = 0.5
"""The part of the missing efficiency that a share below its limit must account for, to be named as the bottleneck."""
TRIAGE_LOGS = 3
"""Number of logs whose mean is judged, because one slow log is not enough for a diagnosis."""

TRIAGE_AFTER_S = 60.0
"""Seconds of training before a bottleneck is reported, because a run that ends sooner has nothing to gain from it."""

TRIAGE_KEYS = (
    "scaling/efficiency",
    "scaling/data_wait_fraction",
    "scaling/straggler_skew",
    "scaling/straggler_ratio",
    "scaling/comm_fraction",
    "scaling/bubble_fraction",
    "scaling/mfu",
    "scaling/hfu",
    "gpu/throttled",
)
"""The metric keys that the triage reads."""
NEWEST_KEYS = ("scaling/straggler_ratio",)
"""Those of which the newest value holds, since it is a judgement about the steps before; of the others a mean or a
median over several logs is judged."""
UNEVEN_BATCHES = "uneven batches"
"""The cause where another rank is the slowest one at each step."""


@dataclass(frozen=True, kw_only=True)
class TriageInput:
    """Holds the numbers that were measured in a part of a run; None if a number is unknown."""

    efficiency: float | None = None
    """Scaling efficiency against a baseline."""
    data_wait_fraction: float | None = None
    """Share of the time spent waiting for batches."""
    straggler_skew: float | None = None
    """Compute time of the slowest rank in a step over that of the median rank."""
    straggler_ratio: float | None = None
    """Compute time of the slowest straggler over that of the median rank; 1 where no rank is one, None where this was
    not judged."""
    comm_fraction: float | None = None
    """Share of the time spent in communication that no computation hides."""
    comm_over_backward: float | None = None
    """Communication time over the backward time that can hide it; above 1 no overlap can hide all of it."""
    bubble_fraction: float | None = None
    """Share of the time in which pipeline stages idle."""
    mfu: float | None = None
    """Model FLOPs utilization."""
    hfu: float | None = None
    """Hardware FLOPs utilization, with recomputation."""
    throttled: float | None = None
    """Share of the GPUs that heat or power limits slow down."""
    tokens_per_gpu: int | None = None
    """Tokens per GPU and optimizer step."""

    @classmethod
    def from_keys(
        cls,
        keys: Mapping[str, float],
        *,
        comm_over_backward: float | None = None,
        tokens_per_gpu: int | None = None,
    ) -> "TriageInput":
        """Read the numbers from metric keys; a missing key leaves its number unknown.

        Args:
            keys (`Mapping[str, float]`): metric keys such as `scaling/efficiency`; of these, `TRIAGE_KEYS` are read.
            comm_over_backward (`float`, *optional*): communication time over backward time, which no key holds.
            tokens_per_gpu (`int`, *optional*): tokens per GPU and optimizer step, which no key holds.
        """
        numbers = {key.partition("/")[2]: keys.get(key) for key in TRIAGE_KEYS}
        return cls(**numbers, comm_over_backward=comm_over_backward, tokens_per_gpu=tokens_per_gpu)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    finding: Finding
    over_limit: bool


def triage(measured: TriageInput) -> Finding | None:
    """Return the bottleneck to look at first.

    Args:
        measured (`TriageInput`): what was measured.

    Returns:
        `Finding | None`: the bottleneck, or None if nothing calls for a change. Its `check` is `data wait`,
        `straggler`, `uneven batches`, `tokens per GPU too small`, `exposed communication`, `bubble`, `recompute`,
        `thermal` or `not measured`.
    """
    is_low = measured.efficiency is not None and measured.efficiency < EFFICIENCY_FLOOR
    candidates = [found for found in (check(measured) for check in _CHECKS) if found is not None]
    over = [candidate.finding for candidate in candidates if candidate.over_limit]
    if over:
        # A cause with a known share goes before one without.
        return max(over, key=lambda finding: finding.share or 0.0)
    if is_low:
        return _largest_or_unknown(
            [candidate.finding for candidate in candidates], measured.efficiency or 0.0
        )
    return None


def _largest_or_unknown(candidates: Sequence[Finding], efficiency: float) -> Finding:
    known = [candidate for candidate in candidates if candidate.share is not None]
    largest = max(known, key=lambda candidate: candidate.share or 0.0, default=None)
    if largest is not None and (largest.share or 0.0) >= EXPLAINS * (1 - efficiency):
        return largest
    largest_text = (
        f"; the largest, {largest.check}, is {largest.share:.0%}" if largest is not None else ""
    )
    return Finding(
        check="not measured",
        share=None,
        problem=f"efficiency {efficiency:.0%}, and no measured share explains it{largest_text}",
        fix="trace a few steps (torch.profiler; --profile_steps of a recipe), and look for gaps and for kernels that "
        "take longer than on 1 GPU",
    )


def _data_wait(m: TriageInput) -> _Candidate | None:
    if m.data_wait_fraction is None:
        return None
    finding = Finding(
        check="data wait",
        share=m.data_wait_fraction,
        problem=f"the rank with the slowest data loader waits for batches {m.data_wait_fraction:.0%} of the time",
        fix="raise dataloader_num_workers or dataloader_prefetch_factor, or tokenize the data in advance",
    )
    return _Candidate(finding=finding, over_limit=m.data_wait_fraction > DATA_WAIT_LIMIT)


def _slowest_rank(m: TriageInput) -> _Candidate | None:
    """Find time that the other ranks wait for the slowest one, by the judgement whether it is always the same rank."""
    if m.straggler_ratio is not None and m.straggler_ratio > 1:
        finding = _waiting(
            "straggler",
            m.straggler_ratio,
            problem=f"one rank computes {m.straggler_ratio:.2f} times as long as the median one",
            fix="the log names the rank: check its clocks and other work on its host; replace the host if it stays "
            "slow",
        )
        return _Candidate(finding=finding, over_limit=m.straggler_ratio > SKEW_LIMIT)
    if m.straggler_skew is None or m.straggler_skew <= 1:
        return None
    problem = f"the slowest rank computes {m.straggler_skew:.2f} times as long as the median one"
    if m.straggler_ratio is None:
        finding = _waiting(
            "straggler",
            m.straggler_skew,
            problem=problem,
            fix="if the log names a rank, check its clocks and other work on its host; if it names none, batches are "
            f"uneven: {UNEVEN_BATCHES_FIX}",
        )
    else:
        finding = _waiting(
            UNEVEN_BATCHES,
            m.straggler_skew,
            problem=f"{problem}, and no rank is slower than its own spread explains",
            fix=UNEVEN_BATCHES_FIX,
        )
    return _Candidate(finding=finding, over_limit=m.straggler_skew > SKEW_LIMIT)


def slowest_rank(keys: Mapping[str, float]) -> Finding | None:
    """Return what makes the ranks wait for the slowest one; None if nothing does, or nothing was measured.

    Args:
        keys (`Mapping[str, float]`): metric keys, of which `TRIAGE_KEYS` are read.

    Returns:
        `Finding | None`: its `check` is `straggler` or `uneven batches`, and its share is known.
    """
    measured = TriageInput.from_keys(keys)
    candidate = _slowest_rank(measured)
    if candidate is None:
        return None
    return candidate.finding


def _waiting(check: str, ratio: float, *, problem: str, fix: str) -> Finding:
    """Return the finding that every other rank idles until the slowest one has finished."""
    return Finding(check=check, share=1 - 1 / ratio, problem=problem, fix=fix)


def _communication(m: TriageInput) -> _Candidate | None:
    if m.comm_fraction is None:
        return None
    numbers = f"{m.comm_fraction:.0%} of the step is communication that no computation hides"
    over_limit = m.comm_fraction > COMM_LIMIT
    if (
        m.comm_over_backward is not None
        and m.comm_over_backward > 1
        and m.tokens_per_gpu is not None
    ):
        # Communication does not grow with the tokens, but the backward does: this many would hide it.
        enough = m.tokens_per_gpu * m.comm_over_backward
        finding = Finding(
            check="tokens per GPU too small",
            share=m.comm_fraction,
            problem=f"{numbers}: with {m.tokens_per_gpu:,} tokens per GPU and step it takes "
            f"{m.comm_over_backward:.1f} times as long as the backward",
            fix=f"give each GPU about {enough:,.0f} tokens per step (per_device_train_batch_size, "
            "gradient_accumulation_steps), or use fewer GPUs",
        )
    else:
        finding = Finding(
            check="exposed communication",
            share=m.comm_fraction,
            problem=numbers,
            fix="compare the links with their expected speed (hfscale check); then try ddp_bucket_cap_mb, "
            "gradients in bf16 (--gradient_compression bf16 of a recipe, bf16_compress_hook of torch), or sharding "
            "inside the node only (fsdp2_hsdp)",
        )
    return _Candidate(finding=finding, over_limit=over_limit)


def _bubble(m: TriageInput) -> _Candidate | None:
    if m.bubble_fraction is None:
        return None
    finding = Finding(
        check="bubble",
        share=m.bubble_fraction,
        problem=f"pipeline stages idle {m.bubble_fraction:.0%} of the step",
        fix="use more micro-batches (gradient_accumulation_steps), an interleaved schedule, or fewer stages",
    )
    return _Candidate(finding=finding, over_limit=m.bubble_fraction > BUBBLE_LIMIT)


def _recompute(m: TriageInput) -> _Candidate | None:
    if not m.mfu or not m.hfu or m.hfu <= m.mfu:
        return None
    share = 1 - m.mfu / m.hfu
    finding = Finding(
        check="recompute",
        share=share,
        problem=f"{share:.0%} of the executed FLOPs compute activations a second time",
        fix="recompute less (--recompute selective of a recipe), or nothing if the memory peak leaves room",
    )
    return _Candidate(finding=finding, over_limit=share > RECOMPUTE_LIMIT)


def _thermal(m: TriageInput) -> _Candidate | None:
    if not m.throttled:
        return None
    finding = Finding(
        check="thermal",
        share=None,
        problem=f"heat or power limits lower the clock of {m.throttled:.0%} of the GPUs",
        fix="the log names the rank: check the cooling and the power limit of its host, or replace the host",
    )
    return _Candidate(finding=finding, over_limit=True)


_CHECKS = (_data_wait, _slowest_rank, _communication, _bubble, _recompute, _thermal)


class TriageWatch:
    """Runs the triage at each log, and reports a bottleneck once it has lasted for `TRIAGE_LOGS` logs.

    The same bottleneck is reported again only after another one has been.

    Args:
        after_s (`float`): seconds of training before the first report.
    """

    def __init__(self, after_s: float = TRIAGE_AFTER_S) -> None:
        self._after_s = after_s
        self.begin()

    def begin(self) -> None:
        """Start a new training. Its first log, which includes start-up and warm-up, is not judged."""
        self._recent: deque[Mapping[str, float]] = deque(maxlen=TRIAGE_LOGS)
        self._is_first = True
        self._began_at = time.monotonic()
        self._reported: str | None = None

    def check(
        self,
        logs: Mapping[str, float],
        *,
        comm_over_backward: float | None,
        tokens_per_gpu: int | None,
    ) -> Finding | None:
        """Take one log into account, and log a new bottleneck.

        Args:
            logs (`Mapping[str, float]`): the metric keys of the log.
            comm_over_backward (`float`, *optional*): communication time over backward time.
            tokens_per_gpu (`int`, *optional*): tokens per GPU and optimizer step.

        Returns:
            `Finding | None`: the bottleneck, if it is new.
        """
        if self._is_first:
            self._is_first = False
            return None
        self._recent.append({key: logs[key] for key in TRIAGE_KEYS if key in logs})
        if len(self._recent) < TRIAGE_LOGS or time.monotonic() - self._began_at < self._after_s:
            return None
        in_all = set.intersection(*(set(keys) for keys in self._recent))
        mean = {key: sum(keys[key] for keys in self._recent) / TRIAGE_LOGS for key in in_all}
        for key in NEWEST_KEYS:
            if key in in_all:
                mean[key] = self._recent[-1][key]
        measured = TriageInput.from_keys(
            mean, comm_over_backward=comm_over_backward, tokens_per_gpu=tokens_per_gpu
        )
        finding = triage(measured)
        if finding is None or finding.check == self._reported:
            return None
        self._reported = finding.check
        logger.info("bottleneck: %s: %s", finding.check, finding)
        return finding
