"""hfscale estimate --script: one step of a user's own script, traced without data and compared with the formulas."""

import json
import textwrap

import pytest
from tiny import tiny_model
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hfscale.cli import main
from hfscale.errors import HfScaleError, UsageError
from hfscale.facts.hardware import accelerator
from hfscale.facts.model_shape import ModelShape
from hfscale.planner.estimate import estimate
from hfscale.planner.script import estimate_script, trace_script
from hfscale.planner.trace import make_fake

pytestmark = pytest.mark.recipes
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 8192,
    "vocab_size": 32000,
}
SCRIPT = """
    import sys, torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            ids = torch.randint(0, 32000, (1024,))
            return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    class Own(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            loss = super().compute_loss(model, inputs, **kwargs)
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(torch.zeros(1000))
            return loss

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    args = TrainingArguments("out", per_device_train_batch_size=2, bf16=True, report_to="none")
    Own(model, args, train_dataset=Rows()).train()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    return [str(folder / "train.py"), str(folder / "model")]


@pytest.fixture(scope="module")
def counts(script):
    return trace_script(script, gpus=8, precision="bf16")


def test_counts_are_those_of_the_formulas(counts):
    shape = ModelShape.from_config(CONFIG)
    assert counts["parameters"] == counts["trainable_parameters"] == shape.total_parameters
    assert counts["tokens"] == 2048
    flops = counts["matmul_flops"] + counts["attention_flops"] * 12 / 14  # its backward computes the scores again
    assert flops == pytest.approx(2048 * shape.flops_per_token(1024), rel=0.001)
    assert counts["collective_bytes"] == 4000  # the script's own collective, in fp32


@pytest.mark.parametrize("zero", [0, 3])
def test_the_estimate_is_close_to_that_of_the_known_model(counts, zero):
    gpu = accelerator("H100-80GB")
    found = estimate_script(counts, gpu=gpu, gpus=8, zero=zero, precision="bf16")
    layout = {"dp_shard": 8} if zero else {"dp_replicate": 8}
    known = estimate(ModelShape.from_config(CONFIG), gpu=gpu, layout=layout, seq_len=1024, micro_batch=2, zero=zero)
    assert found.memory.parameters == pytest.approx(known.memory.parameters, rel=0.5)
    assert found.memory.optimizer == pytest.approx(known.memory.optimizer, rel=0.01)
    assert found.time.compute == pytest.approx(known.time.compute, rel=0.5)
    assert found.tokens_per_s_per_gpu == pytest.approx(2048 / found.time.total)


def test_the_command(script, capsys):
    argv = ["estimate", "--script", script[0], "--gpu", "H100-80GB", "--gpus", "4", "--zero", "3", "--json", "--"]
    assert main([*argv, script[1]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["memory_gib"]["total"] > 0
    assert found["collective_gib"] > 0


def test_a_script_that_cannot_be_traced_is_one_line(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("raise RuntimeError('no such data')")
    with pytest.raises(HfScaleError, match=r"train\.py cannot be traced \(RuntimeError: no such data\)"):
        trace_script([str(file)], gpus=1, precision="fp32")


def test_wrong_usage(script, capsys, counts):
    gpu = ["--gpu", "H100-80GB"]
    for argv, message in (
        (["--script", "no.py", *gpu], "no.py"),
        (["--script", script[0], *gpu, "--tp", "2", "--gpus", "2"], "--tp"),
        (["--script", script[0]], "--gpu"),
        (["--script", script[0], *gpu, "--zero", "7"], " --zero is 7"),
        (["llama-3.1-8b", "stray", *gpu], "stray"),
    ):
        assert main(["estimate", *argv]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UsageError, match="lion"):
        estimate_script(counts | {"optimizer": "lion"}, gpu=accelerator("A100-80GB"), gpus=1, zero=0, precision="bf16")


def test_a_model_that_the_script_has_made_keeps_its_ties():
    model = tiny_model(tie_word_embeddings=True)
    frozen = model.model.norm.weight.requires_grad_(False)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    make_fake(model, fake)
    assert all(isinstance(one, FakeTensor) for one in (*model.parameters(), *model.buffers()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.norm.weight is not frozen
    assert not model.model.norm.weight.requires_grad
    assert model.lm_head.weight.requires_grad
