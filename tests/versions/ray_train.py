"""What the corner `ray` must do: ray_train.py FOLDER, on a machine without a Ray cluster.

It runs the program of docs/beside_other_programs.md with two workers on CPUs, and once more with a worker that is
killed (SIGKILL) after a checkpoint. Ray starts the workers again, they resume, and losses and weights must be equal.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
REPOSITORY = TESTS.parent
PAGE = REPOSITORY / "docs" / "beside_other_programs.md"
STEPS = 8
SAVED = 2
KILLED_AT = 5


def program_of_page(folder: Path) -> dict[str, Any]:
    """Return what the Python block of the page's section on Ray defines."""
    section = PAGE.read_text(encoding="utf-8").partition("## Ray Train")[2]
    program = folder / "program.py"
    program.write_text(section.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    return runpy.run_path(str(program))


def make_trainer(config: dict[str, Any]) -> Any:
    """Return a Trainer of a tiny model, as the program of the page asks for it."""
    from tiny import tiny_trainer
    from transformers import TrainerCallback

    class Dies(TrainerCallback):
        """Kills its own process once, in a step after a checkpoint."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            once = Path(config["output_dir"], "killed")
            if config["dies"] and state.global_step == KILLED_AT and args.process_index == 1 and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    saving = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": STEPS}
    return tiny_trainer(config["output_dir"], Dies(), **saving)


def run(folder: Path, *, dies: bool) -> tuple[dict[int, float], bytes]:
    """Train; return the losses by step, and the file with the last weights."""
    folder.mkdir()
    train = program_of_page(folder)["train"]
    train({"make_trainer": make_trainer, "output_dir": str(folder), "dies": dies}, workers=2, use_gpu=False)
    last = folder / f"checkpoint-{STEPS}"
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    losses = {log["step"]: log["loss"] for log in history if "loss" in log}
    return losses, (last / "model.safetensors").read_bytes()


def main(folder: Path) -> None:
    """Compare the two runs."""
    import ray

    paths = os.pathsep.join([str(TESTS), str(TESTS / "versions"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HFSCALE_CLOUD": "none", "OMP_NUM_THREADS": "1"}
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "300"  # 60 are too few on a machine that is busy
    ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": environ})
    whole = run(folder / "whole", dies=False)
    assert len(set(whole[0].values())) == STEPS, whole[0]
    assert run(folder / "killed", dies=True) == whole
    assert (folder / "killed" / "killed").exists()
    print(f"ray {ray.__version__}: losses {whole[0]}, equal after a worker was killed in step {KILLED_AT + 1}")
    ray.shutdown()


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "versions")]
    from ray_train import main as checked  # workers import the module by this name

    checked(Path(sys.argv[1]))
