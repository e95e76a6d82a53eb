"""Weights are cast to bf16 once per optimizer step, and losses, gradients and weights stay what they were."""

import copy
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.other import compile_regions
from forked_ranks import run_ranks
from recipe_runs import environment_of, warm_up
from test_fast_defaults import recipe_arguments
from tiny import RandomTokens, tiny_model
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, default_data_collator, set_seed

from hfscale import ScalingCallback
from hfscale.recipe.fused_loss import compute_loss_in_chunks
from hfscale.recipe.weight_casts import CastOnceLinear, CastWeightsOnce, cast_weights_once
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

MICRO_BATCHES = 4
STEPS = 3


class WeightCasts(TorchDispatchMode):
    """Counts the numbers of matrices of parameters that are cast from fp32 to bf16, and the operators that do it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.where = {parameter.data_ptr() for parameter in model.parameters() if parameter.ndim == 2}
        self.numbers = 0
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            self._count([args[0]])
        if func is torch.ops.aten._foreach_copy_.default and args[0][0].dtype == torch.bfloat16:
            self._count(args[1])
        return result

    def _count(self, sources: list[torch.Tensor]) -> None:
        found = [tensor for tensor in sources if tensor.data_ptr() in self.where]
        self.numbers += sum(tensor.numel() for tensor in found)
        self.operators += bool(found)


class Gradients(TrainerCallback):
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.steps.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})


def make_trainer(
    folder: Path, *callbacks: TrainerCallback, model: Any = None, chunked: bool = False, **flags: Any
) -> Trainer:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    set_seed(0)
    model = model or tiny_model(attention_bias=True, use_cache=False)
    asked: dict[str, Any] = {"bf16": True, "max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES}
    trainer = Trainer(
        model=model,
        args=recipe_arguments(folder, **(asked | {"per_device_train_batch_size": 2} | flags)),
        train_dataset=RandomTokens(),
        eval_dataset=RandomTokens(8),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback(), *callbacks],
    )
    if chunked:
        compute_loss_in_chunks(model)
    return trainer


def train(trainer: Trainer, *, once: bool) -> tuple[WeightCasts, list[float], dict[str, torch.Tensor]]:
    """Train, and return the counted casts, the losses and the final weights."""
    model: Any = trainer.model
    counted = WeightCasts(model)
    if once:
        assert cast_weights_once(trainer) is not None
    with counted:
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == STEPS
    return counted, losses, {name: weight.clone() for name, weight in model.state_dict().items()}


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"chunked": True}),
    ({"tie_word_embeddings": True}, {"chunked": True}),
    ({}, {"activation_checkpointing": True}),
    ({}, {"torch_compile_regional": True, "torch_compile_backend": "aot_eager"}),
    ({}, {"optim": "adafactor", "eval_strategy": "steps", "eval_steps": 1}),
]


@pytest.mark.parametrize(("config", "options"), CASES)
def test_weights_are_cast_once_per_step_and_nothing_else_changes(
    config: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for once in (False, True):
        gradients = Gradients()
        model = tiny_model(attention_bias=True, use_cache=False, **config)
        trainer = make_trainer(tmp_path / str(once), gradients, model=model, **options)
        found.append((*train(trainer, once=once), gradients.steps))
    (before, losses, weights, of_steps), (after, losses_once, weights_once, of_steps_once) = found
    assert losses_once == losses
    assert weights_once.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weights_once[name], weight), name
    for step, gradients_of_step in enumerate(of_steps):
        for name, gradient in gradients_of_step.items():
            assert torch.equal(of_steps_once[step][name], gradient), (step, name)
    matrices = sum(one.weight.numel() for one in trainer.model.modules() if isinstance(one, nn.Linear))
    if "eval_steps" in options:  # an evaluation casts as before
        evaluated = before.numbers - STEPS * MICRO_BATCHES * matrices
        assert after.numbers == STEPS * matrices + evaluated
        return
    if "torch_compile_regional" not in options and "activation_checkpointing" not in options:
        assert before.numbers == STEPS * MICRO_BATCHES * matrices
    assert before.numbers >= STEPS * MICRO_BATCHES * matrices
    assert (after.numbers, after.operators) == (STEPS * matrices, STEPS)


def test_a_compiled_layer_reads_the_copies_without_a_graph_break_or_another_compilation() -> None:
    model = tiny_model(use_cache=False)
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = CastOnceLinear
    casts = CastWeightsOnce(layers)
    model.model.register_forward_pre_hook(casts.cast)
    torch._dynamo.reset()
    counters.clear()
    compiled = compile_regions(model, backend="aot_eager", fullgraph=True).train()
    rows = torch.randint(3, 60, (2, 16))
    graphs = []
    for _ in range(3):
        casts.on_step_begin(None, None, None)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = compiled(input_ids=rows, labels=rows).loss
            loss.backward()
            graphs.append(counters["stats"]["unique_graphs"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
    assert set(graphs) == {graphs[0]}
    assert graphs[0] > 0
    assert not counters["graph_break"]
    assert casts.casts == 3


class Writes(TrainerCallback):
    """Writes a weight between two micro-batches."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)


