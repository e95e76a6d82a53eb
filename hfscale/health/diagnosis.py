"""Finds the rank that keeps a hanging run waiting, from what each rank was doing when progress stopped.

Each rank takes a `Snapshot` of itself: its step, the place of its main thread in the code, and its position in its
collectives (`positions`). `diagnose` compares them:

- A rank that waits in a collective waits for those ranks of its group that have not entered it. Of these, the ranks
  that are not waiting in a collective themselves are the cause.
- Where all ranks wait, those whose collective differs from the one that most ranks are in are the cause.

Positions come from torch's Flight Recorder, which keeps the last 2,000 collectives of NCCL and of gloo unless
`TORCH_FR_BUFFER_SIZE` is 0. torch 2.13 has no public way to read it from inside the process
(`torch.distributed.flight_recorder` analyses files that NCCL's own watchdog wrote after its timeout), so the two
functions with a leading underscore are called here (`_dumps`) and nowhere else.
"""

import json
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import FrameType
from typing import Any

from hfscale.core.activity import activity_of
from hfscale.core.findings import Finding, name_ranks, rank_error
from hfscale.core.torch_internals import torch_bindings

_LISTED_RANKS = 512
"""Size of a group up to which a snapshot lists its ranks one by one."""
POINT_TO_POINT = "/p2p"
"""Suffix of a group's name for its sends and receives, which are numbered separately."""
COMPILING = (
    "torch/_dynamo/",
    "torch/_inductor/",
    "torch/utils/cpp_extension",
    "/triton/compiler/",
    "/triton/testing",  # autotuning
)
"""Files on the stack of a thread that compiles: it may be slow, and does so rarely."""
_TRAINER = "transformers/trainer"
TRAINER_SAVING = ("_save_checkpoint", "save_model", "on_save", "_save_optimizer_and_scheduler")
EVALUATING = ("evaluate", "predict", "evaluation_loop", "on_evaluate")
"""Names of Trainer's functions and of callback events; they are only compared with the names on the stack."""
GENERATING = ("generate", "_prepare_inputs")
"""Names of methods of any library: models and inference engines generate in `generate`, and the trainers of TRL
generate and call reward functions in `_prepare_inputs`, which in other trainers takes no time."""
_WAITING_FILES = ("threading.py", "selectors.py", "contextlib.py", "queue.py")
_CAUSED_BY_A_PEER = ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Timed out")
_CAUSED_BY_HARDWARE = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "hardware stack error",
    "fallen off the bus",
    "GPU is lost",
)
"""What CUDA and NVML say of a GPU that is broken. Other errors of CUDA, such as an assertion in a kernel or an illegal
address, come from the program as well."""
_MUST_MATCH = "one of them skipped a collective or called them in another order: all ranks must run the same code"
_SEE_STACK = "see its stack in hfscale_hang/; take it out of the run if it hangs again"


# The position of this rank in its collectives


