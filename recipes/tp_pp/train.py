r"""Train or fine-tune a causal language model of more than 70B parameters: tensor x pipeline x data parallel.

    accelerate launch --config_file accelerate_configs/tp_pp.yaml --num_processes 8 recipes/tp_pp/train.py \
        --tp_size 2 --pp_size 2 --gradient_accumulation_steps 4

trains a small Llama on the Python standard library. This command trains a real model:

    accelerate launch --config_file accelerate_configs/tp_pp.yaml --num_processes 64 recipes/tp_pp/train.py \
        --config recipes/tp_pp/llama-3.3-70b-full.yaml

This command shows, without any GPU, what a rank of such a run holds and how long it waits:

    python recipes/tp_pp/train.py --config recipes/tp_pp/llama-3.3-70b-full.yaml --dry_run 64

Each rank reads or initialises its own part of the weights. Relaunching the same command resumes from the newest
verified checkpoint, on the same or another layout. Copy this file and change it.
"""

from hfscale import ParallelArguments, ParallelTrainer
from hfscale.recipe import (
    RowCollator,
    finish_run,
    load_datasets,
    load_model,
    load_tokenizer,
    one_process_prepares,
    parse_arguments,
    run,
    start_run,
    train,
)


def main():
    model_args, data_args, scaling_args, training_args, parallel_args = parse_arguments(also=[ParallelArguments])

    def empty_model(tokenizer=None):
        return load_model(model_args, training_args, tokenizer, data_args, empty=True)

    if parallel_args.dry_run:
        sizes = {"block_size": data_args.block_size, "batch_schedule": scaling_args.batch_schedule}
        ParallelTrainer.print_dry_run(empty_model, training_args, parallel_args, **sizes)
        return
    start = start_run(model_args, data_args, scaling_args, training_args, parallel_args, parallel_trainer=True)

    with one_process_prepares("the data"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_datasets(data_args, training_args, tokenizer)

    trainer = ParallelTrainer(
        model=empty_model(tokenizer),
        args=training_args,
        parallel=parallel_args,
        weights_from=model_args.model_name_or_path,  # None: initialised from the seed, the same under every layout
        data_collator=RowCollator(tokenizer),
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
