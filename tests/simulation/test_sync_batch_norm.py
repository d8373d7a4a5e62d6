"""Batch norms that ranks synchronize."""

import torch
import torch.distributed as dist
from torch import nn

import llmlab as lab

CARD, RANKS = "A100-40GB", 8


def test_ddp_moves_its_inputs_and_batch_norms_are_synchronized():
    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).to(0), device_ids=[0])
        assert model(torch.randn(2, 8)).device.type == "cuda"
        norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).cuda()
        model = nn.parallel.DistributedDataParallel(norm, device_ids=[0])
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_a_synchronized_batch_norm_may_have_no_weight():
    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        x = torch.randn(2, 8, 4, 4, device="cuda", requires_grad=True)
        nn.SyncBatchNorm(8, affine=False).cuda()(x).sum().backward()
        assert x.grad.shape == x.shape
