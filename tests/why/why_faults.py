"""Faults that `hfscale why` must name: how each is injected, and what is right to say about it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from why_runs import At, Training, last_rank, local

ALL = ("single", "ddp", "fsdp2")
MLP = "model.layers.1.mlp"
ATTENTION = "model.layers.1.self_attn"
WEIGHT = f"{MLP}.down_proj.weight"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and the answers that are right."""

    name: str
    kinds: tuple[str, ...]
    """Kinds of the first difference that are right."""
    step: int
    """Its step."""
    faulty: Training
    """The run with the fault."""
    clean: Training = field(default_factory=Training)
    """The run that it is compared with."""
    module: str = ""
    """What the module or parameter must begin with; empty: any."""
    operation: str | None = None
    """What the operation must be; None: any."""
    rank: int | None = None
    """The rank on several ranks; None: any."""
    before: str = ""
    """A name that must be among what differed before."""
    layouts: tuple[str, ...] = ALL
    """The layouts under which it is tried."""
    across: tuple[str, ...] = ()
    """The layouts whose faulty runs are also compared with a clean run on one process."""


def module_of(model: nn.Module, name: str) -> Any:
    """Return a module or parameter of a model, with or without wrappers, by its name."""
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part)
    return found


def edit(act: Callable[[Any], None], **options: Any) -> Training:
    """Return a training whose model is changed before the Trainer is made."""
    return Training(edit=act, **options)


def at(event: str, step: int | None, act: Callable[[Any], None], **options: Any) -> Training:
    """Return a training with a callback that acts at an event of a step."""
    return Training(callbacks=(lambda: At(event, step, act),), **options)


def set_eps(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-4


def compute_in_bf16(model: Any) -> None:
    layer = module_of(model, f"{MLP}.down_proj")
    layer.forward = lambda x: nn.functional.linear(x.bfloat16(), layer.weight.bfloat16()).float()


def other_activation(model: Any) -> None:
    module_of(model, MLP).act_fn = nn.GELU()


def other_scaling(model: Any) -> None:
    module_of(model, ATTENTION).scaling *= 1.1


def see_the_future(model: Any) -> None:
    module_of(model, ATTENTION).is_causal = False


def other_angles(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1.01)


def halve_output(model: Any) -> None:
    module_of(model, MLP).register_forward_hook(lambda module, args, output: output * 0.5)


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def bf16_layer(model: Any) -> None:
    layer = module_of(model, f"{MLP}.down_proj")
    layer.to(torch.bfloat16)
    layer.forward = lambda x: nn.functional.linear(x.bfloat16(), layer.weight).float()


def other_weight(model: Any) -> None:
    with torch.no_grad():
        module_of(model, WEIGHT)[0, 0] += 1e-3


def freeze(model: Any) -> None:
    module_of(model, WEIGHT).requires_grad_(False)


def detach_branch(model: Any) -> None:
    module_of(model, MLP).register_forward_hook(lambda module, args, output: output.detach())


def scale_gradient_of_input(model: Any) -> None:
    def hook(module: Any, args: Any, output: Any) -> Any:
        output.register_hook(lambda gradient: gradient * 1.01)
        return output

    module_of(model, f"{MLP}.act_fn").register_forward_hook(hook)


def scale_gradient_of_weight(model: Any) -> None:
    module_of(model, WEIGHT).register_hook(lambda gradient: gradient * 1.01)


def forget_the_shift(model: Any) -> None:
    def loss(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
        return nn.functional.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))

    model.loss_function = loss


def more_dropout(model: Any) -> None:
    module_of(model, ATTENTION).attention_dropout = 0.3


