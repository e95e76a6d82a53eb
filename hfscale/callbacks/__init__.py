"""Callbacks for any `transformers.Trainer`: one file each, and `scaling.py` for all of them together."""
