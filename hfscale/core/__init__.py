"""What every package needs: exchanges between ranks, durable files, records, clocks, versions, redaction.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

- `torch.testing._internal.distributed.fake_pg`. By: torch_internals.py. Reason: torch has no public way to simulate a
  process group. Test: test_dry_run.py.
- `FakeTensor` and `FakeTensorMode` in `torch._subclasses`. By: torch_internals.py. Reason: torch has no public way to
  run code without data on a device that is none of meta. Test: test_trace.py.
- `_StridedShard` of DTensor. By: torch_internals.py. Reason: packed parameters, and FSDP2 over tensor or expert
  parallelism, have this placement, and torch exports it nowhere. Test: test_parallel_plan.py.
- `TorchDispatchMode` in `torch.utils._python_dispatch`. By: torch_internals.py. Reason: torch documents it there; its
  `FlopCounterMode` does not separate recomputation. Test: test_flops.py.
- `is_traceable_wrapper_subclass` in `torch.utils._python_dispatch`. By: torch_internals.py. Reason: torch documents
  the protocol of tensors that wrap others, but has no public check for it. Test: test_checkpoint_writer.py.
- `_disable_current_modes` in `torch.utils._python_dispatch`. By: torch_internals.py. Reason: a tensor subclass cannot
  be made while a mode of ours records the operations around it. Test: test_replay_strategies.py.
- `_resolve_process_group` of `torch.distributed.distributed_c10d`. By: torch_internals.py. Reason: a collective
  operator gets the name of its group. Test: test_parallel_losses_of_users.py.
- `_get_current_dispatch_mode_stack`, `_push_mode`, `_pop_mode`, and `_mode_key` of modes, in
  `torch.utils._python_dispatch`. By: torch_internals.py. Reason: modes belong to a thread, and one that counts the
  operations of a step is to see those of the thread that runs its backward passes. Test: test_overlap.py.
- `_find_final_norm` of `accelerate.utils.fsdp_utils`. By: versions.py. Reason: nothing else tells which modules
  Accelerate shards together with the head. Test: test_fsdp2_loading.py.
- `_version` of tensors. By: torch_internals.py. Reason: nothing public tells whether a tensor was written. Test:
  test_state_hashes.py.
- `_top_saved_tensors_default_hooks` of `torch._C._autograd`. By: torch_internals.py. Reason: nothing public tells
  whether hooks for saved tensors are in use, which others would hide. Test: test_expert_adapters.py.
- `torch._C`. By: torch_internals.py. Reason: torch's flight recorder and its operators have no public names; health
  says which it uses. Test: test_health_hang.py.
"""
