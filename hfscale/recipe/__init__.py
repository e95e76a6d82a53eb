"""What the recipes share. A recipe imports these names only, and calls them in this order.

| name | what it does |
|---|---|
| `run` | runs the script's `main`: an error is one line, a preempted run ends with exit code 75 |
| `parse_arguments` | reads the flags of the model, the data, the callbacks and the training; `--help` |
| `start_run` | checks the flags together, locks the output directory, finds the checkpoint, makes the callbacks |
| `one_process_prepares` | lets one process of each node prepare data while the others wait |
| `load_tokenizer` | loads the tokenizer of the flags |
| `load_datasets` | loads text or conversations as rows of `--block_size` tokens |
| `load_records` | loads records for one of TRL's trainers |
| `load_model` | loads or initialises the model of the flags, as the strategy needs it |
| `reference_model` | makes the reference model of DPO where TRL cannot |
| `RowCollator` | makes batches of rows |
| `train` | trains from the checkpoint to the end, unless an earlier launch has finished |
| `finish_run` | writes the model and the metrics, prints the summary |

Each is loaded when it is first used. Behind them:

| module | contents |
|---|---|
| `parsing` | `--config`, the command line, `--help` |
| `arguments` | the flags as dataclasses with their checks |
| `entrypoint`, `start`, `finish`, `export` | the process of a run; its start; training and end; the exported model |
| `layout`, `compatibility` | sizes of the parallel axes; checks that refuse combinations that do not work |
| `resume` | the checkpoint to resume from, and the accumulation that keeps the global batch |
| `data`, `corpus` | text packed into sequences; the embedded default text, tokenizer and model |
| `models` | loading of model, tokenizer and adapters |
| `modalities` | the parts of a model that text does not pass, which are frozen where no images are read |
| `recompute`, `compression` | what activation checkpointing keeps; gradient compression of DDP |
| `onebit`, `sign_mean` | 1-bit Adam and LAMB; the average of signs that they exchange |
| `kernels`, `compilation`, `fused_loss` | attention, loss and compiled layers by default; the loss in chunks |
| `weight_casts` | one cast of weights per optimizer step instead of one per micro-batch |
| `document_attention`, `document_masks` | attention that is cut between documents; masks without a wait for the GPU |
| `router_loss`, `router_bias` | how the experts of a mixture are balanced: by a loss, or by the bias of their router |
| `trl`, `rewards`, `teacher` | TRL's arguments, records and reference models; reward functions; teachers |
| `vision`, `images`, `pictures` | arguments, batches with images and the embedded default of `recipes/vision` |

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Replaced for the life of the object

- the class of the head (`__class__` of an `nn.Linear`) and `PreTrainedModel.loss_function` (public). By:
  `compute_loss_in_chunks`. Reason: the loss must be computed in the forward pass of the head, where FSDP2 and ZeRO-3
  have gathered its weight. Test: test_fused_loss.py, test_loss_and_gradients_equal_those_from_all_logits.
- the class of linear layers (`__class__` of an `nn.Linear`). By: `cast_weights_once`. Reason: autocast casts the
  weights of a layer where it runs, and forgets them with each forward pass. Test: test_weight_casts.py,
  test_weights_are_cast_once_per_step_and_nothing_else_changes.

Replaced for a moment

- `transformers.masking_utils.find_packed_sequence_indices`, during the training. By: `documents_are_known`. Reason:
  nothing public tells transformers that a batch holds one document per row, or several, so that it waits for the GPU
  in each forward pass to see whether positions restart. Test: test_document_masks.py,
  test_a_step_without_a_log_waits_for_nothing.
- `peft.tuners.lora.layer._get_in_out_features`. By: `add_lora`. Reason: nothing public tells PEFT 0.21 that a matrix
  which transformers shards over replicas (HSDP) is complete where it is used. Test: test_recipe_native.py,
  test_adapters_of_the_attention_train_resume_and_export_like_one_process.

Read, called, or set once

- `torch.ops.profiler._record_function_enter_new` and `_record_function_exit._RecordFunction`. By: recompute.py.
  Reason: nothing public names the operators of a profiler's ranges, which `SAC_IGNORED_OPS` (public) leaves out. Test:
  test_parallel_experts.py, test_selective_recomputation_of_spread_experts_does_not_change_the_training.
- `torch._foreach_copy_`. By: `cast_weights_once`. Reason: nothing public copies many tensors in one kernel. Test:
  test_weight_casts.py, test_weights_are_cast_once_per_step_and_nothing_else_changes.
- `torch._dynamo` with `config`, of which `optimize_ddp` is set to False. By: `compile_layers`. Reason: nothing else
  keeps torch from cutting the graphs of single layers at buckets of DDP. Test: test_compilation.py,
  test_under_ddp_layers_larger_than_a_bucket_take_another_number_of_rows.
- `PreTrainedModel._weight_conversions`. By: `load_weights`. Reason: nothing public lets a model that was dequantised
  while it was loaded forget the names of its 4-bit weights, under which transformers 5.23 saves it, and which it does
  not find when it loads it again. Test: test_recipe_native.py, test_the_4_bit_experts_of_gpt_oss_are_dequantised.
- `PreTrainedModel._is_stateful`. By: `reason_not_to_cut`. Reason: nothing public tells that a model has layers that
  pass a state along the sequence. Test: test_packing.py, test_models_that_do_not_cut_are_refused.
- `PreTrainedModel._compatible_flash_implementations`. By: kernels.py. Reason: transformers accepts implementations
  of FlashAttention that a model does not list. Test: test_fast_defaults.py, test_flash_attention_is_preferred.
"""

from importlib import import_module
from typing import Any

from hfscale.core.versions import require

require("recipes")

_HOME_OF = {
    "RowCollator": "hfscale.recipe.packing",
    "finish_run": "hfscale.recipe.finish",
    "load_datasets": "hfscale.recipe.data",
    "load_model": "hfscale.recipe.models",
    "load_records": "hfscale.recipe.trl",
    "load_tokenizer": "hfscale.recipe.models",
    "one_process_prepares": "hfscale.recipe.preparation",
    "parse_arguments": "hfscale.recipe.parsing",
    "reference_model": "hfscale.recipe.trl",
    "run": "hfscale.recipe.entrypoint",
    "start_run": "hfscale.recipe.start",
    "train": "hfscale.recipe.finish",
}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hfscale.recipe' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
