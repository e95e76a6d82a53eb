"""Makes the reports of docs/gallery from runs of its own: python docs/gallery.py.

It takes ten to twenty minutes on two cores. The runs are small, on a CPU with two processes: each report is that of a
real run, and its speed is of no interest.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transformers import Qwen3MoeConfig

from hfscale.core.records import read_events
from hfscale.recipe.corpus import read_sources
from hfscale.report.page import write_comparison, write_page
from hfscale.report.run_data import load_run
from hfscale.report.two_runs import compare_two

ROOT = Path(__file__).parent.parent
GALLERY = Path(__file__).parent / "gallery"
COMMON = (
    "--use_cpu",
    "--report_to",
    "none",
    "--usd_per_gpu_hour",
    "0.05",
    "--block_size",
    "64",
    "--logging_steps",
    "2",
)
_SLOW_RANK = """
import os, sys, time
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
import torch
from hfscale import ScalingCallback, ScalingMetricsCallback

class Rows(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        if os.environ.get("RANK") == "1":
            time.sleep(0.02)  # a disk that is slower than those of the others
        row = torch.randint(0, 512, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}

config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
shared = {"max_steps": 60, "logging_steps": 2, "use_cpu": True, "report_to": [], "save_steps": 30}
args = TrainingArguments(output_dir=sys.argv[1], **shared)
metrics = ScalingMetricsCallback(usd_per_gpu_hour=0.05)
Trainer(LlamaForCausalLM(config), args, train_dataset=Rows(), callbacks=[ScalingCallback(metrics=metrics)]).train()
"""


def _launch(output_dir: Path, script: str, *flags: str, config: str = "ddp") -> subprocess.Popen[bytes]:
    """Start two processes of a script under `hfscale run`."""
    launcher = [str(Path(sys.executable).parent / "accelerate"), "launch"]
    launcher += ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", "2", script]
    offline = {"HF_HUB_OFFLINE": "1", "HFSCALE_CLOUD": "none", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hfscale", "run", "--memory-interval-steps", "5", "--", *launcher, *flags]
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | offline)  # noqa: S603


def _train(output_dir: Path, script: str, *flags: str, config: str = "ddp") -> Path:
    started = _launch(output_dir, script, *flags, config=config)
    if started.wait() != 0:
        raise SystemExit(f"{script} for {output_dir.name} ended with exit code {started.returncode}")
    return output_dir


def _recipe(folder: Path, name: str, *flags: str) -> Path:
    output_dir = folder / name
    return _train(output_dir, "recipes/ddp/train.py", *COMMON, "--output_dir", str(output_dir), *flags)


def _killed(folder: Path) -> Path:
    """Train, and kill the process of rank 0 after step 30."""
    output_dir = folder / "killed"
    flags = (*COMMON, "--output_dir", str(output_dir), "--max_steps", "60", "--save_steps", "20")
    started = _launch(output_dir, "recipes/ddp/train.py", *flags)
    while _last_step(output_dir) < 30:
        if started.poll() is not None:
            raise SystemExit(f"the run that was to be killed ended with exit code {started.returncode}")
        time.sleep(0.2)
    launch = next(event for event in read_events(output_dir) if event["event"] == "launch")
    os.kill(launch["pid"], signal.SIGKILL)
    if started.wait() != 0:
        raise SystemExit(f"the killed run ended with exit code {started.returncode}")
    return output_dir


def _last_step(output_dir: Path) -> int:
    path = output_dir / "scaling.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _experts(folder: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3MoeConfig(vocab_size=4096, num_experts=8, num_experts_per_tok=2, **sizes, **heads)
    config.save_pretrained(folder / "config")
    output_dir = folder / "experts"
    text = folder / "text.jsonl"
    text.write_text("".join(f"{json.dumps(record)}\n" for record in read_sources("train")), encoding="utf-8")
    flags = (
        *COMMON,
        "--config_name",
        str(folder / "config"),
        "--train_file",
        str(text),
        "--ep_size",
        "2",
        "--fsdp_size",
        "2",
        "--max_steps",
        "60",
    )
    return _train(output_dir, "recipes/sharded/train.py", *flags, "--output_dir", str(output_dir), config="native")


def main() -> None:
    """Train the runs in a temporary folder, and write their reports."""
    GALLERY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        slow = folder / "slow_rank.py"
        slow.write_text(_SLOW_RANK, encoding="utf-8")
        evaluated = ("--max_steps", "60", "--eval_strategy", "steps", "--eval_steps", "10")
        adamw = _recipe(folder, "adamw", *evaluated)
        muon = _recipe(folder, "muon", *evaluated, "--optim", "muon")
        write_page(load_run(adamw), GALLERY / "plain.html")
        write_comparison(compare_two(adamw, muon), GALLERY / "two_runs.html")
        write_page(load_run(_killed(folder)), GALLERY / "killed.html")
        write_page(load_run(_train(folder / "slow", str(slow), str(folder / "slow"))), GALLERY / "slow_rank.html")
        write_page(load_run(_experts(folder)), GALLERY / "experts.html")


if __name__ == "__main__":
    main()
