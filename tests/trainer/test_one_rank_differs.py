"""One rank is told otherwise than the others, by an option, a variable or a file: no hang, and one line."""

import ast
import os
import typing
from dataclasses import fields

import pytest
from conftest import REPOSITORY
from forked_ranks import run_ranks
from tiny import tiny_trainer

from hfscale import (
    CommHealthCallback,
    LRScalingCallback,
    ScalingCallback,
    ScalingMetricsCallback,
    SpotCheckpointCallback,
)
from hfscale.checkpoint.options import CheckpointOptions
from hfscale.core.run_memory import RunMemory
from hfscale.errors import HfScaleError
from hfscale.health.options import HealthOptions
from hfscale.lr_scaling.options import LRScalingOptions
from hfscale.metrics.options import MetricsOptions
from hfscale.trainer.equal_options import OF_ONE_MACHINE

PARTS = {
    "comm_health": (CommHealthCallback, HealthOptions),
    "lr_scaling": (LRScalingCallback, LRScalingOptions),
    "spot_checkpoint": (SpotCheckpointCallback, CheckpointOptions),
    "metrics": (ScalingMetricsCallback, MetricsOptions),
}
BY_TYPE = {bool: (True, False), int: (2, 3), float: (0.5, 2.0)}
WORDS = {"stop_file": "elsewhere", "resume_with_other": ["data"], "scale": "sqrt", "batch_schedule": "8,16@100samples"}
"""Values of the options that are texts."""


def option_cases():
    """One case for each option: the part, the option and a value that is not its default."""
    for part, (callback, options) in PARTS.items():
        default = options()
        for name, hint in typing.get_type_hints(options).items():
            if name not in {option.name for option in fields(options)}:
                continue
            kinds = typing.get_args(hint) or (hint,)
            values = [*kinds, *(one for kind in kinds for one in typing.get_args(kind))]
            values = [one for one in values if isinstance(one, str)] + [WORDS.get(name)]
            for kind in kinds:
                values += BY_TYPE.get(kind, ())
            for value in values:
                if value is None or value == getattr(default, name):
                    continue
                try:
                    callback(**{name: value})
                except HfScaleError:
                    continue
                yield part, name, value
                break


def variables():
    """Every environment variable that the packages of a training read by a name of their own."""
    found = set()
    root = REPOSITORY / "hfscale"
    for package in ("checkpoint", "core", "health", "lr_scaling", "metrics", "trainer", "recovery"):
        for path in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                value = node.value if isinstance(node, ast.Constant) else None
                is_name = isinstance(value, str) and value.isupper() and value.isascii()
                if is_name and value.startswith(("HFSCALE_", "ACCELERATE_", "FSDP_")):
                    found.add(value)
    return sorted(found)


OPTIONS = list(option_cases())
TRUE = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true"}


def train(folder, own):
    """Train on one of two ranks; `own` says what this rank alone is told."""
    rank = os.environ["RANK"]
    parts = {}
    if own.get("rank") == rank:
        os.environ.update(own.get("environ", {}))
        for part, options in own.get("options", {}).items():
            parts[part] = PARTS[part][0](**options)
        if "supervised" in own:
            os.environ["HFSCALE_RUN_MEMORY"] = str(RunMemory.create(folder).folder)
    told = own.get("arguments", {}) if own.get("rank") == rank else {}
    output_dir = folder / "out"
    if own.get("rank") == rank and "file" in own:
        output_dir = folder / "own"
        (output_dir / own["file"]).parent.mkdir(parents=True)
        (output_dir / own["file"]).write_text("{}")
    scaling = ScalingCallback(**parts)
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    tiny_trainer(output_dir, scaling, **{**arguments, "per_device_train_batch_size": 2, **told}).train()


def check(folder, own):
    codes = run_ranks(2, train, folder, own, log=folder / "log", timeout_s=60)  # as a launcher, it ends all with one
    logs = [(folder / "log" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert not any("Timeout (" in log for log in logs), logs
    if any(codes):
        assert max(codes) > 0, (codes, logs)  # not both were killed
        assert any("Error: " in log or "exit code 75" in log for log in logs), logs  # 75: preempted together
    return codes, logs


def test_every_option_has_a_case():
    """Without one it could part the ranks and nobody would know."""
    known = {name for _, name, _ in OPTIONS}
    every = {option.name for _, options in PARTS.values() for option in fields(options)}
    assert every - known <= {*OF_ONE_MACHINE, "remote", "cloud", "rule", "lr_clock"}, every - known


def test_an_option_on_one_rank_is_one_line(tmp_path):
    codes, logs = check(tmp_path, {"rank": "1", "options": {"comm_health": {"replay_every_steps": 2}}})
    assert max(codes) == 1
    assert "replay_every_steps differs: not given on rank 0, 2 on rank 1" in "".join(logs)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("learning_rate", 0.5, "0.01 on rank 0, 0.5 on rank 1"),
        ("lr_scheduler_kwargs", {"power": 2}, "on rank 0, power=2 on rank 1"),
        ("per_device_train_batch_size", 4, "2 on rank 0, 4 on rank 1"),
    ],
)
def test_an_argument_of_trainer_on_one_rank_is_one_line(tmp_path, name, value, shown):
    """As a node with an older config has it: its replica of the model would be stepped in another way."""
    codes, logs = check(tmp_path, {"rank": "1", "arguments": {name: value}})
    assert max(codes) == 1
    text = "".join(logs)
    assert f"{name} differs: " in text
    assert shown in text


@pytest.mark.long
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("part", "name", "value"), OPTIONS)
def test_no_option_of_one_rank_makes_the_others_wait(tmp_path, part, name, value, rank):
    check(tmp_path, {"rank": rank, "options": {part: {name: value}}})


@pytest.mark.long
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("variable", variables())
def test_no_variable_of_one_rank_makes_the_others_wait(tmp_path, variable, rank):
    check(tmp_path, {"rank": rank, "environ": {variable: TRUE.get(variable, "7")}})


@pytest.mark.long
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_supervisor_of_one_rank_makes_nobody_wait(tmp_path, rank):
    check(tmp_path, {"rank": rank, "supervised": True})


@pytest.mark.long
@pytest.mark.parametrize("name", ["hfscale_stop", "checkpoint-1/hfscale_manifest.json", "hfscale_status.json"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_file_that_one_rank_sees_makes_nobody_wait(tmp_path, name, rank):
    """The other rank has an output directory of its own, without the file."""
    check(tmp_path, {"rank": rank, "file": name})
