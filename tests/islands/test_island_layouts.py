"""Islands whose ranks hold shards exchange rank by rank, and end where islands of one rank do."""

import json

import native_runs
import pytest
import safetensors.torch
from native_runs import Layout, Run
from parallel_world import train
from test_islands import largest_difference, run_islands
from transformers import TrainerCallback

from hfscale import DiLoCoCallback
from hfscale.islands.rendezvous import TOKEN_VARIABLE

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


def run_all_ways(folder, ranks, job, arguments, env=None):
    """Train two islands of `ranks` processes in all ways of `ROUNDS`; return their weights by way and island."""

    def train_island(island, rendezvous):
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

    codes, logs = run_islands(folder, train_island, ranks=ranks, env=env, timeout_s=400.0)
    assert codes == [0] * 2 * ranks, "\n".join(log[-3000:] for log in logs)
    return {name: [weights_of(folder / name / str(island)) for island in range(2)] for name in ROUNDS}


def weights_of(folder):
    """Return all weights of an exported model, of one file or several."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    weights = {}
    for name in sorted(files):
        weights |= safetensors.torch.load_file(folder / name)
    return weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_islands_of_shards_end_with_the_weights_of_islands_of_one_rank(tmp_path, monkeypatch, layout):
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret of the tests")
    ranks, job, arguments = LAYOUTS[layout]
    expected = run_all_ways(tmp_path / "one", 1, ONE_RANK, {})
    found = run_all_ways(tmp_path / layout, ranks, job, arguments, HSDP if layout == "hsdp" else None)
    for name in ROUNDS:
        assert largest_difference(*expected[name]) == 0.0, name
        assert largest_difference(*found[name]) == 0.0, name
        assert largest_difference(expected[name][0], found[name][0]) < 1e-5, name


def experts_of_islands(folder, layout, model):
    """Train two islands of a mixture of experts in all ways of `ROUNDS`; return their weights by way and island."""
    sgd = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0}

    def train_island(island, rendezvous):
        for name, (every, fragments, overlap) in ROUNDS.items():
            flags = {"islands": 2, "island_rank": island, "rendezvous": rendezvous, "deadline_s": 60.0}
            callback = DiLoCoCallback(**flags, every_steps=every, fragments=fragments, overlap_steps=overlap)
            out = folder / name / str(island)
            out.mkdir(parents=True, exist_ok=True)
            run = Run(
                layout=layout,
                steps=7,
                every=None,
                arguments=sgd,
                callbacks=(callback,),
                after=lambda trainer, out=out: trainer.save_model(out),
            )
            native_runs.train(run, model, out)

    codes, logs = run_islands(folder, train_island, ranks=layout.ranks, timeout_s=400.0)
    assert codes == [0] * 2 * layout.ranks, "\n".join(log[-3000:] for log in logs)
    return {name: [weights_of(folder / name / str(island)) for island in range(2)] for name in ROUNDS}


def test_islands_of_experts_that_transformers_shards_end_with_the_weights_of_islands_of_one_rank(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret of the tests")
    model = native_runs.make_model(tmp_path / "model")
    expected = experts_of_islands(tmp_path / "one", Layout(), model)
    found = experts_of_islands(tmp_path / "experts", Layout(fsdp=2, ep=2), model)
    for name in ROUNDS:
        assert largest_difference(*expected[name]) == 0.0, name
        assert largest_difference(*found[name]) == 0.0, name
        assert largest_difference(expected[name][0], found[name][0]) < 1e-5, name
