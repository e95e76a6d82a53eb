"""Counts the places of the package that ask which strategy runs, and the lists of strategy names.

`python tests/strategy_sites.py` prints them. A place is

- a call of a function, or an attribute, that says which strategy runs (`requested_family`, `is_fsdp_enabled`, …);
- a comparison with the name of a strategy;
- a look at what one kind of strategy makes of tensors and modules (`isinstance(…, DTensor)`, `ds_tensor`, …).

A list is a tuple, or the keys of a dictionary, with two names or more. The planner and its tables plan strategies, and
`parallel/` and `optim/` are below one: they are left out.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "hfscale"
LEFT_OUT = ("parallel", "optim", "planner", "facts", "tune")
NAMES = {"single", "ddp", "fsdp", "fsdp1", "fsdp2", "zero", "zero0", "zero1", "zero2", "zero3", "parallel", "native"}
QUESTIONS = {
    "running_strategy",
    "requested_family",
    "requested_strategy",
    "is_parallel_trainer",
    "native_layout",
    "is_native",
    "is_sharded_fsdp2",
    "is_distributed_by_transformers",
    "averages_gradients",
}
ATTRIBUTES = {"is_fsdp_enabled", "is_deepspeed_enabled", "distributed_type"}
KINDS = ("DTensor", "FSDPModule", "DistributedDataParallel")
SUBJECTS = ("strategy", "family", "asked", "runs", "reader", "expected", "to ==", "to in", "written")
OTHERS = ("save_strategy", "eval_strategy")


def strings(nodes):
    """Return the strings among constants, and among the elements of tuples, lists and sets."""
    found = []
    for node in nodes:
        elements = node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else [node]
        found += [one.value for one in elements if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return found


def is_question(call):
    """Return whether a call asks which strategy runs, or looks at what one makes of tensors and modules."""
    function = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", None)
    if function in QUESTIONS:
        return True
    if function == "startswith":
        return bool({"zero", "fsdp"} & set(strings(call.args)))
    if function == "isinstance" and len(call.args) == 2:
        kind = ast.unparse(call.args[1])
        return any(name in kind for name in KINDS)
    is_lookup = function in ("getattr", "hasattr") and len(call.args) > 1
    return is_lookup and any(name.startswith("ds_") for name in strings(call.args[1:2]))


def compares_name(node):
    """Return whether a comparison is one with the name of a strategy."""
    text = ast.unparse(node)
    has_name = bool(NAMES & set(strings([node.left, *node.comparators])))
    return has_name and any(word in text for word in SUBJECTS) and not any(word in text for word in OTHERS)


def is_list(node):
    """Return whether a tuple or dictionary lists names of strategies."""
    if isinstance(node, ast.Tuple):
        return len(NAMES & set(strings([node]))) >= 2
    return isinstance(node, ast.Dict) and len(NAMES & set(strings([key for key in node.keys if key]))) >= 2


def count():
    """Return the number of places by file, and the lists as `file:line`."""
    places, lists = Counter(), []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] in LEFT_OUT:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_place = (
                (isinstance(node, ast.Call) and is_question(node))
                or (isinstance(node, ast.Compare) and compares_name(node))
                or (isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES)
            )
            places[str(name)] += is_place
            if is_list(node):
                lists.append(f"{name}:{node.lineno}")
    return +places, lists


if __name__ == "__main__":
    of_files, of_names = count()
    rows = [f"{number:3d} {file}" for file, number in of_files.most_common()]
    total = f"{of_files.total()} places in {len(of_files)} files, {len(of_names)} lists"
    sys.stdout.writelines(f"{line}\n" for line in (*rows, *of_names, total))
