"""Compile the Triton kernels for GPUs that this machine lacks; print registers, spills and shared memory from ptxas.

    python -m llmlab.course.kernels.ptx              # sm_75 (T4), sm_80 (A100), sm_90 (H100)
    python -m llmlab.course.kernels.ptx --arch 80    # one of them

A spill is a value that did not fit in a register and goes through memory instead. No GPU is needed, and the process
must not have been started with TRITON_INTERPRET=1. The output shows that a kernel compiles and fits, but not its speed.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from ...base.compat import symbol
from ...base.tables import Table, show
from .ladder.attention import tiles_for
from .ladder.rms_norm import stages
from .rungs import INTERPRETED, triton, warps

ARCHITECTURES = (75, 80, 90)
FP32 = ("DELTA", "INVERSE_RMS", "LOSSES", "LSE", "PARTIAL", "SCALE")  # pointers to fp32, whatever the tensors' dtype
FLOATS = ("back", "eps", "scale")  # arguments that are neither pointers nor integers
MULTIPLES = ("N", "V", "stride", "stride_dx", "stride_dy", "stride_x")  # of 16, at the sizes of Llama 3 8B
IN_LOOPS = {"barriers": "bar.sync", "exchanges": "shfl", "copies": "cp.async.c[ag]"}  # in PTX, for `loops`
IN_ITS_OWN = """
import json, sys
from llmlab.course.kernels import ptx
name, kernels = json.load(sys.stdin)
print(json.dumps([getattr(ptx, name)(*each) for each in kernels]))
"""


def kernels(arch: int) -> Iterator[tuple[str, str, str, dict[str, Any], dict[str, int]]]:
    """Yield (file, kernel, dtype, constants, options) for every kernel, at the sizes of Llama 3 8B."""
    hidden, tile = 4096, 8192
    for dtype in ("fp32", "fp16", "bf16") if arch >= 80 else ("fp32", "fp16"):
        yield "softmax", "softmax_row", dtype, {"BLOCK": hidden}, {"num_warps": warps(hidden)}
        for kernel in ("softmax_wide", "softmax_backward"):
            yield "softmax", kernel, dtype, {"BLOCK": tile}, {"num_warps": warps(tile)}
        for kernel in ("forward_kernel", "backward_kernel"):
            values, constants = hidden, {"BLOCK": hidden}
            if kernel == "backward_kernel":  # it also sums dweight
                values, constants["STAGES"] = 2 * hidden, stages(hidden, 4 if dtype == "fp32" else 2)
            yield "rms_norm", kernel, dtype, constants, {"num_warps": warps(values)}
            yield "swiglu", kernel, dtype, {"BLOCK": 1024}, {}
        for back in (False, True):
            yield "rope", "rope_kernel", dtype, {"BACK": back, "BLOCK_H": 32, "BLOCK_K": 8, "BLOCK_D": 64}, {}
        for kernel in ("loss_kernel", "gradient_kernel"):
            yield "cross_entropy", kernel, dtype, {"IGNORED": -100, "BLOCK": tile}, {"num_warps": warps(tile)}
        yield "matmul", "matmul_kernel", dtype, {"TILE": 32}, {}
        for head in (32, 64, 96, 128):
            width = triton.next_power_of_2(head)
            yield "attention", "delta_kernel", dtype, {"D": head, "WIDTH": width, "M": 64}, {}
            for kernel in ("forward_kernel", "keys_kernel", "queries_kernel"):
                settings = tiles_for(head, 4 if dtype == "fp32" else 2, divmod(arch, 10), kernel != "forward_kernel")
                options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
                if kernel == "queries_kernel":  # as `Attention.backward` does
                    settings["M"], settings["N"] = settings["N"], settings["M"]
                yield "attention", kernel, dtype, {"CAUSAL": True, "D": head, "WIDTH": width, **settings}, options


def module_of(file: str) -> ModuleType:
    """Return a module of the ladder by its name, or the one that a path ending in .py names."""
    if not file.endswith(".py"):
        return import_module(f".ladder.{file}", __package__)
    spec = spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    return module


def compiled(file: str, name: str, dtype: str, constants: dict[str, Any], options: dict, arch: int) -> Any:
    """Compile a kernel for sm_`arch`; return Triton's result, whose PTX is `.asm["ptx"]`. file: as in `module_of`.

    Pointers are assumed to be aligned to 16 bytes, as in PyTorch, and columns and strides to be multiples of 16.
    """
    GPUTarget = symbol("triton.backends.compiler.GPUTarget")
    kernel = getattr(module_of(file), name)
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.isupper() and len(argument) > 1 and argument not in ("HEADS", "KV_HEADS", "HALF", "GROUP"):
            signature[argument] = "*i64" if argument == "TARGETS" else "*fp32" if argument in FP32 else f"*{dtype}"
        elif argument in tuple("XYWQKVABC") and not (argument == "V" and file == "cross_entropy"):
            signature[argument] = f"*{dtype}"
        else:
            signature[argument] = "fp32" if argument in FLOATS else "i32"
    aligned = {
        (position,): [["tt.divisibility", 16]]
        for position, (argument, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and (argument in MULTIPLES or argument[-2:] in ("_b", "_h", "_t")))
    }
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compile_kernel(
    file: str, name: str, dtype: str, constants: dict[str, Any], options: dict, arch: int
) -> tuple[str, ...]:
    """Compile one kernel for sm_`arch`; return kernel, dtype, arch, registers per thread, bytes spilled and shared."""
    get_ptxas = symbol("triton.backends.nvidia.compiler.get_ptxas")
    kernel = compiled(file, name, dtype, constants, options, arch)
    target, *_ = re.findall(r"\.target (\w+)", kernel.asm["ptx"])  # sm_90a if it uses Hopper's matrix instructions
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "kernel.ptx")).write_text(kernel.asm["ptx"], "utf-8")
        assemble = [get_ptxas(arch).path, "-v", f"--gpu-name={target}", str(path), "-o", str(path) + ".cubin"]
        ptxas = subprocess.run(assemble, capture_output=True, text=True, check=True)
    label = f"{file}.{name}" + "".join(f" {key}={value}" for key, value in constants.items())
    registers, *_ = re.findall(r"Used (\d+) registers", ptxas.stderr)
    spills = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas.stderr)))
    return label, dtype, str(arch), registers, str(spills), str(kernel.metadata.shared)


def loops(file: str, name: str, dtype: str, constants: dict[str, Any], options: dict, arch: int) -> dict[str, int]:
    """Return how many loops the PTX of a kernel has for sm_`arch`, and how many barriers, exchanges between threads
    (shuffles) and asynchronous copies are in these loops."""
    code = compiled(file, name, dtype, constants, options, arch).asm["ptx"]
    labels = {match[1]: match.start() for match in re.finditer(r"^([$]L\w+):", code, re.MULTILINE)}
    jumps = [(labels[match[1]], match.start()) for match in re.finditer(r"bra[.\w]*\s+([$]L\w+);", code)]
    bodies = [code[start:end] for start, end in jumps if start < end]
    return {"loops": len(bodies)} | {
        event: sum(len(re.findall(instruction, body)) for body in bodies) for event, instruction in IN_LOOPS.items()
    }


def in_its_own_process(name: str, kernels: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of the function `name`, `compile_kernel` or `loops`, for each list of arguments.

    Triton decides once per process whether it compiles or interprets. This function compiles in a new process, so that
    a process that interprets can call it. Raises subprocess.CalledProcessError, with the compiler's messages in
    `stderr`, if a kernel does not compile.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_ITS_OWN], env=environment, check=True,
        input=json.dumps([name, [list(arguments) for arguments in kernels]]), capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(process.stdout)


def in_a_file(kernel: Any, folder: str | Path) -> str:
    """Write the source of a kernel that is defined in a notebook to a file in `folder`; return its path."""
    source = dedent(inspect.getsource(getattr(kernel, "fn", kernel)))
    (path := Path(folder, "own.py")).write_text("import triton\nimport triton.language as tl\n\n" + source, "utf-8")
    return str(path)


def compared(kernels: Sequence[Sequence[Any]]) -> list[dict[str, int]]:
    """Return the instructions in loops and the resources of a kernel, for each list of arguments of `compiled`.

    Keys: barriers, exchanges and copies as in `loops`, registers per thread, spilled and shared bytes.
    """
    results = []
    loop_counts, rows = (in_its_own_process(name, kernels) for name in ("loops", "compile_kernel"))
    for loop, row in zip(loop_counts, rows, strict=True):
        registers, spilled, shared = map(int, row[-3:])
        results.append({**loop, "registers": registers, "spilled": spilled, "shared": shared})
    return results


@click.command()
@click.option("--arch", type=click.Choice([str(arch) for arch in ARCHITECTURES]), multiple=True, help="sm_ number.")
@click.option("--kernel", "wanted", default="", help="Only kernels whose name contains this.")
@click.option("--dtype", "wanted_dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Only this one.")
@click.option("--head", type=int, help="Of attention's kernels, only this head size.")
def main(arch: tuple[str, ...], wanted: str, wanted_dtype: str | None, head: int | None) -> None:
    """Compile the Triton kernels and print registers per thread, bytes spilled and bytes of shared memory."""
    if triton is None or INTERPRETED:
        click.echo("needs Triton, and a process without TRITON_INTERPRET=1: the interpreter compiles nothing", err=True)
        sys.exit(2)
    selected = [
        (file, name, dtype, constants, options, sm)
        for sm in map(int, arch or map(str, ARCHITECTURES))
        for file, name, dtype, constants, options in kernels(sm)
        if wanted in f"{file}.{name}" and wanted_dtype in (None, dtype)
        and (head is None or constants.get("D", head) == head)
    ]  # fmt: skip
    rows = [compile_kernel(*arguments) for arguments in track(selected, "kernels", console=Console(stderr=True))]
    header = ("kernel", "dtype", "sm", "registers", "spills", "shared")
    show(Table(header, rows, words=(0, 1)))


if __name__ == "__main__":
    main()
