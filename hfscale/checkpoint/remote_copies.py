"""The remote copies of one run's checkpoints."""

from pathlib import Path

from transformers import TrainerState

from hfscale.checkpoint.remote import RemoteStore, Uploader
from hfscale.checkpoint.resume import newest_resumable
from hfscale.checkpoint.store import checkpoint_step
from hfscale.core.activity import activity
from hfscale.core.collectives import START, TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.run_files import UNFINISHED
from hfscale.core.run_state import ResetOnCopy
from hfscale.errors import CheckpointChangedError, CheckpointError, StorageError

logger = get_logger(__name__)

_CHECK_UPLOADER_EVERY_S = 5.0


class RemoteCopies(ResetOnCopy):
    """Fetches a newer checkpoint before a training, and copies each committed one in the background.

    Args:
        url (`str`): a folder of a remote store, such as `s3://bucket/run`.

    Raises:
        UsageError: the URL is not valid, has an unknown protocol, or contains credentials.
        MissingDependencyError: the package for this protocol is not installed.
    """

    def __init__(self, url: str) -> None:
        self.store = RemoteStore(url)
        # By output directory, the step of what `fetch` has found
        self._newest: dict[Path, int] = {}
        self._has_trained = False
        """Known to the ranks that save only."""
        self._begin_run()

    def _begin_run(self) -> None:
        self._uploader: Uploader | None = None
        self._run_dir = Path()

    def fetch(self, output_dir: Path) -> None:
        """Fetch the newest checkpoint of the store, unless the local one is as new. Every rank must call it.

        Further calls for the same output directory do nothing, so that several Trainers can use one callback.

        Args:
            output_dir (`Path`): output directory of the run.

        Raises:
            StorageError: on every rank: the store cannot be read and there is no local checkpoint, or a download
                failed.
        """
        if output_dir in self._newest:
            return
        found = newest_resumable(output_dir, self.store, exchanges=START).path
        self._newest[output_dir] = checkpoint_step(found) if found is not None else 0

    def refuse_to_discard(self, output_dir: Path, start: int) -> None:
        """Refuse a training at an earlier step than a checkpoint that the script cannot have known of.

        A checkpoint that is archived in the store is not fetched any more. So a training that begins at step 0 beside
        checkpoints of the store, or before the one that `fetch` has found, needs the user's word. Every rank must
        call it. The first training of this object is checked: the checkpoints of later ones are its own.

        Args:
            output_dir (`Path`): output directory of the run.
            start (`int`): the step at which the training begins.

        Raises:
            CheckpointChangedError: the upload of a launch that has ended was completed after `fetch`; raised on every
                rank.
            CheckpointError: the store has a later checkpoint; raised on every rank.
        """
        newest = START.on_rank_0("newest remote checkpoint", self._newest_step)
        fetched = self._newest.get(output_dir, 0)
        is_known_to_script = start > 0 and fetched <= start
        if newest <= start or is_known_to_script:
            return
        if start == fetched and self._finds_later(output_dir, start):
            raise CheckpointChangedError(
                f"checkpoint-{newest} has come into {self.store.url} since this training has looked for one: start "
                "the same command again, which resumes from it"
            )
        raise CheckpointError(
            f"{self.store.url} has checkpoint-{newest}, and the training begins at step {start}: resume from "
            f"latest_checkpoint({str(output_dir)!r}, remote={self.store.url!r}), or start from scratch with "
            'resume_from_checkpoint="false" in the training arguments'
        )

    def _finds_later(self, output_dir: Path, step: int) -> bool:
        """Return whether a start would now resume from a later step; every rank must call it."""
        found = newest_resumable(output_dir, self.store, exchanges=START).path
        return found is not None and checkpoint_step(found) > step

    def _newest_step(self) -> int:
        """Return the step of the newest checkpoint in the store that is of another training.

        Returns:
            `int`: the step; 0 if there is none, the store does not answer, or this object has trained before.
        """
        if self._has_trained:
            return 0
        try:
            return max(self.store.committed_steps(), default=0)
        except StorageError:
            return 0  # `begin` reports it

    def begin(
        self,
        run_dir: Path,
        state: TrainerState,
        *,
        limit: int | None,
        state_limit: int | None,
        committed: str | None,
        below: str,
    ) -> None:
        """Archive what the store has of later steps, and offer it the checkpoint that the run starts from.

        Only rank 0 does this. A store that cannot be reached is logged as a warning, and training continues.

        Args:
            run_dir (`Path`): the folder of the run's checkpoints.
            state (`TrainerState`): the state of the Trainer when training begins.
            limit (`int`, *optional*): number of checkpoints to keep in the store; None keeps all.
            state_limit (`int`, *optional*): number of them that keep their training state; None: all.
            committed (`str`, *optional*): name of the local checkpoint that the run starts from; None: there is none.
            below (`str`): folder of the run in the store; `.`: the store itself.
        """
        self._begin_run()
        self._has_trained = True
        self._run_dir = run_dir
        if not state.is_world_process_zero:
            return
        store = self.store if below == "." else RemoteStore(f"{self.store.url}/{below}")
        self._uploader = Uploader(
            store, limit=limit, state_limit=state_limit, links=run_dir / UNFINISHED / "upload"
        )
        try:
            for step in store.archive(after_step=state.global_step):
                logger.info(
                    "archived checkpoint-%d in %s: it is of a later step than the one this run starts at",
                    step,
                    store.url,
                )
            is_there = state.global_step in store.committed_steps()
        except StorageError as error:
            logger.warning(
                "%s; training continues, and its checkpoints will be copied there when that is possible",
                error,
            )
            return
        if committed is not None and is_there:
            self._uploader.last_uploaded = committed
        elif committed is not None:
            self._uploader.offer(run_dir / committed)

    def offer(self, checkpoint: Path, best: Path | None, temporary: list[int]) -> None:
        """Copy a checkpoint in the background, just after its commit and on the rank that committed it.

        Args:
            checkpoint (`Path`): the committed checkpoint.
            best (`Path`, *optional*): the best checkpoint, which rotation leaves in the store.
            temporary (`list[int]`): the steps of the temporary checkpoints.
        """
        if self._uploader is not None:
            self._uploader.offer(checkpoint, best.name if best is not None else None, temporary)

    @property
    def expected_s(self) -> float:
        """Seconds that the copy of the next checkpoint is expected to take on this rank."""
        return self._uploader.expected_s if self._uploader is not None else 0.0

    @activity("saving")
    def wait(self, last: str | None) -> None:
        """Wait until the last checkpoint is in the store or has been refused twice. Every rank must call it.

        Args:
            last (`str`, *optional*): name of the last committed checkpoint; None: there is none.
        """
        uploader = self._uploader
        tried_again = False
        while True:
            busy = uploader is not None and not uploader.wait(_CHECK_UPLOADER_EVERY_S)
            if uploader is not None and not busy and not tried_again and last is not None:
                tried_again = True
                if uploader.last_uploaded != last:
                    uploader.offer(self._run_dir / last)
                    busy = True
            if not TRAINING.maximum("end: remote copies", [float(busy)])[0]:
                return
