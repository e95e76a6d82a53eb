"""Initial weights: drawn from a config and a seed, the same under every strategy, or read by each rank in parts.

transformers draws weights from one stream of random numbers, so they depend on how the model was built: with the same
seed, DeepSpeed ZeRO-3's `zero.Init` gives other weights than DDP. Here each module draws from a generator of its own,
seeded by the run's seed and the module's name, so that neither the strategy nor the order matters.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import XIELUActivation
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import LoadStateDictConfig

from hfscale.checkpoint.formats.safetensors_files import weight_files
from hfscale.core import distributed
from hfscale.core.spelling import spelled
from hfscale.core.torch_internals import version_of
from hfscale.core.versions import is_fsdp_enabled
from hfscale.errors import UsageError
from hfscale.parallel.adapters import base_names, wrapped_module
from hfscale.parallel.mesh import copy_local_shard
from hfscale.trainer.expert_adapters import is_wrapped_parameter


def build_model(
    config: PreTrainedConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    auto_class: Any = AutoModelForCausalLM,
    **kwargs: Any,
) -> PreTrainedModel:
    """Make a model with drawn weights, by default a causal language model, in the memory of as few ranks as possible.

    Under ZeRO-3 each rank keeps its part, and one module at a time is gathered. Under FSDP2 with
    `fsdp_cpu_ram_efficient_loading` only rank 0 fills the memory of its copy, from which Accelerate distributes the
    shards. Under all other strategies every rank has the model, as the strategy requires.

    Args:
        config (`PreTrainedConfig`): the config of any architecture that has a causal language model.
        seed (`int`): equal seeds give equal weights under every strategy and on every number of processes.
        dtype (`torch.dtype`): type of the parameters.
        auto_class (`type`): the class of transformers that finds the class of the model.
        kwargs: keywords of its `from_config`, such as `attn_implementation`.

    Returns:
        The model, on the CPU.
    """
    model: PreTrainedModel
    if is_deepspeed_zero3_enabled():
        model = auto_class.from_config(config, dtype=dtype, **kwargs)
    else:
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=dtype, **kwargs)
        model.to_empty(device="cpu")  # the system provides memory only when it is written
        model.tie_weights()
    draw_weights(model, seed=seed, parameters=not is_fsdp_enabled() or distributed.rank() == 0)
    return model


@torch.no_grad()
def draw_weights(model: PreTrainedModel, *, seed: int, parameters: bool = True) -> None:
    """Draw every weight of a model by the model's own rules, from the seed and the names of its modules only.

    Adapters keep their values: `hfscale.parallel.adapter_weights.draw_adapters` draws them afterwards.

    Args:
        model (`PreTrainedModel`): a model on a real device; its weights are overwritten.
        seed (`int`): the run's seed.
        parameters (`bool`): whether the parameters are drawn. Without, only the buffers (rotary frequencies) are
            computed, for a rank whose parameters are sent or read afterwards.
    """

    def visit(module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        wrapped = wrapped_module(module)
        if wrapped is not None:
            visit(wrapped[1], name, owner)  # by the name that it has without adapters
            return
        # Children first, as in transformers: a parent may draw some of their weights again, with another scale.
        for child_name, child in module.named_children():
            visit(
                child,
                f"{name}.{child_name}",
                child if isinstance(child, PreTrainedModel) else owner,
            )
        # Apertus has no rule for what its constructor computes
        if isinstance(module, XIELUActivation):
            with _gathered(module):
                module.load_state_dict(XIELUActivation(dtype=module.beta.dtype).state_dict())
            return
        is_kept = not parameters and _parameters_of(module)
        if is_kept and not any(True for _ in module.buffers(recurse=False)):
            return
        with _kept(module) if is_kept else _gathered(module), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, name))
            # No public way to apply the architecture's rule to one module: `initialize_weights` draws all modules from
            # one stream. test_weights.py fails when it moves.
            owner._init_weights(module)

    visit(model, "", model)


def read_weights(
    model: PreTrainedModel, name_or_path: str, *, aliases: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Read a checkpoint's weights into a model, each rank its own part directly from the files.

    transformers' own reader is used: it maps the names and tensors of each architecture's checkpoints to the model,
    and reads only the rank's slice of a `DTensor` parameter. Adapters are not changed.

    Args:
        model (`PreTrainedModel`): a model on a real device; its parameters are full, sharded or (of other stages)
            missing.
        name_or_path (`str`): a folder with safetensors files, or a hub id.
        aliases (`Mapping`): names of parameters that checkpoints leave out (tied ones) -> names of the weights that
            they take.

    Raises:
        UsageError: there are no safetensors files, or a parameter is in none of them or has another shape there.
    """
    with contextlib.ExitStack() as files:
        files.enter_context(_without_wrapped_parameters(model))
        is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        own_names = base_names(model)
        renamed = {
            f"^{re.escape(plain)}$": name for name, plain in own_names.items() if name != plain
        }
        slices: dict[str, Any] = {}
        for path in weight_files(name_or_path):
            opened = files.enter_context(safe_open(path, framework="pt"))
            slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        for alias, source in aliases.items():
            if alias not in slices and source in slices:
                slices[alias] = slices[source]
        # Its type differs from what takes it
        mapping: Any = get_model_conversion_mapping(model, renamed or None)
        config = LoadStateDictConfig(
            device_map={"": next(model.parameters()).device},
            dtype=model.dtype,
            weight_mapping=mapping,
        )
        info, _ = convert_and_load_state_dict_in_model(model, slices, config)
        # Some have been replaced by others that require a gradient
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained[name])
    missing = sorted(name for name in info.missing_keys if name in own_names)
    if missing or info.mismatched_keys:
        what = (
            f"no {missing[0]}"
            if missing
            else f"another shape of {sorted(info.mismatched_keys)[0][0]}"
        )
        named = spelled("model_name_or_path", name_or_path)
        family = model.config.model_type
        raise UsageError(
            f"{named} has {what}: it is not a {family} of this config; give the config that belongs to it"
        )


