"""Sizes of the axes from flags and the launcher's environment, and the errors where they do not fit."""

import pytest
import torch
from simulated_arguments import simulated_arguments
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma4TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from hfscale import ParallelArguments
from hfscale.errors import CheckpointError, LayoutError, MissingDependencyError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.recipe.compatibility import check_compatibility
from hfscale.recipe.layout import NativeParallelLayout, check_model, distributed_config, set_up_parallelism
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.models import check_adapted_modules, check_same_experts
from hfscale.recipe.router_loss import set_router_loss

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}
DDP = {"WORLD_SIZE": "8"}


def sizes(**axes):
    return {f"PARALLELISM_CONFIG_{axis.upper()}_SIZE": str(size) for axis, size in axes.items()}


@pytest.mark.parametrize(
    ("environ", "flags", "layout"),
    [
        (DDP, {}, {"dp_replicate": 8}),
        (FSDP, {}, {"dp_shard": 8}),
        (FSDP | sizes(dp_replicate=2, dp_shard=4), {}, {"dp_replicate": 2, "dp_shard": 4}),
        (FSDP | sizes(dp_replicate=2, dp_shard=4), {"dp_replicate_size": 4}, {"dp_replicate": 4, "dp_shard": 2}),
        (FSDP | sizes(dp_shard=2, cp=4), {}, {"dp_shard": 2, "cp": 4}),
        (FSDP, {"cp_size": 2}, {"dp_shard": 4, "cp": 2}),
        (ZERO, {}, {"dp_shard": 8}),
        (ZERO | sizes(dp_replicate=1, dp_shard=1, sp=4), {}, {"dp_shard": 2, "cp": 4}),
        (ZERO, {"cp_size": 8}, {"cp": 8}),
    ],
)
def test_flags_override_the_config_and_dp_shard_takes_the_remaining_ranks(environ, flags, layout):
    assert set_up_parallelism(ParallelArguments(**flags), simulated_arguments(), dict(environ)) == ParallelLayout(
        **layout
    )