def flip(tensor: torch.Tensor, bit: int = 1 << 20) -> None:
    """Flip one bit of the first element of a tensor in fp32."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(torch.tensor(bit, dtype=torch.int32))


def flip_weight(trainer: Any) -> None:
    if last_rank():
        flip(local(module_of(trainer.model, WEIGHT)))


def flip_activation(trainer: Any) -> None:
    def hook(module: Any, args: Any, output: Any) -> Any:
        handle.remove()
        changed = output.clone()
        flip(changed.detach())
        return changed

    if last_rank():
        # Before the hooks of the trace, as a fault of the hardware would be.
        handle = module_of(trainer.model, f"{ATTENTION}.q_proj").register_forward_hook(hook, prepend=True)


def halve_loss(trainer: Any) -> None:
    compute = trainer.compute_loss

    def averaged(*args: Any, **kwargs: Any) -> Any:
        return compute(*args, **kwargs) / 2

    trainer.compute_loss = averaged


def step_changed(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that has `change(trainer)` called after each micro-batch of step 2."""

    def prepare(trainer: Any) -> None:
        step = trainer.training_step

        def changed(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            if trainer.state.global_step == 1:
                change(trainer)
            return loss

        trainer.training_step = changed

    return prepare


def zero_gradient_of_one_rank(trainer: Any) -> None:
    if last_rank():
        local(module_of(trainer.model, WEIGHT).grad).zero_()


def lose_micro_batch(trainer: Any) -> None:
    if not trainer.accelerator.sync_gradients:
        trainer.model.zero_grad()


def leave_out_reduction(trainer: Any) -> None:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    trainer.model_wrapped.register_comm_hook(None, hook)


def leave_out_average(trainer: Any) -> None:
    """Leave gradients as their sum over two ranks; `set_gradient_divide_factor` of FSDP2 does not work with gloo."""
    for parameter in trainer.model.parameters():
        local(parameter.grad).mul_(2)


def clip_own_part(trainer: Any) -> None:
    """Clip by the norm of what this rank holds, as a script does that ignores DTensors."""

    def clip(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / float(norm)))
        return norm

    trainer.accelerator.clip_grad_norm_ = clip


def clip_harder_on_one_rank(trainer: Any) -> None:
    clip = trainer.accelerator.clip_grad_norm_
    factor = 0.5 if last_rank() else 1.0
    trainer.accelerator.clip_grad_norm_ = lambda parameters, norm, *args, **kwargs: clip(parameters, norm * factor)


def do_not_clip(trainer: Any) -> None:
    clip = trainer.accelerator.clip_grad_norm_
    trainer.accelerator.clip_grad_norm_ = lambda parameters, norm, *args, **kwargs: clip(parameters, float("inf"))


def drop_gradient(trainer: Any) -> None:
    module_of(trainer.model, WEIGHT).grad = None


def state_of(trainer: Any, name: str) -> dict[str, Any]:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    found: dict[str, Any] = optimizer.state[module_of(trainer.model, name)]
    return found


def reset_momentum(trainer: Any) -> None:
    local(state_of(trainer, WEIGHT)["exp_avg"]).zero_()


def advance_step(trainer: Any) -> None:
    state_of(trainer, WEIGHT)["step"] += 5


def set_group(key: str, factor: float, *, one_rank: bool = False) -> Callable[[Any], None]:
    def act(trainer: Any) -> None:
        if last_rank() or not one_rank:
            for group in trainer.optimizer.param_groups:
                group[key] *= factor

    return act


def round_weights(trainer: Any) -> None:
    for parameter in trainer.model.parameters():
        held = local(parameter)
        held.copy_(held.bfloat16().float())


def seed_by_rank(trainer: Any) -> None:
    torch.manual_seed(1000 + last_rank())


def change_token(dataset: Any) -> Any:
    dataset.rows = dataset.rows.clone()
    dataset.rows[:, 3] = (dataset.rows[:, 3] + 1) % 60 + 3
    return dataset


def reverse(dataset: Any) -> Any:
    dataset.rows = dataset.rows.flip(0)
    return dataset


class Padded:
    """Rows of which the last four tokens are padding; it counts in the loss if `counted`."""

    def __init__(self, dataset: Any, counted: bool) -> None:
        self.rows, self.counted = dataset.rows, counted

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.rows[index].clone()
        ids[-4:] = 0
        labels, mask = ids.clone(), torch.ones_like(ids)
        mask[-4:] = 0
        if not self.counted:
            labels[-4:] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


PADDED = Training(data=lambda dataset: Padded(dataset, counted=False))
DROPOUT = Training(model={"attention_dropout": 0.1})
CLIPPED = Training(arguments={"max_grad_norm": 0.05})
TIED = Training(model={"tie_word_embeddings": True})
TWO_MICRO = Training(arguments={"gradient_accumulation_steps": 2})

