"""What a script asks for and is not here: refused by its name, with the script's line and what to do."""

import urllib.error
from urllib.parse import urljoin

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from llmlab.cli import main as cli
from llmlab.scripts.missing import refused

ADDRESS = "https://example.org/data/train.txt"


def fetch(url):
    raise urllib.error.URLError("[Errno -2] Name or service not known")


def raised(function, *args):
    try:
        function(*args)
    except Exception as error:
        return error


def run(tmp_path, monkeypatch, *words, **files):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return CliRunner().invoke(cli.cli, ["run", "--gpu", "T4", *words])


def test_a_file_of_the_network_is_named_with_the_line_that_asked():
    said = str(refused(raised(fetch, ADDRESS)))
    assert said.startswith(f"{ADDRESS}: the network did not answer") and "test_missing.py, line 18)" in said


@pytest.mark.parametrize(("name", "words"), [
    ("train.jsonl", "Rows of your own"), ("resnet50-11ad3fa6.pth", "Random weights"),
    ("model.bin?v=2", "Random weights"),
])  # fmt: skip
def test_rows_stand_in_for_data_and_random_weights_for_weights(name, words):
    said = str(refused(raised(fetch, f"https://example.org/{name}")))
    assert words in said and ("Rows of your own" in said) == name.endswith("jsonl")


@pytest.mark.parametrize("body", ["import unsloth", "from unsloth import FastLanguageModel"])
def test_unsloth_is_refused_by_name_and_can_be_optional(tmp_path, monkeypatch, body):
    result = run(tmp_path, monkeypatch, "train.py", train=body)
    assert result.exit_code == 2 and "unsloth replaces PyTorch's operators" in result.stderr
    optional = f"try:\n    {body}\nexcept ImportError:\n    pass\nimport torch\ntorch.ones(4, device='cuda')"
    assert run(tmp_path, monkeypatch, "train.py", train=optional).exit_code == 0
    result = run(tmp_path, monkeypatch, "unsloth", "train")
    assert result.exit_code == 2 and "unsloth replaces PyTorch's operators" in result.stderr


@pytest.mark.parametrize("body", [
    "from vllm import LLM",
    "raise ImportError('vLLM is not available and `use_vllm` is set to True. Please install vLLM to use it.')",  # TRL's
])  # fmt: skip
def test_vllm_is_refused_by_name(tmp_path, monkeypatch, body):
    result = run(tmp_path, monkeypatch, "train.py", train=body)
    assert result.exit_code == 2 and "use_vllm=False" in result.stderr and "train.py, line 1)" in result.stderr


@pytest.mark.parametrize(("body", "instead"), [
    ("from flash_attn.modules.mha import MHA", "scaled_dot_product_attention"),
    ("raise ImportError('the package flash_attn seems to be not installed')", "scaled_dot_product_attention"),
    ("import adam_atan2", "torch.optim"), ("import mamba_ssm", "PyTorch's operators"),
])  # fmt: skip
def test_packages_that_are_compiled_for_a_gpu_are_not_to_be_installed(tmp_path, monkeypatch, body, instead):
    result = run(tmp_path, monkeypatch, "train.py", train=body)
    assert result.exit_code == 2 and "do not install it" in result.stderr and instead in result.stderr
    assert "install that package" not in result.stderr


def test_the_error_behind_a_lazy_import_counts(tmp_path, monkeypatch):
    body = """
try:
    {}
except Exception as error:
    raise ModuleNotFoundError("Could not import module 'Trainer'. Are this object's requirements met?") from error
"""
    result = run(tmp_path, monkeypatch, "train.py", train=body.format("import nowhere_at_all"))
    assert result.exit_code == 2 and "No module named 'nowhere_at_all': install that package" in result.stderr
    result = run(tmp_path, monkeypatch, "train.py", train=body.format("1 / 0"))
    assert "ZeroDivisionError" in result.stderr and "install that package" not in result.stderr


def test_what_needs_an_account_of_the_hub_is_refused(tmp_path, monkeypatch):
    body = "from huggingface_hub.errors import LocalTokenNotFoundError\nraise LocalTokenNotFoundError('log in')"
    result = run(tmp_path, monkeypatch, "train.py", train=body)
    assert result.exit_code == 2 and "log in; llmlab run uses no account of the Hub" in result.stderr


def test_what_is_not_in_the_cache_is_named_where_the_library_names_nothing(tmp_path, monkeypatch):
    """As transformers does for code of the Hub that a config's auto_map asks for."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    body = "from huggingface_hub import snapshot_download\nsnapshot_download('nobody/nothing')"
    result = run(tmp_path, monkeypatch, "train.py", train=body)
    assert result.exit_code == 2 and "nobody/nothing: Cannot find" in result.stderr


def test_a_model_s_folder_that_is_not_here_is_named(tmp_path, monkeypatch):
    body = "from transformers import AutoModel\nAutoModel.from_pretrained('/data2/Qwen/Qwen2.5-7B')"
    result = run(tmp_path, monkeypatch, "train.py", train=body)
    assert result.exit_code == 2 and "/data2/Qwen/Qwen2.5-7B is not a folder here" in result.stderr


def test_the_innermost_address_counts():
    def download(url):
        fetch(urljoin(url, "labels.txt"))

    assert str(refused(raised(download, ADDRESS))).startswith("https://example.org/data/labels.txt: ")


def test_an_error_that_the_script_made_of_it_counts_too():
    def download(url):
        try:
            fetch(url)
        except urllib.error.URLError as error:
            raise RuntimeError("no data") from error

    def all_mirrors(url):
        raise RuntimeError(f"Error downloading train:\nTried {url}, got:\n<urlopen error timed out>")

    assert str(refused(raised(download, ADDRESS))).startswith(ADDRESS)
    assert str(refused(raised(all_mirrors, ADDRESS))).startswith(ADDRESS)


@pytest.mark.parametrize("error", [ValueError("x"), BrokenPipeError(32, "gone"), FileNotFoundError(2, "no file")])
def test_other_errors_are_the_script_s(error):
    assert refused(error) is None


def test_a_socket_that_nobody_answers(tmp_path, monkeypatch):
    body = "import socket\nhost = 'localhost'\nsocket.create_connection((host, 9), timeout=5)"
    result = run(tmp_path, monkeypatch, "train.py", train=body)
    assert result.exit_code == 2 and result.stderr.startswith("llmlab: localhost: the network did not answer")
    assert "train.py, line 3)" in result.stderr and result.stderr.count("\n") == 1


def test_kernels_of_the_hub(tmp_path, monkeypatch):
    body = "from kernels import get_kernel\nget_kernel('owner/attention')"
    result = run(tmp_path, monkeypatch, "train.py", train=body, kernels="def get_kernel(name): return 1 / 0")
    assert result.exit_code == 2 and "kernels.get_kernel('owner/attention')" in result.stderr
    assert "train.py, line 2)" in result.stderr
