"""Tensor x pipeline x context x data parallelism for unmodified Hugging Face causal language models.

torch's own engine does the work: DTensor, FSDP2, torch.distributed.pipelining and torch.distributed.checkpoint.

| module | contents |
|---|---|
| `trainer.py` | `ParallelTrainer` |
| `arguments.py` | its flags, the layout that they ask for, and arguments that are refused |
| `checks.py` | checks of a model's config against a layout |
| `model.py` | `parallelize_model`: all steps from an unsplit model to this rank's part of it |
| `mesh.py` | the device mesh, and shards of tensors on it |
| `partition.py`, `stages.py` | which stage holds which layers, which rank holds which stage |
| `pipeline.py` | stages, and the schedules that run them |
| `tensor.py`, `sequence.py`, `context.py` | tensor, sequence and context parallelism |
| `losses.py`, `gradients.py` | losses, gradient sums, norms and clipping over several ranks |
| `weights.py` | initial weights, drawn or read |
| `checkpoints.py` | checkpoints that any layout can resume, and export for `from_pretrained` |
| `dry_run.py` | memory and schedule of a run, without its GPUs |

This package and `hfscale.integrations` are the only places that use names with a leading underscore of other
libraries. Each is used in one place; `tests/test_parallel_plan.py` and the tests named there fail when it moves.
"""
