"""The contract of a strategy: what every class of `hfscale/trainer/strategies/` answers, in real trainings.

A next strategy is one class with `name_in` and `is_wrapped`, an entry in the table of `hfscale/facts/strategies.py`,
and an entry in `Strategy.kinds`. `PlainCopies` below is the smallest one. The files that a strategy of its own kind
touches:

| file | what for |
|---|---|
| hfscale/trainer/strategies/NAME.py, `__init__.py` | the class, and its place among the kinds |
| hfscale/facts/strategies.py | what its name says without a model |
| hfscale/facts/support.toml, tests/facts/test_support.py | what it does not work with, with an example of each rule |
| hfscale/checkpoint/captures/NAME.py, `__init__.py` | how its checkpoints are copied and written |
| hfscale/checkpoint/formats/NAME.py, `__init__.py` | how its checkpoints are converted, if the files are new |
| tests/trainer/test_strategy_contract.py | a layout of this test |
| docs/strategies.md, CHANGELOG.md | what users read |

These are 12 files; a strategy whose checkpoints have a known format needs 10.
"""

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from forked_ranks import run_ranks
from native_runs import make_model
from replay_runs import NATIVE, environment, make_trainer, ranks_of
from tiny import RandomTokens, tiny_arguments, tiny_model
from transformers import Trainer, TrainerCallback

from hfscale import CommHealthCallback
from hfscale.facts.strategies import GRADIENTS, OPTIMIZER, STRATEGIES, WEIGHTS, StrategyFacts
from hfscale.facts.support import Combination, why_not
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import place_of

LAYOUTS = {
    "single": "single",
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "zero0": "zero0",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "native-fsdp": "native",
    "native-hsdp": "native",
    "native-tp": "native",
    "native-ep": "native",
    "tp": "parallel",
    "pp": "parallel",
    "dp": "parallel",
    "ep": "parallel",
}
"""Layout of `replay_runs` -> the strategy that must be found."""
SHORT = ("single", "ddp", "fsdp2", "zero3", "native-tp", "tp")
"""One layout of each class; the others take long."""
PLAIN = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 0},
}
FACTS = ("waits_in_layers", "gathers_layers", "engine_steps", "runs_stages", "sends_values", "replicas")


def snapshot(strategy):
    """Return copies of all that a step changes and this rank holds: weights, gradients and states."""
    strategy.reshard()
    found = {}
    for name, parameter in strategy.trainer.model.named_parameters():
        found[f"weight {name}"] = strategy.own(parameter).clone()
        if parameter.grad is not None:
            found[f"gradient {name}"] = strategy.own(parameter.grad).clone()
    for number, state in enumerate(strategy.torch_optimizer().state.values()):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"state {number} {key}"] = strategy.own(value).clone()
    return found


def differing(before, after):
    """Return the names of what is not the same, bit by bit."""
    assert before.keys() == after.keys()
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


class Contract(TrainerCallback):
    """Asks a strategy everything during a training, and checks what must hold on one rank."""

    def __init__(self):
        self.answers = {}

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = TrainerAdapter.current().trainer
        strategy = Strategy.of(trainer)
        assert Strategy.of(trainer) is strategy
        assert strategy.facts is STRATEGIES[strategy.name]
        assert strategy.shards <= {WEIGHTS, GRADIENTS, OPTIMIZER}
        assert strategy.is_wrapped(strategy.wrapper())
        assert strategy.offload() == "none"
        assert isinstance(strategy.torch_optimizer(), torch.optim.Optimizer)
        assert bool(strategy.engine_config()) == strategy.engine_steps
        combination = strategy.combination()
        assert isinstance(combination, Combination)
        assert combination.strategy == ("parallel" if combination.tp > 1 else strategy.name)
        strategy.check(os.environ)
        self.answers = {
            "name": strategy.name,
            "axes": strategy.axes(),
            "ep": strategy.expert_ranks(),
            "facts": {name: getattr(strategy, name) for name in FACTS},
            "share": strategy.describe(),
            "part": strategy.part_of_model(),
        }
        self.sizes(strategy)
        self.strategy = strategy

    def sizes(self, strategy):
        """Note the elements of each parameter that this rank holds, and whether others hold the same."""
        strategy.reshard()
        self.answers["sizes"] = {}
        for name, parameter in strategy.trainer.model.named_parameters():
            place = place_of(parameter)
            is_split = place is not None or hasattr(parameter, "ds_tensor")
            copies = not is_split or (place is not None and place.is_replicated)
            own = strategy.own(parameter)
            self.answers["sizes"][name] = [own.numel(), strategy.full_numel(parameter), copies]

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != 1:
            return
        strategy = Strategy.of(TrainerAdapter.current().trainer)
        assert strategy is self.strategy
        self.writes(strategy)
        before = snapshot(strategy)
        with strategy.gathered():
            pass
        assert differing(before, snapshot(strategy)) == []

    def writes(self, strategy):
        """Set each master weight to what it was plus one, and back."""
        strategy.reshard()
        trained = [parameter for parameter in strategy.trainer.model.parameters() if parameter.requires_grad]
        kept = [strategy.master(parameter).clone() for parameter in trained]
        for added in (1.0, 0.0):
            with strategy.changing_weights():
                for parameter, value in zip(trained, kept, strict=True):
                    strategy.set_master(parameter, value + added)
            for parameter, value in zip(trained, kept, strict=True):
                assert torch.equal(strategy.master(parameter), value + added)
                assert torch.equal(strategy.own(parameter).view(-1), (value + added).view(-1))


