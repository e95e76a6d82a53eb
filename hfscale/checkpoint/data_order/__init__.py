"""Which samples come in which order, and the random numbers that are drawn while they are read, over a resume.

`random_states.py` reads and sets the states of random number generators, `owners.py` finds generators and counters
that belong to a sampler, a collator or a dataset, and `order.py` keeps all of them in the checkpoints. `skipping.py`
checks that the batches of an epoch that a checkpoint was trained on can be left out.
"""
