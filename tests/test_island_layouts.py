"""Islands whose ranks hold shards exchange rank by rank, and end where islands of one rank do."""

import json
import os

import pytest
import safetensors.torch
import torch.distributed as dist
from forked_ranks import run_ranks
from parallel_world import train
from ports import free_port
from transformers import TrainerCallback

from hfscale import DiLoCoCallback
from hfscale.islands.wire import TOKEN_VARIABLE

pytestmark = pytest.mark.faults

ZERO = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
STAGE_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
ONE_RANK = {"batch": 2, "accumulation": 2}
LAYOUTS = {
    "tp2_pp2": (4, {**ONE_RANK, "parallel": {"tp_size": 2, "pp_size": 2}}, {}),
    "hsdp": (4, {"batch": 1, "accumulation": 1}, {}),
    "zero2": (2, {"batch": 1, "accumulation": 2}, {"deepspeed": ZERO | {"zero_optimization": {"stage": 2}}}),
    "zero3": (2, {"batch": 1, "accumulation": 2}, {"deepspeed": ZERO | {"zero_optimization": STAGE_3}}),
}
ROUNDS = {"one_fragment": (3, 1, 0), "overlapped_fragments": (4, 2, 1)}  # H, P, overlapped steps


HSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


class IsHsdp(TrainerCallback):
    """Looks whether the parameters are sharded over two ranks and replicated over two."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Look at the mesh."""
        assert {parameter.device_mesh.shape for parameter in model.parameters()} == {(2, 2)}


def run_islands(folder, ranks, job, arguments, env=None):
    """Train two islands of `ranks` processes in all ways of `ROUNDS`; return their weights by way and island."""
    rendezvous, ports = f"127.0.0.1:{free_port()}", [str(free_port()) for _ in range(2)]

    def as_rank():
        island, rank = divmod(int(os.environ["RANK"]), ranks)
        os.environ.update(MASTER_PORT=ports[island], RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        if ranks == 1:
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                del os.environ[name]
        for name, (every, fragments, overlap) in ROUNDS.items():
            flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "deadline_s": 60.0}
            callback = DiLoCoCallback(**flags, every_steps=every, fragments=fragments, overlap_steps=overlap)
            out = folder / name / str(island)
            common = {"optim": "sgd", "max_steps": 7, "eval_strategy": "no", "max_grad_norm": 0, "learning_rate": 0.1}
            model = {"tie_word_embeddings": True}
            train(
                {
                    **job,
                    "model": model,
                    "callbacks": [*([IsHsdp()] if env else []), callback],
                    "export": str(out),
                    "args": {**common, **arguments, "output_dir": str(out)},
                }
            )
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    codes = run_ranks(2 * ranks, as_rank, log=folder / "logs", env=env, ends_all=False, timeout_s=400.0)
    logs = [(folder / "logs" / f"rank-{number}.log").read_text()[-3000:] for number in range(2 * ranks)]
    assert codes == [0] * 2 * ranks, "\n".join(logs)
    return {name: [weights_of(folder / name / str(island)) for island in range(2)] for name in ROUNDS}


def weights_of(folder):
    """Return all weights of an exported model, of one file or several."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    weights = {}
    for name in sorted(files):
        weights |= safetensors.torch.load_file(folder / name)
    return weights


def difference(first, second):
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_islands_of_shards_end_with_the_weights_of_islands_of_one_rank(tmp_path, monkeypatch, layout):
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret of the tests")
    ranks, job, arguments = LAYOUTS[layout]
    expected = run_islands(tmp_path / "one", 1, ONE_RANK, {})
    found = run_islands(tmp_path / layout, ranks, job, arguments, HSDP if layout == "hsdp" else None)
    for name in ROUNDS:
        assert difference(*expected[name]) == 0.0, name
        assert difference(*found[name]) == 0.0, name
        assert difference(expected[name][0], found[name][0]) < 1e-5, name
