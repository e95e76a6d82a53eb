"""`hfscale check`: alone, under a launcher, and with a rank that is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY, fake_nvidia_smi

from hfscale.check import check
from hfscale.cli import main
from hfscale.core.distributed import last_barrier
from hfscale.core.findings import Finding
from hfscale.health.preflight import PreflightResult

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def run(capsys, *argv, code=0):
    assert main(["check", *map(str, argv)]) == code
    return capsys.readouterr()


def test_a_single_process_checks_the_node_and_names_the_command_for_all_ranks(capsys, tmp_path):
    out = run(capsys, "--output-dir", tmp_path, "--checkpoint-gib", "0.001").out
    assert "accelerate launch -m hfscale check" in out
    assert re.search(r"this node: fit to train \(\d+\.\d s\)$", out.strip())
    assert list(tmp_path.iterdir()) == []


def test_json_has_the_findings_with_fixes(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere9")
    report = json.loads(run(capsys, "--json", "--output-dir", tmp_path, "--checkpoint-gib", "1e6", code=1).out)
    assert report["ok"] is False
    assert {(f["check"], f["level"]) for f in report["findings"]} >= {("interfaces", "error"), ("disk", "error")}
    assert all(f["message"] == f"{f['problem']}; {f['fix']}" for f in report["findings"])
    assert report["ranks"][0]["versions"]["torch"]


def test_a_save_longer_than_the_preemption_notice_is_a_warning(capsys, tmp_path):
    out = run(capsys, "--output-dir", tmp_path, "--checkpoint-gib", "3", "--notice", "0.001").out
    assert re.search(r"warning: .*a save takes \d+ s.* 0 s", out)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--deadline", "1"], "--deadline is 1"),
        (["--backend", "mpi"], "--backend is mpi"),
        (["--notice", "0"], "--notice is 0"),
        (["--deadline", "soon"], "--deadline is 'soon'"),
    ],
)
def test_wrong_usage_is_one_line(capsys, argv, part):
    err = run(capsys, *argv, code=2).err
    assert part in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about GPUs that torch cannot use")
def test_gpus_that_torch_cannot_use_are_an_error_unless_gloo_is_asked_for(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(fake_nvidia_smi(tmp_path)))
    assert "2 GPUs" in run(capsys, code=1).out
    assert "2 GPUs" not in run(capsys, "--backend", "gloo").out


def test_nccl_without_a_gpu_is_wrong_usage(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "--backend nccl" in run(capsys, "--backend", "nccl", code=2).err


@pytest.mark.long
def test_a_store_that_does_not_answer_is_an_error_with_its_address(python):
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    done = python("-m", "hfscale", "check", "--backend", "gloo", "--deadline", "5", env=rank)
    assert done.code == 1
    assert re.search(r"127\.0\.0\.1.* does not answer", done.err.splitlines()[-1])


@pytest.mark.world(2)
def test_under_a_launcher_all_ranks_and_links_are_checked(launch):
    done = launch(2, "-m", "hfscale", "check", "--json", "--short")
    assert done.code == 0, done.err[-3000:]
    (report,) = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert (report["ok"], report["world_size"], len(report["ranks"])) == (True, 2, 2)
    assert {row["kind"] for row in report["collectives"]} >= {"all_reduce", "all_to_all", "neighbours"}
    assert all(row["gb_s"] > 0 for row in report["collectives"])


@pytest.mark.world(2)
@pytest.mark.long
def test_the_report_of_all_ranks_names_gloo(launch):
    done = launch(2, "-m", "hfscale", "check", "--short")
    assert done.code == 0, done.err[-3000:]
    assert "gloo connects all ranks" in done.out


@pytest.mark.faults
@pytest.mark.world(3)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named_by_all_others(tmp_path, how):
    """The launcher ends all ranks as soon as one dies: the others print their errors before that."""
    config = REPOSITORY / "accelerate_configs" / "ddp.yaml"
    argv = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "3"]
    script = tmp_path / "check.py"
    script.write_text(
        "import os, sys, time\n"
        "open(f'pid-{os.environ[\"RANK\"]}', 'w').write(str(os.getpid()))\n"
        "import torch.distributed as dist\n"
        "real = dist.all_reduce\n"
        "def slow(*a, **k):\n"
        "    if os.environ['RANK'] == '1': open('here', 'w').close(); time.sleep(30)\n"
        "    return real(*a, **k)\n"
        "dist.all_reduce = slow\n"
        "from hfscale.cli import main\n"
        "sys.exit(main(['check', '--deadline', '40']))\n"
    )
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([*argv, str(script)], cwd=tmp_path, stdout=err, stderr=err)
        until = time.monotonic() + 240
        while not (tmp_path / "here").exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(int((tmp_path / "pid-1").read_text()), how)
        code = process.wait(240)
    text = (tmp_path / "err").read_text()
    assert code != 0
    for rank in (0, 2):
        assert re.search(rf"hfscale: error on rank {rank}: rank 1 \(\S+\): does not answer", text), text[-3000:]


@pytest.mark.parametrize(("backend", "devices"), [("nccl", [3]), ("gloo", None)])
def test_the_last_barrier_of_a_rank_names_its_gpu(monkeypatch, backend, devices):
    """Without it torch takes the device of the calling thread, and warns; the calls are recorded."""
    given = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "barrier", lambda device_ids: given.append(device_ids))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    last_barrier()
    assert given == [devices]


@pytest.mark.parametrize("is_healthy", [True, False])
def test_after_a_healthy_check_the_main_thread_has_its_ranks_gpu(monkeypatch, is_healthy):
    """The pre-flight runs in a thread, and the current device is one of a thread; the calls are recorded."""
    wrong = Finding(level="error", check="matmul", problem="wrong", fix="none")
    result = PreflightResult(
        findings=() if is_healthy else (wrong,),
        node_findings=(),
        is_reader=False,
        ranks={},
        links=[],
        seconds=1.0,
        stuck=False,
    )
    set_on = []
    monkeypatch.setattr(check.RankStore, "connect", lambda *_, **__: SimpleNamespace(rank=5, world_size=8))
    monkeypatch.setattr(check.preflight, "run", lambda *_, **__: result)
    monkeypatch.setattr(check, "_print_errors", lambda report, store: report)
    monkeypatch.setattr(torch.cuda, "set_device", set_on.append)
    device = torch.device("cuda", 5)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    request = check.CheckRequest(deadline_s=60, short=True)
    check._check_ranks(request, 0.0, {"RANK": "5", "MASTER_ADDR": "localhost"}, device, [])
    assert set_on == ([device] if is_healthy else [])
