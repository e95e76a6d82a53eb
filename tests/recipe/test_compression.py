"""Compressed gradients on two processes: what is sent, what is kept for later, and equal weights on all ranks."""

import json

import pytest
import torch
from conftest import RECIPE, REPOSITORY, accelerate_launch
from forked_ranks import run_ranks
from tiny import tiny_trainer

from hfscale.core.distributed import last_barrier
from hfscale.errors import UsageError
from hfscale.recipe.compression import compress_gradients, store_gradients_in_buckets

WORKER = REPOSITORY / "tests" / "workers" / "compression.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compression")
    done = accelerate_launch(folder, REPOSITORY / "accelerate_configs" / "ddp.yaml", 2, WORKER)
    assert done.code == 0, done.err[-3000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.world(2)
@pytest.mark.parametrize("method", ["none", "fp16", "topk"])
def test_the_ranks_end_with_the_same_weights(results, method):
    assert results[method]["agree"]
    assert len(results[method]["loss"]) == 12


@pytest.mark.world(2)
def test_fp16_gradients_train_almost_the_same(results):
    plain, found = results["none"]["loss"], results["fp16"]["loss"]
    assert found == pytest.approx(plain, abs=2e-3)
    assert found != plain


@pytest.mark.world(2)
@pytest.mark.parametrize("method", ["bf16", "powersgd"])
def test_methods_for_gpus_are_refused_on_cpus(results, method):
    assert results[method].startswith(f"--gradient_compression {method} needs GPUs")


@pytest.mark.world(2)
def test_only_the_later_steps_are_compressed(results):
    plain, found = results["none"]["loss"], results["topk"]["loss"]
    assert found[:3] == pytest.approx(plain[:3], abs=1e-6)  # step 4 is still computed with uncompressed updates
    assert found[5:] != pytest.approx(plain[5:], abs=1e-6)
    assert found == pytest.approx(plain, abs=0.2)


@pytest.mark.world(2)
def test_topk_loses_no_gradient(results):
    """The received gradients plus the residuals of the ranks are the average of all gradients."""
    sent = results["sent"]
    given, kept = torch.tensor(sent["given"]).mean(dim=0), torch.tensor(sent["kept"]).mean(dim=0)
    torch.testing.assert_close(torch.tensor(sent["arrived"]) + kept, given, atol=1e-5, rtol=0)
    assert sent["nonzero"][0] == 50  # the uncompressed step
    assert all(5 <= count <= 10 for count in sent["nonzero"][1:])  # each rank's own tenth of 50


@pytest.mark.world(2)
def test_gradients_are_views_of_the_buckets(tmp_path):
    def train():
        trainer = tiny_trainer(tmp_path / "out")
        store_gradients_in_buckets(trainer)
        trainer.train()
        assert trainer.model_wrapped.gradient_as_bucket_view
        last_barrier()  # the process of rank 0 has the store of both ranks

    assert run_ranks(2, train, log=tmp_path / "log") == [0, 0]


def test_without_ddp_it_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--gradient_compression topk "):
        compress_gradients(tiny_trainer(tmp_path), "topk", powersgd_rank=1, topk_fraction=0.1, start_step=2)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["bf16", "powersgd"])
def test_the_recipe_trains_with_it_on_gpus(launch, method):
    processes = torch.cuda.device_count()
    if processes < 2:
        pytest.skip(f"needs two GPUs, and torch sees {processes}")
    done = launch(processes, RECIPE, "--gradient_compression", method, "--compression_start_step", "4")
    assert done.code == 0, done.err[-3000:]


BUCKETS = """
import json, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from hfscale.recipe.compression import TopKState, topk_hook
dist.init_process_group("gloo", store=dist.FileStore("store", 1), rank=0, world_size=1)
layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(20)))
model = DistributedDataParallel(layers, gradient_as_bucket_view=True, bucket_cap_mb=1)
state = TopKState(fraction=0.01, start_step=int(sys.argv[1]))
model.register_comm_hook(state, topk_hook)
kept = []
for _ in range(4):
    model(torch.randn(4, 300)).sum().backward()
    model.zero_grad()
    kept.append(len(state.residuals))
print(json.dumps(kept))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("start_step", [0, 2])
@pytest.mark.long
def test_all_buckets_start_in_the_same_step_and_survive_that_ddp_rebuilds_them(tmp_path, python, start_step):
    """In the first step of DDP there are other buckets than in the later ones."""
    done = python("-c", BUCKETS, str(start_step))
    assert done.code == 0, done.err[-3000:]
    kept = json.loads(done.out.splitlines()[-1])
    assert kept[:start_step] == [0] * start_step
    assert kept[-1] > 1
    assert start_step == 0 or kept[start_step:] == [kept[-1]] * (4 - start_step)
