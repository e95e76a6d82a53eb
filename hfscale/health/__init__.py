"""Health checks of nodes, links, ranks and of the training itself: what is wrong, where, and how to fix it.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Read, called, or set once

- `torch._C._distributed_c10d` with `_dump_fr_trace_json` and `_dump_nccl_trace_json`. By: diagnosis.py. Reason:
  torch has no public way to read the flight recorder. Test: test_health_hang.py.
- `torch._C` with `_dispatch_get_all_op_names`, `_dispatch_keyset_full_after` and the operators of `c10d`, their
  `_schema` and the key `BackendSelect`. By: rehearsal/recorder.py. Reason: there is no public way to see the
  collectives of all libraries before they are entered. Test: test_collectives_check.py.
- `torch.nn.Module._call_impl`. By: rehearsal/recorder.py. Reason: the modules that are being computed are on the
  stack only. Test: test_collectives_check.py.
- `init_process_group` and `new_group` of torch (public), in the processes that `hfscale check` starts. By:
  rehearsal/hook.py. Reason: the ranks of any script are watched. Test: test_collectives_check.py.
"""
