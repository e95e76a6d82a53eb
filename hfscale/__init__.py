"""hfscale: plan it, launch it, keep it alive, know what it costs: any Hugging Face Trainer run.

The names below load their modules when they are first used, so that `import hfscale` costs no torch.
"""

import atexit
import os
from functools import partial
from importlib import import_module
from typing import Any

from hfscale.core.late import register_late

__version__ = "0.1.0"

_HOME_OF = {
    "AlertCallback": "hfscale.metrics.alerts",
    "CommHealthCallback": "hfscale.health.callback",
    "DiLoCoCallback": "hfscale.islands.callback",
    "LRScalingCallback": "hfscale.lr_scaling.callback",
    "ModelShape": "hfscale.facts.model_shape",
    "Muon": "hfscale.optim.muon",
    "ParallelArguments": "hfscale.parallel.arguments",
    "ParallelLayout": "hfscale.facts.layout",
    "ParallelTrainer": "hfscale.parallel.trainer",
    "SampleGenerationCallback": "hfscale.metrics.sample_generation",
    "ScalingCallback": "hfscale.scaling",
    "ScalingMetricsCallback": "hfscale.metrics.callback",
    "SpotCheckpointCallback": "hfscale.checkpoint.callback",
    "TraceCallback": "hfscale.why.callback",
    "WeightAveragingCallback": "hfscale.averaging.callback",
    "estimate": "hfscale.planner.estimate",
    "initialize_at_width": "hfscale.lr_scaling.width",
    "latest_checkpoint": "hfscale.checkpoint.resume",
    "load_once": "hfscale.checkpoint.load_once",
    "plan": "hfscale.planner.plan",
    "use_compact_progress": "hfscale.metrics.progress",
}

__all__ = [*_HOME_OF, "__version__", "errors"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("hfscale.errors")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hfscale' has no attribute {name!r}")
    feature = (
        "ScalingCallback"
        if name.endswith("Callback") or name in ("initialize_at_width", "use_compact_progress")
        else name
    )
    # The modules cannot be imported without what they need
    if feature in ("ScalingCallback", "ParallelTrainer"):
        import_module("hfscale.core.versions").require(feature)
    return getattr(import_module(_HOME_OF[name]), name)


def _report_uncaught_error() -> None:
    """Report to the supervisor of `hfscale run` what ends this process before it has reported itself."""
    import_module("hfscale.core.rank_link").report_uncaught_error()


# `run_memory.FOLDER_VARIABLE`: `hfscale run` has started this process
if "HFSCALE_RUN_MEMORY" in os.environ:
    atexit.register(_report_uncaught_error)


_LATE = {
    "BadBatches": ("hfscale.replays.bad_batches", "BadBatches"),
    "StepReplay": ("hfscale.replays.replay", "StepReplay"),
    "run_reader": ("hfscale.report.run_reader", None),
    "width": ("hfscale.lr_scaling.width", None),
}
"""What a training asks `hfscale.core.late` for -> the module, and the name in it; None: the module itself."""


def _load(module: str, name: str | None) -> Any:
    loaded = import_module(module)
    return loaded if name is None else getattr(loaded, name)


for _name, _place in _LATE.items():
    register_late(_name, partial(_load, *_place))


def __dir__() -> list[str]:
    return sorted(__all__)