@contextlib.contextmanager
def _without_wrapped_parameters(model: nn.Module) -> Iterator[None]:
    """Inside this context, adapted experts have the names that they have without adapters: transformers makes them of
    the matrices in checkpoints by these names."""
    wrapped: list[tuple[nn.Module, str, Any]] = [
        (module, name, child)
        for module in model.modules()
        if not is_wrapped_parameter(module)
        for name, child in module.named_children()
        if is_wrapped_parameter(child)
    ]
    for module, name, child in wrapped:
        setattr(module, name, child.get_base_layer())
    try:
        yield
    finally:
        for module, name, child in wrapped:
            setattr(module, name, child)


def seed_of(seed: int, name: str) -> int:
    """Return the seed of what is drawn for one module.

    Args:
        seed (`int`): the run's seed.
        name (`str`): the module's name without adapters.
    """
    return xxhash.xxh3_64_intdigest(f"{seed}{name}".encode()) >> 1  # torch takes seeds below 2**63


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module's rule may change: its own and its children's."""
    return [
        parameter
        for part in (module, *module.children())
        for parameter in part.parameters(recurse=False)
    ]


@contextlib.contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Inside this context, a module's rule changes its buffers, such as Gemma 3's factor of embeddings, and nothing
    else."""
    owned = [
        (part, *item)
        for part in (module, *module.children())
        for item in part.named_parameters(recurse=False)
    ]
    for part, name, parameter in owned:
        without_memory = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        setattr(part, name, nn.Parameter(without_memory, requires_grad=False))
    try:
        yield
    finally:
        for part, name, parameter in owned:
            setattr(part, name, parameter)


def needs_host_copies(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether a rule of a library cannot draw these parameters where they are.

    Args:
        parameters (`Iterable[nn.Parameter]`): parameters of a module.
    """
    return any(
        isinstance(parameter, DTensor) or parameter.device.type != "cpu" for parameter in parameters
    )


@contextlib.contextmanager
def _gathered(module: nn.Module) -> Iterator[None]:
    """Inside this context, parameters that ZeRO-3 or a mesh keeps in shards are complete; changes to them are kept."""
    parameters = _parameters_of(module)
    if needs_host_copies(parameters):
        with full_on_host(module):
            yield
        return
    if not (parameters and is_deepspeed_zero3_enabled()):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield


@contextlib.contextmanager
def full_on_host(module: nn.Module) -> Iterator[None]:
    """Inside this context, full tensors in host memory take the place of the parameters that a rule may change; of the
    tensors that it wrote, each rank then keeps its shard. A tensor that is not written costs no memory, because the
    system provides memory only when it is written.

    Args:
        module (`nn.Module`): the module whose parameters, and those of its children, are replaced.
    """
    originals = [
        (part, name, parameter)
        for part in (module, *module.children())
        for name, parameter in part.named_parameters(recurse=False)
    ]
    for part, name, parameter in originals:
        full = torch.empty(parameter.shape, dtype=parameter.dtype)
        setattr(part, name, nn.Parameter(full, requires_grad=parameter.requires_grad))
    try:
        yield
    finally:
        for part, name, parameter in originals:
            drawn = getattr(part, name)
            setattr(part, name, parameter)
            # torch counts in-place writes here; there is no public way to learn whether a tensor was written.
            if drawn is not None and version_of(drawn) > 0:
                copy_local_shard(parameter, drawn.detach())
