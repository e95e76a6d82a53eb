r"""Train a causal language model on rewards of its completions with TRL's GRPOTrainer, under DDP, FSDP2 or ZeRO.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 recipes/grpo/train.py

trains a small Llama to answer questions about the Python standard library. This command trains a real model:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 recipes/grpo/train.py \
        --config recipes/grpo/qwen3-4b-full.yaml

The --config_file alone decides the strategy. Relaunching the same command resumes from the newest verified checkpoint.
Every flag of TRL's GRPOConfig is accepted. --reward_functions rewards.py:is_correct names Python functions of yours.
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
from trl import GRPOTrainer


def main():
    model_args, data_args, scaling_args, training_args, reward_args = parse_arguments(task="grpo")
    reward_functions = reward_args.load_functions()
    start = start_run(model_args, data_args, scaling_args, training_args)

    # One process prepares the tokenizer and the records; the others read its cache.
    with one_process_prepares("the records"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_records(data_args, training_args)

    model = load_model(model_args, training_args, tokenizer)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward_functions,
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
