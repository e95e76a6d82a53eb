"""docs/support.md lists what works with what; run this file to rewrite its tables."""

import json
import re
from dataclasses import replace
from pathlib import Path

from hfscale.core.spelling import speaking
from hfscale.facts.support import (
    CAPABILITIES,
    CONFIGS,
    PROPERTIES,
    TESTED,
    Capability,
    Combination,
    Rule,
    rules,
    why_not,
)

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "support.md"
BEGIN = "<!-- generated from hfscale/facts/support.toml by tests/facts/test_support_page.py -->\n"
END = "<!-- end of what is generated -->\n"
DRAWS = ROOT / "tests" / "parallel" / "draws.json"
AXES = ("tensor", "sequence", "pipeline", "context", "experts", "data")
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def cell(config: str, method: str) -> str:
    """Return what is known about training with a method under a config."""
    if why_not(replace(CONFIGS[config], method=method)) is not None:
        return "refused"
    return "tested" if config in TESTED[method] else "not tested"


def matrix() -> str:
    """Return the table of methods and configs."""
    rows = [f"| `{config}` | {' | '.join(cell(config, method) for method in METHODS)} |\n" for config in CONFIGS]
    return f"| config | {' | '.join(METHODS.values())} |\n|---|{'---|' * len(METHODS)}\n{''.join(rows)}"


def capability_cell(config: str, capability: Capability) -> str:
    """Return what is known about a capability under a config."""
    if why_not(replace(CONFIGS[config], **capability.asks)) is not None:
        return "refused"
    return "tested" if config in capability.tested else "not tested"


def capabilities() -> str:
    """Return the table of configs and capabilities."""
    head = f"| config | {' | '.join(one.title for one in CAPABILITIES)} |\n|---|{'---|' * len(CAPABILITIES)}\n"
    rows = [
        f"| `{config}` | {' | '.join(capability_cell(config, one) for one in CAPABILITIES)} |\n" for config in CONFIGS
    ]
    return f"{head}{''.join(rows)}"


def example(rule: Rule) -> Combination:
    """Return a combination with the values that a rule names, and placeholders for the others."""
    values = {}
    for name, condition in rule.when.items():
        name = {"strategy_family": "strategy"}.get(name, name)
        if name in PROPERTIES and not isinstance(condition, dict):
            values[name] = condition[0] if isinstance(condition, list) else condition
    return Combination(**values)


def asks(rule: Rule) -> str:
    """Return who is refused by a rule: `planned`, `for_recipe` or `all`."""
    return next((name for name in ("planned", "for_recipe") if rule.when.get(name)), "all")


def refused(whom: str) -> str:
    """Return the table of the rules that refuse plans, recipes alone, or all."""
    chosen = [rule for rule in rules() if asks(rule) == whom]
    with speaking("command" if whom == "planned" else "recipe"):
        rows = [f"| {rule.name} | {rule.text(example(rule))} |\n" for rule in chosen]
    return f"| what | why not |\n|---|---|\n{''.join(rows)}"


def drawn() -> str:
    """Return the table of the programs that were drawn for `ParallelTrainer`."""
    found = json.loads(DRAWS.read_text(encoding="utf-8"))
    total = sum(len(numbers) for numbers in found["outcomes"].values())
    rows = []
    for kind, values in found["kinds"].items():
        for value, by_axis in values.items():
            cells = [_drawn_cell(by_axis.get(axis, {})) for axis in AXES]
            rows.append(f"| {kind} | {value} | {' | '.join(cells)} |\n")
    return (
        f"{total} programs were drawn for `ParallelTrainer` (tests/parallel/test_parallel_draws.py), each with one "
        "value of every kind, and compared with one process. A number counts programs that train, evaluate, resume in "
        "another layout and export the same; *refused* those that end with one line because of that value:\n\n"
        f"| kind | value | {' | '.join(AXES)} |\n|---|---|{'---|' * len(AXES)}\n{''.join(rows)}"
    )


def _drawn_cell(counts: dict[str, int]) -> str:
    parts = [str(counts["equal"])] if "equal" in counts else []
    return ", ".join([*parts, *(["refused"] if "refused" in counts else [])]) or "-"


def generated() -> str:
    """Return the part of the page that this file writes."""
    return (
        f"{BEGIN}\n{matrix()}\n"
        "What a run asks for beside its method. *Tested* means that a run under the config was compared with one "
        "process, plain Trainer, a loop by hand or the original files:\n\n"
        f"{capabilities()}\n"
        "Refused with one line, in recipes before anything is loaded, in scripts before the first step by any "
        "callback of hfscale, where parameters are spelled as Python or the launcher's config has them (N is a "
        "number, capital letters are your value):\n\n"
        f"{refused('all')}\n"
        "Refused in recipes alone, because they promise more than a script does, or because no test of a recipe has "
        "covered it:\n\n"
        f"{refused('for_recipe')}\n"
        "`hfscale plan` offers no such layouts, although some of them run:\n\n"
        f"{refused('planned')}\n{drawn()}\n{END}"
    )


def test_the_page_is_generated_from_the_table():
    assert generated() in PAGE.read_text(encoding="utf-8")


def test_the_table_knows_every_config():
    assert set(CONFIGS) == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert set().union(*TESTED.values()) <= set(CONFIGS)


def test_no_combination_is_both_tested_and_refused():
    for method, configs in TESTED.items():
        for config in configs:
            assert why_not(replace(CONFIGS[config], method=method)) is None
    for capability in CAPABILITIES:
        assert set(capability.tested) <= set(CONFIGS)
        assert all(capability_cell(config, capability) == "tested" for config in capability.tested)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(re.escape(BEGIN) + r".*" + re.escape(END), lambda _: generated(), page, flags=re.S))
