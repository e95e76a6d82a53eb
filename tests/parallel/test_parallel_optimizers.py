"""Optimizers of `ParallelTrainer`: groups with options of their own resume in any layout, or the run is refused."""

import warnings

import numpy as np
import pytest
import torch
from parallel_world import Tokens, in_world, tiny_causal_lm
from torch.optim import lr_scheduler as schedulers
from transformers import Trainer, TrainingArguments

from hfscale import ParallelArguments, ParallelTrainer, SpotCheckpointCallback
from hfscale.checkpoint.loading import readable_checkpoint
from hfscale.errors import UsageError
from hfscale.optim.muon import Muon

STEPS = 5
LAYOUTS = {"single": None, "pp": {"pp_size": 2}, "tp": {"tp_size": 2}, "fsdp": {}}


def layer_wise(model, number):
    """The head first, the embedding last, each layer in a group of its own; empty ones are left out."""
    groups = []
    for depth, part in enumerate(["lm_head", "model.norm", *(f"layers.{n}." for n in (3, 2, 1, 0)), "embed_tokens"]):
        named = [(name, p) for name, p in model.named_parameters() if part in name]
        rate = number(1e-2 * 0.7**depth)
        groups.append({"params": [p for n, p in named if "norm" not in n], "lr": rate, "weight_decay": 0.1})
        groups.append({"params": [p for n, p in named if "norm" in n], "lr": rate, "weight_decay": 0.0})
    return torch.optim.AdamW([group for group in groups if group["params"]])


def by_part(model, part, optimizer, **options):
    own = [p for name, p in model.named_parameters() if part in name]
    rest = [p for name, p in model.named_parameters() if part not in name]
    return optimizer([{"params": rest}, {"params": own, **options}])


def head_rate(model, number):
    return by_part(model, "lm_head", torch.optim.Adam, lr=number(3e-2), betas=(0.8, 0.9), eps=1e-6)


def with_momentum(model, number):
    return by_part(model, "embed", lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), momentum=0.5, lr=0.3)


def muon(model, number):
    def make(groups):
        return Muon(groups, module=model, lr=1e-2, dtype=torch.float32)

    return by_part(model, "layers.3", make, lr=3e-2, momentum=0.8)


def cyclic(optimizer):
    rates = [group["lr"] for group in optimizer.param_groups]
    return schedulers.OneCycleLR(optimizer, rates, total_steps=STEPS + 1)


def of_two_lambdas(optimizer):
    return schedulers.LambdaLR(optimizer, [lambda step: 1 / (step + 1), lambda step: 0.9**step])


def in_sequence(optimizer):
    parts = [schedulers.LinearLR(optimizer, 0.3, total_iters=3), schedulers.ExponentialLR(optimizer, 0.8)]
    return schedulers.SequentialLR(optimizer, parts, [3])


def on_plateau(optimizer):
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05, min_lr=[1e-3, 2e-3])


CASES = {
    "layer-wise rates, cosine": (layer_wise, None),
    "a rate of the head, one cycle": (head_rate, cyclic),
    "momentum of the embedding, a lambda for each group": (with_momentum, of_two_lambdas),
    "Muon with AdamW, schedules in sequence": (muon, in_sequence),
    "a rate of the head, on a plateau": (head_rate, on_plateau),
}
RESUMED = {  # where each stage of the run is resumed
    "layer-wise rates, cosine": ("pp", "tp", "single"),
    "a rate of the head, one cycle": ("pp", "fsdp", "single"),
    "momentum of the embedding, a lambda for each group": ("pp", "pp", "single"),
    "Muon with AdamW, schedules in sequence": ("pp", "tp", "single"),
    "a rate of the head, on a plateau": ("pp", "pp", "single"),
}


SHORT = ["a rate of the head, one cycle"]


def arguments(folder, parallel, **more):
    size = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    if parallel == {}:
        size["gradient_accumulation_steps"] = 2
    fixed = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "save_strategy": "steps",
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
    }
    return TrainingArguments(**(fixed | size | more))


