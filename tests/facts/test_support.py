"""The planner, the recipes and `ParallelTrainer` refuse the same combinations with the same sentences."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from simulated_arguments import simulated_arguments
from tiny import VOCAB, tiny_model, tiny_trainer
from torch.optim import SGD
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import hfscale
from hfscale import ParallelArguments
from hfscale.cli import main
from hfscale.core.spelling import speaking
from hfscale.errors import HfScaleError, UnsupportedModelError
from hfscale.facts.expert_layout import ExpertLayout
from hfscale.facts.hardware import accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.models import find_model
from hfscale.facts.support import LISTS, Combination, check_support, rules, why_not
from hfscale.parallel.arguments import check_arguments, plan_stages
from hfscale.parallel.checks import check_config
from hfscale.parallel.experts import check_adapters_of_experts
from hfscale.parallel.stages import StagePlan
from hfscale.planner import launchable
from hfscale.planner.job import Job
from hfscale.recipe.arguments import DataArguments, RecipeTrainingArguments
from hfscale.recipe.compatibility import check_compatibility
from hfscale.recipe.compression import compress_gradients
from hfscale.recipe.layout import NativeParallelLayout, check_model, set_up_parallelism
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.models import cut_document_attention, load_model
from hfscale.recipe.start import sample_generation
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.requested import check_launch

DDP = {"WORLD_SIZE": "8"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
REGIONAL = {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}
GATHERS = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
DATA = DataArguments(document_attention=False, block_size=16)
QLORA = {"use_peft": True, "load_in_4bit": True, "model_name_or_path": "some/model"}


# -- the consumers: each returns its message, or None ---------------------------------------------------------------


def message_of(check, *args, **kwargs):
    try:
        check(*args, **kwargs)
    except HfScaleError as error:
        return str(error)
    return None


def planned(stack="hf", family="llama", layout=None, model="llama-3.1-8b", **options):
    """The planner's reason for a job."""
    shape = replace(find_model(model), model_type=family)
    sizes = {"seq_len": 8192, "micro_batch": 1, "global_batch": 64}
    layout = ParallelLayout(**(layout or {"dp_shard": 8}))
    splits = {"sequence_parallel": layout.tp > 1}
    with speaking("command"):
        return launchable.why_not(
            Job(shape=shape, gpu=accelerator("H100"), layout=layout, stack=stack, **sizes | splits | options)
        )


def planned_adapters_of_experts(**options):
    """The planner's reason for a job that adapts the experts of a mixture."""
    adapted = {"method": "lora", "lora_target_modules": "all-linear", "zero": 3}
    return planned(family="glm4_moe_lite", model="glm-4.7-flash", **adapted | options)


def layout_of(sizes):
    """The layout of a recipe: that of transformers' own sharding, which `ParallelTrainer` reads too, where the sizes
    have `ep`."""
    return (NativeParallelLayout if "ep" in sizes else ParallelLayout)(**sizes)


def plan_refuses(**options):
    return message_of(hfscale.plan, "llama-3.1-8b", gpu="H100-80GB", gpus=8, **options)