def computed_without_effect(trainer):
    """Have the training compute the first micro-batch of its second step once more, without an effect."""
    original = trainer.training_step
    done = []

    def step(model, inputs, *args, **kwargs):
        strategy = Strategy.of(trainer)
        is_last = trainer.accelerator.sync_gradients
        if trainer.state.global_step == 1 and not done and (is_last or not strategy.steps_at_last_batch):
            assert strategy.why_effects_remain() is None
            before = snapshot(strategy)
            with torch.random.fork_rng([]), strategy.without_effect() as called:
                loss = original(called, dict(inputs), *args, **kwargs)
            after = snapshot(strategy)
            # `zero_grad` may keep gradients of zeros where there were none
            is_no_gradient = {name for name in after if name.startswith("gradient") and not after[name].any()}
            assert differing(before, {name: after[name] for name in after if name not in is_no_gradient}) == []
            done.append(float(loss.detach()))
        return original(model, inputs, *args, **kwargs)

    trainer.training_step = step
    return done


def rank(layout, folder):
    """Train two steps with and without the contract; write the answers and the losses."""
    torch.set_num_threads(1)
    arguments = {"max_steps": 3, "logging_steps": 1, "save_strategy": "no"}
    if layout == "zero0":
        arguments["deepspeed"] = PLAIN
    losses = []
    for is_asked in (False, True):
        contract = Contract()
        callbacks = [CommHealthCallback(preflight=False, hang_after_s=None), *([contract] if is_asked else [])]
        trainer = make_trainer("ddp" if layout == "zero0" else layout, folder / "out", callbacks, **arguments)
        done = computed_without_effect(trainer) if is_asked else []
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    contract.answers["losses"] = losses
    contract.answers["without_effect"] = done
    (folder / f"answers-{os.environ['RANK']}.json").write_text(json.dumps(contract.answers))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "layout", [one if one in SHORT else pytest.param(one, marks=pytest.mark.long) for one in LAYOUTS]
)
def test_every_strategy_keeps_the_contract(layout, tmp_path):
    if layout in NATIVE:
        make_model(tmp_path / "model")
    env = {} if layout == "zero0" else environment(layout)
    world = ranks_of(layout)
    codes = run_ranks(world, rank, layout, tmp_path, log=tmp_path / "log", env=env, timeout_s=240)
    printed = "\n".join(path.read_text()[-3000:] for path in sorted((tmp_path / "log").iterdir()))
    assert codes == [0] * world, printed
    ranks = [json.loads((tmp_path / f"answers-{number}.json").read_text()) for number in range(world)]
    assert {answers["name"] for answers in ranks} == {LAYOUTS[layout]}
    first = ranks[0]
    assert math.prod(first["axes"].values()) == world
    assert all(answers["facts"] == first["facts"] for answers in ranks)
    assert "of the parameters per rank" in first["share"]
    for answers in ranks:
        plain, asked = answers["losses"]
        assert asked == plain  # bit by bit: nothing that was asked has changed the training
        assert len(answers["without_effect"]) == 1
    if len({json.dumps(answers["part"]) for answers in ranks}) == 1 or first["name"] == "zero3":
        assert_parts_are_whole(ranks, shards_weights=WEIGHTS in STRATEGIES[first["name"]].shards)


def assert_parts_are_whole(ranks, *, shards_weights):
    """Check that the ranks hold each parameter once together, or all of it each."""
    for name, (_, full, has_copies) in ranks[0]["sizes"].items():
        held = [answers["sizes"][name][0] for answers in ranks]
        if has_copies or not shards_weights:
            assert held == [full] * len(ranks)
        else:
            assert full <= sum(held) < full + len(ranks)  # with the padding of the last shard


class PlainCopies(Strategy):
    """The smallest strategy: one process whose script says that it has set up copies."""

    @classmethod
    def name_in(cls, trainer):
        return "copies" if hasattr(trainer, "copies") else None

    def is_wrapped(self, wrapper):
        return True


def test_a_strategy_of_another_kind_is_one_class(tmp_path, monkeypatch):
    facts = StrategyFacts(
        name="copies", family="copies", file_format="unsharded", file_layout="unsharded", is_set_by_script=True
    )
    monkeypatch.setitem(STRATEGIES, "copies", facts)
    monkeypatch.setattr(Strategy, "kinds", [PlainCopies, *Strategy.kinds])
    contract = Contract()
    args = tiny_arguments(tmp_path, max_steps=3, logging_steps=1, save_strategy="no")
    callbacks = [CommHealthCallback(preflight=False, hang_after_s=None), contract]
    trainer = Trainer(tiny_model(), args, train_dataset=RandomTokens(), callbacks=callbacks)
    trainer.copies = 1
    Strategy.forget(trainer)
    done = computed_without_effect(trainer)
    trainer.train()
    assert contract.answers["name"] == "copies"
    assert len(done) == 1
    assert why_not(Strategy.of(trainer).combination()) is None


def test_a_strategy_is_made_again_when_the_model_is_prepared_again(tmp_path):
    trainer = Trainer(tiny_model(), tiny_arguments(tmp_path), train_dataset=RandomTokens())
    first = Strategy.of(trainer)
    assert Strategy.of(trainer) is first
    trainer.model_wrapped = torch.nn.Sequential(trainer.model)
    assert Strategy.of(trainer) is not first
    TrainerAdapter.of(trainer).restore()
    assert "_hfscale_strategy" not in vars(trainer)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_table_agrees_with_the_names(name):
    facts = STRATEGIES[name]
    assert facts.name == name
    assert name.startswith(facts.family)
    assert facts.zero == len(facts.shards)
    fake = SimpleNamespace(strategy=name)
    assert Combination(strategy=name).strategy_family in (facts.family, fake.strategy.rstrip("0123"))
