"""What a run achieves and costs, measured on the host without making a GPU wait."""
