"""`hfscale checkpoints`: lists, verifies, converts, exports and averages the checkpoints of a run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfscale.checkpoint.best import STATE_NAME
from hfscale.checkpoint.resume import newest_resumable
from hfscale.checkpoint.store import CORRUPT, GOOD, CheckpointInfo, inspect, is_checkpoint, verify
from hfscale.core.disk_errors import writing
from hfscale.core.exchanges import OneProcess
from hfscale.core.run_files import MANIFEST_NAME
from hfscale.core.spelling import spelled
from hfscale.errors import CheckpointError, ParameterError, UsageError
from hfscale.facts.strategies import CONVERTIBLE, facts_of

if TYPE_CHECKING:
    from hfscale.checkpoint.manifest import Manifest
    from hfscale.checkpoint.mean import Source as MeanSource

RunOrCheckpoint = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run's output directory or one checkpoint.")
]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint, or a run's output directory (its newest good checkpoint).",
    ),
]
Target = Annotated[Path, typer.Argument(metavar="DST", help="A new folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Compare only the lengths of files, do not read them.")
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch-size",
        min=1,
        help="Sequences per optimizer step; needed if SRC has no manifest.",
    ),
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        "--model", help="A folder with the config and tokenizer; by default those of SRC."
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto (from the config), float32, bfloat16 or float16.")
]
ShardSize = Annotated[
    str, typer.Option("--max-shard-size", help="Maximal size of a file of weights.")
]

_CONFIG_NAMES = ("config.json", "adapter_config.json")
_STATE_STYLES = {"good": "green", "incomplete": "yellow", "corrupt": "red", "superseded": "dim"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


def list_(path: RunOrCheckpoint, as_json: Json = False, quick: Quick = False) -> None:
    """List the checkpoints of a run with their state, and the archived ones."""
    _show(inspect(path, read_files=not quick, archives=True), path, as_json)


def verify_(path: RunOrCheckpoint, as_json: Json = False, quick: Quick = False) -> int:
    """Compare every file with its hash and check all pickles; exit code 1 if one is not good or there is none."""
    found = inspect(path, read_files=not quick)
    if not quick:
        found = [_with_pickles_checked(checkpoint) for checkpoint in found]
    _show(found, path, as_json)
    return 0 if found and all(checkpoint.state == GOOD for checkpoint in found) else 1


def _with_pickles_checked(info: CheckpointInfo) -> CheckpointInfo:
    from hfscale.checkpoint.pickles import check_pickles

    if info.state == GOOD:
        try:
            check_pickles(Path(info.path))
        except CheckpointError as error:
            return replace(info, state=CORRUPT, reason=str(error))
    return info


def convert(
    source: Source,
    target: Target,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="STRATEGY",
            help=f"{', '.join(CONVERTIBLE[:-1])} or {CONVERTIBLE[-1]}.",
        ),
    ],
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size",
            min=1,
            help="Processes that will resume; by default as many as wrote SRC.",
        ),
    ] = None,
    global_batch_size: GlobalBatch = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint for another strategy or number of processes; a relaunched recipe does this by itself."""
    from hfscale.checkpoint.conversion import convert

    if to not in CONVERTIBLE:
        raise ParameterError("to", to, f"use one of {', '.join(CONVERTIBLE)}")
    source, manifest = _open(source, global_batch_size)
    facts = facts_of(to)
    ranks = world_size or (1 if facts.is_for_one_process else manifest.world_size)
    # Without an engine that shards, a single process and several have strategies of their own
    if not facts.shards and facts.is_for_one_process != (ranks == 1):
        size = spelled("world_size", ranks)
        raise UsageError(
            f"{spelled('to')} is {to} with {size}: use 'single' for one process, 'ddp' for several"
        )
    _check_new(target)
    with writing(target, "make room or give another folder"):
        converted = convert(source, target, manifest=manifest, strategy=to, world_size=ranks)
    summary = {
        "path": str(target),
        "step": converted.step,
        "strategy": to,
        "world_size": ranks,
        "global_batch_size": converted.global_batch_size,
        "bytes": sum(record.bytes for record in converted.files.values()),
    }
    if as_json:
        print(json.dumps(summary))
        return
    print(f"{target}: step {converted.step}, {to} on {ranks} processes, {_size(summary['bytes'])}")
    print(f"resume from it with --resume_from_checkpoint {target}")
    if facts_of(to).by_deepspeed:
        print(
            'outside the recipes, DeepSpeed\'s config must contain "checkpoint": {"load_universal": true}'
        )


