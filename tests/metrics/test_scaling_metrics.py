"""ScalingMetricsCallback: each metric is compared with an independent count."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import transformers
from conftest import REPOSITORY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import LENGTH, VOCAB, RandomTokens, logged, tiny_arguments, tiny_model, tiny_trainer
from transformers import (
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)
from wandb_file import artifact_types, config, history, run_files, run_id, step_metrics, summary

from hfscale import ScalingMetricsCallback
from hfscale.core.clocks import PhaseClock, StepPace
from hfscale.core.records import RankLines, read_records
from hfscale.core.versions import is_at_least
from hfscale.errors import UnsupportedModelError, UsageError
from hfscale.metrics import throughput
from hfscale.metrics.meters.meter import Window
from hfscale.metrics.meters.utilization import UtilizationMeter
from hfscale.metrics.progress import _line
from hfscale.metrics.throughput import FlopsModel, describe_workload, training_dtype
from hfscale.metrics.tokens import TokenCounter
from hfscale.report.page import page
from hfscale.report.prediction import predict
from hfscale.report.run_data import load_run
from hfscale.report.summary import headline, subtitle

TOKENS_PER_STEP = 4 * LENGTH


class SlowTokens(RandomTokens):
    """A dataset in which reading a sequence takes `seconds`."""

    def __init__(self, size, seconds):
        super().__init__(size)
        self.seconds = seconds
        self.slept = 0.0

    def __getitem__(self, index):
        begun = time.perf_counter()
        time.sleep(self.seconds)
        self.slept += time.perf_counter() - begun
        return super().__getitem__(index)


class SlowStep(TrainerCallback):
    """Makes each optimizer step longer by `seconds`."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_optimizer_step(self, args, state, control, **kwargs):
        time.sleep(self.seconds)


def jsonl(output_dir):
    return [json.loads(line) for line in (output_dir / "scaling.jsonl").read_text().splitlines()]


def test_a_run_records_what_its_estimate_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "hfscale").mkdir()
    row = {
        "name": "local-cpu",
        "fp32_tflops": 0.1,
        "memory_gib": 8.0,
        "memory_tb_s": 0.01,
        "source": "x",
        "date": "2026",
    }
    lines = (f"{key} = {json.dumps(value)}" for key, value in row.items())
    (tmp_path / "hfscale" / "hardware.toml").write_text("\n".join(["[[accelerator]]", *lines]))
    trainer = tiny_trainer(tmp_path / "run", ScalingMetricsCallback(), gradient_accumulation_steps=2)
    trainer.train()
    found = predict(load_run(tmp_path / "run"))
    job = found.estimate.job
    args = trainer.args
    assert job.shape.total_parameters == sum(p.numel() for p in trainer.model.parameters())
    assert (job.micro_batch, job.micro_batches) == (args.train_batch_size, 2)
    assert (job.seq_len, job.precision, job.optimizer, job.activation_checkpointing) == (
        LENGTH,
        "fp32",
        "adamw",
        "none",
    )
    assert found.tokens_per_s == load_run(tmp_path / "run").median("scaling/tokens_per_s")


def test_tokens_are_counted_exactly_with_accumulation_and_odd_windows(tmp_path):
    trainer = tiny_trainer(
        tmp_path, ScalingMetricsCallback(), max_steps=5, logging_steps=2, gradient_accumulation_steps=3
    )
    trainer.train()
    per_step = 3 * TOKENS_PER_STEP
    assert logged(trainer, "scaling/tokens_seen") == [2 * per_step, 4 * per_step, 5 * per_step]


