"""Learning rate scaling with the global batch: the callback, and the rates of optimizers and schedulers.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Read, called, or set once

- `_last_lr` and `_schedulers` of torch's schedulers. By: learning_rate.py. Reason: a scheduler that exists has no
  method that changes its rates. Test: test_lr_scaling_callback.py.
"""