@pytest.mark.parametrize(
    ("environ", "flags", "layout"),
    [
        (DDP | sizes(dp_shard=4, tp=2), {}, {"dp_shard": 4, "tp": 2}),
        (DDP, {"tp_size": 8}, {"tp": 8}),
        (DDP, {"tp_size": 2, "dp_replicate_size": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        (DDP, {"ep_size": 4}, {"dp_shard": 8, "ep": 4}),
        (DDP, {"ep_size": 1}, {"dp_shard": 8}),
        (DDP, {"fsdp_size": 8}, {"dp_shard": 8}),
        (DDP, {"dp_replicate_size": 2}, {"dp_replicate": 2, "dp_shard": 4}),
        (DDP, {"fsdp_size": 4, "dp_replicate_size": 2, "ep_size": 2}, {"dp_replicate": 2, "dp_shard": 4, "ep": 2}),
        (DDP, {"tp_size": 2, "ep_size": 4, "fsdp_size": 4}, {"dp_shard": 4, "tp": 2, "ep": 4}),
        (DDP, {"ep_size": 2, "dp_shard_size": 8}, {"dp_shard": 8, "ep": 2}),
    ],
)
def test_transformers_shards_the_model_where_its_sizes_are_given(environ, flags, layout):
    args = simulated_arguments(save_strategy="steps")
    found = set_up_parallelism(ParallelArguments(**flags), args, dict(environ))
    assert found == NativeParallelLayout(**layout)
    assert args.save_only_model  # Trainer would refuse such a model; `SpotCheckpointCallback` saves the complete state
    config = distributed_config(found, args)
    assert (config.tp_size, config.fsdp_size, config.dp_replicate_size, config.ep_size) == (
        found.tp,
        found.dp_shard,
        found.dp_replicate,
        found.ep,
    )


def test_one_process_loads_the_model_as_it_is():
    found = set_up_parallelism(ParallelArguments(ep_size=1), simulated_arguments(world_size=1), {})
    assert distributed_config(found, simulated_arguments(world_size=1)) is None


def test_accelerate_gets_the_sizes():
    args = simulated_arguments()
    set_up_parallelism(ParallelArguments(dp_replicate_size=2), args, FSDP)
    assert (args.parallelism_config.dp_replicate_size, args.parallelism_config.dp_shard_size) == (2, 4)
    args = simulated_arguments()
    set_up_parallelism(ParallelArguments(cp_size=2), args, ZERO)
    assert (args.parallelism_config.sp_size, args.parallelism_config.data_parallel_size) == (2, 4)


def test_transformers_gets_the_sizes():
    config = distributed_config(NativeParallelLayout(dp_replicate=2, dp_shard=2, tp=2), simulated_arguments())
    assert config.fsdp_mixed_precision
    assert distributed_config(ParallelLayout(dp_shard=8), simulated_arguments()) is None


def test_trainer_accepts_the_saves_of_tensor_parallel_runs():
    """`SpotCheckpointCallback` then saves the complete state, at the same steps."""
    args = simulated_arguments(save_strategy="steps")
    set_up_parallelism(ParallelArguments(tp_size=2), args, dict(DDP))
    assert (args.save_strategy, args.save_only_model) == ("steps", True)


@pytest.mark.parametrize(
    ("environ", "flags", "changes", "message"),
    [
        (FSDP | sizes(dp_replicate=2, dp_shard=4), {}, {"world_size": 2}, "needs 8 processes, but the world has 2"),
        (
            FSDP,
            {"dp_shard_size": 3},
            {},
            "needs 3 processes, but the world has 8: start 3 processes or set dp_shard=8",
        ),
        (FSDP, {"tp_size": 2}, {}, "tp_size 2 under FSDP: .* launch with accelerate_configs/fsdp2_tp.yaml"),
        (ZERO, {"tp_size": 2}, {}, "tp_size 2 under ZERO"),
        (ZERO, {"dp_shard_size": 2}, {}, "--dp_shard_size are FSDP2's, not ZERO's"),
        (DDP, {"dp_shard_size": 2}, {}, "are FSDP2's, not DDP's: launch with accelerate_configs/fsdp2_hsdp.yaml"),
        (FSDP, {"ep_size": 2}, {}, "ep_size 2 under FSDP: .* launch with accelerate_configs/native.yaml"),
        (ZERO, {"fsdp_size": 8}, {}, "fsdp_size 8 under ZERO: "),
        (
            DDP,
            {"ep_size": 3},
            {},
            "ep_size 3 must divide the 8 ranks of one replica: choose one of 1, 2, 4, 8$",
        ),
        (
            DDP,
            {"ep_size": 8, "dp_replicate_size": 2},
            {},
            "ep_size 8 must divide the 4 ranks .*: choose one of 1, 2, 4$",
        ),
        (DDP, {"tp_size": 4, "ep_size": 2}, {}, "ep_size 2 .* be a multiple of tp_size 4: choose one of 4, 8$"),
        (DDP, {"fsdp_size": 3}, {}, "fsdp_size 3 .* the world has 8"),
        (DDP, {"fsdp_size": 4, "dp_shard_size": 8}, {}, "--fsdp_size 4 and --dp_shard_size 8"),
        (
            DDP,
            {"cp_size": 2},
            {},
            "cp_size 2 needs FSDP2 or DeepSpeed, .* launch with .*fsdp2_cp.yaml",
        ),
        (FSDP, {"cp_size": 2}, {"use_cpu": True}, "cp_size 2 under FSDP2 on a CPU: torch has ring attention for GPUs"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(environ, flags, changes, message):
    with pytest.raises(UsageError, match=message):
        set_up_parallelism(ParallelArguments(**flags), simulated_arguments(**changes), dict(environ))


def test_sizes_are_at_least_1():
    with pytest.raises(UsageError, match=r"^--tp_size is 0"):
        ParallelArguments(tp_size=0)


LLAMA = LlamaConfig(num_attention_heads=32, num_key_value_heads=8)


@pytest.mark.parametrize(
    ("layout", "environ", "config", "block_size", "message"),
    [
        ({"tp": 16}, DDP, LLAMA, 64, "tp_size 16 does not divide the model's 32 .* 8 .*: choose one of 1, 2, 4, 8$"),
        ({"tp": 3}, DDP, LLAMA, 64, "tp_size 3 does not divide"),
        ({"cp": 3}, ZERO, LLAMA, 66, "cp_size 3 under DeepSpeed does not divide the model's 32 attention heads"),
        ({"cp": 4}, FSDP, LLAMA, 100, "--block_size to be a multiple of 8: 100 is not, 96 is"),
    ],
)
def test_heads_and_sequences_that_do_not_divide_are_refused(monkeypatch, layout, environ, config, block_size, message):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LayoutError, match=message):
        check_model(ParallelLayout(**layout), config, simulated_arguments(), block_size=block_size)


def test_key_value_heads_that_differ_between_layers_are_all_divided(monkeypatch):
    """Those of Gemma 4 with attention to all tokens are fewer than the others."""
    for name, value in DDP.items():
        monkeypatch.setenv(name, value)
    config = Gemma4TextConfig(num_key_value_heads=4, num_global_key_value_heads=2, attention_k_eq_v=True)
    check_model(ParallelLayout(tp=2), config, simulated_arguments(), block_size=64)
    with pytest.raises(LayoutError, match=r"8 attention heads and 2 or 4 key-value heads: choose one of 1, 2$"):
        check_model(ParallelLayout(tp=4), config, simulated_arguments(), block_size=64)


@pytest.mark.parametrize("config", [Qwen3MoeConfig(num_experts=6), MixtralConfig(num_local_experts=6)])
def test_experts_that_do_not_divide_are_refused(config):
    check_model(NativeParallelLayout(dp_shard=8, ep=2), config, simulated_arguments(), block_size=64)
    with pytest.raises(LayoutError, match=r"ep_size 4 .* the model's 6 experts: choose one of 1, 2, 3, 6$"):
        check_model(NativeParallelLayout(dp_shard=8, ep=4), config, simulated_arguments(), block_size=64)


def test_a_checkpoint_with_another_number_of_experts_is_refused(tmp_path):
    for name, experts in (("model", 8), ("checkpoint-1", 4)):
        Qwen3MoeConfig(num_experts=experts).save_pretrained(tmp_path / name)
    model = ModelArguments(config_name=str(tmp_path / "model"))
    check_same_experts(None, model)
    check_same_experts(str(tmp_path / "model"), model)
    with pytest.raises(CheckpointError, match=r"checkpoint-1 has 4 experts per layer, and .*model has 8: "):
        check_same_experts(str(tmp_path / "checkpoint-1"), model)


def test_modules_to_adapt_are_looked_for_before_weights_are_loaded():
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, head_dim=8, num_experts=4
    )
    check_adapted_modules(ModelArguments(use_peft=True), config)
    experts = ["q_proj", "gate_proj", "up_proj"]
    check_adapted_modules(ModelArguments(use_peft=True, lora_target_modules=experts), config)
    with pytest.raises(UsageError, match=r"gate_proj'\] cannot be used: .* without also targeting up_proj"):
        check_adapted_modules(ModelArguments(use_peft=True, lora_target_modules=experts[:2]), config)
    with pytest.raises(UsageError, match=r"--lora_target_modules .*no_such"):
        check_adapted_modules(ModelArguments(use_peft=True, lora_target_modules=["no_such"]), config)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Qwen3MoeConfig, ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (DeepseekV3Config, ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]),
    ],
)
def test_the_attention_is_adapted_where_transformers_shards_a_mixture_of_experts(kind, names):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind(num_hidden_layers=1))
    args = ModelArguments(use_peft=True)
    assert sorted(args.lora_config(model, attention_only=True).target_modules) == names
    assert args.lora_config(model).target_modules == "all-linear"


