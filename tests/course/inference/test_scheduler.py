"""Requests that run together write what each writes alone, and every block comes back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from llmlab.base.errors import SpecError
from llmlab.course.inference import BlockPool, Scheduler, generate
from llmlab.course.inference.blocks import CacheFull, Table

VOCAB = 40


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval()


def alone(model: nn.Module, prompt: list[int], new: int, **options: object) -> list[int]:
    return generate(model, torch.tensor(prompt), new, **options)[len(prompt) :].tolist()


@settings(max_examples=15)
@given(data=st.data())
def test_requests_together_write_what_each_writes_alone(model: nn.Module, data: st.DataObject) -> None:
    """Random arrivals, lengths, beginnings in common, cancellations; chunks; so few blocks that some are preempted."""
    scheduler = Scheduler(
        model,
        blocks=data.draw(st.integers(8, 20), "blocks"),
        block_size=4,
        max_batch=data.draw(st.integers(1, 4), "max_batch"),
        chunk=data.draw(st.sampled_from([None, 1, 3, 7]), "chunk"),
    )
    common = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    requests = []
    for i in range(data.draw(st.integers(1, 6), "requests")):
        own = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10), "own")
        prompt = common[: data.draw(st.integers(0, 9), "common")] + own
        options = {"temperature": 1.0, "seed": i} if data.draw(st.booleans(), "sampled") else {}
        requests.append((scheduler.submit(prompt, data.draw(st.integers(1, 12), "new"), **options), options))
        for _ in range(data.draw(st.integers(0, 3), "steps")):
            scheduler.step()
        if data.draw(st.integers(0, 5), "cancel") == 0:
            scheduler.cancel(data.draw(st.sampled_from(requests), "which")[0])
    scheduler.run()
    for request, options in requests:
        expected = alone(model, request.prompt, request.max_new_tokens, **options)
        assert request.state in ("finished", "cancelled")
        assert request.output == (expected if request.state == "finished" else expected[: len(request.output)])
    assert len(scheduler.pool.free) == len(scheduler.pool.holders)
    assert not scheduler.pool.full


def test_equal_beginnings_are_held_once(model: nn.Module) -> None:
    scheduler = Scheduler(model, blocks=32, block_size=4)
    beginning = list(range(12))
    scheduler.submit([*beginning, 20], 6)
    scheduler.step()
    before = len(scheduler.pool.free)
    second = scheduler.submit([*beginning, 21], 6)
    scheduler.step()
    assert before - len(scheduler.pool.free) == 1  # three shared blocks, one of its own
    scheduler.run()
    assert second.output == alone(model, second.prompt, 6)


def test_a_prompt_read_in_chunks_keeps_the_others_writing(model: nn.Module) -> None:
    scheduler = Scheduler(model, chunk=4)
    short = scheduler.submit([1], 20)
    scheduler.step()
    long = scheduler.submit(list(range(30)), 2)
    for written in range(2, 9):
        assert not long.output
        scheduler.step()
        assert len(short.output) == written
    scheduler.step()
    assert len(long.output) == 1  # 30 tokens, 4 a step: the eighth reads the last


def test_the_stop_token_ends_a_request(model: nn.Module) -> None:
    expected = alone(model, [5, 6], 12)
    scheduler = Scheduler(model)
    request = scheduler.submit([5, 6], 12, stop=expected[3])
    scheduler.run()
    assert request.output == expected[: expected.index(expected[3]) + 1]


def test_a_model_that_fails_leaves_no_token_behind(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(model)
    request = scheduler.submit([1, 2, 3], 4)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1], "forward", failing)
        with pytest.raises(RuntimeError, match="broken"):
            scheduler.step()
    scheduler.run()
    assert request.output == alone(model, [1, 2, 3], 4)


def failing(*args: object, **kwargs: object) -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("prompt", "new", "options", "message"),
    [
        ([], 1, {}, "empty prompt"),
        ([1], 200, {}, "context is 128"),
        ([VOCAB], 1, {}, "token 40"),
        ([1] * 20, 20, {}, "10 blocks of 4, the cache has 8"),
        ([1], 1, {"top_p": 2, "temperature": 1}, "top_p=2"),
    ],
)
def test_submit_refuses_before_anything_runs(
    model: nn.Module, prompt: list[int], new: int, options: dict, message: str
) -> None:
    scheduler = Scheduler(model, blocks=8, block_size=4)
    with pytest.raises(SpecError, match=message):
        scheduler.submit(prompt, new, **options)
    assert not scheduler.waiting


@pytest.mark.parametrize(
    ("options", "message"),
    [({"max_batch": 0}, "max_batch=0"), ({"chunk": 0}, "chunk=0"), ({"batching": "dynamic"}, "'static', 'continuous'")],
)
def test_a_scheduler_that_could_not_run_is_refused(model: nn.Module, options: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Scheduler(model, **options)


def test_a_request_goes_from_waiting_to_running_to_finished(model: nn.Module) -> None:
    """One step reads the prompt and writes the first token, each further step one more: 1 + 2 passes."""
    scheduler = Scheduler(model, max_batch=1)
    first, second = scheduler.submit([1, 2, 3], 3), scheduler.submit([4], 1)
    assert (first.state, first.first_token, first.finished, first.preempted) == ("waiting", None, None, 0)
    assert scheduler.step() == [] and first.state == "running" and second.state == "waiting"
    written = first.first_token
    assert written >= first.arrived and first.finished is None and len(first.output) == 1
    assert scheduler.step() == [] and scheduler.step() == [first]
    assert first.state == "finished" and first.first_token == written <= first.finished
    assert first.table is None and len(scheduler.pool.free) == len(scheduler.pool.holders)
    assert scheduler.steps == scheduler.passes == 3
    assert scheduler.run() == [second]


def test_one_pass_is_for_all_that_write_and_one_for_each_prompt(model: nn.Module) -> None:
    scheduler = Scheduler(model)
    for i in range(3):
        scheduler.submit([i, 2, 3], 4)
    scheduler.run()
    assert (scheduler.steps, scheduler.passes) == (4, 3 + 3)


@pytest.mark.parametrize(("batching", "steps"), [("static", 8 + 8), ("continuous", 2 + 2 + 8)])
def test_a_static_batch_waits_for_its_longest_request(model: nn.Module, batching: str, steps: int) -> None:
    """8, 2, 2 and 8 tokens on two places: two batches of 8 steps; or three, one after another, beside the first."""
    scheduler = Scheduler(model, max_batch=2, batching=batching)
    requests = [scheduler.submit([i, 2], new) for i, new in enumerate((8, 2, 2, 8))]
    assert set(scheduler.run()) == set(requests)
    assert scheduler.steps == steps


def test_cancelling_frees_the_blocks_whatever_the_state(model: nn.Module) -> None:
    scheduler = Scheduler(model, max_batch=2)
    running, done, waiting = scheduler.submit([1, 2], 9), scheduler.submit([3], 1), scheduler.submit([4], 9)
    assert scheduler.step() == [done]
    for request in (running, done, waiting):
        scheduler.cancel(request)
        scheduler.cancel(request)
    assert [each.state for each in (running, done, waiting)] == ["cancelled", "finished", "cancelled"]
    assert running.finished is not None and not scheduler.running and not scheduler.waiting
    assert len(scheduler.pool.free) == len(scheduler.pool.holders) and scheduler.run() == []


def test_a_preempted_request_is_the_next_to_run_again_and_is_counted(model: nn.Module) -> None:
    """5 blocks of 4 for two requests of 12 tokens: the later one gives its blocks back, before a third begins."""
    scheduler = Scheduler(model, blocks=5, block_size=4, max_batch=2)
    first, second, third = (scheduler.submit([i, 2, 3, 4], 8) for i in range(3))
    while not second.preempted:
        scheduler.step()
    assert second.state == "waiting" and second.table is None and list(scheduler.waiting) == [second, third]
    written = second.first_token
    assert scheduler.run() == [first, second, third]
    assert (first.preempted, second.preempted) == (0, 1) and second.first_token == written


def test_a_sampled_request_repeats_with_its_seed_only(model: nn.Module) -> None:
    scheduler = Scheduler(model)
    same = [scheduler.submit([5, 6], 20, temperature=5.0, seed=7) for _ in range(2)]
    free = [scheduler.submit([5, 6], 20, temperature=5.0) for _ in range(2)]
    assert scheduler.submit([5, 6], 1).generator is None
    scheduler.run()
    assert same[0].output == same[1].output
    assert free[0].output != free[1].output


def test_a_pass_keeps_nothing_for_backward(model: nn.Module) -> None:
    scheduler = Scheduler(model)
    scheduler.submit([1, 2], 2)
    scheduler.step()
    assert len(scheduler.cache.layers) == 2
    assert not any(kept.requires_grad for layer in scheduler.cache.layers for kept in layer)


def test_a_block_that_is_written_again_is_no_longer_found_by_what_it_held() -> None:
    pool = BlockPool(4, 2)
    table = pool.start([7, 8])
    pool.extend(table, [7, 8])
    pool.written(table)
    pool.crop(table, 1)
    pool.extend(table, [9])
    assert pool.start([7, 8, 0]).tokens == []


class Blocks(RuleBasedStateMachine):
    """A pool beside plain lists: each slot must hold the token, and the tokens before it, that its table says."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.memory: dict[int, tuple[int, ...]] = {}  # slot -> all tokens up to the one written there
        self.texts: list[tuple[Table, list[int]]] = []

    def write(self, table: Table, text: list[int], tokens: list[int]) -> None:
        try:
            slots, copy = self.pool.extend(table, tokens)
        except CacheFull:
            assert table.tokens == text
            return
        if copy:
            for i in range(2):
                self.memory[copy[1] * 2 + i] = self.memory.get(copy[0] * 2 + i, ())
        text += tokens
        for place, slot in zip(range(len(text) - len(tokens), len(text)), slots, strict=True):
            self.memory[slot] = tuple(text[: place + 1])
        self.pool.written(table)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def arrive(self, tokens: list[int]) -> None:
        table = self.pool.start(tokens)
        text = list(table.tokens)
        self.texts.append((table, text))
        self.write(table, text, tokens[len(text) :])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        self.write(*data.draw(st.sampled_from(self.texts)), tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, text = data.draw(st.sampled_from(self.texts))
        self.texts.append((self.pool.fork(table), list(text)))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        table, text = data.draw(st.sampled_from(self.texts))
        length = data.draw(st.integers(0, len(text)))
        self.pool.crop(table, length)
        del text[length:]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        table, _ = self.texts.pop(data.draw(st.integers(0, len(self.texts) - 1)))
        self.pool.release(table)

    @invariant()
    def every_token_is_where_its_table_says(self) -> None:
        for table, text in self.texts:
            assert table.tokens == text
            held = [self.memory[slot] for slot in self.pool.slots(table)]
            assert held == [tuple(text[: i + 1]) for i in range(len(text))]

    @invariant()
    def every_block_is_free_or_counted(self) -> None:
        held = [block for table, _ in self.texts for block in table.blocks]
        assert [held.count(block) for block in range(12)] == self.pool.holders
        assert sorted(self.pool.free) == [block for block in range(12) if block not in held]


TestBlocks = Blocks.TestCase
