"""What the corners with a program of others must do: programs.py llamafactory|ms-swift|axolotl FOLDER.

The program fine-tunes a tiny model of its own data (with LoRA, but for axolotl): without the callback, with it, and
with it in a run that a SIGTERM stops and the same command resumes. The losses must be equal, and the checkpoint must
pass `hfscale checkpoints verify` there. `ms-swift` also converts PiSSA in its saves. Then the
command of `docs/beside_other_programs.md`, with the plug-in, is started: its process is killed and restarted while
`hfscale watch` shows the run, a SIGTERM stops the command, and the command is started again. The same is done with the
options of the program's own example (`examples.py`).
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples import SAVED as SAVED_EXAMPLE
from examples import example, make_records
from killed_run import TIMEOUT_S, events, kill_and_watch, logged_losses

sys.path.insert(0, str(Path(__file__).parent.parent))

USD_PER_GPU_HOUR = 2.5
"""An option of the callback that the files of the programs set."""
LONG = 800
"""Steps of a run that a signal stops from outside, so that it cannot have ended before."""
SAVED_LONG = 40
"""Steps between two checkpoints of such a run."""
LONG_RUN = "long"
PAGE_RUN = "long-page"
"""Output directories of such a run: without the callback, and with the command of the page."""
EXAMPLE_RUN = "example"
EXAMPLE_PAGE_RUN = "example-page"
"""The same with the options of the program's example."""
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


def common(name: str) -> dict[str, Any]:
    """Return `COMMON`, or what a long run has in place of it."""
    return COMMON | ({"max_steps": LONG, "save_steps": SAVED_LONG} if name in (LONG_RUN, PAGE_RUN) else {})


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

    given = callbacks(mode == "stopped") if mode != "plain" else []
    run_exp(args=llamafactory_arguments(folder, name), callbacks=given)


def llamafactory_arguments(folder: Path, name: str) -> dict[str, Any]:
    """Return what LLaMA-Factory is given."""
    if name in (EXAMPLE_RUN, EXAMPLE_PAGE_RUN):
        return example("llamafactory", folder) | {"output_dir": str(folder / name)}
    return common(name) | {
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


def train_swift(folder: Path, name: str, mode: str, init: str) -> None:
    """Fine-tune with ms-swift, which takes the name of a callback from the table of callbacks."""
    from swift.callbacks import callbacks_map
    from swift.pipelines import sft_main

    for number, callback in enumerate(callbacks(mode == "stopped")):
        callbacks_map[f"ours{number}"] = lambda args, trainer, callback=callback: callback
    arguments = swift_arguments(folder, name, init)
    if mode != "plain":
        arguments["callbacks"] = ["ours0", "ours1"] if mode == "stopped" else ["ours0"]
    if mode == "resumed":
        from hfscale import latest_checkpoint

        arguments["resume_from_checkpoint"] = latest_checkpoint(folder / name)
    sft_main(as_flags(arguments))


def swift_arguments(folder: Path, name: str, init: str) -> dict[str, Any]:
    """Return what ms-swift is given."""
    if name in (EXAMPLE_RUN, EXAMPLE_PAGE_RUN):
        return example("ms-swift", folder) | {"output_dir": folder / name, "add_version": False}
    return common(name) | {
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
        "check_model": False,  # it would ask ModelScope
        "use_cpu": True,
        "dataloader_num_workers": 0,
    }


def as_flags(arguments: dict[str, Any]) -> list[str]:
    """Return arguments as the words of a command line."""
    given = []
    for flag, value in arguments.items():
        given += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return given


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

    arguments = axolotl_arguments(folder, name) | {"auto_resume_from_checkpoints": mode == "resumed"}
    if mode != "plain":
        (folder / "axolotl_plugin.py").write_text(AXOLOTL_PLUGIN)
        sys.path.insert(0, str(folder))
        arguments["plugins"] = [f"axolotl_plugin.{'Stopped' if mode == 'stopped' else 'Ours'}"]
    (folder / f"{name}-{mode}.yaml").write_text(yaml.safe_dump(arguments))
    sys.argv[1:] = []  # axolotl reads them too
    do_cli(str(folder / f"{name}-{mode}.yaml"))


def axolotl_arguments(folder: Path, name: str) -> dict[str, Any]:
    """Return what axolotl is given."""
    if name in (EXAMPLE_RUN, EXAMPLE_PAGE_RUN):
        return example("axolotl", folder) | {"output_dir": str(folder / name)}
    rows = {"path": str(folder / "data" / "rows.json"), "ds_type": "json", "type": "alpaca"}
    taken = {key: value for key, value in common(name).items() if "per_device" not in key and key != "lora_rank"}
    return taken | {
        "base_model": str(folder / "model"),
        "model_type": "AutoModelForCausalLM",
        "tokenizer_type": "AutoTokenizer",
        "datasets": [rows],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / name),
        "sequence_len": 64,
        "micro_batch_size": COMMON["per_device_train_batch_size"],
        "num_epochs": LONG,  # max_steps is less
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "tf32": False,  # it needs a GPU
        "val_set_size": 0,
    }


