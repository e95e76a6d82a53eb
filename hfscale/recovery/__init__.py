"""Recovery of a run: a supervisor per node, and a folder in host memory that outlives the ranks.

`supervisor` starts the launcher and starts it again after a failure; `restarts` decides whether; `run_memory` is the
folder in which the ranks keep their newest snapshot; `rank_link` is how a rank tells the supervisor what it does. On
several nodes, `coordinator` decides for all of them, `nodes` is a supervisor's side of it, `connections` carries the
messages, and `replicas` copies the snapshots of a node to another one. None of them imports torch.
"""
