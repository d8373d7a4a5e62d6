"""Tensors in pickles and checkpoints."""

import pickle

import pytest
import torch

pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of the storage that it pickles
def test_pickle_takes_tensors_of_the_host_and_of_the_card(card):
    """What DataLoader workers, datasets.map(num_proc=4) and all_gather_object do with an object."""
    host, there = torch.arange(4.0), torch.ones(3, 2, device="cuda")
    before = torch.cuda.memory_allocated()
    again, copied = pickle.loads(pickle.dumps((host, there)))
    assert again.tolist() == [0, 1, 2, 3]
    assert copied.shape == (3, 2) and copied.device.type == "cuda"
    assert torch.cuda.memory_allocated() == before + 512
