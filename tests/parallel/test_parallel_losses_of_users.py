"""A `compute_loss`, metrics, predictions and calls of the model under ParallelTrainer: as in one process."""

import hashlib
import inspect
import re
import tempfile
import time
import types
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from parallel_world import Tokens, in_world, tiny_causal_lm
from transformers import Trainer, TrainerCallback, TrainingArguments

from hfscale import ParallelArguments, ParallelTrainer
from hfscale.checkpoint.data_order.owners import DataState
from hfscale.errors import DataError
from hfscale.parallel.checkpoints import ParallelCheckpointTrainer
from hfscale.parallel.loss_records import _decode, _encode
from hfscale.parallel.vocabulary import CheckedCollator

LAYOUTS = ({"tp_size": 2}, {"pp_size": 2}, {})
ROWS = 8


# --- what users write ------------------------------------------------------------------------------------------------


class OwnLoss:
    """Base of the mixins below: each has a `compute_loss` as users write it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = self.own(model, inputs, outputs, loss)
        return (loss, outputs) if return_outputs else loss

    def share(self, value):
        """Scale a mean over a micro-batch so that the step has the mean of all of them."""
        return value / (self.current_gradient_accumulation_steps if torch.is_grad_enabled() else 1)


class MeanLoss(OwnLoss):
    """A mean over the batch, which Trainer divides by the number of micro-batches."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class LogitsLoss(OwnLoss):
    """A z-loss: it reads complete logits of the tokens that the batch has, and of no others."""

    def own(self, model, inputs, outputs, loss):
        assert outputs.logits.shape == (*inputs["input_ids"].shape, self.model.config.vocab_size)
        return loss + 1e-2 * self.share(outputs.logits.float().logsumexp(-1).pow(2).mean())


class TakesNoStep(LogitsLoss):
    def training_step(self, *args, **kwargs):
        raise AssertionError("a step was taken")


class Metrics(OwnLoss):
    """Metrics in an attribute, in a nested container and in a log."""

    def own(self, model, inputs, outputs, loss):
        kept = vars(self).setdefault("kept", defaultdict(lambda: defaultdict(list)))
        kept["train"]["logits"].append(outputs.logits.detach().mean())
        self.last = loss.detach()
        self.log({"own": float(loss.detach())})
        return loss

    def log(self, logs, *args, **kwargs):
        if "own" in logs:
            logs = logs | {"times": logs.get("times", 0) + 1}
        if "loss" in logs and getattr(self, "last", None) is not None:
            logs |= {"last": float(self.last), "kept": len(self.kept["train"]["logits"])}
        super().log(logs, *args, **kwargs)


class Weighted(OwnLoss):
    """Weights of samples and of tokens, from columns of the data that the model does not know."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights, masks = inputs.pop("weights"), inputs.pop("masks")
        assert weights.shape == masks.shape[:1]
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].float().transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:], reduction="none")
        loss = (losses * weights[:, None] * masks[:, 1:]).sum() / 64
        return (loss, outputs) if return_outputs else loss


class Distils(OwnLoss):
    """A teacher that reads the tokens, too."""

    def own(self, model, inputs, outputs, loss):
        if not hasattr(type(self), "teacher"):
            type(self).teacher = tiny_causal_lm(seed=11).eval()
        with torch.no_grad():
            wanted = self.teacher(input_ids=inputs["input_ids"]).logits.log_softmax(-1)
        distance = torch.nn.functional.kl_div(outputs.logits.log_softmax(-1), wanted, log_target=True)
        return loss + self.share(distance)


class HeadNorm(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        return loss + self.share(1e-3 * model.get_output_embeddings().weight.pow(2).sum())


class Regulariser(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        return loss + 1e-3 * sum(p.float().pow(2).sum() for p in model.parameters())


class RegulariserOfModules(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        linear = [module for module in self.model.modules() if isinstance(module, torch.nn.Linear)]
        return loss + 1e-3 * sum(module.weight.pow(2).sum() for module in linear)


class Gathers(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        self.accelerator.gather(loss.detach().reshape(1))
        return loss


class CallsTwice(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        return loss + model(**inputs | {"labels": inputs["input_ids"]}).loss


class OtherTokens(OwnLoss):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs | {"input_ids": inputs["input_ids"].flip(1)})
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class KeepsAModel(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        self.probe = torch.nn.Linear(2, 2)
        return loss


class FailsBefore(OwnLoss):
    """A column that the data has not, as after a wrong `remove_unused_columns`."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights = inputs.pop("weights")
        return weights * model(**inputs).loss


