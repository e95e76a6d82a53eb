"""States of optimizers: they are loaded in their own formats, and what no checkpoint has is named."""

import json
import logging

import pytest
import torch
from tiny import LENGTH, VOCAB, StopAt, logged, tiny_arguments, tiny_model
from transformers import Trainer
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from hfscale import SpotCheckpointCallback, latest_checkpoint

STEPS, SAVED = 7, 4


def rows():
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, VOCAB, (LENGTH,), generator=generator) for _ in range(32)]
    return [{"input_ids": row, "labels": row} for row in ids]


def train(folder, make_optimizer=None, *callbacks, dtype=torch.float32, resume=None, **arguments):
    model = tiny_model().to(dtype)
    args = tiny_arguments(folder, max_steps=STEPS, save_strategy="steps", save_steps=SAVED, **arguments)
    optimizers = (make_optimizer(model), None) if make_optimizer is not None else (None, None)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows(),
        optimizers=optimizers,
        callbacks=[SpotCheckpointCallback(), *callbacks],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class Rounded(torch.optim.Optimizer):
    """Keeps the mean of the gradients in bfloat16, beside float32 parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter, dtype=torch.bfloat16))
            mean.lerp_(parameter.grad.to(mean.dtype), 0.1)
            parameter.add_(mean.float(), alpha=-0.1)


def rounded(model):
    return Rounded(model.parameters(), {"lr": 1e-2})


@pytest.mark.parametrize(
    ("make_optimizer", "dtype", "arguments"),
    [
        (None, torch.bfloat16, {"optim": "adafactor"}),
        (None, torch.bfloat16, {"optim": "adamw_torch"}),
        (rounded, torch.float32, {}),
    ],
    ids=["float32 states of bfloat16 parameters", "states as the parameters", "bfloat16 states of float32 parameters"],
)
def test_states_are_resumed_in_their_own_formats(tmp_path, make_optimizer, dtype, arguments):
    whole = train(tmp_path / "whole", make_optimizer, dtype=dtype, **arguments)
    train(tmp_path / "cut", make_optimizer, StopAt(SAVED), dtype=dtype, **arguments)
    checkpoint = latest_checkpoint(tmp_path / "cut")
    resumed = train(tmp_path / "cut", make_optimizer, dtype=dtype, resume=checkpoint, **arguments)
    assert logged(resumed, "loss") == logged(whole, "loss")
    formats = [
        [{name: each.dtype for name, each in state.items() if torch.is_tensor(each)} for state in states.values()]
        for states in (whole.optimizer.optimizer.state, resumed.optimizer.optimizer.state)
    ]
    assert formats[0] == formats[1]


def test_states_follow_parameters_of_another_format(tmp_path):
    """Adam's states of a float32 run do not step bfloat16 parameters."""
    train(tmp_path, None, StopAt(SAVED))
    resumed = train(tmp_path, dtype=torch.bfloat16, resume=latest_checkpoint(tmp_path))
    assert {state["exp_avg"].dtype for state in resumed.optimizer.optimizer.state.values()} == {torch.bfloat16}


def test_a_checkpoint_that_does_not_say_its_formats_is_loaded_as_before(tmp_path):
    train(tmp_path, None, StopAt(SAVED), dtype=torch.bfloat16, optim="adafactor")
    path = tmp_path / f"checkpoint-{SAVED}" / "trainer_state.json"
    fields = json.loads(path.read_text())
    assert fields["stateful_callbacks"]["hfscale"].pop("optimizer") == {"formats": ["torch.bfloat16"]}
    path.write_text(json.dumps(fields))
    train(tmp_path, dtype=torch.bfloat16, resume=str(path.parent), optim="adafactor")


class Inside(torch.optim.Optimizer):
    """Steps with an optimizer inside, as implementations of sharpness-aware minimization do."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 1e-2})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=1e-2)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


class InsideAndSaved(Inside):
    """The same, with what is needed to resume."""

    def state_dict(self):
        return self.base_optimizer.state_dict()


class ByTensor(torch.optim.SGD):
    """Keeps a state in its groups, as GrokAdamW does."""

    def step(self, closure=None):
        for group in self.param_groups:
            states = group.setdefault("means", {})
            for parameter in group["params"]:
                states.setdefault(parameter, torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        return super().step(closure)


class SlowWeights(torch.optim.SGD):
    """Moves a second copy of the weights at every fourth step."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=1e-2)
        self.steps = 0
        self.slow = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps % 4 == 0:
            parameters = self.param_groups[0]["params"]
            for slow, parameter in zip(self.slow, parameters, strict=True):
                slow.lerp_(parameter.detach(), 0.5)


