"""The triage: from what was measured to one named cause, its numbers and the mend.

A run is looked at when its scaling efficiency is below 70%, or a share of its step is over the share's own limit. Of
all causes that can be told from the numbers the largest is named. "Look at the network first" is the wrong order: a
data loader, one slow rank or too little work per GPU look the same from outside (torchtitan's FSDP keeps 97 to 98%
from 8 to 128 H100s, arXiv 2410.06511, so a loss of a third needs a reason).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfscale.utils.findings import Finding

EFFICIENCY_FLOOR = 0.70
DATA_WAIT_LIMIT = 0.10
COMM_LIMIT = 0.15
SKEW_LIMIT = 1.10
BUBBLE_LIMIT = 0.15
RECOMPUTE_LIMIT = 0.28
"""Full recomputation executes 8/6 of the layers' FLOPs: a quarter of the step. It is named by itself only beyond."""
EXPLAINS = 0.5
"""Part of what the efficiency lacks that a share below its limit must account for, to be called the cause."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a stretch of a run; None where it is not."""

    efficiency: float | None = None
    """Against a baseline."""
    data_wait_fraction: float | None = None
    """Of the time, waiting for batches."""
    straggler_skew: float | None = None
    """Slowest rank's own compute time / median rank's."""
    comm_fraction: float | None = None
    """Of the time, exchanging with nothing else going on."""
    hides: float | None = None
    """Communication time / backward time it could hide behind; above 1 no overlap can hide it."""
    bubble_fraction: float | None = None
    """Of the time, pipeline stages idle."""
    mfu: float | None = None
    """Model FLOPs utilisation."""
    hfu: float | None = None
    """The same with recomputation."""
    throttled: float | None = None
    """Share of the GPUs that run below their clock for heat or power."""
    tokens_per_gpu: int | None = None
    """Per optimizer step."""

    @classmethod
    def of(
        cls, keys: Mapping[str, float], *, hides: float | None = None, tokens_per_gpu: int | None = None
    ) -> "Measured":
        """From metric keys, as they are logged."""
        return cls(
            efficiency=keys.get("scaling/efficiency"),
            data_wait_fraction=keys.get("scaling/data_wait_fraction"),
            straggler_skew=keys.get("scaling/straggler_skew"),
            comm_fraction=keys.get("scaling/comm_fraction"),
            hides=hides,
            bubble_fraction=keys.get("scaling/bubble_fraction"),
            mfu=keys.get("scaling/mfu"),
            hfu=keys.get("scaling/hfu"),
            throttled=keys.get("gpu/throttled"),
            tokens_per_gpu=tokens_per_gpu,
        )


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    finding: Finding
    over_limit: bool


def triage(measured: Measured) -> Finding | None:
    """The one cause to look at first, or None where nothing calls for it."""
    is_low = measured.efficiency is not None and measured.efficiency < EFFICIENCY_FLOOR
    candidates = [found for found in (look(measured) for look in _LOOKS) if found is not None]
    over = [candidate for candidate in candidates if candidate.over_limit]
    if not over and not is_low:
        return None
    if not over:
        return _largest_or_unknown(candidates, measured.efficiency or 0.0)
    # A cause whose share is known goes before one that is only known to be there.
    return max(over, key=lambda candidate: candidate.finding.share or 0.0).finding


def _largest_or_unknown(candidates: Sequence[_Candidate], efficiency: float) -> Finding:
    known = [candidate.finding for candidate in candidates if candidate.finding.share is not None]
    largest = max(known, key=lambda finding: finding.share or 0.0, default=None)
    if largest is not None and (largest.share or 0.0) >= EXPLAINS * (1 - efficiency):
        return largest
    beside = f"; the largest, {largest.check}, is {largest.share:.0%}" if largest is not None else ""
    return Finding(
        check="not measured",
        share=None,
        problem=f"efficiency {efficiency:.0%}, and no measured share explains it{beside}",
        fix="trace a few steps with --profile_steps and look for gaps, or for kernels that take longer than alone",
    )


