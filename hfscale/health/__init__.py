"""Is the node, the network, each rank and the training itself well, and if not: who, where, and what to do."""
