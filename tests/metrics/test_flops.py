"""MFU of any model: what is logged is compared with torch's own FLOP counter in one step of the same training."""

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import LENGTH, RandomTokens, logged, tiny_arguments, tiny_model
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from hfscale import ScalingMetricsCallback
from hfscale.core.records import read_events
from hfscale.metrics.flops import MAX_COUNTED_STEPS, FlopsFit

PEAK = 0.01  # TFLOP/s
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = RandomTokens().rows
CAUSAL = [{"input_ids": row, "labels": row} for row in TOKENS]
CLASSES = [{"input_ids": row, "attention_mask": (row > 9).long(), "labels": torch.tensor(0)} for row in TOKENS]
TRANSLATION = [{"input_ids": row, "labels": row[:6]} for row in TOKENS]
IMAGES = [{"pixel_values": torch.randn(3, 16, 16), "labels": torch.tensor(0)} for _ in range(32)]


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class TorchCount(TrainerCallback):
    """Counts the FLOPs of loss and backward of one step, when hfscale no longer counts."""

    STEP = 5

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.STEP - 1:
            self.mode = FlopCounterMode(display=False)
            self.mode.__enter__()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.STEP - 1:
            self.mode.__exit__(None, None, None)


# torch's counter has no formula for fused attention on CPUs, so attention is eager in these models.
def llama(**overrides):
    return tiny_model(attn_implementation="eager", **overrides)


def adapted(model, **config):
    return get_peft_model(model, LoraConfig(r=2, **config))


def frozen_base():
    model = llama()
    model.model.requires_grad_(False)
    return model


def reward_with_lora():
    model = LlamaForSequenceClassification._from_config(llama(pad_token_id=0).config, attn_implementation="eager")
    return adapted(model, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")


def bert():
    config = BertConfig(vocab_size=64, max_position_embeddings=64, **SIZES)
    return BertForSequenceClassification._from_config(config, attn_implementation="eager")


def t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    )


def vit():
    config = ViTConfig(image_size=16, patch_size=4, **SIZES)
    return ViTForImageClassification._from_config(config, attn_implementation="eager")


class OwnLoss(Trainer):
    """A subclass whose loss is that of Trainer."""

    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs)


class WithReference(Trainer):
    """A subclass whose loss needs a forward of a second model, like DPO."""

    reference = None

    def compute_loss(self, model, inputs, **kwargs):
        if self.reference is None:
            self.reference = llama()
        with torch.no_grad():
            self.reference(**{key: inputs[key] for key in ("input_ids", "labels")})
        return super().compute_loss(model, inputs, **kwargs)


def train(tmp_path, make, rows, *callbacks, trainer=Trainer, max_steps=6, **arguments):
    set_seed(0)
    training = trainer(
        model=make(),
        args=tiny_arguments(tmp_path, max_steps=max_steps, **arguments),
        train_dataset=Rows(rows),
        callbacks=list(callbacks),
    )
    training.train()
    return training


def flops_per_step(trainer, key):
    record = trainer.state.log_history[TorchCount.STEP - 1]
    step_s = trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps / record["scaling/samples_per_s"]
    return record[key] * PEAK * 1e12 * step_s


def facts(tmp_path):
    return next(event for event in read_events(tmp_path) if event["event"] == "workload")


RECOMPUTE = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.parametrize(
    ("make", "rows", "options", "source", "error"),
    [
        pytest.param(llama, CAUSAL, {}, "formula", 0.01, id="llama"),
        pytest.param(
            lambda: adapted(llama(num_hidden_layers=6), target_modules="all-linear"),
            CAUSAL,
            {},
            "formula",
            0.04,  # the formula has the gradients of the first layer's input, which nothing needs
            id="lora",
        ),
        pytest.param(frozen_base, CAUSAL, {}, "counted", 0.001, id="frozen base"),
        pytest.param(reward_with_lora, CLASSES, {}, "counted", 0.001, id="reward with lora"),
        pytest.param(bert, CLASSES, {}, "counted", 0.001, id="bert"),
        pytest.param(bert, CLASSES, {"gradient_accumulation_steps": 2}, "counted", 0.001, id="bert, accumulation"),
        pytest.param(t5, TRANSLATION, {}, "counted", 0.001, id="t5"),
        pytest.param(vit, IMAGES, {}, "counted", 0.001, id="vit"),
        pytest.param(llama, CAUSAL, {"trainer": OwnLoss}, "formula", 0.01, id="own loss"),
        pytest.param(llama, CAUSAL, {"trainer": WithReference}, "counted", 0.001, id="reference pass"),
        pytest.param(llama, CAUSAL, RECOMPUTE, "formula", 0.05, id="llama, recomputation"),
        pytest.param(bert, CLASSES, RECOMPUTE, "counted", 0.001, id="bert, recomputation"),
        pytest.param(bert, CLASSES, REENTRANT, "counted", 0.001, id="bert, reentrant recomputation"),
    ],
)
def test_executed_flops_are_those_that_torch_counts_and_losses_are_unchanged(
    tmp_path, make, rows, options, source, error
):
    count = TorchCount()
    trainer = train(tmp_path, make, rows, ScalingMetricsCallback(peak_tflops=PEAK), count, **options)
    executed = flops_per_step(trainer, "scaling/hfu")
    assert executed == pytest.approx(count.mode.get_total_flops(), rel=error)
    assert facts(tmp_path)["flops_source"] == source
    if "activation_checkpointing" in options:
        assert 1.25 < executed / flops_per_step(trainer, "scaling/mfu") < 1.36
    else:
        assert executed == pytest.approx(flops_per_step(trainer, "scaling/mfu"))
    if source == "formula":
        return
    plain = train(tmp_path / "plain", make, rows, TorchCount(), **options)  # its counter changes a last digit
    for key in ("loss", "grad_norm"):
        assert logged(plain, key) == logged(trainer, key)


