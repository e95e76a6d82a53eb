"""Weights for a model that nobody has trained yet: the same ones under every strategy, from a config and a seed.

transformers draws them in one stream of random numbers, whose course depends on how the model was built: DeepSpeed
ZeRO-3's `zero.Init`, for one, starts another training than DDP from the same seed. Here each module draws from a
generator of its own, seeded by the run's seed and the module's name, so neither the strategy nor the order matters.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.integrations import is_deepspeed_zero3_enabled

from hfscale import distributed


def build_model(config: PreTrainedConfig, *, seed: int, dtype: torch.dtype, **kwargs: Any) -> PreTrainedModel:
    """A causal language model with drawn weights, held by as few ranks as the strategy allows.

    Under ZeRO-3 each rank keeps its part and one module at a time is whole. Under FSDP2 with
    `fsdp_cpu_ram_efficient_loading` rank 0 alone fills the memory of its copy, from which Accelerate hands out the
    shards. Under all else every rank has the model, as its strategy wants it.

    Args:
        config (`PreTrainedConfig`): of any architecture with a causal language model.
        seed (`int`): equal seeds give equal weights under every strategy and on every number of processes.
        dtype (`torch.dtype`): of the parameters.
        kwargs: for `AutoModelForCausalLM.from_config`, such as `attn_implementation`.
    """
    if is_deepspeed_zero3_enabled():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
        model.to_empty(device="cpu")  # not yet memory: that comes with the first write
        model.tie_weights()
    draw_weights(model, seed=seed, parameters=not is_fsdp_enabled() or distributed.rank() == 0)
    return model


@torch.no_grad()
def draw_weights(model: PreTrainedModel, *, seed: int, parameters: bool = True) -> None:
    """Draw every weight of `model` anew, by the model's own rules, from `seed` and the modules' names alone.

    Args:
        parameters (`bool`): False computes the buffers only (rotary frequencies), for a rank that will be sent its
            parameters.
    """

    def visit(module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        # Children first, as transformers does it: a parent may draw some of their weights again, at another scale.
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}", child if isinstance(child, PreTrainedModel) else owner)
        if not parameters and _parameters_of(module):
            return
        with _whole(module), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(seed, name))
            # The rule of each architecture; the public `initialize_weights` draws all modules from one stream.
            owner._init_weights(module)

    visit(model, "", model)


def _seed_of(seed: int, name: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}{name}".encode()) >> 1  # torch takes seeds below 2**63


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module's rule may touch: its own and its children's."""
    return [parameter for part in (module, *module.children()) for parameter in part.parameters(recurse=False)]


@contextlib.contextmanager
def _whole(module: nn.Module) -> Iterator[None]:
    """Within, the parameters that ZeRO-3 keeps in parts are whole; what rank 0 made of them stays."""
    parameters = _parameters_of(module)
    if not (parameters and is_deepspeed_zero3_enabled()):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield
