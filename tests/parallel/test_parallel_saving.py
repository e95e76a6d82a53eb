"""Checkpoints of `ParallelTrainer`: an asynchronous save writes the same files as a synchronous one, and `hfscale
checkpoints` lists, exports and converts them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from parallel_world import in_world, train
from safetensors.torch import load_file
from test_checkpoint_writer import CallAtStep, SaveAtSteps, paused_saves
from transformers import AutoModelForCausalLM, TrainerCallback

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.formats import read_view
from hfscale.checkpoint.formats.parallel import PARALLEL_NAME, read_parallel_metadata
from hfscale.checkpoint.pickles import read_dcp_metadata
from hfscale.checkpoint.store import list_checkpoints, verify
from hfscale.cli import main
from hfscale.errors import CheckpointError
from hfscale.parallel.checkpoints import ParallelCheckpointTrainer
from hfscale.trainer.frames import calling_trainer

QUIET = {"logging_strategy": "no", "eval_strategy": "no", "max_steps": 6, "save_strategy": "steps", "save_steps": 100}
EXPERTS = {"family": "mixtral", "model": {"num_local_experts": 4, "num_hidden_layers": 2}}
LORA = {"r": 4, "target_modules": ["q_proj", "o_proj"]}


def save_both_ways(job):
    """Save step 2 synchronously in one run, and asynchronously in another, which writes nothing before step 5.

    Returns:
        Why each run saved synchronously; None for the asynchronous one.
    """
    reasons = []
    for mode in ("synchronous", "asynchronous"):
        with paused_saves(pytest.MonkeyPatch()) as (go, _):
            if mode == "synchronous":
                go.set()
            spot = SpotCheckpointCallback(asynchronous=mode == "asynchronous")
            callbacks = [spot, SaveAtSteps(2), CallAtStep(5, go.set)]
            train(job | {"output_dir": f"{job['folder']}/{mode}/run", "callbacks": callbacks})
            reasons.append(spot._saving.synchronous_because)
    return reasons


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of a mixture of experts with tensor parallelism, which save differently; the second is exported."""
    return run_twice(tmp_path_factory.mktemp("runs"), 2, **EXPERTS, parallel={"tp_size": 2})


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """The same with tensor and pipeline parallelism."""
    return run_twice(tmp_path_factory.mktemp("staged"), 4, **EXPERTS, parallel={"tp_size": 2, "pp_size": 2})


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The same with adapters, with tensor and data parallelism."""
    return run_twice(tmp_path_factory.mktemp("adapted"), 4, parallel={"tp_size": 2}, lora=LORA)


def run_twice(folder, ranks, **job):
    job |= {"folder": str(folder), "export": str(folder / "end"), "args": QUIET}
    assert in_world(ranks, save_both_ways, [job]) == [["asynchronous is False", None]]
    return folder


LONG = pytest.mark.faults


@pytest.mark.parametrize(
    ("which", "ranks", "parameters"),
    [("runs", 2, 21), pytest.param("staged", 4, 21, marks=LONG), pytest.param("adapted", 4, 16, marks=LONG)],
)
@pytest.mark.long
def test_an_asynchronous_save_writes_the_same_files_as_a_synchronous_one(request, which, ranks, parameters):
    folder = request.getfixturevalue(which)
    synchronous, asynchronous = (folder / mode / "run" for mode in ("synchronous", "asynchronous"))
    names = [path.name for path in list_checkpoints(synchronous)]
    assert names == [path.name for path in list_checkpoints(asynchronous)] == ["checkpoint-2", "checkpoint-6"]
    for name in names:
        expected = verify(synchronous / name)
        found = verify(asynchronous / name)
        assert found.strategy == "parallel"
        assert set(found.files) == set(expected.files)
        assert {f"rng_state_{rank}.pth" for rank in range(ranks)} < set(found.files)
        for file, record in found.files.items():
            if file.endswith(".metadata"):  # torch writes a random id into it
                assert read_dcp_metadata(asynchronous / name / "dcp") == read_dcp_metadata(synchronous / name / "dcp")
            elif file != "trainer_state.json":  # which contains the path of its folder
                assert record == expected.files[file], file
    before, after = (read_view(asynchronous / name, "parallel") for name in names)
    assert sum(len(keys) for keys in before.state.values()) == 3 * parameters
    assert all(
        (before.state[name]["step"].read(), after.state[name]["step"].read()) == (2, 6) for name in before.state
    )
    changed = [
        name for name in before.weights if not torch.equal(before.weights[name].read(), after.weights[name].read())
    ]
    assert changed == list(before.weights), "the snapshot changed with the training"


def output_of(capsys, *argv, code=0):
    assert main(["checkpoints", *map(str, argv)]) == code
    return capsys.readouterr()


@pytest.mark.long
def test_the_commands_list_export_and_convert_it(runs, tmp_path, capsys):
    run = runs / "asynchronous" / "run"
    rows = json.loads(output_of(capsys, "list", run, "--json").out)
    assert [(row["state"], row["strategy"], row["world_size"]) for row in rows] == [("good", "parallel", 2)] * 2
    output_of(capsys, "verify", run)
    assert "safetensors" in output_of(capsys, "export", run, tmp_path / "model").out
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    expected = AutoModelForCausalLM.from_pretrained(runs / "end").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
    summary = output_of(capsys, "convert", run, tmp_path / "made", "--to", "single", "--world-size", "1", "--json").out
    assert json.loads(summary.splitlines()[-1])["step"] == 6
    output_of(capsys, "convert", tmp_path / "made", tmp_path / "back", "--to", "parallel", "--world-size", "8")
    (row,) = json.loads(output_of(capsys, "verify", tmp_path / "back", "--json").out)
    assert (row["state"], row["strategy"], row["world_size"]) == ("good", "parallel", 8)
    assert len({(tmp_path / "back" / f"rng_state_{rank}.pth").read_bytes() for rank in range(8)}) == 1


class RestoreRandomState(TrainerCallback):
    """Restores the random state of a checkpoint at the end; `same` tells for ranks 0 and 1 whether it is theirs."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint
        self.same = []

    def on_train_end(self, args, state, control, **kwargs):
        calling_trainer()._load_rng_state(str(self.checkpoint))
        for rank in (0, 1):
            saved = torch.load(self.checkpoint / f"rng_state_{rank}.pth", weights_only=False)["cpu"]
            self.same.append(torch.equal(torch.get_rng_state(), saved))


