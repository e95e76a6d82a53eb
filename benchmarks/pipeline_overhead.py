"""The overhead of `ParallelTrainer` over a bare loop with torch.distributed.pipelining, and how long its ranks wait.

There are two and then four pipeline ranks with equal stages and the schedule 1F1B, and then two stages of two ranks
each, over which a mixture of experts is spread. Both variants run alternately in the same processes, with the same
layers, stages, micro-batches, optimizer and clipping, and read the loss every step. A pair is two consecutive runs,
one of each variant; the order within a pair alternates. The wait is `scaling/bubble_fraction`, compared with the
schedule's formula. Processes are started anew after `PAIRS_OF_A_LAUNCH` pairs: Gloo keeps the threads of each group
until the process ends, and after 20 pairs a process had more than 400 of them, which slowed down its steps.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 --mixed_precision no \
        -m benchmarks.pipeline_overhead 1

is what `measure` runs; the argument is the number of ranks that share the experts of a stage.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.launched import launch_benchmark, send_result
from hfscale.parallel.mesh import local_tensor

LAUNCHES = 5
PAIRS_OF_A_LAUNCH = 4
LAYOUTS = {"2 stages": (2, 1), "4 stages": (4, 1), "2 stages, experts over 2 ranks": (2, 2)}
"""Number of stages, and of the ranks of each."""
STEPS = 6
UNTIMED_STEPS = 2
MICRO_BATCHES = 8
ROWS = 4  # a micro-batch takes 100 ms or more, so that a message between two processes is short in comparison
LENGTH = 128
VOCAB = 64  # so small that the head, which only the last stage has, costs almost nothing
_RATIOS = "step_s_over_bare"


def measure() -> dict[str, Any]:
    """Launch the processes of each layout."""
    summary, runs = {}, {}
    for name, (stages, ep) in LAYOUTS.items():
        result = _in_several_launches(stages, ep)
        paces = sorted(1 / ratio for ratio in result[_RATIOS])
        summary[name] = {
            "pairs": len(paces),
            "steps_per_s_over_bare": round(statistics.median(paces), 4),
            "quartiles": [round(pace, 4) for pace in (paces[len(paces) // 4], paces[-1 - len(paces) // 4])],
            "bubble_measured": result["bubble_measured"],
            "bubble_formula": result["bubble_formula"],
            "first_step_s": result["first_step_s"],
        }
        runs[name] = result
    return {"summary": summary, "runs": runs}


def _in_several_launches(stages: int, ep: int) -> dict[str, Any]:
    """Return the ratios of all pairs, and the medians of the launches for everything else."""
    results = [
        launch_benchmark("benchmarks.pipeline_overhead", str(ep), processes=stages * ep) for _ in range(LAUNCHES)
    ]
    ratios = [ratio for result in results for ratio in result[_RATIOS]]
    medians = {name: statistics.median(one[name] for one in results) for name in results[0] if name != _RATIOS}
    return {_RATIOS: ratios, **medians}


def tiny_config(ep: int) -> Any:
    """Make the config of a dense model, or of a mixture of experts.

    Args:
        ep (`int`): ranks that share the experts of a layer; 1 for a dense model.
    """
    from transformers import LlamaConfig, Qwen3MoeConfig

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "num_hidden_layers": 8 if ep == 1 else 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH,
    }
    if ep == 1:
        return LlamaConfig(**sizes, intermediate_size=768)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
    return Qwen3MoeConfig(**sizes, **experts, head_dim=32)


def training_arguments(folder: str) -> Any:
    """Make the arguments of a run.

    Args:
        folder (`str`): its output directory.
    """
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        save_strategy="no",
        disable_tqdm=True,
        gradient_accumulation_steps=MICRO_BATCHES,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        report_to="none",
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )


def random_rows(data_ranks: int) -> torch.Tensor:
    """Draw the sequences of a run, (sequences, `LENGTH`).

    Args:
        data_ranks (`int`): ranks that have different sequences.
    """
    size = (STEPS * MICRO_BATCHES * ROWS * data_ranks, LENGTH)
    return torch.randint(3, VOCAB, size, generator=torch.Generator().manual_seed(0))


def worker() -> None:
    """Run in each process of the launch."""
    from hfscale import ParallelArguments
    from hfscale.parallel.stages import StagePlan

    ep = int(sys.argv[1])
    config = tiny_config(ep)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder)
        stages = args.world_size // ep
        rows = random_rows(ep)
        ratios, bubbles, first = [], [], []
        parallel = ParallelArguments(pp_size=stages, ep_size=ep)
        variants = {
            "trainer": partial(train_with_trainer, args, rows, config, parallel),
            "bare": partial(_bare, args, rows, config, stages),
        }
        for pair in range(PAIRS_OF_A_LAUNCH + 1):  # the first pair warms up
            runs = run_pair(variants, pair)
            if pair:
                ratios.append(round(runs["trainer"]["step_s"] / runs["bare"]["step_s"], 4))
                bubbles.append(runs["trainer"]["bubble"])
                first.append(runs["trainer"]["first_s"])
        if dist.get_rank() == 0:
            result = {
                _RATIOS: ratios,
                "bubble_measured": round(statistics.median(bubbles), 4),
                "bubble_formula": round(StagePlan(pp=stages).bubble_fraction(MICRO_BATCHES), 4),
                "first_step_s": round(statistics.median(first), 3),
                "step_s": round(runs["trainer"]["step_s"], 3),
            }
            send_result(result)
        dist.barrier()
        dist.destroy_process_group()


def run_pair(variants: Mapping[str, Callable[[], Any]], pair: int) -> dict[str, Any]:
    """Run two variants one after the other, in turn the one and the other first.

    Args:
        variants (`Mapping`): what to run, by name.
        pair (`int`): the number of the pair.

    Returns:
        The results by name.
    """
    runs = {}
    for name in variants if pair % 2 else reversed(variants):
        dist.barrier()
        runs[name] = variants[name]()
    return runs


def train_with_trainer(args: Any, rows: torch.Tensor, config: Any, parallel: Any) -> dict[str, float]:
    """Train with `ParallelTrainer` and time the steps.

    Args:
        args (`TrainingArguments`): the arguments; `max_steps` is `STEPS`.
        rows (`torch.Tensor`): tokens (sequences, length).
        config: the model's config.
        parallel (`ParallelArguments`): the sizes of the axes and the schedule.

    Returns:
        `step_s` and `first_s`, seconds of a step and of the first one, and `bubble`, the share in which ranks wait.
    """
    from transformers import TrainerCallback

    from hfscale import ParallelTrainer
    from hfscale.parallel.weights import build_model

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.first_s = time.perf_counter() - self.started
            if state.global_step == UNTIMED_STEPS:
                self.timed_from = time.perf_counter()
            if state.global_step == STEPS:
                self.step_s = (time.perf_counter() - self.timed_from) / (STEPS - UNTIMED_STEPS)

    watch = Stopwatch()
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = ParallelTrainer(
        model=build_model(config, seed=0, dtype=torch.float32),
        args=args,
        train_dataset=data,
        callbacks=[watch],
        parallel=parallel,
    )
    trainer.train()
    waits = [e["scaling/bubble_fraction"] for e in trainer.state.log_history if "scaling/bubble_fraction" in e]
    return {"step_s": watch.step_s, "first_s": watch.first_s, "bubble": statistics.median(waits[UNTIMED_STEPS:])}


class _BareStage(nn.Module):
    """One of equal parts of a model, without hfscale."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        count = len(model.model.layers) // stages
        self.embedding = model.model.embed_tokens if stage == 0 else None
        self.layers = model.model.layers[stage * count : (stage + 1) * count]
        self.rotary = model.model.rotary_emb
        self.tail = nn.Sequential(model.model.norm, model.lm_head) if stage == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) if self.embedding is not None else x
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotary = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions, attention_mask=None)
        return hidden if self.tail is None else self.tail(hidden)


