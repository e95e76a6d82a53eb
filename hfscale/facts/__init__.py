"""Facts that do not depend on a run: layouts, pipeline schedules, model shapes, hardware, prices, learning-rate rules.
Imports no torch."""