@pytest.fixture
def consumers(monkeypatch, tmp_path):
    """The checks of the recipes and of `ParallelTrainer`, with the launcher's environment as it is given."""

    def arguments(environ, **changes):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return simulated_arguments(**changes)

    def alone():
        for name in (*DDP, *FSDP, *ZERO):
            monkeypatch.delenv(name, raising=False)

    def recipe(environ=DDP, model=None, layout=None, islands=1, average=False, **changes):
        layout = layout_of(layout) if layout else None
        args = arguments(environ, **changes)
        model = ModelArguments(**model or {})
        return message_of(check_compatibility, model, args, layout, islands=islands, average=average)

    def sizes(environ=DDP, use_cpu=False, **flags):
        args = arguments({}, use_cpu=use_cpu)
        return message_of(set_up_parallelism, ParallelArguments(**flags), args, dict(environ))

    def recipe_model(config, **layout):
        return message_of(check_model, layout_of(layout), config, arguments(DDP), block_size=64)

    def stages(**sizes):
        return message_of(plan_stages, ParallelArguments(**sizes), arguments(DDP))

    def trainer(environ=DDP, cp=1, given=None, **changes):
        return message_of(check_arguments, arguments(environ, **changes), cp=cp, **given or {})

    def trainer_model(family="llama", sequence_parallel=False, rope=None, attention=None, quantised=False, **layout):
        config = LlamaConfig(**SMALL, vocab_size=96, rope_parameters=rope)
        config = GPT2Config() if family == "gpt2" else config
        config.model_type = family
        if attention is not None:
            config._attn_implementation = attention
        if quantised:
            config.quantization_config = {"quant_method": "gptq"}
        layout = layout_of(layout)
        return message_of(check_config, config, layout, StagePlan(pp=layout.pp), sequence_parallel=sequence_parallel)

    def trainer_experts(family):
        config = Qwen3MoeConfig(**SMALL, vocab_size=96, num_experts=4)
        config.model_type = family
        return message_of(check_config, config, ExpertLayout(dp_shard=2, ep=2), StagePlan(pp=1))

    def rows(cp=2, **data):
        data = SimpleNamespace(**data)
        return message_of(cut_document_attention, None, data, arguments(FSDP), ParallelLayout(cp=cp))

    def bias(islands=1, **model):
        args = RecipeTrainingArguments(output_dir="out", use_cpu=True, router_bias_update_rate=0.001)
        return message_of(check_compatibility, ModelArguments(**model), args, islands=islands)

    def samples(layout=None, can_generate=True):
        prompts = SimpleNamespace(sample_prompts="prompts.txt")
        args = arguments(DDP)
        return message_of(sample_generation, prompts, args, layout_of(layout or {}), can_generate=can_generate)

    def compressed(method, world_size=1, precision="no", optimizer=None, **options):
        alone()
        trainer = tiny_trainer(tmp_path / "out", optimizers=(optimizer, None), **options)
        trainer.args.distributed_state = SimpleNamespace(num_processes=world_size)
        monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", precision)
        monkeypatch.setattr(type(trainer.args), "device", torch.device("cpu"))
        return message_of(compress_gradients, trainer, method, powersgd_rank=1, topk_fraction=0.1, start_step=2)

    def checkpoint(quant_method):
        config = tiny_model().config
        config.quantization_config = {"quant_method": quant_method}
        config.save_pretrained(tmp_path / quant_method)
        model_args = ModelArguments(**QLORA | {"model_name_or_path": str(tmp_path / quant_method)})
        return message_of(load_model, model_args, RecipeTrainingArguments(output_dir="out", use_cpu=True), None, DATA)

    def native(quantized=False, **sizes):
        alone()
        model = tiny_model()
        model._is_distributed_loading_by_transformers = True
        model.config.distributed_config = DistributedConfig(**sizes)
        trainer = tiny_trainer(tmp_path / "out", model=model)
        model.is_quantized = quantized
        return message_of(Strategy.of(trainer).check, {"WORLD_SIZE": "2"})

    def adapted_experts(tp):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL, vocab_size=VOCAB, num_experts=4))
            adapters = LoraConfig(target_modules=[], target_parameters=["experts.gate_up_proj"], task_type="CAUSAL_LM")
            return message_of(check_adapters_of_experts, get_peft_model(model, adapters).get_base_model(), tp)

    def launch():
        return message_of(check_launch, arguments({}, world_size=1), {"ACCELERATE_USE_MEGATRON_LM": "true"})

    return SimpleNamespace(**locals())


