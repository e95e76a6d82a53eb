r"""Train or fine-tune a causal language model under 7B parameters, data parallel (DDP).

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/ddp/train.py

trains a small Llama on the Python standard library. This command trains a real model:

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/ddp/train.py \
        --config recipes/ddp/smollm2-135m-full.yaml

Relaunching the same command resumes from the newest verified checkpoint. Copy this file and change it.
"""

from hfscale import initialize_at_width
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
from transformers import Trainer


def main():
    model_args, data_args, scaling_args, training_args = parse_arguments()
    start = start_run(model_args, data_args, scaling_args, training_args)

    # One process prepares the tokenizer and the data; the others read its cache.
    with one_process_prepares("the data"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_datasets(data_args, training_args, tokenizer)

    model = load_model(model_args, training_args, tokenizer, data_args)
    if scaling_args.base_width is not None:
        initialize_at_width(model, base_width=scaling_args.base_width)
    trainer = Trainer(
        model=model,
        args=training_args,
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
