"""What each corner of `make test-versions` must do: training.py single|ddp|fsdp2|native FOLDER, on each rank.

It trains without the callback, with it, and from its half-way checkpoint; the losses must be equal, and the last
checkpoint complete. `single` also imports every module; `native` does it in each layout of a mixture of experts.
"""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

NEED_MORE = ("hfscale.parallel", "hfscale.recipe", "hfscale.recipe.trl", "hfscale.tune.launch_command")
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
    from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

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
    if strategy == "fsdp2":
        train_adapters(folder / "adapters")
    print(f"{strategy}: losses {plain}, files {sorted(manifest.files)}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def train_adapters(folder: Path) -> None:
    """Train LoRA under FSDP2 with checkpoints in one file, of which Accelerate before 1.15 saves one rank's part."""
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"  # in place of that of the launcher's config
    from peft import LoraConfig, get_peft_model
    from tiny import RandomTokens, logged, tiny_arguments, tiny_model
    from transformers import Trainer

    from hfscale import ScalingCallback
    from hfscale.core.versions import why_full_files_lose_adapters
    from hfscale.errors import MissingDependencyError
    from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

    def run(resume: str | None = None) -> list[float]:
        args = tiny_arguments(folder, max_steps=4, save_strategy="steps", save_steps=2)
        let_fsdp_run_on_cpu()
        model = get_peft_model(
            tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
        trainer = Trainer(model=model, args=args, train_dataset=RandomTokens(), callbacks=[ScalingCallback()])
        assert "FULL" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
        trainer.train(resume_from_checkpoint=resume)
        return logged(trainer, "loss")

    if why_full_files_lose_adapters():
        try:
            run()
        except MissingDependencyError as error:
            print(error)
        else:
            raise AssertionError("a checkpoint that loses adapters is an error")
        return
    losses = run()
    assert run(str(folder / "checkpoint-2")) == losses


LAYOUTS = (
    {"fsdp_size": 2},
    {"tp_size": 2},
    {"tp_size": 2, "ep_size": 2},
    {"fsdp_size": 2, "ep_size": 2},
    {"dp_replicate_size": 2},
)
"""Sizes of `DistributedConfig` on two ranks."""
Logged = dict[int, tuple[float, float]]
"""Loss and gradient norm of each step."""


def train_native(folder: Path) -> None:
    """Train in each layout that transformers has, and resume each of them under FSDP2 too."""
    from accelerate import PartialState
    from native_runs import make_model

    from hfscale.core.versions import divides_expert_gradients_twice, is_at_least

    source = make_model(folder / f"model-{os.environ['RANK']}")  # with a process group, only rank 0 would save it
    expected: Logged = {}
    state = PartialState(cpu=True)
    for sizes in LAYOUTS:
        name = "-".join(f"{axis}{size}" for axis, size in sizes.items())
        losses = _train_layout(source, folder / name, sizes)
        if losses is None:
            is_replicated = "dp_replicate_size" in sizes
            assert not is_at_least("transformers", "5.23" if is_replicated else "5.21"), sizes
            continue
        expected = expected or losses
        is_exact = sizes != LAYOUTS[3] or not divides_expert_gradients_twice("cpu")
        pairs = [
            (found, wanted) for step in losses for found, wanted in zip(losses[step], expected[step], strict=True)
        ]
        worst = max(abs(found - wanted) for found, wanted in pairs)
        assert (worst < 1e-5) == is_exact, (sizes, losses, expected)
        assert worst < 1e-3, (sizes, losses, expected)
        print(f"{name}: losses and gradient norms {losses}")
    _train_adapters_of_shards(source, folder / "adapters")
    state.wait_for_everyone()
    state.destroy_process_group()


def _train_adapters_of_shards(source: Path, folder: Path) -> None:
    """Train LoRA on a model that transformers has sharded: Trainer must give every rank the same adapters."""
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from tiny import RandomTokens, tiny_arguments
    from transformers import AutoModelForCausalLM, Trainer
    from transformers.distributed import DistributedConfig

    from hfscale import ScalingCallback

    config = DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, distributed_config=config)
    torch.manual_seed(int(os.environ["RANK"]))  # each rank draws another adapter
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    args = tiny_arguments(folder, max_steps=4)
    Trainer(model=model, args=args, train_dataset=RandomTokens(), callbacks=[ScalingCallback()]).train()
    trained = [parameter.data for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) > 1
    for parameter in trained:
        of_all = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, parameter.contiguous())
        assert torch.equal(of_all[0], of_all[-1])
        assert parameter.abs().max() > 0


def _train_layout(source: Path, folder: Path, sizes: dict[str, int]) -> Logged | None:
    """Return loss and gradient norm of each step in a layout; None if transformers refuses it."""
    import torch
    from tiny import RandomTokens, tiny_arguments
    from transformers import AutoModelForCausalLM, Trainer
    from transformers.distributed import DistributedConfig

    from hfscale import ScalingCallback, SpotCheckpointCallback, latest_checkpoint
    from hfscale.checkpoint.manifest import read_manifest
    from hfscale.core.versions import divides_expert_gradients_twice
    from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu
    from hfscale.trainer.strategies.native import why_expert_gradients_are_small

    def run(name: str, sizes: dict[str, int], *, saves: bool = True, resume: str | None = None) -> Logged:
        config = DistributedConfig(**sizes)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, distributed_config=config)
        batch = 8 // (sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1))
        args = tiny_arguments(folder / name, max_steps=4, per_device_train_batch_size=batch)
        let_fsdp_run_on_cpu()
        callbacks = [ScalingCallback(spot_checkpoint=SpotCheckpointCallback(every_steps=2))] if saves else []
        trainer = Trainer(model=model, args=args, train_dataset=RandomTokens(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        has_warning = why_expert_gradients_are_small(model, "cpu") is not None
        assert has_warning == (sizes == LAYOUTS[3] and divides_expert_gradients_twice("cpu"))
        logs = [log for log in trainer.state.log_history if "loss" in log]
        return {log["step"]: (log["loss"], log["grad_norm"]) for log in logs}

    try:
        plain = run("plain", sizes, saves=False)
    except (TypeError, ValueError) as error:
        print(f"{sizes}: refused by transformers: {str(error).splitlines()[0]}")
        return None
    assert run("ours", sizes) == plain
    half_way = str(folder / "ours" / "checkpoint-2")
    assert run("ours", sizes, resume=half_way) == plain
    newest = latest_checkpoint(folder / "ours")
    assert newest is not None
    manifest = read_manifest(newest)
    assert (manifest.step, manifest.strategy) == (4, "native")
    resumed = run("ours", {"fsdp_size": 2}, resume=half_way)
    assert all(abs(loss - plain[step][0]) < 1e-3 for step, (loss, _) in resumed.items()), (resumed, plain)
    return plain


if __name__ == "__main__":
    if sys.argv[1] == "single":
        import_all()
    if sys.argv[1] == "native":
        train_native(Path(sys.argv[2]))
    else:
        train(sys.argv[1], Path(sys.argv[2]))
