"""Loading of the model and the tokenizer that a recipe's flags name, as the strategy needs them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import CONFIG_NAME
from transformers.utils.quantization_config import Mxfp4Config

from hfscale.checkpoint.load_once import weights_to_load
from hfscale.core import distributed
from hfscale.core.collectives import START
from hfscale.core.logging import get_logger
from hfscale.core.spelling import speaking, spelled
from hfscale.core.versions import is_fsdp_enabled, recomputes_activations
from hfscale.core.vocabulary import knows_no_text
from hfscale.errors import CheckpointError, UsageError
from hfscale.facts.experts import number_of_experts, set_expert_rules, unset_expert_rules
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import check_support
from hfscale.parallel.descriptions import describe_arguments, describe_config, quantization_of
from hfscale.parallel.weights import build_model, draw_weights
from hfscale.recipe import corpus
from hfscale.recipe.arguments import (
    DataArguments,
    RecipeTrainingArguments,
    RecipeTrainingMixin,
    errors_name_flag,
)
from hfscale.recipe.document_attention import cut_attention, is_dense
from hfscale.recipe.flattened_rows import cut_flattened_rows
from hfscale.recipe.kernels import Kernels, use_fast_document_attention
from hfscale.recipe.layout import (
    check_model,
    distributed_config,
    is_native,
)
from hfscale.recipe.modalities import freeze_beside_text, weigh_tokens_equally
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.recipe.router_bias import check_has_bias
from hfscale.recipe.router_loss import name_experts, set_router_loss
from hfscale.trainer.state import output_folder
from hfscale.trainer.strategies.native import native_layout
from hfscale.trainer.strategies.requested import requested

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import TrainingArguments

logger = get_logger(__name__)

_LARGE_MASK_MIB = 64
"""Size of an attention mask, one byte per pair of tokens, from which on a log line names other implementations on a
CPU; on a GPU one of any size does."""


@speaking("recipe")
def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `--tokenizer_name`, or the model's own, or the tokenizer of the embedded text.

    Args:
        args (`ModelArguments`): the names of the tokenizer and the model.

    Raises:
        UsageError: the tokenizer cannot be loaded, or there is none.
        StorageError: the cache of the embedded text's tokenizer cannot be written.
    """
    name = args.tokenizer_name or args.model_name_or_path or args.config_name
    if name is None:
        return corpus.default_tokenizer()
    flag = (
        "--tokenizer_name"
        if args.tokenizer_name
        else "--model_name_or_path or --config_name (for its tokenizer)"
    )
    with errors_name_flag(flag, name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name)
    if knows_no_text(tokenizer):
        raise UsageError(f"{flag} {name} has no tokenizer: give the --tokenizer_name of the model")
    return tokenizer


def load_config(
    args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    block_size: int,
    length_flag: str = "--block_size",
    reads_images: bool = False,
) -> PreTrainedConfig:
    """Load the model's config and check that the tokenizer and the sequences fit it.

    Args:
        args (`ModelArguments`): the name of the model or of the config.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the tokenizer to check. By default nothing is checked.
        block_size (`int`): tokens per sequence.
        length_flag (`str`): the flag that gave it, for the message.
        reads_images (`bool`): whether the model must read images.

    Raises:
        UsageError: the config cannot be loaded, or the model is too small for the tokenizer or the sequences, or reads
            no images as it must.
    """
    name = args.model_name_or_path or args.config_name
    with errors_name_flag(
        "--model_name_or_path" if args.model_name_or_path else "--config_name", name
    ):
        config: PreTrainedConfig
        if name:
            config = AutoConfig.from_pretrained(name)
        else:
            config = _embedded_config(tokenizer or load_tokenizer(args), reads_images=reads_images)
    if reads_images and type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UsageError(
            f"{name} is a {config.model_type}, which reads no images: name a vision-language model, or train text "
            "with recipes/sft"
        )
    text = config.get_text_config()
    if tokenizer is not None:
        _check_tokenizer(args, tokenizer, text.vocab_size)
    positions = getattr(text, "max_position_embeddings", block_size)
    if block_size > positions:
        raise UsageError(
            f"{length_flag} {block_size} is longer than the model's {positions} positions: lower it"
        )
    return config


def _embedded_config(tokenizer: PreTrainedTokenizerBase, *, reads_images: bool) -> PreTrainedConfig:
    """Return the config of the embedded model."""
    if not reads_images:
        return corpus.default_config(tokenizer)
    from hfscale.recipe import pictures  # it needs Pillow

    return pictures.default_config(tokenizer)


