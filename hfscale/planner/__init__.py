"""Which layout, does it fit, how long, how much: arithmetic over the facts, without torch."""
