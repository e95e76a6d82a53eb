"""Measures how long training stalls for a checkpoint of a mixture of experts that transformers shards.

Two processes share the experts of a model (`DistributedConfig(fsdp_size=2, ep_size=2)`). In one training, saves of the
same complete state alternate:

- in the background: the save of `SpotCheckpointCallback`, in place of Trainer's `_save_checkpoint`;
- blocking: what transformers and torch offer. Trainer refuses to save anything that such a model could resume from. So
  these are the functions of transformers for it, which Trainer does not call: `_save_model_checkpoint_distributed` for
  the weights and `save_optimizer_distributed` for the optimizer; then the schedule, the random numbers and
  `trainer_state.json`, as Trainer writes them;
- weights only: Trainer's own save of this model, `Trainer._save_checkpoint` with `save_only_model`. It gathers all
  weights on the main process, and no training can resume from it.

A stall is the time from a barrier to the end of the save on the slowest process. The order changes with every round.
The first round is left out of the ratios: with the callback it also allocates the buffers that later saves reuse.
Before each save, and outside of its time, the previous one is waited for. The steps during which a checkpoint is
written in the background take longer: what they lose is in the summary. The blocking saves flush their files as the
callback does; they compute no hashes and commit nothing.
"""

import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import _save_model_checkpoint_distributed, save_optimizer_distributed

from benchmarks.async_save import LENGTH, RandomTokens
from benchmarks.launched import launch_benchmark, send_result
from hfscale import SpotCheckpointCallback

ROUNDS = 13  # the first one is not counted
EVERY = 6  # steps between two saves
KINDS = ("background", "blocking", "weights_only")
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": LENGTH,
}


class Saves(TrainerCallback):
    """Saves after every `EVERY` steps, in the order of the rounds; records the stalls and the seconds of each step.

    Args:
        spot (`SpotCheckpointCallback`): the callback that saves in the background.
        folder (`Path`): an empty folder for the blocking saves, the same on all processes.
    """

    def __init__(self, spot: SpotCheckpointCallback, folder: Path) -> None:
        self.spot = spot
        self.folder = folder
        self.trainer: Any = None
        self.weights_only: Callable[[Any, Any], None] | None = None
        orders = [*itertools.permutations(KINDS)]
        self.kinds = [kind for turn in range(ROUNDS) for kind in orders[turn % len(orders)]]
        self.stalls_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.bytes: dict[str, int] = {}
        self.step_s: dict[bool, list[float]] = {True: [], False: []}  # by whether a checkpoint was being written

    @property
    def _writer(self) -> Any:
        assert self.spot._saving is not None
        return self.spot._saving.writer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.was_writing = self._writer.in_flight
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > EVERY:
            self.step_s[self.was_writing].append(time.perf_counter() - self.begun)
        if state.global_step % EVERY:
            return
        self._writer.wait()
        if not self.kinds:
            control.should_training_stop = True
            return
        kind = self.kinds.pop(0)
        folder = self.folder / f"{kind}-{state.global_step}"
        functions = {"background": self._background, "blocking": self._blocking, "weights_only": self._weights_only}
        dist.barrier()
        begun = time.perf_counter()
        functions[kind](folder)
        slowest = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.stalls_s[kind].append(slowest.item())
        if kind != "background":
            self.bytes[kind] = size_of(folder)
            dist.barrier()
            shutil.rmtree(folder, ignore_errors=True)

    def _background(self, folder: Path) -> None:
        self.trainer._save_checkpoint(self.trainer.model, None)

    def _blocking(self, folder: Path) -> None:
        trainer = self.trainer
        folder.mkdir(exist_ok=True)
        _save_model_checkpoint_distributed(trainer.model, folder)
        save_optimizer_distributed(trainer.model, trainer.optimizer.optimizer, str(folder / "optimizer"))
        trainer._save_rng_state(str(folder))
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), folder / "scheduler.pt")
            trainer.state.save_to_json(str(folder / "trainer_state.json"))
        dist.barrier()

    def _weights_only(self, folder: Path) -> None:
        output_dir = self.trainer.args.output_dir
        self.trainer.args.output_dir = str(folder)
        type(self.trainer)._save_checkpoint(self.trainer, self.trainer.model, None)
        self.trainer.args.output_dir = output_dir
        dist.barrier()


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure() -> dict[str, Any]:
    """Launch two processes; the summary has medians."""
    return launch_benchmark("benchmarks.native_save_stall", processes=2, config="native")


def main() -> None:
    """Run the training in one of the two processes."""
    with tempfile.TemporaryDirectory() as own, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        args = TrainingArguments(
            output_dir=f"{own}/out",
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=1,
            max_steps=10_000,
            logging_strategy="no",
            save_strategy="steps",
            save_steps=100_000,
            save_only_model=True,
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        shared = [own]
        dist.broadcast_object_list(shared)
        root = Path(shared[0])
        args.output_dir = str(root / "out")
        if args.process_index == 0:
            set_seed(0)
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).save_pretrained(root / "model")
        dist.barrier()
        sizes = DistributedConfig(fsdp_size=2, ep_size=2)
        model = Qwen3MoeForCausalLM.from_pretrained(root / "model", dtype=torch.float32, distributed_config=sizes)
        spot = SpotCheckpointCallback(every_minutes=None, cloud=None)
        saves = Saves(spot, root)
        trainer = Trainer(model=model, args=args, train_dataset=RandomTokens(), callbacks=[spot, saves])
        saves.trainer = trainer
        trainer.train()
        saves.bytes["background"] = size_of(max((root / "out").glob("checkpoint-*")))
        dist.barrier()  # the main process removes the folder
    if dist.get_rank() == 0:
        send_result(result_of(saves))
    dist.barrier()
    dist.destroy_process_group()


def result_of(saves: Saves) -> dict[str, Any]:
    """Return the summary, and all stalls in milliseconds."""
    counted = {kind: stalls[1:] for kind, stalls in saves.stalls_s.items()}
    ratios = {
        kind: [own / other for own, other in zip(counted["background"], counted[kind], strict=True)]
        for kind in KINDS[1:]
    }
    median = {is_writing: statistics.median(seconds) for is_writing, seconds in saves.step_s.items()}
    longer_s = sum(seconds - median[False] for seconds in saves.step_s[True])
    summary = {
        "pairs": len(counted["background"]),
        "checkpoint_mb": {kind: round(saves.bytes[kind] / 1e6) for kind in KINDS},
        "stall_ms": {kind: round(1e3 * statistics.median(counted[kind]), 1) for kind in KINDS},
        "first_stall_ms": {kind: round(1e3 * saves.stalls_s[kind][0], 1) for kind in KINDS},
        "stall_over": {kind: round(statistics.median(ratios[kind]), 4) for kind in ratios},
        "stall_over_range": {kind: [round(min(found), 4), round(max(found), 4)] for kind, found in ratios.items()},
        "step_ms": round(1e3 * median[False], 1),
        "step_ms_while_writing": round(1e3 * median[True], 1),
        "lost_ms_per_save_in_steps": round(1e3 * longer_s / ROUNDS, 1),
    }
    stalls_ms = {kind: [round(1e3 * stall, 1) for stall in stalls] for kind, stalls in saves.stalls_s.items()}
    return {"summary": summary, "stalls_ms": stalls_ms}


if __name__ == "__main__":
    main()
