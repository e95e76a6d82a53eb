"""The DDP recipe with a user's mistakes: one line with the value and the fix, an exit code, no traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RECIPE, REPOSITORY, Finished, fake_nvidia_smi
from recipe_runs import save_model
from tiny import byte_level_tokenizer

from hfscale import latest_checkpoint

pytestmark = pytest.mark.recipes
TEXT = "the quick brown fox jumps over the lazy dog\n" * 400
POSITIONS = 64

# Runs a recipe on a disk that fills up as soon as the first checkpoint is committed.
FILLING_DISK = """
import os, resource, runpy, sys, threading, time

def fill(manifest):
    while not os.path.exists(manifest):
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

threading.Thread(target=fill, args=[sys.argv.pop(1)], daemon=True).start()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a config of a hundred thousand parameters and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level_tokenizer([TEXT])
    return save_model(folder, tokenizer, hidden_size=64, intermediate_size=128, max_position_embeddings=POSITIONS)


@pytest.fixture
def recipe(python: Callable[..., Finished], tmp_path: Path) -> Callable[..., Finished]:
    """Return a function that runs the recipe in one process, with its caches below `tmp_path`."""
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*flags: str | Path, wrapper: tuple[str, ...] = ()) -> Finished:
        caches = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
        return python(*wrapper, RECIPE, *flags, env=caches)

    return run


def reports(done: Finished, *parts: str, code: int = 2) -> None:
    """Assert that the process ended with `code` and one error line that contains all of `parts`."""
    lines = done.lines("hfscale: error")
    assert len(lines) == 1, done.err[-3000:]
    assert lines[0].startswith("hfscale: error: ")
    assert "Traceback" not in done.err
    assert done.code == code
    for part in parts:
        assert part in lines[0]


def test_an_unknown_flag(recipe: Any) -> None:
    reports(recipe("--max_stepz", "3"), "unknown flag --max_stepz", "did you mean --max_steps?")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about GPUs that torch cannot use")
def test_gpus_that_torch_cannot_use(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{fake_nvidia_smi(tmp_path)}:/usr/bin:/bin")
    reports(recipe("--max_steps", "3"), "2 GPUs", "torch", "--use_cpu true")
    reports(recipe("--max_steps", "3", "--use_cpu", "true", "--train_file", "gone.txt"), "gone.txt does not exist")


def test_a_text_that_does_not_exist(recipe: Any, model: Path, tmp_path: Path) -> None:
    done = recipe("--config_name", model, "--train_file", "gone.txt")
    reports(done, f"--train_file gone.txt does not exist in {tmp_path}", "correct the path")


def test_a_broken_config(recipe: Any, model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama",')
    flags = ["--tokenizer_name", model, "--train_file", "text.txt", "--block_size", "32"]
    reports(recipe("--config_name", broken, *flags), f"--config_name {broken}", "not a valid JSON file")


def test_a_model_that_does_not_exist(recipe: Any) -> None:
    reports(recipe("--model_name_or_path", "no/such-model", "--train_file", "text.txt"), "no/such-model", "connect")


def test_an_output_directory_that_is_a_file(recipe: Any, tmp_path: Path) -> None:
    reports(recipe("--output_dir", "text.txt"), "--output_dir text.txt is a file", "name a folder")
    assert (tmp_path / "text.txt").read_text() == TEXT


def test_blocks_longer_than_the_models_positions(recipe: Any, model: Path) -> None:
    done = recipe("--config_name", model, "--train_file", "text.txt", "--block_size", str(2 * POSITIONS))
    reports(done, f"--block_size {2 * POSITIONS}", f"{POSITIONS} positions", "lower it")


def test_evaluation_without_text(recipe: Any, model: Path) -> None:
    flags = ["--train_file", "text.txt", "--validation_split_percentage", "0", "--block_size", "32"]
    done = recipe("--config_name", model, *flags, "--eval_strategy", "steps")
    reports(done, "--eval_strategy steps", "give --validation_file")


def test_a_disk_that_fills_up_keeps_the_earlier_checkpoint(recipe: Any, model: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "out" / "checkpoint-20" / "hfscale_manifest.json"
    flags = [
        "--config_name",
        model,
        "--train_file",
        "text.txt",
        "--output_dir",
        "out",
        "--block_size",
        "32",
        "--max_steps",
        "40",
        "--save_steps",
        "20",
        "--per_device_train_batch_size",
        "2",
        "--dataloader_num_workers",
        "0",
        "--disable_tqdm",
        "true",
    ]
    done = recipe(*flags, wrapper=("-c", FILLING_DISK, str(manifest)))
    reports(
        done, "checkpoint-40 could not be written", "File too large", "make room and relaunch the same command", code=1
    )
    assert latest_checkpoint(tmp_path / "out") == str(manifest.parent)
    status = json.loads((tmp_path / "out" / "hfscale_status.json").read_text())
    assert (status["status"], status["checkpoint"]) == ("failed", "checkpoint-20")
    assert status["reason"].startswith("StorageError: checkpoint-40 could not be written")
    assert not (tmp_path / "out" / "checkpoint-40" / "hfscale_manifest.json").exists()


@pytest.mark.world(2)
def test_two_processes_report_a_broken_deepspeed_config_once(launch: Callable[..., Finished], tmp_path: Path) -> None:
    """The config is named in the launcher's config, and the main process alone prints the line."""
    shipped = REPOSITORY / "ds_configs" / "zero1.json"
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "zero1.json").write_text(shipped.read_text().replace(",", "", 1))
    done = launch(2, RECIPE, config=REPOSITORY / "accelerate_configs" / "zero1.yaml")
    assert done.code != 0
    (line,) = done.lines("hfscale: error")
    assert "ds_configs/zero1.json is not JSON: line 4 column 5" in line, line
