"""What a run did with its time and money, from the files of its output directory: a page and a text."""
