"""Health checks of nodes, links, ranks and of the training itself: what is wrong, where, and how to fix it."""
