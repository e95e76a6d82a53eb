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

What it touches inside other libraries: each entry says by which function, why there is no public way, and which test
fails when a new version moves it.

Read, called, or set once

- `PreTrainedModel._is_stateful`. By: `reason_not_to_cut`. Reason: nothing public tells that a model has layers that
  pass a state along the sequence. Test: test_packing.py, test_models_that_do_not_cut_are_refused.
- `_scaled_dot_product_cudnn_attention`, `_scaled_dot_product_efficient_attention`,
  `_scaled_dot_product_flash_attention` and `_scaled_dot_product_flash_attention_for_cpu` of torch. By: arguments.py.
  Reason: selective recomputation names the operators whose outputs it keeps. Test: test_recompute.py.
"""

from hfscale.core.versions import require_for_import

require_for_import("recipes")
