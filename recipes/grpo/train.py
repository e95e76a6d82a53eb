r"""Train a causal language model on rewards of its completions with TRL's GRPOTrainer, under DDP, FSDP2 or ZeRO.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 recipes/grpo/train.py

trains a small Llama to answer questions about the Python standard library. This command trains a real model:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 recipes/grpo/train.py \
        --config recipes/grpo/qwen3-4b-full.yaml

The --config_file alone decides the strategy. Relaunching the same command resumes from the newest verified checkpoint.
Every flag of TRL's GRPOConfig is accepted. --reward_functions rewards.py:is_correct names Python functions of yours.
Copy this file and change it.
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
from hfscale.recipe.resume import is_finished, resume_point
from hfscale.recipe.rewards import RewardArguments, load_reward_functions
from hfscale.recipe.trl import (
    GRPOArguments,
    GRPOTrainer,
    check_reference,
    errors_of_trl,
    keep_generation_batch,
    load_records,
    set_up_data_parallelism,
)
from hfscale.trainer.strategy import check_launch

EMBEDDED = {  # flags of the run without a model and without data, which takes a minute on two CPU cores
    "reward_functions": "hfscale.recipe.rewards:similarity_to_answer",
    "num_generations": "4",
    "max_completion_length": "32",
    "activation_checkpointing": "false",
    "per_device_train_batch_size": "8",
    "learning_rate": "1e-3",
    "base_global_batch_size": "16",
    "lr_scheduler_type": "cosine",
    "warmup_steps": "5",
    "max_steps": "20",
    "save_steps": "10",
    "logging_steps": "5",
    "max_eval_samples": "8",
}


def main():
    model_args, data_args, scaling_args, training_args, reward_args = parse_arguments(
        data=SourceArguments, training=GRPOArguments, also=[RewardArguments], embedded=EMBEDDED
    )
    check_launch(training_args)
    layout = set_up_data_parallelism(training_args)
    check_compatibility(model_args, training_args, layout)
    check_reference(model_args, training_args)
    reward_functions = load_reward_functions(reward_args)
    check_output_dir(training_args.output_dir)
    islands = island_callbacks(scaling_args)
    samples = sample_generation(data_args)
    checkpoint = resume_point(training_args, scaling_args.checkpoint_remote)
    keep_generation_batch(training_args, checkpoint)
    checkpoint = readable_checkpoint(training_args, checkpoint)
    set_seed(training_args.seed)

    # One process prepares the tokenizer and the records; the others read its cache.
    with one_process_prepares("the records"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_records(data_args, "prompt", seed=training_args.seed)
    patience = scaling_args.early_stopping_patience
    check_evaluation(training_args, has_evaluation=eval_dataset is not None, patience=patience)

    config = load_config(
        model_args, tokenizer, block_size=training_args.max_completion_length, length_flag="--max_completion_length"
    )
    model = load_model(model_args, config, training_args, layout=layout)
    scaling = scaling_callback(scaling_args)
    with errors_of_trl():
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward_functions,
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
