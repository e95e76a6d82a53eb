"""Muon: the steps of torch.optim.Muon and AdamW, whole and sharded."""

import pytest
import torch
from forked_ranks import run_ranks
from tiny import tiny_model, tiny_trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from hfscale import LRScalingCallback, ScalingCallback
from hfscale.errors import ParameterError, UsageError
from hfscale.facts.model_shape import ModelShape
from hfscale.optim.muon import Muon, hidden_matrices
from hfscale.optim.newton_schulz import orthogonal_factor, orthogonal_factors
from hfscale.planner.throughput import MUON_ITERATIONS

BF16 = torch.bfloat16


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 4, bias=False))


def step_twice(net, *optimizers):
    for step in range(2):
        loss = net(torch.arange(7).roll(step)).square().sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_the_steps_are_those_of_torchs_muon_and_adamw(adjust_lr):
    net = small_net()
    options = {"lr": 1e-2, "weight_decay": 0.1}
    matrices = [net[1].weight, net[3].weight]
    others = [net[0].weight, net[1].bias, *net[2].parameters()]
    expected = step_twice(
        net, torch.optim.Muon(matrices, adjust_lr_fn=adjust_lr, **options), torch.optim.AdamW(others, **options)
    )
    net = small_net()
    found = step_twice(net, Muon(net.parameters(), module=net, adjust_lr=adjust_lr, **options))
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def test_embeddings_output_head_and_vectors_are_left_to_adamw():
    model = tiny_model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [names[id(parameter)] for parameter in hidden_matrices(model)]
    assert len(found) == 7 * model.config.num_hidden_layers
    assert all(name.startswith("model.layers.") and "norm" not in name for name in found)


def test_transposed_layers_are_matrices():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=16))
    assert len(hidden_matrices(model)) == 4  # attention in and out, MLP in and out; neither wte nor wpe


def test_frozen_parameters_are_left_alone():
    model = tiny_model()
    for layer in model.model.layers:
        layer.requires_grad_(False)
    with pytest.raises(UsageError, match="none of them is trained"):
        Muon([p for p in model.parameters() if p.requires_grad], module=model)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"iterations": 0}, "iterations is 0"),
        ({"adjust_lr": "no"}, "adjust_lr is 'no'"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
    ],
)
def test_bad_options_are_one_line(options, text):
    net = small_net()
    with pytest.raises(ParameterError, match=text):
        Muon(net.parameters(), module=net, **options)


def test_a_loaded_state_continues_exactly():
    net = small_net()
    expected = step_twice(net, *[Muon(net.parameters(), module=net, lr=1e-2)] * 2)
    net = small_net()
    optimizer = Muon(net.parameters(), module=net, lr=1e-2)
    step = torch.arange(7)
    for turn in range(2):
        net(step.roll(turn)).square().sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        optimizer = Muon(net.parameters(), module=net, lr=1e-2)
        optimizer.load_state_dict(state)
        optimizer.step()
        net.zero_grad()
    assert all(torch.equal(x, y) for x, y in zip(expected, net.parameters(), strict=True))


def test_the_singular_values_of_a_factor_are_near_one():
    torch.manual_seed(0)
    factor = orthogonal_factor(torch.randn(3, 12, 30), iterations=5, dtype=torch.float32)
    values = torch.linalg.svdvals(factor)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_plain_trainer_resumes_exactly_and_its_rate_is_scaled(tmp_path):
    def train(folder, steps, **options):
        model = tiny_model()
        trainer = tiny_trainer(
            folder,
            ScalingCallback(lr_scaling=LRScalingCallback(base_global_batch_size=1)),
            model=model,
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
            lr_scheduler_type="constant",
        )
        trainer.optimizer_cls_and_kwargs = (Muon, {"module": model, "lr": 1e-3})
        trainer.train(**options)
        return trainer

    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "out", 2)
    resumed = train(tmp_path / "out", 4, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for x, y in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(x, y)
    batch = whole.args.per_device_train_batch_size
    assert whole.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * batch**0.5)


def test_the_planner_counts_the_products_of_the_iterations():
    model = tiny_model()
    with FlopCounterMode(display=False) as counter:
        for matrix in hidden_matrices(model):
            orthogonal_factor(matrix.detach(), iterations=MUON_ITERATIONS, dtype=BF16)
    shape = ModelShape.from_config(model.config.to_dict())
    assert counter.get_total_flops() == MUON_ITERATIONS * shape.newton_schulz_flops


def check_shards(shape, placements):
    """Compare the parts of sharded factors with the same parts of whole ones, bit by bit."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    sizes = [(9, 4), (4, 9), (1, 5), (7, 7), (6, 3), (5, 8, 6)]  # uneven; some ranks hold no row
    whole = [torch.randn(size) for size in sizes]
    placed = [[Shard(p) if isinstance(p, int) else Replicate() for p in placements] for _ in sizes]
    sharded = [distribute_tensor(w, mesh, p, src_data_rank=None) for w, p in zip(whole, placed, strict=True)]
    found = orthogonal_factors([whole[0], *sharded], iterations=5, dtype=BF16)
    factors = [orthogonal_factor(w, iterations=5, dtype=BF16) for w in whole]
    assert torch.equal(found[0], factors[0])
    for factor, part, p in zip(factors, found[1:], placed, strict=True):
        assert torch.equal(distribute_tensor(factor, mesh, p, src_data_rank=None).to_local(), part)


@pytest.mark.parametrize(
    ("shape", "placements"),
    [((2,), [0]), ((3,), [0]), ((2,), [1]), ((2, 2), [None, 0]), ((2, 2), [0, 1]), ((2, 1), [0, 1]), ((2, 2), [0, 0])],
)
def test_parts_of_sharded_factors_equal_those_of_whole_ones(tmp_path, shape, placements):
    ranks = torch.Size(shape).numel()
    codes = run_ranks(ranks, check_shards, shape, placements, log=tmp_path)
    assert codes == [0] * ranks, "\n".join(path.read_text()[-3000:] for path in tmp_path.iterdir())


def test_whole_tensors_need_no_process_group():
    assert not isinstance(orthogonal_factors([torch.ones(2, 3)], iterations=5, dtype=BF16)[0], DTensor)
