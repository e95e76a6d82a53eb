"""Jobs for the planner's tests."""

from dataclasses import replace

from hfscale.facts.hardware import accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model
from hfscale.planner.job import Job

TINY = ModelShape.from_config(
    {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 1792,
        "vocab_size": 1000,
    }
)


def job(**changes):
    """Llama 3.1 8B on one node of H100s with FSDP2, with the given changes, which may include axes of the layout."""
    axes = {name: changes.pop(name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp") if name in changes}
    base = Job(
        shape=find_model("llama-3.1-8b"),
        gpu=accelerator("H100-80GB"),
        layout=ParallelLayout(**(axes or {"dp_shard": 8})),
        seq_len=4096,
        micro_batch=1,
        global_batch=64,
        zero=3,
    )
    return replace(base, **changes)
