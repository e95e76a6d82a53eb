"""Computes the FLOPs of known models for utilization (MFU, HFU), and describes what a run does."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from hfscale.core.counts import counted
from hfscale.core.versions import allows_tf32, is_lora_layer, recomputes_activations
from hfscale.errors import UnsupportedModelError
from hfscale.facts.hardware import Dtype, match_device_name, peak_tflops
from hfscale.facts.model_shape import ModelShape
from hfscale.metrics.baseline import Workload
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.tensors import full_numel

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


@dataclass(frozen=True, kw_only=True)
class FlopsModel:
    """Computes the FLOPs per token of one training run. The formulas are in `hfscale.facts.model_shape`."""

    shape: ModelShape
    """Shape of the model."""
    lora_parameters: int | None
    """Trainable parameters on top of a frozen model; None if the whole model is trained."""
    recomputes: bool
    """Whether the backward recomputes the forward of the layers (activation checkpointing)."""

    @classmethod
    def of(
        cls, model: nn.Module, args: "TrainingArguments", *, sizes: tuple[int, int] | None = None
    ) -> "FlopsModel":
        """Read the FLOPs from a model (also one wrapped by PEFT) and its training arguments.

        Args:
            model (`torch.nn.Module`): the model, with its config.
            args (`TrainingArguments`): say whether activations are recomputed.
            sizes (`tuple[int, int]`, *optional*): total and trainable parameters of the whole model, where this rank
                holds only a part of it.

        Returns:
            `FlopsModel`: the FLOPs per token.

        Raises:
            UnsupportedModelError: the formula does not hold: the architecture is another one, or a part of the model
                is frozen in another way than by LoRA.
        """
        config = getattr(model, "config", None)
        if config is None:
            raise UnsupportedModelError(f"{type(model).__name__} has no config")
        shape = ModelShape.from_config(config.to_dict())
        parameters, trainable = sizes or count_parameters(model)
        is_peft = getattr(model, "peft_config", None) is not None
        if is_peft:
            parameters -= trainable
            _check_adapters(model)
        elif trainable != parameters:
            raise UnsupportedModelError(
                f"only {trainable:,} of {parameters:,} parameters are trained"
            )
        if parameters != shape.total_parameters:
            # This is a classifier, or a changed model under a known config: its FLOPs are not those of the shape.
            raise UnsupportedModelError(
                f"{type(model).__name__} has {parameters:,} parameters, but a {shape.model_type} language model with "
                f"its config has {shape.total_parameters:,}"
            )
        return cls(
            shape=shape,
            lora_parameters=trainable if is_peft else None,
            recomputes=recomputes_activations(args),
        )

    def model_flops_per_token(self, sequence_length: float) -> float:
        """Return the FLOPs per token that the mathematics needs: no recomputation, full attention (c = 1).

        Args:
            sequence_length (`float`): tokens per sequence.

        Raises:
            UsageError: the sequence length is not above 0.
        """
        return self.shape.flops_per_token(sequence_length, lora_parameters=self.lora_parameters)

    def hardware_flops_per_token(self, sequence_length: int) -> float:
        """Return the FLOPs per token that the hardware executes, with the second forward of recomputed layers.

        Args:
            sequence_length (`int`): tokens per sequence.

        Raises:
            UsageError: the sequence length is not above 0.
        """
        if not self.recomputes:
            return self.model_flops_per_token(sequence_length)
        return self.shape.hardware_flops_per_token(
            sequence_length, lora_parameters=self.lora_parameters
        )


def _check_adapters(model: nn.Module) -> None:
    """Raise if something besides LoRA matrices is trained, such as a new head, or a copy of the embedding."""
    matrices = set()
    for module in model.modules():
        if is_lora_layer(module):
            matrices |= set(module.lora_A.parameters())
            matrices |= set(module.lora_B.parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in matrices:
            raise UnsupportedModelError(
                f"no FLOPs formula: {name} is trained besides the LoRA adapters"
            )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the parameters of a model.

    Under ZeRO-3 the local part of a parameter is empty, and DeepSpeed keeps its full size in `ds_numel`. A weight that
    bitsandbytes has quantized to 4 bits holds two parameters in each byte.

    Args:
        model (`torch.nn.Module`): the model, wrapped or not.

    Returns:
        `tuple[int, int]`: the total and the trainable parameters.
    """
    sizes = [(_size(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def _size(parameter: nn.Parameter) -> int:
    size = full_numel(parameter)
    return size * 2 * parameter.element_size() if type(parameter).__name__ == "Params4bit" else size


def training_dtype(trainer: "Trainer") -> Dtype:
    """Return the dtype that matrix products run in.

    Accelerate's mixed precision decides, wherever it was asked for: in the training arguments, with the launcher or in
    DeepSpeed's config. Without it the weights decide: transformers loads a checkpoint in its own dtype.

    Args:
        trainer (`Trainer`): the Trainer that trains.

    Returns:
        `str`: `bf16`, `fp16`, `fp8`, `tf32` or `fp32`.
    """
    mixed_precision: Dtype | Literal["no"] = trainer.accelerator.mixed_precision
    if mixed_precision != "no":
        return mixed_precision
    parameters = model_of(trainer).parameters()
    weights = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    if weights in (torch.bfloat16, torch.float16):
        return "bf16" if weights == torch.bfloat16 else "fp16"
    return "tf32" if trainer.args.device.type == "cuda" and allows_tf32() else "fp32"


def device_peak_tflops(device: torch.device, dtype: Dtype) -> float | None:
    """Return the dense peak of the local accelerator in TFLOP/s.

    Args:
        device (`torch.device`): the device of this process.
        dtype (`str`): the dtype of matrix products: `bf16`, `fp16`, `fp8`, `tf32` or `fp32`.

    Returns:
        `float | None`: the peak; None on a CPU, and if `hardware.toml` has no peak of this device.

    Raises:
        UsageError: `dtype` is another one.
    """
    if device.type != "cuda":
        return None
    accelerator = match_device_name(torch.cuda.get_device_name(device))
    return None if accelerator is None else peak_tflops(accelerator, dtype)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU or the kind of another device.

    Args:
        device (`torch.device`): the device. The name of a CPU includes its number of threads, because its speed
            depends on them.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads = torch.get_num_threads()
    return f"cpu, {counted(threads, 'thread')}"


def describe_workload(trainer: "Trainer", *, sequence_length: int, tokens_per_gpu: int) -> Workload:
    """Describe what a run does, as far as two speeds can be compared by it.

    Args:
        trainer (`Trainer`): the Trainer that trains.
        sequence_length (`int`): tokens per sequence.
        tokens_per_gpu (`int`): tokens per GPU and optimizer step.

    Returns:
        `Workload`: the description that baselines are looked up by.
    """
    model = model_of(trainer)
    args = trainer.args
    config = getattr(model, "config", None)
    recomputes = recomputes_activations(args)
    parameters, trainable = count_parameters(model)
    return Workload(
        model_type=str(getattr(config, "model_type", type(model).__name__)),
        parameters=parameters,
        trainable_parameters=trainable,
        device=device_name(args.device),
        sequence_length=sequence_length,
        tokens_per_gpu=tokens_per_gpu,
        precision=training_dtype(trainer),
        recompute=str(getattr(args, "recompute", "full")) if recomputes else "none",
    )