def test_a_family_without_a_load_balancing_loss_is_named():
    config = Qwen3MoeConfig()
    set_router_loss(config, None)
    assert not config.output_router_logits
    set_router_loss(config, 0.25)
    assert (config.output_router_logits, config.router_aux_loss_coef) == (True, 0.25)
    with pytest.raises(UsageError, match=r"--router_aux_loss_coef 0.25: deepseek_v3 has no load-balancing loss"):
        set_router_loss(DeepseekV3Config(), 0.25)


def test_an_older_transformers_is_named(monkeypatch):
    monkeypatch.setattr("hfscale.core.versions.installed", lambda package: "5.22.0")
    set_up_parallelism(ParallelArguments(fsdp_size=8), simulated_arguments(), dict(DDP))
    with pytest.raises(MissingDependencyError, match=r"ep_size: .* transformers 5\.23 or later \(5\.22\.0"):
        set_up_parallelism(ParallelArguments(ep_size=8), simulated_arguments(), dict(DDP))


def test_sizes_that_divide_pass_and_a_model_without_heads_is_refused():
    check_model(ParallelLayout(tp=8), LLAMA, simulated_arguments(), block_size=64)
    with pytest.raises(UsageError, match="tp_size 2: transformers has no tensor-parallel plan for mamba"):
        check_model(ParallelLayout(tp=2), MambaConfig(), simulated_arguments(), block_size=64)


