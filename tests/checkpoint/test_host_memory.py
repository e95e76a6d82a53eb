"""The memory that a process can allocate, below the limits of control groups of both versions."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY

from hfscale.checkpoint import contents as snapshots
from hfscale.core.host_memory import available_bytes

GIB = 2**30
V1_MOUNT = "35 31 0:32 {visible} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "30 23 0:26 {visible} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER_MOUNTS = (
    "23 1 0:21 / /proc rw,nosuid - proc proc rw\n33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
)


def make_root(folder, mount, membership, groups):
    """Write what the kernel shows: `groups` are the files of each group by its path below the mount."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/mountinfo").write_text(OTHER_MOUNTS + mount)
    (folder / "proc/self/cgroup").write_text(membership)
    for group, files in groups.items():
        for name, content in files.items():
            (folder / "sys/fs/cgroup" / group).mkdir(parents=True, exist_ok=True)
            (folder / "sys/fs/cgroup" / group / name).write_text(f"{content}\n")
    return folder


def v1(limit, used, cache=0):
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": f"cache 9\ntotal_inactive_file {cache}\ntotal_active_file 5",
    }


def v2(limit, used, cache=0):
    return {
        "memory.max": limit,
        "memory.current": used,
        "memory.stat": f"anon 9\ninactive_file {cache}\nactive_file 5",
    }


@pytest.mark.parametrize(
    ("mount", "membership", "groups", "expected"),
    [
        (V1_MOUNT.format(visible="/"), "4:memory:/job\n0::/\n", {"memory/job": v1(3000, 1000)}, 2000),
        # A container that sees only its own group, and one whose parent has the tighter limit.
        (V1_MOUNT.format(visible="/docker/a"), "4:memory:/docker/a\n", {"memory": v1(3000, 1000, 400)}, 2400),
        (
            V1_MOUNT.format(visible="/"),
            "4:cpu,memory:/pod/job\n",
            {"memory/pod/job": v1(2**63 - 4096, 1000), "memory/pod": v1(5000, 4500)},
            500,
        ),
        (V2_MOUNT.format(visible="/"), "0::/\n", {".": v2(3000, 1000, 400)}, 2400),
        (
            V2_MOUNT.format(visible="/"),
            "0::/pod/job\n",
            {"pod/job": v2("max", 1000), "pod": v2(5000, 6000)},
            0,
        ),
    ],
)
def test_the_tightest_limit_counts(tmp_path, mount, membership, groups, expected):
    assert available_bytes(make_root(tmp_path, mount, membership, groups)) == expected


@pytest.mark.parametrize("groups", [{"pod": v2("max", 1000)}, {"pod": v2(2**60, 1000)}, {}])
def test_without_a_limit_it_is_the_free_memory_of_the_host(tmp_path, groups):
    root = make_root(tmp_path, V2_MOUNT.format(visible="/"), "0::/pod\n", groups)
    assert available_bytes(root) == pytest.approx(psutil.virtual_memory().available, abs=GIB)
    assert available_bytes(tmp_path / "no such folder") == pytest.approx(psutil.virtual_memory().available, abs=GIB)


@pytest.mark.parametrize(("copies", "fits"), [(1, True), (2, True), (3, False)])
def test_the_copies_of_all_processes_of_a_host_must_fit(monkeypatch, copies, fits):
    monkeypatch.setattr(snapshots, "available_bytes", lambda: 1000)
    size = int(1000 * snapshots.SHARE_OF_FREE_MEMORY) // 2
    assert snapshots.fits_in_host_memory(size, copies=copies) == fits


@pytest.fixture
def limited_group():
    """A memory control group with a limit of 2.3 GiB; skipped where this user may not make one."""
    is_v2 = Path("/sys/fs/cgroup/memory.stat").exists() or Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup") / ("" if is_v2 else "memory") / f"hfscale-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(int(2.3 * GIB)))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a memory limit can be made: {error}")
    yield group
    group.rmdir()


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_save_waits_where_a_copy_would_exceed_the_limit_of_the_container(limited_group, tmp_path):
    """75 million parameters: 1.2 GB for training, and 0.9 GB more for a copy of the state."""
    program = f"""
import os, sys
from pathlib import Path
Path({str(limited_group / "cgroup.procs")!r}).write_text(str(os.getpid()))
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
from tiny import tiny_model, tiny_trainer
from hfscale import SpotCheckpointCallback
sizes = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=8)
model = tiny_model(**sizes, num_attention_heads=8, num_key_value_heads=8)
arguments = dict(per_device_train_batch_size=1, max_steps=4, save_strategy="steps", save_steps=2)
tiny_trainer("out", SpotCheckpointCallback(cloud=None), model=model, **arguments).train()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert "training waits for each save: a copy of its state does not fit" in done.stderr
    assert (tmp_path / "out" / "checkpoint-4").is_dir()
