"""Weights for a model that nobody has trained yet: the same ones under every strategy, from a config and a seed.

transformers draws them in one stream of random numbers, whose course depends on how the model was built: DeepSpeed
ZeRO-3's `zero.Init`, for one, starts another training than DDP from the same seed. Here each module draws from a
generator of its own, seeded by the run's seed and the module's name, so neither the strategy nor the order matters.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import XIELUActivation
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from hfscale.errors import UsageError
from hfscale.parallel.shards import write_local_part
from hfscale.utils import distributed


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
        parameters (`bool`): False computes the buffers only (rotary frequencies) and draws adapters, for a rank that
            will be sent or read the model's own parameters.
    """

    def visit(module: nn.Module, name: str, owner: PreTrainedModel) -> None:
        if isinstance(module, LoraLayer):
            visit(module.get_base_layer(), name, owner)  # by the name it has without adapters
            _draw_adapters(module, _seed_of(seed, f"{name}.lora"))
            return
        # Children first, as transformers does it: a parent may draw some of their weights again, at another scale.
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}", child if isinstance(child, PreTrainedModel) else owner)
        if isinstance(module, XIELUActivation):  # Apertus' rules have none for what its constructor computes
            with _whole(module):
                module.load_state_dict(XIELUActivation(dtype=module.beta.dtype).state_dict())
            return
        if not parameters and _parameters_of(module):
            return
        with _whole(module), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(seed, name))
            # The rule of each architecture; the public `initialize_weights` draws all modules from one stream.
            owner._init_weights(module)

    visit(model, "", model)


def read_weights(
    model: PreTrainedModel, name_or_path: str, *, aliases: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Read a checkpoint's weights into `model`, each rank its own part of what it holds, straight from the files.

    transformers' own reader does it: it knows how each architecture's checkpoints are named and put together, and
    reads of a `DTensor` parameter the rank's slice alone. Adapters are left as they are.

    Args:
        model (`PreTrainedModel`): on a real device, its parameters whole, cut, or (other stages') missing.
        name_or_path (`str`): a folder with safetensors files, or a hub id.
        aliases: names of parameters that checkpoints leave out, and whose weights they take (tied ones).

    Raises:
        UsageError: no safetensors files, or a parameter that stands in none.
    """
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    renamed = {rf"^{re.escape(name)}\.(weight|bias)$": rf"{name}.base_layer.\1" for name in adapted}
    with contextlib.ExitStack() as files:
        slices: dict[str, Any] = {}
        for path in _weight_files(name_or_path):
            opened = files.enter_context(safe_open(path, framework="pt"))
            slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        for missing, source in aliases.items():
            if missing not in slices and source in slices:
                slices[missing] = slices[source]
        config = LoadStateDictConfig(
            device_map={"": _device_of(model)},
            dtype=model.dtype,
            weight_mapping=get_model_conversion_mapping(model, renamed or None),
        )
        info, _ = convert_and_load_state_dict_in_model(model, slices, config)
    missing = sorted(name for name in info.missing_keys if "lora_" not in name)
    if missing or info.mismatched_keys:
        what = f"no {missing[0]}" if missing else f"another shape of {sorted(info.mismatched_keys)[0][0]}"
        raise UsageError(
            f"--model_name_or_path {name_or_path} has {what}: it is not a {model.config.model_type} of this config"
        )


def _weight_files(name_or_path: str) -> list[str]:
    try:
        single = cached_file(name_or_path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        if single is not None:
            return [single]
        index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME)
        return list(get_checkpoint_shard_files(name_or_path, index)[0])
    except OSError as error:
        raise UsageError(
            f"--model_name_or_path {name_or_path} has no {SAFE_WEIGHTS_NAME}, and no other format can be read in parts"
        ) from error


def _device_of(model: PreTrainedModel) -> torch.device:
    return next(parameter.device for parameter in model.parameters())


def _draw_adapters(layer: LoraLayer, seed: int) -> None:
    """Adapters by peft's own rule (A drawn, B zero), from `seed`."""
    parts = [half[name] for half in (layer.lora_A, layer.lora_B) for name in half]
    with contextlib.ExitStack() as stack, torch.random.fork_rng(devices=[]):
        for part in parts:
            if any(isinstance(p, DTensor) or p.device.type != "cpu" for p in part.parameters()):
                stack.enter_context(_whole_on_host(part))
        torch.manual_seed(seed)
        for name in layer.lora_A:
            layer.reset_lora_parameters(name, True)


def _seed_of(seed: int, name: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}{name}".encode()) >> 1  # torch takes seeds below 2**63


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module's rule may touch: its own and its children's."""
    return [parameter for part in (module, *module.children()) for parameter in part.parameters(recurse=False)]


@contextlib.contextmanager
def _whole(module: nn.Module) -> Iterator[None]:
    """Within, the parameters that ZeRO-3 or a mesh keeps in parts are whole; what is made of them stays."""
    parameters = _parameters_of(module)
    if any(isinstance(parameter, DTensor) or parameter.device.type != "cpu" for parameter in parameters):
        with _whole_on_host(module):
            yield
        return
    if not (parameters and is_deepspeed_zero3_enabled()):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield


@contextlib.contextmanager
def _whole_on_host(module: nn.Module) -> Iterator[None]:
    """Within, whole tensors in host memory stand for the parameters that a rule may touch; of those that it wrote,
    each rank then keeps its part. What the rule leaves alone costs no memory: pages are given out when written."""
    held = [
        (part, name, parameter)
        for part in (module, *module.children())
        for name, parameter in part.named_parameters(recurse=False)
    ]
    for part, name, parameter in held:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        part._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for part, name, parameter in held:
            written = part._parameters[name]
            part._parameters[name] = parameter
            if written is not None and written._version > 0:
                write_local_part(parameter, written.detach())
