"""torch.distributed.pipelining on one rank: the answers that its stages would get from stages on other ranks.

A stage allocates its own buffers, with shapes that the stages exchange in the first step
(torch/distributed/pipelining/stage.py, PipelineStage). The gradient of a sent tensor has the shape of that tensor, so
the first stage needs no shapes from other ranks. The inputs of a later stage are those that the script declares
(input_args), or have the shapes that an earlier stage on this rank sends; otherwise they are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...base.compat import symbol
from ...base.errors import NotAvailable
from ...base.notes import Note
from ..values.placeholders import located

STAGE = "torch.distributed.pipelining.stage"
ALIKE = Note(
    "stage-shapes",
    "Stages on other ranks are assumed to send tensors of the same shapes as the first stage on this rank.",
)


@contextmanager
def stages_alone(notes: dict[Note, None]) -> Iterator[None]:
    """Answer PipelineStage for the stages of other ranks until the block ends; assumptions are added to `notes`."""
    stage = symbol(f"{STAGE}.PipelineStage")
    sent: dict[int, Any] = {}  # by stage of this rank: the metadata sent to the next stage

    def send_meta(self: Any, meta: Any, dst_stage: int) -> None:
        if dst_stage > self.stage_index:
            sent[self.stage_index] = meta

    def recv_meta(self: Any, src_stage: int) -> Any:
        if src_stage > self.stage_index:
            metas = tuple(replace(tensor, requires_grad=False) if tensor.requires_grad else None
                          for tensor in self._stage_meta.outputs)  # fmt: skip
            return symbol(f"{STAGE}._StageBackwardMeta")(backward_metas=metas)
        if self._user_meta.inputs is not None:
            return symbol(f"{STAGE}._StageForwardMeta")(forward_metas=self._user_meta.inputs)
        if not sent:
            raise located(NotAvailable(
                f"pipeline stage {self.stage_index} receives what stage {src_stage} on another rank sends, whose shape "
                "is unknown here: give PipelineStage its input_args (tensors of these shapes), or simulate the rank of "
                "stage 0"
            ))  # fmt: skip
        notes[ALIKE] = None
        return sent[min(sent)]

    patched = mock.patch.multiple(
        stage,
        _warmup_forward_vote=_agreed,
        _warmup_backward_result=lambda self, received_result=None: _agreed(self, received_acc=received_result),
        _send_meta=send_meta,
        _recv_meta=recv_meta,
    )
    with patched:
        yield


def _agreed(self: Any, has_backward: bool = True, received_acc: Tensor | None = None) -> Tensor:
    """Let the stages of other ranks vote like this rank's stages on whether to exchange shapes in the first step."""
    vote = torch.tensor(int(not symbol(f"{STAGE}.InferenceMode").needs_dynamic(self._user_meta, self.has_backward)))
    return vote if received_acc is None else vote * received_acc
