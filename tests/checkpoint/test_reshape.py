"""Conversion of checkpoints: every pair of strategies bit by bit, resumed runs, errors, malicious pickles, export."""

import itertools
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from attacks import RunsCode
from recipe_runs import STRATEGIES, logged, output, run_recipe
from safetensors.torch import load_file, save_file
from tiny import tiny_arguments, tiny_trainer
from transformers import AutoModelForCausalLM

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint.conversion import CONVERSION_NAME, convert
from hfscale.checkpoint.export import export
from hfscale.checkpoint.formats import read_view
from hfscale.checkpoint.formats.dcp import save_refs
from hfscale.checkpoint.formats.parameter_names import ParameterNames, read_parameter_names
from hfscale.checkpoint.formats.view import TensorRef
from hfscale.checkpoint.inferred_manifest import infer_manifest
from hfscale.checkpoint.loading import CONVERSIONS, readable_checkpoint
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.pickles import check_pickles, read_dcp_metadata
from hfscale.checkpoint.store import commit, list_checkpoints, verify
from hfscale.core.run_files import MANIFEST_NAME, PARAMETERS_NAME
from hfscale.errors import CheckpointError, LayoutError, UsageError
from hfscale.recipe.resume import keep_global_batch

pytestmark = pytest.mark.world(2)
TOLERANCE = 4e-6  # of losses in fp32, between orders of summation


@pytest.fixture(scope="module")
def runs(workplace, tmp_path_factory):
    """For each strategy a complete run of two processes, with a checkpoint after the fourth of its six steps."""
    folders = {}
    for strategy in STRATEGIES:
        folders[strategy] = shutil.copytree(workplace, tmp_path_factory.mktemp(strategy), dirs_exist_ok=True)
        run_recipe(folders[strategy], strategy, 2, "--save_steps", "4")
    return folders


def checkpoint_of(folder: Path) -> Path:
    return folder / "out" / "checkpoint-4"


def contents(checkpoint, strategy):
    """Read everything in a view: weights, optimizer states and groups."""
    view = read_view(checkpoint, strategy)
    weights = {name: ref.read().clone() for name, ref in view.weights.items() if name != "lm_head.weight"}  # tied
    state = {(name, key): ref.read().clone() for name, keys in view.state.items() for key, ref in keys.items()}
    return weights, state, [(group.options, group.names) for group in view.groups]


def assert_equal(found, expected):
    for found_tensors, expected_tensors in zip(found[:2], expected[:2], strict=True):
        assert found_tensors.keys() == expected_tensors.keys()
        for key, tensor in expected_tensors.items():
            assert torch.equal(found_tensors[key], tensor), key
            assert found_tensors[key].dtype == tensor.dtype
    assert [names for _, names in found[2]] == [names for _, names in expected[2]]
    for (found_options, _), (expected_options, _) in zip(found[2], expected[2], strict=True):
        assert {key: found_options[key] for key in expected_options} == expected_options


@pytest.mark.long
def test_every_pair_keeps_every_bit_of_weights_and_optimizer(runs, tmp_path):
    before = {strategy: contents(checkpoint_of(runs[strategy]), strategy) for strategy in STRATEGIES}
    weights, state, _ = before["ddp"]
    assert len(state) == 3 * len(weights) == 3 * 11
    for source, target in itertools.permutations(STRATEGIES, 2):
        converted = tmp_path / f"{source}-{target}"
        manifest = read_manifest(checkpoint_of(runs[source]))
        convert(checkpoint_of(runs[source]), converted, manifest=manifest, strategy=target, world_size=3)
        assert verify(converted).strategy == target
        assert (read_manifest(converted).world_size, read_manifest(converted).global_batch_size) == (3, 12)
        assert_equal(contents(converted, target), before[source])
        assert {path.name for path in converted.glob("rng_state*")} == {f"rng_state_{rank}.pth" for rank in range(3)}
        assert not list(converted.rglob("training_args.bin"))
        if source == "zero3" or target == "zero3":  # convert the result back, too
            back = tmp_path / f"{source}-{target}-{source}"
            convert(converted, back, manifest=read_manifest(converted), strategy=source, world_size=2)
            assert_equal(contents(back, source), before[source])
            origin = json.loads((back / CONVERSION_NAME).read_text())
            assert origin == {"strategy": source, "world_size": 2}
    assert not list(tmp_path.glob(".*")), "a temporary folder was left"


