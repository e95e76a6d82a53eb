"""Whether a recipe compiles the layers of its model where the flags do not say.

`torch.compile` of each layer fuses the operations between matrix products, which takes 3 to 8% off a step
(`compiled_passes` in planner/frameworks.toml). What is chosen depends on the run, and on the GPU and the packages
(`Kernels`), so that a machine without a GPU can test the choice.
"""

from typing import Any

from accelerate.utils import DynamoBackend
from transformers import Trainer

from hfscale.core.logging import get_logger
from hfscale.facts.compilation import why_not_compiled
from hfscale.islands.callback import DiLoCoCallback
from hfscale.recipe.arguments import (
    RecipeTrainingArguments,
    RecipeTrainingMixin,
    use_regional_compilation,
)
from hfscale.recipe.kernels import Kernels, why_split
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

_VOLTA = (7, 0)
"""Compute capability of the oldest GPUs that Triton writes kernels for."""


def compile_layers(trainer: Trainer, kernels: Kernels) -> None:
    """Let a Trainer of the recipes compile its layers, if `--torch_compile_regional` is not given and they can be.

    What was chosen, and why, is logged on an NVIDIA GPU; elsewhere nothing is compiled. It is set in the arguments of
    the Trainer too.

    Args:
        trainer (`Trainer`): call it before `train()`.
        kernels (`Kernels`): what there is to choose from.
    """
    args = trainer.args
    if not isinstance(args, RecipeTrainingMixin) or kernels.capability is None:
        return
    plugin: Any = trainer.accelerator.state.dynamo_plugin
    is_decided = args.torch_compile_regional is not None or args.torch_compile
    if is_decided or plugin.backend != DynamoBackend.NO:  # the launcher's config can ask for it too
        return
    reason = _why_not(trainer, args, kernels)
    if reason is not None:
        logger.info("layers: not compiled, because %s", reason)
        return
    use_regional_compilation(args)
    args.torch_compile_backend = "inductor"
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
    if kernels.capability is None or kernels.capability < _VOLTA or not kernels.can_compile:
        return "Triton, a GPU for which it writes kernels, and a C compiler with the headers of Python are needed"
    run = strategy.combination()
    reason = why_split(trainer) or why_not_compiled(
        task="text" if isinstance(args, RecipeTrainingArguments) else "trl",
        family=str(run.family),
        method="qlora" if run.quantized else "full",
        strategy=strategy.name,
        ranks_per_replica=1,
        precision=str(run.precision),
    )
    # What the rules do not know: each was tried and failed, or compiles again in every step.
    reasons = {
        "parameters are offloaded": run.offload == "full",
        "attention is cut between packed documents": args.cuts_attention,
        "gradients are compressed": run.compression != "none",
        "islands exchange parameters": any(
            isinstance(c, DiLoCoCallback) for c in trainer.callback_handler.callbacks
        ),
        "Liger's kernels were asked for": args.use_liger_kernel is True,
        "noise is added to embeddings": bool(args.neftune_noise_alpha),
    }
    return reason or next((text for text, holds in reasons.items() if holds), None)
