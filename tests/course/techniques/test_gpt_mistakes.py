"""The probes find the mistake in each wrong model, and none in the right one."""

import pytest
import torch
from torch.utils.data import DataLoader

from llmlab.course.architectures.gpt import GPT
from llmlab.course.architectures.llama import RMSNorm
from llmlab.course.techniques.gpt_mistakes import (
    BatchNorm,
    SharedStream,
    Stream,
    Windows,
    attend_over_heads,
    attend_without_mask,
    influence,
    with_norm,
)
from llmlab.course.techniques.training_loop import SMALL_GPT

TINY = {**SMALL_GPT, "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}


def tiny(attend=None):
    torch.manual_seed(0)
    model = GPT.from_spec(TINY).eval()
    for block in model.h if attend else []:
        block.attn.attend = attend
    return model


@pytest.fixture
def ids():
    return torch.randint(300, (12,), generator=torch.Generator().manual_seed(0))


def test_influence_shows_who_reads_whom(ids):
    lower = torch.ones(12, 12, dtype=torch.bool).tril()
    assert torch.equal(influence(tiny(), ids), lower)
    assert influence(tiny(attend_without_mask), ids).all()
    assert torch.equal(influence(tiny(attend_over_heads), ids), torch.eye(12, dtype=torch.bool))


def test_without_positions_the_last_token_reads_a_bag_of_words(ids):
    """With one block and a zero position embedding, the last logits do not depend on the order of earlier tokens."""
    torch.manual_seed(0)
    model = GPT.from_spec({**TINY, "n_layer": 1}).double().eval()
    swapped = ids.clone()
    swapped[[2, 5]] = ids[[5, 2]]
    apart = (model(ids[None]) - model(swapped[None]))[0, -1].abs().max()
    model.wpe.weight.data.zero_()
    alike = (model(ids[None]) - model(swapped[None]))[0, -1].abs().max()
    assert alike < 1e-12 < 1e-6 < apart


@pytest.mark.parametrize("make", [None, lambda size: RMSNorm(size, 1e-5), BatchNorm], ids=["layer", "rms", "batch"])
def test_only_batch_norm_lets_other_sequences_change_a_text(ids, make):
    model = tiny() if make is None else with_norm(tiny(), make)
    model.train()  # no dropout in TINY
    others = torch.randint(300, (3, 12), generator=torch.Generator().manual_seed(1))
    alone, among = model(ids[None])[0], model(torch.cat((ids[None], others)))[0]
    changed = (alone - among).abs().max().item()
    assert (changed > 1e-2) == (make is BatchNorm), changed
    if make is BatchNorm:  # and the future too: a channel's mean is over all tokens
        later = ids.clone()
        later[-1] ^= 1
        assert (model(later[None]) - model(ids[None]))[0, :-1].abs().max() > 1e-4
        model.eval()
        assert torch.equal(model(ids[None])[0], model(ids[None])[0])
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model.train()(ids[None, :1])


def test_workers_give_the_same_windows_and_repeat_a_stream():
    text = torch.arange(100)
    dataset = Windows(text, seq_len=8, count=6)
    one, two = ([batch.tolist() for batch in DataLoader(dataset, 2, num_workers=n)] for n in (0, 2))
    assert one == two
    stream = Stream(text, seq_len=8)
    assert [len(list(DataLoader(stream, None, num_workers=n))) for n in (0, 2)] == [12, 24]


def test_workers_divide_a_shared_stream_also_if_they_are_not_forked():
    stream = SharedStream(torch.arange(100), seq_len=8)
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "multiprocessing_context": "spawn"}):
        assert sorted(int(text[0]) for text in DataLoader(stream, None, **options)) == list(range(0, 96, 8)), options