def resume_and_restore(job):
    restore = RestoreRandomState(Path(job["resume"]))
    return [train(job | {"callbacks": [restore]})["loss"], restore.same]


@pytest.mark.faults
def test_in_another_layout_all_ranks_get_the_random_state_of_the_first(runs, tmp_path):
    """Ranks that hold shards of one matrix must drop out the same elements of it."""
    checkpoint = shutil.copytree(runs / "asynchronous" / "run" / "checkpoint-2", tmp_path / "checkpoint-2")
    first = torch.load(checkpoint / "rng_state_0.pth", weights_only=False)
    other = torch.Generator().manual_seed(1).get_state()
    torch.save(first | {"cpu": other}, checkpoint / "rng_state_1.pth")
    steps = {"max_steps": 3, "eval_strategy": "no"}
    job = EXPERTS | {"resume": str(checkpoint), "output_dir": str(tmp_path), "args": steps, "parallel": {}}
    ((losses, same),) = in_world(1, resume_and_restore, [job])
    assert same == [True, False]
    assert len(losses) == 1


def test_a_checkpoint_of_an_earlier_version_is_refused_before_its_tensors_are_read(tmp_path):
    checkpoint = tmp_path / "checkpoint-2"
    (checkpoint / "dcp").mkdir(parents=True)
    (checkpoint / "scheduler.json").write_text('{"last_epoch": 2, "base_lrs": [0.01]}')
    trainer = ParallelCheckpointTrainer.__new__(ParallelCheckpointTrainer)
    with pytest.raises(CheckpointError, match=r"written by an earlier version of hfscale.*scheduler\.json"):
        trainer._load_from_checkpoint(str(checkpoint))


@pytest.mark.faults
def test_a_checkpoint_of_an_earlier_version_is_not_resumed(runs, tmp_path):
    checkpoint = shutil.copytree(runs / "asynchronous" / "run" / "checkpoint-2", tmp_path / "checkpoint-2")
    for name in (PARALLEL_NAME, "scheduler.pt"):
        (checkpoint / name).unlink()
    (checkpoint / "scheduler.json").write_text('{"last_epoch": 2, "base_lrs": [0.01]}')
    job = EXPERTS | {"resume": str(checkpoint), "output_dir": str(tmp_path / "out"), "parallel": {}}
    with pytest.raises(AssertionError, match=r"CheckpointError: .* was written by an earlier version of hfscale"):
        in_world(1, train, [job])


@pytest.mark.faults
def test_an_adapter_is_exported(adapted, tmp_path, capsys):
    output_of(capsys, "export", adapted / "asynchronous" / "run", tmp_path / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors"} == {p.name for p in (tmp_path / "adapter").iterdir()}
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 16
    assert all(name.startswith("base_model.model.model.layers.") and ".default" not in name for name in tensors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "ParallelTrainer did not finish it"),
        ("[]", "cannot be read: TypeError"),
        ('{"format": 2}', "has format 2, this version of hfscale reads 1"),
        ('{"format": 1, "layout": null, "packed": {}, "groups": [{}]}', "1 parameter groups.*2 groups"),
        ('{"format": 1, "layout": null, "packed": {}, "groups": [{}, {}]}', r"the parts \[0, 1\] of '.*' do not make"),
    ],
)
def test_broken_metadata_is_reported(runs, tmp_path, text, message):
    checkpoint = shutil.copytree(runs / "asynchronous" / "run" / "checkpoint-2", tmp_path / "checkpoint-2")
    assert read_parallel_metadata(checkpoint).layout == {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "pp": 1}
    (checkpoint / PARALLEL_NAME).unlink()
    if text is not None:
        (checkpoint / PARALLEL_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_view(checkpoint, "parallel")
