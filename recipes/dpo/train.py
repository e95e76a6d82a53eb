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

from transformers import EarlyStoppingCallback, set_seed

from hfscale.checkpoint.loading import readable_checkpoint
from hfscale.islands.flags import island_callbacks
from hfscale.metrics.profiler import ProfilerCallback
from hfscale.metrics.progress import use_compact_progress
from hfscale.recipe.arguments import (
    SourceArguments,
    check_evaluation,
    sample_generation,
    scaling_callback,
)
from hfscale.recipe.compatibility import check_compatibility
from hfscale.recipe.compression import store_gradients_in_buckets
from hfscale.recipe.entrypoint import check_output_dir, end_if_preempted, print_summary, run, save_final_model
from hfscale.recipe.layout import finish_on_cpu
from hfscale.recipe.models import load_config, load_model, load_tokenizer, lora_config
from hfscale.recipe.parsing import parse_arguments
from hfscale.recipe.preparation import one_process_prepares
from hfscale.recipe.resume import is_finished, keep_global_batch, resume_point
from hfscale.recipe.trl import (
    DPOArguments,
    DPOTrainer,
    errors_of_trl,
    load_records,
    reference_model,
    set_up_data_parallelism,
)
from hfscale.trainer.strategy import check_launch

EMBEDDED = {  # flags of the run without a model and without data, which takes a minute on two CPU cores
    "max_length": "256",
    "activation_checkpointing": "false",
    "per_device_train_batch_size": "4",
    "learning_rate": "5e-4",
    "base_global_batch_size": "4",
    "lr_scheduler_type": "cosine",
    "warmup_steps": "5",
    "max_steps": "40",
    "save_steps": "20",
    "max_eval_samples": "32",
}


def main():
    model_args, data_args, scaling_args, training_args = parse_arguments(
        data=SourceArguments, training=DPOArguments, embedded=EMBEDDED
    )
    check_launch(training_args)
    layout = set_up_data_parallelism(training_args)
    check_compatibility(model_args, training_args, layout)
    check_output_dir(training_args.output_dir)
    islands = island_callbacks(scaling_args)
    samples = sample_generation(data_args)
    checkpoint = resume_point(training_args, scaling_args.checkpoint_remote)
    keep_global_batch(training_args, checkpoint)
    checkpoint = readable_checkpoint(training_args, checkpoint)
    set_seed(training_args.seed)

    # One process prepares the tokenizer and the records; the others read its cache.
    with one_process_prepares("the records"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_records(data_args, "preference", seed=training_args.seed)
    patience = scaling_args.early_stopping_patience
    check_evaluation(training_args, has_evaluation=eval_dataset is not None, patience=patience)

    config = load_config(model_args, tokenizer, block_size=training_args.max_length or 1, length_flag="--max_length")
    model = load_model(model_args, config, training_args, layout=layout)
    scaling = scaling_callback(scaling_args, block_size=training_args.max_length)
    with errors_of_trl():
        trainer = DPOTrainer(
            model=model,
            ref_model=reference_model(model_args, config, training_args),
            args=training_args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            peft_config=lora_config(model_args, model) if model_args.use_peft else None,
            callbacks=[
                scaling,
                *islands,
                *samples,
                ProfilerCallback(training_args.profile_steps or ()),
                *([EarlyStoppingCallback(patience)] if patience else []),
            ],
        )
    use_compact_progress(trainer)
    finish_on_cpu(trainer)
    store_gradients_in_buckets(trainer)

    if is_finished(trainer, checkpoint):
        return
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    end_if_preempted(scaling)
    if eval_dataset is not None:
        metrics |= trainer.evaluate()
    save_final_model(trainer, merge_adapters=model_args.merge_adapters)
    trainer.save_metrics("all", metrics, combined=False)
    print_summary(trainer, scaling, metrics)


if __name__ == "__main__":
    run(main)
