"""Trains tiny models with averaged weights under any layout, in forked ranks, next to a reference in float64."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_ranks
from native_runs import make_model
from replay_runs import NATIVE, environment, make_trainer, ranks_of
from torch.utils.data import Subset
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from hfscale import SpotCheckpointCallback, WeightAveragingCallback
from hfscale.averaging.storage import StoredAverage
from hfscale.checkpoint.export import read_average
from hfscale.checkpoint.loading import readable_checkpoint
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.strategies import Strategy

SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}


class Reference(TrainerCallback):
    """Averages what this rank has of each weight in float64, and looks at the weights of evaluations."""

    def __init__(self, decay: float = 0.0, last: int = 0) -> None:
        self.decay = decay
        self.last = last
        self.steps = 0
        self.average: list[torch.Tensor] = []
        self.snapshots: list[list[torch.Tensor]] = []
        self.differences: list[float] = []
        """The greatest difference in each evaluation."""
        self.changed: list[int] = []
        """Steps after whose evaluation a weight was not what it was before."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = TrainerAdapter.current().trainer
        self.strategy = Strategy.of(trainer)
        self.strategy.reshard()
        self.parameters = [one for one in trainer.model.parameters() if one.requires_grad]

    def weights(self) -> list[torch.Tensor]:
        return [self.strategy.own(one).detach().clone() for one in self.parameters]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kept = self.weights()
        wide = [one.double() for one in self.kept]
        self.snapshots = [*self.snapshots, wide][-self.last :] if self.last else []
        if self.last:
            self.average = [sum(of_steps) / len(of_steps) for of_steps in zip(*self.snapshots, strict=True)]
        elif not self.steps:
            self.average = wide
        else:
            decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
            self.average = [decay * a + (1 - decay) * w for a, w in zip(self.average, wide, strict=True)]
        self.steps += 1

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pairs = zip(self.average, self.weights(), strict=True)
        self.differences.append(max(float((a - w).abs().max()) for a, w in pairs if a.numel()))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps and state.global_step % 2 == 0:
            self.strategy.reshard()
            if not all(map(torch.equal, self.kept, self.weights())):
                self.changed.append(state.global_step)


class HoldsStored(TrainerCallback):
    """Compares what this rank has resumed with the complete tensors of the checkpoint, bit by bit."""

    def __init__(self, checkpoint: Path, averaging: WeightAveragingCallback) -> None:
        self.checkpoint = checkpoint
        self.averaging = averaging
        self.compared = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.compared:
            return
        stored = read_average(self.checkpoint)
        average = self.averaging.average
        assert stored is not None
        assert average is not None
        pieces_of = StoredAverage(average)._pieces
        for number, one in enumerate(average.trained):
            part = average._mean(number)
            if part is None:
                continue
            full = stored[one.name].read()
            assert full.shape == pieces_of(one, part).shape
            for piece in pieces_of(one, part).pieces:
                slices = [slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True)]
                assert torch.equal(full[tuple(slices)], piece.tensor), one.name
                self.compared += piece.tensor.numel()


def spot_of(layout: str) -> SpotCheckpointCallback:
    """Return the callback that saves; Trainer itself does not save a model that transformers has distributed."""
    return SpotCheckpointCallback(cloud=None, every_steps=SAVING["save_steps"] if layout in NATIVE else None)


def trainer_of(layout: str, folder: Path, callbacks: list[TrainerCallback], steps: int = 4) -> Any:
    """Make a Trainer that evaluates on a few of its training rows."""
    saving = {"save_strategy": "no"} if layout in NATIVE else {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(layout, folder, callbacks, max_steps=steps, **saving)
    trainer.eval_dataset = Subset(trainer.train_dataset, range(8))
    trainer.args.eval_strategy = IntervalStrategy.STEPS
    trainer.args.eval_steps = 2
    return trainer


def rank(layout: str, folder: Path, options: dict[str, Any], source: str | None, steps: int) -> None:
    """Train with a reference, then resume from the middle, or from a checkpoint of another layout."""
    torch.set_num_threads(1)
    if source is None:
        reference = Reference(options.get("ema_decay", 0.0), options.get("average_last", 0))
        callbacks = [spot_of(layout), WeightAveragingCallback(**options), reference]
        trainer = trainer_of(layout, folder / "out", callbacks)
        trainer.train()
        found = {"differences": reference.differences, "changed": reference.changed}
        found["eval"] = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
    start = Path(source or folder / "out" / "checkpoint-2")
    averaging = WeightAveragingCallback(**options)
    holds = HoldsStored(start, averaging)
    trainer = trainer_of(layout, folder / "resumed", [spot_of(layout), averaging, holds], steps)
    by_script = Strategy.of(trainer).facts.is_set_by_script
    readable = str(start) if by_script else readable_checkpoint(trainer.args, str(start))
    trainer.train(resume_from_checkpoint=readable)
    (folder / f"compared-{os.environ['RANK']}.json").write_text(json.dumps(holds.compared))


def run(
    layout: str, folder: Path, options: dict[str, Any], source: Path | None = None, steps: int = 4
) -> list[dict[str, Any]]:
    """Train on the ranks of a layout; return what the reference of each rank has found.

    With a source, only the resume is trained, to `steps` steps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if layout in NATIVE:
        make_model(folder / "model")
    ranks = ranks_of(layout)
    given = (layout, folder, options, None if source is None else str(source), steps)
    codes = run_ranks(ranks, rank, *given, log=folder / "log", env=environment(layout), timeout_s=240)
    printed = "\n".join(path.read_text()[-4000:] for path in sorted((folder / "log").iterdir()))
    assert codes == [0] * ranks, f"{layout}: {codes}\n{printed}"
    compared = [json.loads((folder / f"compared-{number}.json").read_text()) for number in range(ranks)]
    assert sum(compared) > 0
    if source is not None:
        return []
    return [json.loads((folder / f"found-{number}.json").read_text()) for number in range(ranks)]


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the average of a checkpoint."""
    refs = read_average(checkpoint)
    assert refs is not None
    return {name: ref.read() for name, ref in refs.items()}
