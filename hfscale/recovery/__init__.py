"""Recovery of a run: a supervisor per node, and a folder in host memory that outlives the ranks.

`supervisor` starts the launcher and starts it again after a failure, and `restarts` decides whether. The ranks keep
their newest snapshot in a folder in host memory (`hfscale.core.run_memory`), and tell the supervisor what they do
(`hfscale.core.rank_link`). On several nodes, `coordinator` decides for all of them, `nodes` is a supervisor's side of
it, `connections` has their token and limits, and `replicas` copies the snapshots of a node to another one.
`rank_start` runs when a rank starts, before its script. None of them imports torch.
"""
