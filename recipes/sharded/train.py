r"""Train or fine-tune a causal language model of 7B to 70B parameters, sharded by FSDP2 or DeepSpeed ZeRO.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml recipes/sharded/train.py

trains a small Llama on the Python standard library. This command trains a real model:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 recipes/sharded/train.py \
        --config recipes/sharded/llama-3.1-8b-full.yaml

The --config_file alone decides the strategy: fsdp2, fsdp2_hsdp, zero2, zero3_offload, … of
accelerate_configs/. Relaunching the same command resumes from the newest verified checkpoint. Copy this file and
change it.
"""

from transformers import EarlyStoppingCallback, Trainer, set_seed

from hfscale import ParallelArguments
from hfscale.checkpoint.loading import readable_checkpoint
from hfscale.islands.flags import island_callbacks
from hfscale.metrics.profiler import ProfilerCallback
from hfscale.metrics.progress import use_compact_progress
from hfscale.recipe.arguments import check_evaluation, sample_generation, scaling_callback
from hfscale.recipe.compatibility import check_compatibility
from hfscale.recipe.compression import compress_gradients
from hfscale.recipe.data import load_packed_datasets
from hfscale.recipe.entrypoint import check_output_dir, end_if_preempted, print_summary, run, save_final_model
from hfscale.recipe.layout import check_model, finish_on_cpu, set_up_parallelism
from hfscale.recipe.models import add_lora, cut_document_attention, load_config, load_model, load_tokenizer
from hfscale.recipe.packing import RowCollator
from hfscale.recipe.parsing import parse_arguments
from hfscale.recipe.preparation import one_process_prepares
from hfscale.recipe.resume import is_finished, keep_global_batch, resume_point
from hfscale.recipe.sequence_parallel import collate_with_positions, fix_sequence_parallel
from hfscale.trainer.strategy import check_launch


def main():
    model_args, data_args, scaling_args, training_args, parallel_args = parse_arguments(also=[ParallelArguments])
    check_launch(training_args)
    layout = set_up_parallelism(parallel_args, training_args)
    check_compatibility(model_args, training_args, layout)
    check_output_dir(training_args.output_dir)
    islands = island_callbacks(scaling_args)
    samples = sample_generation(data_args, layout)
    checkpoint = resume_point(training_args, scaling_args.checkpoint_remote)
    keep_global_batch(training_args, checkpoint, data_parallel_size=layout.data_parallel_size)
    checkpoint = readable_checkpoint(training_args, checkpoint)
    set_seed(training_args.seed)

    # One process prepares the tokenizer and the data; the others read its cache.
    with one_process_prepares("the data"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_packed_datasets(data_args, tokenizer, seed=training_args.seed)
    patience = scaling_args.early_stopping_patience
    check_evaluation(training_args, has_evaluation=eval_dataset is not None, patience=patience)

    config = load_config(model_args, tokenizer, block_size=data_args.block_size)
    check_model(layout, config, training_args, block_size=data_args.block_size)
    model = load_model(model_args, config, training_args, layout=layout)
    cut_document_attention(model, data_args, training_args, layout)
    if model_args.use_peft:
        model = add_lora(model, model_args, training_args)

    scaling = scaling_callback(scaling_args, data_args)
    trainer = Trainer(
        model=model,
        args=training_args,
        # Ranks that share a sequence must know the positions of their part.
        data_collator=collate_with_positions if layout.cp > 1 else RowCollator(tokenizer),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
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
    fix_sequence_parallel(trainer)
    compress_gradients(
        trainer,
        training_args.gradient_compression,
        powersgd_rank=training_args.powersgd_rank,
        topk_fraction=training_args.topk_fraction,
        start_step=training_args.compression_start_step,
    )

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
