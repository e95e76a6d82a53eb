"""Parts of a model that read images or sound: recipes that train on text keep them as they were loaded."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfscale.core.logging import get_logger
from hfscale.errors import UnsupportedModelError
from hfscale.recipe.fused_loss import loss_takes_number_of_tokens

logger = get_logger(__name__)


def parts_beside_text(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules of an image-text model that text does not pass, such as `model.vision_tower`.

    Args:
        model (`PreTrainedModel`): any model; one of text alone has no such modules. Of a module and those that it
            contains the outer one is named.
    """
    if model.config.get_text_config() is model.config:
        return []
    read = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    used = {id(weight) for module in read if module is not None for weight in module.parameters()}
    parts: list[str] = []
    # Modules come before those that they contain, so that the largest part is found first.
    for name, module in model.named_modules():
        weights = [id(weight) for weight in module.parameters()]
        is_inside = any(name.startswith(f"{part}.") for part in parts)
        if weights and used.isdisjoint(weights) and not is_inside:
            parts.append(name)
    return parts


def freeze_beside_text(model: PreTrainedModel) -> None:
    """Freeze the parts that text does not pass: they get no gradients, for which DDP would wait.

    Args:
        model (`PreTrainedModel`): the model, before adapters are added.
    """
    parts = parts_beside_text(model)
    for name in parts:
        model.get_submodule(name).requires_grad_(False)
    if parts:
        logger.info("kept as loaded, since text does not pass them: %s", ", ".join(parts))


def parts_that_read_images(
    model: PreTrainedModel,
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of the vision tower, and the others that text does not pass, which are the projector's.

    Args:
        model (`PreTrainedModel`): a model that reads images, before adapters are added.

    Raises:
        UnsupportedModelError: transformers knows no vision tower of the model, or the model reads sound too.
    """
    tower = model.get_encoder(modality="image")
    family = model.config.model_type
    if tower is model:
        raise UnsupportedModelError(
            f"{family} has no vision tower that transformers knows (get_encoder): use a model such as LLaVA, "
            "Qwen2.5-VL, Gemma 3 or SmolVLM"
        )
    if model.get_encoder(modality="audio") is not model:
        raise UnsupportedModelError(
            f"{family} reads sound too, which was not tested: use a model that reads images and text"
        )
    read = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    of_text = {
        id(weight) for module in read if module is not None for weight in module.parameters()
    }
    of_tower = list(tower.parameters())
    known = of_text | {id(weight) for weight in of_tower}
    return of_tower, [weight for weight in model.parameters() if id(weight) not in known]


def compute_without_gradients(module: nn.Module) -> None:
    """Have a frozen module compute its outputs without a graph.

    With activation checkpointing transformers (5.23, `enable_input_require_grads`) has the inputs of every part of a
    model require gradients. A frozen tower would then be computed again in the backward pass, for gradients that
    nobody reads, and keep its activations until then.

    Args:
        module (`nn.Module`): a module whose parameters are all frozen, and whose inputs need no gradients.
    """
    before: list[bool] = []

    def switch_off(_: nn.Module, inputs: Any) -> None:
        before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(False)

    def switch_on(_: nn.Module, inputs: Any, outputs: Any) -> None:
        torch.set_grad_enabled(before.pop())

    module.register_forward_pre_hook(switch_off)
    module.register_forward_hook(switch_on, always_call=True)


def weigh_tokens_equally(model: PreTrainedModel) -> None:
    """Let Trainer divide the loss of an image-text model by the tokens of all ranks and micro-batches of a step.

    Gemma 4 and others say that they do not take this number (`accepts_loss_kwargs = False`), because some such models
    leave out labels, of images for example. Trainer then averages the means of the micro-batches, in which a token of
    a short micro-batch has a larger weight. Trained on text they compute the loss of all labels, as any other model.

    Args:
        model (`PreTrainedModel`): the model, before a Trainer is made; one whose class takes the number, or that does
            not divide its loss by it, stays as it is.
    """
    if getattr(model, "accepts_loss_kwargs", True) or not loss_takes_number_of_tokens(model):
        return
    model.accepts_loss_kwargs = True  # type: ignore[assignment]  # of the class; the Trainer asks the model
    logger.info("every token of a step has the same weight in the loss, as in models of text alone")
