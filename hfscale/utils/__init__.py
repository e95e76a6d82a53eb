"""What every layer may use: process groups, logging, redaction, flags and files."""
