"""Replays of a step: they change nothing, find a flipped bit and its rank, and leave out what is not deterministic."""

import json
import os

import pytest
import torch
from conftest import RECIPE
from forked_ranks import run_ranks
from recipe_runs import environment_of
from tiny import logged, tiny_model, tiny_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from hfscale import CommHealthCallback, ScalingCallback, ScalingMetricsCallback
from hfscale.core.bit_hash import HashQueue
from hfscale.errors import HealthError, ParameterError, UsageError
from hfscale.replays.replay import StepReplay
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

QUIET = {"preflight": False, "hang_after_s": None}


def replaying_trainer(folder, model=None, *, every=2, layout="single", **arguments):
    health = CommHealthCallback(replay_every_steps=every, on_bad_training="stop", **QUIET)
    if layout == "fsdp2":
        arguments["per_device_train_batch_size"] = 2
    return tiny_trainer(folder, ScalingCallback(comm_health=health), model=model, **arguments)


class FlipsBit(torch.nn.Module):
    """A linear layer of which one call gives another bit."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call
        FlipsBit.calls = 0  # a replay puts attributes of the module back

    def forward(self, x):
        FlipsBit.calls += 1
        output = self.layer(x)
        if FlipsBit.calls != self.call:
            return output
        changed = output.clone()
        with torch.no_grad():
            changed.view(-1)[:1].view(torch.int32).bitwise_xor_(torch.tensor(1 << 20, dtype=torch.int32))
        return changed


class Noisy(torch.nn.Module):
    """A layer that is not deterministic: no random state gives its numbers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) * (1 + int.from_bytes(os.urandom(2), "little") * 1e-6)


@pytest.mark.long
def test_the_flag_of_a_recipe_replays(python, tmp_path):
    short = "--max_steps 4 --block_size 32 --max_train_samples 16 --logging_steps 1 --disable_tqdm true"
    flags = f"{short} --replay_every_steps 2 --hang_after_s none --preflight false --output_dir out".split()
    done = python(RECIPE, *flags)
    assert done.code == 0, done.err[-3000:]
    records = [json.loads(line) for line in (tmp_path / "out" / "scaling.jsonl").read_text().splitlines()]
    assert [record["health/replay_mismatches"] for record in records] == [0.0] * 4
    assert sum(record["health/replay_s"] for record in records) > 0


def test_a_replay_changes_nothing_and_counts_nothing(tmp_path):
    dropout = {"attention_dropout": 0.2}
    plain = tiny_trainer(tmp_path / "plain", ScalingMetricsCallback(), model=tiny_model(**dropout))
    plain.train()
    replaying = replaying_trainer(tmp_path / "replaying", tiny_model(**dropout), gradient_accumulation_steps=1)
    replaying.train()
    for key in ("loss", "grad_norm", "scaling/tokens_seen"):
        assert logged(replaying, key) == logged(plain, key)
    assert logged(replaying, "health/replay_mismatches") == [0, 0, 0, 0]
    seconds = logged(replaying, "health/replay_s")
    assert [second > 0 for second in seconds] == [True, True, False, True]  # the first hashes, and two replays
    assert "training_step" not in vars(replaying)


def test_a_flipped_bit_stops_the_run_before_the_update(tmp_path):
    model = tiny_model()
    # One call in each step, and two more in the first replay of step 2 (calls 2 to 4): the first pass of step 4.
    model.model.layers[1].mlp.up_proj = FlipsBit(model.model.layers[1].mlp.up_proj, 6)
    trainer = replaying_trainer(tmp_path, model)
    with pytest.raises(HealthError, match=r"step 4 gave two different results.*layers\.1\.mlp\."):
        trainer.train()
    assert trainer.state.global_step == 3


def test_what_is_not_deterministic_is_left_out_with_one_line(tmp_path, caplog):
    model = tiny_model()
    model.model.layers[1].mlp.up_proj = Noisy(model.model.layers[1].mlp.up_proj)
    trainer = replaying_trainer(tmp_path, model)
    trainer.train()
    assert logged(trainer, "health/replay_mismatches")[-1] == 0
    assert len([record for record in caplog.records if "not deterministic" in record.message]) == 1
    assert 0 < logged(trainer, "health/replay_compared")[-1] < 1


def train_with_a_flip(folder, layout, call):
    """Train in this process, which is a rank; the last rank computes a wrong bit."""
    torch.set_num_threads(1)
    model = tiny_model()
    layer = model.model.layers[1].mlp
    layer.up_proj = FlipsBit(layer.up_proj, call if os.environ["RANK"] == "1" else None)
    arguments = {"per_device_train_batch_size": 2}
    health = CommHealthCallback(replay_every_steps=2, on_bad_training="stop", **QUIET)
    if layout == "fsdp2":
        from tiny import RandomTokens, tiny_arguments
        from transformers import Trainer

        args = tiny_arguments(folder, **arguments)
        let_fsdp_run_on_cpu()
        callbacks = [ScalingCallback(comm_health=health)]
        trainer = Trainer(model=model, args=args, train_dataset=RandomTokens(), callbacks=callbacks)
    else:
        trainer = tiny_trainer(folder, ScalingCallback(comm_health=health), model=model, **arguments)
    trainer.train()
    assert logged(trainer, "health/replay_mismatches") == [0, 0, 0, 0]


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
@pytest.mark.parametrize(("call", "codes"), [(6, [1, 1]), (0, [0, 0])])
def test_all_ranks_end_and_name_the_rank(tmp_path, layout, call, codes):
    log = tmp_path / "log"
    env = environment_of(layout)
    got = run_ranks(2, train_with_a_flip, tmp_path / "out", layout, call, log=log, env=env, ends_all=False)
    printed = [path.read_text() for path in sorted(log.iterdir())]
    assert got == codes, "\n".join(text[-3000:] for text in printed)
    if call:
        for text in printed:
            assert "step 4 gave two different results" in text
            assert "layers.1.mlp." in text
            assert "on rank 1" in text


def test_what_cannot_be_replayed_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="replay_every_steps is 0"):
        CommHealthCallback(replay_every_steps=0)
    trainer = tiny_trainer(tmp_path)
    trainer.args.torch_compile = True
    with pytest.raises(UsageError, match="replay_every_steps is 5"):
        StepReplay(trainer, 5, lambda finding: None)


class Operators(TorchDispatchMode):
    """Counts operators that are not views, each of which is a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and function is not torch.ops.aten.detach.default
        return function(*args, **(kwargs or {}))


class OperatorsOfSteps(TrainerCallback):
    """Notes how many operators each step takes."""

    def __init__(self, operators):
        self.operators = operators
        self.steps = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.before = self.operators.count

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(self.operators.count - self.before)


def test_a_replayed_step_takes_few_kernels(tmp_path, monkeypatch):
    """With the hash that GPUs use: 2.5 times those of a plain step, where a replay computes the micro-batch again."""
    monkeypatch.setattr(HashQueue, "add", HashQueue.add_weighted)
    operators = Operators()
    counted = OperatorsOfSteps(operators)
    health = CommHealthCallback(replay_every_steps=4, **QUIET)
    model = tiny_model(num_hidden_layers=8)
    callback = ScalingCallback(comm_health=health)
    trainer = tiny_trainer(tmp_path, counted, callback, model=model, max_steps=8, logging_steps=50)
    with operators:
        trainer.train()
    plain, replayed = counted.steps[6:]
    assert plain < replayed < 2.7 * plain
