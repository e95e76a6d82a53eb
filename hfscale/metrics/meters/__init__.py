"""The meters of `ScalingMetricsCallback`: each measures one thing besides throughput, in a file of its own.

`meter.py` has their protocol. A new metric key needs a meter here, an entry in the list of meters in the callback, and
a row in the table of its docstring and in `docs/metrics.md`. `tests/metrics/test_meters.py` tests it against what all
meters promise.
"""