def _check_tokenizer(
    args: ModelArguments, tokenizer: PreTrainedTokenizerBase, vocabulary: int
) -> None:
    """Check that the model has a row for each token. The tokenizer that belongs to a model may have tokens of another
    one of its family that text never contains, such as Gemma 3's for images: of it the special tokens are checked."""
    is_its_own = bool(args.model_name_or_path) and args.tokenizer_name in (
        None,
        args.model_name_or_path,
    )
    largest = max(tokenizer.all_special_ids, default=0) if is_its_own else len(tokenizer) - 1
    if largest >= vocabulary:
        raise UsageError(
            f"the tokenizer has the token {largest}, and the model's {vocabulary} end with {vocabulary - 1}: give the "
            "--tokenizer_name of this model, or resize the model (model.resize_token_embeddings) and save it"
        )


def check_same_experts(checkpoint: str | None, args: ModelArguments) -> None:
    """Check, before weights are loaded, that a checkpoint has as many experts as the model that resumes from it.

    Args:
        checkpoint (`str`, *optional*): the checkpoint to resume from; with None nothing is checked.
        args (`ModelArguments`): the name of the model or of the config.

    Raises:
        CheckpointError: the numbers differ.
    """
    name = args.model_name_or_path or args.config_name
    if checkpoint is None or name is None or not (Path(checkpoint) / CONFIG_NAME).is_file():
        return
    with errors_name_flag(
        "--model_name_or_path" if args.model_name_or_path else "--config_name", name
    ):
        wanted = number_of_experts(AutoConfig.from_pretrained(name).get_text_config())
    stored = number_of_experts(AutoConfig.from_pretrained(checkpoint).get_text_config())
    if stored != wanted:
        raise CheckpointError(
            f"{checkpoint} has {stored or 'no'} experts per layer, and {name} has {wanted or 'none'}: resume with the "
            "model of the checkpoint, or start from scratch with --resume_from_checkpoint false"
        )


@speaking("recipe")
def load_model(
    model_args: ModelArguments,
    training_args: "TrainingArguments",
    tokenizer: PreTrainedTokenizerBase | None,
    data_args: DataArguments | None = None,
    *,
    layout: ParallelLayout | None = None,
    empty: bool = False,
) -> "PreTrainedModel | PeftModel":
    """Load the model of `--model_name_or_path`, or initialise one of `--config_name` or the embedded default.

    With `data_args` the model is made ready for `Trainer` or `ParallelTrainer`: it has the adapters of `--use_peft`,
    and cuts attention where `--document_attention` asks for it. TRL's trainers do both themselves.

    Args:
        model_args (`ModelArguments`): the name of the model, the attention and the adapters.
        training_args (`TrainingArguments`): precision and seed; with TRL also the length of a sequence.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): the tokenizer, which must fit the model. With None the model
            is not compared with one.
        data_args (`DataArguments`, *optional*): the flags of the data after `load_datasets`, if the trainer is none of
            TRL's.
        layout (`ParallelLayout`, *optional*): the parallel axes, where Accelerate or transformers split the model.
        empty (`bool`): whether to create the model on the meta device, for `ParallelTrainer`, which then reads each
            rank's part of the weights.

    Returns:
        `PreTrainedModel` or `PeftModel`: the model; equal initial weights on every rank and every layout.

    Raises:
        UsageError: the model cannot be loaded, is too small for the tokenizer or the sequences, does not support the
            attention, or has none of the modules to adapt; or `load_datasets` has not been called before.
        LayoutError: the heads or the sequence cannot be split as the layout asks.
        UnsupportedModelError: its attention cannot be cut between documents.
        MissingDependencyError: `--use_peft` is given, and PEFT is not installed or too old.
    """
    is_dry_run = empty and tokenizer is None  # of ParallelTrainer, for which no data is read
    if data_args is not None and not is_dry_run:
        _check_rows_are_known(data_args)
    length, flag = _sequence_length(training_args, data_args)
    reads_images = isinstance(training_args, RecipeTrainingMixin) and training_args.reads_images
    config = load_config(
        model_args, tokenizer, block_size=length, length_flag=flag, reads_images=reads_images
    )
    if isinstance(training_args, RecipeTrainingArguments):
        set_router_loss(config, training_args.router_aux_loss_coef)
        check_has_bias(config, training_args.router_bias_update_rate)
    else:
        name_experts(config)
    if reads_images:
        described = replace(describe_config(config), images=True)
        check_support(replace(described, strategy=requested(training_args).name), "images")
    if model_args.load_in_4bit:
        check_support(replace(describe_config(config), method="qlora"), "checkpoint_format")
    if layout is not None:
        check_model(layout, config, training_args, block_size=length)
    if model_args.use_peft and is_native(layout):
        check_adapted_modules(model_args, config)
    if empty:
        model = load_empty_model(model_args, config, training_args)
    else:
        set_expert_rules(config.get_text_config())
        model = load_weights(model_args, config, training_args, layout=layout)
        unset_expert_rules(model.config.get_text_config())
        if isinstance(training_args, RecipeTrainingMixin):
            training_args.choose_trained_parts(model, use_peft=model_args.use_peft)
        else:
            freeze_beside_text(model)
    weigh_tokens_equally(model)
    if data_args is None:
        if isinstance(training_args, RecipeTrainingMixin) and training_args.flattens_rows:
            cut_flattened_rows(model, model_args, training_args)
        return model
    if data_args.document_attention and model_args.attn_implementation is None and not empty:
        use_fast_document_attention(model, Kernels.here(training_args))
    cut_document_attention(model, data_args, training_args, layout)
    return add_lora(model, model_args, training_args) if model_args.use_peft else model


