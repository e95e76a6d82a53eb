"""The outer optimizer of DiLoCo, on this rank's part of the parameters, in host memory.

An island trains H steps by itself from the anchor, the parameters that all islands have had after the last round. Its
pseudo-gradient is anchor - parameters. The outer optimizer steps the anchor with the mean of the pseudo-gradients, and
all islands continue from there. DiLoCo (Douillard et al., arXiv 2311.08105, sections 2 and 3.1) uses SGD with Nesterov
momentum, learning rate 0.7 and momentum 0.9.

With fragments (Streaming DiLoCo, Donchev et al., arXiv 2501.18512) a round is of one part of the values; each fragment
has its own anchor and momentum.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hfscale.errors import CheckpointError
from hfscale.facts.compression import Compression
from hfscale.islands.codec import decode, encode, encode_with_feedback

OUTER_LR = 0.7
"""Learning rate of the outer optimizer (arXiv 2311.08105, section 3.1)."""
OUTER_MOMENTUM = 0.9
"""Its Nesterov momentum (the same)."""


class OuterOptimizer:
    """Steps the anchor with the mean of the pseudo-gradients of the islands.

    Args:
        values (`Tensor`): this rank's part of the parameters, flat fp32 on the CPU; it becomes the anchor.
        lr (`float`): learning rate.
        momentum (`float`): Nesterov momentum; 0: plain SGD.
        compression (`Compression`): how pseudo-gradients are sent.
        sizes (`Sequence[int]`, *optional*): numbers of values of the fragments, in their order in `values`; by default
            there is one fragment.
    """

    def __init__(
        self,
        values: Tensor,
        *,
        lr: float,
        momentum: float,
        compression: Compression,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.compression = compression
        self.anchor = values
        """Flat fp32 values, changed in place."""
        self._sizes = list(sizes or [values.numel()])
        self._fragments = torch.split(values, self._sizes)
        self._has_momentum = momentum > 0
        self._optimizer = torch.optim.SGD(
            self._fragments, lr=lr, momentum=momentum, nesterov=self._has_momentum
        )
        self._momentum = torch.zeros_like(values) if self._has_momentum else torch.zeros(0)
        if self._has_momentum:
            for fragment, buffer in zip(
                self._fragments, torch.split(self._momentum, self._sizes), strict=True
            ):
                self._optimizer.state[fragment]["momentum_buffer"] = buffer
        self._residual = torch.zeros(0) if compression.lossless else torch.zeros_like(values)
        self._sent: Tensor | None = None
        self._sent_fragment: int | None = None
        self._values = values  # of the last pseudo-gradient

    def anchor_of(self, fragment: int | None) -> Tensor:
        """Return the anchor of a fragment.

        Args:
            fragment (`int`, *optional*): its number; None: all values.
        """
        return self.anchor if fragment is None else self._fragments[fragment]

    def pseudo_gradient(self, values: Tensor, fragment: int | None = None) -> Tensor:
        """Return the payload with which this island contributes to a round.

        Args:
            values (`Tensor`): this rank's part of the fragment's parameters now, flat fp32.
            fragment (`int`, *optional*): number of the fragment; None: all values.

        Returns:
            `Tensor`: the encoded pseudo-gradient, uint8.
        """
        delta = self.anchor_of(fragment) - values
        self._values = values
        self._sent_fragment = fragment
        if self.compression.lossless:
            self._sent = encode(delta, self.compression)
        else:
            self._sent = encode_with_feedback(delta, self._residual_of(fragment), self.compression)
        return self._sent

    def _residual_of(self, fragment: int | None) -> Tensor:
        return (
            self._residual
            if fragment is None
            else torch.split(self._residual, self._sizes)[fragment]
        )

    def withdraw(self, *, anchor_stays: bool) -> None:
        """Take back the last pseudo-gradient, which has not been counted.

        Args:
            anchor_stays (`bool`): whether the next pseudo-gradient is from the same anchor, and so contains this one.
                If it is from another one, the error feedback sends this one later.
        """
        if not self.compression.lossless:
            residual = self._residual_of(self._sent_fragment)
            residual.copy_(self._withdrawn() if anchor_stays else residual + self._decoded(None))
            if not residual.isfinite().all():  # it would spoil all that is sent from now on
                residual.zero_()
        self._sent = None

    def _withdrawn(self) -> Tensor:
        """Return the error feedback of the last pseudo-gradient's fragment as if that had not been made."""
        fragment = self._sent_fragment
        return (
            self._residual_of(fragment)
            + self._decoded(None)
            - (self.anchor_of(fragment) - self._values)
        )

    def continued(self, values: Tensor) -> Tensor:
        """Return the anchor of the last pseudo-gradient's fragment, moved by what was trained since.

        Args:
            values (`Tensor`): this rank's part of the fragment's parameters now, flat fp32.
        """
        return self.anchor_of(self._sent_fragment) + (values - self._values)

    def decode(self, payloads: Sequence[bytearray | None]) -> list[Tensor]:
        """Return the pseudo-gradients of a round, flat fp32.

        Args:
            payloads (`Sequence`): those of the contributors; None is this island's own.
        """
        return [self._decoded(payload) for payload in payloads]

    def step(self, values: Sequence[Tensor]) -> tuple[float, float]:
        """Step the fragment of the last pseudo-gradient with the mean of the contributors'.

        Args:
            values (`Sequence[Tensor]`): what `decode` returned, in the same order on all islands. Without any the
                anchor stays.

        Returns:
            `tuple[float, float]`: sum over this part of the fragment of the squared distance of each contributor from
            their mean, divided by their number; sum of squares of the anchor.
        """
        anchor = self.anchor_of(self._sent_fragment)
        size = float(anchor.square().sum(dtype=torch.float64))
        self._sent = None
        if not values:
            return 0.0, size
        mean = torch.stack(list(values)).mean(dim=0) if len(values) > 1 else values[0]
        spread = sum(
            float((value - mean).square().sum(dtype=torch.float64)) for value in values
        ) / len(values)
        stepped = self._fragments if self._sent_fragment is None else [anchor]
        for fragment, gradient in zip(
            stepped, torch.split(mean, [one.numel() for one in stepped]), strict=True
        ):
            fragment.grad = gradient
        self._optimizer.step()  # only those that have a gradient
        self._optimizer.zero_grad()
        return spread, size

    def drop(self) -> None:
        """Drop the last pseudo-gradient and its error feedback: it is not finite."""
        if not self.compression.lossless:
            self._residual_of(self._sent_fragment).zero_()

    def _decoded(self, payload: bytearray | None) -> Tensor:
        if payload is None:
            assert self._sent is not None
            encoded = self._sent
        else:
            encoded = (
                torch.frombuffer(payload, dtype=torch.uint8)
                if payload
                else torch.zeros(0, dtype=torch.uint8)
            )
        return decode(encoded, self.anchor_of(self._sent_fragment).numel(), self.compression)

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Length of `shared_state`."""
        return 4 * (self.anchor.numel() + self._momentum.numel())

    def shared_state(self) -> memoryview:
        """Return what another island needs to continue from here: anchor and momentum, fp32."""
        return torch.cat([self.anchor, self._momentum]).numpy().data.cast("B")

    def take_shared_state(self, data: bytearray) -> None:
        """Continue from the state of another island. What this island has not sent yet is dropped.

        Args:
            data (`bytearray`): what `shared_state` returned there; its length is `state_bytes`.
        """
        values = torch.frombuffer(data, dtype=torch.float32) if data else torch.zeros(0)
        self.anchor.copy_(values[: self.anchor.numel()])
        self._momentum.copy_(values[self.anchor.numel() :])
        self._residual.zero_()
        self._sent = None

    def digest(self) -> str:
        """Return a hash of `shared_state`."""
        return hashlib.blake2b(self.shared_state(), digest_size=16).hexdigest()

    def reset(self, values: Tensor) -> None:
        """Begin anew.

        Args:
            values (`Tensor`): the new anchor, flat fp32.
        """
        self.anchor.copy_(values)
        self._momentum.zero_()
        self._residual.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the tensors that a checkpoint keeps, without a pseudo-gradient that is on its way."""
        on_its_way = self._sent is not None and not self.compression.lossless
        residual = self._residual.clone()
        if on_its_way:
            sent = (
                residual
                if self._sent_fragment is None
                else torch.split(residual, self._sizes)[self._sent_fragment]
            )
            sent.copy_(self._withdrawn())
        return {
            "anchor": self.anchor.clone(),
            "momentum": self._momentum.clone(),
            "residual": residual,
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned. With another compression the residual is dropped.

        Args:
            state (`dict[str, Tensor]`): the tensors of a checkpoint.

        Raises:
            CheckpointError: the part of the parameters has another size.
        """
        if state["anchor"].shape != self.anchor.shape:
            raise CheckpointError(
                f"the outer state has {state['anchor'].numel()} values, and this rank's part of the parameters "
                f"{self.anchor.numel()}: resume an island on as many processes, with the same strategy"
            )
        self.anchor.copy_(state["anchor"])
        for name, tensor in (("momentum", self._momentum), ("residual", self._residual)):
            if state[name].shape == tensor.shape:
                tensor.copy_(state[name])
