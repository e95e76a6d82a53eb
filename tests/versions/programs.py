"""What the corners with a program of others must do: programs.py llamafactory|ms-swift|axolotl FOLDER.

The program fine-tunes a tiny model of its own data (with LoRA, but for axolotl): without the callback, with it, and
with it in a run that a SIGTERM stops and the same command resumes. The losses must be equal, and the checkpoint must
pass `hfscale checkpoints verify` there. `ms-swift` also converts PiSSA in its saves.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

STEPS = 6
SAVED = 2
STOPPED = 3
COMMON = {
    "max_steps": STEPS,
    "save_steps": SAVED,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "lora_rank": 4,
    "bf16": False,
    "fp16": False,
    "seed": 1,
}
"""Arguments that both programs take from transformers, and the rank of LoRA."""


def make_inputs(folder: Path) -> None:
    """Write a tiny model with a tokenizer, and a data set in the format of each program."""
    from tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    rows = [(f"w{n} w{n + 1}", f"w{n + 2} w{n + 3}") for n in range(3, 35)]
    (folder / "data").mkdir()
    alpaca = [{"instruction": question, "input": "", "output": answer} for question, answer in rows]
    (folder / "data" / "rows.json").write_text(json.dumps(alpaca))
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in rows
    ]
    (folder / "data" / "rows.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def callbacks(stops: bool) -> list[Any]:
    """Return the callback, and one that sends SIGTERM to its own process."""
    from transformers import TrainerCallback

    from hfscale import ScalingCallback

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == STOPPED:
                os.kill(os.getpid(), signal.SIGTERM)

    return [ScalingCallback(), Stop()] if stops else [ScalingCallback()]


def train_llamafactory(folder: Path, name: str, mode: str, init: str) -> None:
    """Fine-tune with LLaMA-Factory, which resumes from the newest checkpoint of its output directory by itself."""
    from llamafactory.train.tuner import run_exp

    arguments = COMMON | {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "model_name_or_path": str(folder / "model"),
        "dataset_dir": str(folder / "data"),
        "dataset": "rows",
        "template": "default",
        "cutoff_len": 64,
        "output_dir": str(folder / name),
        "report_to": "none",
        "use_cpu": True,
    }
    run_exp(args=arguments, callbacks=callbacks(mode == "stopped") if mode != "plain" else [])


def train_swift(folder: Path, name: str, mode: str, init: str) -> None:
    """Fine-tune with ms-swift, which takes the name of a callback from the table of callbacks."""
    from swift.callbacks import callbacks_map
    from swift.pipelines import sft_main

    for number, callback in enumerate(callbacks(mode == "stopped")):
        callbacks_map[f"ours{number}"] = lambda args, trainer, callback=callback: callback
    arguments = COMMON | {
        "model": folder / "model",
        "model_type": "llama",
        "template": "dummy",
        "dataset": folder / "data" / "rows.jsonl",
        "tuner_type": "lora",
        "target_modules": "all-linear",
        "init_weights": init,
        "max_length": 64,
        "torch_dtype": "float32",
        "attn_impl": "sdpa",
        "output_dir": folder / name,
        "add_version": False,
        "split_dataset_ratio": 0,
        "report_to": "none",
        "use_hf": True,
        "use_cpu": True,
        "dataloader_num_workers": 0,
    }
    if mode != "plain":
        arguments["callbacks"] = ["ours0", "ours1"] if mode == "stopped" else ["ours0"]
    if mode == "resumed":
        from hfscale import latest_checkpoint

        arguments["resume_from_checkpoint"] = latest_checkpoint(folder / name)
    given = []
    for flag, value in arguments.items():
        given += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    sft_main(given)


AXOLOTL_PLUGIN = """
from axolotl.integrations.base import BasePlugin
from programs import callbacks

class Ours(BasePlugin):
    def add_callbacks_pre_trainer(self, cfg, model):
        return callbacks(stops=False)

class Stopped(BasePlugin):
    def add_callbacks_pre_trainer(self, cfg, model):
        return callbacks(stops=True)
"""


def train_axolotl(folder: Path, name: str, mode: str, init: str) -> None:
    """Fine-tune all weights with axolotl, whose YAML file names a class that returns the callback.

    Its LoRA begins with other random matrices in each run, with the same seed, so losses could not be compared.
    """
    import yaml
    from axolotl.cli.train import do_cli

    rows = {"path": str(folder / "data" / "rows.json"), "ds_type": "json", "type": "alpaca"}
    arguments = {key: value for key, value in COMMON.items() if "per_device" not in key and key != "lora_rank"} | {
        "base_model": str(folder / "model"),
        "model_type": "AutoModelForCausalLM",
        "tokenizer_type": "AutoTokenizer",
        "datasets": [rows],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / name),
        "sequence_len": 64,
        "micro_batch_size": COMMON["per_device_train_batch_size"],
        "num_epochs": 1,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "tf32": False,  # it needs a GPU
        "val_set_size": 0,
        "auto_resume_from_checkpoints": mode == "resumed",
    }
    if mode != "plain":
        (folder / "axolotl_plugin.py").write_text(AXOLOTL_PLUGIN)
        sys.path.insert(0, str(folder))
        arguments["plugins"] = [f"axolotl_plugin.{'Stopped' if mode == 'stopped' else 'Ours'}"]
    (folder / f"{name}-{mode}.yaml").write_text(yaml.safe_dump(arguments))
    sys.argv[1:] = []  # axolotl reads them too
    do_cli(str(folder / f"{name}-{mode}.yaml"))


PROGRAMS = {"llamafactory": train_llamafactory, "ms-swift": train_swift, "axolotl": train_axolotl}


def run(program: str, folder: Path, name: str, mode: str, init: str = "true") -> tuple[int, list[float]]:
    """Train in a new process; return its exit code and the losses of the newest checkpoint."""
    done = subprocess.run([sys.executable, __file__, program, str(folder), name, mode, init], timeout=600)
    newest = max((folder / name).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return done.returncode, [log["loss"] for log in history if "loss" in log]


def check(program: str, folder: Path) -> None:
    """Compare the runs."""
    make_inputs(folder)
    code, plain = run(program, folder, "plain", "plain")
    assert (code, len(set(plain))) == (0, STEPS), (code, plain)
    assert run(program, folder, "ours", "ours") == (0, plain)
    code, stopped = run(program, folder, "stopped", "stopped")
    assert code == 75, code
    assert stopped == plain[: len(stopped)], (stopped, plain)
    assert STOPPED <= len(stopped) < STEPS
    verify = [sys.executable, "-m", "hfscale", "checkpoints", "verify"]
    subprocess.run([*verify, folder / "stopped" / f"checkpoint-{len(stopped)}"], check=True)
    assert subprocess.run([*verify, folder / "absent"]).returncode == 2
    assert run(program, folder, "stopped", "resumed") == (0, plain)
    print(f"{program}: losses {plain}, stopped after step {len(stopped)}")
    if program == "ms-swift":
        files = []
        for name, mode in (("pissa-plain", "plain"), ("pissa-ours", "ours")):
            code, losses = run(program, folder, name, mode, "pissa")
            converted = folder / name / f"checkpoint-{STEPS}" / "converted" / "default"
            files.append((code, losses, (converted / "adapter_model.safetensors").read_bytes()))
        assert files[0] == files[1], [part[:2] for part in files]
        assert files[0][0] == 0


if __name__ == "__main__":
    if len(sys.argv) > 3:
        PROGRAMS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    else:
        check(sys.argv[1], Path(sys.argv[2]))
