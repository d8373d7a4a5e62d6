"""Launch lines against the parsers of the engines that are installed."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.serving.launch import launch_line
from llmlab.serving.service import KV, WEIGHTS

# How to get the server's own parser; vLLM's asks for the device, which the wheel for CUDA does not find on a CPU.
PARSERS = {
    "vllm": """
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
vllm.platforms.current_platform = CpuPlatform()
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False))
parser.add_argument("model_tag")
""",
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
""",
    "trtllm": """
from tensorrt_llm.commands.serve import serve as command
class parser:
    parse_args = lambda arguments: command.make_context("serve", arguments)
""",
}
PACKAGES = {"vllm": ("vllm", 2), "sglang": ("sglang", 3), "trtllm": ("tensorrt_llm", 2)}  # words before the options
FIELDS = [
    {"tp": 8, "ep": 8, "dp_attention": 4}, {"tp": 2, "pp": 2},
    {"max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 2048, "prefill_interval": 4},
    *({"draft": draft, "acceptance": 0.7} for draft in ("mtp", "eagle3:a/b", "a/b")),
    *({"weights": weights} for weights in WEIGHTS), *({"kv": kv} for kv in KV),
]  # fmt: skip


@pytest.mark.parametrize("engine", PARSERS)
def test_the_engines_own_parser_accepts_every_option(engine):
    package, skipped = PACKAGES[engine]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    lines = [shlex.split(launch_line("a/b", lab.Service(engine, **fields)).split("&& ")[-1]) for fields in FIELDS]
    read = "\nimport json, sys\nfor arguments in json.load(sys.stdin):\n    parser.parse_args(arguments)\n"
    arguments = json.dumps([line[skipped:] for line in lines])
    command = [sys.executable, "-c", PARSERS[engine] + read]
    result = subprocess.run(command, input=arguments, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


# Options of `trtllm-serve serve` and of its file, by NVIDIA/TensorRT-LLM's tests/unittest/api_stability/references/
# trtllm_serve_cli.yaml and tensorrt_llm/llmapi/llm_args.py, read 2026-11-30; its package may not install.
TRTLLM = {
    "tp_size", "pp_size", "ep_size", "cp_size", "max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width",
    "config", "extra_llm_api_options", "free_gpu_memory_fraction", "kv_cache_dtype", "enable_attention_dp",
    "enable_chunked_prefill",
}  # fmt: skip
TRTLLM_FILE = {
    "dtype", "kv_cache_config", "enable_attention_dp", "batch_wait_timeout_ms", "batch_wait_timeout_iters",
    "batch_wait_max_tokens_ratio", "speculative_config", "scheduler_config", "cuda_graph_config", "moe_config",
}  # fmt: skip
TRTLLM_DRAFTS = {"MTP": {"max_draft_len"}, "Eagle3": {"max_draft_len", "speculative_model"},
                 "Draft_Target": {"max_draft_len", "speculative_model"}}  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS)
def test_tensorrt_llm_has_every_option(fields):
    *written, line = launch_line("a/b", lab.Service("trtllm", **fields)).split("&& ")
    assert {word[2:] for word in shlex.split(line) if word.startswith("--")} <= TRTLLM
    config = json.loads(shlex.split(written[0])[2]) if written else {}
    assert set(config) <= TRTLLM_FILE and ("--extra_llm_api_options" in line) == bool(config)
    draft = config.get("speculative_config", {"decoding_type": "MTP", "max_draft_len": 1})
    assert set(draft) == TRTLLM_DRAFTS[draft["decoding_type"]] | {"decoding_type"}


def test_sglang_divides_its_limits_by_the_copies_of_attention():
    """--max-running-requests and --chunked-prefill-size are of the whole server (server_args.py)."""
    service = lab.Service("sglang", tp=8, dp_attention=4, max_num_seqs=64, max_num_batched_tokens=2048)
    words = launch_line("a/b", service).split()
    assert words[words.index("--max-running-requests") + 1] == str(4 * 64)
    assert words[words.index("--chunked-prefill-size") + 1] == str(4 * 2048)


LAUNCHED = {
    "vllm": ("--pipeline-parallel-size 2", '"method": "eagle3", "model": "a/b", "num_speculative_tokens": 4'),
    # A chain of four, and the token before it.
    "sglang": ("--pp-size 2", "--speculative-algorithm EAGLE3 --speculative-draft-model-path a/b "
               "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"),
    "trtllm": ("--pp_size 2", '"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": "a/b"'),
}


@pytest.mark.parametrize("engine", LAUNCHED)
def test_launch_lines_have_stages_and_drafts(engine):
    stages, draft = LAUNCHED[engine]
    drafted = lab.Service(engine, draft="eagle3:a/b", acceptance=0.7, draft_tokens=4)
    assert stages in launch_line("m", lab.Service(engine, pp=2))
    assert draft in launch_line("m", drafted)
    with pytest.raises(SpecError, match="names no checkpoint"):
        launch_line("m", replace(drafted, draft="eagle3"))
