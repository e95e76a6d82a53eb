"""Reads the files of runs: what they did with their time and money, as a page and a text, and while they go on."""
