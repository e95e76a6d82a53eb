"""What the recipes share. A recipe imports these functions and calls them in the order of this table.

| module | contents |
|---|---|
| `parsing` | `--config`, the command line, `--help` |
| `arguments` | the flags as dataclasses with their checks, and the callback that is built of them |
| `layout`, `compatibility` | sizes of the parallel axes; checks that refuse combinations that do not work |
| `entrypoint` | output directory, errors as one line, exit codes, exported model, summary |
| `resume` | the checkpoint to resume from, and the accumulation that keeps the global batch |
| `data`, `corpus` | text packed into sequences; the embedded default text, tokenizer and model |
| `models`, `compression` | loading of model, tokenizer and adapters; gradient compression of DDP |
| `trl`, `rewards` | TRL's arguments, records and reference models; reward functions |
"""

from hfscale.utils.versions import require_for_import

require_for_import("recipes")
