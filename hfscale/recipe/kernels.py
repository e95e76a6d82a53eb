"""Which implementation of attention and of the loss a model gets where the flags name none.

What is chosen depends on the GPU and on the packages that are installed, both of which are parameters (`Kernels`), so
that a machine without a GPU can test the choice.
"""

import importlib.util
import os
import shlex
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, Trainer
from transformers.utils import import_utils

from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.core.versions import (
    context_parallel_size,
    is_at_least,
    require,
    sequence_parallel_size,
    sizes_of_layers,
)
from hfscale.errors import UsageError
from hfscale.facts.experts import number_of_experts
from hfscale.facts.support import LISTS
from hfscale.parallel.descriptions import compiles_full_model
from hfscale.recipe.arguments import RecipeTrainingArguments
from hfscale.recipe.document_attention import is_dense, is_flash_attention
from hfscale.recipe.fused_loss import (
    CHUNK_TOKENS,
    compute_loss_in_chunks,
    evaluate_without_logits,
    reason_not_to_chunk,
)
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = get_logger(__name__)

_VOLTA = (7, 0)
"""Compute capability of the oldest GPUs that Triton writes kernels for."""
_AMPERE = (8, 0)
_HOPPER = 9
"""Major compute capability of the only GPUs that FlashAttention 3 is written for."""
_FLEX_HEAD_DIMS = (16, 256)
"""Smallest and largest head for which flex_attention is chosen; torch refuses smaller ones."""
_LIGER = "liger_kernel"
_LIGER_VERSION = "0.8.5"
"""The version of liger-kernel that was seen to replace the layers of `liger_families` in transformers 5.23."""
_LAYERS_ONLY = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Value of `liger_kernel_config` with which Liger leaves the loss alone."""
_NOT_EXPERTS = {"swiglu": False}
"""Value of `liger_kernel_config` with which Liger leaves the experts of a layer alone.

Liger 0.8.5 has seven kernels for them (`ops/fused_moe_kernels.py`), each of which Triton times in 16 to 32 variants in
the first step of each launch and on each rank. On an H100 a layer of 128 experts had not taken a step after 50 s.
"""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What a run can choose kernels from."""

    capability: tuple[int, int] | None
    """Compute capability of the NVIDIA GPU that the run uses; None without one."""
    half_precision: bool
    """Whether the model computes in bf16 or fp16, as FlashAttention needs it."""
    installed: frozenset[str]
    """Names of the attention implementations that can be imported, beside those that torch always has, and
    `liger_kernel`."""
    can_compile: bool = False
    """Whether `torch.compile` finds what it needs: Triton, and a C compiler with the headers of Python."""

    @property
    def writes_kernels(self) -> bool:
        """Whether `torch.compile` can write kernels for the GPU of the run."""
        if self.capability is None or self.capability < _VOLTA:
            return False
        return self.can_compile

    @classmethod
    def here(cls, args: "TrainingArguments") -> "Kernels":
        """Look at this machine.

        Args:
            args (`TrainingArguments`): the device and the precision of the run.
        """
        uses_nvidia = args.device.type == "cuda" and torch.version.cuda is not None
        checks = {
            "flash_attention_3": import_utils.is_flash_attn_3_available(),
            "flash_attention_2": import_utils.is_flash_attn_2_available(),
            # 2.6 fails to compile its backward pass for some shapes
            "flex_attention": is_at_least("torch", "2.7"),
            _LIGER: is_at_least("liger-kernel", _LIGER_VERSION),
        }
        return cls(
            capability=torch.cuda.get_device_capability(args.device) if uses_nvidia else None,
            half_precision=bool(args.bf16 or args.fp16),
            installed=frozenset(name for name, is_installed in checks.items() if is_installed),
            can_compile=_can_compile(),
        )

    def attention(self) -> list[str]:
        """Return the implementations that skip what documents hide from each other, the fastest one first."""
        if self.capability is None or self.capability < _AMPERE:
            return []
        fits = {
            "flash_attention_3": self.half_precision and self.capability[0] == _HOPPER,
            "flash_attention_2": self.half_precision,
            "flex_attention": True,
        }
        return [name for name, does_fit in fits.items() if does_fit and name in self.installed]


