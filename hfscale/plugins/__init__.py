"""`ScalingCallback` in programs that make the Trainer themselves: axolotl, ms-swift, LLaMA-Factory.

| module | what is in it | needs |
|---|---|---|
| `section` | the callback that a section of a YAML file describes, and the checkpoint to resume from | |
| `axolotl` | the plug-in that axolotl's `plugins:` names | axolotl |
| `axolotl_plan` | the command `axolotl plan` | axolotl |
| `swift` | the file that `--external_plugins` of ms-swift names | ms-swift |
| `llamafactory` | a program that runs LLaMA-Factory with the callback | LLaMA-Factory |
| `plugins_command` | `hfscale plugins` | |

Nothing here is imported by the rest of hfscale. What it touches inside other libraries:

- `BaseArguments._import_external_plugins` of ms-swift, whose local variable `self` is read. By: swift.py. Reason: a
  file of `--external_plugins` gets no arguments, and the checkpoint must be known before the model is made. Test:
  test_plugins.py.
"""