PROGRAMS = {"llamafactory": train_llamafactory, "ms-swift": train_swift, "axolotl": train_axolotl}


def run(program: str, folder: Path, name: str, mode: str, init: str = "true") -> tuple[int, list[float]]:
    """Train in a new process; return its exit code and the losses of the newest checkpoint."""
    done = subprocess.run([sys.executable, __file__, program, str(folder), name, mode, init], timeout=TIMEOUT_S)
    return done.returncode, list(losses_of(folder / name).values())


def losses_of(output_dir: Path) -> dict[int, float]:
    """Return the losses of the newest checkpoint, by step."""
    newest = max(output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return {log["step"]: log["loss"] for log in history if "loss" in log}


def command_of_page(program: str, folder: Path, name: str) -> list[str]:
    """Write what the page says, and return its command for one process."""
    import yaml

    launcher = [sys.executable, "-m", "hfscale", "run", "--", str(Path(sys.executable).parent / "torchrun")]
    launcher += ["--standalone", "--nproc_per_node", "1"]
    file = f"{name}.yaml"
    section = {"hfscale": {"usd_per_gpu_hour": USD_PER_GPU_HOUR}}
    if program == "ms-swift":
        command = [sys.executable, "-m", "hfscale", "plugins", "swift"]
        plugin = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        arguments = {"external_plugins": plugin, "callbacks": "hfscale"} | swift_arguments(folder, name, "true")
        (folder / file).write_text(yaml.safe_dump(section["hfscale"]))
        return [*launcher, "-m", "swift.cli.sft", *as_flags(arguments)]
    if program == "llamafactory":
        (folder / file).write_text(yaml.safe_dump(llamafactory_arguments(folder, name) | section))
        return [*launcher, "-m", "hfscale.plugins.llamafactory", file]
    named = {"plugins": ["hfscale.plugins.axolotl.HfscalePlugin"]}
    (folder / file).write_text(yaml.safe_dump(axolotl_arguments(folder, name) | named | section))
    return [*launcher, "-m", "axolotl.cli.train", file]


def check_options(options: Path, output_dir: Path, command: list[str], environ: dict[str, str]) -> None:
    """Start the command with an option that no part has: it must end before it trains, and name the option."""
    right = options.read_text()
    options.write_text(right.replace("usd_per_gpu_hour", "usd_per_gpu_hours"))
    done = subprocess.run(command, cwd=options.parent, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode != 0
    assert "usd_per_gpu_hours" in done.stdout + done.stderr, (done.stdout + done.stderr)[-3000:]
    assert not list(output_dir.glob("checkpoint-*"))
    options.write_text(right)


def check_page(program: str, folder: Path, plain: str, page: str, *, saved: int) -> None:
    """Start the command of the page, kill its process, stop the command with SIGTERM, and start it again.

    The process is killed when it has saved a checkpoint. The command starts it again, and `hfscale watch` shows so. At
    the end the losses and the weights must be those of a run without the callback that nothing has stopped.

    Args:
        program (`str`): one of `PROGRAMS`.
        folder (`Path`): where everything is.
        plain (`str`): name of the run without the callback.
        page (`str`): name of the run with the command of the page.
        saved (`int`): steps between two checkpoints.
    """
    code, _ = run(program, folder, plain, "plain")
    assert code == 0, code
    expected = losses_of(folder / plain)
    last = max(expected)
    assert last > 3 * saved, f"{last} steps are too few for three launches"
    command = command_of_page(program, folder, page)
    options = folder / f"{page}.yaml"
    environ = os.environ | {"HFSCALE_OPTIONS": str(options)}
    output_dir = folder / page
    output_dir.mkdir()
    check_options(options, output_dir, command, environ)
    with subprocess.Popen(command, cwd=folder, env=environ) as training:
        try:
            killed_at, resumed_at = kill_and_watch(training, output_dir, expected, after=saved)
        except BaseException:
            training.terminate()  # the command must not stay
            raise
        code = training.wait(TIMEOUT_S)
    assert code == 75, code
    assert subprocess.run(command, cwd=folder, env=environ, timeout=TIMEOUT_S).returncode == 0
    first, second, third = [event["step"] for event in events(output_dir, "launch")]
    assert (first, second, third > second) == (0, resumed_at, True), (first, second, third)
    assert logged_losses(output_dir) == expected
    name = "model.safetensors" if program == "axolotl" else "adapter_model.safetensors"
    weights = [(folder / run_name / f"checkpoint-{last}" / name).read_bytes() for run_name in (plain, page)]
    assert weights[0] == weights[1], "the weights are those of another run"
    print(
        f"{program}, {plain}: the page's command was killed after step {killed_at}, resumed at step {second}, was "
        f"stopped with code 75, and resumed at step {third} of {last}"
    )


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
    check_page(program, folder, LONG_RUN, PAGE_RUN, saved=SAVED_LONG)
    make_records(folder)
    check_page(program, folder, EXAMPLE_RUN, EXAMPLE_PAGE_RUN, saved=SAVED_EXAMPLE)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        PROGRAMS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    else:
        check(sys.argv[1], Path(sys.argv[2]))
