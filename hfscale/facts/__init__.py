"""What is known before a run starts: layouts, model shapes, hardware, prices and rules. Imports no torch."""
