"""The contract of the captures of all strategies: a callback that takes one in a training, and checks it.

The capture is taken right after Trainer's own save of a step, and written two steps later. So its files must be those
of that save: nothing that a step changes may have reached them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hfscale.checkpoint.captures import CAPTURES, capture_of
from hfscale.checkpoint.captures.capture import Capture, Captured
from hfscale.checkpoint.pickles import read_dcp_metadata
from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.trainer.frames import calling_trainer
from hfscale.trainer.strategies import Strategy

SAVED, WRITTEN = 2, 4
"""The step that is saved, and the one at whose end the capture is written."""
METADATA = ".metadata"  # torch writes a random id and the folder into it


class ObeysContract(TrainerCallback):
    """Takes a capture after the save of step `SAVED`, and compares what it writes with the files of that save.

    Args:
        folder (`Path`): gets what the capture writes, in a folder of this name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[str] = []
        """Names of the files that were compared, on rank 0."""
        self._capture: Capture | None = None
        self._writes: list[Callable[[Path], None]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != SAVED:
            return
        trainer = calling_trainer()
        self._capture = capture = capture_of(trainer)
        assert type(capture) is CAPTURES[type(Strategy.of(trainer))]
        assert capture.is_complete
        assert capture.why_synchronous() is None
        capture.prepare()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writes = self._of_engine(trainer, capture) if capture.trainer_writes else self._of_copy(capture)
        additions = capture.additions()
        if additions is not None:
            self._writes.append(additions)
        assert not [path for path in self.folder.rglob("*") if path.is_file()], (
            "nothing is written while training waits"
        )

    def _of_copy(self, capture: Capture) -> list[Callable[[Path], None]]:
        """Take what a capture copies."""
        state = capture.live()
        has_tensors = bool(state.shards or state.pickles)
        assert has_tensors or not capture.is_on_each_rank
        assert (capture.bytes_to_allocate() > 0) == has_tensors
        assert capture.expected_bytes() > 0
        captured: Captured = capture.take(copies=True)
        assert capture.bytes_to_allocate() == 0, "the next copy uses the memory of this one"
        assert (captured.write_collectively is not None) == bool(state.shards)
        writes = [captured.write]
        if captured.write_collectively is not None:
            writes.append(captured.write_collectively)
        return writes

    def _of_engine(self, trainer: Any, capture: Capture) -> list[Callable[[Path], None]]:
        """Have the engine hand over what it would write."""
        assert capture.bytes_to_allocate() == 0
        with capture.collecting():
            trainer.model_wrapped.save_checkpoint(str(self.folder))
        for path in _files_in(self.folder):  # the engine names its newest folder itself
            path.unlink(missing_ok=True)
        TRAINING.barrier("contract: handed over")
        return []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != WRITTEN or self._capture is None:
            return
        for write in self._writes:
            write(self.folder)
        TRAINING.barrier("contract: written")
        if distributed.rank() == 0:
            self._compare(Path(args.output_dir) / f"checkpoint-{SAVED}")
        TRAINING.barrier("contract: compared")

    def _compare(self, saved: Path) -> None:
        written = [path.relative_to(self.folder) for path in _files_in(self.folder)]
        self.files = sorted(path.as_posix() for path in written)
        for path in written:
            before, after = saved / path, self.folder / path
            if path.name.endswith("_states.pt"):  # DeepSpeed's older format of torch.save holds memory addresses
                contents = [torch.load(each, weights_only=False) for each in (before, after)]
                assert _plain(contents[0]) == _plain(contents[1]), path
            elif path.name == METADATA:
                assert read_dcp_metadata(before.parent) == read_dcp_metadata(after.parent), path
            else:
                assert before.read_bytes() == after.read_bytes(), path


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _plain(value: Any) -> Any:
    """Return `value` with each tensor as its dtype, shape and bytes, and each object as its attributes."""
    if isinstance(value, torch.Tensor):
        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), content
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    has_attributes = hasattr(value, "__dict__") and not isinstance(value, type)
    return _plain(vars(value)) if has_attributes else repr(value)
