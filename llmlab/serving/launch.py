"""The command that starts an engine's server with the settings of a Service."""

from __future__ import annotations

import shlex

from ..specs.gguf import mix_named
from .llamacpp import cache_type, slot_tokens
from .service import Service

QUANTIZATION = {"fp8": "fp8", "awq": "awq", "gptq": "gptq", "int8": "w8a8_int8"}  # SGLang's words


def launch_line(model: str, service: Service) -> str:
    """Return the shell command that starts the server of `service.engine` for `model`.

    Options: vllm/engine/arg_utils.py, sglang/srt/server_args.py, tensorrt_llm/commands/serve.py, llama.cpp's
    common/arg.cpp, read 2026-11-29. A checkpoint in nvfp4 or mxfp4 names its format itself. `gpu_memory_utilization` is
    vLLM's: SGLang's share is of weights and cache alone, TensorRT-LLM's of the memory that the weights leave, so both
    keep their defaults. The .gguf file is taken to be in the current folder, with the name that is usual for it.
    """
    engines = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "llama.cpp": _llamacpp}
    options = engines[service.engine](model, service)
    return shlex.join([part for part in options if part])


def _given(pairs: dict[str, object]) -> list[str]:
    return [part for flag, value in pairs.items() if value is not None for part in (flag, str(value))]


def _vllm(model: str, service: Service) -> list[str]:
    copies = service.dp_attention
    return [
        "vllm", "serve", model,
        *_given({
            "--tensor-parallel-size": service.tp // copies,
            "--data-parallel-size": copies if copies > 1 else None,
            "--gpu-memory-utilization": service.gpu_memory_utilization,
            "--max-model-len": service.max_model_len,
            "--max-num-seqs": service.max_num_seqs,
            "--max-num-batched-tokens": service.max_num_batched_tokens,
            "--quantization": "fp8" if service.weights == "fp8" else None,
            "--kv-cache-dtype": "fp8" if service.kv == "fp8" else None,
        }),
        "--enable-expert-parallel" if service.ep > 1 else "",
    ]  # fmt: skip


def _sglang(model: str, service: Service) -> list[str]:
    copies = service.dp_attention
    return [
        "python", "-m", "sglang.launch_server",
        *_given({
            "--model-path": model,
            "--tp-size": service.tp,
            "--dp-size": copies if copies > 1 else None,
            "--ep-size": service.ep if service.ep > 1 else None,
            "--context-length": service.max_model_len,
            "--max-running-requests": service.max_num_seqs,
            "--chunked-prefill-size": service.max_num_batched_tokens,
            "--quantization": QUANTIZATION.get(service.weights),
            "--kv-cache-dtype": "fp8_e4m3" if service.kv == "fp8" else None,
        }),
        "--enable-dp-attention" if copies > 1 else "",
    ]  # fmt: skip


def _trtllm(model: str, service: Service) -> list[str]:
    return [
        "trtllm-serve", "serve", model,
        *_given({
            "--tp_size": service.tp,
            "--ep_size": service.ep if service.ep > 1 else None,
            "--max_seq_len": service.max_model_len,
            "--max_batch_size": service.max_num_seqs,
            "--max_num_tokens": service.max_num_batched_tokens,
        }),
    ]  # fmt: skip


def _llamacpp(model: str, service: Service) -> list[str]:
    kv = cache_type(service.kv)
    return [
        "llama-server",
        *_given({
            "--model": f"{model.split('/')[-1]}-{mix_named(service.weights)}.gguf",
            "--n-gpu-layers": service.n_gpu_layers,
            "--ctx-size": service.slots * slot_tokens(service),
            "--parallel": service.slots,
            "--batch-size": service.max_num_batched_tokens,
            "--cache-type-k": None if kv == "f16" else kv,
            "--cache-type-v": None if kv == "f16" else kv,
        }),
    ]  # fmt: skip
