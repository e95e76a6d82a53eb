"""The parts of a day on GPUs, in the order in which they run: what is known to fail or to be slow comes first."""

from dataclasses import dataclass

from hfscale.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Part:
    """A measurement that runs in a process of its own."""

    name: str
    limit_s: int
    """Seconds after which it is ended, with everything that it has started."""
    function: str
    """Module and function that measure, such as `benchmarks.gpu.speed:recipe`."""
    arguments: tuple[str, ...] = ()
    """Arguments of the function."""
    gpus: int = 1
    """GPUs of a node that it needs."""
    nodes: int = 1
    """Nodes that it needs."""
    packages: tuple[str, ...] = ()
    """Modules that it imports and an image may lack."""
    cuda_only: bool = False
    """Whether it measures what a CPU does not have, so that it does not run in tiny shapes either."""

    @property
    def summary(self) -> str:
        """What it calls, for `--list`."""
        module, _, function = self.function.rpartition(".")[2].partition(":")
        return " ".join([f"{module}.{function}", *self.arguments])


def _part(
    name: str,
    limit_s: int,
    function: str,
    *arguments: str,
    gpus: int = 1,
    nodes: int = 1,
    packages: tuple[str, ...] = (),
    cuda_only: bool = False,
) -> Part:
    return Part(
        name=name,
        limit_s=limit_s,
        function=f"benchmarks.gpu.{function}",
        arguments=arguments,
        gpus=gpus,
        nodes=nodes,
        packages=packages,
        cuda_only=cuda_only,
    )


# A recipe takes 45 to 60 s on one H100 from its command to its end, 90 s with LoRA on 8B parameters.
PARTS = (
    # What failed or was slow on the first day.
    _part("experts", 150, "speed:experts"),
    _part("fp8_save", 220, "saves:fp8_save", packages=("torchao",), cuda_only=True),
    _part("packed_1b", 120, "speed:recipe", "llama-1b", "packed"),
    _part("callback_cost", 150, "health:callback_cost"),
    _part("save_background", 150, "saves:stall", "ddp", "true"),
    _part("save_waiting", 150, "saves:stall", "ddp", "false"),
    _part("packed_compiled_1b", 150, "speed:recipe", "llama-1b", "packed_compiled", cuda_only=True),
    # Speed and memory, beside what users run instead.
    _part("recipe_1b", 120, "speed:recipe", "llama-1b"),
    _part("trainer_1b", 60, "peers:trainer", "llama-1b"),
    _part("trainer_compile_1b", 90, "peers:trainer", "llama-1b", "torch_compile"),
    _part("trainer_liger_1b", 75, "peers:trainer", "llama-1b", "use_liger_kernel", packages=("liger_kernel",)),
    _part("trl_1b", 75, "peers:trl", "llama-1b", packages=("trl", "datasets")),
    _part("loop_1b", 60, "peers:loop", "llama-1b"),
    _part("recipe_8b", 150, "speed:recipe", "llama-8b", packages=("peft",)),
    _part("trainer_8b", 90, "peers:trainer", "llama-8b", packages=("peft",)),
    _part("trl_8b", 90, "peers:trl", "llama-8b", packages=("trl", "datasets", "peft")),
    _part("loop_8b", 90, "peers:loop", "llama-8b", packages=("peft",)),
    _part("eager_1b", 100, "speed:recipe", "llama-1b", "eager"),
    _part("profile_1b", 120, "profiles:profile", "llama-1b"),
    _part("profile_8b", 150, "profiles:profile", "llama-8b", packages=("peft",)),
    # What was not measured, or while another run was on the card.
    _part("fsdp2_1b", 120, "speed:strategy", "llama-1b", "fsdp2"),
    _part("zero2_1b", 120, "speed:strategy", "llama-1b", "zero2", packages=("deepspeed",)),
    _part("zero3_1b", 120, "speed:strategy", "llama-1b", "zero3", packages=("deepspeed",)),
    _part("qlora_1b", 200, "speed:qlora", packages=("peft", "bitsandbytes"), cuda_only=True),
    _part("muon_1b", 120, "speed:recipe", "llama-1b", "muon"),
    _part("recipe_3b", 150, "speed:recipe", "llama-3b"),
    _part("long_8_layers", 150, "speed:recipe", "8-layers-of-8b"),
    _part("start_1b", 200, "start:start", "llama-1b"),
    _part("recipe_135m", 100, "speed:recipe", "smollm2-135m"),
    _part("save_fsdp2", 200, "saves:stall", "fsdp2", "true"),
    _part("pinned_memory", 60, "saves:pinned", cuda_only=True),
    # What is right: these end a run, or compare its numbers.
    _part("gpu_tests", 240, "commands:gpu_tests", packages=("pytest",), cuda_only=True),
    _part("machine", 90, "commands:look_at_machine"),
    _part("kill", 240, "saves:kill"),
    _part("replays", 240, "health:replays"),
    _part("waits", 60, "health:waits"),
    _part("trace", 90, "health:trace"),
    _part("imports", 120, "commands:imports", cuda_only=True),
    _part("two_ranks_on_one_gpu", 120, "several:two_ranks_on_one_gpu"),
    # Eight GPUs of one node.
    _part("check_8", 120, "several:check", gpus=8),
    _part("ddp_8", 150, "several:strategy", "ddp", gpus=8),
    _part("fsdp2_8", 150, "several:strategy", "fsdp2", gpus=8),
    _part("zero2_8", 150, "several:strategy", "zero2", gpus=8, packages=("deepspeed",)),
    _part("zero3_8", 150, "several:strategy", "zero3", gpus=8, packages=("deepspeed",)),
    _part("tp_pp_8", 180, "several:tensor_and_pipeline", gpus=8),
    _part("interleaved_8", 150, "several:interleaved_evaluation", gpus=8),
    _part("kill_rank_8", 300, "several:kill_rank", gpus=8),
    # Two such nodes: the same command on both.
    _part("two_nodes_ddp", 200, "several:two_nodes", "ddp", gpus=8, nodes=2),
    _part("two_nodes_fsdp2", 200, "several:two_nodes", "fsdp2", gpus=8, nodes=2),
)


def parts_named(names: list[str]) -> list[Part]:
    """Return the parts of these names in their order, or all.

    Args:
        names (`list[str]`): Names; none means all parts.

    Raises:
        UsageError: A name is not that of a part.
    """
    known = {part.name: part for part in PARTS}
    for name in names:
        if name not in known:
            raise UsageError(f"no part is named '{name}': python -m benchmarks.gpu --list names them")
    return [part for part in PARTS if not names or part.name in names]
