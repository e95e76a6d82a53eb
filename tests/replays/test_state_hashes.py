"""Weights and states of the optimizer that change in memory are found, and what a program writes is not blamed."""

import pytest
import torch
import torch.distributed as dist
from parallel_world import in_world
from peft import LoraConfig, get_peft_model
from replay_runs import Flip, FlipsBit, flip_in_memory, run
from tiny import logged, tiny_model, tiny_trainer
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback

from hfscale import CommHealthCallback, ScalingCallback
from hfscale.errors import HealthError
from hfscale.health import callback as health_callback
from hfscale.replays.state_hashes import StateHashes

UP = "layers.1.mlp.up_proj.weight"
STEPS = 4
ALL = 21 + 3 * 21
"""Weights of the tiny model, and what AdamW keeps of each: two moments and its number of steps."""
KINDS, MOMENTS = ("weight", "state"), ("begin", "backward")
LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])


class CountsCompared(TrainerCallback):
    """Keeps how many tensors each comparison before an update has compared."""

    def __init__(self, health):
        self.health, self.counts = health, []

    def on_optimizer_step(self, args, state, control, **kwargs):
        if (state.global_step + 1) % self.health.options.replay_every_steps == 0:
            self.counts.append(self.health._replay._states.compared)


class Writes(TrainerCallback):
    """Writes weights at an event from a step on, as `write` does."""

    def __init__(self, event, write, first=0, names=""):
        def act(args, state, control, model=None, **kwargs):
            if state.global_step >= first:
                for name, parameter in model.named_parameters():
                    if names in name:
                        write(parameter)

        setattr(self, event, act)


def by_operation(parameter):
    with torch.no_grad():
        parameter.mul_(0.99)


def by_data(parameter):
    parameter.data.mul_(0.99)


def by_another_tensor(parameter):
    parameter.data = parameter.data * 0.99


@pytest.fixture
def found(monkeypatch):
    findings = []
    monkeypatch.setattr(health_callback, "log_findings", findings.extend)
    return findings


def train(folder, *callbacks, model=None, flip=None, every=2, **arguments):
    """Train in this process; return the Trainer and the numbers of tensors compared before each update."""
    health = CommHealthCallback(replay_every_steps=every, preflight=False, hang_after_s=None)
    counts = CountsCompared(health)
    flips = [FlipsBit(flip)] if flip is not None else []
    trainer = tiny_trainer(
        folder,
        ScalingCallback(comm_health=health),
        *callbacks,
        *flips,
        counts,
        model=model,
        **({"max_steps": STEPS} | arguments),
    )
    trainer.train()
    assert all(callback.flipped == 1 for callback in flips)
    return trainer, counts.counts


@pytest.mark.parametrize(
    ("kind", "moment"), [("weight", "begin"), ("state", "begin"), ("weight", "forward"), ("state", "backward")]
)
def test_a_bit_that_flips_in_memory_is_found(tmp_path, found, kind, moment):
    flip = Flip(module=UP, rank=0, kind=kind, moment=moment)
    trainer, _ = train(tmp_path, flip=flip, gradient_accumulation_steps=2, max_grad_norm=0.1)
    of_state = [finding for finding in found if finding.check == "state"]
    (finding,) = of_state
    what = "the weight" if kind == "weight" else "the optimizer's exp_avg of"
    until = "the beginning" if moment == "begin" else "the update"
    assert finding.problem == (
        f"{what} model.{UP} changed in memory between the end of step 3 and {until} of step 4 on rank 0, "
        "and nothing has written it"
    )
    assert finding.ranks == (0,)
    assert finding.host in finding.fix
    assert logged(trainer, "health/replay_mismatches")[-1] == len([one for one in found if one.level == "error"])


def test_a_frozen_weight_is_compared_with_its_first_hash(tmp_path, found):
    name = "model.layers.0.self_attn.k_proj.weight"
    model = get_peft_model(tiny_model(), LORA)
    train(tmp_path, model=model, flip=Flip(module=name, rank=0, kind="weight", step=3))  # not replayed
    (finding,) = found
    assert f"{name} changed in memory between the end of step 0 and the beginning of step 4" in finding.problem