NATIVE = {"dp_shard": 8, "ep": 1}
EXPERTS = {"dp_shard": 8, "ep": 2}
PIPELINE = {"pp": 2, "dp_shard": 4}
TENSOR = {"tp": 2, "dp_shard": 4}
CASES = {
    "TRL's tasks on another stack": lambda c: [planned("titan", task="dpo")],
    "transformers' experts in another stack": lambda c: [planned("titan", experts_implementation="eager")],
    "other products of experts than grouped ones, with adapters": lambda c: [
        planned(method="lora", experts_implementation="batched_mm")
    ],
    "other products of experts than grouped ones, which ranks share": lambda c: [
        planned(expert_parallel=8, zero=3, experts_implementation="eager")
    ],
    "activation offload in another stack": lambda c: [planned("titan", activation_offload=True)],
    "activation offload with experts that ranks share": lambda c: [
        planned(expert_parallel=8, zero=3, activation_offload=True)
    ],
    "activation offload with selective recomputation": lambda c: [
        planned(task="sft", activation_checkpointing="selective", activation_offload=True)
    ],
    "activation offload outside TRL's trainers for chats and pairs": lambda c: [
        planned(task="grpo", activation_offload=True)
    ],
    "an average of the weights in another stack": lambda c: [planned("megatron", ema_decay=0.999)],
    "launching another stack": lambda c: [planned("megatron")],
    "TRL with tensor, pipeline or context parallelism": lambda c: [planned(task="dpo", layout=TENSOR)],
    "a fused loss beside TRL's own": lambda c: [planned(task="sft", liger=True)],
    "DPO with adapters and log-probabilities that are computed before": lambda c: [
        plan_refuses(task="dpo", method="lora", precompute_ref_log_probs=True)
    ],
    "SFT and GRPO of some mixtures of experts": lambda c: [planned(task="sft", family="phimoe")],
    "GRPO and distillation under DDP with compiled layers": lambda c: [
        planned(task="grpo", compile=True, layout={"dp_replicate": 8}),
        c.recipe(DDP | REGIONAL, torch_compile=True, task="grpo"),
    ],
    "images with QLoRA": lambda c: [c.recipe(model=QLORA, reads_images=True)],
    "images with torch.compile": lambda c: [c.recipe(DDP, torch_compile=True, reads_images=True)],
    "images with Muon": lambda c: [c.recipe(DDP, optim="muon", reads_images=True)],
    "images on islands": lambda c: [c.recipe(DDP, islands=2, reads_images=True)],
    "generating from prompts with images": lambda c: [
        message_of(check_support, Combination(images=True, sample_prompts="prompts.txt"))
    ],
    "sharded weights of vision-language models whose modules were not counted": lambda c: [
        message_of(check_support, Combination(images=True, strategy="fsdp2", family="no_such_family"))
    ],
    "DPO, GRPO, images or distillation with offload": lambda c: [planned(task="dpo", offload="full", zero=3)],
    "FSDP1": lambda c: [c.recipe(FSDP | {"FSDP_VERSION": "1"})],
    "a Trainer under Megatron-LM": lambda c: [c.launch()],
    "pipeline parallelism of transformers itself": lambda c: [c.native(pp_size=2)],
    "quantised weights in a model loaded with distributed_config": lambda c: [
        c.native(quantized=True, fsdp_size=2),
        c.recipe_model(LlamaConfig(**SMALL, quantization_config={"quant_method": "fp8"}), **NATIVE),
    ],
    "plans of `ParallelTrainer` with ZeRO stages 1 and 2": lambda c: [planned(layout=PIPELINE, zero=2)],
    "`ParallelTrainer` under DeepSpeed": lambda c: [planned(layout=PIPELINE, zero=3, offload="full"), c.trainer(ZERO)],
    "`ParallelTrainer` under FSDP": lambda c: [c.trainer(FSDP)],
    "sequence parallelism outside `ParallelTrainer`": lambda c: [c.sizes(sequence_parallel=True)],
    "a dry run outside `ParallelTrainer`": lambda c: [c.sizes(dry_run=8)],
    "pipeline parallelism outside `ParallelTrainer`": lambda c: [c.sizes(pp_size=2)],
    "tensor parallelism under FSDP or DeepSpeed": lambda c: [
        planned(layout=TENSOR, zero=2),
        c.sizes(FSDP, tp_size=2),
        c.recipe(ZERO, layout=TENSOR),
    ],
    "context parallelism without FSDP2 or DeepSpeed": lambda c: [
        c.sizes(cp_size=2, ep_size=2),
        planned(layout={"cp": 2, "dp_replicate": 4}, zero=0),
        planned(layout={"cp": 2, "tp": 2, "dp_shard": 2}, zero=3),
        c.sizes(cp_size=2),
    ],
    "ring attention on a CPU": lambda c: [c.sizes(FSDP, use_cpu=True, cp_size=2)],
    "sizes of data-parallel axes without FSDP2": lambda c: [
        c.sizes(dp_shard_size=2),
        c.sizes(ZERO, dp_shard_size=2),
    ],
    "expert parallelism under FSDP or DeepSpeed": lambda c: [c.sizes(FSDP, ep_size=2), c.sizes(ZERO, ep_size=2)],
    "sizes of transformers' own sharding under FSDP or DeepSpeed": lambda c: [
        c.sizes(FSDP, fsdp_size=8),
        c.sizes(ZERO, fsdp_size=8),
    ],
    "sizes of transformers' own sharding in `ParallelTrainer`": lambda c: [c.stages(fsdp_size=8)],
    "QLoRA with transformers' own sharding": lambda c: [c.recipe(model=QLORA, layout=NATIVE)],
    "layers with a convolution under ZeRO-3 and torch.compile": lambda c: [
        planned(family="jamba", zero=3, offload="full", compile=True),
    ],
    "torch.compile with transformers' own sharding": lambda c: [
        planned(compile=True, expert_parallel=8, zero=3),
        c.recipe(layout=NATIVE, torch_compile=True),
    ],
    "fp16 with transformers' own sharding": lambda c: [
        planned(precision="fp16", expert_parallel=8, zero=3),
        c.recipe(layout=NATIVE, mixed_precision="fp16"),
    ],
    "Liger Kernel with expert parallelism": lambda c: [
        c.recipe(layout=EXPERTS, use_liger_kernel=True),
        c.recipe(layout=EXPERTS, fused_loss="liger"),
    ],
    "expert parallelism of families without a plan in transformers": lambda c: [
        c.recipe_model(LlamaConfig(**SMALL), **EXPERTS),
        c.trainer_model(**EXPERTS),
    ],
    "plans of expert parallelism without sharded parameters": lambda c: [
        planned(layout={"dp_shard": 8}, expert_parallel=8, zero=1)
    ],
    "plans of expert parallelism with offload": lambda c: [planned(expert_parallel=8, zero=3, offload="full")],
    "expert parallelism with 4-bit weights": lambda c: [
        planned(expert_parallel=8, zero=3, method="qlora"),
        c.recipe(model=QLORA, layout=EXPERTS),
    ],
    "plans of expert parallelism for the tasks of TRL": lambda c: [planned(expert_parallel=8, zero=3, task="sft")],
    "a fused loss with expert parallelism": lambda c: [planned(expert_parallel=8, zero=3, liger=True)],
    "AutoTP of DeepSpeed": lambda c: [c.recipe(ZERO, ds={"tensor_parallel": {"autotp_size": 2}})],
    "QLoRA of weights that are quantised already": lambda c: [c.checkpoint("mxfp4"), c.checkpoint("fp8")],
    "plans of QLoRA for gpt-oss": lambda c: [planned(family="gpt_oss", method="qlora")],
    "QLoRA without a CUDA GPU": lambda c: [c.recipe(model=QLORA)],
    "merging the adapters of QLoRA": lambda c: [message_of(ModelArguments, **QLORA, merge_adapters=True)],
    "adapters with torch.compile of the full model under FSDP2": lambda c: [
        c.recipe({"WORLD_SIZE": "8"}, model={"use_peft": True}, fsdp=True, torch_compile=True)
    ],
    "plans of adapters with experts that `ParallelTrainer` spreads": lambda c: [
        planned(layout={"dp_replicate": 8}, expert_parallel=8, zero=3, method="lora"),
    ],
    "LoRA with transformers' tensor parallelism": lambda c: [
        planned(method="lora", layout=TENSOR, zero=3),
        c.recipe(model={"use_peft": True}, layout=TENSOR),
    ],
    "adapters of experts that tensor parallelism splits": lambda c: [c.adapted_experts(tp=2)],
    "dropout before adapters of experts": lambda c: [planned_adapters_of_experts(lora_dropout=0.1)],
    "DoRA of experts": lambda c: [planned_adapters_of_experts(use_dora=True)],
    "plans of adapters with tensor or pipeline parallelism": lambda c: [
        planned(method="lora", layout=PIPELINE, zero=3)
    ],
    "settings of DeepSpeed that are known not to work": lambda c: [
        c.recipe(ZERO, ds={"zero_optimization": {"stage": 2, "elastic_checkpoint": True}}),
        c.recipe(ZERO, ds={"expert_parallel": {"enabled": True, "autoep_size": 8}, "zero_optimization": GATHERS}),
    ],
    "settings of DeepSpeed that no test has shown": lambda c: [
        c.recipe(ZERO, ds={"zero_optimization": {"stage": 2, "zero_quantized_weights": True}})
    ],
    "averaged weights with gradients in DeepSpeed's round-robin order": lambda c: [
        c.recipe(ZERO, ds={"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, average=True)
    ],
    "islands with gradients in DeepSpeed's round-robin order": lambda c: [
        c.recipe(ZERO, ds={"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, islands=2)
    ],
    "DeepSpeed's 1-bit optimizers": lambda c: [
        c.recipe(ZERO, ds={"optimizer": {"type": "OneBitAdam"}}),
        c.recipe(ZERO, ds={"optimizer": {"type": "onebitlamb"}, "zero_optimization": {"stage": 2}}),
    ],
    "Ulysses under ZeRO-1 with bf16 gradients that are accumulated in fp32": lambda c: [
        c.recipe(
            ZERO,
            layout={"cp": 2, "dp_shard": 4},
            ds={"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
        )
    ],
    "ZeRO-3 that does not gather the weights for a save": lambda c: [
        c.recipe(ZERO, ds={"zero_optimization": {"stage": 3}})
    ],
    "fp8 under DeepSpeed": lambda c: [planned(precision="fp8", zero=2)],
    "offload with another optimizer than AdamW": lambda c: [planned(offload="full", zero=3, optimizer="sgd")],
    "optimizers that Trainer does not have": lambda c: [planned(optimizer="adamw_bf16", zero=3)],
    "selective recomputation with ZeRO-3": lambda c: [
        planned(activation_checkpointing="selective", zero=3, method="qlora", offload="full"),
        c.recipe(
            ZERO,
            activation_checkpointing=True,
            recompute="selective",
            ds={"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
        ),
    ],
    "Muon with ZeRO": lambda c: [
        planned(optimizer="muon", zero=2),
        c.recipe(ZERO, optim="muon", ds={"zero_optimization": {"stage": 2}}),
    ],
    "optimizers that were not tested with pipeline stages": lambda c: [
        planned(optimizer="adafactor", layout=PIPELINE, zero=3)
    ],
    "Adafactor with parameters that torch shards": lambda c: [
        planned(optimizer="adafactor", zero=3),
        planned(optimizer="adafactor", expert_parallel=8, zero=3),
        c.recipe(FSDP, optim="adafactor"),
        c.recipe(layout=NATIVE, optim="adafactor"),
    ],
    "8-bit optimizers with transformers' own sharding": lambda c: [
        planned(optimizer="adamw_8bit", expert_parallel=8, zero=3),
        c.recipe(layout=NATIVE, optim="adamw_bnb_8bit"),
    ],
    "parameters in bf16": lambda c: [planned(pure_bf16=True, zero=3)],
    "fp8 with pipeline stages": lambda c: [planned(precision="fp8", layout=PIPELINE, zero=3)],
    "fp16 with `ParallelTrainer`": lambda c: [
        planned(precision="fp16", layout=PIPELINE, zero=3),
        c.trainer(fp16=True),
    ],
    "torch.compile with `ParallelTrainer`": lambda c: [
        planned(compile=True, layout=PIPELINE, zero=3),
        c.trainer(torch_compile=True),
    ],
    "compiled layers with transformers' tensor parallelism": lambda c: [
        planned(compile=True, layout=TENSOR, zero=3),
        c.recipe(DDP | REGIONAL, torch_compile=True, layout=TENSOR),
    ],
    "Liger Kernel with `ParallelTrainer`": lambda c: [
        planned(liger=True, layout=PIPELINE, zero=3),
        c.trainer(use_liger_kernel=True),
    ],
    "a fused loss with tensor or context parallelism": lambda c: [planned(liger=True, layout=TENSOR, zero=3)],
    "a fused loss for a family that Liger does not fuse by default": lambda c: [
        planned(liger=True, family="granite", zero=3)
    ],
    "compressed gradients without DDP": lambda c: [
        c.trainer(gradient_compression="topk"),
        c.compressed("topk"),
        c.recipe(FSDP, gradient_compression="topk"),
    ],
    "gradients compressed by NCCL's hooks on a CPU": lambda c: [
        c.recipe(use_cpu=True, gradient_compression="powersgd")
    ],
    "1-bit Adam and LAMB with another optimizer": lambda c: [
        c.recipe(gradient_compression="onebit_adam", optim="sgd"),
        c.compressed("onebit_lamb", 2, optim="lion_32bit"),
        c.compressed("onebit_adam", 2, optimizer=SGD([torch.zeros(1)])),
    ],
    "1-bit Adam and LAMB with fp16": lambda c: [
        c.recipe(gradient_compression="onebit_adam", mixed_precision="fp16"),
        c.compressed("onebit_lamb", 2, precision="fp16"),
    ],
    "quantised checkpoints in `ParallelTrainer`": lambda c: [c.trainer_model(quantised=True, pp=2)],
    "pipeline stages of some families": lambda c: [
        planned(family="gpt_neo", layout=PIPELINE, zero=3),
        c.trainer_model("gpt_neo", pp=2),
    ],
    "pipeline stages of families that no test has compared": lambda c: [c.trainer_model("of_tomorrow", pp=2)],
    "expert parallelism of families that no test has compared": lambda c: [c.trainer_experts("of_tomorrow")],
    "tensor parallelism of families that no test has compared": lambda c: [c.trainer_model("of_tomorrow", tp=2)],
    "tensor parallelism of some families": lambda c: [
        planned(family="doge", layout=TENSOR, zero=3),
        c.recipe_model(renamed("doge"), tp=2),
        c.trainer_model("doge", tp=2),
    ],
    "tensor parallelism of families without a plan in transformers": lambda c: [
        planned(family="gpt2", layout=TENSOR, zero=3),
        planned(family="gpt2", layout={"tp": 2, "pp": 2, "dp_shard": 2}, zero=3),
        c.recipe_model(GPT2Config(), tp=2),
        c.trainer_model("gpt2", tp=2),
    ],
    "context parallelism of some families": lambda c: [
        planned(family="jamba", layout={"cp": 2, "pp": 2, "dp_shard": 2}, zero=3),
        c.trainer_model("jamba", cp=2),
    ],
    "context parallelism of families that no test has compared": lambda c: [
        planned(family="of_tomorrow", layout={"cp": 2, "pp": 2, "dp_shard": 2}, zero=3),
        c.trainer_model("of_tomorrow", cp=2),
    ],
    "context parallelism with rotary angles that depend on the longest position": lambda c: [
        c.trainer_model(rope={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, cp=2)
    ],
    "plans of context parallelism in `ParallelTrainer` without sharded states": lambda c: [
        planned(layout={"cp": 2, "pp": 2, "dp_replicate": 2}, zero=0)
    ],
    "context parallelism in `ParallelTrainer` with another attention than SDPA and eager": lambda c: [
        c.trainer_model(attention="flash_attention_2", cp=2)
    ],
    "context parallelism of Accelerate with another attention than the launcher's": lambda c: [
        c.recipe(FSDP, model={"attn_implementation": "eager"}, layout={"cp": 2})
    ],
    "sequence parallelism without tensor parallelism": lambda c: [
        planned(sequence_parallel=True, layout=PIPELINE, zero=3),
        c.trainer_model(sequence_parallel=True, pp=2),
    ],
    "sequence parallelism of families that no test has compared": lambda c: [
        planned(family="of_tomorrow", sequence_parallel=True, layout={"tp": 2, "pp": 2}, zero=3),
        c.trainer_model("of_tomorrow", sequence_parallel=True, tp=2),
    ],
    "`ParallelTrainer` with gathered logits": lambda c: [
        planned(loss_parallel=False, layout={"tp": 2, "pp": 2, "dp_shard": 2}, zero=3)
    ],
    "`ParallelTrainer` with a choice of when parameters are gathered": lambda c: [
        planned(reshard=False, layout=PIPELINE, zero=3)
    ],
    "attention between documents with rows of one document": lambda c: [
        message_of(DataArguments, document_attention=True, packing="none")
    ],
    "context parallelism of Accelerate with rows that need a mask": lambda c: [
        c.rows(packing="bestfit", document_attention=None)
    ],
    "context parallelism of Accelerate with attention that is cut between documents": lambda c: [
        c.rows(packing="concat", document_attention=True)
    ],
    "generating from prompts with tensor or context parallelism": lambda c: [
        c.samples({"cp": 2}),
        c.samples({"tp": 2}),
    ],
    "generating from prompts with transformers' own sharding": lambda c: [c.samples(NATIVE)],
    "generating from prompts in `ParallelTrainer`": lambda c: [c.samples(can_generate=False)],
    "updating the bias of routers with adapters": lambda c: [c.bias(use_peft=True)],
    "islands under ZeRO stage 0 in 16 bits": lambda c: [
        c.recipe(ZERO, ds={"zero_optimization": {"stage": 0}}, islands=2)
    ],
    "updating the bias of routers on islands": lambda c: [c.bias(islands=2)],
    "averaged weights on islands": lambda c: [c.recipe(islands=2, average=True)],
    "averaged weights with parameters on a disk": lambda c: [
        c.recipe(ZERO, ds={"zero_optimization": {**GATHERS, "offload_param": {"device": "nvme"}}}, average=True)
    ],
    "averaged weights with states of the optimizer on a disk": lambda c: [
        c.recipe(ZERO, ds={"zero_optimization": {**GATHERS, "offload_optimizer": {"device": "nvme"}}}, average=True)
    ],
    "averaged weights under ZeRO stage 0 in 16 bits": lambda c: [
        c.recipe(ZERO, ds={"zero_optimization": {"stage": 0}}, average=True)
    ],
    "`ParallelTrainer` with a loss of the user's own and context parallelism": lambda c: [
        c.trainer(cp=2, given={"compute_loss": True})
    ],
    "`ParallelTrainer` with model_init": lambda c: [c.trainer(given={"model_init": len})],
    "`ParallelTrainer` with an optimizer object": lambda c: [c.trainer(given={"optimizers": (object(), None)})],
    "`ParallelTrainer` without average_tokens_across_devices": lambda c: [
        c.trainer(average_tokens_across_devices=False)
    ],
    "`ParallelTrainer` with auto_find_batch_size": lambda c: [c.trainer(auto_find_batch_size=True)],
    "NEFTune with pipeline stages": lambda c: [c.trainer(neftune_noise_alpha=5.0, given={"pp": 2})],
    "NEFTune with sequences that ranks of `ParallelTrainer` share": lambda c: [
        c.trainer(cp=2, neftune_noise_alpha=5.0)
    ],
    "NEFTune with sequence parallelism": lambda c: [
        c.trainer(neftune_noise_alpha=5.0, given={"sequence_parallel": True})
    ],
    "`ParallelTrainer` with include_num_input_tokens_seen": lambda c: [c.trainer(include_num_input_tokens_seen="all")],
    "`ParallelTrainer` with learning rates that depend on the losses": lambda c: [
        c.trainer(lr_scheduler_type="greedy")
    ],
}
"""Rule -> what its consumers say to an example of it."""

ELSEWHERE = {
    "offload on another stack": "no other stack is launched; the rule only limits what the search tries",
    "averaged weights under ZeRO-3 that does not gather the weights for a save": (
        "recipes are refused before: tests/averaging/test_averaging.py"
    ),
    "evaluating averaged weights in GRPO": "asked with a Trainer: the same file",
    "QLoRA with tensor parallelism": "needs a GPU or a simulated one: tests/recipe/test_parallelism.py",
    "QLoRA with parameters on NVMe": "the same",
    "AdaLoRA and trained prompts under FSDP2": "checked at the start of a training: tests/checkpoint/test_adapters.py",
    "adapters with frozen random parameters under DeepSpeed, `ParallelTrainer` and transformers' own sharding": (
        "the same"
    ),
    "plans of context parallelism for Phi-3 (its published configs have angles that depend on the longest position)": (
        "ParallelTrainer looks at the config itself"
    ),
}
GROWING = [rule.name for rule in rules() if "batch_schedule" in rule.when]
ELSEWHERE |= dict.fromkeys(GROWING, "checked at the start of a training: tests/lr_scaling/test_growing_batch.py")
WIDE = [rule.name for rule in rules() if "base_width" in rule.when]
ELSEWHERE |= dict.fromkeys(WIDE, "checked at the start of a training: tests/lr_scaling/test_width.py")
SKIPPING = [rule.name for rule in rules() if "skip_bad_batches" in rule.when]
ELSEWHERE |= dict.fromkeys(SKIPPING, "checked at the start of a training: tests/replays/test_bad_batches.py")
ELSEWHERE |= dict.fromkeys(
    [
        "kinds of adapters in `ParallelTrainer` that were not compared with one process",
        "options of adapters in `ParallelTrainer` that were not compared with one process",
        "adapters of a weight that is tied in `ParallelTrainer`",
        "adapters other than LoRA with tensor parallelism",
        "options of LoRA with tensor parallelism",
        "options of LoRA with sequence parallelism",
        "adapters other than LoRA with expert parallelism",
        "options of LoRA with expert parallelism",
        "kinds of adapters that are not drawn on the meta device",
        "how LoRA begins on the meta device",
    ],
    "checked with models: tests/parallel/test_parallel_adapters.py",
)
"""Rules without an example here -> why."""


def renamed(family):
    config = LlamaConfig(**SMALL)
    config.model_type = family
    return config


@pytest.mark.parametrize("name", CASES)
def test_all_consumers_refuse_with_the_sentence_of_the_table(name, consumers):
    rule = next(rule for rule in rules() if rule.name == name)
    sentence = re.sub(r"\\\{[^}]*\\\}", ".*", re.escape(rule.why))
    for message in CASES[name](consumers):
        assert message is not None
        assert re.fullmatch(sentence, message), message


def test_every_rule_has_an_example():
    names = [rule.name for rule in rules()]
    assert len(set(names)) == len(names)
    assert {*CASES, *ELSEWHERE} == set(names)


def test_what_is_not_known_fulfils_no_condition():
    assert why_not(Combination()) is None
    assert why_not(Combination(engine="parallel_trainer", tp=2)) is None
    assert why_not(Combination(engine="parallel_trainer", tp=2, tp_plan=True)) is None


@pytest.mark.parametrize(
    ("speaker", "spelled"),
    [
        ("recipe", "--tp_size 2: .* set --tp_size 1"),
        ("launcher", "parallelism_config_tp_size: 2: .* set parallelism_config_tp_size: 1"),
        ("python", "tp_size=2: .* set tp_size=1"),
        ("command", "--tp 2: .* set --tp 1"),
    ],
)
def test_parameters_are_spelled_as_the_caller_writes_them(speaker, spelled):
    asked = Combination(engine="trainer", tp=2, tp_plan=False, family="bamba", planned=speaker == "command")
    with pytest.raises(UnsupportedModelError, match=f"^{spelled}$"), speaking(speaker):
        check_support(asked)
    assert why_not(asked, "cp") is None


def test_the_planner_spells_parameters_as_its_caller_does(capsys):
    asked = ["plan", "llama-3.1-8b", "--gpu", "V100-32GB", "--gpus", "8", "--precision", "fp16", "--json"]
    assert main(asked) == 0
    flags = [row["reason"] for row in json.loads(capsys.readouterr().out)["rejected"]]
    keywords = [row.reason for row in hfscale.plan("llama-3.1-8b", gpu="V100-32GB", gpus=8, precision="fp16").rejected]
    assert any("--precision fp16: fp16 scales the loss" in reason for reason in flags)
    assert any(": precision='fp16': fp16 scales the loss" in reason for reason in keywords)
    assert len(flags) == len(keywords)


def test_the_list_of_optimizers_is_that_of_the_planner():
    assert LISTS["trainer_optimizers"] == list(launchable.TRAINER_OPTIMIZERS)


def test_no_sentence_of_the_table_is_written_anywhere_else():
    package = Path(hfscale.__file__).parent
    sources = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    texts = {path: " ".join(node.value for node in ast.walk(tree) if is_text(node)) for path, tree in sources.items()}
    for rule in rules():
        for part in re.split(r"\{[^}]*\}", rule.why):
            words = " ".join(part.split()[:7])
            if len(words) > 25:
                assert [str(path) for path, text in texts.items() if words in text] == [], rule.name


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
