"""What only a CUDA GPU can show: `make test-gpu`.

Trainings in the test process use one GPU, also on a machine with several. A test that needs two GPUs, or a package
that is not there, is skipped with that reason.
"""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import RECIPE, REPOSITORY, agent_launch, needs, visible_gpus
from tiny import StopAt, logged, tiny_model, tiny_tokenizer, tiny_trainer

from hfscale import SampleGenerationCallback, SpotCheckpointCallback
from hfscale.checkpoint.host_copy import HostCopy
from hfscale.checkpoint.rng_states import write_rng_states
from hfscale.checkpoint.store import verify
from hfscale.core.clocks import clock_of
from hfscale.facts.own_hardware import read_hardware_file
from hfscale.health import gpu
from hfscale.islands.parameters import PartOfParameters
from hfscale.metrics.meters.noise_scale import LeafProbe
from hfscale.metrics.profiler import ProfilerCallback

pytestmark = pytest.mark.gpu


@needs("recipes")
def test_the_recipe_trains_in_bf16_and_knows_the_gpu(python, tmp_path):
    done = python(
        RECIPE,
        "--max_steps",
        "20",
        "--logging_steps",
        "10",
        "--block_size",
        "1024",
        "--output_dir",
        "out",
        "--per_device_train_batch_size",
        "8",
        "--max_eval_samples",
        "8",
        env={"CUDA_VISIBLE_DEVICES": visible_gpus()[0]},
    )
    assert done.code == 0, done.err[-4000:]
    record = json.loads((tmp_path / "out" / "scaling.jsonl").read_text().splitlines()[-1])
    assert 0 < record["scaling/mfu"] < 1
    assert 0 < record["gpu/memory_peak_gib"] < torch.cuda.get_device_properties(0).total_memory / 2**30
    assert done.lines("hfscale: strategy") == ["hfscale: strategy single on 1 process (cuda)"]


@pytest.fixture
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, and torch sees one")


def in_new_process(folder, program, **env):
    """Run Python code in a process of its own and return what it prints, as JSON."""
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY / 'tests')!r})\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_host_copy_waits_for_the_work_before_it_and_not_for_that_after_it():
    value = torch.zeros(3 * 2**20, device="cuda")
    torch.cuda._sleep(100_000_000)  # tens of milliseconds, queued before the assignment
    value.fill_(1)
    copied = HostCopy().take([value])[0]
    value.fill_(2)
    assert copied.is_pinned()
    assert copied.eq(1).all()


def test_pinned_buffers_take_what_is_counted_and_are_used_again():
    """12 and 3 MiB, which share a block of 16: CUDA's allocator would round the first up to 16 by itself."""
    values = [torch.full((size * 2**18,), float(size), device="cuda") for size in (12, 3)]
    host_copy = HostCopy()
    assert host_copy.bytes_to_allocate(values) == 2**24
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    copies = host_copy.take(values)
    assert torch.cuda.host_memory_stats()["active_bytes.current"] - before == 2**24
    assert all(copy.is_pinned() and copy.eq(size).all() for copy, size in zip(copies, (12, 3), strict=True))
    pointers = [copy.data_ptr() for copy in copies]
    clones = [value.clone() for value in values]
    assert host_copy.bytes_to_allocate(clones) == 0
    assert [copy.data_ptr() for copy in host_copy.take(clones)] == pointers


def test_the_clock_measures_the_device_and_not_the_host():
    clock = clock_of(torch.device("cuda"))
    start = clock.now()
    torch.cuda._sleep(200_000_000)
    end = clock.now()
    assert not clock.has_passed(end)
    clock.wait_for(end)
    assert clock.has_passed(end)
    assert 0.02 < clock.seconds(start, end) < 2


@needs("ParallelTrainer")
def test_two_passes_that_take_turns_use_one_stream():
    """The backward pass runs in a thread of its own, and its gradient is that of the same pass alone."""
    from hfscale.parallel.overlap import Turns

    device = torch.device("cuda", torch.cuda.device_count() - 1)
    streams = []
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
        weight = torch.ones(64, 64, device=device, requires_grad=True)
        product = (weight @ weight).sum()

        def backward():
            streams.append(torch.cuda.current_stream())
            product.backward()

        result = Turns().run(lambda: weight.detach() @ weight.detach(), backward, device)
        assert streams == [torch.cuda.current_stream()]
    torch.cuda.synchronize(device)
    assert (result == 64).all()
    assert (weight.grad == 128).all()


