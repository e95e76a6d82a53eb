"""Muon: the update of each matrix of the hidden layers is orthogonalized; AdamW updates all other parameters."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from hfscale.errors import ParameterError, UsageError
from hfscale.optim.newton_schulz import orthogonal_factors

_RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW's updates: J. Liu et al., Muon is Scalable for LLM Training, 2025, arXiv 2502.16982,
section 2.2."""


class Muon(Optimizer):
    """Muon for the matrices of the hidden layers, AdamW for embeddings, output head and vectors.

    A matrix W of shape (A, B) with gradient G is updated as in `torch.optim.Muon` (K. Jordan et al., 2024):

        M <- momentum x M + (1 - momentum) x G
        U <- orthogonal factor of (1 - momentum) x G + momentum x M, by Newton-Schulz iterations
        W <- (1 - lr x weight_decay) x W - lr x scale x U

    with scale = 0.2 sqrt(max(A, B)), so that the root mean square of the update is that of AdamW and both use one
    learning rate (arXiv 2502.16982), or sqrt(max(1, A / B)) (`adjust_lr="original"`). The whole matrix is
    orthogonalized, however ranks share it: a sharded training takes the steps of one process. A matrix into which a
    model joins several, such as gate and up projections, counts as one; a stack of experts counts as its matrices.

    With plain Trainer:

        Trainer(..., optimizer_cls_and_kwargs=(Muon, {"module": model, "lr": args.learning_rate}))

    Its state holds `momentum_buffer` for a matrix, and AdamW's `exp_avg`, `exp_avg_sq` and `step` for the others.

    Args:
        params (`Iterable`): parameters or groups of them, as for any optimizer of torch.
        module (`nn.Module`): the model, whose modules say which parameters are matrices of hidden layers: of two or
            three dimensions, and neither of an embedding, of the output head, nor of a convolution.
        lr (`float`): the learning rate of all parameters.
        weight_decay (`float`): decoupled weight decay of groups that name none.
        momentum (`float`): of the matrices.
        iterations (`int`): Newton-Schulz iterations.
        adjust_lr (`str`): `match_rms_adamw` or `original`, as `adjust_lr_fn` of `torch.optim.Muon`.
        dtype (`torch.dtype`): in which the iterations are computed; bf16 is what all implementations use.
        betas (`tuple[float, float]`): of AdamW.
        eps (`float`): of AdamW.

    Raises:
        ParameterError: a value is out of its range.
        UsageError: `params` has no matrix of a hidden layer of the module.
    """

    steps_shards_as_wholes = True
    """Its update of a parameter that ranks share is that of the complete one (`hfscale.parallel.optimizers`)."""

    def __init__(
        self,
        params: ParamsT,
        *,
        module: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        iterations: int = 5,
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        dtype: torch.dtype = torch.bfloat16,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        _check(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            iterations=iterations,
            adjust_lr=adjust_lr,
        )
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "iterations": iterations,
                "adjust_lr": adjust_lr,
                "betas": betas,
                "eps": eps,
            },
        )
        self._dtype = dtype
        matrices = {id(parameter) for parameter in hidden_matrices(module)}
        # By position: Accelerate's FSDP2 replaces the parameters of an optimizer by sharded ones.
        self._is_matrix = [
            [id(parameter) in matrices for parameter in group["params"]]
            for group in self.param_groups
        ]
        if not any(map(any, self._is_matrix)):
            raise UsageError(
                "Muon updates the matrices of hidden layers, and none of them is trained: use AdamW for this model"
            )
        self._adamw = AdamW(self._groups(matrices=False), betas=betas, eps=eps)
        # It gets its groups in each step: these parameters may be replaced by shards
        self._adamw.param_groups = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. Every rank that shares a matrix calls it.

        Args:
            closure (`Callable`, *optional*): computes the loss again and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self._groups(matrices=True):
            self._update_matrices(group)
        self._adamw.param_groups = [
            self._adamw.defaults | group for group in self._groups(matrices=False)
        ]
        self._adamw.state = self.state
        self._adamw.step()
        self._adamw.param_groups = []
        return loss

    def _groups(self, *, matrices: bool) -> list[dict[str, Any]]:
        """Return the groups with their matrices alone, or with all other parameters alone."""
        return [
            {
                **group,
                "params": [
                    parameter
                    for parameter, is_matrix in zip(group["params"], kinds, strict=True)
                    if is_matrix == matrices
                ],
            }
            for group, kinds in zip(self.param_groups, self._is_matrix, strict=True)
        ]

    def _update_matrices(self, group: dict[str, Any]) -> None:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        momentum = group["momentum"]
        directions = []
        for parameter in trained:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
            directions.append(parameter.grad.lerp(buffer, momentum))
        factors = orthogonal_factors(directions, iterations=group["iterations"], dtype=self._dtype)
        lr = float(group["lr"])
        for parameter, factor in zip(trained, factors, strict=True):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.mul_(1 - lr * group["weight_decay"])
            local.add_(factor, alpha=-lr * _scale(parameter.shape, group["adjust_lr"]))


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of a model that Muon updates.

    Embeddings and the output head are left to AdamW: their gradients are sparse or their rows are independent
    (https://kellerjordan.github.io/posts/muon/, "Empirical considerations").

    Args:
        module (`nn.Module`): a model, before or after it has been sharded.
    """
    others = {
        id(parameter)
        for owner in module.modules()
        if isinstance(owner, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        for parameter in owner.parameters(recurse=False)
    }
    get_head: Any = getattr(module, "get_output_embeddings", lambda: None)
    head = get_head()
    if head is not None:
        others |= {id(parameter) for parameter in head.parameters()}
    return [
        parameter
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.ndim in (2, 3) and id(parameter) not in others
    ]


def _scale(shape: Iterable[int], adjust_lr: str) -> float:
    """Return the factor of the learning rate for a matrix of a shape."""
    *_, rows, columns = shape
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    return _RMS_OF_ADAMW * math.sqrt(max(rows, columns))


def _check(
    *, lr: float, weight_decay: float, momentum: float, iterations: int, adjust_lr: str
) -> None:
    for name, value in {"lr": lr, "weight_decay": weight_decay}.items():
        if not value >= 0.0:
            raise ParameterError(name, value, "Muon takes a number from 0")
    if not 0.0 <= momentum < 1.0:
        raise ParameterError(
            "momentum", momentum, "Muon takes a number from 0 to below 1, such as 0.95"
        )
    if not 1 <= iterations <= 20:
        raise ParameterError(
            "iterations", iterations, "Muon takes a number from 1 to 20, such as 5"
        )
    if adjust_lr not in ("match_rms_adamw", "original"):
        raise ParameterError("adjust_lr", adjust_lr, "Muon takes match_rms_adamw or original")
