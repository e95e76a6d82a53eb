"""Keeps what the objects of the user's program count while a training goes on: plain numbers and random generators.

A Trainer's checkpoint has the model, the optimizer, the schedule and the global random states. A program may hold more
that decides what follows: a subclass of Trainer that counts its calls of `compute_loss`, a collator that masks more
the longer it runs, a module that keeps a running mean in a plain attribute.

`objects` finds them, `values` says which values can be kept and writes them as JSON, and `state` keeps those that
belong to the steps of a training. `hfscale.checkpoint.data_order` keeps those that belong to the reading of data.
"""
