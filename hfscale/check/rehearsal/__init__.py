"""Runs a user's launch command for a few steps on this machine, and watches what its ranks exchange."""
