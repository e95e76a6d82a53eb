r"""Train or fine-tune a causal language model under 7B parameters, data parallel (DDP).

    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/ddp/train.py

trains a small Llama on the Python standard library. This command trains a real model:

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/ddp/train.py \
        --config recipes/ddp/smollm2-135m-full.yaml

Relaunching the same command resumes from the newest verified checkpoint. Copy this file and change it.
"""

from transformers import EarlyStoppingCallback, Trainer, set_seed

from hfscale.checkpoint.loading import readable_checkpoint
from hfscale.islands.flags import island_callbacks
from hfscale.metrics.profiler import ProfilerCallback
from hfscale.metrics.progress import use_compact_progress
from hfscale.recipe.arguments import check_evaluation, sample_generation, scaling_callback
from hfscale.recipe.compatibility import check_compatibility
from hfscale.recipe.compression import compress_gradients, store_gradients_in_buckets
from hfscale.recipe.data import load_packed_datasets
from hfscale.recipe.entrypoint import check_output_dir, end_if_preempted, print_summary, run, save_final_model
from hfscale.recipe.models import add_lora, cut_document_attention, load_config, load_model, load_tokenizer
from hfscale.recipe.packing import RowCollator
from hfscale.recipe.parsing import parse_arguments
from hfscale.recipe.preparation import one_process_prepares
from hfscale.recipe.resume import is_finished, keep_global_batch, resume_point
from hfscale.trainer.strategy import check_launch


def main():
    model_args, data_args, scaling_args, training_args = parse_arguments()
    check_launch(training_args)
    check_compatibility(model_args, training_args)
    check_output_dir(training_args.output_dir)
    islands = island_callbacks(scaling_args)
    samples = sample_generation(data_args)
    checkpoint = resume_point(training_args, scaling_args.checkpoint_remote)
    keep_global_batch(training_args, checkpoint)
    checkpoint = readable_checkpoint(training_args, checkpoint)
    set_seed(training_args.seed)

    # One process prepares the tokenizer and the data; the others read its cache.
    with one_process_prepares("the data"):
        tokenizer = load_tokenizer(model_args)
        train_dataset, eval_dataset = load_packed_datasets(data_args, tokenizer, seed=training_args.seed)
    patience = scaling_args.early_stopping_patience
    check_evaluation(training_args, has_evaluation=eval_dataset is not None, patience=patience)

    config = load_config(model_args, tokenizer, block_size=data_args.block_size)
    model = load_model(model_args, config, training_args)
    cut_document_attention(model, data_args, training_args)
    if model_args.use_peft:
        model = add_lora(model, model_args, training_args)

    scaling = scaling_callback(scaling_args, data_args)
    trainer = Trainer(
        model=model,
        args=training_args,
        data_collator=RowCollator(tokenizer),
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
    store_gradients_in_buckets(trainer)
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
