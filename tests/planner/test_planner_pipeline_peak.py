"""The planned peak of `ParallelTrainer`'s pipelines, compared with the bytes that the ranks of a step hold."""

import weakref

import pytest
import torch
import torch.distributed as dist
from parallel_world import in_world
from planner_jobs import job as planned_job
from planner_ranks import LocalBytes, parallel_model, received_tokens
from transformers import AutoConfig

from benchmarks.activations import gpu_kernels, recompute
from hfscale.facts.model_shape import ModelShape
from hfscale.parallel.arguments import decide_layout
from hfscale.parallel.stages import StagePlan
from hfscale.planner.frameworks import find_framework
from hfscale.planner.memory import GIB, allocated_gib, memory_of

COMMON = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
MODELS = {
    "qwen3": {**COMMON, "intermediate_size": 768},
    "qwen3_moe": {**COMMON, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192},
}
SCHEDULES = {  # the planner's name and the stages of a rank
    "1F1B": ("1f1b", 1),
    "Interleaved1F1B": ("1f1b", 2),
    "InterleavedZeroBubble": ("zero_bubble", 2),
    "ZBV": ("zbv", 2),
    "DualPipeV": ("dualpipev", 2),
}


class ResizedBytes(LocalBytes):
    """Counts storages as they are resized, too: FSDP2 frees what it has gathered so."""

    def __enter__(self):
        self._sizes = {}
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage, size):
            resize(storage, size)
            self._count(storage)
            return storage

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def _add(self, storage):
        if storage.device.type == "meta":
            return
        key = storage._cdata
        if key not in self._known:

            def forget(_):
                self.now -= self._sizes.pop(key)
                del self._known[key]

            self._known[key] = weakref.ref(storage, forget)
        self._count(storage)

    def _count(self, storage):
        key = storage._cdata
        if key in self._known:
            self.now += storage.nbytes() - self._sizes.get(key, 0)
            self._sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)


def layout_of(job, world):
    return decide_layout(
        world, **{axis: job.get(axis) for axis in ("tp", "pp", "ep", "cp", "dp_replicate", "dp_shard")}
    )


def config_of(job):
    return AutoConfig.for_model(job["family"], **MODELS[job["family"]])


def count_peak(job):
    """The bytes that each rank holds at the peak of its second step, and the tokens that its experts got."""
    torch.manual_seed(0)
    config = config_of(job)
    layout = layout_of(job, dist.get_world_size())
    plan = StagePlan(schedule=job["schedule"], pp=layout.pp)

    def prepare(model):
        if job["recompute"] != "none":
            recompute(model, job["recompute"], has_adapters=False)

    with gpu_kernels(), ResizedBytes() as live, received_tokens() as received:
        trained = parallel_model(
            config,
            layout,
            plan,
            loss_of=lambda view, inputs: view(**inputs, use_cache=False).loss,
            prepare=prepare,
            sequence_parallel=job.get("sequence_parallel", False),
        )
        optimizer = torch.optim.AdamW(trained.parameters(), foreach=False)
        tokens = torch.randint(0, config.vocab_size, (job["micro_batches"], job["tokens"]))
        for _ in range(2):
            optimizer.zero_grad()
            received.clear()
            live.peak = 0
            trained(micro_batches=job["micro_batches"], input_ids=tokens, labels=tokens)
            peak = live.peak
            optimizer.step()
    found = {"bytes": peak, "most": max(received, default=0), "mean": sum(received) / max(1, len(received))}
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, found)
    return results


def planned_bytes(job, world, imbalance):
    layout = layout_of(job, world)
    schedule, virtual_stages = SCHEDULES[job["schedule"]]
    run = planned_job(
        shape=ModelShape.from_config(config_of(job).to_dict()),
        **{axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")},
        expert_parallel=job.get("ep") or 1,
        expert_imbalance=imbalance,
        zero=3,
        seq_len=job["tokens"],
        global_batch=layout.data_parallel_size * job["micro_batches"],
        activation_checkpointing=job["recompute"],
        schedule=schedule,
        virtual_stages=virtual_stages,
        sequence_parallel=job.get("sequence_parallel", False),
        loss_parallel=layout.tp > 1,
    )
    run.check()
    return allocated_gib(memory_of(run, find_framework("hf"))) * GIB


def job(family, *, recompute="none", schedule="1F1B", micro_batches=4, tokens=256, **sizes):
    return {
        "family": family,
        "recompute": recompute,
        "schedule": schedule,
        "micro_batches": micro_batches,
        "tokens": tokens,
        "pp": 2,
        **sizes,
    }


@pytest.mark.parametrize(
    ("world", "tolerance", "one"),
    [
        (2, 0.06, job("qwen3")),
        *(
            pytest.param(4, tolerance, one, marks=pytest.mark.faults)
            for tolerance, one in (
                (0.05, job("qwen3_moe")),
                (0.05, job("qwen3_moe", ep=2)),
                (0.05, job("qwen3_moe", recompute="full")),
                (0.05, job("qwen3_moe", ep=2, recompute="full")),
                (0.05, job("qwen3_moe", ep=2, recompute="selective", tokens=1024)),
                (0.06, job("qwen3", tp=2, micro_batches=6, tokens=512)),
                (0.06, job("qwen3", schedule="Interleaved1F1B", micro_batches=6)),
                (0.06, job("qwen3", pp=4, micro_batches=8)),
                (0.06, job("qwen3", schedule="InterleavedZeroBubble", micro_batches=6)),
                (0.06, job("qwen3", schedule="ZBV", micro_batches=6)),
                (0.06, job("qwen3_moe", schedule="ZBV", micro_batches=6)),
                (0.06, job("qwen3_moe", ep=2, schedule="DualPipeV", micro_batches=6)),
            )
        ),
    ],
)
@pytest.mark.long
def test_the_peak_of_a_pipeline_is_that_of_its_fullest_rank(world, tolerance, one):
    (ranks,) = in_world(world, count_peak, [one])
    fullest = max(ranks, key=lambda rank: rank["bytes"])
    even = one["tokens"] * MODELS[one["family"]].get("num_experts_per_tok", 0) / layout_of(one, world).tp
    # Without recomputation the tokens of all layers are kept, with it those of one layer at a time.
    received = fullest["mean" if one["recompute"] == "none" else "most"]
    imbalance = max(1.0, received / even) if one.get("ep") else None
    planned = planned_bytes(one, world, imbalance)
    assert planned == pytest.approx(fullest["bytes"], rel=tolerance)


def test_what_is_received_is_not_counted_for_each_micro_batch():
    few, many = (planned_bytes(job("qwen3", micro_batches=number), 2, None) for number in (4, 64))
    assert many == pytest.approx(few)
