"""Steps that are computed again, to find errors that nobody reports, and steps that are undone, with a bad batch.

`hfscale.health.callback` makes both where its options ask for them, and loads this package only then
(`hfscale.core.late`). Both need to know all that a step moves besides the weights, and to put it back
(`kept_state`, `replay_state`).
"""