FAULTS = [
    Fault(
        name="the learning rate is not scaled",
        kinds=("config",),
        step=1,
        operation="learning_rate",
        faulty=Training(arguments={"learning_rate": 5e-3}),
        across=("ddp",),
    ),
    Fault(
        name="no weight decay",
        kinds=("config",),
        step=1,
        operation="weight_decay",
        faulty=Training(arguments={"weight_decay": 0.0}),
    ),
    Fault(
        name="another norm for clipping",
        kinds=("config",),
        step=1,
        operation="max_grad_norm",
        faulty=Training(arguments={"max_grad_norm": 0.05}),
    ),
    Fault(
        name="another model config",
        kinds=("config",),
        step=1,
        operation="config.rms_norm_eps",
        faulty=Training(model={"rms_norm_eps": 1e-3}),
    ),
    Fault(
        name="a seed of the data",
        kinds=("config",),
        step=1,
        operation="data_seed",
        faulty=Training(arguments={"data_seed": 3}),
    ),
    Fault(name="another order of the data", kinds=("data",), step=1, faulty=Training(data=reverse), across=("ddp",)),
    Fault(name="another token in each row", kinds=("data",), step=1, faulty=Training(data=change_token)),
    Fault(
        name="padding is counted",
        kinds=("data",),
        step=1,
        faulty=Training(data=lambda dataset: Padded(dataset, counted=True)),
        clean=PADDED,
        across=("fsdp2",),
    ),
    Fault(
        name="the epsilon of one norm",
        kinds=("forward",),
        step=1,
        module="model.layers.1.post_attention_layernorm",
        before="model.layers.1.post_attention_layernorm.variance_epsilon",
        faulty=edit(set_eps),
        across=("ddp", "fsdp2"),
    ),
    Fault(
        name="one layer computes in bf16",
        kinds=("forward",),
        step=1,
        module=f"{MLP}.down_proj",
        faulty=edit(compute_in_bf16),
        across=("ddp",),
    ),
    Fault(
        name="one layer has weights in bf16",
        kinds=("weights",),
        step=1,
        module=f"{MLP}.down_proj",
        before=f"{WEIGHT}.dtype",
        faulty=edit(bf16_layer),
        layouts=("single", "ddp"),
    ),
    Fault(
        name="another activation", kinds=("forward",), step=1, module=f"{MLP}.act_fn", faulty=edit(other_activation)
    ),
    Fault(
        name="another scaling of attention",
        kinds=("forward",),
        step=1,
        module=ATTENTION,
        faulty=edit(other_scaling),
        across=("ddp", "fsdp2"),
    ),
    Fault(name="attention is not causal", kinds=("forward",), step=1, module=ATTENTION, faulty=edit(see_the_future)),
    Fault(
        name="another rotary frequency",
        kinds=("weights", "forward"),
        step=1,
        module="model.rotary_emb",
        faulty=edit(other_angles),
    ),
    Fault(name="half of an output", kinds=("forward",), step=1, module=MLP, faulty=edit(halve_output)),
    Fault(
        name="tied weights are untied",
        kinds=("weights",),
        step=1,
        module="lm_head.weight",
        before="tied parameters",
        faulty=replace(TIED, edit=untie),
        clean=TIED,
        layouts=("single", "ddp"),
    ),
    Fault(
        name="more dropout in one layer",
        kinds=("forward",),
        step=1,
        module=ATTENTION,
        before=f"{ATTENTION}.attention_dropout",
        faulty=replace(DROPOUT, edit=more_dropout),
        clean=DROPOUT,
    ),
    Fault(
        name="the seed of dropout depends on the rank",
        kinds=("rng",),
        step=2,
        faulty=replace(DROPOUT, callbacks=at("on_step_begin", 2, seed_by_rank).callbacks),
        clean=DROPOUT,
    ),
    Fault(
        name="the loss without its shift",
        kinds=("forward",),
        step=1,
        faulty=edit(forget_the_shift),
        across=("ddp",),
    ),
    Fault(
        name="the loss is averaged over ranks once more",
        kinds=("forward", "backward"),
        step=1,
        faulty=Training(prepare=halve_loss),
        across=("ddp", "fsdp2"),
    ),
    Fault(
        name="a flipped bit in a weight",
        kinds=("weights",),
        step=3,
        module=WEIGHT,
        rank=1,
        faulty=at("on_step_end", 2, flip_weight),
    ),
    Fault(
        name="a flipped bit in an activation",
        kinds=("forward",),
        step=2,
        module=f"{ATTENTION}.q_proj",
        rank=1,
        faulty=at("on_step_begin", 2, flip_activation),
    ),
    Fault(
        name="a wrong backward of an activation",
        kinds=("backward",),
        step=1,
        module=MLP,
        faulty=edit(scale_gradient_of_input),
        across=("ddp",),
    ),
    Fault(
        name="a wrong gradient of a weight",
        kinds=("backward",),
        step=1,
        module=WEIGHT,
        faulty=edit(scale_gradient_of_weight),
        layouts=("single", "ddp"),
    ),
    Fault(
        name="a branch without gradient",
        kinds=("backward",),
        step=1,
        module=MLP,
        faulty=edit(detach_branch),
        layouts=("single", "fsdp2"),  # DDP refuses parameters without a gradient
    ),
    Fault(
        name="a frozen parameter",
        kinds=("backward", "gradient"),
        step=1,
        module=WEIGHT,
        before=f"{WEIGHT}.requires_grad",
        faulty=edit(freeze),
    ),
    Fault(
        name="gradients are not reduced (DDP)",
        kinds=("gradient",),
        step=1,
        faulty=at("on_train_begin", None, leave_out_reduction),
        layouts=("ddp",),
        across=("ddp",),
    ),
    Fault(
        name="gradients are added and not averaged (FSDP2)",
        kinds=("gradient",),
        step=2,
        faulty=Training(prepare=step_changed(leave_out_average)),
        layouts=("fsdp2",),
        across=("fsdp2",),
    ),
    Fault(
        name="the gradient of a weight is lost on one rank",
        kinds=("gradient",),
        step=2,
        module=WEIGHT,
        rank=1,
        faulty=Training(prepare=step_changed(zero_gradient_of_one_rank)),
        across=("ddp",),
    ),
    Fault(
        name="gradients of the first micro-batch are lost",
        kinds=("gradient",),
        step=2,
        faulty=replace(TWO_MICRO, prepare=step_changed(lose_micro_batch)),
        clean=TWO_MICRO,
        layouts=("single", "ddp"),
        across=("ddp",),
    ),
    Fault(
        name="clipping by the norm of the own shard",
        kinds=("clipping",),
        step=1,
        faulty=replace(CLIPPED, prepare=clip_own_part),
        clean=CLIPPED,
        layouts=("fsdp2",),
        across=("fsdp2",),
    ),
    Fault(
        name="one rank clips harder",
        kinds=("clipping",),
        step=1,
        rank=1,
        faulty=replace(CLIPPED, prepare=clip_harder_on_one_rank),
        clean=CLIPPED,
        layouts=("single", "ddp"),
        across=("ddp",),
    ),
    Fault(
        name="no clipping",
        kinds=("clipping",),
        step=1,
        faulty=replace(CLIPPED, prepare=do_not_clip),
        clean=CLIPPED,
        across=("ddp",),
    ),
    Fault(
        name="a gradient is dropped before the update",
        kinds=("clipping",),
        step=2,
        module=WEIGHT,
        faulty=at("on_pre_optimizer_step", 2, drop_gradient),
    ),
    Fault(
        name="a stale optimizer state",
        kinds=("optimizer",),
        step=2,
        module=WEIGHT,
        operation="exp_avg",
        faulty=at("on_step_end", 1, reset_momentum),
        across=("ddp", "fsdp2"),
    ),
    Fault(
        name="a wrong step in the bias correction",
        kinds=("optimizer",),
        step=2,
        module=WEIGHT,
        operation="step",
        faulty=at("on_step_end", 1, advance_step),
    ),
    Fault(
        name="another epsilon in the optimizer",
        kinds=("optimizer",),
        step=1,
        before="optimizer group 0.eps",
        faulty=at("on_train_begin", None, set_group("eps", 1e4)),
    ),
    Fault(
        name="one rank takes larger steps",
        kinds=("optimizer",),
        step=2,
        rank=1,
        faulty=at("on_step_begin", 2, set_group("lr", 2.0, one_rank=True)),
        layouts=("ddp", "fsdp2"),
    ),
    Fault(
        name="another first weight",
        kinds=("weights",),
        step=1,
        module=WEIGHT,
        faulty=edit(other_weight),
        across=("ddp",),
    ),
    Fault(
        name="replicas that differ",
        kinds=("weights",),
        step=1,
        module=WEIGHT,
        rank=1,
        faulty=at("on_train_begin", None, flip_weight),
        layouts=("ddp",),
        across=("ddp",),
    ),
    Fault(
        name="weights that were rounded to bf16",
        kinds=("weights",),
        step=3,
        faulty=at("on_step_end", 2, round_weights),
        across=("fsdp2",),
    ),
]
