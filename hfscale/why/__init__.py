"""Why do two runs differ? `hfscale why RUN_A RUN_B` names the first step and operation, and what came before.

A run leaves two kinds of material in its output directory:

- what every run with `ScalingCallback` or a recipe writes: arguments, versions, layout, metrics, hashes of data and
  random states at each log, and the manifests of its checkpoints;
- traces of single steps, if `TraceCallback` or `--trace_steps` has asked for them: what went in and out of every
  module, gradients, clipping, optimizer states and weights, by rank.

The comparison reads files only, and is bit by bit where both runs have the same layout, versions and device. Otherwise
numbers may differ by as much as the arithmetic explains (`tolerance`).

| module | contents | imports |
|---|---|---|
| `difference` | the dataclasses of the answer | |
| `tolerance` | how far rounding alone can take two runs apart | |
| `run_folder` | reads a run's files | |
| `settings` | arguments, versions, model and layout of two runs | `difference`, `run_folder` |
| `curves` | data, learning rate, loss and gradient norm by step | the above |
| `digests` | hash and norm of a tensor | |
| `trace_files` | the format of a trace | |
| `operations` | the operations of a step, with hashes of their results | `digests`, `trace_files` |
| `recording` | what is recorded of a step, and where | `digests`, `operations`, `trace_files` |
| `callback` | `TraceCallback` | `recording` |
| `traces` | the first difference between the traces of two runs | `trace_files`, `difference`, `tolerance` |
| `answer` | puts the parts together | all of the comparison |
| `why_command` | `hfscale why` | `answer` |

What it touches inside other libraries: nothing but `TorchDispatchMode`, by way of `hfscale.core.torch_internals`.
"""
