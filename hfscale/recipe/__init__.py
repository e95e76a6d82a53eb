"""What the recipes share: arguments, data, model loading, resume, entry point and summary."""
