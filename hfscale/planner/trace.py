"""Traces one training step of a script on tensors without data: FLOPs, memory traffic, saved bytes and collectives.

    python -m hfscale.planner.trace 8 bf16 train.py ARGS

runs the script in a process of its own, which does nothing else: the changes to `transformers` below last as long as
it. Models that the script loads are made from their configs, without weights. When it calls `Trainer.train`, one
micro-batch of its own data goes forward and backward through its own model and loss, in a process group of that many
ranks that exists in this process only. The process prints the counts as JSON and ends. The approach is that of Maya
(arXiv 2503.20191), on the level of torch's operators.
"""

import json
import os
import runpy
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
import transformers.training_args
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hfscale.core.nested import tensors_in
from hfscale.core.torch_internals import FakeStore, FakeTensor, FakeTensorMode, TorchDispatchMode
from hfscale.core.versions import enable_recomputation, recomputes_activations

RESULT = "hfscale-trace: "
"""What the line with the result begins with."""
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""The operator of attention on a CPU, for which torch has no formula; its backward has `_backward` at the end."""


class StepCounter(TorchDispatchMode):
    """Counts what the operators of a step compute, move and send."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.matmul_flops = 0
        """FLOPs of matrix products and convolutions."""
        self.attention_flops = 0
        """FLOPs of attention, of all pairs of positions."""
        self.other_bytes = 0
        """Bytes that all other operators read and write."""
        self.collective_bytes = 0
        """Largest buffers of the collectives that the script itself calls."""
        self.largest_bytes = 0
        """Bytes of the largest result of an operator."""
        self.casts: set[int] = set()
        """Storages of parameters that autocast has converted."""
        self._parameters = {storage(parameter) for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        results = tensors_in(result)
        if func.namespace in ("c10d", "_c10d_functional"):
            self.collective_bytes += max(map(nbytes, inputs), default=0)
            return result
        memory = set(map(storage, inputs))
        name = func.overloadpacket.__name__
        if (func.is_view or name == "_unsafe_view") and any(
            storage(one) in memory for one in results
        ):
            return result
        if not results:
            return result  # a question about a tensor
        self.largest_bytes = max(self.largest_bytes, *map(nbytes, results), 0)
        if name == "_to_copy" and storage(inputs[0]) in self._parameters:
            self.casts.add(storage(results[0]))
        if name.startswith(ATTENTION):
            shapes = [one.shape for one in inputs]
            backward = name.endswith("_backward")
            count = (
                sdpa_backward_flop_count(*shapes[:4]) if backward else sdpa_flop_count(*shapes[:3])
            )
            self.attention_flops += count
        elif func.overloadpacket in flop_registry:
            self.matmul_flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        else:
            self.other_bytes += sum(map(nbytes, (*inputs, *results)))
        return result


def storage(tensor: torch.Tensor) -> int:
    """Return a number that tells the memory of tensors apart."""
    address: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return address


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def make_fake(model: torch.nn.Module, fake: FakeTensorMode) -> None:
    """Replace the parameters and buffers of a model by tensors without data; those that are one stay one.

    Args:
        model (`torch.nn.Module`): the model, changed in place.
        fake (`FakeTensorMode`): the mode of the new tensors.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in [
            *parameters,
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]:
            if isinstance(tensor, FakeTensor):
                continue
            if tensor not in made:
                new = fake.from_tensor(tensor.detach())
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                made[tensor] = (
                    torch.nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                )
            setattr(module, name, made[tensor])


def count_tokens(inputs: Mapping[str, torch.Tensor], *, is_seq2seq: bool) -> int | None:
    """Count the tokens of a micro-batch, those of the decoder included; None for images, speech and other inputs.

    Args:
        inputs (`Mapping[str, torch.Tensor]`): the micro-batch.
        is_seq2seq (`bool`): whether the model has an encoder and a decoder, whose labels are tokens.
    """
    embeddings = inputs.get("inputs_embeds")
    if "input_ids" in inputs:
        tokens = inputs["input_ids"].numel()
    elif embeddings is not None:
        tokens = embeddings.shape[0] * embeddings.shape[1]
    else:
        return None
    if is_seq2seq:
        of_decoder = inputs.get("decoder_input_ids", inputs.get("labels"))
        tokens += 0 if of_decoder is None else of_decoder.numel()
    return tokens


def trace_step(trainer: Any, fake: FakeTensorMode, *, precision: str) -> dict[str, Any]:
    """Trace forward and backward of one micro-batch.

    Args:
        trainer (`Trainer`): the script's.
        fake (`FakeTensorMode`): the mode that its model was made in.
        precision (`str`): `fp32`, or the format of autocast: `bf16` or `fp16`.

    Returns:
        `dict[str, Any]`: the counts of `StepCounter`; `saved_bytes` for the backward pass, of which `cast_bytes` are
            converted parameters; the number of `parameters`, `trainable_parameters`, and their `parameter_bytes` and
            `gradient_bytes`; `tokens` of the micro-batch, None where its inputs are no tokens, and `samples`;
            `grad_accum`, `optimizer` and `model`.
    """
    args = trainer.args
    model = trainer.model
    batch = next(iter(trainer.get_train_dataloader()))
    # Made by the script, with memory
    if not all(isinstance(one, FakeTensor) for one in model.parameters()):
        make_fake(model, fake)
    model.train()
    if recomputes_activations(args):
        enable_recomputation(model)
    parameters = list(model.parameters())
    trained = [one for one in parameters if one.requires_grad]
    counter = StepCounter(parameters)
    kept = {storage(one) for one in (*parameters, *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage(tensor) not in kept:
            saved.setdefault(storage(tensor), tensor)
        return tensor

    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    with fake, counter:
        inputs = {
            name: fake.from_tensor(one)
            for name, one in batch.items()
            if isinstance(one, torch.Tensor)
        }
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype=dtype, enabled=precision != "fp32"):
            loss = trainer.compute_loss(model, inputs)
        sizes = {number: tensor.untyped_storage().nbytes() for number, tensor in saved.items()}
        saved.clear()
        loss.backward()
    first = inputs.get("input_ids", next(iter(inputs.values())))
    tokens = count_tokens(
        inputs, is_seq2seq=bool(getattr(model.config, "is_encoder_decoder", False))
    )
    return {
        "matmul_flops": counter.matmul_flops,
        "attention_flops": counter.attention_flops,
        "other_bytes": counter.other_bytes,
        "collective_bytes": counter.collective_bytes,
        "largest_bytes": counter.largest_bytes,
        "saved_bytes": sum(sizes.values()),
        "cast_bytes": sum(size for number, size in sizes.items() if number in counter.casts),
        "parameters": sum(one.numel() for one in parameters),
        "trainable_parameters": sum(one.numel() for one in trained),
        "parameter_bytes": sum(map(nbytes, parameters)),
        "gradient_bytes": sum(map(nbytes, trained)),
        "tokens": tokens,
        "samples": first.shape[0],
        "grad_accum": args.gradient_accumulation_steps,
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "model": type(model).__name__,
    }


def main(ranks: int, precision: str, argv: list[str]) -> None:
    """Run a script until its `Trainer.train` has been traced, and end the process.

    Args:
        ranks (`int`): number of ranks of the process group.
        precision (`str`): `fp32`, `bf16` or `fp16`.
        argv (`list[str]`): the script and its arguments.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def without_weights(
        cls: type[Any], name: Any, /, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        if not isinstance(config, transformers.PreTrainedConfig):
            config = cls.config_class.from_pretrained(config or name)
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) else before)
        try:
            with fake:
                return cls(config)
        finally:
            torch.set_default_dtype(before)

    move = torch.nn.Module.to

    def stay(module: Any, *args: Any, **kwargs: Any) -> Any:
        is_fake = any(isinstance(one, FakeTensor) for one in module.parameters())
        return module if is_fake else move(module, *args, **kwargs)

    def traced(trainer: Any, *args: Any, **kwargs: Any) -> NoReturn:
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        sys.stdout.write(f"{RESULT}{json.dumps(trace_step(trainer, fake, precision=precision))}\n")
        sys.stdout.flush()
        os._exit(0)

    replaced = (
        (transformers.PreTrainedModel, "from_pretrained", classmethod(without_weights)),
        (transformers.Trainer, "train", traced),
        # The GPU is another machine's
        (transformers.training_args, "is_torch_bf16_gpu_available", lambda: True),
        (torch.nn.Module, "to", stay),
        (torch.nn.Module, "cuda", stay),
    )
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    with ExitStack() as patches:
        for owner, name, replacement in replaced:
            patches.enter_context(patch.object(owner, name, replacement))
        runpy.run_path(argv[0], run_name="__main__")
    sys.exit("the script ended without calling Trainer.train")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
