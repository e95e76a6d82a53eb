"""Kills an island in each phase of a round: do the others hang or lose a round, and how does it come back?

Three islands run the package's rendezvous, client and outer optimizer as processes; only the training between rounds
is a pause. One is killed with SIGKILL at a given point, launched again without a checkpoint, and must end with the
parameters of the others, to the last bit.
"""

import os
import random
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import torch

from hfscale.core import connections
from hfscale.facts.compression import Compression
from hfscale.islands.client import IslandClient, Reply
from hfscale.islands.outer import OuterOptimizer
from hfscale.islands.rendezvous import TOKEN_VARIABLE, Rendezvous

PHASES = ("training", "uploading", "waiting", "downloading", "stepping")
ISLANDS = 3
ROUNDS = 12
STEPS = 10
VALUES = 1_000_000
PAUSE_S = 0.2
DEADLINE_S = 30.0
HANG_S = 120.0
OUTCOMES = ("killed", "no_hang", "no_lost_round_of_the_others", "came_back", "equal_parameters")
_context = get_context("fork")


@dataclass(kw_only=True)
class _Log:
    """What an island reports at its end."""

    rounds: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Contributors by the round's number."""
    waits_s: dict[int, float] = field(default_factory=dict)
    """Seconds in the round by its number."""
    taken_at: int | None = None
    """The step of the state that it has taken from another island."""
    began: float = 0.0
    """When the process has begun, on the clock that all processes share."""
    came_back: float = 0.0
    """When it has taken part in its first round."""
    digest: str = ""


