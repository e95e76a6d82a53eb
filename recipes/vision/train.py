r"""Fine-tune a vision-language model on conversations with images, with TRL's SFTTrainer under DDP, FSDP2 or ZeRO.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 recipes/vision/train.py

trains a small LLaVA on drawn pictures: it only shows that everything works. This command trains a real model:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 recipes/vision/train.py \
        --config recipes/vision/gemma-3-4b-lora.yaml

The --config_file alone decides the strategy. Relaunching the same command resumes from the newest verified checkpoint.
Every flag of TRL's SFTConfig is accepted; --train_vision_tower and --train_projector say what is trained beside the
language model. Copy this file and change it.
"""

from hfscale.recipe import (
    finish_run,
    load_model,
    load_records,
    one_process_prepares,
    parse_arguments,
    run,
    start_run,
    train,
)
from trl import SFTTrainer


def main():
    model_args, data_args, scaling_args, training_args = parse_arguments(task="vision")
    start = start_run(model_args, data_args, scaling_args, training_args)

    # One process prepares the processor and the records; the others read its cache.
    with one_process_prepares("the records"):
        processor = training_args.load_processor(model_args)
        train_dataset, eval_dataset = load_records(data_args, training_args)

    model = load_model(model_args, training_args, processor.tokenizer)
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        peft_config=model_args.lora_config(model),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=processor,
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
