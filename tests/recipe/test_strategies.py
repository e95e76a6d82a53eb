"""Every Accelerate config is launched, runs the strategy that it names, and trains like all the others.

The control is the DDP recipe on two processes: the same text, seed and global batch in fp32. Each config must give its
losses, gradient norms, evaluation loss and final weights. NEEDS_GPU lists what a CPU cannot run, with the reason.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, accelerate_launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hfscale.checkpoint.store import verify

pytestmark = pytest.mark.recipes
SHARDED = REPOSITORY / "recipes" / "sharded" / "train.py"
CONFIGS = REPOSITORY / "accelerate_configs"
STEPS = 4
FLAGS = [
    "--config_name",
    "deep",
    "--tokenizer_name",
    "tokenizer",
    "--train_file",
    "text.txt",
    "--block_size",
    "32",
    "--max_train_samples",
    "64",
    "--max_eval_samples",
    "8",
    "--max_steps",
    str(STEPS),
    "--save_steps",
    "2",
    "--logging_steps",
    "1",
    "--lr_scheduler_type",
    "constant",
    "--learning_rate",
    "1e-2",
    "--optim",
    "adamw_torch",
    "--disable_tqdm",
    "true",
    "--output_dir",
    "out",
]
LORA = ["--use_peft", "true", "--lora_r", "4"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a config is launched and what the log must say about each rank."""

    strategy: str
    traits: tuple[str, ...]
    processes: int = 2
    data_parallel_size: int | None = None
    accumulation: int = 1
    recipe: str = "sharded"
    flags: tuple[str, ...] = ()

    @property
    def batch(self) -> list[str]:
        """The flags that make the global batch four sequences."""
        per_rank = 4 // (self.data_parallel_size or self.processes)
        size, steps = str(per_rank // self.accumulation), str(self.accumulation)
        return ["--per_device_train_batch_size", size, "--gradient_accumulation_steps", steps]


HALF = "50.0% of the parameters per rank"
CASES = {
    "ddp": Case(strategy="ddp", recipe="ddp", traits=("DistributedDataParallel", "100.0% of the parameters per rank")),
    "fsdp2": Case(strategy="fsdp2", accumulation=2, traits=("FSDPLlamaForCausalLM, S(0) over dp_shard=2", HALF)),
    "fsdp2_grad_op": Case(strategy="fsdp2", traits=("S(0) over dp_shard=2, kept from forward to backward", HALF)),
    "fsdp2_hsdp": Case(strategy="fsdp2", processes=4, traits=("R S(0) over dp_replicate=2 x dp_shard_cp=2", HALF)),
    "fsdp2_offload": Case(strategy="fsdp2", traits=("S(0) over dp_shard=2", HALF, "offloaded to cpu")),
    "fsdp2_tp": Case(
        strategy="native",
        processes=4,
        data_parallel_size=2,
        traits=("over fsdp=2 x tp=2", "25.0% of the parameters"),
    ),
    "native": Case(
        strategy="native", accumulation=2, flags=("--fsdp_size", "2"), traits=("fsdp=2, S(0) over fsdp=2", HALF)
    ),
    "tp_pp": Case(
        strategy="parallel",
        processes=4,
        data_parallel_size=1,
        accumulation=2,
        recipe="tp_pp",
        flags=("--tp_size", "2", "--pp_size", "2"),
        traits=("tp=2 x pp=2, 1F1B", "of the parameters per rank"),
    ),
    "zero1": Case(
        strategy="zero1",
        recipe="ddp",
        traits=("DeepSpeedEngine", "100.0% of the parameters", "50.0% of the optimizer"),
    ),
    "zero2": Case(
        strategy="zero2", accumulation=2, traits=("DeepSpeedEngine", "100.0% of the", "50.0% of the optimizer")
    ),
    "zero3": Case(strategy="zero3", traits=("DeepSpeedEngine", HALF)),
    "zero2_offload": Case(strategy="zero2", traits=("50.0% of the optimizer, optimizer offloaded to cpu",)),
    "zero3_offload": Case(strategy="zero3", traits=(HALF, "optimizer offloaded to cpu, param offloaded to cpu")),
    "zero3_hpz": Case(strategy="zero3", processes=4, traits=("25.0% of the parameters", "copies over 2 ranks")),
    "zero3_sp": Case(
        strategy="zero3", data_parallel_size=1, accumulation=2, traits=(HALF, "sequences cut over 2 ranks")
    ),
}
NEEDS_GPU = {
    "fsdp2_cp": "torch has ring attention for GPUs only",
    "fp8": "8-bit matrix products need an H100 or later",
}
ONE_BIT = {
    name: Case(
        strategy="ddp",
        recipe="ddp",
        traits=("DistributedDataParallel",),
        flags=("--gradient_compression", name, "--compression_start_step", "2"),
    )
    for name in ("onebit_adam", "onebit_lamb")
}
NVME = Case(
    strategy="zero3", traits=(HALF, "optimizer offloaded to nvme, param offloaded to nvme")
)  # in the fault suite
RESUMED = ("fsdp2",)  # the fault suite resumes the others
VARIANTS = ("fsdp2_grad_op", "zero2_offload", "zero3_offload", "zero3_hpz")  # launched in the fault suite


@pytest.fixture(scope="module")
def trained(workplace, tmp_path_factory):
    """Return a function `trained("zero3", *flags)`: the folder of a run, made once for each config and flags."""
    runs: dict[tuple[str, ...], Path] = {}

    def train(name: str, *flags: str) -> Path:
        key = (name, *flags)
        if key not in runs:
            folder = tmp_path_factory.mktemp(name)
            shutil.copytree(workplace, folder, dirs_exist_ok=True)
            runs[key] = folder
            launch(folder, name, *flags)
        return runs[key]

    return train


def launch(folder: Path, name: str, *flags: str, code: int = 0):
    case = (CASES | ONE_BIT).get(name, NVME)
    recipe = "sharded" if "--cp_size" in flags else case.recipe
    script = REPOSITORY / "recipes" / recipe / "train.py"
    every = [*FLAGS, *case.batch, *case.flags, *flags]
    done = accelerate_launch(folder, CONFIGS / f"{name}.yaml", case.processes, script, *every)
    assert done.code == code, done.err[-4000:]
    (folder / "stderr").write_text(done.err)
    return done


def log_lines(folder: Path, start: str) -> list[str]:
    return [line for line in (folder / "stderr").read_text().splitlines() if line.startswith(f"hfscale: {start}")]


def logged(folder: Path, key: str) -> list[float]:
    records = [json.loads(line) for line in (folder / "out" / "scaling.jsonl").read_text().splitlines()]
    return [record[key] for record in records]


def evaluation_loss(folder: Path) -> float:
    return json.loads((folder / "out" / "all_results.json").read_text())["eval_loss"]


def assert_same_training(found: Path, control: Path) -> None:
    losses, expected = logged(found, "loss"), logged(control, "loss")
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(expected[0], abs=1e-5)
    assert losses == pytest.approx(expected, abs=2e-4)
    assert logged(found, "grad_norm") == pytest.approx(logged(control, "grad_norm"), rel=2e-4)
    assert logged(found, "learning_rate") == logged(control, "learning_rate")
    assert logged(found, "scaling/tokens_seen") == logged(control, "scaling/tokens_seen")
    assert evaluation_loss(found) == pytest.approx(evaluation_loss(control), abs=2e-4)


def test_every_config_has_a_case():
    names = {path.stem for path in CONFIGS.rglob("*.yaml")}
    assert names == {*CASES, *ONE_BIT, *NEEDS_GPU, "zero3_nvme"}


@pytest.mark.world(4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.faults] if n in VARIANTS else []) for n in CASES if n != "ddp"],
)
def test_a_config_runs_its_strategy_and_trains_like_ddp(trained, name):
    folder, control, case = trained(name), trained("ddp"), CASES[name]
    (traits,) = log_lines(folder, "strategy")
    assert traits.startswith(f"hfscale: strategy {case.strategy} on {case.processes} processes (cpu): ")
    assert [part for part in case.traits if part not in traits] == [], traits
    assert_same_training(folder, control)
    manifest = verify(folder / "out" / "checkpoint-4")
    assert (manifest.strategy, manifest.world_size) == (case.strategy, case.processes)
    assert manifest.global_batch_size == 4
    # `from_pretrained` loads the exported folder, which has the weights that DDP trained.
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    for key, weight in load_file(control / "out" / "model.safetensors").items():
        torch.testing.assert_close(model.state_dict()[key], weight, atol=2e-4, rtol=0)


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ["fsdp2", *(pytest.param(n, marks=pytest.mark.faults) for n in ("zero2", "zero3"))])
def test_lora_trains_like_ddp(trained, name):
    folder, control = trained(name, *LORA), trained("ddp", *LORA)
    assert_same_training(folder, control)
    expected = load_file(control / "out" / "adapter_model.safetensors")
    found = load_file(folder / "out" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, atol=2e-4, rtol=0)


