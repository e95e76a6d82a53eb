"""1-bit Adam and LAMB: the exchange of signs, the optimizer around it, and training with it on several processes."""

import hashlib
import json
import math

import pytest
import torch
import torch.distributed as dist
from conftest import RECIPE
from forked_ranks import run_ranks
from tiny import logged, tiny_model, tiny_trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from transformers import TrainerCallback

from hfscale.core.collectives import TRAINING
from hfscale.core.distributed import last_barrier
from hfscale.recipe import onebit, sign_mean
from hfscale.recipe.compression import compress_gradients
from hfscale.recipe.onebit import OneBitAdam, OneBitLamb, WarmUp, leave_or_average
from hfscale.recipe.sign_mean import BLOCK, SignMean

pytestmark = pytest.mark.world(4)
CPU = torch.device("cpu")


def in_ranks(world_size, function, tmp_path):
    """Call a function in forked ranks of one process group over gloo."""

    def rank():
        dist.init_process_group("gloo")
        function()
        last_barrier()

    codes = run_ranks(world_size, rank, log=tmp_path / "log")
    assert codes == [0] * world_size, (tmp_path / "log" / "rank-0.log").read_text()[-3000:]


def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def random_vector(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + dist.get_rank()))


class TestSignMean:
    @pytest.mark.parametrize(
        ("world_size", "size"),
        [(2, 1), (2, 7), (2, 5 * BLOCK), (4, 3 * BLOCK + 5), pytest.param(4, 9000, marks=pytest.mark.long)],
    )
    def test_what_is_not_sent_is_kept(self, tmp_path, world_size, size):
        """The results so far, and the errors of all ranks, are together the exact averages so far."""

        def check():
            mean = SignMean(size, CPU)
            sent, exact = torch.zeros(size), torch.zeros(size)
            for seed in range(20):
                values = random_vector(size, seed)
                result = mean(values)
                sent += result
                exact += gathered(values).mean(dim=0)
                assert len(gathered(result).unique(dim=0)) == 1
            worker = gathered(mean._worker_error.view(-1)).mean(dim=0)
            server = gathered(mean._server_error.view(-1)).view(-1)
            torch.testing.assert_close(sent + (worker + server)[:size], exact, atol=1e-4, rtol=0)

        in_ranks(world_size, check, tmp_path)

    def test_the_average_of_repeated_results_approaches_the_exact_one(self, tmp_path):
        def check():
            values = random_vector(9000)
            exact = gathered(values).mean(dim=0)
            mean = SignMean(9000, CPU)
            results = torch.stack([mean(values) for _ in range(64)])
            errors = [float((results[:calls].mean(dim=0) - exact).norm() / exact.norm()) for calls in (1, 4, 16, 64)]
            assert errors[0] > 0.5
            assert errors[3] < 0.15
            assert errors == sorted(errors, reverse=True)

        in_ranks(4, check, tmp_path)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_about_two_bits_per_element_are_handed_to_the_collectives(self, tmp_path, monkeypatch, world_size):
        def check():
            given = []
            for name in ("all_to_all_single", "all_gather"):
                original = getattr(dist, name)

                def count(output, tensor, original=original):
                    given.append(tensor.numel() * tensor.element_size())
                    return original(output, tensor)

                monkeypatch.setattr(sign_mean.dist, name, count)
            size = 64 * BLOCK
            SignMean(size, CPU)(random_vector(size))
            to_all, by_all = given
            sent_bits = 8 * (to_all + world_size * by_all) / size  # every rank sends its part to all
            assert sent_bits == pytest.approx(2 + 2 * 32 / BLOCK)
            assert sent_bits < 2.1

        in_ranks(world_size, check, tmp_path)

    def test_nan_on_one_rank_reaches_all(self, tmp_path):
        def check():
            values = random_vector(5000)
            if dist.get_rank() == 1:
                values[3000] = math.nan
            assert SignMean(5000, CPU)(values)[3000].isnan()

        in_ranks(2, check, tmp_path)


