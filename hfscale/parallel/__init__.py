"""Tensor x pipeline x context x expert x data parallelism for unmodified Hugging Face causal language models.

torch's own engine does the work: DTensor, FSDP2, torch.distributed.pipelining and torch.distributed.checkpoint.

| module | contents |
|---|---|
| `trainer.py` | `ParallelTrainer` |
| `arguments.py` | its flags, the layout that they ask for, and arguments that are refused |
| `checks.py` | checks of a model's config against a layout |
| `model.py` | `parallelize_model`: all steps from an unsplit model to this rank's part of it |
| `mesh.py` | the device mesh, and shards of tensors on it |
| `partition.py`, `stages.py` | which stage holds which layers, which rank holds which stage |
| `tracing.py` | which modules run before and after the layers, and which models cannot be split |
| `parity.py` | a small model under a layout compared with one process |
| `pipeline.py` | stages, and the schedules that run them |
| `receiving.py` | buffers of what a stage receives |
| `tensor.py`, `sequence.py`, `context.py` | tensor, sequence and context parallelism |
| `experts.py` | expert parallelism |
| `overlap.py` | the exchange of tokens for experts, overlapped with another micro-batch |
| `own_loss.py`, `loss_records.py` | what a `compute_loss` of the user's sees, and what it keeps and logs |
| `predictions.py`, `outside_calls.py` | logits of evaluations; calls of the model outside of a step |
| `vocabulary.py` | ids beyond the vocabulary are refused before a batch reaches a device |
| `losses.py`, `gradients.py` | losses, gradient sums, norms and clipping over several ranks |
| `weights.py` | initial weights, drawn or read |
| `adapters.py` | adapters of PEFT: what belongs to them, which are trained, and what PEFT saves |
| `adapter_weights.py` | their initial values, and a check that no tensor is without one |
| `groups.py` | the optimizer's parameter groups in the unsplit model |
| `optimizers.py` | whether an optimizer takes the steps of one process |
| `checkpoints.py` | checkpoints that any layout can resume, and export for `from_pretrained` |
| `dry_run.py` | memory and schedule of a run, without its GPUs |

What it touches inside other libraries, each in one module. Where no other test is named,
test_parallel_plan.py fails when a new version moves them:

- methods of `Trainer` with a leading underscore, of which it calls `_get_num_items_in_batch` and `_prepare_inputs`.
  By: `ParallelTrainer` and `ParallelCheckpointTrainer`, which override them. Reason: Trainer has no public hooks for
  wrapping the model, the gradient norm, saving and resuming.
- `_optimizer_step_pre_hooks` and `_optimizer_step_post_hooks` of optimizers, emptied on a copy. By: `check_update`.
  Reason: hooks of the user must not run when a copy is tried. Test: test_parallel_optimizers.py.
- `Trainer.training_step` and `prediction_step` (public), called for a micro-batch on the last stage, with
  `Accelerator.backward` replaced meanwhile. By: `ParallelTrainer`. Reason: they have Trainer's rules of how a loss is
  scaled. Test: test_parallel_losses_of_users.py, which also fails when a method changes that is overridden.
- `Trainer.is_distributed_loading_by_transformers`, set to True. By: `ParallelTrainer`. Reason: it is the only way to
  keep Trainer from wrapping and moving a model. Test: test_parallel.py.
- `Accelerator.prepare_data_loader` (public), replaced on the instance, and `Accelerator._dataloaders`. By:
  `ParallelTrainer`. Reason: Accelerate counts all processes as data parallel ranks.
- `PreTrainedModel._resolve_parallel_plans`. By: `tensor_parallel_plan`. Reason: transformers' plan is public, but not
  its expansion to the modules of a model.
- `_can_record_outputs` of model classes. By: `RouterBalanceLoss`. Reason: nothing public tells which modules are the
  routers.
- `PreTrainedModel._init_weights`. By: `draw_weights`. Reason: the public `initialize_weights` draws all modules from
  one stream of random numbers.
- `buffer` of the descriptors in `args_recv_info` and `grad_recv_info` of `PipelineStage`, before torch 2.15. By:
  `ReceivingStage`. Reason: torch keeps one for each micro-batch. Test: test_receiving.py.
- `torch.utils._pytree` with `tree_leaves` and `tree_map_only`. By: `trace_structure`. Reason: the arguments of layers
  are nested, and there is no public way to find the tensors in them. Test: test_parallel_families.py.
- `_modules` of `nn.Module`. By: `stage_view`. Reason: a shallow copy of a module shares its dict of child modules.
"""

from hfscale.core.versions import require

require("recipes", "hfscale.parallel")
