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

from transformers import EarlyStoppingCallback, set_seed

from hfscale import ParallelArguments, ParallelTrainer
from hfscale.islands.flags import island_callbacks
from hfscale.metrics.profiler import ProfilerCallback
from hfscale.metrics.progress import use_compact_progress
from hfscale.parallel.arguments import plan_stages
from hfscale.parallel.dry_run import dry_run, print_dry_run
from hfscale.recipe.arguments import check_evaluation, sample_generation, scaling_callback
from hfscale.recipe.compatibility import check_compatibility
from hfscale.recipe.data import load_packed_datasets
from hfscale.recipe.entrypoint import check_output_dir, end_if_preempted, print_summary, run, save_final_model
from hfscale.recipe.models import add_lora, cut_document_attention, load_config, load_empty_model, load_tokenizer
from hfscale.recipe.packing import RowCollator
from hfscale.recipe.parsing import parse_arguments
from hfscale.recipe.preparation import one_process_prepares
from hfscale.recipe.resume import is_finished, keep_global_batch, resume_point
from hfscale.trainer.strategy import check_launch


def main():
    model_args, data_args, scaling_args, training_args, parallel_args = parse_arguments(also=[ParallelArguments])
    layout, stages = plan_stages(parallel_args, training_args, world_size=parallel_args.dry_run)
    names_model = model_args.config_name or model_args.model_name_or_path
    tokenizer = None if parallel_args.dry_run and names_model else load_tokenizer(model_args)
    config = load_config(model_args, tokenizer, block_size=data_args.block_size)

    def empty_model():
        model = load_empty_model(model_args, config, training_args)
        return add_lora(model, model_args, training_args) if model_args.use_peft else model

    if parallel_args.dry_run:
        ranks = dry_run(
            empty_model,
            layout,
            stages,
            training_args,
            block_size=data_args.block_size,
            sequence_parallel=parallel_args.sequence_parallel,
        )
        print_dry_run(ranks, layout, stages, training_args)
        return

    check_launch(training_args)
    check_compatibility(model_args, training_args)
    sample_generation(data_args, is_split=True)  # refuses --sample_prompts: split models cannot generate
    check_output_dir(training_args.output_dir)
    islands = island_callbacks(scaling_args)
    checkpoint = resume_point(training_args, scaling_args.checkpoint_remote)
    keep_global_batch(training_args, checkpoint, data_parallel_size=layout.data_parallel_size)
    set_seed(training_args.seed)

    # One process prepares the data; the others read its cache.
    with one_process_prepares("the data"):
        train_dataset, eval_dataset = load_packed_datasets(data_args, tokenizer, seed=training_args.seed)
    patience = scaling_args.early_stopping_patience
    check_evaluation(training_args, has_evaluation=eval_dataset is not None, patience=patience)

    model = empty_model()
    cut_document_attention(model, data_args, training_args)

    scaling = scaling_callback(scaling_args, data_args)
    trainer = ParallelTrainer(
        model=model,
        args=training_args,
        parallel=parallel_args,
        weights_from=model_args.model_name_or_path,  # None: initialised from the seed, the same under every layout
        data_collator=RowCollator(tokenizer),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        callbacks=[
            scaling,
            *islands,
            ProfilerCallback(training_args.profile_steps or ()),
            *([EarlyStoppingCallback(patience)] if patience else []),
        ],
    )
    use_compact_progress(trainer)

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
