"""What the chapter on evaluation derives by hand: numbers of questions, pass@k, the loss by position, other tools."""


import torch
from torch.nn.functional import cross_entropy

from llmlab.course.architectures.small import small_ids, small_model


def test_the_loss_is_level_after_64_tokens():
    model, (_, held_out) = small_model(), small_ids()
    rows = []
    with torch.no_grad():
        for begin in range(0, len(held_out) - 512, 320):
            ids = held_out[begin : begin + 513]
            rows.append(cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none"))
    losses = torch.stack(rows)
    early, middle, late = (losses[:, part].mean() for part in (slice(0, 16), slice(64, 192), slice(192, 512)))
    assert early > middle + 0.3
    assert abs(middle - late) < 0.05