@pytest.mark.timing
def test_evaluations_are_excluded_from_tokens_and_time(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        ScalingMetricsCallback(),
        SlowStep(0.05),
        max_steps=6,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.eval_dataset = SlowTokens(8, 0.03)
    trainer.train()
    assert logged(trainer, "scaling/tokens_seen")[-1] == 6 * TOKENS_PER_STEP
    assert load_run(tmp_path).series("eval_loss") == list(zip(range(1, 7), logged(trainer, "eval_loss"), strict=True))
    # With 8 x 30 ms of evaluation per step the rate would be a fifth of this.
    assert min(logged(trainer, "scaling/tokens_per_s")[1:3]) > TOKENS_PER_STEP / 0.15


@pytest.mark.timing
def test_the_rate_times_the_training_time_is_the_number_of_tokens(tmp_path):
    class Stopwatch(TrainerCallback):
        """The time from the first step to the last one; what comes before it takes longer on a slow machine."""

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 0:
                self.begun = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            self.seconds = time.perf_counter() - self.begun

    watch = Stopwatch()
    trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(), SlowStep(0.05), watch, max_steps=20, logging_steps=5)
    trainer.train()
    rates = logged(trainer, "scaling/tokens_per_s")[:4]
    seconds = sum(5 * TOKENS_PER_STEP / rate for rate in rates)
    assert seconds == pytest.approx(watch.seconds, rel=0.02, abs=0.02)
    assert logged(trainer, "scaling/tokens_per_s_per_gpu")[:4] == rates


@pytest.mark.timing
@pytest.mark.parametrize(("read_s", "step_s"), [(0.02, 0.08), (0.0, 0.08), (0.04, 0.04)])
def test_data_wait_is_the_share_of_the_time_spent_reading_batches(tmp_path, read_s, step_s):
    """The share is computed from measured times: what else a step costs depends on the machine and on its load."""
    data = SlowTokens(64, read_s)

    class Stopwatch(TrainerCallback):
        """The clock and the time spent reading, at each log."""

        def __init__(self):
            self.marks = []

        def on_log(self, args, state, control, **kwargs):
            self.marks.append((time.perf_counter(), data.slept))

    watch = Stopwatch()
    trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(), SlowStep(step_s), watch, max_steps=8, logging_steps=4)
    trainer.train_dataset = data
    trainer.train()
    (begun, slept), (ended, slept_at_end) = watch.marks[:2]
    expected = (slept_at_end - slept) / (ended - begun)
    assert logged(trainer, "scaling/data_wait_fraction")[1] == pytest.approx(expected, abs=0.05)
    assert (expected > 0.2) == (read_s > 0)


