"""Estimates memory, time and cost of training runs and searches for the best layout.

It imports no torch; only `trace.py` does, which runs in a process of its own.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

- `PreTrainedModel.from_pretrained`, `Trainer.train`, `torch.nn.Module.to` and `cuda`, and
  `transformers.training_args.is_torch_bf16_gpu_available` (all public), replaced in the process of its own in which
  a script is traced.
  By: trace.py. Reason: the models of a script must be made without weights, and torch has no public trace of
  operators. Test: test_trace.py.
"""