@pytest.mark.world(2)
def test_ulysses_under_zero1_has_the_gradient_of_ddp(trained):
    """Without the fix it is twice as large, which Adam would hide but the gradient norm does not."""
    folder = trained("zero1", "--cp_size", "2", "--per_device_train_batch_size", "4")
    assert "sequences cut over 2 ranks" in log_lines(folder, "strategy")[0]
    assert_same_training(folder, trained("ddp"))


def resume_in_the_middle(folder: Path, name: str, control: Path) -> None:
    """Delete the checkpoint after step 2, relaunch, and compare with the uninterrupted run."""
    shutil.rmtree(folder / "out" / "checkpoint-4")
    done = launch(folder, name)
    assert len(done.lines("hfscale: continues from checkpoint-2")) == 1
    assert_same_training(folder, control)


@pytest.mark.world(2)
@pytest.mark.parametrize("name", RESUMED)
def test_a_lost_run_resumes_with_the_same_losses(trained, name):
    resume_in_the_middle(trained(name), name, trained("ddp"))


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ONE_BIT)
def test_a_one_bit_optimizer_trains_and_resumes(trained, name):
    """Only the steps after the warm-up differ from those of DDP; a checkpoint of the warm-up resumes exactly."""
    folder, control = trained(name), trained("ddp")
    assert log_lines(folder, "strategy")[0].startswith("hfscale: strategy ddp on 2 processes (cpu): ")
    assert "up to step 2" in log_lines(folder, name)[0]
    losses, expected = logged(folder, "loss"), logged(control, "loss")
    assert losses[0] == expected[0]
    if name == "onebit_adam":
        assert losses[:3] == expected[:3]
    assert losses[3] != expected[3]
    assert losses[3] == pytest.approx(expected[3], abs=0.1) or name == "onebit_lamb"
    assert losses[3] < losses[0]
    assert "gradient norm" not in (folder / "stderr").read_text()  # health compares those of replicas
    shutil.rmtree(folder / "out" / "checkpoint-4")
    launch(folder, name)
    assert "continues from checkpoint-2" in (folder / "stderr").read_text()
    assert logged(folder, "loss") == losses


