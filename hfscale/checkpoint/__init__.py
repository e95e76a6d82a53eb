"""Writes, verifies, converts and exports checkpoints; a manifest that is written last marks a complete one.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Replaced until the end of the training

- `checkpoint_engine` of the DeepSpeed engine, during a save. By: captures/zero.py. Reason: DeepSpeed's
  own background writers commit at a time that they report to nobody. Test: test_checkpoint_writer.py.

Read, called, or set once

- `Trainer._eval_dataloaders`. By: loader_seeds.py. Reason: nothing public tells whether a loader is used again by
  the next evaluation. Test: test_loader_seeds.py.
- what `Trainer._save_checkpoint` calls (`overrides.WRITING_METHODS`), followed call by call. By: TrainerSaving,
  contents.py and captures/. Reason: Trainer writes to a folder, not to memory. Test: test_checkpoint_writer.py and
  test_captures.py compare the files byte for byte.
- `_config.load_universal_checkpoint` of the DeepSpeed engine. By: `finish_universal_load`. Reason: the engine would
  look for universal files in every later load. Test: test_reshape.py.
- `torch._weights_only_unpickler._get_allowed_globals`. By: pickles.py. Reason: a checkpoint may hold what torch loads
  with `weights_only`, and torch has no public list of it. Test: test_pickles.py.
- `numpy.ndarray.__reduce__`'s function `_reconstruct`. By: pickles.py. Reason: pickles of arrays name it. Test:
  test_pickles.py.
- `_hf_peft_config_loaded` of a model, read. By: `check_own_adapters`. Reason: nothing public tells that a model has
  adapters of its own. Test: test_resumable.py.
- `_iterator` of torch's `DataLoader`. By: preemption/workers.py. Reason: nothing public tells which worker processes
  a loader has. Test: test_preemption.py.
- `_buffers` and `_non_persistent_buffers_set` of torch's modules, and the hooks of their parameters, `_backward_hooks`
  and `_post_accumulate_grad_hooks`, read. By: program_state/state.py. Reason: torch has no public list of what a
  `state_dict` leaves out, nor of hooks. Test: test_program_state.py.
- `_buffered_inputs`, and `_step` or `_buffer_step`, of TRL's trainers that generate, read and set. By:
  generated_batches.py. Reason: TRL keeps neither in a checkpoint. Test: test_trainers_trl.py, `grpo_repeated`.
"""
