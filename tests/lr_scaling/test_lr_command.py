"""`hfscale lr`: the table, the best rate and its flags, the edge of a sweep, the check, and what is refused."""

import json

import pytest
from transformers import AutoConfig

from hfscale.cli import main
from hfscale.errors import ParameterError
from hfscale.lr_scaling.lr_sweep import parse_rates


@pytest.fixture
def files(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = AutoConfig.for_model("llama", vocab_size=256, num_hidden_layers=1, max_position_embeddings=64, **sizes)
    config.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("What is repeated is soon learnt. " * 60)
    return [str(tmp_path / "config.json"), "--data", str(tmp_path / "text.txt")]


def call(files, *arguments):
    return main(["lr", *files, "--steps", "6", "--batch", "4", "--block-size", "16", *arguments])


def test_the_best_rate_and_the_flags_for_full_width_are_printed(capsys, files):
    assert call(files, "--width", "16", "--rates", "1e-6,2e-2,50") == 0
    printed = capsys.readouterr()
    assert "at any width from 16: --base_width 16 --learning_rate 0.02" in printed.out
    assert "each byte is a token" in printed.err


def test_a_best_rate_at_the_edge_is_one_line_and_exit_code_1(capsys, files):
    assert call(files, "--width", "16", "--rates", "1e-6,2e-6,4e-6", "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["is_at_edge"]
    assert "at the edge of the sweep: give --rates" in printed.err.splitlines()[-1]


def test_the_check_prints_a_row_for_each_module(capsys, files):
    main(["lr", *files, "--batch", "4", "--block-size", "16", "--width", "16", "--check", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["widths"] == [16, 32, 64]
    assert {"model.embed_tokens", "model.layers.*.mlp.down_proj", "lm_head"} <= {
        row["module"] for row in answer["modules"]
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "12"], "--width is 12: it must be a multiple of 8 up to 64"),
        (["--width", "16", "--rates", "1..x"], "--rates is 1..x: write a range"),
        (["--width", "32", "--check"], "the check needs three widths"),
        (["--width", "16", "--batch", "4000"], "give a longer text, or a smaller --batch"),
        (["--width", "16", "--data", "none.txt"], "none.txt cannot be read (No such file or directory)"),
        (["--width", "16", "--data", "/bin/sh"], "/bin/sh is not text in UTF-8"),
    ],
)
def test_what_cannot_work_is_one_line(capsys, files, arguments, message):
    assert call(files, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_config_that_is_not_there_is_one_line(capsys, files):
    assert main(["lr", "nowhere", *files[1:], "--width", "16"]) == 2
    assert "CONFIG nowhere is not the config of a causal language model" in capsys.readouterr().err


def test_rates_double_in_a_range():
    assert parse_rates("1e-3..8e-3") == pytest.approx([1e-3, 2e-3, 4e-3, 8e-3])
    for text in ("1e-3", "1e-3,2e-3", "0..1", "4e-3..2e-3", "nan,1,2"):
        with pytest.raises(ParameterError):
            parse_rates(text)
