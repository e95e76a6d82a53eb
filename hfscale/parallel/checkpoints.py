"""How `ParallelTrainer` saves and goes on: the part of it that reads and writes checkpoints.

A checkpoint's tensors are those of `hfscale.parallel.state`. Beside them lie Trainer's small files and two of JSON
that say what the tensors cannot, so that any layout, and by conversion any strategy, goes on from it. What is to be
written is handed over as `sharded_state` and `checkpoint_files`, and so it can be written beside the training too.
"""

import io
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from torch import nn
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import get_last_checkpoint

from hfscale.checkpoint.formats.parallel import FOLDER, PARALLEL_NAME, ParallelMetadata, read_parallel_metadata
from hfscale.checkpoint.formats.parameter_names import PARAMETERS_NAME, ParameterNames
from hfscale.checkpoint.pickles import load_archive
from hfscale.errors import CheckpointError
from hfscale.facts.layout import ParallelLayout
from hfscale.integrations.checkpoint_files import rng_name
from hfscale.integrations.resume import readable_checkpoint
from hfscale.parallel import export, state
from hfscale.parallel.mesh import ParallelMesh
from hfscale.parallel.model import ParallelizedModel

_GROUPS = 2  # of Trainer's optimizer, with and without weight decay; a mesh of several axes may make more of them


class SavesLaidOut(Trainer):
    """A Trainer whose model is laid out over a mesh, as far as its checkpoints go."""

    parallelized: ParallelizedModel
    layout: ParallelLayout
    mesh: ParallelMesh
    parameter_names: ParameterNames
    """Of the whole model."""
    _unchanging: dict[str, bytes] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; a checkpoint of another strategy (DDP, FSDP2, ZeRO …) is converted first.

        Raises:
            LayoutError: it cannot be.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str):
            resume_from_checkpoint = readable_checkpoint(self.args, resume_from_checkpoint, strategy="parallel")
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # --- what is written ---------------------------------------------------------------------------------------------

    def sharded_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What this rank writes of its tensors, by folder of the checkpoint and name; they share the training's
        memory, so a copy is to be made before the next step."""
        optimizer = None if self.args.save_only_model else self.optimizer.optimizer
        return {FOLDER: state.stored_tensors(self.parallelized, optimizer)}

    def checkpoint_files(self) -> dict[str, bytes]:
        """Name -> content of the small files that the main process writes beside the tensors, as of now."""
        files = dict(self._model_files())
        scheduler = None if self.args.save_only_model else self._scheduler_file()
        if scheduler is not None:
            files[SCHEDULER_NAME] = scheduler
        files[PARAMETERS_NAME] = self.parameter_names.to_json().encode()
        facts = ParallelMetadata(
            layout=asdict(self.layout),
            packed={name: packed.dim for name, packed in self.parallelized.packed.items()},
            groups=self._group_options(),
        )
        return files | {PARALLEL_NAME: facts.to_json().encode()}

    def _group_options(self) -> list[dict[str, Any]]:
        """As a model in one piece would have them: groups differ by their weight decay alone."""
        group = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        return [group | {"weight_decay": decay} for decay in (self.args.weight_decay, 0.0)]

    def _scheduler_file(self) -> bytes | None:
        """Trainer's scheduler.pt for two groups of parameters, however many this layout has made of them."""
        saved = self.lr_scheduler.state_dict()
        if len(set(saved["base_lrs"])) > 1:
            return None
        groups = len(saved["base_lrs"])
        cut = {k: v[:1] * _GROUPS if isinstance(v, list) and len(v) == groups else v for k, v in saved.items()}
        buffer = io.BytesIO()
        torch.save(cut, buffer)
        return buffer.getvalue()

    def _model_files(self) -> dict[str, bytes]:
        """Config (or the adapter's) and tokenizer: they do not change, and a large vocabulary takes its time."""
        if self._unchanging is None:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                if isinstance(self.model, PeftModel):
                    self.model.peft_config[self.model.active_adapter].save_pretrained(name)
                else:
                    self.parallelized.model.config.save_pretrained(name)
                    if self.parallelized.model.can_generate():
                        self.parallelized.model.generation_config.save_pretrained(name)
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(name)
                found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                self._unchanging = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
        return self._unchanging

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Within training a checkpoint but for what Trainer writes itself; else a `from_pretrained` folder."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if _internal_call:
            for name, tensors in self.sharded_state().items():
                dcp.save(tensors, checkpoint_id=folder / name)
        else:
            export.write_weights(folder, self.parallelized, self.mesh)
        if self.args.should_save:
            for name, content in (self.checkpoint_files() if _internal_call else self._model_files()).items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """`save_model` has: the optimizer's state lies beside the model's."""

    # --- what is read ------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / FOLDER).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} was not written by ParallelTrainer and has no manifest: convert it with "
                f"`hfscale checkpoints convert {resume_from_checkpoint} NEW_FOLDER --to parallel`, begin from the "
                "weights of a model folder with --model_name_or_path, or afresh with --resume_from_checkpoint false"
            )
        read_parallel_metadata(
            Path(resume_from_checkpoint)
        )  # what cannot be continued is told before its tensors are read
        state.load_model(Path(resume_from_checkpoint), self.parallelized)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Of the scheduler its position alone: its lists have an entry per parameter group, and how many groups there
        are depends on the layout."""
        if checkpoint is None:
            return
        state.load_optimizer(Path(checkpoint), self.parallelized, self.optimizer.optimizer)
        state.restore_position(self.lr_scheduler, load_archive(Path(checkpoint) / SCHEDULER_NAME))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Each rank its own; in another layout all the first rank's, as they all began with one seed: ranks that share
        a matrix must drop out the same elements."""
        if checkpoint is None or read_parallel_metadata(Path(checkpoint)).layout == asdict(self.layout):
            super()._load_rng_state(checkpoint)
            return
        known = [Path(checkpoint) / name for name in ("rng_state_0.pth", "rng_state.pth")]
        with tempfile.TemporaryDirectory() as folder:
            for path in [path for path in known if path.is_file()][:1]:
                (Path(folder) / rng_name(self)).symlink_to(path.resolve())
            super()._load_rng_state(folder)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))
