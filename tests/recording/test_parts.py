from hypothesis import given
from hypothesis import strategies as st

from llmlab.recording.parts import TIMELINE_POINTS, Event, Mark, divide

PHASES = ("load", "forward", "backward", "optimizer")


def mark(time, phase, parts=None, since=None):
    return Mark(time, phase, parts or {}, since)


def test_what_forward_leaves_is_activations_and_what_it_frees_is_not():
    events = [Event(2, 0xA, 100), Event(3, 0xB, 10), Event(4, 0xB, -10), Event(6, 0xC, 7)]
    result = divide(events, [mark(1, "forward"), mark(5, "backward"), mark(9, None)])
    assert result.parts == {"activations": 100, "other": 10}
    assert result.phases == {"forward": 110, "backward": 107}
    assert (result.peak, result.phase) == (110, "forward")


def test_a_gradient_is_one_from_its_allocation_on_though_it_is_named_at_the_end():
    events = [Event(2, 0xA, 100), Event(3, 0xB, 50), Event(4, 0xB, -50)]
    result = divide(events, [mark(1, "backward"), mark(5, "optimizer", {0xA: "gradients"}), mark(6, None)])
    assert result.parts == {"gradients": 100, "other": 50}


def test_an_address_used_again_is_another_block():
    events = [Event(2, 0xA, 100), Event(4, 0xA, -100), Event(5, 0xA, 300)]
    marks = [mark(1, "load"), mark(3, "load", {0xA: "weights"}), mark(9, None)]
    assert divide(events, marks).parts == {"other": 300}


def test_what_a_recomputation_leaves_is_activations_and_what_was_there_before_it_is_not():
    events = [Event(2, 0xA, 5), Event(4, 0xB, 100), Event(5, 0xC, 10), Event(6, 0xC, -10), Event(8, 0xD, 50)]
    marks = [mark(1, "backward"), mark(7, "backward", since=3), mark(9, None)]
    assert divide(events, marks).parts == {"activations": 100, "other": 55}


def test_logits_are_known_by_their_size_but_a_weight_of_that_size_stays_one():
    events = [Event(2, 0xA, 400), Event(4, 0xB, 400), Event(6, 0xC, 400)]
    marks = [mark(1, "load"), mark(3, "forward", {0xA: "weights"}), mark(5, "backward"), mark(9, None)]
    assert divide(events, marks, logits=[400]).parts == {"weights": 400, "logits": 800}


def test_in_generation_what_works_is_activations_and_the_cache_is_known_by_address():
    events = [Event(2, 0xA, 10), Event(3, 0xB, 30)]
    marks = [mark(1, "prefill"), mark(5, "decode", {0xB: "kv_cache"}), mark(9, None)]
    assert divide(events, marks).parts == {"activations": 10, "kv_cache": 30}


def test_a_cublas_workspace_is_one_if_it_stays():
    events = [Event(2, 0xA, 8_519_680), Event(3, 0xB, 33_554_432), Event(4, 0xB, -33_554_432)]
    result = divide(events, [mark(1, "forward"), mark(1, "backward"), mark(9, None)])
    assert result.parts == {"workspace": 8_519_680, "other": 33_554_432}


def test_warming_up_counts_for_what_lives_and_not_for_the_peak():
    events = [Event(2, 0xA, 8), Event(3, 0xB, 1000), Event(4, 0xB, -1000), Event(6, 0xC, 1)]
    result = divide(events, [mark(1, None), mark(5, "backward", {0xA: "optimizer"}), mark(9, None)])
    assert (result.peak, result.parts) == (9, {"optimizer": 8, "other": 1})


@st.composite
def histories(draw):
    """Random allocations and frees, some of addresses never seen, under random phases and names."""
    live, events, marks = {}, [], [mark(0, "load")]
    for time in range(1, draw(st.integers(1, 60))):
        kind = draw(st.sampled_from(["alloc", "alloc", "free", "stray", "mark"]))
        if kind == "alloc":
            address = time * 64
            live[address] = draw(st.integers(1, 1000))
            events.append(Event(time, address, live[address]))
        elif kind == "free" and live:
            address = draw(st.sampled_from(sorted(live)))
            events.append(Event(time, address, -live.pop(address)))
        elif kind == "stray":
            events.append(Event(time, 7, -draw(st.integers(1, 1000))))
        elif kind == "mark":
            names = st.sampled_from(["weights", "gradients", "optimizer", "logits", "buffers"])
            named = draw(st.dictionaries(st.sampled_from(sorted(live)), names)) if live else {}
            marks.append(mark(time, draw(st.sampled_from([*PHASES, None])), named))
    return events, marks


@given(histories())
def test_parts_add_up_to_the_peak_which_is_the_highest_phase(history):
    events, marks = history
    result = divide(events, marks, logits=[500])
    assert sum(result.parts.values()) == result.peak == max(result.phases.values())
    assert all(size > 0 for size in result.parts.values())
    assert sum(result.detail.get("other", {}).values()) == result.parts.get("other", 0)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=2000), st.integers(0, 1))
def test_a_timeline_keeps_the_peak_in_few_points(sizes, frees):
    events = []
    for i, size in enumerate(sizes):
        events.append(Event(2 * i + 1, i, size))
        if frees and i:
            events.append(Event(2 * i + 2, i - 1, -sizes[i - 1]))
    result = divide(events, [mark(0, "forward"), mark(10**9, None)])
    totals = [sum(parts.values()) for _, parts in result.timeline]
    assert len(totals) <= TIMELINE_POINTS
    assert max(totals) == result.peak
