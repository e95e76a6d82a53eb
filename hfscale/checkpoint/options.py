"""The options of `SpotCheckpointCallback`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hfscale.checkpoint.cadence import DEFAULT_EVERY_MINUTES
from hfscale.checkpoint.identity import check_words
from hfscale.checkpoint.identity_differences import ASPECTS
from hfscale.checkpoint.preemption.clouds import check_cloud
from hfscale.checkpoint.preemption.stop import STOP_FILE_NAME
from hfscale.core.options import Options, option, positive, positive_or_none


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Options):
    """The options of `SpotCheckpointCallback`."""

    every_steps: int | None = option(
        None,
        check=positive,
        no_flag="it is transformers' --save_steps",
        help="Steps between saves",
        unset="the Trainer's `save_steps`, or 500 where its `save_strategy` is not `steps`",
        details='For a model loaded with `distributed_config` it also holds with `save_strategy="no"`.',
    )
    every_minutes: float | None = option(
        DEFAULT_EVERY_MINUTES,
        flag="save_minutes",
        check=positive_or_none,
        help="Longest time between two checkpoints, in minutes",
        details="None: steps only.",
    )
    notice_s: float | None = option(
        None,
        check=positive,
        help="Seconds from a signal to the end of the process",
        unset="the time that the launcher waits after SIGTERM (`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, 30), no limit after "
        "SIGUSR1",
    )
    cloud: str | None = option(
        "auto",
        check=check_cloud,
        help="Provider whose preemption notices are polled: aws, gcp, azure; auto: this machine's",
        details="`HFSCALE_CLOUD` in the environment overrides auto. None: no polling.",
    )
    stop_file: str | None = option(
        STOP_FILE_NAME,
        help="File whose presence stops the run, in the output directory unless its path is absolute",
        details="It is removed when the run has stopped. None: no such file.",
    )
    on_preemption: Literal["exit", "return"] = option(
        "exit",
        no_flag="`hfscale.recipe.train` ends a preempted recipe itself",
        help="What `Trainer.train` does after the save of a preempted run: it raises as above, or returns as it does "
        "at its end, and you check `preempted`",
    )
    asynchronous: bool = option(
        True,
        flag="asynchronous_save",
        help="Checkpoints are written in the background during training, where that gives the same files",
        details="False: training waits.",
    )
    remote: str | None = option(
        None,
        flag="checkpoint_remote",
        help="Remote copy of the checkpoints: s3://…, gs://…, hf://buckets/USER/BUCKET/run or file://…",
        details="Committed checkpoints are copied there in the background, and a newer one than the local is fetched "
        "from there when the Trainer is made. `save_total_limit` holds there too. Credentials come from where the "
        "provider's tools look for them.",
    )
    state_limit: int | None = option(
        None,
        check=positive,
        help="Newest checkpoints that keep their state; older ones keep their weights only",
        details="The state is that of optimizer, schedule and random numbers. The best checkpoint keeps it too. "
        "No run resumes from a checkpoint without it. It holds in the remote copy as well; `save_total_limit` still "
        "deletes whole checkpoints. Under DeepSpeed in 16 bits the fp32 masters are a part of the state. None: all.",
    )
    memory_interval_steps: int | None = option(
        None,
        check=positive,
        help="Steps between two snapshots in host memory under `hfscale run`",
        unset="as many as keep their cost below 1%",
        details="See docs/recovery.md. The flag of `hfscale run` goes before it.",
    )
    resume_with_other: Sequence[str] = option(
        (),
        check=check_words,
        help="What may be another one than in the run that wrote the checkpoint, which is refused otherwise: "
        + ", ".join(ASPECTS),
        details="Strategy, processes, batch sizes, learning rates and paths may always change.",
    )
