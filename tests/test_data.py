"""Real text: nothing lost between text, tokens and text; the same batch for the same seed; errors that help."""

import hashlib
import sys
import tempfile
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab import data
from llmlab.base.errors import NotAvailable, SpecError, UnknownName
from llmlab.course.architectures.small import stated


@pytest.fixture(autouse=True, scope="module")
def shared():
    """One cache folder for this file: training a large vocabulary takes seconds."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMLAB_CACHE", folder)
        yield


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and nothing remembered from the one before."""
    monkeypatch.setenv("LLMLAB_CACHE", str(tmp_path / "cache"))
    data._tokenizer.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def notes(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes("The cat sat on the mat.\r\n\tθ ≤ 1, 模型 🙂\n".encode() * 50)
    return path


def test_the_default_corpus_is_the_same_on_every_python():
    text = data.corpus()
    assert hashlib.sha256(text.encode()).hexdigest() == stated()["sha256"]["python-docs.txt"]
    assert text == data.corpus("python-docs")


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="no other Python brings this edition")
def test_the_default_corpus_is_every_topic_of_the_python_documentation():
    from pydoc_data.topics import topics

    assert data.corpus() == "\n\n".join(topics[name] for name in sorted(topics))


def test_a_file_is_taken_byte_for_byte(notes):
    assert data.corpus(notes).encode() == notes.read_bytes()  # \r\n too
    assert data.corpus(str(notes)) == data.corpus(notes)


def test_tokens_decode_to_the_corpus():
    ids = data.tokens(1024)
    assert ids.dtype == torch.int64 and ids.ndim == 1
    assert int(ids.min()) >= 0 and int(ids.max()) < 1024
    assert data.tokenizer(1024).decode(ids.tolist(), skip_special_tokens=False) == data.corpus()


def test_more_vocabulary_makes_fewer_tokens_of_the_same_text():
    bytes_in_text = len(data.corpus().encode())
    counts = [len(data.tokens(vocab)) for vocab in (257, 512, 2048)]
    assert counts[0] == bytes_in_text  # no merges: one token a byte
    assert counts == sorted(counts, reverse=True) and counts[2] < bytes_in_text / 2


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text):
    tokenizer = data._tokenizer(300, "a few words " * 30)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_batch_is_windows_of_the_text(notes):
    ids = data.tokens(300, notes)
    batch = data.batch(300, micro_batch=4, seq_len=17, seed=3, source=notes)
    assert batch.shape == (4, 17) and batch.dtype == torch.int64 and batch.device.type == "cpu"
    every_window = ids.unfold(0, 17, 1)
    for window in batch:
        assert (every_window == window).all(dim=1).any()