def _check_rows_are_known(data_args: DataArguments) -> None:
    """Check that `load_datasets` has decided whether attention is cut, which depends on the data.

    Without this, a model that is loaded first would be trained without the cut that its rows need.
    """
    if data_args.document_attention is None:
        raise UsageError(
            "load_model does not know yet whether attention is cut between documents: call load_datasets first, "
            "or, with a dataset of your own, give --document_attention true or false"
        )


def _sequence_length(
    training_args: "TrainingArguments", data_args: DataArguments | None
) -> tuple[int, str]:
    """Return the length of a sequence in tokens, and the flag that gives it."""
    if data_args is not None:
        return data_args.block_size, "--block_size"
    options = vars(training_args)
    name = "max_length" if "max_length" in options else "max_completion_length"
    return options[name] or 1, f"--{name}"  # --max_length may be None: no limit


def load_weights(
    args: ModelArguments,
    config: PreTrainedConfig,
    training_args: "TrainingArguments",
    *,
    layout: ParallelLayout | None = None,
) -> PreTrainedModel:
    """Read the weights of `--model_name_or_path` into a new model, or draw them from the run's seed.

    Initial weights are the same on every layout. Trained weights are in fp32 and compute in bf16 (or are cast by
    DeepSpeed, which keeps fp32 master weights); the frozen base model of LoRA adapters is in bf16 or in 4 bits. ZeRO-3
    and tensor parallelism give each rank its part while the weights are read; under FSDP2 rank 0 sends the shards when
    training begins (`fsdp_cpu_ram_efficient_loading`).

    Args:
        args (`ModelArguments`): the name of the model, the attention and the adapters.
        config (`PreTrainedConfig`): the model's config.
        training_args (`TrainingArguments`): precision and seed.
        layout (`ParallelLayout`, *optional*): the parallel axes, if the recipe has any.

    Raises:
        UsageError: the checkpoint cannot be loaded, or the model does not support the attention.
    """
    options = _model_options(args, training_args)
    auto_class = auto_class_of(training_args)
    sharding = distributed_config(layout, training_args) if layout is not None else None
    if (
        args.model_name_or_path
        and not args.load_in_4bit
        and is_fsdp_enabled()
        and distributed.rank() > 0
    ):
        # Rank 0 will send the shards, but transformers 5.23 would read the full checkpoint on every rank.
        return build_model(config, seed=training_args.seed, auto_class=auto_class, **options)
    if args.model_name_or_path:
        # gpt-oss, whose weights cannot be trained in 4 bits
        is_mxfp4 = quantization_of(config) == "mxfp4"
        if args.load_in_4bit:
            options |= _four_bits(training_args)
        elif is_mxfp4:
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        model = _read_weights(args, config, training_args, auto_class, options, sharding)
        if is_mxfp4:
            # It would save the weights under the names of those in 4 bits.
            model._weight_conversions = None  # type: ignore[assignment]
        return model
    with errors_name_flag("--attn_implementation", args.attn_implementation):
        if sharding is None:
            return build_model(config, seed=training_args.seed, auto_class=auto_class, **options)
        return _build_sharded(config, training_args, sharding, options)


