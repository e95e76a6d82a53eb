"""What the process that is forked does once, where each launch would do it again: imported for that only."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # builds the table of all models, which the first save needs
