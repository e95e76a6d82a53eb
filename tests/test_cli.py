"""The command line: help, errors, speed, and `hfscale configs`."""

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY

import hfscale as hfscale_package
from hfscale import __version__
from hfscale.cli import COMMANDS, main
from hfscale.core.shipped import list_configs


def hfscale(*argv, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "hfscale", *argv], capture_output=True, text=True, cwd=cwd, timeout=280, check=False
    )


def test_help_lists_every_command():
    done = hfscale("--help")
    assert done.returncode == 0
    assert all(f"  {name}" in done.stdout for name in COMMANDS)
    assert hfscale().stdout == done.stdout


@pytest.mark.timing
def test_help_answers_in_under_300_ms():
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        hfscale("--help")
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.3


def test_version():
    assert hfscale("--version").stdout.strip() == f"hfscale {__version__}"


def test_a_program_can_list_what_there_is(capsys):
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["name"].partition(" ")[0] for one in found["commands"]} == set(COMMANDS)
    report = next(one for one in found["commands"] if one["name"] == "report")
    assert [(one["usage"].removesuffix(" <path>"), one["required"]) for one in report["arguments"]] == [
        ("OUTPUT_DIR", True),  # typer before 0.26 does not show the type
        ("[OTHER]", False),
    ]
    assert [one["options"] for one in report["options"]][:2] == [["--html"], ["--json"]]  # then perhaps --help
    assert found["python"] == hfscale_package.__all__
    assert {one["name"] for one in found["shipped"]} == {config.name for config in list_configs()}
    assert found["exit_codes"]["75"].startswith("a training was preempted")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["nothing"], ["nothing", "hfscale --help"]),
        (["configs", "nothing"], ["nothing", "hfscale configs --help"]),
        (["configs"], ["Missing command", "hfscale configs --help"]),
        (["configs", "show"], ["NAME"]),
        (["configs", "show", "ddpp"], ["'ddpp'", "did you mean ddp?"]),
        (["configs", "list", "--wide"], ["--wide"]),
        (["--wide"], ["--wide"]),
        (["configs", "show", ""], ["what follows show is empty"]),
        (["report", "runs/x", "--html="], ["what follows --html is empty"]),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(argv, parts):
    done = hfscale(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(part in done.stderr for part in parts), done.stderr


FOLDERS = ("ddp", "sharded", "tp_pp", "sft", "vision", "dpo", "grpo", "distillation")
"""The folders of the recipes."""


class TestConfigs:
    def test_list_has_every_shipped_file_with_a_summary(self, capsys):
        assert main(["configs", "list", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        files = [
            path.relative_to(REPOSITORY).as_posix()
            for folder, pattern in (("accelerate_configs", "*.yaml"), ("ds_configs", "*.json"), ("recipes", "*.yaml"))
            for path in (REPOSITORY / folder).rglob(pattern)
        ] + [f"recipes/{tier}/train.py" for tier in FOLDERS]
        files += [path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "launch").glob("*/*")]
        assert sorted(row["name"] for row in rows) == sorted(files)
        assert all(row["summary"] for row in rows)
        assert all(row["summary"].endswith(".") for row in rows if row["kind"] != "deepspeed"), "cut in mid-sentence"
        assert main(["configs", "list"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == len(files)

    @pytest.mark.parametrize("config", list_configs(), ids=lambda config: config.name)
    def test_show_is_the_file(self, config, capsys):
        assert main(["configs", "show", config.name]) == 0
        assert capsys.readouterr().out.strip() == config.path.read_text(encoding="utf-8").strip()

    @pytest.mark.parametrize(
        ("name", "folder"),
        [("qwen3-8b-full", "sharded"), ("dpo/qwen3-8b-full.yaml", "dpo"), ("qwen3-8b-lora", "sharded")],
    )
    def test_short_names_find_the_recipes_that_do_not_need_trl_first(self, name, folder, capsys):
        assert main(["configs", "show", name]) == 0
        stem = name.rpartition("/")[2].removesuffix(".yaml")
        printed = capsys.readouterr()
        assert f"recipes/{folder}/{stem}.yaml" in printed.out.splitlines()[0]
        others = {f"recipes/{other}/{stem}.yaml" for other in ("sharded", "sft", "dpo")} - {
            f"recipes/{folder}/{stem}.yaml"
        }
        named = {other for other in others if other in printed.err}
        assert named == (set() if "/" in name else {other for other in others if (REPOSITORY / other).is_file()})

    def test_copy_a_folder_of_launch_files_with_those_that_they_call(self, tmp_path, capsys):
        assert main(["configs", "copy", "launch/slurm", str(tmp_path)]) == 0
        copied = [Path(line) for line in capsys.readouterr().out.splitlines()]
        names = {path.relative_to(tmp_path).as_posix() for path in copied}
        assert {
            "launch/slurm/train.sbatch",
            "launch/multinode/accelerate.sh",
            "launch/multinode/exit_code.py",
        } <= names
        for path in copied:
            original = REPOSITORY / path.relative_to(tmp_path)
            assert path.read_bytes() == original.read_bytes()
            assert path.stat().st_mode == original.stat().st_mode
        called = re.findall(r"launch/[a-z]+/[\w.]+\w", (tmp_path / "launch/slurm/train.sbatch").read_text())
        assert called
        assert all((tmp_path / path).is_file() for path in called)
        assert main(["configs", "copy", "kubernetes", str(tmp_path)]) == 0  # equal files are no conflict
        (tmp_path / "launch/slurm/train.sbatch").write_text("mine")
        assert main(["configs", "copy", "slurm", str(tmp_path)]) == 2
        assert (tmp_path / "launch/slurm/train.sbatch").read_text() == "mine"
        assert main(["configs", "copy", "slurm", str(tmp_path), "--force"]) == 0

    @pytest.mark.parametrize("folder", [path.name for path in (REPOSITORY / "launch").iterdir() if path.is_dir()])
    def test_copied_launch_files_find_what_they_call(self, folder, tmp_path, capsys):
        assert main(["configs", "copy", folder, str(tmp_path)]) == 0
        for copied in map(Path, capsys.readouterr().out.splitlines()):
            lines = [line for line in copied.read_text().splitlines() if not line.lstrip().startswith("#")]
            called = re.findall(r"(?:launch|[.][.])/([a-z]+/[\w.]+\w)", "\n".join(lines))
            assert [path for path in called if not (tmp_path / "launch" / path).is_file()] == []

    def test_a_removed_config_names_what_to_use_instead(self, capsys):
        for name in ("ds_configs/onebit_adam.json", "onebit_adam.json"):
            assert main(["configs", "show", name]) == 2
            error = capsys.readouterr().err
            assert len(error.splitlines()) == 1
            assert "accelerate_configs/onebit_adam.yaml with --gradient_compression onebit_adam" in error

    def test_copy_to_a_folder_and_to_a_name(self, tmp_path, capsys):
        assert main(["configs", "copy", "ddp", str(tmp_path)]) == 0
        assert main(["configs", "copy", "ddp", str(tmp_path / "mine.yaml")]) == 0
        original = (REPOSITORY / "accelerate_configs" / "ddp.yaml").read_bytes()
        assert (tmp_path / "ddp.yaml").read_bytes() == (tmp_path / "mine.yaml").read_bytes() == original

    def test_copy_overwrites_only_with_force(self, tmp_path, capsys):
        (tmp_path / "ddp.yaml").write_text("mine")
        assert main(["configs", "copy", "ddp", str(tmp_path)]) == 2
        assert (tmp_path / "ddp.yaml").read_text() == "mine"
        assert "exists" in capsys.readouterr().err
        assert main(["configs", "copy", "ddp", str(tmp_path), "--force"]) == 0

    def test_copy_brings_the_deepspeed_file_that_a_config_reads(self, tmp_path, capsys):
        assert main(["configs", "copy", "zero2", str(tmp_path / "mine.yaml")]) == 0
        copied = tmp_path / "ds_configs" / "zero2.json"
        assert capsys.readouterr().out.split() == [str(tmp_path / "mine.yaml"), str(copied)]
        assert copied.read_bytes() == (REPOSITORY / "ds_configs" / "zero2.json").read_bytes()
        original = yaml.safe_load((REPOSITORY / "accelerate_configs" / "zero2.yaml").read_text())
        mine = yaml.safe_load((tmp_path / "mine.yaml").read_text())
        assert mine["deepspeed_config"].pop("deepspeed_config_file") == str(copied)
        assert original["deepspeed_config"].pop("deepspeed_config_file") == "ds_configs/zero2.json"
        assert mine == original
        assert main(["configs", "copy", "zero2", str(tmp_path)]) == 0  # the same JSON file again is no conflict
        copied.write_text("{}")
        assert main(["configs", "copy", "zero2", str(tmp_path / "other.yaml")]) == 2
        assert copied.read_text() == "{}"
        assert not (tmp_path / "other.yaml").exists()

    def test_copy_into_a_missing_folder(self, tmp_path, capsys):
        assert main(["configs", "copy", "ddp", str(tmp_path / "a" / "b")]) == 1
        assert "cannot be written: No such file" in capsys.readouterr().err

    @pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
    def test_a_reader_that_stops_early_gets_no_traceback(self, unbuffered):
        argv = [sys.executable, "-m", "hfscale", "configs", "show", "ddp"]
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        writer = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        writer.stdout.close()  # before it writes: the pipe is broken from the start
        assert writer.stderr.read() == ""
        writer.wait(280)


@pytest.mark.parametrize("name", ["x" * 300, "../" * 2000, "~" + "x" * 300], ids=["long name", "long path", "home"])
@pytest.mark.parametrize(
    "command",
    [
        ("estimate", "{}", "--gpu", "H100-80GB"),
        ("plan", "{}", "--gpu", "H100-80GB", "--gpus", "8"),
        ("report", "{}"),
        ("checkpoints", "list", "{}"),
        ("checkpoints", "verify", "{}"),
        ("checkpoints", "average", "{}", "{}", "--output", "{}"),
        ("why", "{}", "{}"),
        ("watch", "{}", "--textfile", "t"),
        ("sweep", "{}"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_text_that_can_be_no_path_is_one_line(capsys, command, name):
    code = main([word.format(name) for word in command])
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith("hfscale: error: ")


def test_a_folder_that_this_user_may_not_enter_is_one_line(capsys, monkeypatch, tmp_path):
    def locked(path, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", locked)  # root may enter every folder
    assert main(["report", str(tmp_path / "run")]) == 1
    assert f"no access at {tmp_path / 'run'}" in capsys.readouterr().err
