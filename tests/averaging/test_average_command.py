"""`hfscale checkpoints average`, and `export --average`: the mean of files, with one tensor in memory at a time."""

import json
import shutil

import pytest
import torch
from average_runs import stored
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tiny_tokenizer, tiny_trainer
from transformers import AutoModelForCausalLM

from hfscale import SpotCheckpointCallback, WeightAveragingCallback
from hfscale.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with an average and a manifest in each of its checkpoints, and one of plain Trainer."""
    folder = tmp_path_factory.mktemp("run")
    saving = {"save_strategy": "steps", "save_steps": 2, "tokenizer": tiny_tokenizer()}
    callbacks = [SpotCheckpointCallback(cloud=None), WeightAveragingCallback(ema_decay=0.9)]
    trainer = tiny_trainer(folder / "run", *callbacks, **saving)
    trainer.train()
    tiny_trainer(folder / "plain", **(saving | {"learning_rate": 1e-3})).train()
    trainer.model.to(torch.bfloat16).save_pretrained(folder / "model")
    return folder


def average(capsys, *argv, code=0):
    assert main(["checkpoints", "average", *map(str, argv)]) == code
    return capsys.readouterr()


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def test_the_mean_agrees_with_a_reference_for_each_kind_of_folder(run, tmp_path, capsys):
    sources = [run / "run" / "checkpoint-2", run / "plain" / "checkpoint-4", run / "model"]
    printed = average(capsys, *sources, "--output", tmp_path / "out", "--json").out
    assert json.loads(printed)["sources"] == list(map(str, sources))
    all_weights = list(map(weights_of, sources))
    found = weights_of(tmp_path / "out")
    assert found.keys() == all_weights[0].keys()
    for name, tensor in found.items():
        reference = sum(each[name].double() for each in all_weights) / 3
        assert tensor.dtype == torch.float32
        assert float((tensor.double() - reference).abs().max()) <= 1e-6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(dict(model.named_parameters())["model.norm.weight"], found["model.norm.weight"])
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_data_type_is_that_of_the_first_source(run, tmp_path, capsys):
    average(capsys, run / "model", run / "run", "--output", tmp_path / "out")
    found = weights_of(tmp_path / "out")
    newest = weights_of(run / "run" / "checkpoint-4")
    for name, tensor in found.items():
        reference = (weights_of(run / "model")[name].float() + newest[name]) / 2
        assert torch.equal(tensor, reference.to(torch.bfloat16))


def test_other_models_and_broken_files_are_refused_in_one_line(run, tmp_path, capsys):
    first = run / "run" / "checkpoint-2"
    tiny_model(intermediate_size=64).save_pretrained(tmp_path / "wider")
    tiny_model(num_hidden_layers=3).save_pretrained(tmp_path / "deeper")
    broken = shutil.copytree(run / "run" / "checkpoint-4", tmp_path / "checkpoint-4")
    weights = weights_of(broken)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, broken / "model.safetensors", {"format": "pt"})
    capsys.readouterr()  # progress of what was written
    cases = [
        ([first, tmp_path / "wider"], "has the shape [32, 48]"),
        ([first, tmp_path / "deeper"], f"{first} has no 'model.layers.2."),
        ([first, broken], "model.safetensors has changed"),
        ([first], "alone has no mean"),
        ([first, tmp_path / "nothing"], "is not a folder"),
    ]
    for number, (sources, said) in enumerate(cases):
        err = average(capsys, *sources, "--output", tmp_path / f"out-{number}", code=2 if number > 2 else 1).err
        assert said in err
        assert len(err.strip().splitlines()) == 1
        assert not (tmp_path / f"out-{number}").exists()
    assert "already exists" in average(capsys, first, first, "--output", tmp_path, code=2).err


def test_the_average_of_a_checkpoint_is_exported(run, tmp_path, capsys):
    checkpoint = run / "run" / "checkpoint-4"
    assert main(["checkpoints", "export", str(checkpoint), str(tmp_path / "out"), "--average"]) == 0
    found = weights_of(tmp_path / "out")
    for name, tensor in stored(checkpoint).items():
        assert torch.equal(found[name], tensor)
    assert main(["checkpoints", "export", str(run / "plain"), str(tmp_path / "none"), "--average"]) == 1
    assert "keeps no average of its weights" in capsys.readouterr().err
