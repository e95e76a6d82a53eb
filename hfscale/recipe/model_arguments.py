"""Which model a recipe trains, and which part of it: the flags, and the LoRA config that they make."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from hfscale.core.flags import require_from_0, require_positive
from hfscale.core.option_flags import flag
from hfscale.core.spelling import spelled
from hfscale.core.versions import require
from hfscale.errors import UsageError
from hfscale.facts.support import Combination, check_support
from hfscale.recipe.modalities import parts_beside_text

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(kw_only=True)
class ModelArguments:
    """Which model is trained, and which part of it.

    Raises:
        UsageError: two flags exclude each other, or a value is out of range.
    """

    model_name_or_path: str | None = flag("Checkpoint to start from: a hub id or a folder.")
    config_name: str | None = flag("Train from scratch: a config.json, its folder or a hub id.")
    tokenizer_name: str | None = flag("Tokenizer, if it is not the model's: a hub id or a folder.")
    attn_implementation: str | None = flag(
        "sdpa, flash_attention_2, flex_attention, … Default: with document attention on a GPU the fastest one that is "
        "installed, else what transformers chooses."
    )
    use_peft: bool = flag("Train LoRA adapters instead of the full model.", default=False)
    load_in_4bit: bool = flag(
        "Load the frozen base model of --use_peft in 4 bits (QLoRA; needs bitsandbytes).",
        default=False,
    )
    lora_r: int = flag("Rank of the LoRA adapters.", default=16)
    lora_alpha: int = flag("Numerator of the LoRA scaling factor.", default=32)
    lora_dropout: float = flag("Dropout on the input of the adapters.", default=0.0)
    lora_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Modules to adapt. Default: every linear layer except the head; of a mixture of experts that "
            "transformers shards itself (--ep_size), those of the attention."
        },
    )
    merge_adapters: bool = flag(
        "After the training, also write the model with its adapters merged, into output_dir/merged.",
        default=False,
    )

    def __post_init__(self) -> None:
        model = spelled("model_name_or_path")
        if self.model_name_or_path and self.config_name:
            config = spelled("config_name")
            raise UsageError(
                f"{model} starts from a checkpoint and {config} from scratch: give one of them"
            )
        if self.load_in_4bit and not (self.use_peft and self.model_name_or_path):
            given = spelled("load_in_4bit")
            both = f"{spelled('use_peft', True)} and {model}"
            raise UsageError(f"{given} is for the frozen base model of adapters: give {both} too")
        if self.merge_adapters and not (self.use_peft and self.model_name_or_path):
            given = spelled("merge_adapters")
            use_peft = spelled("use_peft")
            raise UsageError(
                f"{given} merges the adapters of {use_peft} into the model of {model}: give both"
            )
        method = "qlora" if self.load_in_4bit else None
        check_support(Combination(method=method, merge_adapters=self.merge_adapters))
        require_positive(self, "lora_r", "lora_alpha")
        require_from_0(self, lora_dropout=1)

    def lora_config(
        self, model: PreTrainedModel | None = None, *, attention_only: bool = False
    ) -> "LoraConfig | None":
        """Return the config of the LoRA adapters, or None without `--use_peft`.

        Args:
            model (`PreTrainedModel`, *optional*): the model, of whose linear layers PEFT cannot adapt some.
            attention_only (`bool`): whether only the attention gets adapters where no modules are named.

        Raises:
            MissingDependencyError: PEFT is not installed or too old.
        """
        if not self.use_peft:
            return None
        require("LoRA", "--use_peft")
        from peft import LoraConfig

        modules: list[str] | str = self.lora_target_modules or "all-linear"
        if model is not None and attention_only and not self.lora_target_modules:
            modules = _attention_matrices(model)
        left_out: list[str] = []
        beside_text: list[str] = []
        if model is not None:
            beside_text = parts_beside_text(model)
        if model is not None and modules == "all-linear":
            left_out = _without_adapter(model)
        # PEFT takes names or one pattern: a vision tower has modules of the same names as the decoder.
        excluded: list[str] | str | None = left_out or None
        if beside_text:
            excluded = _pattern(left_out, beside_text)
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=modules,
            exclude_modules=excluded,
            task_type="CAUSAL_LM",
        )


def _pattern(names: list[str], parts: list[str]) -> str:
    """Return PEFT's pattern of modules with the last names `names` and of all modules in `parts`."""
    inside = [rf"{re.escape(part)}\..*" for part in parts]
    return "|".join([*(rf"(.*\.)?{re.escape(name)}" for name in names), *inside])


def _attention_matrices(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers of the attention, without those of the modules that contain them."""
    beside_text = tuple(f"{part}." for part in parts_beside_text(model))
    attention = {
        name
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__ and not name.startswith(beside_text)
    }
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return sorted(
        {name.rpartition(".")[2] for name in linear if name.rpartition(".")[0] in attention}
    )


def _without_adapter(model: PreTrainedModel) -> list[str]:
    """Return the names of linear layers that PEFT cannot adapt: routers that return a tuple (PhiMoE), and the output
    of Mamba-2 layers, whose weight a fused kernel reads (PEFT 0.21, `_check_lora_target_modules_mamba`)."""
    linear = (
        (name, type(module))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    )
    routers = {name.rpartition(".")[2] for name, kind in linear if kind.__name__.endswith("Router")}
    return sorted(routers | ({"out_proj"} if model.config.model_type == "nemotron_h" else set()))