def _read_weights(
    args: ModelArguments,
    config: PreTrainedConfig,
    training_args: "TrainingArguments",
    auto_class: Any,
    options: dict[str, Any],
    sharding: Any,
) -> PreTrainedModel:
    """Read the weights of `--model_name_or_path`, with `--load_once` from this node's copy."""
    assert args.model_name_or_path is not None
    name = args.model_name_or_path
    # Under FSDP rank 0 alone reads, and sends the shards
    if not is_fsdp_enabled() or args.load_in_4bit:
        name = weights_to_load(training_args, name)
    with errors_name_flag("--model_name_or_path", args.model_name_or_path):
        model: PreTrainedModel = auto_class.from_pretrained(
            name, config=config, distributed_config=sharding, **options
        )
    if name != args.model_name_or_path:
        # Cards and adapters name the model by it
        model.name_or_path = model.config.name_or_path = args.model_name_or_path
    return model


def draw_model(config: PreTrainedConfig, *, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model with weights that are drawn from a seed, on every rank.

    `load_weights` leaves that to Accelerate, which sends the weights of the model that is trained, and of no other.

    Args:
        config (`PreTrainedConfig`): the config of the model.
        seed (`int`): equal seeds give equal weights.
        dtype (`torch.dtype`): type of the parameters.
    """
    model = build_model(config, seed=seed, dtype=dtype)
    if is_fsdp_enabled():
        draw_weights(model, seed=seed)
    return model


def load_empty_model(
    args: ModelArguments, config: PreTrainedConfig, training_args: "TrainingArguments"
) -> PreTrainedModel:
    """Create the model of `config` on the meta device, for a trainer that loads each rank's part of the weights.

    Args:
        args (`ModelArguments`): the attention and whether adapters are trained.
        config (`PreTrainedConfig`): the model's config.
        training_args (`TrainingArguments`): the precision.

    Raises:
        UsageError: the model does not support the attention.
    """
    with errors_name_flag("--attn_implementation", args.attn_implementation), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, **_model_options(args, training_args)
        )
        return model


def add_lora(
    model: PreTrainedModel, args: ModelArguments, training_args: "TrainingArguments"
) -> "PeftModel":
    """Add LoRA adapters to a model and freeze everything else. The same seed gives the same adapters.

    Args:
        model (`PreTrainedModel`): the base model.
        args (`ModelArguments`): rank, scaling, dropout and target modules of the adapters.
        training_args (`TrainingArguments`): the seed, and whether activations are checkpointed.

    Raises:
        UsageError: the model has none of the target modules.
        MissingDependencyError: PEFT is not installed or too old.
    """
    has_experts = number_of_experts(model.config.get_text_config()) is not None
    layout = native_layout(model)
    config = args.lora_config(model, attention_only=has_experts and layout is not None)
    assert config is not None  # it is asked for
    has_replicas = layout is not None and layout.dp_replicate > 1
    from peft import get_peft_model

    set_seed(training_args.seed)  # the state of the generator after loading depends on the strategy
    with _errors_name_adapters(args), _adapters_of_whole_matrices(has_replicas=has_replicas):
        adapted = get_peft_model(model, config)
    if recomputes_activations(training_args):
        # Recomputed layers need an input that requires a gradient
        adapted.enable_input_require_grads()
    return adapted


def check_adapted_modules(args: ModelArguments, config: PreTrainedConfig) -> None:
    """Check, before weights are loaded, that a model which transformers shards has the modules to adapt.

    Args:
        args (`ModelArguments`): the target modules of the adapters.
        config (`PreTrainedConfig`): the model's config.

    Raises:
        UsageError: the model has none of the target modules.
        MissingDependencyError: PEFT is not installed or too old.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        adapters = args.lora_config(
            model, attention_only=number_of_experts(config.get_text_config()) is not None
        )
        assert adapters is not None  # they are asked for
        from peft import get_peft_model

        with _errors_name_adapters(args):
            get_peft_model(model, adapters)


@contextmanager
def _adapters_of_whole_matrices(*, has_replicas: bool) -> Iterator[None]:
    """Let adapters have the shape of the matrix that a rank computes with, where transformers shards it over replicas.

    PEFT 0.21 takes the shape of a rank's shard unless the only dimension of its mesh is `fsdp`
    (`_get_in_out_features`; huggingface/peft#3578).
    """
    if not has_replicas:
        yield
        return
    from peft.tuners.lora import layer

    layers: Any = layer
    of_shard = layers._get_in_out_features

    def of_matrix(module: nn.Module) -> Any:
        if isinstance(module, nn.Linear):
            return module.in_features, module.out_features
        return of_shard(module)

    layers._get_in_out_features = of_matrix
    try:
        yield
    finally:
        layers._get_in_out_features = of_shard


@contextmanager
def _errors_name_adapters(args: ModelArguments) -> Iterator[None]:
    """Turn what PEFT raises about a config of adapters into a UsageError that names the flag."""
    with errors_name_flag("--lora_target_modules", args.lora_target_modules or "all-linear"):
        try:
            yield
        except ValueError as error:
            if "lora_dropout" not in str(error):
                raise
            given = spelled("lora_dropout", args.lora_dropout)
            modules = spelled("lora_target_modules")
            raise UsageError(
                f"{given} cannot be used with adapters of stacked experts, for which PEFT has no dropout: leave it "
                f"out, or name {modules} without the experts"
            ) from None


def cut_document_attention(
    model: "PreTrainedModel | PeftModel",
    data_args: DataArguments,
    training_args: "TrainingArguments",
    layout: ParallelLayout | None = None,
    *,
    device_type: str | None = None,
) -> None:
    """Let a model cut attention at the boundaries of packed documents, where `--document_attention` asks for it.

    Args:
        model (`PreTrainedModel` or `PeftModel`): the model; changed in place where its attention needs it.
        data_args (`DataArguments`): the flags of packing, with their defaults set by `load_packed_datasets`.
        training_args (`TrainingArguments`): the rows of a micro-batch.
        layout (`ParallelLayout`, *optional*): the parallel axes of Accelerate, if the recipe has any.
        device_type (`str`, *optional*): where the run computes, such as `cuda`. Default: the device of the arguments.

    Raises:
        UsageError: the attention implementation does not cut, or ranks that share a sequence cannot.
        UnsupportedModelError: the architecture cannot be cut.
    """
    rows = replace(
        describe_arguments(training_args),
        cp=layout.cp if layout is not None else 1,
        packing=data_args.packing,
        document_attention=data_args.document_attention,
    )
    check_support(rows, "cp")
    if not data_args.document_attention:
        return
    name = cut_attention(model)
    if isinstance(training_args, RecipeTrainingMixin):
        training_args.cuts_attention = True
    mask_mib = training_args.per_device_train_batch_size * data_args.block_size**2 / 2**20
    is_on_gpu = (device_type or training_args.device.type) != "cpu"
    if is_dense(name) and (is_on_gpu or mask_mib >= _LARGE_MASK_MIB):
        logger.warning(
            "%s attention is cut by a mask of %.3g MiB per micro-batch, and computes what the mask hides: give "
            "--attn_implementation flash_attention_2 or flex_attention, which skip it",
            name,
            mask_mib,
        )


def auto_class_of(training_args: "TrainingArguments") -> Any:
    """Return the class of transformers that finds the class of a run's model.

    Args:
        training_args (`TrainingArguments`): those of a recipe whose records have images, or any others.
    """
    if isinstance(training_args, RecipeTrainingMixin) and training_args.reads_images:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _model_options(args: ModelArguments, training_args: "TrainingArguments") -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": torch.bfloat16 if args.use_peft and training_args.bf16 else torch.float32
    }
    if args.attn_implementation:
        options["attn_implementation"] = args.attn_implementation
    return options


def _four_bits(training_args: "TrainingArguments") -> dict[str, Any]:
    """QLoRA's NF4 (Dettmers 2023, arXiv 2305.14314), stored as bf16 because FSDP2 and ZeRO-3 do not shard integers."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    is_replicated = requested(training_args).is_replicated
    placement = {"device_map": {"": PartialState().local_process_index}} if is_replicated else {}
    return {"quantization_config": quantization, **placement}


def _build_sharded(
    config: PreTrainedConfig,
    training_args: "TrainingArguments",
    sharding: Any,
    options: dict[str, Any],
) -> PreTrainedModel:
    """Initialise a model under tensor parallelism: rank 0 saves it first, since transformers shards while it reads."""
    folder = output_folder(training_args) / ".initial-weights"
    START.on_rank_0(
        "write initial weights",
        lambda: build_model(config, seed=training_args.seed, **options).save_pretrained(folder),
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, distributed_config=sharding, **options
    )
    START.barrier("initial weights are read")
    if distributed.rank() == 0:
        shutil.rmtree(folder)
    return model
