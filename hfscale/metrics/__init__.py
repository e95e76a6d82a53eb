"""What a run achieves and costs, measured on the host without making a GPU wait.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Read, called, or set once

- `_compiled_call_impl` of a module. By: `is_compiled`. Reason: torch has no public way to tell a module that is
  compiled in place. Test: test_tokens.py.
- `_get_ddp_logging_data`, `_set_ddp_runtime_logging_sample_rate` of DDP and `torch.autograd._profiler_enabled`. By:
  meters/communication.py. Reason: DDP reports its times nowhere else, and the profiler may already run. Test:
  test_communication.py.
"""
