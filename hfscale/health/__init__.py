"""Health checks of nodes, links, ranks and of the training itself: what is wrong, where, and how to fix it.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Read, called, or set once

- `torch._C._distributed_c10d` with `_dump_fr_trace_json` and `_dump_nccl_trace_json`. By: diagnosis.py. Reason:
  torch has no public way to read the flight recorder. Test: test_health_hang.py.
- `torch._dynamo.utils` with `counters`. By: jitter.py. Reason: torch has no public count of its compilations. Test:
  test_jitter.py.
"""
