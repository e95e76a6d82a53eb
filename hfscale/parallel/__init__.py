"""Tensor x pipeline x data parallelism for unmodified Hugging Face causal language models, on torch's own engine."""
