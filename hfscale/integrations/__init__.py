"""The only place that touches internals of transformers, Accelerate, DeepSpeed and W&B."""