def test_fused_attention_is_counted_and_its_second_computation_of_the_scores_is_not_model_flops(tmp_path):
    config = ViTConfig(image_size=16, patch_size=4, **SIZES)
    by_implementation = {}
    for name in ("eager", "sdpa"):
        trainer = train(
            tmp_path / name,
            lambda name=name: ViTForImageClassification._from_config(config, attn_implementation=name),
            IMAGES,
            ScalingMetricsCallback(peak_tflops=PEAK),
            max_steps=TorchCount.STEP,
        )
        by_implementation[name] = [flops_per_step(trainer, key) for key in ("scaling/mfu", "scaling/hfu")]
    assert by_implementation["sdpa"][0] == pytest.approx(by_implementation["eager"][0])
    assert by_implementation["sdpa"][1] > by_implementation["eager"][1]


@pytest.mark.long
def test_mfu_of_a_compiled_model_without_a_formula_is_absent_and_the_reason_is_recorded(tmp_path):
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
    trainer = train(tmp_path, bert, CLASSES, ScalingMetricsCallback(peak_tflops=PEAK), **options)
    assert logged(trainer, "scaling/mfu") == []
    assert logged(trainer, "scaling/tokens_seen") == [4 * LENGTH, 8 * LENGTH]
    assert "compiled" in facts(tmp_path)["mfu_absent"]


def test_an_operator_that_is_not_known_to_have_no_flops_makes_mfu_absent(tmp_path):
    @torch.library.custom_op("hfscale_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    double.register_autograd(lambda context, grad: 2 * grad)

    class Doubled(BertForSequenceClassification):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output["loss"] = double(output["loss"])
            return output

    trainer = train(
        tmp_path,
        lambda: Doubled(BertConfig(vocab_size=64, max_position_embeddings=64, **SIZES)),
        CLASSES,
        ScalingMetricsCallback(peak_tflops=PEAK),
        remove_unused_columns=False,
    )
    assert logged(trainer, "scaling/mfu") == []
    assert "hfscale_test::double" in facts(tmp_path)["mfu_absent"]
    assert "compute_loss" not in vars(trainer)


def test_counting_ends_if_the_training_breaks_off(tmp_path):
    class Break(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            raise KeyError("broken off")

    with pytest.raises(KeyError):
        train(tmp_path, bert, CLASSES, Break(), ScalingMetricsCallback(peak_tflops=PEAK))
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def padded(lengths):
    """Work of steps of 4 sequences of these lengths."""
    return [[4, 4 * length, 4 * length**2, 0, 0, 0, 0] for length in lengths]


class TestFit:
    def flops(self, work, *, noise=0.0):
        return (1000 * work[1] + 7 * work[2]) * (1 + noise)

    def test_one_shape_is_exact_after_one_count_and_a_second_confirms_it(self):
        fit = FlopsFit()
        work = padded([16])[0]
        assert fit.predict(work) is None
        for number in (1, 2):
            assert fit.wants_count
            fit.add(work, self.flops(work), self.flops(work))
            assert fit.predict([5 * size for size in work])[0] == pytest.approx(5 * self.flops(work)), number
        fit.note(work)
        assert not fit.wants_count

    def test_other_lengths_are_predicted_after_a_few(self):
        fit = FlopsFit()
        generator = random.Random(0)
        counted = 0
        for work in padded(generator.choices(range(16, 400), k=50)):
            if fit.wants_count:
                counted += 1
                fit.add(work, self.flops(work), self.flops(work))
            else:
                fit.note(work)
                assert fit.predict(work)[0] == pytest.approx(self.flops(work), rel=0.02)
        assert 2 <= counted <= 4

    def test_a_new_length_after_many_steps_is_counted(self):
        fit = FlopsFit()
        short, long = padded([16, 300])
        for work in (short, short):
            fit.add(work, self.flops(work), self.flops(work))
        assert not fit.wants_count
        fit.note(long)
        assert fit.wants_count

    def test_flops_that_depend_on_something_else_give_up(self):
        fit = FlopsFit()
        work = padded([16])[0]
        for number in range(MAX_COUNTED_STEPS):
            assert fit.wants_count
            fit.add(work, self.flops(work, noise=0.3 * (number % 2)), self.flops(work))
        assert fit.has_failed
        assert not fit.wants_count
