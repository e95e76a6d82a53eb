"""Weights that are wrapped as torchao wraps those of FP8 trainings are saved as what they hold, in every file."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from recipe_runs import environment_of, warm_up
from safetensors.torch import load_file
from tiny import RandomTokens, tiny_model
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only
from transformers import Trainer, default_data_collator

from hfscale import ParallelArguments, ScalingCallback
from hfscale.checkpoint.export import export
from hfscale.recipe import train
from hfscale.recipe.arguments import RecipeTrainingArguments
from hfscale.recipe.layout import set_up_parallelism
from hfscale.trainer.strategies.tensors import own_part, stored_tensor

KEEPS_ITS_WRAPPER = {
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
}
"""The operators whose result torchao 0.18 wraps again."""


class Wrapped(torch.Tensor):
    """A weight like torchao's `WeightWithDynamicFloat8CastTensor`, which needs no GPU and is not installed in CI."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, tensor.size(), strides=tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad
        )

    def __init__(self, tensor):
        self._tensor = tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda each: each._tensor, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, Wrapped, result) if func in KEEPS_ITS_WRAPPER else result

    def __tensor_flatten__(self):
        return ["_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapped(inner["_tensor"])


def wrapped_model():
    model = tiny_model()
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(Wrapped(module.weight.detach()))
    return model


def train_wrapped(folder, steps, checkpoint=None):
    args = RecipeTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        save_steps=2,
        logging_steps=1,
        dataloader_num_workers=0,
    )
    set_up_parallelism(ParallelArguments(), args)
    trainer = Trainer(
        model=wrapped_model(),
        args=args,
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback()],
    )
    train(trainer, checkpoint)
    return trainer


def save_and_resume(folder, result):
    trainer = train_wrapped(folder / "whole", 4)
    trainer.save_model(str(folder / "saved"))
    if dist.get_rank() == 0:
        shutil.copytree(folder / "whole" / "checkpoint-2", folder / "resumed" / "checkpoint-2")
    dist.barrier()
    resumed = train_wrapped(folder / "resumed", 4, str(folder / "resumed" / "checkpoint-2"))
    if dist.get_rank() == 0:
        losses = [[log["loss"] for log in each.state.log_history if "loss" in log] for each in (trainer, resumed)]
        result.write_text(json.dumps(losses))


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 1),
        ("fsdp2", 1),
        *(pytest.param(one, 2, marks=[pytest.mark.world(2), pytest.mark.long]) for one in ("ddp", "fsdp2")),
    ],
)
def test_a_training_is_saved_resumed_and_exported_without_the_wrapper(tmp_path, strategy, ranks):
    warm_up()
    result = tmp_path / "result"
    env = environment_of(strategy)
    codes = run_ranks(ranks, save_and_resume, tmp_path, result, log=tmp_path, env=env)
    assert codes == [0] * ranks, (tmp_path / "rank-0.log").read_text()[-4000:]
    whole, resumed = json.loads(result.read_text())
    assert resumed == whole
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".distcp", ".safetensors", ".pt", ".bin")]
    assert files
    assert [path for path in files if b"Wrapped" in path.read_bytes()] == []
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    manifest = json.loads((checkpoint / "hfscale_manifest.json").read_text())
    export(checkpoint, tmp_path / "exported", strategy=manifest["strategy"])
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == exported.keys()
    assert [name for name, weight in saved.items() if not torch.equal(weight, exported[name])] == []


def test_what_a_wrapper_holds_is_in_its_memory():
    weight = torch.arange(6.0).reshape(2, 3)
    held = own_part(Wrapped(weight))
    assert held is not None
    assert held.data_ptr() == weight.data_ptr()
    assert stored_tensor(weight) is weight


def test_a_wrapper_of_several_tensors_is_kept():
    quantized = TwoTensor(torch.zeros(2, 3), torch.ones(2, 3))
    assert stored_tensor(quantized) is quantized
    assert own_part(quantized) is None
