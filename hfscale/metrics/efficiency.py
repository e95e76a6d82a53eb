"""Model and hardware FLOPs utilisation, from a model's shape and the accelerator's peak."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hfscale.errors import UnsupportedModelError
from hfscale.facts.hardware import match_device_name, peak_tflops
from hfscale.facts.model_shape import ModelShape
from hfscale.metrics.baseline import Workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments


@dataclass(frozen=True, kw_only=True)
class FlopsModel:
    """FLOPs per token of one training run; formulas in `hfscale.facts.model_shape`."""

    shape: ModelShape
    """The model."""
    lora_parameters: int | None
    """Trainable parameters on top of a frozen model; None when all of it is trained."""
    recomputes: bool
    """Whether the layers' forward is computed again in the backward (activation checkpointing)."""

    @classmethod
    def of(cls, model: "PreTrainedModel", args: "TrainingArguments") -> "FlopsModel":
        """Read a model (also one wrapped by peft) and its training arguments.

        Raises:
            UnsupportedModelError: an architecture whose FLOPs hfscale cannot count.
        """
        config = getattr(model, "config", None)
        if config is None:
            raise UnsupportedModelError(f"{type(model).__name__} has no config: its FLOPs cannot be counted")
        shape = ModelShape.from_config(config.to_dict())
        is_peft = getattr(model, "peft_config", None) is not None
        parameters = sum(_numel(p) for p in model.parameters())
        if not is_peft and parameters != shape.total_parameters:
            # A classifier or a changed model under a known config: whatever its FLOPs are, they are not the shape's.
            raise UnsupportedModelError(
                f"{type(model).__name__} has {parameters:,} parameters, a {shape.model_type} language model of its "
                f"config {shape.total_parameters:,}: its FLOPs cannot be counted"
            )
        trainable = sum(_numel(p) for p in model.parameters() if p.requires_grad)
        return cls(
            shape=shape,
            lora_parameters=trainable if is_peft else None,
            recomputes=bool(args.activation_checkpointing or args.gradient_checkpointing),
        )

    def model_flops_per_token(self, sequence_length: int) -> float:
        """What the mathematics needs: no recomputation, full attention (c = 1)."""
        return self.shape.flops_per_token(sequence_length, lora_parameters=self.lora_parameters)

    def hardware_flops_per_token(self, sequence_length: int) -> float:
        """What the hardware executes: with the layers' second forward where activations are recomputed."""
        if not self.recomputes:
            return self.model_flops_per_token(sequence_length)
        return self.shape.hardware_flops_per_token(sequence_length, lora_parameters=self.lora_parameters)


def training_dtype(model: torch.nn.Module, args: "TrainingArguments") -> str:
    """The dtype matrix products run in: `bf16`, `fp16`, `tf32` or `fp32`.

    Autocast decides where it is on; without it the weights do, and transformers loads a checkpoint in its own dtype.
    """
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if weights in (torch.bfloat16, torch.float16):
        return "bf16" if weights == torch.bfloat16 else "fp16"
    return "tf32" if args.tf32 else "fp32"


def device_peak_tflops(device: torch.device, dtype: str) -> float | None:
    """Dense peak of the accelerator at hand in TFLOP/s, or None where it is not in hardware.toml."""
    if device.type != "cuda":
        return None
    accelerator = match_device_name(torch.cuda.get_device_name(device))
    return None if accelerator is None else peak_tflops(accelerator, dtype)


def describe_workload(
    model: torch.nn.Module, args: "TrainingArguments", *, sequence_length: int, tokens_per_gpu: int
) -> Workload:
    """What a run does, as far as two speeds can be compared by it."""
    config = getattr(model, "config", None)
    recomputes = bool(args.activation_checkpointing or args.gradient_checkpointing)
    return Workload(
        model_type=str(getattr(config, "model_type", type(model).__name__)),
        parameters=sum(_numel(p) for p in model.parameters()),
        trainable_parameters=sum(_numel(p) for p in model.parameters() if p.requires_grad),
        device=device_name(args.device),
        sequence_length=sequence_length,
        tokens_per_gpu=tokens_per_gpu,
        precision=training_dtype(model, args),
        recompute=str(getattr(args, "recompute", "full")) if recomputes else "none",
    )


def device_name(device: torch.device) -> str:
    """What kind of device it is; for a CPU how many threads of it, on which its speed depends."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}" if device.type == "cpu" else device.type


def _numel(parameter: torch.nn.Parameter) -> int:
    """Elements of the whole parameter; under ZeRO-3 the local part is empty and DeepSpeed keeps the number."""
    return getattr(parameter, "ds_numel", parameter.numel())
