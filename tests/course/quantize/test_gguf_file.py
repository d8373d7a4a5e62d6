""".gguf files: whole, truncated, corrupt."""

import gguf as package
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmlab.base.errors import SpecError, UnknownName
from llmlab.course import quantize
from llmlab.course.quantize.formats import gguf_file


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {"token_embd.weight": rng.standard_normal((8, 256)).astype(np.float32),
            "blk.0.attn_q.weight": rng.standard_normal((4, 512)).astype(np.float32),
            "odd.weight": rng.standard_normal((4, 30)).astype(np.float32),
            "output_norm.weight": np.ones(256, np.float32)}  # fmt: skip


@pytest.mark.parametrize("kind", [*quantize.gguf.FORMATS, "F16", "F32"])
def test_a_file_reads_back_here_and_in_the_gguf_package(tmp_path, tensors, kind):
    path = tmp_path / "small.gguf"
    gguf_file.write(path, tensors, kind, "llama", {"llama.block_count": 1, "general.name": "small", "x.float": 0.5})
    back = gguf_file.read(path)
    assert back.metadata["general.architecture"] == "llama" and back.metadata["llama.block_count"] == 1
    assert back.metadata["general.name"] == "small" and back.metadata["x.float"] == 0.5
    theirs = {tensor.name: tensor for tensor in package.GGUFReader(path).tensors}
    assert list(back.tensors) == list(theirs) == list(tensors)
    for name, tensor in back.tensors.items():
        assert tensor.kind == theirs[name].tensor_type.name
        expected = package.dequantize(theirs[name].data, theirs[name].tensor_type)
        np.testing.assert_array_equal(tensor.decode(), expected)
    assert back.tensors["token_embd.weight"].kind == kind
    assert back.tensors["output_norm.weight"].kind == "F32", "llama.cpp wants vectors in fp32, whatever the matrices"
    if kind in ("Q4_K", "Q6_K"):
        assert back.tensors["odd.weight"].kind == "F16", "30 columns are no blocks of 32 either"


def test_arrays_and_every_kind_of_metadata_are_read(tmp_path):
    writer = package.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", ""])
    writer.add_array("tokenizer.ggml.scores", [1.0, -2.0])
    writer.add_bool("flag", True)
    writer.add_uint8("byte", 7)
    writer.add_tensor("x", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = gguf_file.read(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.tokens"] == ["a", "ü", ""] and metadata["tokenizer.ggml.scores"] == [1.0, -2.0]
    assert metadata["flag"] is True and metadata["byte"] == 7


def written(tmp_path):
    path = tmp_path / "whole.gguf"
    gguf_file.write(path, {"a": np.ones((4, 32), np.float32)}, "Q8_0", "llama", {"k": "text"})
    return path.read_bytes()


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path):
    data, cut = written(tmp_path), tmp_path / "cut.gguf"
    end = data.rfind(b"\x7f") + 1  # the last code; the writer pads after it
    for size in range(end):
        cut.write_bytes(data[:size])
        with pytest.raises(SpecError, match=r"truncated|not a \.gguf"):
            gguf_file.read(cut)


@settings(max_examples=200)
@example(at=78, byte=9)  # "k" becomes an array of 2^58 numbers: the package's reader alone would never end
@given(at=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_corrupt_header_is_read_or_refused_in_one_line(tmp_path_factory, at, byte):
    folder = tmp_path_factory.getbasetemp()
    data = bytearray(written(folder))
    data[at % len(data)] = byte
    path = folder / "corrupt.gguf"
    path.write_bytes(data)
    try:
        gguf_file.read(path)
    except SpecError as error:
        assert "\n" not in str(error) and str(path) in str(error)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(SpecError, match=r"begins with b'PK"):
        gguf_file.read(tmp_path / "x.gguf")
    with pytest.raises(SpecError, match="No such file"):
        gguf_file.read(tmp_path / "none.gguf")


def test_nothing_is_written_where_a_tensor_cannot_be(tmp_path):
    path = tmp_path / "broken.gguf"
    for tensors, kind, metadata, error in (
        ({"a": np.full((1, 32), np.nan, np.float32)}, "Q8_0", {}, SpecError),
        ({"a": np.ones((1, 32), np.float32)}, "Q9_0", {}, UnknownName),
        ({"a": np.ones((1, 32), np.float32)}, "Q8_0", {"k": {}}, SpecError),
        ({"a": np.ones((1, 32), np.float32)}, "Q8_0", {"k": [1, "a"]}, SpecError),
        ({"a": np.ones((1, 32), np.float32)}, "Q8_0", {"k": []}, SpecError),
    ):
        with pytest.raises(error):
            gguf_file.write(path, tensors, kind, "llama", metadata)
        assert not path.exists()