class ExactMean:
    """In the place of `SignMean`: the exact average."""

    def __init__(self, size, device):
        self.size = size

    def __call__(self, values):
        assert values.shape == (self.size,)
        return gathered(values).mean(dim=0)


class Layers(nn.Module):
    """A model with two groups of weight decay, a frozen parameter, and a layer that some steps leave out."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 30, dtype=dtype)
        self.frozen = nn.Linear(30, 30, dtype=dtype).requires_grad_(False)
        self.optional = nn.Linear(30, 30, dtype=dtype)
        self.last = nn.Linear(30, 50, bias=False, dtype=dtype)

    def forward(self, x, uses_optional):
        x = self.frozen(torch.tanh(self.first(x)))
        if uses_optional:
            x = self.optional(x)
        return self.last(torch.tanh(x))

    def groups(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ]


OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8}


class Training:
    """Trains `Layers` under DDP on batches of its own on each rank.

    Args:
        make (`Callable`): makes the optimizer, from the groups and a `WarmUp`.
        warm_up (`int`): its length.
        left_out (`Container`): steps, counted from 1, without the optional layer.
    """

    def __init__(self, make, *, warm_up=3, left_out=(), dtype=torch.float32, accumulation=1):
        self.model = Layers(dtype)
        self.warm_up = WarmUp(length=warm_up)
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=bool(left_out))
        self.ddp.register_comm_hook(self.warm_up, leave_or_average)
        self.optimizer = make(self.model.groups(), self.warm_up)
        self.left_out = left_out
        self.accumulation = accumulation
        self.dtype = dtype
        self.steps = 0

    def step(self):
        self.steps += 1
        self.optimizer.zero_grad()
        for part in range(self.accumulation):
            x = random_vector(8 * 40, 100 * self.steps + part).view(8, 40).to(self.dtype)
            self.ddp.require_backward_grad_sync = part == self.accumulation - 1
            loss = (self.ddp(x, self.steps not in self.left_out) - x.float().sum(dim=1, keepdim=True).sin()).square()
            loss.mean().backward()
        self.optimizer.step()

    def weights(self):
        return torch.cat([p.detach().flatten().float() for p in self.model.parameters()])

    def run(self, steps):
        for _ in range(steps):
            self.step()
            assert len(gathered(self.weights()).unique(dim=0)) == 1, f"the ranks differ after step {self.steps}"
        return self.weights()


def one_bit(kind=OneBitAdam, **options):
    return lambda groups, warm_up: kind(groups, warm_up=warm_up, **OPTIONS | options)


class FrozenAdamW(AdamW):
    """AdamW whose variance, with its bias corrected, stays as it is after `frozen_after` steps."""

    frozen_after = 3

    @torch.no_grad()
    def step(self, closure=None):
        variances = {p: self.variance(p) for p, state in self.state.items() if state["step"] >= self.frozen_after}
        super().step(closure)
        for p, frozen in variances.items():  # as if the step had been taken with the frozen variance
            group = next(group for group in self.param_groups if any(p is q for q in group["params"]))
            t = int(self.state[p]["step"])
            moment = self.state[p]["exp_avg"] / (1 - group["betas"][0] ** t)
            moved = moment / (self.variance(p).sqrt() + group["eps"])
            p.add_(moved - moment / (frozen.sqrt() + group["eps"]), alpha=group["lr"])
            self.state[p]["exp_avg_sq"].copy_(frozen * (1 - group["betas"][1] ** t))

    def variance(self, p):
        return self.state[p]["exp_avg_sq"] / (1 - self.defaults["betas"][1] ** int(self.state[p]["step"]))


class TestOptimizer:
    def test_the_warm_up_is_adamw_bit_by_bit(self, tmp_path):
        def check():
            plain = Training(lambda groups, _: AdamW(groups, **OPTIONS), warm_up=100)
            found = Training(one_bit(), warm_up=6)
            assert torch.equal(plain.run(6), found.run(6))

        in_ranks(2, check, tmp_path)

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_with_an_exact_mean_it_is_adamw_with_a_frozen_variance(self, tmp_path, monkeypatch, accumulation):
        monkeypatch.setattr(onebit, "SignMean", ExactMean)

        def check():
            wide = OPTIONS | {"betas": (0.9, 1 - 1e-8)}  # with which no element reaches Adam's limit
            plain = Training(lambda groups, _: FrozenAdamW(groups, **wide), warm_up=100, accumulation=accumulation)
            found = Training(one_bit(**wide), warm_up=3, accumulation=accumulation)
            torch.testing.assert_close(found.run(12), plain.run(12), atol=1e-5, rtol=0)
            adamw = Training(one_bit(**wide), warm_up=100, accumulation=accumulation)
            assert not torch.allclose(adamw.run(12), plain.weights(), atol=1e-3)
            for p, q in zip(trained(found), trained(plain), strict=True):
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    expected = plain.optimizer.state[q][key]
                    torch.testing.assert_close(found.optimizer.state[p][key], expected, atol=1e-5, rtol=1e-4)

        in_ranks(2, check, tmp_path)

    @pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
    @pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
    def test_the_ranks_have_the_same_weights_after_each_step(self, tmp_path, kind, dtype):
        def check():
            training = Training(one_bit(kind), left_out=(2, 5, 6, 9), dtype=dtype)
            before = training.model.frozen.weight.clone()
            assert training.run(10).isfinite().all()
            assert torch.equal(training.model.frozen.weight, before)
            assert training.model.frozen.weight not in training.optimizer.state

        in_ranks(4, check, tmp_path)

    @pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
    def test_a_first_gradient_after_the_warm_up_is_no_jump(self, tmp_path, kind):
        def check():
            training = Training(one_bit(kind, lr=1e-3), left_out=(1, 2, 3, 4))
            training.run(4)
            assert training.model.optional.weight not in training.optimizer.state
            before = training.model.optional.weight.clone()
            training.run(3)
            moved = (training.model.optional.weight - before).abs().max()
            assert 0 < moved < 3 * 1e-3 * 10  # (1 - 0.9) / sqrt(1 - 0.99) = 1 times lr and LAMB's largest trust ratio

        in_ranks(2, check, tmp_path)

    def test_the_states_are_those_of_adamw(self, tmp_path):
        """AdamW continues from the states of 1-bit Adam and the reverse, on the same variance."""

        def check():
            training = Training(one_bit())
            training.run(3)
            variances = [state["exp_avg_sq"] / (1 - 0.99**3) for state in training.optimizer.state.values()]
            training.run(20)
            plain = AdamW(training.model.groups(), **OPTIONS)
            plain.load_state_dict(training.optimizer.state_dict())
            for state, variance in zip(plain.state.values(), variances, strict=True):
                assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
                torch.testing.assert_close(state["exp_avg_sq"] / (1 - 0.99 ** int(state["step"])), variance)
            again = Training(one_bit(), warm_up=30)
            again.optimizer.load_state_dict(plain.state_dict())
            assert again.warm_up.steps == 23
            assert not again.warm_up.is_over

        in_ranks(2, check, tmp_path)

    def test_the_warm_up_of_lamb_is_lamb(self, tmp_path):
        """One step of the algorithm in arXiv 1904.00962, computed by hand."""

        def check():
            training = Training(one_bit(OneBitLamb), warm_up=100)
            training.run(2)
            before = {p: (p.detach().clone(), cloned(training.optimizer.state[p])) for p in trained(training)}
            training.run(1)
            for p, (weight, state) in before.items():
                decay = 0.1 if p.ndim > 1 else 0.0
                m = 0.9 * state["exp_avg"] + 0.1 * p.grad
                v = 0.99 * state["exp_avg_sq"] + 0.01 * p.grad**2
                update = m / (1 - 0.9**3) / ((v / (1 - 0.99**3)).sqrt() + 1e-8) + decay * weight
                ratio = (weight.norm() / update.norm()).clamp(0.01, 10)
                torch.testing.assert_close(p.detach(), weight - 3e-3 * ratio * update, atol=1e-6, rtol=1e-5)

        in_ranks(2, check, tmp_path)


def trained(training):
    return [p for p in training.model.parameters() if p.requires_grad]


def cloned(state):
    return {name: value.clone() for name, value in state.items()}


def weights_hash(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


class EqualRanks(TrainerCallback):
    """Fails if the ranks have different weights after a step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        assert len(set(TRAINING.gather("weights", weights_hash(model)))) == 1, state.global_step


