"""Training on several islands of GPUs that average their changes every H steps (DiLoCo, arXiv 2311.08105).

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Read, called, or set once

- `_indices` of a `datasets.Dataset`. By: `read_share_of_epoch`. Reason: the dataset of a loader that exists cannot
  be replaced. Test: test_island_data.py.
- `safe_get_local_fp32_param` and its relatives in `deepspeed.utils` (public), and `checkpoint_event_prologue` and
  `checkpoint_event_epilogue` of ZeRO-3's optimizer. By: parameters.py. Reason: the optimizer of ZeRO steps a copy of
  the parameters, and ZeRO-3 keeps small ones gathered. Test: test_island_layouts.py.
"""
