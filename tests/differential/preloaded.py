"""What the process that is forked does once, where each launch would do it again: imported for that only."""

import functools
from contextlib import suppress

from accelerate.utils import imports
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # builds the table of all models, which the first save needs
# Reads the metadata of a package each time, and each Accelerator asks for sixteen of them
imports._is_package_available = functools.cache(imports._is_package_available)
for name, ask in list(vars(imports).items()):
    if name.startswith("is_") and name.endswith("_available"):
        with suppress(Exception):  # of packages for other devices
            ask()
