"""Paired measurements of what hfscale costs. `python -m benchmarks [NAME …]` runs them and writes `results/`."""
