"""No way by which text leaves hfscale lets a secret pass: lines, logs, files, summaries."""

import logging
import socket
import sys

import pytest
from tiny import tiny_trainer

from hfscale import ScalingCallback
from hfscale.checkpoint.store import read_status, write_status
from hfscale.cli import main
from hfscale.core.findings import Finding
from hfscale.core.logging import get_logger
from hfscale.core.rank_link import RankLink
from hfscale.core.records import append_record
from hfscale.core.redaction import MASK
from hfscale.core.run_memory import RunMemory
from hfscale.errors import UsageError
from hfscale.health.diagnosis import Snapshot
from hfscale.health.hang import write_folder
from hfscale.recipe.entrypoint import _exit_with_line
from hfscale.recipe.finish import _summary_rows
from hfscale.recovery.event_log import EventLog
from hfscale.recovery.restarts import Failure

PLANTED = (
    "hunter2secret",
    "deadbeefcafe",
    "azuresignature",
    "bearersecret",
    "planted-in-env",
    "aB3aB3aB3aB3aB3aB3aB3aB3",
)
TEXT = (
    f"403 for https://user:{PLANTED[0]}@mirror.example/x?X-Amz-Signature={PLANTED[1]} and "
    f"https://a.blob/x?sig={PLANTED[2]} with Authorization: Bearer {PLANTED[3]}, {PLANTED[4]} and hf_{PLANTED[5]}"
)


def of_logger(folder, capsys):
    try:
        raise OSError(TEXT)
    except OSError:
        get_logger("hfscale.a_test").warning("it failed: %s", TEXT, exc_info=True)
    return capsys.readouterr().err


def of_command_line(folder, capsys):
    assert main(["report", f"/nowhere/{TEXT}"]) == 2
    return capsys.readouterr().err


def of_recipe(folder, capsys):
    with pytest.raises(SystemExit):
        _exit_with_line(UsageError(TEXT))
    return capsys.readouterr().err


def of_summary(folder, capsys):
    return str(_summary_rows(tiny_trainer(folder), ScalingCallback(), {}))


def of_supervisor(folder, capsys):
    failure = Failure(failed_at=1.0, ended_at=2.0, rank=0, reason=TEXT, begun_step=1, completed_step=0)
    EventLog(folder / "log").say("restart", str(failure), failure)
    return capsys.readouterr().err + (folder / "log").read_text()


def of_rank(folder, capsys):
    """What a rank tells its supervisor, who writes it to `failure.json`."""
    memory = RunMemory(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(memory.socket))
        listener.listen()
        RankLink(memory, 0).ending_by(OSError(TEXT))
        connection, _ = listener.accept()
        with connection:
            return str([connection.recv(65536) for _ in ("hello", "ending")])


def of_timeline(folder, capsys):
    append_record(
        folder / "timeline", {"event": "recovery", "step": 1, "reason": TEXT, "more": [{"token": PLANTED[3]}]}
    )
    return (folder / "timeline").read_text()


def of_verdict(folder, capsys):
    about = {
        "host": "a",
        "step": 1,
        "phase": "compute",
        "idle_s": 9.0,
        "occupation": None,
        "place": "x",
        "positions": (),
    }
    finding = Finding(check="hang", problem=TEXT)
    write_folder(folder, [finding], {0: Snapshot(**about, error=TEXT, stacks="all")}, {"all": TEXT})
    return (folder / "verdict.json").read_text() + (folder / "rank-0.txt").read_text()


def of_status(folder, capsys):
    write_status(folder, "failed", step=3, checkpoint=None, reason=TEXT)
    return str(read_status(folder))


WAYS_OUT = [
    *(of_logger, of_command_line, of_recipe, of_summary),
    *(of_supervisor, of_rank, of_timeline, of_verdict, of_status),
]


@pytest.mark.parametrize("way_out", WAYS_OUT)
def test_no_way_out_for_text_lets_a_secret_pass(tmp_path, monkeypatch, capsys, way_out):
    monkeypatch.setenv("MY_API_KEY", PLANTED[4])
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub_token", PLANTED[3], "--note", TEXT])
    monkeypatch.setattr(logging.getLogger("hfscale"), "handlers", [])  # a new one writes to the captured stream
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    shown = way_out(tmp_path, capsys)
    assert [planted for planted in PLANTED if planted in shown] == []
    assert MASK in shown
