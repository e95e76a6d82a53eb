"""Estimates memory, time and cost of training runs and searches for the best layout. Imports no torch."""