@pytest.mark.long
def test_a_synchronous_deepspeed_checkpoint_can_be_resumed(workplace, runs, tmp_path):
    """ZeRO-3's own tensors have attributes; the copies that an asynchronous save writes do not."""
    first = shutil.copytree(workplace, tmp_path / "first")
    run_recipe(first, "zero3", 2, "--save_steps", "4", "--asynchronous_save", "false")
    shutil.rmtree(first / "out" / "checkpoint-6")
    for strategy in ("zero3", "ddp"):
        folder = shutil.copytree(first, tmp_path / strategy)
        run_recipe(folder, strategy, 2)
        assert logged(folder, "loss") == pytest.approx(logged(runs["zero3"], "loss"), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("source", "target", "ranks"),
    [
        pytest.param("ddp", "zero3", 3, marks=pytest.mark.long),
        pytest.param("zero3", "single", 1, marks=pytest.mark.long),
        pytest.param("zero2", "parallel", 4, marks=pytest.mark.faults),
    ],
)
@pytest.mark.long
def test_a_relaunch_under_another_strategy_has_the_losses_of_the_uninterrupted_run(
    runs, tmp_path, source, target, ranks
):
    folder = shutil.copytree(runs[source], tmp_path, dirs_exist_ok=True)
    shutil.rmtree(folder / "out" / "checkpoint-6")
    run_recipe(folder, target, ranks, "--per_device_train_batch_size", "6")
    assert re.search(rf"checkpoint-4 .*{source}.* 2.*{target}.* {ranks}", output(folder))
    for key, tolerance in (("loss", TOLERANCE), ("grad_norm", 5e-4), ("learning_rate", 0.0)):
        assert logged(folder, key) == pytest.approx(logged(runs["ddp"], key), abs=tolerance), key
    assert not (folder / "out" / CONVERSIONS).exists()
    assert [path.name for path in list_checkpoints(folder / "out")] == ["checkpoint-4", "checkpoint-6"]
    assert verify(folder / "out" / "checkpoint-6").strategy == target


@pytest.mark.long
def test_a_conversion_is_reused_and_others_are_deleted(runs, tmp_path):
    """No relaunch takes it for a checkpoint of the run; a conversion for another size is deleted."""
    shutil.copytree(checkpoint_of(runs["ddp"]), tmp_path / "checkpoint-4")
    source = str(tmp_path / "checkpoint-4")
    args = tiny_arguments(tmp_path)  # one process
    converted = Path(readable_checkpoint(args, source))
    assert converted.parent == tmp_path / CONVERSIONS
    assert (converted / "rng_state.pth").is_file()
    assert (converted / "model.safetensors").samefile(tmp_path / "checkpoint-4" / "model.safetensors")
    assert list_checkpoints(tmp_path) == [tmp_path / "checkpoint-4"]
    written = (converted / MANIFEST_NAME).stat().st_mtime_ns
    assert readable_checkpoint(args, source) == str(converted)
    assert (converted / MANIFEST_NAME).stat().st_mtime_ns == written
    (converted / "rng_state.pth").write_bytes(b"damaged")
    assert readable_checkpoint(args, source) == str(converted)
    verify(converted)
    other = converted.with_name("checkpoint-4-as-ddp-x7")
    converted.rename(other)
    assert readable_checkpoint(args, source) == str(converted)
    assert not other.exists()
    assert readable_checkpoint(args, None) is None


@pytest.mark.long
def test_the_global_batch_comes_from_the_training_before_the_conversion(runs, tmp_path):
    manifest = read_manifest(checkpoint_of(runs["ddp"]))
    converted = tmp_path / "converted"
    convert(checkpoint_of(runs["ddp"]), converted, manifest=manifest, strategy="single", world_size=1)
    args = tiny_arguments(tmp_path, per_device_train_batch_size=5)
    keep_global_batch(args, str(converted))
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 3)


@pytest.mark.long
def test_the_pickles_that_training_writes_are_accepted(runs):
    for name in runs:
        check_pickles(checkpoint_of(runs[name]))