class TestUtilization:
    PEAK = 0.01  # TFLOP/s

    def flops_per_token(self, model):
        """6 x matmul parameters + 12 L H d S, counted from the weights: every matrix except the embedding."""
        config = model.config
        matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name)
        head_dim = config.hidden_size // config.num_attention_heads
        attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_dim * LENGTH
        return 6 * matrices + attention

    def test_mfu_follows_the_formula(self, tmp_path):
        trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(peak_tflops=self.PEAK))
        trainer.train()
        for rate, mfu in zip(logged(trainer, "scaling/tokens_per_s"), logged(trainer, "scaling/mfu"), strict=True):
            assert mfu == pytest.approx(rate * self.flops_per_token(trainer.model) / (self.PEAK * 1e12))
        assert logged(trainer, "scaling/hfu") == logged(trainer, "scaling/mfu")

    def test_hfu_includes_the_recomputed_forward_of_the_layers(self, tmp_path):
        arguments = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
        trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(peak_tflops=self.PEAK), **arguments)
        trainer.train()
        total = self.flops_per_token(trainer.model)
        layers = total - 6 * VOCAB * trainer.model.config.hidden_size
        ratio = logged(trainer, "scaling/hfu")[0] / logged(trainer, "scaling/mfu")[0]
        assert ratio == pytest.approx((total + layers / 3) / total)

    def test_lora_counts_no_gradients_of_frozen_weights(self, tmp_path):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
        frozen = sum(
            p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "lora" not in n and "embed" not in n
        )
        adapters = sum(p.numel() for n, p in model.named_parameters() if "lora" in n)
        config = model.config
        attention = 12 * config.num_hidden_layers * config.hidden_size * LENGTH
        trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(peak_tflops=self.PEAK), model=model)
        trainer.train()
        per_token = logged(trainer, "scaling/mfu")[0] / logged(trainer, "scaling/tokens_per_s")[0] * self.PEAK * 1e12
        assert per_token == pytest.approx(4 * frozen + 6 * adapters + attention)

    def test_mfu_is_absent_if_the_peak_is_unknown(self, tmp_path):
        trainer = tiny_trainer(tmp_path, ScalingMetricsCallback())
        trainer.train()
        assert logged(trainer, "scaling/mfu") == logged(trainer, "scaling/hfu") == []
        assert not any("mfu" in record for record in jsonl(tmp_path))

    @pytest.mark.parametrize(
        ("weights", "arguments", "dtype"),
        [
            (torch.float32, {}, "fp32"),
            (torch.bfloat16, {}, "bf16"),
            (torch.float16, {}, "fp16"),
            (torch.float32, {"bf16": True}, "bf16"),
        ],
    )
    def test_the_peak_is_that_of_the_dtype_of_the_matrix_products(self, tmp_path, weights, arguments, dtype):
        """A checkpoint loaded in bf16 trains in bf16 without a flag; its MFU must not be relative to the fp32 peak."""
        assert training_dtype(tiny_trainer(tmp_path, model=tiny_model().to(weights), **arguments)) == dtype

    def test_the_mixed_precision_of_the_launcher_counts(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch --mixed_precision bf16`
        trainer = tiny_trainer(tmp_path)
        assert not trainer.args.bf16
        assert training_dtype(trainer) == "bf16"

    def test_fp8_is_relative_to_the_peak_of_bf16(self, tmp_path, monkeypatch):
        """torchao needs a GPU, so fp8 is set where Accelerate keeps it, and the name of a GPU is given."""
        trainer = tiny_trainer(tmp_path)
        monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp8")
        monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
        assert describe_workload(trainer, sequence_length=LENGTH, tokens_per_gpu=LENGTH).precision == "fp8"
        meter = UtilizationMeter(None, TokenCounter())
        meter.begin(trainer, trainer.state)
        assert meter.facts() == {"flops_source": "formula", "peak_dtype": "bf16"}
        window = Window(
            steps=1, seconds=1.0, tokens=64, tokens_seen=64, tokens_per_s_per_gpu=64.0, sequence_length=LENGTH
        )
        bf16_flops = 989e12  # dense peak of an H100 SXM
        flops = 64 * FlopsModel.of(trainer.model, trainer.args).model_flops_per_token(LENGTH)
        mfu = meter.keys({}, window, trainer.state)["scaling/mfu"]
        assert mfu == pytest.approx(flops / bf16_flops, rel=1e-3)

    @pytest.mark.parametrize("switch", [None, "legacy", "as Trainer with torch_compile"])
    def test_tf32_counts_however_it_was_switched_on(self, tmp_path, monkeypatch, switch):
        matmul = torch.backends.cuda.matmul
        trainer = tiny_trainer(tmp_path)
        monkeypatch.setattr(transformers.utils, "is_torch_tf32_available", lambda: True)
        monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
        try:
            if switch == "legacy":
                matmul.allow_tf32 = True
            elif switch is not None:
                enable_tf32 = getattr(transformers.utils.import_utils, "enable_tf32", None)
                if enable_tf32 is None:
                    pytest.skip("transformers 5 has this switch")
                enable_tf32.__wrapped__(True)  # without its cache
            assert trainer.args.tf32 is None
            assert training_dtype(trainer) == ("fp32" if switch is None else "tf32")
        finally:
            torch.set_float32_matmul_precision("highest")  # which the two lines below do not undo
            if is_at_least("torch", "2.9"):
                matmul.fp32_precision = "none"
                torch.backends.fp32_precision = "none"

    def test_a_cpu_has_no_tf32(self, tmp_path, monkeypatch):
        trainer = tiny_trainer(tmp_path)
        monkeypatch.setattr(throughput, "allows_tf32", lambda: True)
        assert training_dtype(trainer) == "fp32"

    def test_a_classifier_with_a_known_config_is_not_counted_as_a_language_model(self, tmp_path):
        model = LlamaForSequenceClassification(tiny_model().config)
        with pytest.raises(UnsupportedModelError, match="LlamaForSequenceClassification"):
            FlopsModel.of(model, tiny_arguments(tmp_path))

    def test_mfu_is_absent_for_a_model_without_known_flops(self, tmp_path):
        class Bigram(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Embedding(VOCAB, VOCAB)

            def forward(self, input_ids, labels=None):
                logits = self.head(input_ids)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
                return {"loss": loss, "logits": logits}

        trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(peak_tflops=self.PEAK), model=Bigram())
        trainer.train()
        assert logged(trainer, "scaling/mfu") == []
        assert logged(trainer, "scaling/tokens_seen")[-1] == 4 * TOKENS_PER_STEP

    @pytest.mark.parametrize("peak", [0, -1.0])
    def test_a_peak_must_be_positive(self, peak):
        with pytest.raises(UsageError, match="peak_tflops"):
            ScalingMetricsCallback(peak_tflops=peak)


class TestWithoutTokens:
    def test_everything_else_is_logged_and_reported_and_one_line_says_why(self, tmp_path, caplog):
        config = ViTConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        )
        image = {"pixel_values": torch.zeros(3, 16, 16), "labels": torch.tensor(0)}
        trainer = Trainer(
            model=ViTForImageClassification(config),
            args=tiny_arguments(tmp_path),
            train_dataset=[image] * 16,
            callbacks=[ScalingMetricsCallback(peak_tflops=0.01, usd_per_gpu_hour=1.0)],
        )
        with caplog.at_level("INFO"):
            trainer.train()
        for record in jsonl(tmp_path):
            assert {key for key in record if key.startswith("scaling/")} == {
                "scaling/samples_per_s",
                "scaling/data_wait_fraction",
                "scaling/mfu",
                "scaling/hfu",
                "scaling/goodput",
                "scaling/usd",
            }
        assert [line for line in caplog.messages if "tokens_per_s is not logged" in line and "pixel_values" in line]
        run = load_run(tmp_path)
        assert "sequence_length" not in run.facts
        tiles = {tile.name: tile for tile in headline(run)}
        assert {"Steps", "Samples per second"} <= tiles.keys()
        assert all(tile.is_known for tile in tiles.values())
        assert "counted" in tiles["MFU"].note
        assert "4 samples per step" in subtitle(run)
        assert "Samples per second" in page(run)
        shown = _line(trainer.state, trainer.state.log_history[0])
        assert "samples/s" in shown


class TestJsonl:
    def test_has_one_record_per_log_with_trainers_numbers(self, tmp_path):
        trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(), max_steps=6, logging_steps=2)
        trainer.train()
        records = jsonl(tmp_path)
        assert [record["step"] for record in records] == [2, 4, 6]
        assert [record["loss"] for record in records] == logged(trainer, "loss")
        assert [record["scaling/tokens_per_s"] for record in records] == logged(trainer, "scaling/tokens_per_s")[:3]

    def test_a_resume_continues_from_the_step_of_the_checkpoint(self, tmp_path):
        arguments = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
        tiny_trainer(tmp_path, ScalingMetricsCallback(), max_steps=5, **arguments).train()
        with (tmp_path / "scaling.jsonl").open("a") as file:
            file.write('{"step": 6, "lo')  # the process is killed here
        again = tiny_trainer(tmp_path, ScalingMetricsCallback(), max_steps=8, **arguments)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        records = jsonl(tmp_path)
        assert [record["step"] for record in records] == [2, 4, 6, 8]
        # Step 3 was saved between two logs, and the checkpoint includes its tokens.
        assert [record["scaling/tokens_seen"] for record in records] == [n * TOKENS_PER_STEP for n in (2, 4, 6, 8)]

    def test_a_fresh_run_sets_the_old_file_aside(self, tmp_path):
        for _ in range(2):
            tiny_trainer(tmp_path, ScalingMetricsCallback()).train()
        assert len(jsonl(tmp_path)) == 4
        assert len(list(tmp_path.glob("scaling-until-*.jsonl"))) == 1

    def test_leaves_out_numbers_that_json_cannot_hold(self, tmp_path):
        class Explode(TrainerCallback):
            def on_step_begin(self, args, state, control, model=None, **kwargs):
                if state.global_step == 2:
                    model.lm_head.weight.data.fill_(float("nan"))

        tiny_trainer(tmp_path, ScalingMetricsCallback(), Explode(), logging_nan_inf_filter=False).train()
        text = (tmp_path / "scaling.jsonl").read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
        assert "loss" not in jsonl(tmp_path)[-1]


class TestWandb:
    """Each training runs in its own process, because W&B keeps its settings as long as a process lives."""

    @pytest.fixture
    def train(self, python, tmp_path):
        def run(*argv, **env):
            worker = REPOSITORY / "tests" / "workers" / "wandb_train.py"
            done = python(worker, *argv, env={"WANDB_DIR": str(tmp_path)} | env)
            assert done.code == 0, done.err[-3000:]
            return run_files(tmp_path)[-1]

        return run

    @pytest.mark.long
    def test_every_key_is_logged_with_the_loss_of_its_step_and_over_tokens(self, train, tmp_path):
        file = train("--over_tokens")
        rows = [row for row in history(file) if "train/loss" in row]
        assert [row["train/global_step"] for row in rows] == [1, 2, 3, 4]
        rates = [record["scaling/tokens_per_s"] for record in jsonl(tmp_path / "out")]
        assert [row["train/scaling/tokens_per_s"] for row in rows] == rates
        assert [row["train/scaling/tokens_seen"] for row in rows] == [n * TOKENS_PER_STEP for n in (1, 2, 3, 4)]
        assert {"train/loss", "train/scaling/tokens_per_s", "*"} <= step_metrics(file)
        assert run_id(train()) != run_id(file), "a fresh training has continued the run"

    @pytest.mark.long
    def test_a_resume_continues_the_run_whose_files_have_no_secrets_and_records_the_rewind(self, train, tmp_path):
        """And uploads the report."""
        planted = {
            "HF_TOKEN": "hf_" + "plantedEnvironment" * 2,
            "WANDB_API_KEY": "5ec2e7" * 6 + "abcd",
            "AWS_SECRET_ACCESS_KEY": "planted/aws+secret",
            "DB_PASSWORD": "planted-password",
        }
        argv = ["--hub_token", "planted-argument", "--api_key=planted-key", "--name=planted-password"]
        first = train(*argv, **planted)
        again = train("out/checkpoint-2", *argv, **planted)
        assert run_id(first) == run_id(again)
        assert {"train/loss", "train/scaling/tokens_per_s"}.isdisjoint(step_metrics(first)), "the x-axis has changed"
        assert artifact_types(first) == artifact_types(again) == ["report"]
        assert "<title>" in (tmp_path / "out" / "hfscale_report.html").read_text()
        assert summary(again)["run/scaling/tokens_seen"] == 4 * TOKENS_PER_STEP
        assert "hfscale_rewound" not in config(first)
        assert config(again)["hfscale_rewound"] == [{"from_step": 4, "to_step": 2}]
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".py"]
        assert b"--hub_token" in first.read_bytes()  # W&B stores the command line that it got
        for secret in (*planted.values(), "planted-argument", "planted-key"):
            assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []

    def test_a_run_id_set_by_the_user_is_kept(self, train):
        assert run_id(train(WANDB_RUN_ID="mine1234")) == "mine1234"


def test_every_key_reaches_tensorboard(tmp_path, monkeypatch):
    arguments = {"max_steps": 4, "logging_steps": 2, "report_to": ["tensorboard"]}
    if is_at_least("transformers", "5.0"):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    else:
        arguments["logging_dir"] = str(tmp_path / "events")
    trainer = tiny_trainer(tmp_path / "out", ScalingMetricsCallback(), **arguments)
    trainer.train()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    ours = [key for key in trainer.state.log_history[0] if key.startswith("scaling/")]
    assert ours
    for key in ours:
        seen = [(event.step, event.value) for event in events.Scalars(f"train/{key}")]
        assert seen == [(step, pytest.approx(value)) for step, value in zip((2, 4), logged(trainer, key), strict=True)]


@pytest.mark.recipes
def test_every_key_reaches_trackio(tmp_path):
    """In a process of its own, because trackio reads TRACKIO_DIR at its import; its commands read the numbers back."""
    script = (
        "import sys; from tiny import tiny_trainer; from hfscale import ScalingMetricsCallback\n"
        "options = {'max_steps': 4, 'logging_steps': 2, 'report_to': ['trackio'], 'project': 'ours'}\n"
        "options['trackio_space_id'] = None\n"  # transformers 4.57 has a space of the hub
        "tiny_trainer(sys.argv[1], ScalingMetricsCallback(), run_name='one', **options).train()\n"
    )
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}

    def output(*argv):
        done = subprocess.run(
            [sys.executable, *argv], env=os.environ | environment, capture_output=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def trackio(*argv):
        return json.loads(output("-m", "trackio.cli", *argv, "--project", "ours", "--run", "one", "--json"))

    output("-c", script, tmp_path / "out")
    records = jsonl(tmp_path / "out")
    ours = {f"train/{key}" for key in records[0] if key.startswith("scaling/")}
    assert ours
    assert ours <= set(trackio("list", "metrics")["metrics"])
    rates = trackio("get", "metric", "--metric", "train/scaling/tokens_per_s")["values"]
    assert [one["value"] for one in rates] == pytest.approx([record["scaling/tokens_per_s"] for record in records])


@pytest.mark.world(2)
@pytest.mark.long
def test_two_processes_are_counted_together(launch, tmp_path):
    done = launch(2, REPOSITORY / "tests" / "workers" / "metrics.py")
    assert done.code == 0, done.err[-3000:]
    records = jsonl(tmp_path / "out")
    assert [record["scaling/tokens_seen"] for record in records] == [n * 2 * TOKENS_PER_STEP for n in (2, 4, 6)]
    for record in records:
        assert record["scaling/tokens_per_s"] == pytest.approx(2 * record["scaling/tokens_per_s_per_gpu"])
    # Only rank 1 reads slowly. In one of the intervals between two logs a loaded machine may stall elsewhere.
    assert max(record["scaling/data_wait_fraction"] for record in records) > 0.5
    lines = read_records(tmp_path / "out" / "hfscale_ranks.jsonl")
    ranks = [line for line in lines if "data_wait_fraction" in line]
    assert [record["step"] for record in ranks] == [2, 4, 6]
    # Rank 0 does not wait for its own data, but for rank 1, because Trainer counts a step's tokens over all ranks.
    shares = [line["data_wait_fraction"] for line in ranks]
    slowest = [pytest.approx(record["scaling/data_wait_fraction"], abs=1e-4) for record in records]
    assert [max(both) for both in shares] == slowest, "the metric is that of the slowest rank, not the mean"
    assert min(first for first, _ in shares) < 0.1
    assert "rank 1" in done.err
    assert "waits for data" in done.err
    own = [line["compute_s"] for line in lines if "compute_s" in line]
    assert len(own) == 3
    assert all(0 < s < 60 for row in own for s in row)


def test_rank_lines_create_the_output_directory(tmp_path):
    RankLines(tmp_path / "out").add(2, {"compute_s": [0.5, 0.25], "nothing": [0.0, 0.0]})
    (line,) = read_records(tmp_path / "out" / "hfscale_ranks.jsonl")
    assert line["compute_s"] == [0.5, 0.25]
    assert "nothing" not in line


def test_phase_clock_charges_every_second_once():
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 16.0])
    clock = PhaseClock(now=lambda: next(times))
    for phase in ("data_wait", "compute", "data_wait", "save"):
        clock.end(phase)
    assert clock.take() == {"data_wait": 4.0, "compute": 2.0, "save": 4.0}
    clock.end("other")
    assert clock.seconds == {"other": 5.0}
    clock.restart()
    assert clock.seconds == {}


def test_step_pace_compares_complete_steps_only():
    times = iter([0.0, 1.0, 1.0, 2.0, 2.0, 9.0, 9.0, 10.5, 10.5, 12.5, 13.0, 23.0])
    pace = StepPace(now=lambda: next(times))
    assert pace.take_slowdown() is None
    for begins, ends in ((False, False), (False, False), (False, True), (True, True), (True, True), (True, False)):
        pace.begin(begins)
        pace.end(ends)
    assert pace.take_slowdown() == 1.75
    assert pace.take_slowdown() is None
