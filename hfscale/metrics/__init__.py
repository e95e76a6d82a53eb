"""What a run achieves and costs, measured on the host without making a GPU wait.

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Read, called, or set once

- `_get_ddp_logging_data` and `_set_ddp_runtime_logging_sample_rate` of DDP. By: meters/communication.py. Reason: DDP
  reports its times nowhere else. Test: test_communication.py.
- `torch.autograd._profiler_enabled`, and `profiler.kineto_results` of a profile. By: communication_profile.py. Reason:
  another profiler may already run, and the public `events()` converts each event to one that takes forty times as
  long to make. Test: test_communication.py.
"""