def test_malicious_pickles_are_rejected_without_running_code(runs, tmp_path):
    ran = tmp_path / "ran"
    fsdp2, ddp, zero2 = (
        shutil.copytree(checkpoint_of(runs[name]), tmp_path / name) for name in ("fsdp2", "ddp", "zero2")
    )
    metadata = fsdp2 / "optimizer_0" / ".metadata"
    good = metadata.read_bytes()
    torch.save({"step": RunsCode(ran)}, ddp / "optimizer.pt")
    for path in zero2.rglob("*rank_1_*optim_states.pt"):
        torch.save({"optimizer_state_dict": RunsCode(ran)}, path)
    for attack in (pickle.dumps(RunsCode(ran)), pickle.dumps([eval, "1"]), b"cos\nsystem\n(S'touch x'\ntR."):
        metadata.write_bytes(attack)
        with pytest.raises(CheckpointError, match="is refused: it would load"):
            read_view(fsdp2, "fsdp2")
        with pytest.raises(CheckpointError, match="is refused: it would load"):
            check_pickles(fsdp2)
    for broken in (b"", good[: len(good) // 2], pickle.dumps({"a": 1})):
        metadata.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"optimizer_0/\.metadata"):
            read_view(fsdp2, "fsdp2")
    for checkpoint, strategy in ((ddp, "ddp"), (zero2, "zero2")):
        with pytest.raises(CheckpointError, match="unpickling"):
            read_view(checkpoint, strategy)
        with pytest.raises(CheckpointError, match="is refused: loading it would run"):
            check_pickles(checkpoint)
    assert not ran.exists()
    pickle.loads(pickle.dumps(RunsCode(ran)))  # noqa: S301 - the pickle was made here
    assert ran.exists(), "the attack has no effect, so this test proves nothing"


def test_malicious_values_of_a_distributed_checkpoint_are_rejected_without_running_code(tmp_path):
    ran = tmp_path / "ran"
    state = {"value": RunsCode(ran), "weight": torch.ones(2)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is refused: loading it would run"):
        check_pickles(tmp_path / "checkpoint")
    assert not ran.exists()
    state["value"] = {"a": 1}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "harmless", no_dist=True)
    check_pickles(tmp_path / "harmless")


def test_dcp_metadata_with_a_persistent_object_is_rejected(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"Pobject\n.")  # the opcode that loads the persistent id "object"
    with pytest.raises(CheckpointError, match="persistent object"):
        read_dcp_metadata(tmp_path)


@pytest.mark.long
def test_dcp_metadata_with_a_path_outside_the_checkpoint_is_rejected(runs, tmp_path):
    folder = shutil.copytree(checkpoint_of(runs["fsdp2"]) / "optimizer_0", tmp_path / "optimizer_0")
    path = folder / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(CheckpointError, match=r"'\.\./\.\./secret'"):
        read_dcp_metadata(folder)


@pytest.mark.long
def test_parameter_names_come_from_the_config_if_the_checkpoint_has_none(runs, tmp_path):
    checkpoint = shutil.copytree(checkpoint_of(runs["ddp"]), tmp_path / "ddp")
    stated = read_parameter_names(checkpoint)
    assert stated.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    (checkpoint / PARAMETERS_NAME).unlink()
    assert read_parameter_names(checkpoint) == stated
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"hfscale_parameters\.json .*config\.json"):
        read_view(checkpoint, "ddp")
    swapped = ParameterNames(groups=[stated.groups[0][::-1], stated.groups[1]], aliases={})
    (checkpoint / PARAMETERS_NAME).write_text(swapped.to_json())
    manifest = read_manifest(checkpoint)
    with pytest.raises(CheckpointError, match=r"shape \[.*\[.*AdamW"):
        convert(checkpoint, tmp_path / "converted", manifest=manifest, strategy="fsdp2", world_size=2)
    (checkpoint / PARAMETERS_NAME).write_text(ParameterNames(groups=[["../../x"], []], aliases={}).to_json())
    with pytest.raises(CheckpointError, match=r"'\.\./\.\./x'"):
        read_view(checkpoint, "ddp")
    assert not (tmp_path / "converted").exists()


def test_other_optimizers_are_converted_or_rejected(tmp_path):
    """SGD's momentum is converted, except to ZeRO-3; Adafactor's factored states are rejected."""
    for name, options in (("sgd", {"optim_args": "momentum=0.9"}), ("adafactor", {})):
        spot = SpotCheckpointCallback()
        tiny_trainer(
            tmp_path / name, spot, save_strategy="steps", save_steps=2, max_steps=2, optim=name, **options
        ).train()
    sgd, adafactor = (tmp_path / name / "checkpoint-2" for name in ("sgd", "adafactor"))
    for target in ("fsdp2", "zero2"):
        convert(sgd, tmp_path / target, manifest=read_manifest(sgd), strategy=target, world_size=2)
        assert_equal(contents(tmp_path / target, target), contents(sgd, "single"))
    assert {key for _, key in contents(sgd, "single")[1]} == {"momentum_buffer"}
    with pytest.raises(CheckpointError, match=r"no exp_avg of .*ZeRO-3"):
        convert(sgd, tmp_path / "zero3", manifest=read_manifest(sgd), strategy="zero3", world_size=2)
    with pytest.raises(CheckpointError, match="AdamW, SGD"):
        convert(adafactor, tmp_path / "no", manifest=read_manifest(adafactor), strategy="zero2", world_size=2)