def test_the_seed_decides_the_batch_and_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    first, same, other = (data.batch(512, 8, 64, seed) for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_window_may_be_the_whole_text(notes):
    ids = data.tokens(300, notes)
    assert torch.equal(data.batch(300, 2, len(ids), source=notes)[1], ids)


def test_a_large_models_ids_stay_below_8192():
    assert torch.equal(data.batch(50257, 2, 32), data.batch(data.MAX_VOCAB, 2, 32))
    assert int(data.tokens(128_256).max()) < 8192


def test_split_holds_out_the_end_and_loses_nothing():
    train, validation = data.split(512, validation=0.2)
    ids = data.tokens(512)
    assert torch.equal(torch.cat([train, validation]), ids)
    assert len(validation) == round(0.2 * len(ids))


def test_training_twice_gives_the_same_tokenizer(notes):
    assert data._train(400, data.corpus(notes)).to_str() == data._train(400, data.corpus(notes)).to_str()


def test_a_tokenizer_is_trained_once_and_then_read(cache, notes, monkeypatch):
    first = data.tokenizer(300, notes).to_str()
    (path,) = cache.iterdir()
    assert path.read_text(encoding="utf-8") == first
    data._tokenizer.cache_clear()
    monkeypatch.setattr(data, "_train", lambda *_: pytest.fail("trained again"))
    assert data.tokenizer(300, notes).to_str() == first


def test_another_text_or_vocabulary_is_another_cache_file(cache, notes):
    data.tokenizer(300, notes)
    data.tokenizer(301, notes)
    notes.write_text("something else entirely, " * 40)
    data.tokenizer(300, notes)
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", [b"", b"not json", b'{"version": "1.0"}', b"\xff\xfe"])
def test_a_corrupt_cache_file_is_trained_again_and_replaced(cache, notes, damage):
    good = data.tokenizer(300, notes).to_str()
    (path,) = cache.iterdir()
    path.write_bytes(damage)
    data._tokenizer.cache_clear()
    with pytest.warns(UserWarning, match=f"{path.name} is corrupt"):
        assert data.tokenizer(300, notes).to_str() == good
    assert path.read_text(encoding="utf-8") == good


def test_a_cache_that_cannot_be_written_costs_time_not_the_tokenizer(tmp_path, cache, notes, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LLMLAB_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not cached.*LLMLAB_CACHE"):
        assert data.tokenizer(300, notes).get_vocab_size() > 257


@pytest.mark.parametrize("vocab", [256, 0, -5, True, 300.0])
def test_a_vocabulary_below_257_is_refused(vocab):
    with pytest.raises(SpecError, match=r"vocab=.*257"):
        data.batch(vocab, 1, 8)


@pytest.mark.parametrize("micro_batch, seq_len", [(0, 8), (1, 0), (1, -2), (True, 8), (1, 2.0)])
def test_sizes_that_cannot_be_are_refused(micro_batch, seq_len):
    with pytest.raises(SpecError, match="whole number >= 1"):
        data.batch(300, micro_batch, seq_len)


def test_a_text_too_short_for_the_sequence_says_how_long_it_is(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("abc")
    with pytest.raises(SpecError, match="seq_len=64 is longer than the text, 3 tokens"):
        data.batch(257, 1, 64, source=path)
    path.write_text("a")
    with pytest.raises(SpecError, match="too few to hold"):
        data.split(257, path)


def test_bad_files_are_refused_by_name(tmp_path):
    with pytest.raises(UnknownName, match=r"absent\.txt.*not there.*python-docs"):
        data.corpus(tmp_path / "absent.txt")
    with pytest.raises(UnknownName, match="is a folder"):
        data.corpus(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(SpecError, match=r"empty\.txt.*no text"):
        data.corpus(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(SpecError, match=r"latin\.txt.*not UTF-8.*byte 3"):
        data.corpus(tmp_path / "latin.txt")


@pytest.mark.parametrize("validation", [0, 1, -0.1, 1.5])
def test_a_split_must_leave_both_parts(validation):
    with pytest.raises(SpecError, match="validation="):
        data.split(300, validation=validation)


def test_a_dataset_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(NotAvailable, match="pip install datasets"):
        data.corpus("hf:roneneldan/TinyStories")


@pytest.fixture
def datasets(monkeypatch):
    """The datasets library's load_dataset, with its own two ways of answering, and no network."""
    module = types.ModuleType("datasets")
    module.calls = []
    rows = [{"text": f"Story {i}. " * 10} for i in range(100)]

    def load_dataset(name, split, streaming):
        module.calls.append((name, split, streaming))
        if name == "nobody/nothing":
            raise FileNotFoundError("Couldn't find any data file")
        return iter([{"prompt": "x"}] if name == "some/pairs" else cut_off() if name == "lost/line" else rows)

    def cut_off():
        yield rows[0]
        raise ConnectionError("the network went away\nand more lines of it")

    module.load_dataset = load_dataset
    data._hugging_face.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_dataset_is_streamed_up_to_a_stated_length(datasets, monkeypatch):
    monkeypatch.setattr(data, "HF_CHARACTERS", 500)
    with pytest.warns(UserWarning, match="read up to 500 characters"):
        text = data.corpus("hf:roneneldan/TinyStories")
    assert datasets.calls == [("roneneldan/TinyStories", "train", True)]
    assert text.startswith("Story 0. ") and data.END_OF_TEXT in text and 500 <= len(text) < 700


def test_a_named_slice_is_taken_whole(datasets, monkeypatch):
    monkeypatch.setattr(data, "HF_CHARACTERS", 500)
    text = data.corpus("hf:roneneldan/TinyStories:train[:5%]")
    assert datasets.calls == [("roneneldan/TinyStories", "train[:5%]", False)]
    assert text.count(data.END_OF_TEXT) == 99


def test_the_end_of_a_document_is_one_token(datasets):
    ids = data.tokens(300, "hf:roneneldan/TinyStories:train")
    assert (ids == data.tokenizer(300).token_to_id(data.END_OF_TEXT)).sum() == 99


def test_a_dataset_that_is_not_there_or_has_no_text_is_named(datasets):
    with pytest.raises(NotAvailable, match=r"nobody/nothing.*FileNotFoundError"):
        data.corpus("hf:nobody/nothing")
    with pytest.raises(NotAvailable, match=r"lost/line.*ConnectionError: the network went away$"):
        data.corpus("hf:lost/line")
    with pytest.raises(SpecError, match=r"some/pairs.*no column 'text'.*prompt"):
        data.corpus("hf:some/pairs")
    with pytest.raises(SpecError, match="names no dataset"):
        data.corpus("hf:")