@dataclass(frozen=True, kw_only=True)
class Position:
    """Describes the position of a rank in the collectives of one process group."""

    group: str
    """The group's name, the same on all its ranks."""
    ranks: tuple[int, ...]
    """Global ranks of the group; empty where the recorder does not report them (gloo)."""
    entered: int
    """Number of the last collective that this rank entered."""
    waiting: int | None = None
    """Number of the first collective that it entered and that is not finished; None: it does not wait."""
    operation: str | None = None
    """The name of that collective, such as `all_reduce`."""
    sizes: str | None = None
    """The shapes of its inputs."""
    started: bool | None = None
    """With NCCL, whether its kernel runs on the GPU; None where that is not known (gloo)."""

    def __str__(self) -> str:
        if self.waiting is None:
            return f"past {self.entered} of group {self.group}"
        return f"in {self.operation} {self.sizes} ({self.waiting} of group {self.group})"

    def to_dict(self) -> dict[str, Any]:
        """Return the position as an object for JSON.

        The ranks of a large group are `first:stop:step` where they are evenly spaced: every rank sends those of each
        of its groups.
        """
        ranks = self.ranks
        step = self.ranks[1] - self.ranks[0] if len(self.ranks) > _LISTED_RANKS else 0
        spaced = range(ranks[0], ranks[-1] + 1, step) if step > 0 else range(0)
        is_spaced = bool(spaced) and tuple(spaced) == ranks
        return vars(self) | {
            "ranks": f"{spaced[0]}:{spaced[-1] + 1}:{step}" if is_spaced else list(ranks)
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Position":
        """Return the position from a dictionary of its fields, as `to_dict` returns it."""
        ranks = fields["ranks"]
        return cls(
            **{**fields, "ranks": _spaced(ranks) if isinstance(ranks, str) else tuple(ranks)}
        )


@cache
def _spaced(text: str) -> tuple[int, ...]:
    """Return the ranks `first:stop:step`; the snapshots of all ranks of a group share one tuple."""
    return tuple(range(*map(int, text.split(":"))))


def positions() -> list[Position]:
    """Return the position of this rank in each process group; empty if the recorder is off or has recorded nothing."""
    return positions_of([json.loads(dump) for dump in _dumps()])


def positions_of(dumps: list[dict[str, Any]]) -> list[Position]:
    """Return the positions that the dumps of one rank's recorders contain.

    Args:
        dumps (`list[dict[str, Any]]`): one parsed JSON dump per recorder, in version 2.x of torch's format.

    Returns:
        `list[Position]`: a position for each process group that has recorded a collective; sends and receives of a
        group count as a group of their own, named with the suffix `POINT_TO_POINT`.
    """
    found = []
    for dump in dumps:
        members = {
            config["name"] or name: tuple(json.loads(config["ranks"] or "[]"))
            for name, config in dump.get("pg_config", {}).items()
        }
        entries: dict[str, list[dict[str, Any]]] = {}
        for entry in dump.get("entries", []):
            group = entry["process_group"][0] + (POINT_TO_POINT if entry["is_p2p"] else "")
            entries.setdefault(group, []).append(entry)
        found += [
            _position(name, members.get(name, ()), of_group) for name, of_group in entries.items()
        ]
    return found


def _position(name: str, ranks: tuple[int, ...], entries: list[dict[str, Any]]) -> Position:
    number = "p2p_seq_id" if name.endswith(POINT_TO_POINT) else "collective_seq_id"
    active = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    entered = max(entry[number] for entry in entries)
    if not active:
        return Position(group=name, ranks=ranks, entered=entered)
    first = min(active, key=lambda entry: entry[number])
    is_nccl = first["profiling_name"].startswith("nccl:")
    return Position(
        group=name,
        ranks=ranks,
        entered=entered,
        waiting=first[number],
        operation=first["profiling_name"].partition(":")[2],
        sizes=str(first["input_sizes"]),
        started=first["state"] == "started" if is_nccl else None,
    )


def _dumps() -> list[str]:
    """Return the JSON of gloo's recorder, and of NCCL's where torch is built with it."""
    # Its annotations do not list all of its functions
    recorders: Any = torch_bindings._distributed_c10d
    found = [recorders._dump_fr_trace_json(True, False)]
    if hasattr(recorders, "_dump_nccl_trace_json"):
        found.append(recorders._dump_nccl_trace_json(True, False))
    return [dump.decode() if isinstance(dump, bytes) else dump for dump in found]


# The position of this rank in its code


def frames_of(thread_id: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first.

    Args:
        thread_id (`int`): the thread's `threading.get_ident()`.

    Returns:
        `list[FrameType]`: the frames; empty if the thread has ended.
    """
    frame = sys._current_frames().get(thread_id)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def slow_activity(thread_id: int) -> str | None:
    """Return what a thread does if that may take long.

    The code of this package reports it (`hfscale.core.activity`); that of other libraries is found on the stack.

    Args:
        thread_id (`int`): the thread's `threading.get_ident()`.

    Returns:
        `str | None`: `compiling`, `saving`, `exchanging`, `evaluating` or `generating`; None otherwise.
    """
    reported = activity_of(thread_id)
    if reported is not None:
        return reported
    for frame in frames_of(thread_id):
        file = frame.f_code.co_filename
        name = frame.f_code.co_name
        if any(part in file for part in COMPILING):
            return "compiling"
        if _TRAINER in file or name.startswith("on_"):
            if name in TRAINER_SAVING:
                return "saving"
            if name in EVALUATING:
                return "evaluating"
        if name in GENERATING and frame.f_code.co_varnames[:1] == ("self",):
            return "generating"
    return None


def code_position(frames: list[FrameType]) -> str:
    """Return `file.py:12 function` of the innermost frame outside torch and the standard library's waiting functions.

    Args:
        frames (`list[FrameType]`): the frames of a thread, innermost first.

    Returns:
        `str`: the position in the code; `unknown` if there is no such frame.
    """
    for frame in frames:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.endswith(_WAITING_FILES):
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
    return "unknown"


def all_stacks() -> str:
    """Return the stacks of all threads of this process as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for thread_id, frame in sys._current_frames().items():
        parts.append(
            f"thread {names.get(thread_id, thread_id)}\n" + "".join(traceback.format_stack(frame))
        )
    return "\n".join(parts)


# Who is to blame


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Describes the state of one rank at the moment of an alarm."""

    host: str
    """Host name of its node."""
    step: int
    """Optimizer steps begun."""
    phase: str
    """`starting`, `compute` or `between steps` (data, log, evaluation, save)."""
    idle_s: float
    """Seconds since its last progress."""
    occupation: str | None
    """`compiling`, `saving`, `evaluating` or `generating`, which may take long; None otherwise and if it takes longer
    than even that may take."""
    place: str
    """Where its main thread is: `file.py:12 function`."""
    positions: tuple[Position, ...]
    """Its positions in its collectives."""
    error: str | None = None
    """The exception that ends it, if one does."""
    stacks: str = ""
    """The stacks of all its threads, or the key under which `RankStore.keep` has kept them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as an object for JSON."""
        return vars(self) | {"positions": [position.to_dict() for position in self.positions]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Snapshot":
        """Return the snapshot that `to_dict` described.

        Args:
            fields (`dict[str, Any]`): the result of `to_dict`.
        """
        return cls(**{**fields, "positions": tuple(map(Position.from_dict, fields["positions"]))})

    @property
    def waiting(self) -> Position | None:
        """The first collective that the rank waits in, None where it waits in none."""
        return next((position for position in self.positions if position.waiting is not None), None)

    @property
    def activity(self) -> str:
        """What the rank is doing, in words."""
        return f"in {self.phase} of step {self.step} for {self.idle_s:.0f} s, at {self.place}"


Blame = Callable[[int, str, str], Finding]
"""Makes a finding from a rank, the problem and the fix."""


def diagnose(
    world_size: int, hosts: Mapping[int, str], snapshots: Mapping[int, Snapshot]
) -> list[Finding]:
    """Find the ranks that are to blame for a hang.

    Args:
        world_size (`int`): the number of ranks.
        hosts (`Mapping[int, str]`): the host of each rank.
        snapshots (`Mapping[int, Snapshot]`): the snapshots of the ranks that answered.

    Returns:
        `list[Finding]`: a finding for each rank to blame, or one about all if no single rank is; empty if a rank does
        something that may take long.
    """

    def blame(rank: int, problem: str, fix: str) -> Finding:
        return rank_error("hang", rank, hosts, problem, fix)

    absent = [rank for rank in range(world_size) if rank not in snapshots]
    if absent:
        problem = "does not answer: its process is dead, stopped, or in a call that never returns"
        return [
            blame(rank, problem, "see its log and the kernel log of its host") for rank in absent
        ]
    failed = {rank: snap.error for rank, snap in snapshots.items() if snap.error}
    if failed:
        own = {rank: error for rank, error in failed.items() if not _is_caused_by_a_peer(error)}
        return [_exception(rank, hosts, error) for rank, error in sorted((own or failed).items())]
    if any(snap.occupation for snap in snapshots.values()):
        return []
    waiting = {rank: snap.waiting for rank, snap in snapshots.items() if snap.waiting is not None}
    if not waiting:
        return _blame_when_nobody_waits(snapshots, blame)
    missing = _not_arrived(waiting, snapshots)
    causes = sorted(rank for rank in missing if rank not in waiting)
    if not causes:
        return _blame_when_all_wait(waiting, blame, snapshots)
    return [
        blame(
            rank,
            f"has not reached {missing[rank].operation} ({missing[rank].waiting} of group {missing[rank].group}), in "
            f"which {len(waiting)} wait: it is {snapshots[rank].activity}",
            _SEE_STACK,
        )
        for rank in causes
    ]


def _exception(rank: int, hosts: Mapping[int, str], error: str) -> Finding:
    """Return the finding about a rank that ends by an exception: its host is to blame only for an error of a GPU."""
    problem = f"failed: {error}"
    fix = "see its log for the traceback"
    found = rank_error("exception", rank, hosts, problem, fix)
    is_of_hardware = any(text in error for text in _CAUSED_BY_HARDWARE)
    return replace(found, blames_host=is_of_hardware)


def _not_arrived(
    waiting: Mapping[int, Position], snapshots: Mapping[int, Snapshot]
) -> dict[int, Position]:
    """Return the ranks that have not entered a collective in which others wait, each with that collective."""
    entered: dict[str, dict[int, int]] = {}
    for rank, snap in snapshots.items():
        for position in snap.positions:
            entered.setdefault(position.group, {}).setdefault(rank, position.entered)
    missing: dict[int, Position] = {}
    seen: set[tuple[str, int, int]] = set()  # many ranks wait in the same collective
    for position in waiting.values():
        collective = (position.group, position.waiting or 0, len(position.ranks))
        if (
            position.group.endswith(POINT_TO_POINT)
            or position.waiting is None
            or collective in seen
        ):
            continue
        seen.add(collective)
        of_group = entered[position.group]
        members = position.ranks or (snapshots if position.group == "0" else of_group)
        for rank in members:
            if rank in snapshots and of_group.get(rank, -1) < position.waiting:
                missing.setdefault(rank, position)
    return missing


def _blame_when_all_wait(
    waiting: Mapping[int, Position], blame: Blame, snapshots: Mapping[int, Snapshot]
) -> list[Finding]:
    """Blame the ranks that are in another collective than most, else a GPU that has not started the collective, else
    the links. It is called if every rank that could be waited for waits too."""
    collectives = {rank: (p.group, p.waiting, p.operation, p.sizes) for rank, p in waiting.items()}
    (most_common, count), *rest = Counter(collectives.values()).most_common()
    if rest and rest[0][1] == count:
        listed = ", ".join(
            f"rank {rank} {position}" for rank, position in sorted(waiting.items())[:8]
        )
        problem = f"wait in different collectives: {listed}"
        return [
            Finding(
                level="error",
                check="hang",
                problem=problem,
                fix=_MUST_MATCH,
                ranks=tuple(sorted(waiting)),
            )
        ]
    if rest:
        reference = next(p for rank, p in waiting.items() if collectives[rank] == most_common)
        return [
            blame(
                rank,
                f"is {waiting[rank]} while {count} ranks are {reference} ({snapshots[rank].activity})",
                "it skipped a collective or called them in another order: all ranks must run the same code",
            )
            for rank in sorted(waiting)
            if collectives[rank] != most_common
        ]
    not_started = [rank for rank, position in waiting.items() if position.started is False]
    if 0 < len(not_started) < len(waiting):
        problem = f"has called {most_common[2]} but its GPU has not started it: an earlier kernel hangs there"
        return [blame(rank, problem, _SEE_STACK) for rank in sorted(not_started)]
    if len(not_started) == len(waiting):  # of NCCL: gloo's positions do not have the start
        count_of_all = (
            "all" if len(waiting) == len(snapshots) else f"{len(waiting)} of {len(snapshots)}"
        )
        problem = (
            f"{count_of_all} ranks have queued the same collective ({next(iter(waiting.values()))}), and it does not "
            "end: a GPU has not arrived there, or a link hangs; which GPU is unknown, since no start of a kernel is "
            "recorded"
        )
        fix = (
            "start with TORCH_NCCL_ENABLE_TIMING=1, with which NCCL's flight recorder has the starts, if it is not "
            "set; look at all GPUs (nvidia-smi, kernel logs) and links (hfscale check under the launcher)"
        )
        return [Finding(level="error", check="hang", problem=problem, fix=fix)]
    problem = f"{_who_waits(waiting, snapshots)}, and it does not end"
    fix = "a link, a switch or a GPU's DMA hangs: run hfscale check under the launcher"
    return [Finding(level="error", check="hang", problem=problem, fix=fix)]


def _who_waits(waiting: Mapping[int, Position], snapshots: Mapping[int, Snapshot]) -> str:
    """Return which ranks are in the one collective in which ranks wait, and which have left it already."""
    left = sorted(snapshots.keys() - waiting.keys())
    collective = next(iter(waiting.values()))
    if not left:
        return f"all ranks are {collective}"
    names = f"{name_ranks(left)} ha{'ve' if len(left) > 1 else 's'} left it ({snapshots[left[0]].activity})"
    return (
        f"{name_ranks(sorted(waiting))} {'are' if len(waiting) > 1 else 'is'} {collective}, {names}"
    )


def _blame_when_nobody_waits(snapshots: Mapping[int, Snapshot], blame: Blame) -> list[Finding]:
    """Blame the ranks that are steps behind, else report where the ranks stall. No rank is in a collective."""
    newest = max(snap.step for snap in snapshots.values())
    behind = sorted(rank for rank, snap in snapshots.items() if snap.step < newest)
    if behind:
        return [
            blame(
                rank,
                f"is at step {snapshots[rank].step}, others at {newest}: it is {snapshots[rank].activity}",
                _SEE_STACK,
            )
            for rank in behind
        ]
    longest_s = max(snap.idle_s for snap in snapshots.values())
    stalled = sorted(rank for rank, snap in snapshots.items() if snap.idle_s >= longest_s / 2)
    where = Counter(f"{snapshots[rank].phase}, at {snapshots[rank].place}" for rank in stalled)
    problem = f"no rank waits for another, {len(stalled)} stall in {where.most_common(1)[0][0]}"
    ranks = tuple(stalled) if len(stalled) < len(snapshots) else ()
    fix = "see the stacks in hfscale_hang/"
    return [Finding(level="error", check="hang", problem=problem, fix=fix, ranks=ranks)]


def _is_caused_by_a_peer(error: str) -> bool:
    """Return whether an exception only says that another rank has ended."""
    return any(text in error for text in _CAUSED_BY_A_PEER)
