"""What preference tuning and reinforcement learning add to a training step: a reference model and generation.

The formulas describe TRL 1.16, which the recipes of `recipes/sft`, `recipes/dpo` and `recipes/grpo` run; their sources
are named with TRL's files. All byte counts are per rank, all durations in seconds. These tasks are planned with data
parallelism alone: DDP, ZeRO and FSDP2.

- `sft`: a plain training step with the loss on part of the tokens. States, activations and time are those of `text`;
  the loss takes less memory, because TRL projects the hidden states to logits in tiles.
- `dpo`: an example is a pair of sequences, the chosen and the rejected one (Rafailov et al., arXiv 2305.18290), which
  pass the model together. A frozen reference model computes their log-probabilities without gradients, after the
  forward pass of the policy (trainer/dpo_trainer.py, `_compute_loss`). With adapters the reference is the policy with
  its adapters disabled; with `precompute_ref_log_probs` the log-probabilities come from the dataset.
- `grpo`: completions are generated in groups for each prompt, and one step trains on them (Shao et al., arXiv
  2402.03300). The reference exists only with a KL coefficient above 0; TRL's default is 0. The log-probabilities of
  the old policy are those of the training forward pass, because a step trains once on what was generated for it
  (trainer/grpo_trainer.py, `generate_every`): they cost nothing.
"""

from dataclasses import replace

from hfscale.facts.layer_shape import LinearAttentionShape, MambaShape
from hfscale.planner.frameworks import Framework, SharedConstants
from hfscale.planner.frozen import mean_bytes, read_bytes
from hfscale.planner.job import Job
from hfscale.planner.kernels import Rates, layer_forward
from hfscale.planner.network import Group, Network, exposed_s

