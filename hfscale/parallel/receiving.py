"""Pipeline stages that hold what they receive only while it is needed.

torch before 2.15 allocates a buffer for the hidden states of each micro-batch, and one for their gradients, when a
schedule runs first, and keeps them as long as the schedule. With 64 micro-batches that has cost others 52 GiB per GPU
(NeMo AutoModel, pull request 3780). From 2.15 on a buffer is allocated when its receive begins, and let go when its
pass has run (pull request 196463); `ReceivingStage` does so with earlier versions.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from hfscale.core.versions import keeps_receive_buffers


class ReceivingStage(PipelineStage):
    """A stage whose buffers exist from the begin of a receive to the pass that uses what was received.

    Its arguments are those of `PipelineStage`. A descriptor of a receive whose buffer is not there holds a tensor of
    its shape on the meta device.
    """

    of_rank: Sequence["ReceivingStage"] = ()
    """All stages of this rank; those that the first pass of a schedule has found."""
    _keeps_buffers: bool = keeps_receive_buffers()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's hidden states, and allocate what they are written to."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradients of a micro-batch's hidden states, and allocate what they are written
        to."""
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the output of another stage of this rank."""
        self._drop_first_buffers()
        super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of one micro-batch."""
        self._drop_first_buffers()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        # What the backward pass needs, torch holds elsewhere
        self._let_go(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of one micro-batch, or its part for the inputs."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._let_go(self.grad_recv_info[bwd_chunk_id])

    def _allocate(self, descriptors: Iterable[Any]) -> None:
        self._drop_first_buffers()
        if self._keeps_buffers:
            for descriptor in descriptors:
                if descriptor.buffer is not None:
                    descriptor.buffer = torch.empty_like(descriptor.buffer, device=self.device)

    def _let_go(self, descriptors: Iterable[Any]) -> None:
        if self._keeps_buffers:
            for descriptor in descriptors:
                if descriptor.buffer is not None:
                    descriptor.buffer = torch.empty_like(descriptor.buffer, device="meta")

    def _drop_first_buffers(self) -> None:
        """Let go of what torch has allocated for all micro-batches, in the first pass of any stage of this rank."""
        stages, self.of_rank = self.of_rank, ()
        for stage in stages:
            stage.of_rank = ()
            for by_micro_batch in (stage.args_recv_info, stage.grad_recv_info):
                for descriptors in by_micro_batch.values():
                    stage._let_go(descriptors)
