r"""Train or fine-tune a causal language model under 7B parameters, data parallel (DDP).

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/ddp/train.py

trains a small Llama on the Python standard library. A real one:

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/ddp/train.py \
        --config recipes/ddp/smollm2-135m-full.yaml

Relaunching the same command continues from the newest verified checkpoint. Copy this file and change it.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    default_data_collator,
    set_seed,
)

from hfscale import (
    CommHealthCallback,
    LRScalingCallback,
    ScalingCallback,
    ScalingMetricsCallback,
    SpotCheckpointCallback,
    corpus,
)
from hfscale.arguments import blaming, check_evaluation
from hfscale.callbacks.progress import use_compact_progress
from hfscale.data import load_packed_datasets
from hfscale.entrypoint import check_output_dir, run
from hfscale.errors import UsageError
from hfscale.parsing import parse_arguments
from hfscale.resume import is_finished, keep_global_batch, resume_point
from hfscale.strategy import check_launch
from hfscale.summary import print_summary


def main():
    model_args, data_args, scaling_args, training_args = parse_arguments()
    check_launch(training_args)
    check_output_dir(training_args.output_dir)
    checkpoint = resume_point(training_args)
    keep_global_batch(training_args, checkpoint)
    set_seed(training_args.seed)  # the same initial weights on every rank, and at every launch

    # Tokenizer and text: the main process prepares, the others read its cache.
    with training_args.main_process_first(desc="text"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_packed_datasets(data_args, tokenizer, seed=training_args.seed)
    patience = scaling_args.early_stopping_patience
    check_evaluation(training_args, has_evaluation=eval_dataset is not None, patience=patience)

    # Model: trained weights stay in fp32 and compute in bf16; frozen ones, under LoRA, can be bf16 altogether.
    dtype = torch.bfloat16 if model_args.use_peft and training_args.bf16 else torch.float32
    model = load_model(model_args, tokenizer, dtype)
    if data_args.block_size > getattr(model.config, "max_position_embeddings", data_args.block_size):
        raise UsageError(
            f"--block_size {data_args.block_size} is longer than the model's {model.config.max_position_embeddings} "
            "positions: lower it"
        )
    if model_args.use_peft:
        model = add_lora(model, model_args)
        if training_args.activation_checkpointing or training_args.gradient_checkpointing:
            model.enable_input_require_grads()  # recomputed layers need an input that asks for a gradient

    scaling = ScalingCallback(
        comm_health=CommHealthCallback(),
        lr_scaling=LRScalingCallback(
            rule=scaling_args.lr_scaling_rule,
            base_global_batch_size=scaling_args.base_global_batch_size,
            block_size=data_args.block_size,
            base_block_size=scaling_args.base_block_size,
            critical_batch_size=scaling_args.critical_batch_size,
            warmup_scale=scaling_args.warmup_scale,
        ),
        spot_checkpoint=SpotCheckpointCallback(every_minutes=scaling_args.save_minutes),
        metrics=ScalingMetricsCallback(peak_tflops=scaling_args.peak_tflops),
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        data_collator=default_data_collator,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[scaling, *([EarlyStoppingCallback(patience)] if patience else [])],
    )
    use_compact_progress(trainer)
    # Gradients live in DDP's buckets, not in copies beside them: 4 bytes less per trained parameter.
    trainer.accelerator.ddp_handler.gradient_as_bucket_view = True

    if is_finished(trainer, checkpoint):
        return
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    if eval_dataset is not None:
        metrics |= trainer.evaluate()
    trainer.save_model()
    trainer.save_metrics("all", metrics, combined=False)
    print_summary(trainer, scaling, metrics)


def load_tokenizer(args):
    name = args.tokenizer_name or args.model_name_or_path or args.config_name
    if name is None:
        return corpus.default_tokenizer()
    flag = "--tokenizer_name" if args.tokenizer_name else "--model_name_or_path or --config_name (for its tokenizer)"
    with blaming(flag, name):
        return AutoTokenizer.from_pretrained(name)


def load_model(args, tokenizer, dtype):
    attention = {"attn_implementation": args.attn_implementation} if args.attn_implementation else {}
    if args.model_name_or_path:
        with blaming("--model_name_or_path", args.model_name_or_path):
            return AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=dtype, **attention)
    with blaming("--config_name", args.config_name):
        config = AutoConfig.from_pretrained(args.config_name) if args.config_name else corpus.default_config(tokenizer)
    if len(tokenizer) > config.vocab_size:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}: give the --tokenizer_name "
            "that belongs to it"
        )
    with blaming("--attn_implementation", args.attn_implementation):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)


def add_lora(model, args):
    config = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.lora_target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )
    with blaming("--lora_target_modules", args.lora_target_modules):
        return get_peft_model(model, config)


if __name__ == "__main__":
    run(main)