@pytest.mark.faults
@pytest.mark.world(4)
@pytest.mark.parametrize("name", [n for n in CASES if n not in (*RESUMED, "ddp")])
def test_the_other_strategies_resume_with_the_same_losses(trained, name):
    resume_in_the_middle(trained(name), name, trained("ddp"))


@pytest.mark.faults
@pytest.mark.world(2)
@pytest.mark.timeout(1500)
def test_nvme_offload_trains_like_ddp(workplace, trained, tmp_path):
    """In the fault suite, because DeepSpeed compiles its asynchronous I/O for minutes before the first run."""
    build = "from deepspeed.ops.op_builder import AsyncIOBuilder as B; assert B().is_compatible(); B().load()"
    if subprocess.run([sys.executable, "-c", build], check=False, timeout=1200).returncode:
        pytest.skip("DeepSpeed's NVMe offload needs libaio-dev on this machine")
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    (tmp_path / "disk").mkdir()
    shipped = tmp_path / "ds_configs" / "zero3_nvme.json"
    text = shipped.read_text().replace("/local_nvme", str(tmp_path / "disk"))
    shipped.write_text(text.replace('"buffer_size": 1e9', '"buffer_size": 1e6'))  # five of them are pinned
    launch(tmp_path, "zero3_nvme")
    (traits,) = log_lines(tmp_path, "strategy")
    assert [part for part in NVME.traits if part not in traits] == [], traits
    assert_same_training(tmp_path, trained("ddp"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NEEDS_GPU)
def test_a_config_for_gpus_trains(workplace, tmp_path, name):
    processes = torch.cuda.device_count()
    if processes < 2:
        pytest.skip(f"{name} needs two GPUs, and torch sees {processes}: {NEEDS_GPU[name]}")
    sizes = ["--cp_size", "2"] if name == "fsdp2_cp" else []
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    done = accelerate_launch(tmp_path, CONFIGS / f"{name}.yaml", processes, SHARDED, *FLAGS, *sizes)
    assert done.code == 0, done.err[-4000:]
    assert len(logged(tmp_path, "loss")) == STEPS
