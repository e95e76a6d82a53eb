"""Checkpoints that can be trusted: a manifest that is written last, verification, rotation."""
