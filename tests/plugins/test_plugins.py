"""What the plug-ins of other programs read; with the programs themselves they run in `make test-versions`."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from hfscale import ScalingCallback
from hfscale.cli import main
from hfscale.errors import ParameterError, UsageError
from hfscale.plugins import llamafactory
from hfscale.plugins.axolotl_plan import words_of
from hfscale.plugins.section import callback_of, checkpoint_of


def test_a_section_sets_options_of_several_parts():
    callback = callback_of({"usd_per_gpu_hour": 2.5, "base_global_batch_size": 64, "every_minutes": 10})
    assert isinstance(callback, ScalingCallback)
    assert callback.metrics.options.usd_per_gpu_hour == 2.5
    assert callback.lr_scaling.options.base_global_batch_size == 64
    assert callback.spot_checkpoint.options.every_minutes == 10
    assert isinstance(callback_of(None), ScalingCallback)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"usd_per_gpu_hours": 2.5}, "'usd_per_gpu_hours'; did you mean usd_per_gpu_hour?"),
        ({"usd_per_gpu_hour": -1}, "usd_per_gpu_hour"),
        ("yes", "'yes' is no section"),
        ({1: 2}, "the option 1"),
    ],
)
def test_a_section_that_is_wrong_is_one_line(section, message):
    with pytest.raises((UsageError, ParameterError), match=message) as error:
        callback_of(section)
    assert "\n" not in str(error.value)


def test_a_run_without_checkpoints_starts_from_scratch(tmp_path):
    assert checkpoint_of(tmp_path) is None
    assert checkpoint_of(None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hfscale: {usd_per_gpu_hours: 1}", "usd_per_gpu_hours"),
        ("- 1", "has no arguments"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_file_for_llamafactory_that_is_wrong_is_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "sft.yaml"
    path.write_text(text)
    assert llamafactory.main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_llamafactory_gets_the_callback_and_the_checkpoint(tmp_path, monkeypatch):
    """The program stands in for itself: its own function is called with what the file says."""
    got = {}
    tuner = types.ModuleType("llamafactory.train.tuner")
    tuner.run_exp = lambda args, callbacks: got.update(args=args, callbacks=callbacks)
    for name in ("llamafactory", "llamafactory.train"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "llamafactory.train.tuner", tuner)
    path = tmp_path / "sft.yaml"
    path.write_text(f"output_dir: {tmp_path / 'out'}\nstage: sft\nhfscale:\n  usd_per_gpu_hour: 2.5\n")
    assert llamafactory.main([str(path)]) == 0
    assert got["args"] == {"output_dir": str(tmp_path / "out"), "stage": "sft", "resume_from_checkpoint": None}
    assert got["callbacks"][0].metrics.options.usd_per_gpu_hour == 2.5
    monkeypatch.setattr(llamafactory, "checkpoint_of", lambda output_dir, section: "out/checkpoint-2")
    path.write_text("output_dir: out\nresume_from_checkpoint: null\n")  # as in the program's examples
    assert llamafactory.main([str(path)]) == 0
    assert got["args"]["resume_from_checkpoint"] == "out/checkpoint-2"
    monkeypatch.setenv("USE_V1", "1")
    assert llamafactory.main([str(path)]) == 2


def test_ms_swift_gets_the_callback_and_the_checkpoint(tmp_path, monkeypatch):
    """As ms-swift imports a file of `--external_plugins`: by its path, in a method of its arguments."""
    callbacks = types.ModuleType("swift.callbacks")
    callbacks.callbacks_map = {}
    monkeypatch.setitem(sys.modules, "swift", types.ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.callbacks", callbacks)
    monkeypatch.setattr("hfscale.plugins.section.latest_checkpoint", lambda folder, remote: f"{folder}/checkpoint-2")
    options = tmp_path / "options.yaml"
    options.write_text("usd_per_gpu_hour: 2.5\n")
    monkeypatch.setenv("HFSCALE_OPTIONS", str(options))

    class Arguments:
        resume_from_checkpoint = None
        output_dir = "runs"

        def __init__(self, names):
            self.callbacks = names
            self._import_external_plugins()

        def _import_external_plugins(self):
            path = Path(llamafactory.__file__).with_name("swift.py")
            spec = importlib.util.spec_from_file_location("external", path)
            spec.loader.exec_module(importlib.util.module_from_spec(spec))

    assert Arguments(["hfscale"]).resume_from_checkpoint == "runs/checkpoint-2"
    assert Arguments([]).resume_from_checkpoint is None
    made = callbacks.callbacks_map["hfscale"](None, None)
    assert made.metrics.options.usd_per_gpu_hour == 2.5
    options.write_text("a: [")
    with pytest.raises(UsageError, match=r"HFSCALE_OPTIONS=.* cannot be read"):
        Arguments(["hfscale"])


def test_a_file_of_axolotl_is_what_plan_is_asked(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("base_model: NousResearch/Llama-3.1-8B\nsequence_len: 4096\nadapter: qlora\nlora_r: 32\n")
    words = ["llama-3.1-8b", "--seq-len", "4096", "--method", "qlora", "--lora-rank", "32"]
    assert words_of(path) == words
    path.write_text("base_model: a/b\nadapter: lora\nload_in_4bit: true\n")
    assert words_of(path) == ["b", "--method", "qlora", "--lora-rank", "8"]
    path.write_text("base_model: a/b\nadapter: llama-adapter\n")
    with pytest.raises(UsageError, match="llama-adapter is not planned"):
        words_of(path)
    path.write_text("sequence_len: 4096\n")
    with pytest.raises(UsageError, match="names no base_model"):
        words_of(path)


def test_the_command_prints_what_a_program_is_given(capsys):
    assert main(["plugins", "swift"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()
    assert main(["plugins", "axolotl"]) == 0
    assert capsys.readouterr().out == "hfscale.plugins.axolotl.HfscalePlugin\n"
    assert main(["plugins", "trl"]) == 2
    assert "choose axolotl, llamafactory or swift" in capsys.readouterr().err
