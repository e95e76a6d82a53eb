"""What distillation adds to a training step: a teacher, and a loss that compares what both models predict.

The formulas describe TRL 1.16 (trainer/distillation_trainer.py) as recipes/distillation runs it: the student generates
a completion for each prompt of a step, at once; in each micro-batch the teacher's forward pass follows that of the
student, whose activations are kept meanwhile. All byte counts are per rank, all durations in seconds.
"""

from dataclasses import replace

from hfscale.facts.model_shape import ModelShape
from hfscale.planner.frameworks import Framework, SharedConstants
from hfscale.planner.job import Job
from hfscale.planner.kernels import Rates, layer_forward
from hfscale.planner.network import Group, Network, exposed_s
from hfscale.planner.tasks import forward_bytes

TILE = (4096, 32768)
"""Tokens and vocabulary entries of the two tiles of the loss, of which the second number does not depend on the
vocabulary (TRL 1.16, kernels/chunked_divergence.py, `TOKEN_CHUNK_SIZE` and `VOCAB_CHUNK_SIZE`)."""


def _teacher(job: Job) -> ModelShape:
    assert job.teacher_shape is not None, "checked by `check_task`"
    return job.teacher_shape


def teacher_width(job: Job) -> float:
    """Return the bytes of a weight of the teacher: of its own format, and with DeepSpeed of that of the training.

    Args:
        job (`Job`): the run.
    """
    if job.zero in (1, 2):
        return job.value_bytes
    return 4.0 if job.teacher_dtype == "float32" else 2.0


def teacher_bytes(job: Job) -> float:
    """Compute the bytes of the teacher's weights that a rank keeps; 0 without a teacher.

    Args:
        job (`Job`): the run.
    """
    if job.teacher_shape is None:
        return 0.0
    shards = job.layout.dp_shard if job.shares_teacher else 1
    return teacher_width(job) * job.teacher_shape.total_parameters / shards


def teacher_job(job: Job) -> Job:
    """Return a run of the teacher alone on the same sequences.

    Args:
        job (`Job`): the run.
    """
    return replace(
        job,
        shape=_teacher(job),
        teacher_shape=None,
        task="text",
        method="full",
        activation_checkpointing="none",
    )


def teacher_forward_bytes(job: Job) -> float:
    """Compute the bytes of the teacher's tensors in its forward pass, with the weights that are gathered for it.

    Shared weights are gathered layer by layer, two at a time, with embedding and head, which are freed afterwards. A
    weight in fp32 is cast for its product alone, because it is frozen.

    Args:
        job (`Job`): the run.
    """
    teacher = _teacher(job)
    gathered = 0.0
    if job.shares_teacher:
        ends = teacher.embedding_parameters + teacher.head_parameters
        gathered = teacher_width(job) * (ends + 2 * teacher.mean_layer_parameters)
    return forward_bytes(teacher_job(job)) + gathered


def divergence_bytes(job: Job) -> float:
    """Compute the bytes of the loss at its peak, in its backward pass, with what the teacher has left for it.

    They are two tiles in fp32, the student's in the format of the products too, and the gradients of the student's
    hidden states and, unless it is frozen, of the head, each in fp32 and in the format of the training. The teacher's
    hidden states are there, and its head, which TRL gathers for the loss where ranks share it.

    Args:
        job (`Job`): the run.
    """
    student, teacher = job.shape, _teacher(job)
    completions = job.micro_batch * job.max_completion_length
    rows = min(completions, TILE[0])
    width = job.value_bytes
    tiles = rows * (2 * 4.0 * TILE[1] + width * min(student.vocab, TILE[1]))
    head = 0
    if job.method == "full":
        head = student.vocab * student.embedding_width
    gradients = (4.0 + width) * (completions * student.hidden + head)
    hidden = width * job.tokens * teacher.hidden
    gathered = 0.0
    if job.shares_teacher:
        gathered = width * teacher.vocab * teacher.embedding_width
    return tiles + gradients + hidden + gathered


def teacher_s(
    job: Job, framework: Framework, shared: SharedConstants, network: Network, rates: Rates
) -> float:
    """Compute the seconds of the teacher's part of a micro-batch: its forward pass, and its half of the loss.

    Shared weights are gathered while the layers before them are computed. The loss projects the hidden states of both
    models in its forward and its backward pass.

    Args:
        job (`Job`): the run.
        framework (`Framework`): constants of the training framework.
        shared (`SharedConstants`): constants of hardware and networks.
        network (`Network`): the links between ranks.
        rates (`Rates`): sustained rates of the device.
    """
    alone = teacher_job(job)
    teacher = alone.shape
    forward = teacher.layers * max(
        layer_forward(alone, framework, shared, rates).total, framework.launch_s
    )
    completions = job.micro_batch * job.max_completion_length
    forward += 2 * 2 * completions * teacher.hidden * teacher.vocab / rates.bf16_matmul
    if not job.shares_teacher:
        return forward
    bytes_ = teacher_width(job) * teacher.total_parameters
    gathered = network.gather_s(bytes_, Group(size=job.layout.dp_shard))
    return forward + exposed_s(gathered, forward, framework.overlap_dp)
