"""`hfscale plan --calibrate`: the measurements, the file that it writes, and plans that use the file."""

import json
import tomllib
from dataclasses import replace

import pytest
import torch
from conftest import REPOSITORY

from hfscale.check import calibrate
from hfscale.cli import main
from hfscale.core import distributed
from hfscale.errors import StorageError
from hfscale.facts.hardware import accelerator
from hfscale.facts.own_hardware import find_accelerator, read_hardware_file
from hfscale.facts.prices import all_prices, prices_of
from hfscale.planner.frameworks import shared_constants
from hfscale.planner.network import Group, Network

SMALL = calibrate.Sizes(matrices=(64, 128), copy_bytes=2**20, messages=(4096, 65536))
PLAN = ["plan", "gpt2", "--gpus", "2", "--seq-len", "512", "--global-batch", "8", "--precision", "fp32", "--json"]
ROW = {"name": "mine", "memory_gib": 80, "memory_tb_s": 2.0, "bf16_tflops": 300.0, "source": "a test", "date": "2026"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home folder without a hardware file, and short measurements."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(calibrate, "ON_CPU", SMALL)
    monkeypatch.setattr(calibrate, "SECONDS", 0.01)
    return tmp_path / "home" / "hfscale" / "hardware.toml"


def run(capsys, *argv, code=0):
    assert main(list(map(str, argv))) == code
    return capsys.readouterr()


def table(path, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {key: value for key, value in (ROW | changes).items() if value is not None}
    path.write_text("[[accelerator]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items()))
    return path


class TestOnThisMachine:
    def test_plans_find_the_default_file_by_the_name_in_it(self, capsys, home):
        out = run(capsys, "plan", "--calibrate").out
        assert f"Written: {home}; plan with it: hfscale plan MODEL --gpu local-cpu --gpus N --precision fp32" in out
        assert "accelerate launch -m hfscale plan --calibrate" in out
        (row,) = read_hardware_file(home)
        assert 0 < row.achieved_fp32_tflops < 100
        assert 0 < row.achieved_memory_tb_s < 10
        assert row.achieved_link_gb_s is None
        assert row.memory_gib > 0.5
        found = json.loads(run(capsys, *PLAN, "--gpu", "LOCAL CPU").out)
        assert found["hardware"]["gpu"] == "local-cpu"

    def test_the_file_can_be_named(self, capsys, tmp_path):
        path = tmp_path / "deep" / "mine.toml"
        found = json.loads(run(capsys, "plan", "--calibrate", path, "--json").out)
        assert found["file"] == str(path)
        assert {row["kind"] for row in found["measurements"]} == {"matmul", "copy"}
        assert {row["n"] for row in found["measurements"] if row["kind"] == "matmul"} == {64, 128}
        assert len(tomllib.loads(path.read_text())["measurement"]) == len(found["measurements"])
        run(capsys, *PLAN, "--gpu", "local-cpu", "--hardware", path)
        argv = ["estimate", "gpt2", "--gpu", "local-cpu", "--precision", "fp32", "--seq-len", "512"]
        run(capsys, *argv, "--hardware", path)
        assert "local-cpu" in run(capsys, *PLAN, "--gpu", "nothing", "--hardware", path, code=2).err

    def test_rates_are_work_over_time(self):
        found = calibrate.calibrate()
        assert found.processes == 1
        for row in found.measurements:
            if row["kind"] == "matmul":
                assert row["tflops"] * 1e12 * row["seconds"] == pytest.approx(2 * row["n"] ** 3)
            else:
                assert row["gb_s"] * 1e9 * row["seconds"] == pytest.approx(2 * row["bytes"])

    @pytest.mark.world(2)
    @pytest.mark.long
    def test_two_processes_measure_the_collectives(self, launch, tmp_path, capsys):
        path = tmp_path / "two.toml"
        done = launch(2, "-m", "hfscale", "plan", "--calibrate", path)
        assert done.code == 0, done.err[-4000:]
        assert done.out.count("Written:") == 1
        measured = tomllib.loads(path.read_text())["measurement"]
        assert {"all_reduce", "all_gather", "reduce_scatter"} < {row["kind"] for row in measured}
        (row,) = read_hardware_file(path)
        assert 0 < row.achieved_link_gb_s < 1000
        assert 0 < row.hop_us < 1e6
        assumed = json.loads(run(capsys, *PLAN, "--gpu", "local-cpu", "--hardware", path).out)["assumptions"]
        assert any(f"{row.achieved_link_gb_s:g} GB/s measured inside" in line for line in assumed)


class TestHardwareFile:
    def test_other_rows_stay_and_a_single_process_keeps_the_collectives(self, tmp_path):
        path = table(tmp_path / "h.toml")
        found = calibrate.calibrate()
        linked = replace(found, gpu=replace(found.gpu, achieved_link_gb_s=3.0, hop_us=7.0), processes=2)
        calibrate.write(linked, path)
        calibrate.write(replace(found, gpu=replace(found.gpu, achieved_memory_tb_s=0.5)), path)
        assert [row.name for row in read_hardware_file(path)] == ["mine", "local-cpu"]
        row = find_accelerator("local-cpu", path)
        assert (row.achieved_link_gb_s, row.hop_us, row.achieved_memory_tb_s) == (3.0, 7.0, 0.5)
        assert len(tomllib.loads(path.read_text())["measurement"]) == len(found.measurements)
        calibrate.write(replace(linked, gpu=found.gpu), path)  # several processes measured: no rate is kept
        assert find_accelerator("local-cpu", path).achieved_link_gb_s is None

    def test_a_folder_that_cannot_be_created_is_a_storage_error(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match=r"h\.toml"):
            calibrate.write(calibrate.calibrate(), tmp_path / "file" / "h.toml")

    def test_the_users_row_takes_precedence_over_the_shipped_one(self, home):
        table(home, name="H100-80GB", aliases=["our node"])
        assert find_accelerator("our node").memory_gib == 80
        assert find_accelerator("h100-80gb").source == "a test"
        assert find_accelerator("A100-80GB") == accelerator("A100-80GB")

    @pytest.mark.parametrize(
        ("changes", "part"),
        [
            ({"speed": 3}, "unknown key 'speed'"),
            ({"memory_gib": None}, "has no memory_gib"),
            ({"memory_tb_s": -1.0}, "memory_tb_s is -1.0: it must be a number above 0"),
            ({"bf16_tflops": "fast"}, "bf16_tflops is 'fast': it must be a number above 0"),
            ({"name": ""}, "name is '': it must be text"),
            ({"aliases": "a"}, "aliases is 'a': it must be a list of texts"),
        ],
    )
    def test_a_bad_row_is_one_line(self, capsys, home, changes, part):
        found = run(capsys, *PLAN, "--gpu", "mine", "--hardware", table(home, **changes), code=2)
        assert part in found.err
        assert f"{home}, accelerator 1" in found.err
        assert len(found.err.splitlines()) == 1

    @pytest.mark.parametrize("content", [b"[[accel", b"\xff\xfe", b"accelerator = 3", b"accelerator = [3]"])
    def test_another_file_is_a_usage_error_and_is_not_overwritten(self, capsys, home, content):
        home.parent.mkdir(parents=True)
        home.write_bytes(content)
        for argv in ([*PLAN, "--gpu", "H100"], ["plan", "--calibrate"]):
            found = run(capsys, *argv, code=2)
            assert str(home) in found.err
            assert len(found.err.splitlines()) == 1
        assert home.read_bytes() == content

    @pytest.mark.parametrize(
        ("argv", "part"),
        [
            ([*PLAN, "--gpu", "H100", "--hardware", "/nowhere.toml"], "/nowhere.toml cannot be read"),
            (["plan", "--calibrate", "llama-3.1-8b"], "the file is llama-3.1-8b"),
            (["plan", "--calibrate", "--gpu", "H100"], "leave out --gpu"),
            (["plan", "gpt2", "--gpu", "H100"], "--gpus"),
        ],
    )
    def test_wrong_usage(self, capsys, argv, part):
        found = run(capsys, *argv, code=2)
        assert part in found.err
        assert len(found.err.splitlines()) == 1


class TestPlansWithACalibration:
    def test_measured_rates_are_used_without_change(self):
        gpu = replace(accelerator("H100-80GB"), achieved_link_gb_s=200.0, achieved_network_gb_s=20.0, hop_us=5.0)
        network = Network.of(gpu, node_size=8, network_gb_s=None, shared=shared_constants())
        assert network.bandwidth(Group(size=8)) == 200e9
        assert network.bandwidth(Group(size=16)) == 8 * 20e9
        assert network.latency(Group(size=8)) == pytest.approx(7 * 5e-6)
        given = Network.of(gpu, node_size=8, network_gb_s=10.0, shared=shared_constants())
        assert given.bandwidth(Group(size=16)) == pytest.approx(8 * 10e9 * shared_constants().network_rate)

    def test_a_faster_machine_has_a_shorter_step(self, capsys, home):
        table(home, fp32_tflops=1.0, achieved_fp32_tflops=1.0, achieved_memory_tb_s=0.1)
        (slow, *_) = json.loads(run(capsys, *PLAN, "--gpu", "mine").out)["choices"]
        table(home, fp32_tflops=1.0, achieved_fp32_tflops=2.0, achieved_memory_tb_s=0.2)
        (fast, *_) = json.loads(run(capsys, *PLAN, "--gpu", "mine").out)["choices"]
        # Attention scales with the peak, kernel launches with the host.
        assert 0.45 < fast["time_s"]["compute"] / slow["time_s"]["compute"] < 0.65

    def test_a_known_gpu_keeps_its_datasheet_and_its_prices(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(calibrate, "_memory_gib", lambda device: 79.1)
        found = [
            {"kind": "matmul", "dtype": "bf16", "tflops": 700.0},
            {"kind": "matmul", "dtype": "bf16", "tflops": 650.0},
            {"kind": "copy", "gb_s": 2900.0},
            {"kind": "host", "gb_s": 50.0},
        ]
        row = calibrate._accelerator(torch.device("cuda", 0), found)
        known = accelerator("H100-80GB")
        assert (row.name, row.base, row.bf16_tflops) == ("local-H100-80GB", "H100-80GB", known.bf16_tflops)
        assert (row.achieved_bf16_tflops, row.achieved_memory_tb_s) == (700.0, 2.9)
        assert prices_of(row, all_prices()) == prices_of(known, all_prices())

    def test_links_inside_a_node_and_between_nodes_are_separated(self, monkeypatch):
        """Two nodes with four ranks each: the network's ring has both latencies; four ranks share its cards."""
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        monkeypatch.setattr(distributed, "world_size", lambda: 8)
        found = [
            {"where": where, "kind": kind, "bytes": size, "passes": passes, "seconds": passes * seconds, "gb_s": rate}
            for where, times in (("node", (30e-6, 1e-3)), ("network", (100e-6, 1e-2)))
            for size, seconds, rate in ((64, times[0], 0.001), (2**20, times[1], 200.0 if where == "node" else 80.0))
            for kind, passes in (("all_reduce", 2), ("all_gather", 1))
        ]
        links = calibrate._links(found)
        assert links == pytest.approx(
            {"achieved_link_gb_s": 200.0, "hop_us": 10.0, "achieved_network_gb_s": 20.0, "network_hop_us": 30.0}
        )


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "ON_GPU", SMALL)
    found = calibrate.calibrate()
    assert {row["kind"] for row in found.measurements} == {"matmul", "copy", "host"}
    assert find_accelerator(calibrate.write(found, tmp_path / "h.toml").name, tmp_path / "h.toml").memory_gib > 1


def test_the_documentation_names_the_default_file():
    assert "~/.config/hfscale/hardware.toml" in (REPOSITORY / "docs" / "planner_measure.md").read_text(
        encoding="utf-8"
    )