def offload(device, path=None):
    gather = {"stage3_gather_16bit_weights_on_model_save": True}
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": device, "nvme_path": path}} | gather}


QLORA = {"use_peft": True, "load_in_4bit": True, "model_name_or_path": "some/model"}


class TestPairs:
    """Combinations of methods, strategies and machines that are refused. The test machine has no GPU."""

    def check(self, monkeypatch, environ, model, args, layout=None):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        check_compatibility(ModelArguments(**model), args, layout)

    @pytest.fixture
    def gpu(self, monkeypatch):
        """Make these checks find a GPU and bitsandbytes."""
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("hfscale.core.versions.is_at_least", lambda package, minimum: True)

    def test_qlora_without_a_gpu(self, monkeypatch):
        with pytest.raises(UsageError, match="--load_in_4bit true needs a CUDA GPU"):
            self.check(monkeypatch, FSDP, QLORA, simulated_arguments())

    def test_qlora_without_adapters(self):
        with pytest.raises(UsageError, match=r"--load_in_4bit .*: give --use_peft true"):
            ModelArguments(load_in_4bit=True, model_name_or_path="some/model")

    def test_qlora_on_nvme(self, monkeypatch, gpu, tmp_path):
        args = simulated_arguments(ds=offload("nvme", str(tmp_path)))
        with pytest.raises(UsageError, match=r"--load_in_4bit true and ZeRO-3 .* on NVMe: .*zero3_offload.yaml"):
            self.check(monkeypatch, ZERO, QLORA, args)

    def test_qlora_under_tensor_parallelism(self, monkeypatch, gpu):
        with pytest.raises(UsageError, match="--load_in_4bit true and --tp_size 2: "):
            self.check(monkeypatch, DDP, QLORA, simulated_arguments(), ParallelLayout(tp=2))

    def test_qlora_with_its_requirements_passes(self, monkeypatch, gpu):
        self.check(monkeypatch, FSDP, QLORA, simulated_arguments(), ParallelLayout(dp_shard=8))

    def test_fsdp1(self, monkeypatch):
        with pytest.raises(UsageError, match="fsdp_version 1: "):
            self.check(monkeypatch, FSDP | {"FSDP_VERSION": "1"}, {}, simulated_arguments())

    @pytest.mark.parametrize(("environ", "layout"), [(FSDP, None), (ZERO, None), (DDP, ParallelLayout(tp=2))])
    def test_compressed_gradients_without_ddp(self, monkeypatch, environ, layout):
        compressed = simulated_arguments(gradient_compression="topk")
        with pytest.raises(UsageError, match="--gradient_compression topk works on DDP's gradients: launch with"):
            self.check(monkeypatch, environ, {}, compressed, layout)

    def test_lora_under_tensor_parallelism(self, monkeypatch):
        with pytest.raises(UsageError, match=r"--use_peft true and tensor parallelism .*: "):
            self.check(monkeypatch, DDP, {"use_peft": True}, simulated_arguments(), ParallelLayout(tp=2))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"optimizer": {"type": "OneBitAdam"}}, r"OneBitAdam .* --gradient_compression onebit_adam$"),
            ({"tensor_parallel": {"autotp_size": 2}}, r"autotp_size 2 .* recipes/tp_pp/train\.py .* --tp_size 2$"),
            (
                offload("nvme", "/no/such/disk"),
                "offload_param to nvme_path /no/such/disk: ",
            ),
            (offload("nvme"), "offload_param to nvme_path None"),
            ({"zero_optimization": {"stage": 3}}, "stage3_gather_16bit_weights_on_model_save, .* set it to true"),
        ],
    )
    def test_deepspeed_on_this_machine(self, monkeypatch, config, message):
        args = simulated_arguments(use_cpu=True, ds=config)
        with pytest.raises(UsageError, match=message):
            self.check(monkeypatch, ZERO, {}, args)

    def test_context_parallelism_without_sdpa(self, monkeypatch):
        model = {"attn_implementation": "flash_attention_2"}
        with pytest.raises(UsageError, match=r"cp_size 2 .*: give --attn_implementation sdpa"):
            self.check(monkeypatch, FSDP, model, simulated_arguments(), ParallelLayout(cp=2))
