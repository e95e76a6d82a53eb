"""States of schedulers for other parameter groups: which lists have an entry for each group."""

import inspect

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from transformers.optimization import GreedyLR, get_scheduler
from transformers.trainer_utils import SchedulerType

from hfscale.parallel.groups import why_not_loadable
from hfscale.trainer.parameter_groups import (
    BY_GROUP,
    entries_by_group,
    group_count,
    packed_state,
    plain,
    restore_options,
    unknown_list,
    with_entries,
)

MADE = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 4]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=3),
    "GreedyLR": GreedyLR,
}
OF_TRANSFORMERS = {
    f"transformers' {kind.value}": lambda o, kind=kind: get_scheduler(
        kind,
        o,
        num_warmup_steps=2,
        num_training_steps=12,
        scheduler_specific_kwargs={"num_decay_steps": 3, "num_stable_steps": 3}
        if "warmup_stable" in kind.value
        else {},
    )
    for kind in SchedulerType
    if kind.value not in ("reduce_lr_on_plateau", "greedy", "cosine_with_min_lr", "cosine_warmup_with_min_lr")
}


def optimizer_of(rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def stepped(make, rates, steps):
    optimizer = optimizer_of(rates)
    scheduler = make(optimizer)
    for step in range(steps):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau | GreedyLR):
            scheduler.step(float(step))
        else:
            scheduler.step()
    return optimizer, scheduler


def test_every_scheduler_of_torch_is_tried():
    classes = {
        name
        for name, kind in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} <= MADE.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*MADE, *OF_TRANSFORMERS])
def test_a_schedule_goes_on_in_other_groups(name):
    """Two groups of one optimizer are three of another, in another order, as a list of two phases must not be."""
    make = (MADE | OF_TRANSFORMERS)[name]
    _, scheduler = stepped(make, [0.1, 0.2], 4)
    state = scheduler.state_dict()
    assert unknown_list(state, 2) is None
    assert why_not_loadable(state) is None
    assert group_count(state) == 2
    (old, _), (new, fitted) = stepped(make, [0.1, 0.2], 4), stepped(make, [0.2, 0.1, 0.2], 0)
    fitted.load_state_dict(with_entries(state, 2, [1, 0, 1]))
    for group, number in zip(new.param_groups, [1, 0, 1], strict=True):
        stored = {key: value for key, value in old.param_groups[number].items() if key != "params"}
        restore_options(group, stored, adds=True)
    _, wanted = stepped(make, [0.2, 0.1, 0.2], 4)
    assert fitted.state_dict().keys() == wanted.state_dict().keys()
    for key, entries in enumerate(entries_by_group(wanted.state_dict(), 3)):
        found = entries_by_group(fitted.state_dict(), 3)[key]
        assert found.keys() == entries.keys()
        for kind, entry in entries.items():
            assert found[kind] == (pytest.approx(entry) if isinstance(entry, float) else entry)
    for _ in range(3):
        for each in (fitted, wanted):
            if isinstance(each, lr_scheduler.ReduceLROnPlateau | GreedyLR):
                each.step(9.0)
            else:
                each.step()
    rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (fitted, wanted)]
    assert rates[0] == pytest.approx(rates[1])


def test_a_list_of_another_scheduler_is_named():
    state = {"base_lrs": [0.1, 0.2], "milestones": [3, 4]}
    assert "milestones" not in BY_GROUP
    assert unknown_list(state, 2) == "milestones"
    assert unknown_list(state, 3) is None


def test_numbers_of_numpy_are_stored_as_numbers(tmp_path):
    assert plain({"lr": [np.float64(0.5), (np.int64(3), torch.tensor(2.0))]}) == {"lr": [0.5, (3, 2.0)]}
    path = tmp_path / "scheduler.pt"
    path.write_bytes(packed_state({"base_lrs": [np.float32(0.5)]}))
    assert torch.load(path, weights_only=True) == {"base_lrs": [0.5]}
    group = {"lr": np.float32(0.1), "betas": [0.1, 0.2], "eps": torch.tensor(0.0)}
    restore_options(group, {"lr": 0.5, "betas": (0.3, 0.4), "eps": 1e-3, "fused": True}, adds=True)
    assert (type(group["lr"]), group["betas"], "fused" in group) == (np.float32, [0.3, 0.4], False)