class FailsAfter(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        raise ValueError("a loss of NaN\nin the second line")


class FailsInTheModel(OwnLoss):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs, labels_of_nothing=1, attention_mask="x").loss


class FailsInEvaluation(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        return loss if torch.is_grad_enabled() else loss / self.no_such_attribute


class FailsOnOneReplica(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        return {"a": loss}["b" if torch.distributed.get_rank() == 3 else "a"]


class LogsAnObject(OwnLoss):
    def own(self, model, inputs, outputs, loss):
        self.log({"own": object()})
        return loss


class WithColumns(Tokens):
    def __getitem__(self, index):
        weights = {
            "weights": torch.tensor(1.0 + index % 3),
            "masks": torch.ones(len(self.rows[0])).scatter(0, torch.tensor([index % 5]), 0.0),
        }
        return super().__getitem__(index) | weights


class Reads(TrainerCallback):
    """Calls the model after each step, in three ways."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        rows = Tokens(2).rows
        with torch.no_grad():
            output = model(input_ids=rows, labels=rows)
        generated = model.generate(rows[:1, :4], max_new_tokens=3, do_sample=False)
        self.read += [round(float(output.loss), 4), round(float(output.logits.sum()), 2), generated.tolist()]


def accuracy(prediction):
    inputs = prediction.inputs if prediction.inputs is None else prediction.inputs.shape
    chosen = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((chosen == prediction.label_ids[:, 1:]).mean()), "inputs": list(inputs or ())}


def work(job):
    """Train for a few steps; the keys of `job` choose the mixin, the layout and what is called."""
    import os

    world = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = job["parallel"]
    replica = max(1, *(parallel or {"": 1}).values()) if parallel else 1
    batch = job.get("batch", 2)
    args = TrainingArguments(
        **{
            "output_dir": tempfile.gettempdir(),
            "use_cpu": True,
            "max_steps": 2,
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": ROWS // (batch * world // replica),
            "per_device_eval_batch_size": 8 * replica // world,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "seed": 7,
        }
        | job.get("args", {})
    )
    base = Trainer if parallel is None else ParallelTrainer
    mixin = globals()[job["mixin"]] if "mixin" in job else None
    cls = type("Own", (mixin, base), {}) if mixin else base
    reads = Reads()
    options = {} if parallel is None else {"parallel": ParallelArguments(**parallel)}
    if job.get("function"):
        seen = []

        def loss_of(outputs, labels, num_items_in_batch=None):
            seen.append(float(outputs.logits.detach().mean()))
            return outputs.logits.logsumexp(-1).sum() / num_items_in_batch

        options["compute_loss_func"] = loss_of
    trainer = cls(
        model=tiny_causal_lm(seed=7, **job.get("model", {})),
        args=args,
        train_dataset=(WithColumns if "columns" in job else Tokens)(**job.get("data", {})),
        eval_dataset=Tokens(13),
        callbacks=[reads] if job.get("reads") else [],
        **options,
    )
    result: dict[str, Any] = {}
    trainer.train()
    keys = ("loss", "grad_norm", "own", "times", "last", "kept")
    result |= {key: [entry[key] for entry in trainer.state.log_history if key in entry] for key in keys}
    result["reads"] = reads.read
    if job.get("function"):
        result["seen"] = seen
    if job.get("predicts"):
        trainer.compute_metrics = accuracy
        if "preprocess" in job:
            trainer.preprocess_logits_for_metrics = lambda logits, labels: logits * 2
        metrics = trainer.evaluate()
        result |= {key: metrics[key] for key in ("eval_loss", "eval_accuracy", "eval_inputs")}
        trainer.compute_metrics = None
        output = trainer.predict(Tokens(5))
        result["predictions"] = [float(output.predictions.sum()), *output.predictions.shape, *output.label_ids.shape]
    return result


# --- equal to one process --------------------------------------------------------------------------------------------

RIGHT: dict[str, dict[str, Any]] = {
    "a mean over the batch": {"mixin": "MeanLoss", "batch": 1},
    "a loss that reads logits": {"mixin": "LogitsLoss"},
    "a loss that reads logits of batches with padding": {
        "mixin": "LogitsLoss",
        "data": {"ragged": True, "size": 21},
        "args": {"num_train_epochs": 1, "max_steps": -1},
    },
    "metrics": {"mixin": "Metrics", "batch": 1},
    "columns for the loss alone": {"mixin": "Weighted", "columns": True, "args": {"remove_unused_columns": False}},
    "distillation": {"mixin": "Distils"},
    "a function for the loss": {"function": True},
    "predictions": {"predicts": True, "args": {"include_for_metrics": ["inputs"]}},
    "predictions of a loss of the user's": {"predicts": True, "mixin": "LogitsLoss", "preprocess": True},
    "predictions with label smoothing": {"predicts": True, "args": {"label_smoothing_factor": 0.1}},
}
"""Program -> job; under every layout it does what it does in one process."""
SHORT = ["columns for the loss alone", "a loss that reads logits of batches with padding", "metrics", "predictions"]
OF_A_RANK = ("own", "times", "last", "seen", "kept")
"""Results that each data parallel rank has of its own rows."""
OF_ONE_REPLICA = (
    "a loss that reads logits of batches with padding",
    "columns for the loss alone",
    "predictions of a loss of the user's",
)
"""Programs that two replicas run differently with stock Trainer, too: it averages their losses, and fills up the last
batch."""


@pytest.mark.parametrize("programs", [SHORT, pytest.param([*RIGHT], marks=pytest.mark.long)], ids=["short", "all"])
def test_programs_do_what_they_do_in_one_process(programs):
    one = in_world(1, work, [RIGHT[name] | {"parallel": None} for name in programs])
    names = [(name, layout) for name in programs for layout in LAYOUTS if layout or name not in OF_ONE_REPLICA]
    split = in_world(2, work, [RIGHT[name] | {"parallel": layout} for name, layout in names])
    wanted = dict(zip(programs, one, strict=True))
    for (name, layout), got in zip(names, split, strict=True):
        for key, value in wanted[name].items():
            if key in OF_A_RANK and layout == {}:
                continue
            difference = f"{name} under {layout}: {key}"
            np.testing.assert_allclose(got[key], value, rtol=2e-4, atol=2e-4, err_msg=difference)


@pytest.mark.long
def test_evaluation_of_a_loss_of_the_users_by_two_replicas_is_that_of_trainer():
    job = {"predicts": True, "mixin": "LogitsLoss"}
    stock, own = in_world(2, work, [job | {"parallel": None}, job | {"parallel": {}}])
    for key in ("loss", "eval_loss", "eval_accuracy", "predictions"):
        assert own[key] == pytest.approx(stock[key], abs=2e-4), key


@pytest.mark.long
def test_noise_of_neftune_and_calls_of_the_model_under_tensor_parallelism():
    jobs = [{"args": {"neftune_noise_alpha": 5.0}}, {"reads": True}, {"mixin": "LogitsLoss", "reads": True}]
    one = in_world(1, work, [job | {"parallel": None} for job in jobs])
    split = in_world(2, work, [job | {"parallel": {"tp_size": 2}} for job in jobs])
    data = in_world(2, work, [jobs[1] | {"parallel": {}}])
    for got, wanted in zip([*split, *data], [*one, one[1]], strict=True):
        assert got["loss"] == pytest.approx(wanted["loss"], abs=2e-4)
        for read, expected in zip(got["reads"], wanted["reads"], strict=True):
            assert read == (pytest.approx(expected, abs=2e-2) if isinstance(expected, float) else expected)


def test_the_weights_of_the_head_may_be_read_under_pipeline_parallelism():
    one = in_world(1, work, [{"mixin": "HeadNorm", "parallel": None}])
    split = in_world(2, work, [{"mixin": "HeadNorm", "parallel": {"pp_size": 2}}])
    assert split[0]["loss"] == pytest.approx(one[0]["loss"], abs=2e-4)


# --- refused ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], dict[str, int], str]] = [
    ({"mixin": "Regulariser"}, {"pp_size": 2}, "compute_loss reads the weights of the model"),
    ({"mixin": "Regulariser"}, {"tp_size": 2}, "compute_loss reads the weights of the model"),
    ({"mixin": "RegulariserOfModules"}, {"pp_size": 2}, "compute_loss reads the weights of the model"),
    ({"mixin": "RegulariserOfModules"}, {"tp_size": 2}, "compute_loss reads the weights of the model"),
    ({"mixin": "Gathers"}, {"pp_size": 2}, "compute_loss calls a collective"),
    ({"mixin": "CallsTwice"}, {"pp_size": 2}, "compute_loss calls the model twice"),
    ({"mixin": "OtherTokens"}, {"pp_size": 2}, "compute_loss calls the model with another input_ids"),
    ({"mixin": "KeepsAModel"}, {"pp_size": 2}, "compute_loss keeps what is not plain as probe"),
    (
        {"mixin": "TakesNoStep", "data": {"size": 18}, "args": {"num_train_epochs": 1, "max_steps": -1}},
        {"pp_size": 2},
        "the last step of an epoch has 1 micro-batches too few for 1F1B, and compute_loss may count",
    ),
    ({"reads": True}, {"pp_size": 2}, "the model is called outside of a training or evaluation step"),
    ({"model": {"vocab_size": 64}}, {"tp_size": 2}, "the model's vocabulary ends with 63"),
    ({"model": {"vocab_size": 64}}, {"pp_size": 2}, "the model's vocabulary ends with 63"),
]


@pytest.mark.parametrize(("job", "layout", "line"), REFUSED)
def test_what_a_split_model_cannot_do_is_refused(job, layout, line):
    with pytest.raises(AssertionError, match=line) as raised:
        in_world(2, work, [job | {"parallel": layout}])
    assert str(raised.value).count(line) >= 2, "both ranks name the reason"


FAILING = [
    ("FailsBefore", "KeyError: 'weights'"),
    pytest.param("FailsAfter", "ValueError: a loss of NaN", marks=pytest.mark.long),
    pytest.param("FailsInTheModel", "AttributeError: 'str' object", marks=pytest.mark.long),
    pytest.param("FailsInEvaluation", "no_such_attribute", marks=pytest.mark.long),
    pytest.param("LogsAnObject", "compute_loss gives self.log a value", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("mixin", "line"), FAILING)
def test_an_error_of_compute_loss_ends_every_rank_with_its_name(mixin, line):
    _check_that_all_ranks_end({"mixin": mixin, "predicts": True, "parallel": {"pp_size": 2}}, 2, line)


@pytest.mark.long
def test_an_error_of_one_replicas_compute_loss_ends_every_rank_with_its_name():
    """The ranks of a stage exchange gathered parameters in its passes, which the failing one must take part in."""
    for sizes in ({"pp_size": 2}, {"pp_size": 2, "dp_replicate_size": 2}, {"pp_size": 2, "tp_size": 2}):
        job = {"mixin": "FailsOnOneReplica", "parallel": sizes, "batch": 1, "args": {"gradient_accumulation_steps": 4}}
        _check_that_all_ranks_end(job, 4, "KeyError: 'b'")


def _check_that_all_ranks_end(job, size, line):
    begun = time.monotonic()
    with pytest.raises(AssertionError) as raised:
        in_world(size, work, [job])
    assert time.monotonic() - begun < 60, "none waited for the time-out of the process group"
    errors = re.split(r"^rank \d+:$", str(raised.value), flags=re.M)[1:]
    ends = ["\n".join(text.strip().splitlines()[-2:]) for text in errors]
    assert len(ends) == size
    assert all(line in end for end in ends), ends


def test_ids_beyond_the_vocabulary_are_found_by_the_collator():
    rows = torch.arange(6).reshape(2, 3)
    ignored = torch.tensor([[-100, 1, 2]])
    check = CheckedCollator(lambda batch: batch, ids=6, labels=6)
    good = {"input_ids": rows, "labels": ignored}
    assert check(good) is good
    assert check([1]) == [1]
    for wrong in (
        {"input_ids": rows + 1},
        {"input_ids": rows - 1},
        {"labels": rows + 1},
        {"labels": ignored + 90},
        {"shift_labels": rows + 1},
    ):
        with pytest.raises(DataError, match=r"vocabulary ends with 5.*resize_token_embeddings"):
            check(wrong)


def test_the_check_of_ids_hides_no_generator_of_a_collator():
    collator = types.SimpleNamespace(generator=torch.Generator())
    paths = [
        [*DataState(None, kind, None).generators()] for kind in (collator, CheckedCollator(collator, ids=1, labels=1))
    ]
    assert paths[0] == paths[1] != []


def test_an_error_in_a_worker_that_loads_data_is_one_line():
    check = CheckedCollator(torch.utils.data.default_collate, ids=64, labels=64)
    with pytest.raises(DataError) as raised:
        list(torch.utils.data.DataLoader(Tokens(4), batch_size=2, num_workers=1, collate_fn=check))
    assert str(raised.value).startswith("input_ids has the id")
    assert "\n" not in str(raised.value)


@pytest.mark.long
def test_what_compute_loss_keeps_is_sent_as_it_is():
    kept = {"a": [1, 2.5, None, "x"], 3: (True, {"b"}), "t": torch.tensor([1.5, 2.0])}
    sent = _decode(_encode(kept))
    assert sent.pop("t").tolist() == kept.pop("t").tolist()
    assert sent == kept
    for value in (torch.zeros(5000), object(), [object()]):
        with pytest.raises(TypeError):
            _encode(value)


# --- Trainer's own rules ---------------------------------------------------------------------------------------------

OVERRIDDEN = {
    "5.23.0": {
        "_clip_grad_norm": "ebfa9dc91d30",
        "_get_grad_norm": "913ba6f52f07",
        "_get_num_items_in_batch": "a31fa106f70d",
        "_load_best_model": "0e183d55a9db",
        "_load_from_checkpoint": "a2804e8d93a2",
        "_load_optimizer_and_scheduler": "741032f57d6f",
        "_load_rng_state": "d5ebdfc0a088",
        "_move_model_to_device": "a0fb9adb5af7",
        "_prepare_for_training": "f55950593d7e",
        "_save_optimizer_and_scheduler": "c5ef974db69a",
        "_sync_replicated_trainable_parameters": "97721be20ba2",
        "evaluation_loop": "a0fe4d6536f8",
        "floating_point_ops": "ffd8b0eb8cf7",
        "get_tp_size": "a3d28ebb4b20",
        "log": "73b8e3acd21a",
        "prediction_step": "d12d7a1d2f99",
        "save_model": "705727ee10c8",
        "train": "9a3c2bcd066d",
        "training_step": "e9760c8ee103",
    }
}
"""Version of transformers -> method of Trainer that ParallelTrainer overrides -> hash of its source."""


def test_overridden_methods_are_those_of_a_known_version():
    import transformers

    methods = {
        name
        for cls in (ParallelTrainer, ParallelCheckpointTrainer)
        for name, value in vars(cls).items()
        if callable(value) and callable(getattr(Trainer, name, None)) and name != "__init__"
    }
    found = {
        name: hashlib.sha256(inspect.getsource(getattr(Trainer, name)).encode()).hexdigest()[:12]
        for name in sorted(methods)
    }
    known = OVERRIDDEN.get(transformers.__version__)
    assert found == known, (
        f"transformers {transformers.__version__}: read what changed in these methods of Trainer, and then enter them "
        f"here: {found}"
    )