def train(folder, method, *, start_step=20, resume=None, **options):
    """Train the small Llama, and return the Trainer."""
    settings = {"max_steps": 100, "learning_rate": 3e-3, "per_device_train_batch_size": 2, "optim": "adamw_torch"}
    trainer = tiny_trainer(folder, EqualRanks(), model=tiny_model(), **settings | options)
    compress_gradients(trainer, method, powersgd_rank=1, topk_fraction=0.1, start_step=start_step)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.recipes
class TestTraining:
    @pytest.mark.parametrize(("world_size", "accumulation"), [(2, 2), (4, 1)])
    def test_the_loss_stays_close_to_that_without_compression(self, tmp_path, world_size, accumulation):
        def check():
            options = {"gradient_accumulation_steps": accumulation}
            plain = logged(train(tmp_path / "plain", "none", **options), "loss")
            found = logged(train(tmp_path / "found", "onebit_adam", **options), "loss")
            assert found[:21] == plain[:21]  # the loss of step 21 is that of the weights after step 20
            assert found[21:] != plain[21:]
            gaps = [abs(a - b) for a, b in zip(found[80:], plain[80:], strict=True)]
            assert sum(gaps) / len(gaps) < 0.1 * (plain[0] - plain[-1])

        run_in_ranks(world_size, check, tmp_path)

    def test_a_resumed_run_is_one_whose_errors_start_at_zero(self, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 6, "start_step": 3}

        def begin():
            train(tmp_path / "out", "onebit_adam", max_steps=6, **options)

        def resume(name):
            checkpoint = str(tmp_path / "out" / "checkpoint-6")
            trainer = train(tmp_path / name, "onebit_adam", max_steps=12, resume=checkpoint, **options)
            if dist.get_rank() == 0:
                (tmp_path / f"{name}.json").write_text(json.dumps(weights_hash(trainer.model)))

        class ForgetErrors(TrainerCallback):
            def on_step_end(self, args, state, control, optimizer=None, **kwargs):
                if state.global_step == 6:
                    optimizer.optimizer._buckets = []

        def uninterrupted():
            settings = {"max_steps": 12, "learning_rate": 3e-3, "per_device_train_batch_size": 2}
            trainer = tiny_trainer(tmp_path / "whole", ForgetErrors(), optim="adamw_torch", **settings)
            compress_gradients(trainer, "onebit_adam", powersgd_rank=1, topk_fraction=0.1, start_step=3)
            trainer.train()
            if dist.get_rank() == 0:
                (tmp_path / "whole.json").write_text(json.dumps(weights_hash(trainer.model)))

        run_in_ranks(2, begin, tmp_path)
        run_in_ranks(2, lambda: resume("resumed"), tmp_path)
        run_in_ranks(2, uninterrupted, tmp_path)
        assert json.loads((tmp_path / "resumed.json").read_text()) == json.loads((tmp_path / "whole.json").read_text())


def run_in_ranks(world_size, function, tmp_path):
    """Call a function in forked ranks; the Trainer makes their process group."""

    def rank():
        function()
        last_barrier()

    codes = run_ranks(world_size, rank, log=tmp_path / "log", timeout_s=240)
    assert codes == [0] * world_size, (tmp_path / "log" / "rank-0.log").read_text()[-3000:]


def test_a_warm_up_of_no_steps_is_refused(python):
    done = python(RECIPE, "--gradient_compression", "onebit_adam", "--compression_start_step", "0")
    assert done.code == 2
    assert "--compression_start_step is 0" in done.err
