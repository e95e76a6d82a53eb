"""What images add to a training step: the vision tower and the projector of an image-and-text model.

Tower and projector are in `hfscale.facts.tower_shape`. Each is frozen or trained; adapters leave both frozen. All byte
counts are per rank, all durations in seconds.
"""

from typing import NamedTuple

from hfscale.planner.activations import regime_of
from hfscale.planner.frameworks import Framework, SharedConstants
from hfscale.planner.job import Job
from hfscale.planner.kernels import Rates
from hfscale.planner.network import Group, Network, exposed_s

PIXEL_BYTES = 4.0
"""Bytes of a number of an image in a batch: processors return fp32."""


class ImageParameters(NamedTuple):
    """Numbers of parameters that read images, on all ranks together."""

    trained: float = 0.0
    """Those that get a gradient."""
    frozen: float = 0.0
    """The others."""


class ImageBytes(NamedTuple):
    """Bytes of the images of a micro-batch."""

    kept: float = 0.0
    """Kept until the backward pass, with the images themselves."""
    forward: float = 0.0
    """In addition while the tower's forward pass runs."""
    backward: float = 0.0
    """In addition while the backward pass of a trained tower runs."""


def image_parameters(job: Job) -> ImageParameters:
    """Count the parameters that read images; all 0 without images.

    Those of LLaVA's last layer, whose output nobody reads, count as trained with the others: DDP and DeepSpeed keep
    gradients of them.

    Args:
        job (`Job`): the run.
    """
    tower = job.tower
    if tower is None:
        return ImageParameters()
    trained = 0
    if job.train_vision_tower:
        trained += tower.tower_parameters
    if job.trains_projector:
        trained += tower.projector_parameters
    return ImageParameters(trained, tower.total_parameters - trained)


def images_at_once(job: Job) -> int:
    """Count the images of a micro-batch.

    Args:
        job (`Job`): the run.
    """
    return job.micro_batch * job.images


def image_bytes(job: Job) -> ImageBytes:
    """Compute the bytes of the images of a micro-batch; all 0 without images.

    Args:
        job (`Job`): the run.
    """
    tower = job.tower
    if tower is None:
        return ImageBytes()
    images = images_at_once(job)
    regime = regime_of(job)
    recompute = job.activation_checkpointing
    kept = tower.kept_bytes(
        regime,
        recompute,
        trains_tower=job.train_vision_tower,
        trains_projector=job.trains_projector,
    )
    backward = 0.0
    if job.train_vision_tower and recompute != "none":
        backward = tower.layer_bytes(regime, "none") - tower.layer_bytes(regime, recompute)
    return ImageBytes(
        kept=images * (PIXEL_BYTES * tower.pixels + kept),
        forward=images * tower.forward_bytes(regime),
        backward=images * max(0.0, backward),
    )


def image_root_parameters(job: Job) -> float:
    """Count the parameters that read images and that FSDP2 gathers with the rest of the model.

    Units of FSDP2 are the layers of the tower, or only their attention (`TowerShape.layers_are_units`).

    Args:
        job (`Job`): the run; 0 without images.
    """
    tower = job.tower
    if tower is None:
        return 0.0
    in_units = tower.layer_parameters if tower.layers_are_units else tower.attention_parameters
    return float(tower.total_parameters - tower.layers * in_units)


def image_unit_parameters(job: Job) -> float:
    """Count the parameters of the largest unit of FSDP2 in the tower.

    Args:
        job (`Job`): the run; 0 without images.
    """
    tower = job.tower
    if tower is None:
        return 0.0
    in_units = tower.layer_parameters if tower.layers_are_units else tower.attention_parameters
    return float(in_units)


def image_flops(job: Job, *, recomputed: bool = False) -> float:
    """Compute the FLOPs of the images of a micro-batch: a forward pass, and of a trained tower a backward pass.

    Args:
        job (`Job`): the run; 0 without images.
        recomputed (`bool`): whether to count what is computed again in the backward pass.
    """
    if job.tower is None:
        return 0.0
    passes = 1
    if job.train_vision_tower:
        passes += 2
        if recomputed and job.activation_checkpointing == "full":
            passes += 1
    return passes * images_at_once(job) * job.tower.flops


def images_s(
    job: Job, framework: Framework, shared: SharedConstants, network: Network, rates: Rates
) -> tuple[float, float]:
    """Compute the seconds of the images of a micro-batch: of computation, and of exposed communication.

    Computation is that of the FLOPs at the rate of matrix products. Weights that ranks share are gathered for each
    pass.

    Args:
        job (`Job`): the run; both are 0 without images.
        framework (`Framework`): constants of the training framework.
        shared (`SharedConstants`): constants of hardware and networks.
        network (`Network`): the links between ranks.
        rates (`Rates`): sustained rates of the device.
    """
    tower = job.tower
    if tower is None:
        return 0.0, 0.0
    compute = image_flops(job, recomputed=True) / rates.bf16_matmul
    passes = 2 if job.train_vision_tower else 1
    compute = max(compute, passes * tower.layers * framework.launch_s)
    if job.zero < 3 or job.layout.dp_shard == 1:
        return compute, 0.0
    gathered = passes * network.gather_s(
        job.value_bytes * tower.total_parameters, Group(size=job.layout.dp_shard)
    )
    return compute, exposed_s(gathered, compute, framework.overlap_dp)