def _can_compile() -> bool:
    """Return whether Triton can build kernels (`triton.runtime.build`: CC, else gcc or clang)."""
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    has_triton = importlib.util.find_spec("triton") is not None
    return (
        has_triton
        and headers.is_file()
        and any(shutil.which(shlex.split(name)[0]) for name in compilers)
    )


def use_fast_document_attention(model: PreTrainedModel, kernels: Kernels) -> None:
    """Give a model the fastest attention that is cut between documents without a dense mask, where there is one.

    Args:
        model (`PreTrainedModel`): a model with the attention that transformers has chosen; changed in place.
        kernels (`Kernels`): what there is to choose from.
    """
    current = attention_implementation(model.config)
    if current is None or not is_dense(current):
        return
    chosen = next((name for name in kernels.attention() if _takes(model, name, current)), None)
    if chosen is None:
        return
    logger.info(
        "attention: %s instead of %s, because documents are packed and it skips what they hide from each other",
        chosen,
        current,
    )


def _takes(model: PreTrainedModel, name: str, current: str) -> bool:
    """Give a model another implementation of attention; return whether it fits and transformers supports it."""
    if not _fits(model, name):
        return False
    try:
        model.set_attn_implementation(name)
    except ValueError:
        model.set_attn_implementation(current)  # a part of the model may have taken it
        return False
    return True