def kills(trials: int = 50, seed: int = 0) -> dict[str, Any]:
    """Runs the trials, the phases in turn.

    Args:
        trials (`int`): number of trials.
        seed (`int`): seed of the rounds in which the island is killed.
    """
    os.environ.setdefault(TOKEN_VARIABLE, "benchmark")
    rng = random.Random(seed)  # noqa: S311
    outcomes: Counter[str] = Counter()
    by_phase: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    waits, rejoins = [], []
    for trial in range(trials):
        phase, in_round = PHASES[trial % len(PHASES)], rng.randrange(2, ROUNDS // 2) * STEPS
        found = run_trial(phase, in_round, victim=rng.randrange(ISLANDS))
        by_phase[phase].update(found["outcome"])
        outcomes.update(found["outcome"])
        waits.append(found["wait_s"])
        rejoins.append(found["rejoin_s"])
        print(f"kill {trial}: {phase} in round {in_round}: {found}", flush=True)
    return {
        "trials": trials,
        "outcomes": dict(outcomes),
        "by_phase": {phase: dict(counts) for phase, counts in by_phase.items()},
        "longest_round_of_the_others_s": max(waits),
        "rejoin_s_median": statistics.median(rejoins),
        "rejoin_s_max": max(rejoins),
    }


def run_trial(phase: str, in_round: int, victim: int) -> dict[str, Any]:
    """Kills an island once, and launches it again.

    Args:
        phase (`str`): one of `PHASES`.
        in_round (`int`): the step of the round.
        victim (`int`): the island.

    Returns:
        `dict`: `outcome`, the names of what holds, of `OUTCOMES`; `wait_s`, the longest round of the others;
            `rejoin_s`, from the new launch to its first round.
    """
    torch.set_num_threads(1)
    # Processes are forked: what the first optimizer imports (torch._dynamo, seconds) is imported once, here.
    OuterOptimizer(torch.zeros(1), lr=1.0, momentum=0.0, compression=Compression())
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    server = _context.Process(target=Rendezvous(os.environ[TOKEN_VARIABLE]).serve, args=(listener,), daemon=True)
    server.start()
    listener.close()
    started = {
        number: _start(address, number, (phase, in_round) if number == victim else None) for number in range(ISLANDS)
    }
    started[victim][0].join(HANG_S)
    killed = started[victim][0].exitcode == -signal.SIGKILL
    started[victim] = _start(address, victim, None)
    logs: dict[int, _Log] = {}
    for number, (process, pipe) in started.items():
        if pipe.poll(HANG_S):
            logs[number] = pipe.recv()
        process.join(5)
        process.kill()
    server.kill()
    everything = set(range(STEPS, ROUNDS * STEPS + 1, STEPS))
    others = [logs[number] for number in range(ISLANDS) if number != victim and number in logs]
    complete = all(
        set(log.rounds) == everything and all(number in log.rounds[one] for one in everything)
        for number, log in logs.items()
        if number != victim
    )
    outcome = {
        "killed": killed,
        "no_hang": len(logs) == ISLANDS,
        "no_lost_round_of_the_others": complete and len(others) == ISLANDS - 1,
        "came_back": victim in logs and logs[victim].taken_at is not None,
        "equal_parameters": len({log.digest for log in logs.values()}) == 1 and len(logs) == ISLANDS,
    }
    back = logs.get(victim, _Log())
    return {
        "outcome": [name for name, holds in outcome.items() if holds],
        "wait_s": max((wait for log in others for wait in log.waits_s.values()), default=HANG_S),
        "rejoin_s": back.came_back - back.began if back.came_back else HANG_S,
    }


def _start(address: tuple[str, int], number: int, kill: tuple[str, int] | None) -> tuple[ForkProcess, Connection]:
    receiving, sending = _context.Pipe(duplex=False)
    process = _context.Process(target=_island, args=(address, number, kill, sending), daemon=True)
    process.start()
    sending.close()
    return process, receiving


def _island(address: tuple[str, int], number: int, kill: tuple[str, int] | None, report: Connection) -> None:
    log = _Log(began=time.monotonic())
    outer = OuterOptimizer(torch.zeros(VALUES), lr=0.7, momentum=0.9, compression=Compression(bits=8))
    terms = {"quorum": 1, "deadline_s": DEADLINE_S}
    hello = {"island": number, "part": 0, "parts": 1, "islands": ISLANDS, "terms": {}, "layout": "", **terms}
    client = IslandClient(address, {**hello, "max_bytes": outer.state_bytes})
    anchor = 0

    def take(reply: Reply) -> int:
        assert reply.state is not None
        outer.take_shared_state(reply.state)
        log.taken_at = reply.anchor
        return reply.anchor

    reply = client.join(anchor=0, digest=outer.digest(), timeout_s=HANG_S)
    if reply.kind == "state":
        anchor = take(reply)
    if reply.send_state:
        client.send_state(anchor, outer.shared_state())
    while anchor < ROUNDS * STEPS:
        step = anchor + STEPS
        time.sleep(PAUSE_S)
        phase = kill[0] if kill is not None and kill[1] == step else None
        if phase == "training":
            _die()
        if phase is not None:
            _prepare(client, phase)
        generator = torch.Generator().manual_seed(1000 * number + step)
        payload = outer.pseudo_gradient(outer.anchor - 1e-3 * torch.randn(VALUES, generator=generator))
        began = time.monotonic()
        reply = client.exchange(step, anchor=anchor, payload=payload.numpy())
        log.waits_s[step] = time.monotonic() - began
        if phase == "stepping":
            _die()
        if reply.kind == "state":
            anchor = take(reply)
            continue
        if reply.kind == "round":
            log.rounds[reply.anchor] = reply.contributors
            log.came_back = log.came_back or time.monotonic()
            payloads = reply.payloads or {}
            outer.step(outer.decode([payloads.get(island) for island in reply.contributors]))
            anchor = reply.anchor
            if reply.send_state:
                client.send_state(anchor, outer.shared_state())
    client.leave()
    log.digest = outer.digest()
    report.send(log)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _prepare(client: IslandClient, phase: str) -> None:
    """Have this process killed in the middle of the upload, before the answer, or in the middle of the download."""
    connection = client._connection
    assert isinstance(connection, connections.Connection)
    half = VALUES // 2

    def dying(call: Callable[[Any], Any], count: Callable[[Any], int], limit: int) -> Callable[[Any], Any]:
        seen = 0

        def instead(argument: Any) -> Any:
            nonlocal seen
            seen += count(argument)
            if seen > limit:
                _die()
            return call(argument)

        return instead

    if phase == "uploading":
        connection._send = dying(connection._send, len, half // 2)  # type: ignore[method-assign]
    elif phase == "waiting":
        connection._receive = dying(connection._receive, int, 0)  # type: ignore[method-assign]
    elif phase == "downloading":
        connection._receive = dying(connection._receive, int, half)  # type: ignore[method-assign]
