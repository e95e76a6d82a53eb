"""Recovery of a run on the same machine: a supervisor per node, and a folder in host memory that outlives the ranks.

`supervisor` starts the launcher and starts it again after a failure; `run_memory` is the folder in which the ranks
keep their newest snapshot; `rank_link` is how a rank tells the supervisor what it does. None of them imports torch.
"""
