"""Whether a recipe compiles the layers of its model where the flags do not say.

`torch.compile` of each layer fuses the operations between matrix products, which takes 3 to 8% off a step
(`compiled_passes` in planner/frameworks.toml). What is chosen depends on the run, and on the GPU and the packages
(`Kernels`), so that a machine without a GPU can test the choice.
"""

import time
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from transformers import Trainer, TrainerCallback

from hfscale.core.logging import get_logger
from hfscale.core.versions import is_at_least
from hfscale.facts.compilation import why_not_compiled
from hfscale.islands.callback import DiLoCoCallback
from hfscale.recipe.arguments import RecipeTrainingMixin, use_regional_compilation
from hfscale.recipe.document_attention import is_flash_attention
from hfscale.recipe.kernels import Kernels, why_split
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

_FLEX_TORCH = "2.13"


def compile_layers(trainer: Trainer, kernels: Kernels) -> None:
    """Let a Trainer of the recipes compile its layers, if `--torch_compile_regional` is not given and they can be.

    What was chosen, and why, is logged on an NVIDIA GPU; elsewhere nothing is compiled. It is set in the arguments of
    the Trainer too.

    Args:
        trainer (`Trainer`): call it before `train()`.
        kernels (`Kernels`): what there is to choose from.
    """
    plugin: Any = trainer.accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO:  # else a flag or the launcher's config has asked for it
        _choose(trainer, kernels)
    if plugin.backend != DynamoBackend.NO and plugin.use_regional_compilation:
        # torch would cut the graph of a layer where a bucket of DDP is full, and then fails to compile it for another
        # number of rows (torch 2.13), or at flex attention (before). DDP sends the gradients of each layer anyway.
        torch._dynamo.config.load_config({"optimize_ddp": False})
        # accelerate launch says False where no flag asks for anything: each length would be compiled anew, and after
        # eight of them torch runs the layers uncompiled. None compiles the second length for all others.
        plugin.dynamic = plugin.dynamic or None
        is_kept = plugin.backend == DynamoBackend.INDUCTOR
        trainer.add_callback(CompilationProgress(is_kept=is_kept))


class CompilationProgress(TrainerCallback):
    """Says before the first step of a launch that it takes longer, and after it how long it took.

    Args:
        is_kept (`bool`): whether what is compiled stays in a folder for later launches.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._begun: float | None = None
        self._is_done = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say it, before the first step.

        Args:
            args (`TrainingArguments`): those of the Trainer.
            state (`TrainerState`): its state.
            control (`TrainerControl`): its control.
            kwargs (`Any`): what else Trainer passes.
        """
        if self._begun is None:
            self._begun = time.perf_counter()
            logger.info("layers: the first step compiles them, which takes longer than a step")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how long it took, after the first step.

        Args:
            args (`TrainingArguments`): those of the Trainer.
            state (`TrainerState`): its state.
            control (`TrainerControl`): its control.
            kwargs (`Any`): what else Trainer passes.
        """
        if self._is_done or self._begun is None:
            return
        self._is_done = True
        where = (
            "; later launches find what was compiled in Inductor's cache (TORCHINDUCTOR_CACHE_DIR: a folder that "
            "outlives the machine)"
        )
        seconds = time.perf_counter() - self._begun
        logger.info("layers: the first step took %.1f s%s", seconds, where if self._is_kept else "")


def _choose(trainer: Trainer, kernels: Kernels) -> None:
    """Switch the compilation of layers on where no flag says so and they can be compiled."""
    args = trainer.args
    if not isinstance(args, RecipeTrainingMixin) or kernels.capability is None:
        return
    if args.torch_compile_regional is not None or args.torch_compile:
        return
    reason = _why_not(trainer, args, kernels)
    if reason is not None:
        logger.info("layers: not compiled, because %s", reason)
        return
    use_regional_compilation(args)
    args.torch_compile_backend = "inductor"
    plugin: Any = trainer.accelerator.state.dynamo_plugin
    plugin.backend = DynamoBackend.INDUCTOR
    plugin.use_regional_compilation = True
    logger.info(
        "layers: compiled by torch.compile, one for all (--torch_compile_regional false: not compiled)"
    )


def _why_not(trainer: Trainer, args: RecipeTrainingMixin, kernels: Kernels) -> str | None:
    """Return why the layers are not compiled; None if they are."""
    strategy = Strategy.of(trainer)
    if strategy.runs_stages:
        return "pipeline stages are not"
    if not kernels.writes_kernels:
        return "Triton, a GPU for which it writes kernels, and a C compiler with the headers of Python are needed"
    run = strategy.combination()
    reason = why_split(trainer) or why_not_compiled(
        task=args.task,
        family=str(run.family),
        method="qlora" if run.quantized else "full",
        strategy=strategy.name,
        ranks_per_replica=1,
        precision=str(run.precision),
    )
    attention = _attention_of(trainer) if args.cuts_attention else None
    # What the rules do not know: each was tried and failed, or compiles again in every step.
    reasons = {
        "parameters are offloaded": run.offload == "full",
        "FlashAttention gets other lengths of documents in each batch (flex_attention would be compiled)": (
            is_flash_attention(attention)
        ),
        f"flex_attention in compiled layers was not tried with torch before {_FLEX_TORCH}": (
            attention == "flex_attention" and not is_at_least("torch", _FLEX_TORCH)
        ),
        "gradients are compressed": run.compression != "none",
        "islands exchange parameters": any(
            isinstance(c, DiLoCoCallback) for c in trainer.callback_handler.callbacks
        ),
        "Liger's kernels were asked for": args.use_liger_kernel is True,
        "noise is added to embeddings": bool(args.neftune_noise_alpha),
    }
    return reason or next((text for text, holds in reasons.items() if holds), None)


def _attention_of(trainer: Trainer) -> str | None:
    """Return the name of the attention implementation of a Trainer's model."""
    model: Any = trainer.model
    return attention_implementation(model.config)
