"""Launched recipes prepare their data once, for all processes and runs, and end with one line if that fails."""

import pytest
from conftest import RECIPE, REPOSITORY, agent_launch
from test_data_cache import CHAT, write

pytestmark = [pytest.mark.finetuning, pytest.mark.world(2)]

FLAGS = ["--block_size", "32", "--max_steps", "2", "--report_to", "none", "--save_strategy", "no", "--use_cpu", "true"]
FLAGS += ["--loss_on", "assistant", "--validation_split_percentage", "20"]


def token_files(cache):
    return {path: path.stat().st_mtime_ns for path in cache.rglob("cache-*.arrow")}


def test_a_second_run_and_other_ranks_tokenise_nothing(tmp_path, launch):
    """In new interpreters, whose hashes of strings differ, and from another folder."""
    cache = tmp_path / "cache"
    env = {"HF_DATASETS_CACHE": str(cache)}
    config = REPOSITORY / "accelerate_configs" / "ddp.yaml"
    chat = [{"messages": [*record["messages"]]} for record in CHAT * 4]
    for number, processes in enumerate((1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "chat.jsonl", chat)
        (folder / "mix.yaml").write_text("- {train_file: chat.jsonl, weight: 1}")
        done = agent_launch(folder, config, processes, RECIPE, "--data_mix", "mix.yaml", *FLAGS, **env)
        assert done.code == 0, done.err[-3000:]
        if number == 0:
            first = token_files(cache)
            assert first
    assert token_files(cache) == first
    assert "100.0% of the records are of chat.jsonl" in done.err

    chat[2]["messages"] = []
    write(tmp_path / "chat.jsonl", chat)
    done = launch(2, RECIPE, "--train_file", "chat.jsonl", *FLAGS, env={"HF_DATASETS_CACHE": str(cache)})
    assert done.code != 0
    (line,) = done.lines("hfscale: error")
    assert "--train_file chat.jsonl, row 3" in line
