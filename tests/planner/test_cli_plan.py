"""`hfscale plan` and `hfscale estimate`: their JSON, their tables, their files, their errors, their speed."""

import csv
import json
import re
import shlex
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from conftest import REPOSITORY
from launch_words import launched_words

from hfscale.cli import main
from hfscale.planner.estimate import fits_word
from hfscale.planner.table import number

PLAN = ["plan", "llama-3.1-8b", "--gpu", "H100-80GB", "--gpus", "8"]
ESTIMATE = ["estimate", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "8"]
PLANNER_PAGE = REPOSITORY / "docs" / "planner.md"
TABLE = REPOSITORY / "benchmarks" / "data" / "throughput.csv"
MEMORY = {"parameters", "gradients", "optimizer", "activations", "loss", "buffers", "context", "cached", "total"}


def run(capsys, *argv, code=0):
    assert main(list(argv)) == code
    return capsys.readouterr()


class TestPlan:
    def test_the_promised_json(self, capsys):
        found = json.loads(run(capsys, *PLAN, "--tokens", "1B", "--json").out)
        assert {"model", "hardware", "choices", "rejected"} <= set(found)
        choice = found["choices"][0]
        promised = {
            "strategy",
            "layout",
            "zero_stage",
            "micro_batch",
            "grad_accum",
            "activation_checkpointing",
            "memory_gib",
            "step_time_s",
            "tokens_per_s_per_gpu",
            "mfu",
            "gpu_hours",
            "cost_usd",
        }
        assert promised <= set(choice)
        assert set(choice["layout"]) == {"dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"}
        assert set(choice["memory_gib"]) == MEMORY
        assert choice["gpu_hours"] > 0
        assert all(set(row) == {"layout", "reason"} for row in found["rejected"])

    def test_without_tokens_duration_and_cost_are_unknown(self, capsys):
        choice = json.loads(run(capsys, *PLAN, "--json").out)["choices"][0]
        assert choice["gpu_hours"] is None
        assert choice["cost_usd"] is None

    def test_the_table_has_all_sections(self, capsys):
        out = run(capsys, *PLAN, "--tokens", "20B", "--details").out
        for word in ("strategy", "tokens/s/GPU", "MFU", "days", "USD", "provider", "Advice", "Assumptions", "goodput"):
            assert word in out
        assert max(map(len, out.splitlines())) <= 120

    @pytest.mark.parametrize("number", range(3))
    def test_the_documentation_shows_what_is_printed(self, capsys, number):
        blocks = re.findall(r"^\$ hfscale (plan .*)\n([^`]*)```", PLANNER_PAGE.read_text(), re.MULTILINE)
        assert len(blocks) == 3
        command, shown = blocks[number]
        out = [line.rstrip() for line in run(capsys, *command.split()).out.splitlines()]
        assert out[: shown.count("\n")] == shown.splitlines()

    def test_the_answer_comes_first_and_fits_80_columns(self, capsys):
        found = json.loads(run(capsys, *PLAN, "--tokens", "20B", "--json").out)
        best = found["choices"][0]
        lines = run(capsys, *PLAN, "--tokens", "20B").out.splitlines()
        heading, answer = lines[0], " ".join(lines[1:6])
        assert "8.03B parameters" in heading
        for part in (
            best["strategy"],
            f"{8 * best['tokens_per_s_per_gpu']:,.0f} tokens/s",
            f"{best['hours'] / 24:.1f} days",
            f"{best['cost_usd']:,.0f} USD",
            "fits: yes",
        ):
            assert part in answer
        assert "Global batch: 1024 sequences, 4,194,304 tokens per step, assumed" in " ".join(lines[:8])
        start = lines.index("Start it:")
        assert start < 9
        assert all(len(line) <= 80 for line in lines)
        assert "Assumptions" not in "".join(lines)
        assert "--details" in lines[-1]

    def test_a_given_batch_is_not_repeated_as_an_assumption(self, capsys):
        assert "assumed" not in run(capsys, *PLAN, "--global-batch", "64").out

    def test_the_command_that_starts_it_plans_the_same_and_writes_what_it_runs(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        argv = [*PLAN, "--seq-len", "2048", "--no-liger", "--tokens", "1B", "--top", "3"]
        shown = run(capsys, *argv).out
        lines = shown.splitlines()
        start = lines.index("Start it:")
        end = next(number for number, line in enumerate(lines) if line.startswith("  bash "))
        assert end > start + 2, "the command is short: nothing is wrapped"
        assert all(len(line) <= 80 for line in lines[start:end])
        command, launch = shlex.split("\n".join(lines[start + 1 : end]).replace("\\\n", "")), shlex.split(lines[end])
        assert command[0] == "hfscale"
        again = run(capsys, *command[1:]).out
        assert launch == ["bash", "runs/plan/launch.sh"]
        assert (tmp_path / launch[1]).is_file()
        assert again.splitlines()[: start + 1] == lines[: start + 1]
        assert f"  {' '.join(launch)}" in again  # the files are there: no command that writes them

    def test_nothing_is_started_that_no_recipe_runs(self, capsys):
        assert "Start it" not in run(capsys, *PLAN, "--stack", "megatron").out

    def test_a_layout_that_surely_fits_comes_before_a_simpler_one(self, capsys):
        found = json.loads(run(capsys, *PLAN, "--no-compile", "--json").out)
        words = [fits_word(choice["fits_probability"]) for choice in found["choices"]]
        assert words[0] == "yes"
        assert "likely" in words, "the case is gone: FSDP2 with the fused loss was simpler, slower and uncertain"

    def test_a_model_that_is_too_large_is_offered_adapters_and_more_gpus(self, capsys):
        argv = ["plan", "llama-3.1-70b", "--gpu", "H100-80GB", "--gpus", "8"]
        choices = json.loads(run(capsys, *argv, "--json").out)["choices"]
        assert choices[0]["offload"] == "full"
        hosts = [choice["host_memory_gib_per_node"] for choice in choices]
        assert max(hosts) <= choices[0]["host_memory_assumed_gib_per_node"] == 2048
        out = run(capsys, *argv).out
        assert "adapters: --method lora*" in out
        assert re.search(r"more GPUs: --gpus (16|32|64):", out)

    def test_provider_and_spot_choose_the_prices(self, capsys):
        argv = [*PLAN, "--tokens", "1B", "--json"]
        every = json.loads(run(capsys, *argv).out)["choices"][0]["costs"]
        assert {row["kind"] for row in every} == {"on-demand", "spot"}
        for provider in ("runpod", "RunPod"):
            costs = json.loads(run(capsys, *argv, "--provider", provider).out)["choices"][0]["costs"]
            assert {row["provider"] for row in costs} == {"RunPod Community", "RunPod Secure"}
        costs = json.loads(run(capsys, *argv, "--spot").out)["choices"][0]["costs"]
        assert costs
        assert {row["kind"] for row in costs} == {"spot"}
        none = json.loads(run(capsys, *argv, "--spot", "--provider", "Lambda").out)
        assert none["choices"][0]["cost_usd"] is None
        assert "no spot price of H100-80GB at Lambda is known: give --usd-per-gpu-hour" in none["warnings"]

    def test_what_is_printed_keeps_brackets(self, capsys):
        """rich reads [gpu] as markup unless it is told not to."""
        out = " ".join(run(capsys, "plan", "gemma-2-9b", *PLAN[2:], "--liger", "--details").out.split())
        assert "pip install liger-kernel" in out

    def test_several_types_of_gpu_are_one_table(self, capsys):
        argv = ["plan", "qwen3-0.6b", "--gpu", "A10G,H100-80GB,T4", "--gpus", "1", "--tokens", "1B"]
        lines = run(capsys, *argv).out.splitlines()
        rows = [line.split()[0] for line in lines if line.startswith(("A10G", "H100"))]
        assert rows == ["H100-80GB", "A10G"]
        assert any("T4: --precision is bf16" in line for line in lines)
        found = json.loads(run(capsys, *argv, "--json").out)
        assert [one["hardware"]["gpu"] for one in found["plans"]] == rows
        assert set(found["failed"]) == {"T4"}

    def test_layouts_are_in_words(self, capsys):
        out = run(capsys, *PLAN, "--details").out
        assert "dp_replicate=" not in out
        assert "replicate 8: ddp needs" in out
        assert "dp_replicate=" not in run(capsys, *PLAN).out

    def test_a_faster_layout_comes_second_for_a_reason(self, capsys):
        argv = ["plan", "llama-3.1-8b", "--gpu", "A100-80GB", "--gpus", "4"]
        found = json.loads(run(capsys, *argv, "--json").out)
        first, second = (choice["tokens_per_s_per_gpu"] for choice in found["choices"][:2])
        assert f"{1 - first / second:.1%} faster" in found["order"]
        assert found["order"] in " ".join(run(capsys, *argv).out.split())
        assert json.loads(run(capsys, *argv, "--objective", "gpus", "--json").out)["order"] is None

    def test_top(self, capsys):
        assert len(json.loads(run(capsys, *PLAN, "--top", "2", "--json").out)["choices"]) == 2

    def test_nothing_fits_is_exit_code_1_with_reasons(self, capsys):
        out = run(capsys, "plan", "llama-3.1-405b", "--gpu", "L4", "--gpus", "8", code=1).out
        assert "Nothing fits" in out
        assert "GiB per GPU even with full recomputation" in out

    def test_min_gpus(self, capsys):
        argv = ["plan", "llama-3.1-70b", "--gpu", "H100-80GB", "--gpus", "64", "--min-gpus"]
        assert "Fewest GPUs that suffice: " in run(capsys, *argv).out

    @pytest.mark.parametrize(
        ("argv", "parts"),
        [
            (["plan", "llama-9", "--gpu", "H100", "--gpus", "8"], ["'llama-9'", "llama-3"]),
            (["plan", "llama-3.1-8b", "--gpu", "H1000", "--gpus", "8"], ["'H1000'", "H100"]),
            (["plan", "llama-3.1-8b", "--gpu", "H100", "--gpus", "0"], ["--gpus is 0"]),
            (["plan", "llama-3.1-8b", "--gpu", "H100", "--gpus", "eight"], ["--gpus is 'eight'", "integer"]),
            (
                ["plan", "llama-3.1-8b", "--gpu", "H100", "--gpus", "4,4"],
                ["--gpus is '4,4'", "groups of GPU is not planned"],
            ),
            (["plan", "llama-3.1-8b", "--gpu", "4xA100+4xH100", "--gpus", "8"], ["--gpu is", "is not planned"]),
            (["estimate", "llama-3.1-8b", "--gpu", "8x H100"], ["--gpu is '8x H100'", "is not planned"]),
            (["check", "--deadline", "soon"], ["--deadline is 'soon'", "number"]),
            ([*PLAN, "--budget=cheap"], ["--budget is 'cheap'", "number"]),
            ([*PLAN, "--tokens", "many"], ["--tokens is 'many'", "1T"]),
            ([*PLAN, "--tokens", "0"], ["'0'"]),
            ([*PLAN, "--objective", "joy"], ["--objective is 'joy'", "'time', 'cost', 'gpus'"]),
            ([*PLAN, "--budget", "5"], ["--tokens"]),
            ([*PLAN, "--tokens", "1B", "--provider", "nowhere"], ["--provider is 'nowhere'", "AWS", "Lambda"]),
            ([*PLAN, "--stack", "jax"], ["'jax'", "megatron"]),
            ([*PLAN, "--prices", "/nowhere.toml"], ["/nowhere.toml"]),
            ([*PLAN, "--top", "0"], ["--top is 0"]),
            ([*PLAN, "--spot-interruptions=-1"], ["--spot-interruptions is -1.0", "from 0 to 60"]),
            ([*PLAN, "--pure-bf16", "--precision", "fp16"], ["--pure-bf16", "--precision bf16"]),
            ([*ESTIMATE, "--pure-bf16", "--precision", "fp32"], ["--pure-bf16", "--precision bf16"]),
            ([*PLAN[:3], ",", *PLAN[4:]], ["--gpu is ','", "H100-80GB,A100-80GB"]),
            ([*PLAN, "--spot-interruptions", "nan"], ["--spot-interruptions is nan"]),
            ([*PLAN[:3], "H100,A100-80GB", *PLAN[4:], "--emit", "out"], ["--gpu is H100,A100-80GB", "one GPU"]),
            ([*PLAN, "--plot", "plan.txt"], ["plan.txt", ".svg"]),
            ([*PLAN, "--stack", "titan", "--emit", "out"], ["--emit", "titan"]),
            (["plan", "llama-3.1-8b"], ["--gpu"]),
            ([*ESTIMATE, "--tp", "3"], ["tp=3"]),
            ([*ESTIMATE, "--zero", "7"], ["zero is 7"]),
            ([*ESTIMATE, "--activation-checkpointing", "half"], ["'half'"]),
            (["estimate", "llama-3.1-8b", "--gpu", "H100", "--gpus", "8", "--dp-shard", "3"], ["needs 3 processes"]),
            (["estimate"], ["MODEL"]),
            (["estimate", "--table", "/nowhere.csv"], ["/nowhere.csv"]),
            (["estimate", "x", "--table", "y.csv"], ["not both"]),
        ],
    )
    def test_wrong_usage_is_one_line_and_exit_code_2(self, capsys, argv, parts):
        found = run(capsys, *argv, code=2)
        assert found.out == ""
        assert len(found.err.splitlines()) == 1, found.err
        assert all(part in found.err for part in parts), found.err

    @pytest.mark.parametrize("gpu", ["A100 80GB", "H100-94/95GB-HBM2e-lowTDP"])
    def test_a_name_with_a_number_is_one_gpu(self, capsys, gpu):
        assert "fits" in run(capsys, "estimate", "smollm2-360m", "--gpu", gpu).out

    def test_an_unsupported_config_is_one_line(self, capsys, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
        found = run(capsys, "plan", str(tmp_path), "--gpu", "H100", "--gpus", "8", code=2)
        assert "resnet" in found.err
        assert len(found.err.splitlines()) == 1

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("", "cannot be read as a model config"),
            ("[]", "not a JSON object"),
            ("{}", "no model_type"),
            ('{"model_type": "llama"}', "num_hidden_layers is missing"),
            ("\udcff", "cannot be read as a model config"),
            ('{"model_type": "llama", "num_hidden_layers": 2000000000}', "an integer up to 1,000 in config.json"),
            ('{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 1000000000000}', "up to 1,000,000,000"),
            ('{"model_type": "llama", "num_hidden_layers": NaN}', "num_hidden_layers is nan"),
            (None, "Is a directory"),
        ],
    )
    def test_an_invalid_config_is_one_line(self, capsys, tmp_path, text, part):
        path = tmp_path / "config.json"
        if text is None:
            path.mkdir()
        else:
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
        found = run(capsys, "plan", str(tmp_path), "--gpu", "H100", "--gpus", "8", code=2)
        assert part in found.err
        assert len(found.err.splitlines()) == 1

    def test_plot_draws_or_asks_for_matplotlib(self, capsys, tmp_path):
        path = tmp_path / "plan.svg"
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            assert 'pip install --upgrade "matplotlib>=3.9"' in run(capsys, *PLAN, "--plot", str(path), code=2).err
        else:
            run(capsys, *PLAN, "--tokens", "1B", "--plot", str(path))
            assert path.read_text().lstrip().startswith("<?xml")


