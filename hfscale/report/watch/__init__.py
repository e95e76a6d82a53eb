"""Shows runs while they go on: a page, and metrics for Prometheus, from the files of their output directories."""
