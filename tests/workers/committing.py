"""Commits checkpoints of a few small files without a training: committing.py STEPS.

Each checkpoint has a subfolder, step 2 is saved twice (the second time with fewer files), and two are kept. With 0
steps it finishes the commit of an earlier launch, and archives the checkpoints after step 4.
"""

import sys
from pathlib import Path

import torch

from hfscale.checkpoint.lock import lock_for_all_ranks
from hfscale.checkpoint.manifest import Manifest
from hfscale.checkpoint.store import archive, rotate, update_manifest, write_status
from hfscale.checkpoint.writer import CheckpointJob, CheckpointWriter, clear_unfinished
from hfscale.recipe.entrypoint import run


def main() -> None:
    out = Path("out")
    last = int(sys.argv[1])
    lock_for_all_ranks(out, is_holder=True)
    clear_unfinished(out)
    archive(out, after_step=4)
    writer = CheckpointWriter()
    for number, step in enumerate([1, 2, 2, *range(3, last + 1)] if last else []):

        def write(folder: Path, number: int = number, step: int = step) -> None:
            (folder / "shards").mkdir()
            (folder / "shards" / "rank_0.txt").write_text(f"{number} {step} " * 100)
            (folder / "state.json").write_text(f"{number}")
            for name in ("optimizer.pt", "scheduler.pt"):
                torch.save({}, folder / name)
            if number != 2:
                (folder / "only_in_the_first_save").mkdir()
                (folder / "only_in_the_first_save" / "file.txt").write_text(f"{step}")

        def on_commit(manifest: Manifest) -> None:
            added = out / f"checkpoint-{manifest.step}" / "added"  # as other callbacks do in `on_save`
            added.mkdir(exist_ok=True)
            (added / "file.txt").write_text(f"{manifest.step}")
            update_manifest(added.parent)
            rotate(out, limit=2)
            write_status(out, "running", step=manifest.step, checkpoint=f"checkpoint-{manifest.step}", reason=None)

        writer.run(
            CheckpointJob(
                run_dir=out,
                step=step,
                strategy="single",
                global_batch_size=8,
                commits=True,
                write=write,
                on_commit=on_commit,
            )
        )


run(main)
