"""Workspaces of cuDNN, cuFFT and cuSOLVER, which choose the algorithm, and so the workspace, only at run time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...hardware.gpu import GPU
from .registry import OUTPUTS, Library, Operator, Step, workspace

aten = torch.ops.aten


@workspace(
    aten.convolution, aten.convolution_backward,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward,
    aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward,  # the operators of an LSTM on this CPU
    source="cudnn/ConvShared.cpp, cudnn/MHA.cpp, cudnn/RNN.cpp",
)  # fmt: skip
def cudnn(op: Operator, gpu: GPU) -> Iterator[Step]:
    """Its plan decides the size of the workspace."""
    yield OUTPUTS
    yield Library("cuDNN")


@workspace(aten._fft_c2c, aten._fft_r2c, aten._fft_c2r, source="cuda/SpectralOps.cpp")
def cufft(op: Operator, gpu: GPU) -> Iterator[Step]:
    """Its plan decides the size of the workspace."""
    yield OUTPUTS
    yield Library("cuFFT")


@workspace(
    aten.linalg_qr, aten._linalg_svd, aten._linalg_eigh, aten.linalg_cholesky_ex,
    source="cuda/linalg/BatchLinearAlgebraLib.cpp",
)  # fmt: skip
def cusolver(op: Operator, gpu: GPU) -> Iterator[Step]:
    """PyTorch asks each routine for the size of its buffer at run time."""
    yield OUTPUTS
    yield Library("cuSOLVER")
