"""Requests that wait, grow and leave."""

from llmlab.course.inference import BlockPool
from llmlab.course.inference.blocks import CacheFull, Table
from llmlab.course.inference.occupancy import occupancy


class Paged(BlockPool):
    def enter(self, request):
        table = Table()
        self.extend(table, [0] * request.written)
        return table


def run(blocks, lengths, ticks):
    pool = Paged(blocks, 16)
    return pool, occupancy(pool, lengths, CacheFull, lambda places, inside: len(inside), ticks)


def test_requests_that_fit_stay_until_they_end():
    pool, found = run(8, [(16, 48), (16, 48)], 4)
    assert found.requests == 2 * 2 / 4  # both stay for two ticks of four
    assert found.written == (2 * 16 + 2 * 32) / 4 and found.sent_back == 0 and found.layout is None
    assert len(pool.free) == 8


def test_without_blocks_the_request_that_entered_last_goes_back_and_loses_none_of_its_tokens():
    pool, found = run(4, [(16, 64), (16, 48)], 12)
    assert found.sent_back > 0 and found.layout == 1
    assert len(pool.free) == 4  # both have ended