def test_a_resumed_run_continues_the_random_numbers_of_the_gpu(tmp_path):
    """Attention kernels add in any order, so that losses are equal to rounding; other dropout gives 1e-2."""

    def train(folder, *, resume=None, stop_at=-1):
        options = {"use_cpu": False, "max_steps": 8, "save_strategy": "steps", "save_steps": 100}
        callbacks = [SpotCheckpointCallback(), StopAt(stop_at)]
        trainer = tiny_trainer(folder, *callbacks, model=tiny_model(attention_dropout=0.3), **options)
        trainer.train(resume_from_checkpoint=resume)
        return logged(trainer, "loss")

    expected = train(tmp_path / "plain")
    train(tmp_path / "cut", stop_at=3)
    assert train(tmp_path / "cut", resume=str(tmp_path / "cut" / "checkpoint-3")) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_converted_random_states_are_restored_as_trainer_does_it(tmp_path, ranks):
    torch.cuda.manual_seed(5)
    torch.rand(10, device="cuda")
    own = torch.cuda.get_rng_state()
    spot = SpotCheckpointCallback()
    trainer = tiny_trainer(tmp_path / "run", spot, use_cpu=False, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    source = tmp_path / "run" / "checkpoint-2"
    known = torch.load(source / "rng_state.pth", weights_only=False)
    torch.save(known | {"cuda": own}, source / "rng_state.pth")
    write_rng_states(source, tmp_path, world_size=ranks)
    for rank in range(ranks):
        torch.cuda.manual_seed_all(6)
        if ranks == 1:
            torch.cuda.random.set_rng_state(torch.load(tmp_path / "rng_state.pth", weights_only=False)["cuda"])
        else:
            found = torch.load(tmp_path / f"rng_state_{rank}.pth", weights_only=False)["cuda"]
            torch.cuda.random.set_rng_state_all(found)
        assert torch.equal(torch.cuda.get_rng_state(), own) == (rank == 0)


def test_samples_during_training_leave_the_random_numbers_of_the_gpu(tmp_path):
    states = []
    for callbacks in ([], [SampleGenerationCallback(["w3 w4"], every_steps=2, max_new_tokens=5, temperature=1.0)]):
        options = {"use_cpu": False, "model": tiny_model(attention_dropout=0.3), "tokenizer": tiny_tokenizer()}
        tiny_trainer(tmp_path / str(len(callbacks)), *callbacks, **options).train()
        states.append(torch.cuda.get_rng_state())
    assert torch.equal(*states)


@needs("GPU telemetry")
def test_the_sensor_is_that_of_the_visible_gpu(tmp_path):
    """NVML counts all GPUs of the machine, torch those of CUDA_VISIBLE_DEVICES."""
    program = (
        "import json, torch; from cuda_driver import pci_address; from hfscale.health import gpu\n"
        "reading = gpu.sensor_of(torch.device('cuda', 0)).read()\n"
        "print(json.dumps([reading.bus, pci_address(0), reading.temperature_c, reading.power_w]))"
    )
    for name in visible_gpus():
        bus, address, temperature_c, power_w = in_new_process(tmp_path, program, CUDA_VISIBLE_DEVICES=name)
        assert gpu._same_bus(address, bus)
        assert 10 < temperature_c < 110
        assert power_w > 1


def test_norms_of_gradients_are_read_after_the_backward_that_computes_them():
    layer = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
    probe = LeafProbe(layer)
    probe.open()
    torch.cuda._sleep(100_000_000)
    layer(torch.ones(1, 4096, device="cuda")).sum().backward()
    probe.close()
    assert probe.read(1) == (pytest.approx(4096 * 4096), 1)


def test_a_profile_has_the_kernels_of_the_step(tmp_path):
    tiny_trainer(tmp_path, ProfilerCallback([2]), use_cpu=False).train()
    events = json.loads((tmp_path / "profile" / "step-2.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


def test_parameters_of_an_island_are_copied_to_the_host_and_back(tmp_path):
    trainer = tiny_trainer(tmp_path, use_cpu=False, max_steps=1)
    trainer.train()
    parameters = PartOfParameters(trainer)
    torch.cuda._sleep(100_000_000)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(3)
    values = parameters.read()
    assert values.device.type == "cpu"
    assert values.eq(3).all()
    parameters.write(values + 1)
    assert all(parameter.eq(4).all() for parameter in trainer.model.parameters())


def test_a_forked_process_can_use_the_gpu_after_the_imports_of_a_standby_launcher(tmp_path):
    program = (
        "import hfscale, transformers, accelerate, torch, os, json; torch.cuda.is_available()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(int(torch.ones(1, device='cuda').item()))\n"
        "print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))"
    )
    assert in_new_process(tmp_path, program, PYTORCH_NVML_BASED_CUDA_CHECK="1") == 1


def test_the_machine_can_be_calibrated(tmp_path):
    path = tmp_path / "hardware.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu"]
    command += ["-m", "hfscale", "plan", "--calibrate", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (row,) = read_hardware_file(path)
    assert row.achieved_memory_tb_s > 0.05
    assert (row.achieved_link_gb_s is not None) == (torch.cuda.device_count() > 1)


def test_the_doctor_finds_every_gpu(tmp_path):
    command = [sys.executable, "-m", "hfscale", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert len(json.loads(done.stdout)["torch"]["gpus"]) == torch.cuda.device_count()


def test_the_check_of_a_machine_passes_on_every_gpu(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu"]
    done = subprocess.run(
        [*command, "-m", "hfscale", "check"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@needs("recipes")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_each_rank_opens_a_context_on_its_own_gpu_only(two_gpus, strategy, tmp_path):
    """And the ranks destroy their NCCL and gloo groups without an abort: the exit code is 0."""
    script = REPOSITORY / "tests" / "workers" / "gpu_contexts.py"
    config = REPOSITORY / "accelerate_configs" / f"{strategy}.yaml"
    done = agent_launch(tmp_path, config, 2, script)
    assert done.code == 0, done.err[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found == {"groups": True, "contexts": [rank], "own": rank, "synchronous_because": None}


@needs("recipes")
@needs("ParallelTrainer")
def test_tensor_and_pipeline_parallel_training_on_two_gpus(two_gpus, tmp_path):
    script, config = REPOSITORY / "recipes" / "tp_pp" / "train.py", REPOSITORY / "accelerate_configs" / "tp_pp.yaml"
    flags = ["--max_steps", "4", "--save_steps", "2", "--block_size", "128", "--output_dir", "out"]
    flags += ["--gradient_accumulation_steps", "4"]
    for name in ("tp_size", "pp_size"):
        done = agent_launch(tmp_path, config, 2, script, *flags, f"--{name}", "2", "--resume_from_checkpoint", "false")
        assert done.code == 0, done.err[-4000:]
        verify(tmp_path / "out" / "checkpoint-4")


@needs("recipes")
def test_communication_and_noise_are_measured_with_nccl(two_gpus, tmp_path):
    worker = REPOSITORY / "tests" / "workers" / "exchange.py"
    done = agent_launch(tmp_path, REPOSITORY / "accelerate_configs" / "ddp.yaml", 2, worker, "cuda")
    assert done.code == 0, done.err[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for strategy in ("ddp", "fsdp2"):
        assert 0 < found[strategy]["comm_fraction"] <= 1, found
        assert found[strategy]["noise_scale"] == pytest.approx(found["known_noise_scale"], rel=0.1), found


@needs("recipes")
@pytest.mark.parametrize("method", ["fp16", "powersgd", "topk", "onebit_adam", "onebit_lamb"])
def test_gradients_are_compressed_with_nccl(two_gpus, tmp_path, method):
    flags = ["--max_steps", "6", "--logging_steps", "1", "--block_size", "128", "--output_dir", "out"]
    flags += ["--gradient_compression", method, "--compression_start_step", "2"]
    done = agent_launch(tmp_path, REPOSITORY / "accelerate_configs" / "ddp.yaml", 2, RECIPE, *flags)
    assert done.code == 0, done.err[-4000:]
    lines = (tmp_path / "out" / "scaling.jsonl").read_text().splitlines()
    assert all(math.isfinite(json.loads(line)["loss"]) for line in lines)


@needs("recipes")
@needs("DeepSpeed")
def test_a_run_continues_under_other_strategies(two_gpus, tmp_path):
    for number, strategy in enumerate(("fsdp2", "zero3", "zero2", "ddp"), start=1):
        config = REPOSITORY / "accelerate_configs" / f"{strategy}.yaml"
        tier = "ddp" if strategy == "ddp" else "sharded"
        flags = ["--max_steps", str(2 * number), "--save_steps", "2", "--block_size", "128", "--output_dir", "out"]
        done = agent_launch(tmp_path, config, 2, REPOSITORY / "recipes" / tier / "train.py", *flags)
        assert done.code == 0, done.err[-4000:]
        assert "Didn't manage to set back the RNG states" not in done.err
        assert verify(tmp_path / "out" / f"checkpoint-{2 * number}").strategy == strategy


@pytest.mark.parametrize(("number", "says"), [("SIGKILL", "has died"), ("SIGSTOP", "does not answer")])
def test_ranks_that_wait_in_nccl_for_a_dead_or_stopped_rank_end(two_gpus, tmp_path, number, says):
    worker, config = REPOSITORY / "tests" / "workers" / "blocked.py", REPOSITORY / "accelerate_configs" / "ddp.yaml"
    done = agent_launch(tmp_path, config, 2, worker, "1", number, "cuda")
    assert done.code == 1
    codes = re.findall(r"^\s+exitcode\s+: (-?\d+)", done.err, re.MULTILINE)
    assert codes.count("-9") == 1, codes
    assert re.search(rf"^hfscale: .*rank 1\b.*{says}", done.err, re.MULTILINE), done.err[-6000:]
