"""Training on several islands of GPUs that average their changes every H steps (DiLoCo, arXiv 2311.08105)."""