CLEAN = {
    "nothing": ((), {}, ALL),
    "accumulation": ((), {"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}, ALL),
    "after the step": ((Writes("on_step_end", by_operation), Writes("on_step_end", by_data)), {}, ALL),
    "while it is evaluated": (
        (Writes("on_evaluate", by_data), Writes("on_log", by_data)),
        {"eval_strategy": "steps", "eval_steps": 1},
        ALL,
    ),
    "the best model": (
        (),
        {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
        | {"load_best_model_at_end": True},
        ALL,
    ),
    "before the step": ((Writes("on_step_begin", by_operation, names="norm"),), {}, ALL - 5),
    "before the update": ((Writes("on_pre_optimizer_step", by_operation, names="norm"),), {}, ALL),
    "with another tensor": ((Writes("on_step_begin", by_another_tensor, names="norm"),), {}, ALL - 5),
    "always through .data": ((Writes("on_step_begin", by_data, names="model.norm"),), {}, ALL - 1),
    "later through .data": ((Writes("on_step_begin", by_data, names="norm", first=3),), {}, ALL - 5),
}


@pytest.mark.parametrize("case", list(CLEAN))
def test_what_a_program_writes_is_not_blamed(tmp_path, found, caplog, case):
    callbacks, arguments, compared = CLEAN[case]
    _, counts = train(tmp_path, *callbacks, **arguments)
    assert not found
    assert counts[-1] == compared
    lines = [record for record in caplog.records if "a program has probably written" in record.message]
    assert len(lines) == case.endswith(".data")


def test_adapters_and_a_base_that_a_program_writes_once_are_not_blamed(tmp_path, found, caplog):
    model = get_peft_model(tiny_model(), LORA)

    class Merges(TrainerCallback):  # as a trainer that gives its weights to vLLM does
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3:
                model.merge_adapter()
                model.unmerge_adapter()

    _, counts = train(tmp_path, Merges(), model=model)
    assert not found
    assert "model.layers.0.self_attn" in caplog.text
    assert counts[0] == 21 + 8 + 3 * 8
    assert counts[-1] < counts[0]


def test_the_run_ends_before_the_update_and_resumes_from_a_verified_step(tmp_path):
    health = CommHealthCallback(replay_every_steps=2, on_bad_training="stop", preflight=False, hang_after_s=None)
    flip = FlipsBit(Flip(module=UP, rank=0, kind="state", moment="backward"))
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": STEPS}
    trainer = tiny_trainer(tmp_path, ScalingCallback(comm_health=health), flip, **saving)
    with pytest.raises(HealthError, match=r"and the update of step 4 on rank 0.*resumes from checkpoint-2"):
        trainer.train()
    assert trainer.state.global_step == 3


def test_a_flip_in_memory_leaves_the_version_alone():
    weight = torch.nn.Parameter(torch.ones(8))
    flip_in_memory(weight, Flip(module="", bit=31, element=2))
    assert weight.tolist() == [1, 1, -1, 1, 1, 1, 1, 1]
    assert weight._version == 0


def compare_sharded(folder):
    """Write two sharded weights, each in its own way, and flip a bit of a third in memory; return what is reported."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = tiny_trainer(folder)
    fully_shard(trainer.model)
    trainer.create_optimizer()
    states = StateHashes(trainer)
    states.remember(3)
    weights = dict(trainer.model.named_parameters())
    by_operation(weights["model.norm.weight"])
    by_operation(weights["model.layers.0.input_layernorm.weight"].to_local())
    flip_in_memory(weights[f"model.{UP}"].to_local(), Flip(module=UP))
    problems = [finding.problem for finding in states.compare(4, "the update", learns=False)]
    dist.destroy_process_group()
    return problems, states.compared


def test_both_ways_to_write_a_sharded_weight_are_seen(tmp_path):
    """A DTensor and its local tensor count their writes apart."""
    ((problems, compared),) = in_world(1, compare_sharded, [str(tmp_path)])
    assert len(problems) == 1
    assert f"the weight model.{UP} changed in memory" in problems[0]
    assert compared == 21 - 2


@pytest.mark.faults
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "native-tp", "tp", "pp"])
def test_the_rank_is_named_under_every_strategy(tmp_path, layout):
    rank = 0 if layout == "pp" else 1
    module = "layers.1.self_attn.q_proj.weight"
    flips = [Flip(module=module, rank=rank, kind=kind, moment=moment) for kind in KINDS for moment in MOMENTS]
    clean, *flipped = run(layout, tmp_path, [(2, None), *((2, flip) for flip in flips)])
    assert [result["found"] for result in clean] == [[]] * len(clean)
    for flip, results in zip(flips, flipped, strict=True):
        assert sum(result["flipped"] for result in results) == 1
        for result in results:
            of_state = [finding for finding in result["found"] if finding["check"] == "state"]
            assert [finding["ranks"] for finding in of_state] == [[rank]], (flip, result["found"])
            assert "step 4" in of_state[0]["problem"]