class TestEmit:
    @pytest.mark.parametrize(
        ("argv", "kind"),
        [
            (["qwen3-0.6b", "--gpu", "H100", "--gpus", "8"], "MULTI_GPU"),
            (["qwen3-0.6b", "--gpu", "H100", "--gpus", "1"], "NO"),
            (["qwen2.5-14b", "--gpu", "H100", "--gpus", "16", "--no-liger"], "FSDP"),
            (["llama-3.1-8b", "--gpu", "H100", "--gpus", "64"], None),
            (["qwen2.5-14b", "--gpu", "RTX4090", "--gpus", "8", "--seq-len", "1024"], "DEEPSPEED"),
            (["llama-3.1-8b", "--gpu", "A100-80GB", "--gpus", "1", "--method", "lora"], "NO"),
        ],
    )
    def test_files_are_read_by_their_library(self, capsys, tmp_path, argv, kind):
        from accelerate.commands.config.config_args import load_config_from_file

        out = tmp_path / "out"
        found = json.loads(run(capsys, "plan", *argv, "--tokens", "1B", "--emit", str(out), "--json").out)
        best = found["choices"][0]
        assert set(found["files"]) == {str(path) for path in out.iterdir()}
        config = load_config_from_file(str(out / "accelerate.yaml"))
        assert kind is None or config.distributed_type.value == kind
        assert config.num_processes == best["gpus"]
        recipe = yaml.safe_load((out / "recipe.yaml").read_text())
        assert recipe["per_device_train_batch_size"] == best["micro_batch"]
        assert recipe["gradient_accumulation_steps"] == best["grad_accum"]
        assert recipe["max_steps"] * best["global_batch"] * recipe["block_size"] >= 1e9
        assert isinstance(recipe["learning_rate"], float)
        assert recipe.get("use_peft", False) == ("lora" in argv)
        if (out / "deepspeed.json").exists():
            assert json.loads((out / "deepspeed.json").read_text())["zero_optimization"]["stage"] == best["zero_stage"]
        words = launched_words(out / "launch.sh", tmp_path)
        assert words[:4] == ["accelerate", "launch", "--config_file", str(out / "accelerate.yaml")]
        command = f"# accelerate launch --config_file {out / 'accelerate.yaml'}"
        assert (out / "recipe.yaml").read_text().startswith(command)
        (out / "recipe.yaml").write_text("mine: true\n")
        asked = ["plan", *argv, "--tokens", "1B", "--emit", str(out)]
        assert run(capsys, *asked, code=2).err.startswith(
            f"hfscale: error: --emit {out}: {out}/recipe.yaml was changed"
        )
        run(capsys, *asked, "--force")
        assert yaml.safe_load((out / "recipe.yaml").read_text()) == recipe

    def test_hsdp_and_tensor_parallel_sizes_are_read_by_accelerate(self):
        from hfscale import estimate
        from hfscale.planner.emit import accelerate_yaml
        from hfscale.planner.plan import Choice, plan

        asked = plan("llama-3.1-8b", gpu="H100-80GB", gpus=16)
        layout = {"dp_replicate": 2, "dp_shard": 4, "tp": 2}
        one = estimate("llama-3.1-8b", gpu="H100-80GB", layout=layout, seq_len=4096, zero=3)
        found = yaml.safe_load(accelerate_yaml(asked, Choice(estimate=one), REPOSITORY))
        assert found["parallelism_config"] == {
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": 4,
            "parallelism_config_tp_size": 2,
        }
        assert found["num_machines"] == 2

    def test_a_folder_that_cannot_be_created_is_one_line(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        found = run(capsys, *PLAN, "--emit", str(tmp_path / "file" / "out"), code=1)
        assert "cannot be written" in found.err


class TestEstimate:
    def test_the_promised_json(self, capsys):
        found = json.loads(run(capsys, *ESTIMATE, "--json").out)
        promised = {"memory_gib", "fits", "step_time_s", "time_s", "tokens_per_s_per_gpu", "mfu"}
        assert promised <= set(found)
        low, high = found["memory_range_gib"]
        assert low < found["memory_gib"]["total"] < high
        assert found["step_time_range_s"][0] < found["step_time_s"] < found["step_time_range_s"][1]
        assert 0.5 < found["fits_probability"] <= 1
        assert set(found["memory_gib"]) == MEMORY
        assert set(found["time_s"]) == {"compute", "communication", "bubble", "optimizer"}
        assert sum(found["time_s"].values()) == pytest.approx(found["step_time_s"])
        assert found["fits"] is True

    def test_every_flag_of_a_large_layout(self, capsys):
        argv = [
            "estimate",
            "llama-3.1-405b",
            "--gpu",
            "H100-80GB",
            "--gpus",
            "1024",
            "--dp-replicate",
            "4",
            "--dp-shard",
            "1",
            "--cp",
            "2",
            "--tp",
            "8",
            "--pp",
            "16",
            "--virtual-stages",
            "2",
            "--zero",
            "1",
            "--micro-batch",
            "1",
            "--global-batch",
            "512",
            "--seq-len",
            "8192",
            "--activation-checkpointing",
            "selective",
            "--precision",
            "fp8",
            "--compile",
            "--stack",
            "megatron",
            "--json",
        ]
        assert json.loads(run(capsys, *argv).out)["mfu"] > 0.1

    def test_loss_states_adapters_and_optimizer_are_flags(self, capsys):
        def peak(*flags):
            argv = [*ESTIMATE, "--micro-batch", "2", *flags, "--json"]
            return json.loads(run(capsys, *argv).out)["memory_gib"]

        plain = peak()
        assert peak("--liger")["loss"] < plain["loss"]
        assert peak("--pure-bf16")["optimizer"] < plain["optimizer"]
        assert peak("--optimizer", "adamw_8bit")["optimizer"] < plain["optimizer"]
        low, high = (peak("--method", "lora", "--lora-rank", rank)["optimizer"] for rank in ("8", "64"))
        assert high == pytest.approx(8 * low)

    def test_remaining_ranks_shard_or_replicate(self, capsys):
        assert "dp_replicate=1 x dp_shard=8" in run(capsys, *ESTIMATE).out

    def test_the_layout_shows_expert_parallel_ranks(self, capsys):
        plan = ["plan", "deepseek-v3", "--gpu", "H800-80GB", "--gpus", "2048", "--stack", "megatron"]
        assert " ep 64 " in run(capsys, *plan).out
        assert "dp_replicate=8 x dp_shard=1" in run(capsys, *ESTIMATE, "--zero", "1").out
        assert "dp_replicate=2 x dp_shard=4" in run(capsys, *ESTIMATE, "--dp-replicate", "2").out

    @pytest.mark.parametrize(
        ("argv", "part"),
        [
            (["--gpus", "0"], "--gpus is 0"),
            (["--gpus", "8", "--dp-shard", "0"], "--dp-shard is 0"),
            (["--gpus", "99999999999999999999"], "from 1 to 1,000,000"),
            (["--gpus", "8", "--tp", "-2"], "--tp is -2"),
            (["--gpus", "8", "--seq-len", "1000000000000"], "--seq-len is 1000000000000: it must be at most"),
            (["--gpus", "8", "--micro-batch", "1000000000000"], "--micro-batch is 1000000000000: it must be at most"),
            (["--gpus", "4194304", "--micro-batch", "1"], "from 1 to 1,000,000"),
            (["--gpus", "8", "--network-gb-s", "inf"], "above 0 and finite"),
            (["--gpus", "8", "--overlapped-experts"], "--overlapped-experts needs --stack megatron"),
            (["--gpus", "8", "--expert-parallel", "2"], "does not divide 0 experts: use 1"),
        ],
    )
    def test_impossible_sizes_are_one_line(self, capsys, argv, part):
        found = run(capsys, "estimate", "llama-3.1-8b", "--gpu", "H100", *argv, code=2)
        assert part in found.err
        assert len(found.err.splitlines()) == 1

    def test_an_estimate_that_does_not_fit_says_so(self, capsys):
        assert "does NOT fit" in run(capsys, *ESTIMATE, "--micro-batch", "64").out

    def test_a_memory_within_the_error_may_not_fit(self, capsys):
        layout = ("--dp-replicate", "128", "--tp", "8", "--pp", "16", "--gpus", "16384", "--zero", "2")
        argv = ("estimate", "llama-3.1-405b", "--gpu", "H100-80GB", "--seq-len", "8448", "--global-batch", "2048")
        out = run(capsys, *argv, *layout, "--stack", "megatron", "--virtual-stages", "2").out
        assert "may not fit (uncertain" in out
        assert "peak: backward pass, first pipeline rank" in out


def addition_s():
    """The CPU time of adding a number in a loop, as a measure of the machine's speed, in seconds."""
    begun = time.process_time()
    sum(number * number for number in range(10**7))
    return (time.process_time() - begun) / 10**7


class TestTable:
    def test_a_line_per_row_in_order(self, capsys):
        lines = [json.loads(line) for line in run(capsys, "estimate", "--table", str(TABLE)).out.splitlines()]
        with TABLE.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [line["row"] for line in lines] == list(range(len(rows)))
        for line in lines:
            assert set(line) == {"row", "tokens_per_s_per_gpu", "peak_mem_gib", "mfu", "error"}
            assert (line["error"] is None) == (line["tokens_per_s_per_gpu"] is not None)
        assert sum(line["error"] is not None for line in lines) < 12
        good = [
            line["tokens_per_s_per_gpu"] / number(row, "tokens_per_s_per_gpu")
            for line, row in zip(lines, rows, strict=True)
            if line["error"] is None and row["tokens_per_s_per_gpu"] and not row["doubt"]
        ]
        assert sorted(good)[len(good) // 2] == pytest.approx(1, abs=0.05)

    def test_a_bad_row_has_an_error_and_the_others_are_estimated(self, capsys, tmp_path):
        path = tmp_path / "t.csv"
        path.write_text(
            "model,params_b,seq_len,gpus,gpu_type,tp,tokens_per_s_per_gpu\n"
            "a 7B,7,4096,8,H100-80GB,1,x\n"
            "a 7B,7,4096,8,H100-80GB,3,1\n"
            "a 7B,7,4096,8,Z80,1,1\n"
            "a 7B,7,4096,-8,H100-80GB,1,1\n"
            "a 7B,7,4096,8,H100-80GB,1,1,1,1\n"
            "\n"
            "a 7B,7,4096,8,H100-80GB,2,\n"
        )
        lines = [json.loads(line) for line in run(capsys, "estimate", "--table", str(path)).out.splitlines()]
        assert [line["error"] is None for line in lines] == [True, False, False, False, False, True]
        assert "tp 3" in lines[1]["error"]
        assert "Z80" in lines[2]["error"]
        assert "-8" in lines[3]["error"]

    def test_missing_columns_are_one_line(self, capsys, tmp_path):
        path = tmp_path / "t.csv"
        path.write_text("model,seq_len\na,1\n")
        found = run(capsys, "estimate", "--table", str(path), code=2)
        assert f"--table {path} has no column gpus, gpu_type" in found.err
        assert len(found.err.splitlines()) == 1

    def test_an_invalid_table_is_one_line(self, capsys, tmp_path):
        path = tmp_path / "t.csv"
        path.write_bytes(b"\xff\xfe\x00\x01")
        assert "cannot be read" in run(capsys, "estimate", "--table", str(path), code=2).err

    @pytest.mark.timing
    def test_a_row_takes_the_cpu_time_of_a_short_loop(self, capsys, tmp_path):
        """At most that of 7,500 additions: 2,000 rows a second on a core that adds 15 million numbers a second."""
        with TABLE.open(newline="") as file:
            header, *lines = file.read().splitlines()
        path = tmp_path / "t.csv"
        path.write_text("\n".join([header, *lines * 8]))
        begun = time.process_time()
        run(capsys, "estimate", "--table", str(path))
        row_s = (time.process_time() - begun) / (8 * len(lines))
        assert row_s < 7500 * addition_s()


@pytest.mark.timing
def test_a_plan_takes_the_cpu_time_of_a_loop():
    """At most that of 40 million additions: 2 s on a core that adds 20 million numbers a second."""

    def cpu_s(*words):
        before = psutil.Process().cpu_times()
        subprocess.run([sys.executable, *words], check=False, capture_output=True, timeout=60)
        after = psutil.Process().cpu_times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    limit_s = 40e6 * addition_s()
    for argv in (
        ("llama-3.1-70b", "--gpu", "H100-80GB", "--gpus", "512"),
        ("llama-3.1-405b", "--gpu", "RTX4090", "--gpus", "64"),  # nothing fits, on twice as many GPUs neither
        ("deepseek-v3", "--gpu", "H100-80GB", "--gpus", "64"),  # nothing fits
        ("llama-3.1-405b", "--gpu", "H100-80GB", "--gpus", "16384", "--seq-len", "8192"),
    ):
        assert min(cpu_s("-m", "hfscale", "plan", *argv) for _ in range(2)) <= limit_s, argv
