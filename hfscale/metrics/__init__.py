"""What a run achieves, measured on the host without making a GPU wait."""