BATCH_UNITS = {"dpo": "pairs", "grpo": "completions", "distillation": "completions"}
"""What a batch of a task counts, where it is not sequences."""
GENERATION_ROUNDS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rounds in which the completions of a step are generated that are tried; more rounds need less memory."""
LOGIT_COPIES_BYTES = 10.0
"""Bytes per logit of the last token while a token is sampled, measured with torch's MemTracker at TRL's default
sampling (without top-p and top-k): the logits, and copies of them in fp32."""
AUTOCAST_BYTES = 8.0
"""Bytes of memory traffic per fp32 weight and forward pass under autocast, which casts the weights in each call: 4 are
read, 2 written and 2 read."""


# -- the reference model ----------------------------------------------------------------------------------------------


def reference_bytes(job: Job) -> float:
    """Compute the bytes of the reference model's parameters that a rank keeps; 0 without such a model.

    TRL loads it in the format of the policy, fp32 (trainer/dpo_trainer.py and grpo_trainer.py). FSDP2 shards it
    (models/utils.py, `prepare_fsdp`); DeepSpeed holds it in the training format, and shards it with stage 3 only
    (`prepare_deepspeed`); DDP keeps all of it.

    Args:
        job (`Job`): the run.
    """
    if not job.has_reference_model:
        return 0.0
    parameters = float(job.shape.total_parameters)
    low = job.value_bytes
    if job.zero == 3:
        return 4.0 * parameters / job.layout.dp_shard
    return (low if job.zero else 4.0) * parameters


def reference_buffer_bytes(job: Job) -> float:
    """Compute the bytes of gathered or cast weights during the reference's forward pass.

    FSDP2 gathers the whole reference model at once, because TRL wraps it as one unit (models/utils.py,
    `prepare_fsdp`), and while it is copied out of the buffer of the all-gather it exists twice (torch,
    `foreach_all_gather_copy_out`). With adapters the policy's own units are gathered, as in its own forward pass.
    Autocast keeps the copies that it makes under DDP until the forward pass ends.

    Args:
        job (`Job`): the run.
    """
    low = job.value_bytes
    parameters = float(job.shape.total_parameters)
    if not job.has_reference_model:
        return 0.0
    if job.zero == 3 and job.layout.dp_shard > 1:
        return 2 * low * parameters
    return low * parameters if job.zero in (0, 3) and job.precision != "fp32" else 0.0


def reference_s(
    job: Job, framework: Framework, shared: SharedConstants, network: Network, rates: Rates
) -> float:
    """Compute the seconds of the reference's forward pass of one micro-batch; 0 without one.

    It is a forward pass of all layers and of the head. FSDP2 gathers a reference model as a whole before it starts;
    with adapters the policy's units are gathered while it runs.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
        shared (`SharedConstants`): constants of hardware and networks.
        network (`Network`): the links between ranks.
        rates (`Rates`): sustained rates of the device.
    """
    if not job.has_reference_pass:
        return 0.0
    shape = job.shape
    forward = shape.layers * max(
        layer_forward(job, framework, shared, rates).total, framework.launch_s
    )
    forward += 2 * job.tokens * shape.hidden * shape.vocab / rates.bf16_matmul
    gathered = _gather_s(job, network, float(shape.total_parameters))
    if job.has_reference_model:
        return gathered + forward
    return forward + exposed_s(gathered, forward, framework.overlap_dp)


def _gather_s(job: Job, network: Network, parameters: float) -> float:
    """Seconds to gather parameters that ZeRO-3 or FSDP2 shards; 0 for other strategies."""
    if job.zero < 3:
        return 0.0
    return network.gather_s(mean_bytes(job) * parameters, Group(size=job.layout.dp_shard))


def forward_bytes(job: Job) -> float:
    """Compute the bytes of a layer's tensors that exist at the same time in a forward pass without gradients.

    Measured with torch's MemTracker for Hugging Face's layers they are 4 h + 3 f elements of 2 bytes: residuals and
    norms, and inside a gated MLP the activated gate, the other factor and their product.

    Args:
        job (`Job`): the run.
    """
    shape = job.shape
    return 2.0 * job.tokens * (4 * shape.hidden + (3 if shape.gated else 2) * shape.mlp_width)


# -- generation -------------------------------------------------------------------------------------------------------


def generated_at_once(job: Job) -> int:
    """Count the completions that a rank generates at the same time: those of a step, divided by the rounds."""
    return job.micro_batch * job.micro_batches // job.generation_rounds


def kv_cache_bytes(job: Job, tokens: int) -> float:
    """Compute the bytes of the cached keys and values of the sequences that are generated at the same time.

    A token takes 2 bytes per element of keys and values and layer (Kwon et al., PagedAttention, arXiv 2309.06180,
    section 3); a layer with a sliding window caches only its window.

    Args:
        job (`Job`): the run.
        tokens (`int`): tokens of each sequence so far.
    """
    return 2.0 * generated_at_once(job) * _cached_elements(job, tokens)


def _cached_elements(job: Job, tokens: float) -> float:
    """Elements of keys and values that all layers cache of one sequence of this many tokens."""
    shape = job.shape
    elements = 0.0
    for kind in shape.layer_kinds:
        mixer = kind.mixer
        if isinstance(mixer, LinearAttentionShape):  # a state per head, in fp32
            elements += kind.share * 2 * mixer.value_width * mixer.head_dim
        elif isinstance(mixer, MambaShape):
            elements += kind.share * 2 * mixer.inner_width * mixer.state
        elif mixer is not None:
            reach = tokens if kind.window is None else min(tokens, kind.window)
            elements += kind.share * mixer.kv_width * reach
    return shape.layers * elements


def generation_weight_bytes(job: Job) -> float:
    """Compute the bytes of the gathered or cast weights during generation.

    FSDP2 gathers layer by layer for each token: two layers, the embedding and the head at a time. (DeepSpeed's stage 3
    would gather all weights once, `ds3_gather_for_generation`; plans with stage 3 run FSDP2.) Under DDP autocast casts
    all weights in each forward pass.

    Args:
        job (`Job`): the run.
    """
    shape = job.shape
    if job.precision == "fp32" and job.zero != 3:
        return 0.0
    width = job.value_bytes
    if job.zero == 3 and job.layout.dp_shard > 1:
        ends = shape.embedding_parameters + shape.head_parameters
        return width * (ends + 2 * shape.mean_layer_parameters)
    return width * shape.total_parameters if job.method == "full" and job.zero in (0, 3) else 0.0


def prompt_job(job: Job) -> Job:
    """Return a job whose micro-batch is the prompts that a rank generates from at the same time."""
    batch = generated_at_once(job)
    prompt = job.seq_len - job.max_completion_length
    return replace(
        job,
        micro_batch=batch,
        global_batch=batch * job.data_parallel,
        seq_len=prompt,
        generation_rounds=1,
    )


def generation_s(
    job: Job, framework: Framework, shared: SharedConstants, network: Network, rates: Rates
) -> float:
    """Compute the seconds in which a step's completions are generated, each at its full length.

    A round is a forward pass over the prompts and one step per token. A step of decoding is bound by the memory
    bandwidth: it reads all weights and all cached keys and values (Pope et al., arXiv 2211.05102, section 2), unless
    the batch is so large that the matrix products take longer, or so small that the launch of the kernels does. FSDP2
    gathers the weights again for each token, while the previous layer is computed. A round lasts until its longest
    completion ends, so the full length is an upper bound.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
        shared (`SharedConstants`): constants of hardware and networks.
        network (`Network`): the links between ranks.
        rates (`Rates`): sustained rates of the device.
    """
    shape = job.shape
    layers = shape.layers
    batch = generated_at_once(job)
    prompts = layer_forward(prompt_job(job), framework, shared, rates).total
    gathered = _gather_s(job, network, shape.mean_layer_parameters)
    ends = shape.embedding_parameters + shape.head_parameters
    width = _decoded_width(job)
    used = shape.mean_layer_parameters
    if shape.moe is not None:  # a small batch reads only the experts that its tokens are sent to
        used -= shape.mean_expert_parameters * (
            1 - min(1.0, batch * shape.top_k / shape.moe.experts)
        )
    mean_length = job.seq_len - job.max_completion_length / 2
    cache = 2.0 * batch * _cached_elements(job, mean_length) / layers
    active = shape.active_parameters / layers
    layer = max(
        (width * used + cache) / rates.memory, 2 * batch * active / rates.matmul, framework.launch_s
    )
    token = layers * max(layer, gathered)
    token += width * shape.head_parameters / rates.memory + _gather_s(job, network, float(ends))
    token += LOGIT_COPIES_BYTES * batch * shape.vocab / rates.memory
    prefill = layers * max(prompts, framework.launch_s, gathered)
    return job.generation_rounds * (prefill + job.max_completion_length * token)


def _decoded_width(job: Job) -> float:
    """Bytes of memory traffic per weight and generated token."""
    if job.method == "qlora":
        return read_bytes(job)
    if job.precision == "fp32":
        return 4.0
    is_cast = job.method == "full" and (
        job.zero == 0 or (job.zero == 3 and job.layout.dp_shard == 1)
    )
    return AUTOCAST_BYTES if is_cast else 2.0