def test_a_weight_that_is_written_between_two_micro_batches_is_cast_again(tmp_path: Path) -> None:
    (_, losses, weights), (_, losses_once, weights_once) = (
        train(make_trainer(tmp_path / str(once), Writes()), once=once) for once in (False, True)
    )
    assert losses_once == losses
    assert all(torch.equal(weights_once[name], weight) for name, weight in weights.items())


def test_a_copy_of_the_model_has_copies_of_its_own(tmp_path: Path) -> None:
    model = tiny_model(use_cache=False)
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = CastOnceLinear
    casts = CastWeightsOnce(layers)
    casts.cast(model, ())
    assert model.lm_head.weight_copy.tensor is not None
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert other.lm_head.weight_copy.tensor is None
    casts.on_train_end(None, None, None)
    assert model.lm_head.weight_copy.tensor is None


def test_after_the_training_the_model_is_as_any_other(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    model: Any = trainer.model
    hooks = len(model.model._forward_pre_hooks)
    train(trainer, once=True)
    assert len(model.model._forward_pre_hooks) == hooks
    layers = [module for module in model.modules() if isinstance(module, CastOnceLinear)]
    assert layers
    assert all(layer.weight_copy.tensor is None for layer in layers)
    rows = torch.randint(3, 60, (1, 8))
    with torch.autocast("cpu", torch.bfloat16):
        model.train()(input_ids=rows, labels=rows).loss.backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("flags", [{"bf16": False}, {"gradient_accumulation_steps": 1}, {"torch_compile": True}])
def test_nothing_is_changed_where_there_is_nothing_to_save(flags: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **flags)
    assert cast_weights_once(trainer) is None
    assert not any(isinstance(module, CastOnceLinear) for module in trainer.model.modules())


def test_frozen_and_16_bit_weights_are_left_alone(tmp_path: Path) -> None:
    model = tiny_model(use_cache=False)
    model.lm_head.weight.requires_grad_(False)
    model.model.layers[0].to(torch.bfloat16)
    trainer = make_trainer(tmp_path, model=model)
    assert cast_weights_once(trainer) is not None
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert type(model.model.layers[1].mlp.up_proj) is CastOnceLinear


def make_recipe_trainer(folder: Path) -> Trainer:
    set_seed(0)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": MICRO_BATCHES}
    arguments = recipe_arguments(folder, bf16=True, max_steps=STEPS, **sizes)
    if "ACCELERATE_USE_FSDP" in os.environ:
        let_fsdp_run_on_cpu()
    return Trainer(
        model=tiny_model(use_cache=False),
        args=arguments,
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[ScalingCallback()],
    )


def train_twice(folder: Path, result: Path) -> None:
    """Train without and with one cast per step on this rank, and write on rank 0 what was logged."""
    found = []
    for once in (False, True):
        trainer = make_recipe_trainer(folder / str(once))
        if once:
            casts = cast_weights_once(trainer)
        trainer.train()
        found.append([[row["loss"], row["grad_norm"]] for row in trainer.state.log_history if "loss" in row])
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        result.write_text(json.dumps([casts and casts.casts, *found]))


def look_at_strategy(folder: Path, result: Path) -> None:
    """Write on rank 0 whether the layers of a model are changed."""
    trainer = make_recipe_trainer(folder)
    cast_weights_once(trainer)
    if torch.distributed.get_rank() == 0:
        is_changed = any(type(module) is CastOnceLinear for module in trainer.model.modules())
        result.write_text(json.dumps(is_changed))


@pytest.mark.recipes
@pytest.mark.world(2)
def test_under_ddp_losses_and_norms_stay(tmp_path: Path) -> None:
    warm_up()
    result = tmp_path / "result"
    codes = run_ranks(2, train_twice, tmp_path, result, log=tmp_path, env=environment_of("ddp"))
    assert codes == [0, 0], (tmp_path / "rank-0.log").read_text()[-4000:]
    casts, before, after = json.loads(result.read_text())
    assert casts == STEPS
    assert len(before) == STEPS
    assert after == before


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(("strategy", "is_changed"), [("ddp", True), ("fsdp2", False), ("zero1", False)])
def test_sharded_weights_are_left_alone(strategy: str, is_changed: bool, tmp_path: Path) -> None:
    warm_up()
    result = tmp_path / "result"
    run_ranks(2, look_at_strategy, tmp_path, result, log=tmp_path, env=environment_of(strategy))
    assert json.loads(result.read_text()) is is_changed