def trainer_of(case, parallel, folder, **more):
    make_optimizer, make_schedule = CASES[case]
    if make_schedule is on_plateau:
        more |= {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss"}

    class OfGroups(Trainer if parallel is None else ParallelTrainer):
        def create_optimizer(self, model=None):
            if self.optimizer is None:
                self.optimizer = make_optimizer(self.model, float if parallel is None else np.float64)
            return self.optimizer

        def create_scheduler(self, num_training_steps, optimizer=None):
            if make_schedule is None:
                return super().create_scheduler(num_training_steps, optimizer)
            self.lr_scheduler = make_schedule(self.optimizer)
            return self.lr_scheduler

    given = {} if parallel is None else {"parallel": ParallelArguments(**parallel)}
    return OfGroups(
        model=tiny_causal_lm(seed=7, initializer_range=0.1),
        args=arguments(folder, parallel, **more),
        train_dataset=Tokens(),
        eval_dataset=Tokens(8),
        callbacks=[SpotCheckpointCallback(asynchronous=True)],
        **given,
    )


def run(job):
    """Train to the end, or from a checkpoint; return the losses and rates, by step."""
    warnings.simplefilter("ignore")
    parallel = LAYOUTS[job["layout"]]
    trainer = trainer_of(job["case"], parallel, job["folder"])
    resume = job.get("resume")
    if resume and parallel is None:
        resume = readable_checkpoint(trainer.args, resume)
    trainer.train(resume_from_checkpoint=resume)
    return {str(r["step"]): r["loss"] for r in trainer.state.log_history if "loss" in r}


@pytest.mark.parametrize("names", [SHORT, pytest.param(sorted(CASES.keys() - SHORT), marks=pytest.mark.long)])
@pytest.mark.long
def test_groups_resume_in_every_layout(names, tmp_path):
    """One process writes a checkpoint, from which stages resume, from theirs another layout, and one process again."""
    runs = [{"case": case, "layout": "single", "folder": str(tmp_path / f"{n}-0")} for n, case in enumerate(names)]
    wholes = in_world(1, run, runs)
    jobs = {1: [], 2: []}
    for number, case in enumerate(names):
        for part, layout in enumerate(RESUMED[case]):
            before = tmp_path / f"{number}-{part}" / f"checkpoint-{2 + part}"
            job = {
                "case": case,
                "layout": layout,
                "resume": str(before),
                "folder": str(tmp_path / f"{number}-{part + 1}"),
            }
            jobs[1 if layout == "single" else 2].append(job)
    found = dict(zip(map(str, jobs[2]), in_world(2, run, jobs[2]), strict=True))
    found |= dict(zip(map(str, jobs[1]), in_world(1, run, jobs[1]), strict=True))
    wrong = []
    for whole, name in zip(wholes, names, strict=True):
        for job in (*jobs[2], *jobs[1]):
            losses = found[str(job)]
            if job["case"] == name and losses != pytest.approx(whole, abs=1e-5):
                wrong.append((job, losses, whole))
    assert not wrong, wrong


class Lamb(torch.optim.Optimizer):
    """Scales the update of a parameter by its norm, computed by torch or from what a rank has."""

    local = True

    def __init__(self, params, lr=1e-2, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                own, gradient = parameter, parameter.grad
                if self.local and hasattr(own, "to_local"):
                    own, gradient = own.to_local(), gradient.to_local()
                own.add_(gradient * (own.norm() / (gradient.norm() + 1e-6)), alpha=-group["lr"])


class GlobalLamb(Lamb):
    local = False


class OfAllGradients(Lamb):
    """Divides by the norm of all gradients."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(parameter.grad / norm, alpha=-0.01)


class Rows(Lamb):
    """Keeps a state for each row."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["rows"] = parameter.grad.flatten(1).sum(1) if parameter.ndim > 1 else parameter.grad.clone()
                state["seen"] = state.get("seen", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"])


class OfTwo(torch.optim.Optimizer):
    """Leaves its parameters to another optimizer."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD([{"params": group["params"]} for group in self.param_groups], lr=lr)

    def step(self, closure=None):
        self.inner.step()


class WithMarks(schedulers.LambdaLR):
    """Keeps a list that may have an entry for each group."""

    def __init__(self, optimizer):
        self.marks = [1] * len(optimizer.param_groups)
        super().__init__(optimizer, lambda step: 1.0)


def by_position(model):
    return torch.optim.AdamW([{"params": [p], "lr": 1e-3 * (n + 1)} for n, p in enumerate(model.parameters())])


def of_closures(model):
    return torch.optim.LBFGS(model.parameters())


def of_a_subclass(optimizer=None, schedule=None):
    class Own(ParallelTrainer):
        def create_optimizer(self, model=None):
            if self.optimizer is None and optimizer is not None:
                self.optimizer = optimizer(self.model)
            return super().create_optimizer()

        def create_scheduler(self, num_training_steps, optimizer=None):
            if schedule is not None:
                self.lr_scheduler = schedule(self.optimizer)
            return super().create_scheduler(num_training_steps, optimizer)

    return Own


def unlike_embedding(model):
    return by_part(model, "lm_head", torch.optim.AdamW, lr=0.03)


def foreign_schedule():
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return (None, schedulers.LambdaLR(other, lambda step: 1.0))


KINDS = {  # name: arguments of the Trainer, and what its error names; None: it trains as in one process
    "adafactor": ({"args": {"optim": "adafactor"}}, {"pp": None, "tp": "Adafactor", "fsdp": "Adafactor"}),
    "lamb of a shard": ({"optimizer": Lamb}, {"pp": None, "tp": "complete parameters"}),
    "lamb": ({"optimizer": GlobalLamb}, {"pp": None, "tp": None}),
    "of all gradients": ({"optimizer": OfAllGradients}, {"pp": "pp_size", "tp": "mixed torch.Tensor and DTensor"}),
    "a state for each row": ({"optimizer": Rows}, {"pp": None, "tp": "rows"}),
    "of two": ({"optimizer": OfTwo}, {"pp": "param_groups"}),
    "lbfgs": ({"class": of_a_subclass(of_closures)}, {"pp": "LBFGS"}),
    "an object as option": ({"optimizer": Lamb, "options": {"kind": Lamb}}, {"pp": "option kind"}),
    "groups by position": ({"class": of_a_subclass(by_position)}, {"pp": "by the names"}),
    "a tied head": ({"class": of_a_subclass(unlike_embedding), "tied": True}, {"pp": "tied weight"}),
    "a list of marks": ({"class": of_a_subclass(schedule=WithMarks)}, {"pp": "WithMarks keeps marks"}),
    "a foreign schedule": ({"optimizers": foreign_schedule}, {"pp": "create_scheduler"}),
}


SHORT_KINDS = ["of all gradients", "a state for each row", "groups by position"]


def begin(job):
    """Train in a layout, and from its checkpoint; return the losses, or the error before the first step."""
    warnings.simplefilter("ignore")
    given, parallel = KINDS[job["kind"]][0], LAYOUTS[job["layout"]]
    options = {}
    if "optimizer" in given:
        options["optimizer_cls_and_kwargs"] = (given["optimizer"], {"lr": 1e-2, **given.get("options", {})})
    if "optimizers" in given:
        options["optimizers"] = given["optimizers"]()
    if parallel is not None:
        options["parallel"] = ParallelArguments(**parallel)
    kind = given.get("class", ParallelTrainer) if parallel is not None else Trainer
    losses = {}
    for resume in (None, f"{job['folder']}/checkpoint-1"):
        trainer = kind(
            model=tiny_causal_lm(seed=7, initializer_range=0.1, tie_word_embeddings="tied" in given),
            args=arguments(job["folder"], parallel, max_steps=3, save_total_limit=3, **given.get("args", {})),
            train_dataset=Tokens(),
            **options,
        )
        try:
            trainer.train(resume_from_checkpoint=resume)
        except UsageError as error:
            return [trainer.state.global_step, str(error)]
        losses[str(resume)] = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    first, resumed = losses.values()
    assert resumed == pytest.approx(first, abs=1e-5), (job, losses)
    return first


@pytest.mark.parametrize(
    "kinds", [SHORT_KINDS, pytest.param(sorted(KINDS.keys() - SHORT_KINDS), marks=pytest.mark.recipes)]
)
def test_an_optimizer_trains_as_in_one_process_or_is_refused(kinds, tmp_path):
    jobs = [
        {"kind": kind, "layout": layout, "folder": str(tmp_path / f"{number}-{layout}")}
        for number, kind in enumerate(kinds)
        for layout in KINDS[kind][1]
    ]
    trained = [kind for kind in kinds if None in KINDS[kind][1].values()]
    alone = [{"kind": kind, "layout": "single", "folder": str(tmp_path / kind)} for kind in trained]
    wholes = dict(zip(trained, in_world(1, begin, alone), strict=True))
    wrong = []
    for job, found in zip(jobs, in_world(2, begin, jobs), strict=True):
        named = KINDS[job["kind"]][1][job["layout"]]
        if named is None:
            is_right = found == pytest.approx(wholes[job["kind"]], abs=1e-5)
        else:
            is_right = found[0] == 0 and named in str(found[1])
        if not is_right:
            wrong.append((job, found, wholes.get(job["kind"])))
    assert not wrong, wrong