def export(
    checkpoint: Source,
    target: Target,
    model: ModelFolder = None,
    dtype: Dtype = "auto",
    max_shard_size: ShardSize = "5GB",
    average: Annotated[
        bool,
        typer.Option(
            "--average", help="Write the average of the weights that SRC keeps (--ema_decay)."
        ),
    ] = False,
    global_batch_size: GlobalBatch = None,
    as_json: Json = False,
) -> None:
    """Write a folder for from_pretrained: config, tokenizer and safetensors."""
    from hfscale.checkpoint.export import export

    _check_dtype(dtype)
    shard_bytes = _bytes(max_shard_size)
    # The weights do not depend on it
    checkpoint, manifest = _open(checkpoint, global_batch_size or 1)
    _check_new(target)
    with writing(target, "make room or give another folder"):
        files = export(
            checkpoint,
            target,
            strategy=manifest.strategy,
            model=model,
            dtype=dtype,
            max_shard_bytes=shard_bytes,
            average=average,
        )
    if as_json:
        print(json.dumps({"path": str(target), "step": manifest.step, "files": files}))
    else:
        print(f"{target}: step {manifest.step}, {', '.join(files)}")


def average(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC...",
            help="Checkpoints, output directories of runs (their newest good checkpoint), or model folders.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", metavar="DST", help="A new folder.")],
    model: ModelFolder = None,
    dtype: Dtype = "auto",
    max_shard_size: ShardSize = "5GB",
    as_json: Json = False,
) -> None:
    """Write the mean of the weights of checkpoints or model folders, as a folder for from_pretrained."""
    from hfscale.checkpoint.mean import average

    _check_dtype(dtype)
    shard_bytes = _bytes(max_shard_size)
    if len(sources) < 2:
        raise UsageError(f"{sources[0]} alone has no mean: name two checkpoints or more")
    _check_new(output)
    opened = list(map(_open_source, sources))
    with writing(output, "make room or give another folder"):
        files = average(opened, output, model=model, dtype=dtype, max_shard_bytes=shard_bytes)
    folders = [str(one.folder) for one in opened]
    if as_json:
        print(json.dumps({"path": str(output), "sources": folders, "files": files}))
    else:
        print(f"{output}: the mean of {', '.join(folders)}: {', '.join(files)}")


def _check_dtype(dtype: str) -> None:
    from hfscale.checkpoint.export import DTYPES

    if dtype not in ("auto", *DTYPES):
        raise ParameterError("dtype", dtype, f"use one of auto, {', '.join(DTYPES)}")


def _open_source(source: Path) -> "MeanSource":
    """Return a checkpoint, verified if it has a manifest, or a folder of `save_pretrained`, which has no state.

    The output directory of a run may have its final model; as for `export`, it stands for its newest checkpoint.
    """
    from hfscale.checkpoint.mean import Source as MeanSource

    has_state = any((source / name).is_file() for name in (STATE_NAME, MANIFEST_NAME))
    has_config = any((source / name).is_file() for name in _CONFIG_NAMES)
    is_run = any(source.glob("checkpoint-*"))
    if has_config and not has_state and not is_run:
        return MeanSource(folder=source, strategy=None)
    folder, manifest = _open(source, 1)  # the weights do not depend on the global batch
    return MeanSource(folder=folder, strategy=manifest.strategy)


def _open(source: Path, global_batch_size: int | None) -> tuple[Path, "Manifest"]:
    """Return the checkpoint that `source` names and its manifest; a checkpoint with a manifest is verified."""
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder: name a checkpoint or a run's output directory")
    if not is_checkpoint(source):
        newest = newest_resumable(source, exchanges=OneProcess()).path
        if newest is None:
            raise CheckpointError(
                f"{source} has no good checkpoint: run hfscale checkpoints list {source}"
            )
        source = newest
    if (source / MANIFEST_NAME).is_file():
        return source, verify(source)
    from hfscale.checkpoint.inferred_manifest import infer_manifest

    return source, infer_manifest(source, global_batch_size=global_batch_size)


def _check_new(target: Path) -> None:
    if target.exists():
        raise UsageError(f"{target} already exists: give the name of a new folder")


def _show(found: list[CheckpointInfo], path: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps([checkpoint.to_dict() for checkpoint in found]))
        return
    if not found:
        print(f"{path} has no checkpoints")
        return
    from rich.text import Text

    from hfscale.core.terminal import make_console, make_table

    columns = (
        "checkpoint",
        "state",
        "step",
        "strategy",
        "processes",
        "global batch",
        "size",
        "age",
        "best",
    )
    table = make_table(*columns, right=("step", "processes", "global batch", "size"))
    for info in found:
        state = Text(info.state, style=_STATE_STYLES[info.state])
        known = [
            _or_dash(v) for v in (info.step, info.strategy, info.world_size, info.global_batch_size)
        ]
        table.add_row(
            info.name,
            state,
            *known,
            _size(info.bytes),
            _age(info.age_s),
            "best" if info.best else "",
        )
    console = make_console()
    console.print(table)
    for info in found:
        if info.reason:
            console.print(f"{info.name}: {info.reason}", markup=False)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _size(count: object) -> str:
    value = float(str(count))
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ParameterError("max_shard_size", text, "write a size like 5GB or 500MiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


COMMAND = {
    "list": list_,
    "verify": verify_,
    "convert": convert,
    "export": export,
    "average": average,
}