def test_a_checkpoint_that_cannot_be_resumed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"0")
    args = tiny_arguments(tmp_path)
    commit(tmp_path, step=2, strategy="fsdp1", world_size=4, global_batch_size=8)
    with pytest.raises(LayoutError, match=r"FSDP1.*SINGLE"):
        readable_checkpoint(args, str(tmp_path))
    commit(tmp_path, step=2, strategy="single", world_size=1, global_batch_size=8)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(LayoutError, match=r"model\.safetensors"):
        readable_checkpoint(args, str(tmp_path))
    commit(tmp_path, step=2, strategy="parallel", world_size=4, global_batch_size=8)
    monkeypatch.delenv("PARALLELISM_CONFIG_TP_SIZE")
    with pytest.raises(LayoutError, match=r"hfscale_parameters\.json"):
        readable_checkpoint(args, str(tmp_path))


@pytest.mark.long
def test_the_manifest_of_a_plain_trainer_checkpoint_is_inferred(runs, tmp_path):
    for strategy in STRATEGIES:
        checkpoint = shutil.copytree(checkpoint_of(runs[strategy]), tmp_path / strategy)
        (checkpoint / MANIFEST_NAME).unlink()
        (checkpoint / PARAMETERS_NAME).unlink(missing_ok=True)
        found = infer_manifest(checkpoint, global_batch_size=12)
        assert (found.strategy, found.step, found.world_size) == (strategy, 4, 2)
    assert infer_manifest(tmp_path / "zero3", global_batch_size=None).global_batch_size == 12
    with pytest.raises(UsageError, match="--global-batch-size"):
        infer_manifest(tmp_path / "ddp", global_batch_size=None)


@pytest.mark.long
def test_an_export_from_any_strategy_loads_with_from_pretrained(runs, tmp_path):
    expected = load_file(checkpoint_of(runs["ddp"]) / "model.safetensors")
    for strategy in STRATEGIES:
        folder = tmp_path / strategy
        files = export(checkpoint_of(runs[strategy]), folder, strategy=strategy, max_shard_bytes=50_000)
        assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(files)
        assert not {"trainer_state.json", PARAMETERS_NAME, "scheduler.pt"} & set(files)
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name, weight in expected.items():
            torch.testing.assert_close(model.state_dict()[name], weight, atol=1e-4, rtol=0)
        for path in folder.glob("*.safetensors"):  # the header comes on top of the limit
            assert path.stat().st_size < 60_000 or len(load_file(path)) == 1
    export(checkpoint_of(runs["zero2"]), tmp_path / "half", strategy="zero2", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
    bare = shutil.copytree(checkpoint_of(runs["fsdp2"]), tmp_path / "bare")
    (bare / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json.*--model"):
        export(bare, tmp_path / "no", strategy="fsdp2")
    export(bare, tmp_path / "named", strategy="fsdp2", model=checkpoint_of(runs["ddp"]))
    assert not (tmp_path / "no").exists()


def test_streamed_safetensors_files_equal_those_of_the_library(tmp_path):
    from hfscale.checkpoint.formats.safetensors_files import read_weights, write_weights
    from hfscale.checkpoint.formats.view import TensorRef

    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 2),
        "flags": torch.tensor([True, False]),
        "transposed": torch.randn(2, 3).t(),
    }
    write_weights(tmp_path, "model", {name: TensorRef.of(tensor) for name, tensor in tensors.items()})
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs.safetensors")
    read = read_weights(tmp_path, "theirs")
    assert all(torch.equal(read[name].read(), tensor) for name, tensor in tensors.items())
    for broken in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]"):
        (tmp_path / "broken.safetensors").write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"broken\.safetensors"):
            read_weights(tmp_path, "broken")


def test_a_tensor_that_cannot_be_read_stops_the_conversion_with_its_own_error(tmp_path):
    def broken():
        raise CheckpointError("the archive of model.a is broken")

    refs = {"a": TensorRef(shape=(2,), dtype=torch.float32, read=broken)}
    with pytest.raises(CheckpointError, match=r"model\.a"):
        save_refs(tmp_path / "dcp", {"model": refs})
