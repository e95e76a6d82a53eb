"""Writes, verifies, converts and exports checkpoints; a manifest that is written last marks a complete one."""
