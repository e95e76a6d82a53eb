"""Averaged weights: an exponential moving average, or the mean of the last snapshots, of what a Trainer trains.

The average is kept in float32 as the strategy shards the weights. It is updated between two steps, put in the place of
the weights for evaluations and for the model that is written at the end, and kept in checkpoints.

| module | contents | imports |
|---|---|---|
| `options` | the options of the callback | |
| `weights` | `AveragedWeights`: this rank's part of the average, and how it is put in the place of the weights | |
| `storage` | what checkpoints keep of it, and how a training reads it | `weights` |
| `callback` | `WeightAveragingCallback` | all of them |

It imports `core`, `facts`, `trainer`, and of `checkpoint` the format of its files (`checkpoint/formats/average.py`).
`recipe` imports it for the flags. `checkpoint` does not: `hfscale checkpoints average` reads files alone.
What it touches inside other libraries: nothing; `hfscale/trainer/strategies/` has what is DeepSpeed's own.
"""
