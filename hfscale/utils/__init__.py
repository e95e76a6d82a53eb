"""Helpers for every layer: process groups, findings, logging, redaction, flags, disk errors, shipped files."""
