"""Optimizers that Trainer does not have, whole under every sharding of torch.

| module | contents | depends on |
|---|---|---|
| `newton_schulz` | orthogonal factors of matrices, whole or sharded over ranks | |
| `muon` | Muon for the matrices of the hidden layers, AdamW for the rest | `newton_schulz` |
"""
