"""Checks before a run: this machine and its ranks, a launch command in a short rehearsal, packages; calibration.

Nothing of it runs in a training of the user's.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Replaced

- `TrainingArguments.__post_init__`, `Trainer.__init__`, `Trainer._get_train_sampler`, and `__init__` of Accelerate's
  states, in the processes that `hfscale check` starts. By: short_run.py. Reason: any script is to train for a few
  steps on CPUs, without a change to it. Test: test_collectives_check.py.

- `__post_init__` and `__init__` of hfscale's own `ParallelArguments` and `ParallelTrainer`, there too. By:
  parallel_run.py. Reason: one process has no layout, and all weights are drawn. Test: test_collectives_check.py.

Read, called, or set once

- `torch._C` with `_dispatch_get_all_op_names`, `_dispatch_keyset_full_after` and the operators of `c10d`, their
  `_schema` and the key `BackendSelect`. By: rehearsal/recorder.py. Reason: there is no public way to see the
  collectives of all libraries before they are entered. Test: test_collectives_check.py.
- `torch.nn.Module._call_impl`. By: rehearsal/recorder.py. Reason: the modules that are being computed are on the
  stack only. Test: test_collectives_check.py.
- `init_process_group` and `new_group` of torch (public), in the processes that `hfscale check` starts. By:
  rehearsal/hook.py. Reason: the ranks of any script are watched. Test: test_collectives_check.py.
"""