def _spread_experts(model: Any, mesh: DeviceMesh) -> None:
    """Spread the experts with transformers' own function."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    from hfscale.parallel.experts import expert_parallel_plan

    plan = expert_parallel_plan(model)
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation="all_to_all")


def _shard(stage: _BareStage, mesh: DeviceMesh) -> None:
    """Shard a stage over its ranks, and the experts of a rank, which no other has, over it alone, as torchtitan does:
    FSDP2 then keeps their master weights, too (torchtitan, models/llama4/infra/parallelize.py, `apply_fsdp`)."""
    for layer in stage.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["tp"], reshard_after_forward=False)
    modules = [*stage.layers, *(module for module in (stage.embedding, stage.tail) if module is not None), stage]
    for module in modules:
        fully_shard(module, mesh=mesh["ep"], reshard_after_forward=False)


def _bare(args: Any, rows: torch.Tensor, config: Any, stages: int) -> dict[str, float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.utils.data import DataLoader, DistributedSampler

    from hfscale.parallel.weights import build_model

    device, ep = args.device, dist.get_world_size() // stages
    mesh = init_device_mesh(device.type, (stages, ep, 1), mesh_dim_names=("pp", "ep", "tp"))
    rank = mesh.get_local_rank("pp")
    model = build_model(config, seed=0, dtype=torch.float32)
    if ep > 1:
        _spread_experts(model, mesh)
    stage = _BareStage(model, rank, stages).to(device).train()
    if ep > 1:
        _shard(stage, mesh)
    experts = [parameter for name, parameter in stage.named_parameters() if ".experts." in name]
    others = [parameter for name, parameter in stage.named_parameters() if ".experts." not in name]
    groups = [{"params": params} for params in (others, experts) if params]  # each sharded over a mesh of its own
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, weight_decay=0.0)

    pipeline = PipelineStage(stage, rank, stages, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(pipeline, MICRO_BATCHES, _loss_of, scale_grads=False)
    sampler: Any = DistributedSampler(rows, ep, mesh.get_local_rank("ep"))  # type: ignore[arg-type]
    for step, batch in enumerate(DataLoader(rows, batch_size=MICRO_BATCHES * ROWS, sampler=sampler), start=1):
        losses: list[torch.Tensor] = []
        batch = batch.to(device)
        if rank == 0:
            schedule.step(batch)
        elif rank == stages - 1:
            schedule.step(target=batch, losses=losses, return_outputs=False)
        else:
            schedule.step()
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
        _clip(others, experts, ep)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        loss.item()
        if step == UNTIMED_STEPS:
            timed_from = time.perf_counter()
        if step == STEPS:
            break
    return {"step_s": (time.perf_counter() - timed_from) / (STEPS - UNTIMED_STEPS)}


def _loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    items = MICRO_BATCHES * ROWS * (LENGTH - 1)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / items


def _clip(others: list[nn.Parameter], experts: list[nn.Parameter], ep: int) -> None:
    gradients = [local_tensor(parameter.grad) for parameter in others + experts if parameter.grad is not None]
    if experts:  # a sum over the tokens of all ranks, where the others have a mean
        torch._foreach_div_(gradients[len(others) :], float(ep))
    norm = torch.nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(norm)
    torch._foreach_mul_(gradients, (1.0 / (norm.sqrt() + 1e-6)).clamp(max=1.0))


if __name__ == "__main__":
    worker()
