"""What a plan answers, and its JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from hfscale.planner.advice import Advice
from hfscale.planner.cost import Cost
from hfscale.planner.estimate import Estimate
from hfscale.planner.launchable import recipe_of, why_not
from hfscale.planner.request import PlanRequest, Rejected, strategy_of


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout that fits, with its cost where the number of tokens is known."""

    estimate: Estimate
    """Memory and time."""
    hours: float | None = None
    """From start to end, interruptions of the cheapest offer counted; None where the number of tokens is not known."""
    costs: tuple[Cost, ...] = ()
    """At every provider, cheapest first; empty where no price is known."""

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs."""
        return None if self.hours is None else self.hours * self.estimate.job.layout.world_size

    @property
    def usd(self) -> float | None:
        """At the cheapest provider."""
        return self.costs[0].usd if self.costs else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer."""

    model: str
    """As asked."""
    request: PlanRequest
    """What was asked."""
    tokens: float | None
    """Tokens to train on."""
    choices: tuple[Choice, ...]
    """Best first."""
    rejected: tuple[Rejected, ...]
    """Layouts that do not work."""
    min_gpus: int | None
    """Fewest GPUs of those searched on which something fits and every condition holds; None where that was not
    asked."""
    advice: tuple[Advice, ...]
    """For the first choice."""
    assumptions: tuple[str, ...]
    """What the numbers rest on."""
    warnings: tuple[str, ...]
    """Old prices."""

    @property
    def next_launchable(self) -> tuple[int, Choice] | None:
        """The first choice that a recipe runs, with its number from 1."""
        return next(((n, c) for n, c in enumerate(self.choices, 1) if why_not(c.estimate.job) is None), None)

    @property
    def unlaunchable(self) -> list[str]:
        """A line for each reason why choices of Hugging Face's stack cannot be launched."""
        found: dict[str, list[str]] = {}
        if self.request.stack == "hf":
            for number, choice in enumerate(self.choices, 1):
                reason = why_not(choice.estimate.job)
                if reason is not None:
                    found.setdefault(reason, []).append(f"#{number}")
        return [f"{', '.join(numbers)}: {reason}" for reason, numbers in found.items()]

    def to_dict(self) -> dict[str, Any]:
        """The JSON that `hfscale plan --json` prints."""
        shape, gpu = self.request.shape, self.request.gpu
        return {
            "model": {
                "name": self.model,
                "parameters": shape.total_parameters,
                "active_parameters": shape.active_parameters,
                "layers": shape.layers,
                "hidden": shape.hidden,
            },
            "hardware": {
                "gpu": gpu.name,
                "gpus": self.request.gpus,
                "gpus_per_node": self.request.gpus_per_node,
                "memory_gib": gpu.memory_gib,
            },
            "choices": [choice_dict(choice) for choice in self.choices],
            "rejected": [{"layout": asdict(row.layout), "reason": row.reason} for row in self.rejected],
            "min_gpus": self.min_gpus,
            "advice": [asdict(item) for item in self.advice],
            "assumptions": list(self.assumptions),
            "warnings": list(self.warnings),
        }


def choice_dict(choice: Choice) -> dict[str, Any]:
    """One choice as JSON."""
    estimate, job = choice.estimate, choice.estimate.job
    return {
        "strategy": strategy_of(job),
        "layout": asdict(job.layout),
        "gpus": job.layout.world_size,
        "zero_stage": job.zero,
        "micro_batch": job.micro_batch,
        "grad_accum": job.micro_batches,
        "global_batch": job.global_batch,
        "virtual_stages": job.virtual_stages,
        "pipeline_schedule": job.schedule_name if job.layout.pp > 1 else None,
        "expert_parallel": job.expert_parallel,
        "overlapped_experts": job.overlapped_experts,
        "offload": job.offload,
        "activation_checkpointing": job.recompute,
        "recipe": recipe_of(job),
        **estimate_dict(estimate),
        "hours": choice.hours,
        "gpu_hours": choice.gpu_hours,
        "cost_usd": choice.usd,
        "costs": [asdict(item) for item in choice.costs],
    }


def estimate_dict(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON."""
    return {
        "memory_gib": {**asdict(estimate.memory), "total": estimate.memory.total},
        "fits": estimate.fits,
        "step_time_s": estimate.time.total,
        "time_s": asdict(estimate.time),
        "tokens_per_s_per_gpu": estimate.tokens_per_s_per_gpu,
        "mfu": estimate.mfu,
    }
