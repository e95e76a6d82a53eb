"""What each corner of `make test-versions` must do: training.py single|ddp|fsdp2 FOLDER, on each rank.

It trains without the callback, with it, and from its half-way checkpoint; the losses must be equal, and the last
checkpoint complete. `single` also imports every module.
"""

import importlib
import pkgutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

NEED_MORE = ("hfscale.parallel", "hfscale.recipe", "hfscale.tune.launch_command")
"""Packages and modules that may say in one line which version they need."""


def import_all() -> None:
    import hfscale
    from hfscale.errors import MissingDependencyError

    for module in pkgutil.walk_packages(hfscale.__path__, "hfscale.", onerror=lambda name: None):
        if module.name == "hfscale.__main__" or module.name.startswith("hfscale.shipped"):
            continue
        try:
            importlib.import_module(module.name)
        except MissingDependencyError as error:
            assert module.name in NEED_MORE, module.name
            print(error)


def train(strategy: str, folder: Path) -> None:
    import torch.distributed as dist
    from tiny import RandomTokens, let_old_transformers_resume_on_cpu, logged, tiny_arguments, tiny_model
    from transformers import Trainer

    from hfscale import ScalingCallback, latest_checkpoint
    from hfscale.checkpoint.manifest import read_manifest
    from hfscale.core.versions import what_is_missing
    from hfscale.errors import MissingDependencyError
    from hfscale.trainer.strategy import let_fsdp_run_on_cpu

    def run(name: str, callbacks: list, resume: str | None = None) -> list[float]:
        args = tiny_arguments(folder / name, max_steps=4, save_strategy="steps", save_steps=2)
        if strategy == "fsdp2":
            let_fsdp_run_on_cpu()
        trainer = Trainer(model=tiny_model(), args=args, train_dataset=RandomTokens(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return logged(trainer, "loss")

    let_old_transformers_resume_on_cpu()
    plain = run("plain", [])
    assert len(set(plain)) == 4, plain
    assert run("ours", [ScalingCallback()]) == plain
    half_way = str(folder / "ours" / "checkpoint-2")
    if strategy == "fsdp2" and what_is_missing("FSDP2 checkpoints"):
        try:
            run("ours", [ScalingCallback()], resume=half_way)
        except MissingDependencyError as error:
            print(error)
        else:
            raise AssertionError("a resume that loses the optimizer's state is an error")
    else:
        assert run("ours", [ScalingCallback()], resume=half_way) == plain
    newest = latest_checkpoint(folder / "ours")
    assert newest is not None
    manifest = read_manifest(newest)
    assert (manifest.step, manifest.strategy) == (4, strategy)
    print(f"{strategy}: losses {plain}, files {sorted(manifest.files)}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "single":
        import_all()
    train(sys.argv[1], Path(sys.argv[2]))