def _data_wait(m: Measured) -> _Candidate | None:
    if m.data_wait_fraction is None:
        return None
    finding = Finding(
        check="data wait",
        share=m.data_wait_fraction,
        problem=f"{m.data_wait_fraction:.0%} of the time the slowest loader's rank waits for batches",
        fix="raise --dataloader_num_workers or --dataloader_prefetch_factor, or prepare the text beforehand",
    )
    return _Candidate(finding=finding, over_limit=m.data_wait_fraction > DATA_WAIT_LIMIT)


def _straggler(m: Measured) -> _Candidate | None:
    if m.straggler_skew is None or m.straggler_skew <= 1:
        return None
    lost = 1 - 1 / m.straggler_skew  # every other rank idles for it
    finding = Finding(
        check="straggler",
        share=lost,
        problem=f"the slowest rank computes {m.straggler_skew:.2f} times as long as the median one",
        fix="the log names it: check its clocks and neighbours, and leave its host out if it stays",
    )
    return _Candidate(finding=finding, over_limit=m.straggler_skew > SKEW_LIMIT)


def _communication(m: Measured) -> _Candidate | None:
    if m.comm_fraction is None:
        return None
    numbers = f"{m.comm_fraction:.0%} of the step is communication that nothing hides"
    over_limit = m.comm_fraction > COMM_LIMIT
    if m.hides is not None and m.hides > 1 and m.tokens_per_gpu is not None:
        # The exchange does not grow with the tokens and the backward does: at this many it would be covered.
        enough = m.tokens_per_gpu * m.hides
        finding = Finding(
            check="tokens per GPU too small",
            share=m.comm_fraction,
            problem=f"{numbers}: with {m.tokens_per_gpu:,} tokens per GPU and step it takes {m.hides:.1f} times as "
            "long as the backward",
            fix=f"give each GPU about {enough:,.0f} tokens per step (--per_device_train_batch_size, "
            "--gradient_accumulation_steps), or use fewer GPUs",
        )
    else:
        finding = Finding(
            check="exposed communication",
            share=m.comm_fraction,
            problem=numbers,
            fix="hfscale check compares the links with what they should give; then --ddp_bucket_cap_mb, "
            "--gradient_compression bf16, or sharding inside the node only (fsdp2_hsdp)",
        )
    return _Candidate(finding=finding, over_limit=over_limit)


def _bubble(m: Measured) -> _Candidate | None:
    if m.bubble_fraction is None:
        return None
    finding = Finding(
        check="bubble",
        share=m.bubble_fraction,
        problem=f"pipeline stages idle {m.bubble_fraction:.0%} of the step",
        fix="more micro-batches per step (--gradient_accumulation_steps), an interleaved schedule, or fewer stages",
    )
    return _Candidate(finding=finding, over_limit=m.bubble_fraction > BUBBLE_LIMIT)


def _recompute(m: Measured) -> _Candidate | None:
    if not m.mfu or not m.hfu or m.hfu <= m.mfu:
        return None
    share = 1 - m.mfu / m.hfu
    finding = Finding(
        check="recompute",
        share=share,
        problem=f"{share:.0%} of the executed FLOPs compute activations a second time",
        fix="--recompute selective, or none where the memory peak leaves room",
    )
    return _Candidate(finding=finding, over_limit=share > RECOMPUTE_LIMIT)


def _thermal(m: Measured) -> _Candidate | None:
    if not m.throttled:
        return None
    finding = Finding(
        check="thermal",
        share=None,
        problem=f"{m.throttled:.0%} of the GPUs run below their clock for heat or power",
        fix="the log names the rank: check cooling and power limit of its host, or leave it out",
    )
    return _Candidate(finding=finding, over_limit=True)


_LOOKS = (_data_wait, _straggler, _communication, _bubble, _recompute, _thermal)
