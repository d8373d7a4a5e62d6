"""The command that starts an engine's server with the settings of a Service."""

from __future__ import annotations

import json
import shlex

from ..base.errors import SpecError
from ..specs.gguf import mix_named
from .llamacpp import cache_type, slot_tokens
from .service import Service

SGLANG_DRAFTS = {"mtp": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE"}
QUANTIZATION = {"fp8": "fp8", "awq": "awq", "gptq": "gptq", "int8": "w8a8_int8"}  # SGLang's words


def launch_line(model: str, service: Service) -> str:
    """Return the shell command that starts the server of `service.engine` for `model`.

    Options: vllm/engine/arg_utils.py, sglang/srt/server_args.py, tensorrt_llm/commands/serve.py, llama.cpp's
    common/arg.cpp, read 2026-11-30; the parsers of vLLM 0.33 and SGLang 0.5.23 accept them, and TensorRT-LLM's list of
    its options has them (tests/serving/test_launch.py). Its MTP heeds max_draft_len from 1.3.0rc16 on. A checkpoint in
    nvfp4 or mxfp4 names its format itself. `gpu_memory_utilization` is vLLM's: SGLang's share is of weights and cache
    alone, TensorRT-LLM's of the memory that the weights leave, so both keep their defaults. The .gguf file is taken to
    be in the current folder, with the name that is usual for it.
    """
    if service.draft == "eagle3":
        raise SpecError('draft="eagle3" names no checkpoint; to start a server give draft="eagle3:ORGANIZATION/NAME"')
    engines = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "llama.cpp": _llamacpp}
    options = engines[service.engine](model, service)
    return " ".join(part if part in ("&&", ">") else shlex.quote(part) for part in options if part)


def _given(pairs: dict[str, object]) -> list[str]:
    return [part for flag, value in pairs.items() if value is not None for part in (flag, str(value))]


def _vllm(model: str, service: Service) -> list[str]:
    copies = service.dp_attention
    return [
        "vllm", "serve", model,
        *_given({
            "--tensor-parallel-size": service.tp // copies,
            "--pipeline-parallel-size": service.pp if service.pp > 1 else None,
            "--data-parallel-size": copies if copies > 1 else None,
            "--gpu-memory-utilization": service.gpu_memory_utilization,
            "--max-model-len": service.max_model_len,
            "--max-num-seqs": service.max_num_seqs,
            "--max-num-batched-tokens": service.max_num_batched_tokens,
            "--prefill-schedule-interval": service.prefill_interval if service.prefill_interval > 1 else None,
            "--speculative-config": json.dumps(_speculative(service)) if service.draft else None,
            "--dtype": "float16" if service.weights == "fp16" else None,
            "--quantization": "fp8" if service.weights == "fp8" else None,
            "--kv-cache-dtype": "fp8" if service.kv == "fp8" else None,
        }),
        "--enable-expert-parallel" if service.ep > 1 else "",
    ]  # fmt: skip


def _speculative(service: Service) -> dict[str, object]:
    """Return vLLM's speculative_config (vllm/config/speculative.py)."""
    kind, _, checkpoint = (service.draft or "").partition(":")
    method = kind if kind in ("mtp", "eagle3") else "draft_model"
    source = checkpoint if method == "eagle3" else service.draft if method == "draft_model" else None
    return {"method": method, **({"model": source} if source else {}), "num_speculative_tokens": service.draft_tokens}


def _sglang(model: str, service: Service) -> list[str]:
    copies = service.dp_attention
    limits = (service.max_num_seqs, service.max_num_batched_tokens)
    seqs, tokens = (limit and limit * copies for limit in limits)  # SGLang divides both by the copies
    return [
        "python", "-m", "sglang.launch_server",
        *_given({
            "--model-path": model,
            "--tp-size": service.tp,
            "--pp-size": service.pp if service.pp > 1 else None,
            "--dp-size": copies if copies > 1 else None,
            "--ep-size": service.ep if service.ep > 1 else None,
            "--context-length": service.max_model_len,
            "--max-running-requests": seqs,
            "--chunked-prefill-size": tokens,
            "--scheduler-recv-interval": service.prefill_interval if service.prefill_interval > 1 else None,
            **(_sglang_draft(service) if service.draft else {}),
            "--dtype": "float16" if service.weights == "fp16" else None,
            "--quantization": QUANTIZATION.get(service.weights),
            "--kv-cache-dtype": "fp8_e4m3" if service.kv == "fp8" else None,
        }),
        "--enable-dp-attention" if copies > 1 else "",
    ]  # fmt: skip


def _sglang_draft(service: Service) -> dict[str, object]:
    config = _speculative(service)
    return {
        "--speculative-algorithm": SGLANG_DRAFTS[str(config["method"])],
        "--speculative-draft-model-path": config.get("model"),
        "--speculative-num-steps": service.draft_tokens,
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": service.draft_tokens + 1,
    }


def _trtllm(model: str, service: Service) -> list[str]:
    config: dict[str, object] = {"dtype": "float16"} if service.weights == "fp16" else {}
    if service.kv == "fp8":
        config["kv_cache_config"] = {"dtype": "fp8"}
    if service.prefill_interval > 1:
        config["batch_wait_timeout_iters"] = service.prefill_interval
        config["batch_wait_max_tokens_ratio"] = 0.9  # as far as this share of a step's tokens is free
    if service.dp_attention > 1:
        config["enable_attention_dp"] = True
    if service.draft:
        config["speculative_config"] = _trtllm_draft(service)
    written = ["printf", "%s", json.dumps(config), ">", "options.yml", "&&"] if config else []
    return [
        *written,
        "trtllm-serve", "serve", model,
        *_given({
            "--tp_size": service.tp,
            "--pp_size": service.pp if service.pp > 1 else None,
            "--ep_size": service.ep if service.ep > 1 else None,
            "--max_seq_len": service.max_model_len,
            "--max_batch_size": service.max_num_seqs,
            "--max_num_tokens": service.max_num_batched_tokens,
            "--extra_llm_api_options": "options.yml" if config else None,
        }),
    ]  # fmt: skip


def _trtllm_draft(service: Service) -> dict[str, object]:
    """Return TensorRT-LLM's speculative_config (tensorrt_llm/llmapi/llm_args.py)."""
    draft = _speculative(service)
    kind = {"mtp": "MTP", "eagle3": "Eagle3", "draft_model": "Draft_Target"}[str(draft["method"])]
    source = {"speculative_model": draft["model"]} if "model" in draft else {}
    return {"decoding_type": kind, "max_draft_len": service.draft_tokens, **source}


def _llamacpp(model: str, service: Service) -> list[str]:
    kv = cache_type(service.kv)
    return [
        "llama-server",
        *_given({
            "--model": f"{model.split('/')[-1]}-{mix_named(service.stored)}.gguf",
            "--n-gpu-layers": service.n_gpu_layers,
            "--ctx-size": service.slots * slot_tokens(service),
            "--parallel": service.slots,
            "--batch-size": service.max_num_batched_tokens,
            "--cache-type-k": None if kv == "f16" else kv,
            "--cache-type-v": None if kv == "f16" else kv,
        }),
    ]  # fmt: skip
