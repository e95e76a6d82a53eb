"""The checks of a node: each rule with a case that is wrong and one that is right."""

import os
import socket
from dataclasses import replace

import pytest
import yaml
from conftest import REPOSITORY

from hfscale.check.check import largest_checkpoint_bytes
from hfscale.errors import StorageError, UsageError
from hfscale.health import node
from hfscale.health.node import RENAMED_VARIABLES, Node, check_node

NODE = Node(
    host="node-a",
    address="10.0.0.5",
    interfaces={"lo": True, "eth0": True, "eth1": False, "ib0": True},
    ib_devices=("mlx5_0", "mlx5_1"),
    gpus=("NVIDIA H100 80GB HBM3",) * 8,
    cores=96,
    memory_gib=1000.0,
    shm_gib=64.0,
    limits={"nofile": 65536.0, "memlock": float("inf"), "nproc": float("inf")},
)
TWO_NODES = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1"}


def findings(environ, node=NODE):
    return [(finding.level, finding.message) for finding in check_node(TWO_NODES | environ, node)]


def test_a_correct_node_has_no_findings():
    right = {"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "8"}
    assert findings({}) == []
    assert findings(right) == []
    assert findings({"NCCL_SOCKET_IFNAME": "^lo,docker"}) == []


def test_a_lock_left_by_a_killed_build_is_reported():
    ((level, message),) = findings({}, replace(NODE, build_locks=("/x/lock",)))
    assert level == "warning"
    assert "/x/lock" in message
    assert "delete it" in message


@pytest.mark.parametrize(
    ("environ", "level", "part"),
    [
        ({"NCCL_SOCKET_IFNAME": "ens5"}, "error", "names no interface of this node (it has eth0, eth1, ib0, lo)"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "error", "names no interface"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "error", "names no interface"),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "error", "is down"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "error", "loopback interface, and there are 2 nodes"),
        ({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}, "warning", "different networks"),
        ({"NCCL_IB_DISABLE": "1"}, "warning", "mlx5_0, mlx5_1 active"),
        ({"NCCL_IB_HCA": "mlx4"}, "error", "names no active device"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning", "NCCL_P2P_DISABLE=1 with 8 GPUs"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warning", "TORCH_NCCL_ASYNC_ERROR_HANDLING=0"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "warning", "both set"),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, "warning", "Flight Recorder off"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warning", "slows every step"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "warning", "slows every step"),
        ({"NCCL_ALGO": "Ring"}, "note", "NCCL_ALGO=Ring"),
        ({"NCCL_BLOCKING_WAIT": "1"}, "note", "is called TORCH_NCCL_BLOCKING_WAIT now"),
        ({"NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_DESYNC_DEBUG": "0"}, "warning", "contradict each other"),
        ({"MASTER_ADDR": "localhost"}, "error", "on 2 nodes"),
        ({"RANK": "16"}, "error", "is not below WORLD_SIZE=16"),
        ({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true"}, "error", "unset one"),
        ({"ACCELERATE_USE_CPU": "true"}, "warning", "stay idle"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,1"}, "error", "names a GPU twice"),
        ({"LOCAL_WORLD_SIZE": "16"}, "error", "16 processes on this node and 8 GPUs"),
        (
            {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"},
            "warning",
            "2 processes on this node and 8 GPUs: 6 of them stay idle; give accelerate launch --num_processes 16",
        ),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2"}, "warning", "and 3 GPUs"),
        ({"OMP_NUM_THREADS": "32"}, "warning", "set at most 12"),
    ],
)
def test_a_wrong_variable_is_found(environ, level, part):
    ((found_level, message),) = findings(environ)
    assert (found_level, part in message) == (level, True), message


@pytest.mark.parametrize(
    ("change", "level", "part"),
    [
        ({"limits": {"nofile": 1024.0}}, "warning", "ulimit -n is 1024"),
        ({"limits": {"memlock": 65536.0}}, "warning", "ulimit -l is 0.0625 MiB"),
        ({"limits": {"nproc": 512.0}}, "warning", "ulimit -u is 512"),
        ({"shm_gib": 0.0625}, "error", "is 64 MiB"),
        ({"shm_gib": 4.0}, "warning", "4.0 GiB for 8 processes"),
        ({"cores": 12}, "warning", "12 CPU cores for 8 processes"),
        ({"memory_gib": 64.0}, "warning", "64 GiB of RAM for 8 processes"),
        ({"ib_devices": ()}, "warning", "NCCL uses TCP between the nodes"),
    ],
)
def test_a_limit_that_is_too_low_is_found(change, level, part):
    ((found_level, message),) = findings({}, replace(NODE, **change))
    assert (found_level, part in message) == (level, True), message


def test_what_is_right_on_other_machines_is_not_reported():
    cpu = replace(NODE, gpus=(), ib_devices=(), cores=2, memory_gib=8.0, limits={"memlock": 65536.0})
    assert findings({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, cpu) == []
    geforce = replace(NODE, gpus=("NVIDIA GeForce RTX 4090",) * 8)
    assert findings({"NCCL_P2P_DISABLE": "1"}, geforce) == []
    assert findings({"WORLD_SIZE": "8", "NCCL_IB_DISABLE": "1"}) == []
    assert findings({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}) == []


def test_what_concerns_several_nodes_is_not_reported_on_one():
    small = replace(NODE, limits={"memlock": 65536.0})
    assert findings({"WORLD_SIZE": "8"}, small) == []
    assert findings({"WORLD_SIZE": "8"}, replace(NODE, ib_devices=())) == []


def test_a_network_without_rdma_devices_is_right_with_libfabric_and_for_other_gpus():
    without = replace(NODE, ib_devices=())
    assert findings({"FI_PROVIDER": "efa"}, without) == []
    assert findings({}, replace(without, gpus=("NVIDIA L4",) * 8)) == []


@pytest.mark.parametrize(
    "strategy", ["fsdp2_offload", "zero2_offload", "zero3_offload", "zero3_nvme", "fsdp2", "zero3"]
)
def test_an_optimizer_on_the_cpu_with_one_thread_is_a_note(strategy):
    """In the environment that Accelerate's launcher makes of the shipped config."""
    config = yaml.safe_load((REPOSITORY / "accelerate_configs" / f"{strategy}.yaml").read_text())
    if strategy.startswith("fsdp"):
        offloads = str(config["fsdp_config"].get("fsdp_offload_params", False)).lower()
        environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": offloads}
    else:
        path = str(REPOSITORY / config["deepspeed_config"]["deepspeed_config_file"])
        environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": path}
    found = findings(environ | {"OMP_NUM_THREADS": "1"})
    assert len(found) == (strategy not in ("fsdp2", "zero3"))
    for level, message in found:
        assert level == "note"
        assert "export OMP_NUM_THREADS=12 before" in message
    assert findings(environ | {"OMP_NUM_THREADS": "12"}) == []


def test_a_variable_that_is_not_a_number_is_a_usage_error():
    with pytest.raises(UsageError, match="WORLD_SIZE=two"):
        check_node({"WORLD_SIZE": "two"}, NODE)


def test_this_machine_is_read():
    here = Node.here(["a"])
    assert here.interfaces["lo"]
    assert 0 < here.cores <= os.cpu_count()
    assert here.memory_gib > 0.5
    assert here.shm_gib > 0
    assert here.gpus == ("a",)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1"])
def test_a_host_name_that_gloo_resolves_to_loopback_is_found(address):
    here = replace(NODE, address=address)
    ((level, message),) = findings({}, here)
    assert level == "error"
    assert f"node-a, which is {address} here" in message
    assert "set GLOO_SOCKET_IFNAME" in message
    assert "(up here: eth0, ib0)" in message
    assert findings({"GLOO_SOCKET_IFNAME": "eth0"}, here) == []
    assert findings({"WORLD_SIZE": "8"}, here) == []


def test_the_address_of_this_machine_is_resolved_by_its_name():
    def fails(name):
        raise OSError

    names = []
    assert Node.here(resolve=lambda name: names.append(name) or "10.0.0.9").address == "10.0.0.9"
    assert names == [socket.gethostname()]
    assert Node.here(resolve=fails).address == "127.0.0.1"


def test_no_new_name_is_also_an_old_one():
    assert not set(RENAMED_VARIABLES) & set(RENAMED_VARIABLES.values())


class TestDisk:
    def test_space_for_two_checkpoints_and_the_time_of_a_save(self, tmp_path):
        def check(size, speed):
            found = node.check_disk(tmp_path, checkpoint_bytes=size, bytes_per_s=speed, notice_s=30.0, host="h")
            return [(finding.level, finding.message) for finding in found]

        free = node.free_bytes(tmp_path / "not" / "there")
        assert check(1000, 1e9) == []
        ((level, message),) = check(int(free * 0.6), 1e15)
        assert level == "error"
        assert "two checkpoints" in message
        ((level, message),) = check(2**20, 2**20 / 48)
        assert level == "warning"
        assert "48 s" in message
        assert "30 s" in message
        ((level, message),) = check(None, 1e9)
        assert level == "note"

    def test_speed_is_measured_without_leaving_files(self, tmp_path):
        assert 1e6 < node.write_speed(tmp_path / "new", 2**22) < 1e12
        assert list((tmp_path / "new").iterdir()) == []
        (tmp_path / "file").touch()
        with pytest.raises(StorageError, match="file"):
            node.write_speed(tmp_path / "file")

    def test_the_largest_checkpoint(self, tmp_path):
        assert largest_checkpoint_bytes(tmp_path) is None
        for step, size in ((1, 10), (2, 30), (3, 20)):
            (tmp_path / f"checkpoint-{step}" / "deep").mkdir(parents=True)
            (tmp_path / f"checkpoint-{step}" / "deep" / "a").write_bytes(b"x" * size)
        assert largest_checkpoint_bytes(tmp_path) == 30