def layerwise(model):
    """As `optim="galore_adamw_layerwise"`: each parameter has an optimizer, which steps in a hook."""
    inside = {each: torch.optim.AdamW([each], lr=1e-2) for each in model.parameters()}

    def step(parameter):
        inside[parameter].step()
        inside[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return LayerWiseDummyOptimizer(optimizer_dict=inside, lr=1e-2)


@pytest.mark.parametrize(
    ("make_optimizer", "named"),
    [
        (Inside, "optimizer.base_optimizer.state"),
        (lambda model: ByTensor(model.parameters(), lr=1e-2), "optimizer.param_groups"),
        (SlowWeights, "optimizer.slow"),
        (layerwise, "optimizer.optimizer_dict"),
    ],
    ids=["inside", "by tensor", "slow weights", "layer-wise"],
)
def test_what_no_checkpoint_has_of_an_optimizer_is_named(tmp_path, caplog, make_optimizer, named):
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        train(tmp_path, make_optimizer, max_grad_norm=0.0)
    (line,) = [each for each in caplog.messages if "no checkpoint has them" in each]
    assert named in line


@pytest.mark.parametrize(
    "make_optimizer",
    [InsideAndSaved, rounded, lambda model: torch.optim.Adafactor(model.parameters()), None],
    ids=["inside and saved", "own states", "of torch", "of Trainer"],
)
def test_what_the_state_dict_returns_is_not_named(tmp_path, caplog, make_optimizer):
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        train(tmp_path, make_optimizer)
    assert "no checkpoint" not in caplog.text


class Around(torch.optim.Optimizer):
    """Steps another optimizer in an attribute of the same name as Accelerate's, and knows its states by `id()`."""

    def __init__(self, model):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.defaults = self.optimizer.defaults
        self.means = {}

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            mean = 0.9 * self.means.get(id(parameter), 0.0) + float(parameter.grad.abs().mean())
            self.means[id(parameter)] = mean
            parameter.grad.mul_(1 + mean)
        return self.optimizer.step(closure)

    def state_dict(self):
        means = [self.means.get(id(each), 0.0) for each in self.param_groups[0]["params"]]
        return {"base": self.optimizer.state_dict(), "means": means}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict["base"])
        parameters = map(id, self.param_groups[0]["params"])
        self.means = dict(zip(parameters, state_dict["means"], strict=True))


def test_an_optimizer_around_another_one_is_resumed_by_its_own_methods(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        whole = train(tmp_path / "whole", Around)
        train(tmp_path / "cut", Around, StopAt(SAVED))
        resumed = train(tmp_path / "cut", Around, resume=latest_checkpoint(tmp_path / "cut"))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert "no checkpoint" not in caplog.text


class CountsById(torch.optim.SGD):
    """Counts per parameter by `id()`, and leaves loading to torch."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=1e-2)
        self.counts = {}

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.counts[id(parameter)] = self.counts.get(id(parameter), 0) + 1
        return super().step(closure)


def test_what_an_optimizer_counts_by_id_is_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        train(tmp_path, CountsById)
    assert "optimizer.counts is kept by id() or data_ptr()" in caplog.text


class AroundRounded(Around):
    """An optimizer around one that keeps its states in another format."""

    def __init__(self, model):
        super().__init__(model)
        self.optimizer = Rounded(model.parameters(), {"lr": 1e-2})
        self.defaults = self.optimizer.defaults


def test_states_of_an_optimizer_inside_keep_their_formats(tmp_path):
    train(tmp_path, AroundRounded, StopAt(SAVED))
    resumed = train(tmp_path, AroundRounded, resume=latest_checkpoint(tmp_path))
    assert {state["mean"].dtype for state in resumed.optimizer.optimizer.state.values()} == {torch.bfloat16}


class WeighsById(Trainer):
    """Counts per parameter by `id()`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts = {}

    def training_step(self, model, inputs, *args, **kwargs):
        for parameter in model.parameters():
            self.counts[id(parameter)] = self.counts.get(id(parameter), 0) + 1
        return super().training_step(model, inputs, *args, **kwargs)


def test_what_a_program_keeps_by_id_is_named(tmp_path, caplog):
    args = tiny_arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    trainer = WeighsById(model=tiny_model(), args=args, train_dataset=rows(), callbacks=[SpotCheckpointCallback()])
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        trainer.train()
    assert "trainer.counts is kept by id() or data_ptr() of parameters or modules" in caplog.text
