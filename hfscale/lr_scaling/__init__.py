"""Learning rate scaling with the global batch, which may grow: the callback, the rates of optimizers and schedulers.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Read, called, or set once

- `_last_lr` and `_schedulers` of torch's schedulers. By: learning_rate.py. Reason: a scheduler that exists has no
  method that changes its rates. Test: test_lr_scaling_callback.py.
- `last_epoch` of torch's schedulers. By: growing_batch.py. Reason: a scheduler has no method that says where it is.
  Test: test_growing_batch.py.
- `_buffered_inputs` of TRL's trainers. By: growing_batch.py. Reason: nothing public says that a trainer reads all
  micro-batches of a step at once. Test: test_growing_batch.py.
- `_is_hf_initialized` of parameters. By: width.py. Reason: nothing public says which parameters `from_pretrained` has
  read. Test: test_width.py.
"""
