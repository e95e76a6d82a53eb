"""A day on GPUs with one command: `make gpu-day`, which is `python3 -m benchmarks.gpu`.

| module | contents |
|---|---|
| `__main__.py` | the command line |
| `registry.py` | the parts in their order, each with its limit and what it needs |
| `runner.py` | runs each part in a process of its own, ends it at its limit, and collects its results |
| `part.py` | the process of one part, and how a part reports a result |
| `machine.py` | card, driver, versions and commit of a result |
| `wheels.py` | `make gpu-wheels`: packages that the image lacks, and their installation without a network |
| `table.py` | measured beside predicted, and beside Trainer, TRL and a loop in PyTorch |
| `settings.py` | what the runner tells a part: its folder, the card, tiny shapes |
| `shapes.py` | models and data: named shapes with random weights, random tokens |
| `recipe_runs.py` | runs of a recipe, with or without a launcher |
| `fast_init.py` | the script in front of a recipe that initialises large models fast |
| `prediction.py` | what `hfscale estimate` says of a run |
| `speed.py` | parts: recipes under one process and under strategies |
| `peers.py` | parts: Trainer, TRL and a loop in PyTorch with the same shape |
| `saves.py` | parts: FP8's final model, the stall of a save, `kill -9` in a save, pinned memory |
| `start.py` | part: from the command to the second step, twice |
| `health.py` | parts: the callback's cost, replays, waits for the GPU, traces |
| `commands.py` | parts: `make test-gpu`, `hfscale doctor`, `check`, `plan --calibrate`, imports that open CUDA |
| `profiles.py` | parts: where the milliseconds of a step go |
| `several.py` | parts: 8 GPUs, and two nodes |
"""
