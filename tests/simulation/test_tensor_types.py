"""torch.cuda.FloatTensor and the other old names."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_old_type_names_are_the_cards(card):
    x = torch.cuda.FloatTensor([1, 2])
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x.cpu(), torch.cuda.FloatTensor)
    assert x.type() == "torch.cuda.FloatTensor" and x.cpu().type() == "torch.FloatTensor"
    assert torch.ones(2).type(torch.cuda.HalfTensor).dtype == torch.float16
    assert torch.ones(2).type("torch.cuda.LongTensor").is_cuda and torch.cuda.LongTensor(3, 4).shape == (3, 4)