def _fits(model: PreTrainedModel, name: str) -> bool:
    if is_flash_attention(name):
        compatible = getattr(model, "_compatible_flash_implementations", None)
        return not compatible or name in compatible
    text = model.config.get_text_config()
    head_dims = sizes_of_layers(text, "head_dim")
    if not head_dims:
        head_dims = (text.hidden_size // text.num_attention_heads,)
    smallest, largest = _FLEX_HEAD_DIMS
    # transformers refuses it with flex_attention
    has_dropout = bool(getattr(text, "attention_dropout", 0.0))
    has_two_widths = getattr(text, "kv_lora_rank", None) is not None  # multi-head latent attention
    has_sizes = smallest <= head_dims[0] and head_dims[-1] <= largest
    return has_sizes and not has_dropout and not has_two_widths


def choose_loss(trainer: Trainer, kernels: Kernels) -> None:
    """Let a Trainer of the recipes compute loss and layers as `--fused_loss` and `--use_liger_kernel` ask.

    What was chosen is logged, and set in the arguments of the Trainer.

    Args:
        trainer (`Trainer`): call it before `train()`. Trainers of TRL and `ParallelTrainer` have losses of their own.
        kernels (`Kernels`): what there is to choose from.

    Raises:
        UsageError: the loss cannot be computed as the flag asks.
        MissingDependencyError: the flag asks for Liger, which is not installed or too old.
    """
    args = trainer.args
    if not isinstance(args, RecipeTrainingArguments) or Strategy.of(trainer).runs_stages:
        return
    asked = "liger" if args.fused_loss == "auto" and args.use_liger_kernel else args.fused_loss
    args.fused_loss = _automatic_loss(trainer, kernels) if asked == "auto" else asked
    if args.fused_loss == "chunked":
        reason = _why_not_fused(trainer) or reason_not_to_chunk(trainer.model)
        if reason is not None:
            given = spelled("fused_loss", "chunked")
            raise UsageError(f"{given}: {reason}; leave {spelled('fused_loss')} out")
        head = compute_loss_in_chunks(trainer.model)
        evaluate_without_logits(trainer, head)
        logger.info(
            "loss: head and cross-entropy for %s tokens at a time, without all logits (--fused_loss none: from all "
            "logits, which a compute_loss of your own may need)",
            f"{CHUNK_TOKENS:,}",
        )
        # Also where layers cannot be compiled: what is compiled here sees complete logits and nothing else
        if kernels.writes_kernels and args.torch_compile_regional is not False:
            head.is_compiled = True
            logger.info(
                "loss: compiled by torch.compile (--torch_compile_regional false: not compiled)"
            )
    if args.fused_loss == "liger":
        require("Liger kernels", "--fused_loss liger")
        args.use_liger_kernel = True
        logger.info("loss: Liger's fused kernel (--fused_loss none: from all logits)")
    _choose_layers(trainer, args, kernels)


def _automatic_loss(trainer: Trainer, kernels: Kernels) -> str:
    if kernels.capability is None:
        return "none"
    reason = _why_not_fused(trainer)
    if reason is None:
        reason = reason_not_to_chunk(trainer.model)
        if reason is None:
            return "chunked"
        if trainer.args.use_liger_kernel is not False and _why_not_liger(trainer, kernels) is None:
            return "liger"
    logger.info("loss: from all logits, because %s", reason)
    return "none"


def _choose_layers(trainer: Trainer, args: RecipeTrainingArguments, kernels: Kernels) -> None:
    """Switch Liger's kernels for layers on where nothing else fuses their operations; `--fused_loss` decides on the
    loss."""
    if args.use_liger_kernel is None:
        args.use_liger_kernel = not args.torch_compile and _why_not_liger(trainer, kernels) is None
        if args.use_liger_kernel:
            logger.info("layers: Liger's kernels (--use_liger_kernel false: those of transformers)")
    if not args.use_liger_kernel:
        return
    # What the user has set holds, so it is added last
    chosen = {} if args.fused_loss == "liger" else dict(_LAYERS_ONLY)
    asked = args.liger_kernel_config or {}
    model: Any = trainer.model
    if number_of_experts(model.config) and "swiglu" not in asked:
        chosen |= _NOT_EXPERTS
        logger.info(
            "experts: those of transformers (%s), not Liger's, whose kernels are tuned again at each start "
            "(--liger_kernel_config '{\"swiglu\": true}' takes them)",
            _experts_implementation(model),
        )
    if chosen or asked:
        args.liger_kernel_config = chosen | asked


def _experts_implementation(model: Any) -> str:
    """Return the name that transformers has for how a model computes its experts."""
    implementations = getattr(model, "get_experts_implementation", None)
    return "by its own choice" if implementations is None else str(implementations()[""])


def _why_not_liger(trainer: Trainer, kernels: Kernels) -> str | None:
    """Return why Liger's kernels are not chosen without a flag; None if they can be."""
    if kernels.capability is None or _LIGER not in kernels.installed:
        return f"liger-kernel {_LIGER_VERSION} or later and an NVIDIA GPU are needed"
    model: Any = trainer.model
    family = model.config.model_type
    if family not in LISTS["liger_families"]:
        return f"Liger has no kernels for {family}"
    if Strategy.of(trainer).facts.is_set_by_script:
        return "transformers itself has sharded the model"
    return why_split(trainer)


def _why_not_fused(trainer: Trainer) -> str | None:
    """Return why a Trainer needs logits, whatever its model; None if it needs only the loss."""
    args = trainer.args
    reasons = {
        "the Trainer has a compute_loss of its own": type(trainer).compute_loss
        is not Trainer.compute_loss,
        "compute_loss_func needs the logits": trainer.compute_loss_func is not None,
        "label smoothing needs the logits": args.label_smoothing_factor > 0,
        "torch.compile of the full model compiles the loss too": compiles_full_model(args),
        "fp16 scales the loss after its gradient is computed": args.fp16,
        "it was not tested with fp8": trainer.accelerator.mixed_precision == "fp8",
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return found or why_split(trainer)


def why_split(trainer: Trainer) -> str | None:
    """Return why kernels that need complete matrices and sequences cannot be used; None if the ranks have these.

    Args:
        trainer (`Trainer`): a Trainer, of which the sizes of the parallel axes are read.
    """
    shared = (
        trainer.get_tp_size() * context_parallel_size(trainer) * sequence_parallel_size(trainer)
    )
    return "ranks share sequences or matrices" if shared > 1 else None
