r"""Train a causal language model on preferences with TRL's DPOTrainer, under DDP, FSDP2 or DeepSpeed ZeRO.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 recipes/dpo/train.py

trains a small Llama to prefer the right one of two answers about the Python standard library. This command trains a
real model:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 recipes/dpo/train.py \
        --config recipes/dpo/qwen3-8b-full.yaml

The --config_file alone decides the strategy. Relaunching the same command resumes from the newest verified checkpoint.
Every flag of TRL's DPOConfig is accepted. With --use_peft the reference is the model with its adapters disabled, else
a second model. Copy this file and change it.
"""

from hfscale.recipe import (
    finish_run,
    load_model,
    load_records,
    load_tokenizer,
    one_process_prepares,
    parse_arguments,
    reference_model,
    run,
    start_run,
    train,
)
from trl import DPOTrainer


def main():
    model_args, data_args, scaling_args, training_args = parse_arguments(task="dpo")
    start = start_run(model_args, data_args, scaling_args, training_args)

    # One process prepares the tokenizer and the records; the others read its cache.
    with one_process_prepares("the records"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_records(data_args, training_args)

    model = load_model(model_args, training_args, tokenizer)
    trainer = DPOTrainer(
        model=model,
        ref_model=reference_model(model, model_args, training_args),
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
