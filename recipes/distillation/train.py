r"""Train a causal language model to predict as a larger one does, with TRL's DistillationTrainer.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 recipes/distillation/train.py

trains a small Llama on prompts about the Python standard library, with a teacher of random weights: it only shows that
everything works. This command trains a real model:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 recipes/distillation/train.py \
        --config recipes/distillation/qwen3-0.6b-full.yaml

The --config_file alone decides the strategy: DDP, FSDP2 or ZeRO. Relaunching the same command resumes from the newest
verified checkpoint. Every flag of TRL's DistillationConfig is accepted; --teacher_model_name_or_path names the
teacher, --teacher_dtype its format, and --shard_teacher says whether the GPUs share its weights.
Copy this file and change it.
"""

from hfscale.recipe import (
    finish_run,
    load_model,
    load_records,
    load_tokenizer,
    one_process_prepares,
    parse_arguments,
    run,
    start_run,
    train,
)
from trl import DistillationTrainer


def main():
    model_args, data_args, scaling_args, training_args = parse_arguments(task="distillation")
    start = start_run(model_args, data_args, scaling_args, training_args)

    # One process prepares the tokenizer and the records; the others read its cache.
    with one_process_prepares("the records"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_records(data_args, training_args)

    model = load_model(model_args, training_args, tokenizer)
    trainer = DistillationTrainer(
        model=model,
        teacher_model=training_args.load_teacher(model),
        args=training_args,
        peft_config=model_args.lora_config(model),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=start.callbacks,  # ScalingCallback, and those that flags ask for
    )
    metrics = train(trainer, start.checkpoint)
    if metrics is None:  # an earlier launch has completed the run
        return
    if eval_dataset is not None:
        metrics |= trainer.evaluate()
    finish_run(trainer, metrics, merge_adapters=model_args.merge_adapters)


if __name__ == "__main__":
    run(main)
