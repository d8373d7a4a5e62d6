"""The verbs of the package. Each checks its arguments, and then imports and calls the package that does the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from .base.errors import NotAvailable, SpecError, need_packages
from .base.notes import Note
from .hardware.gpu import GPU, assumed_memory
from .hardware.gpu import gpu as find_gpu
from .hardware.this_machine import host
from .report import Comparison, Report
from .specs.model import ModelLike, ModelSpec
from .specs.model import model as find_model
from .specs.run import Inference, Run, Training
from .specs.stacks import StackOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from concurrent.futures import Executor
    from contextlib import AbstractContextManager

    import torch

    from .hardware.links import Cluster
    from .measurement.meters import CPUMeter, CUDAMeter, MPSMeter
    from .planning.files.write import Written
    from .planning.levers import Fix
    from .planning.out_of_memory import DriverError, OutOfMemory
    from .planning.result import Plan
    from .planning.snapshot import SnapshotReport
    from .planning.solve import Solution
    from .serving.report import ServingReport
    from .serving.service import Service
    from .traces.explain import Explanation

__all__ = ["compare", "estimate", "explain", "fix", "measure", "meter", "plan", "records", "serve", "simulate", "solve",
           "write"]  # fmt: skip


def estimate(model: ModelLike, run: Run, gpu: GPU | str | None = None, cluster: Cluster | None = None) -> Report:
    """Return an estimate of the memory and time of `run` on `gpu` by closed formulas: the peak, its parts, each phase's
    peak, and whether it fits.

    `gpu` is a GPU, its name, "cpu" (the CPU's operators: no workspace, unfused dropout masks) or None (any GPU: no
    capacity, no workspace). Sizes are bytes on rank 0, in the first stage of a pipeline; `outcome` and `where` consider
    all stages. `peak_reserved` is None, because a formula does not know the allocator's segments. The verdict leaves a
    margin for them and is "unknown" within it (formulas/verdict.py); `lab.simulate` decides. Time on several devices
    comes from `llmlab.formulas.time.distributed` with `cluster`. None means the GPU's usual nodes, which a note names;
    the interval then also covers nodes with a quarter of their network adapters.

    For a family without written formulas, and for Gemma 2, Phi-3 and models with experts, memory and time of a training
    step are derived from the code of transformers, as in `explain`. If that is not possible, for example without torch,
    the estimate is that of the written formulas, or, if there are none, of a plain transformer of the same sizes, with
    a wider margin. A note says that formulas were derived, or that the estimate is that of a plain transformer.
    Raises SpecError for an impossible run and UnknownName for an unknown model or GPU.
    """
    from .formulas.report import estimated
    from .simulation.deriving import trace_of
    from .specs.check import is_derived

    spec = find_model(model)
    trace = trace_of(spec, run, gpu) if gpu is not None and is_derived(spec, run) else None
    return _assuming(_with_generation(estimated(spec, run, gpu, cluster, trace), spec, run, gpu), spec, run, gpu)


def serve(
    model: ModelLike, service: Service | None = None, gpu: GPU | str = "H100-80GB",
    slo: tuple[float, float] | None = None,
) -> ServingReport:  # fmt: skip
    """Return the cost of serving `model`: memory as the engine divides it, latency under the load, throughput, price.

    `service` describes the deployment (`lab.Service`; by default vLLM on one GPU with one request). `slo`: the most
    seconds to the first and per further token; the report then has the requests per second within both. The time of an
    engine step is the sum of its kernels, which NVIDIA measured on the GPU (hardware/engine_kernels), and the load is
    replayed through a scheduler with continuous batching and chunked prefill. On deployments that others measured, the
    median error is 12 % for the time per output token and 23 % for the time to the first token
    (benchmarks/results/serving.md). The time of llama.cpp's steps is computed from the bytes that they move; its median
    error is 10 % of published speeds. Raises SpecError for an impossible service and UnknownName for an unknown model
    or GPU.
    """
    from .serving.report import served
    from .serving.service import Service

    if service is not None and not isinstance(service, Service):
        raise SpecError(f"service={service!r} is no Service; write lab.Service(concurrency=4)")
    return served(find_model(model), service or Service(), find_gpu(gpu), slo)


def explain(model: ModelLike, run: Training, gpu: GPU | str) -> Explanation:
    """Return the formula for the peak memory of `run` on `gpu`; print it for a table, or call its `latex()`.

    It has a term for each kind of tensor that is alive at the peak: the module and the operator that allocate it, the
    number of tensors, and the bytes of each as a product of sizes. The formula is derived from the code of
    transformers, which takes seconds for a new model, and is stored in the user's cache.
    Raises NotAvailable without torch and transformers, for another stack's run, for compile, offload, pp > 1, zero=1
    and fp8, and for a step that has no formula because it runs different operators at different sizes. Raises SpecError
    for an impossible run and UnknownName for an unknown model or GPU.
    """
    from .simulation.deriving import trace_of
    from .specs.check import check
    from .traces.explain import explained
    from .traces.store import has_trace

    spec, gpu = find_model(model), find_gpu(gpu)
    checked = check(spec, run, gpu)
    if not has_trace(checked):
        raise NotAvailable("explain derives the formula of an eager training step of transformers, without offload, "
                           "pp, zero=1 and fp8; leave out these options, or ask lab.simulate")  # fmt: skip
    need_packages("deriving a formula", "torch", "transformers")
    trace = trace_of(spec, checked, gpu)
    if trace is None:
        sizes = f"{run.micro_batch} × {run.seq_len} tokens"
        raise NotAvailable(f"a step of {spec.name} at {sizes} has no formula, because it runs different operators at "
                           "different sizes; ask lab.simulate")  # fmt: skip
    return explained(spec, checked, trace)


def simulate(model: ModelLike, run: Run, gpu: GPU | str) -> Report:
    """Return the peak allocated and reserved memory of `run` of `model` on `gpu`, phase by phase, from a simulation.

    The real model, loss, backward pass and optimizer run on fake tensors, so no weights are created. `gpu` is a GPU or
    its name, or "cpu", where nothing is rounded or reserved and the result equals that of `lab.measure`, except for the
    scratch memory of oneDNN's largest bf16 matmuls (simulation/workspaces/onednn.py). As in `lab.measure`, the first
    step warms up and the second counts. In a long generation, most steps are replayed (simulation/decode_replay.py).
    A run on several devices is simulated only on rank 0, with PyTorch's own engines: DDP, with ZeroRedundancyOptimizer
    for zero=1, FSDP2 for zero=2 and 3, parallelize_module for tp. Another stack's own code runs from its installed
    package. In its pipelines, the second and the last stage are simulated as well, and `outcome` and `where` consider
    all three. The report's notes name the engine, and the part of NCCL's memory that is not known.

    The time is that of the kernels that ran and of the communication between ranks. A compiled kernel's time follows
    from the bytes that Inductor says it moves, and communication has the formulas of `lab.estimate`. The time is None
    if a kernel's time is not known.

    phases["load"] is the memory in use when loading has finished. If the GPU is too small, the outcome is "out of
    memory", with the phase and the operator in `where`; the step then runs again without the limit, which yields the
    other sizes and `needed`, the memory that the run needs. Sizes are bytes; `process` adds the CUDA context.

    Raises NotAvailable for a run that cannot be simulated, SpecError for an impossible run, and UnknownName for an
    unknown model or GPU.
    """
    need_packages("simulating", "torch", "transformers")
    from .simulation.report import simulated

    spec = find_model(model)
    return _assuming(_with_generation(simulated(spec, run, gpu), spec, run, gpu), spec, run, gpu)


def measure(model: ModelLike, run: Run, device: str | torch.device | None = None, repeats: int = 5) -> Report:
    """Run `run` of `model` on `device` and return its measured memory and time. `device` None means the CUDA GPU, else
    Apple's GPU, else the CPU.

    Weights are random. One step warms up, so that the optimizer's states exist, and one is recorded; then `repeats`
    steps are timed without any recording, and their median is reported. Bytes come from the device: from the caching
    allocator's statistics on CUDA, from every event of the allocator on a CPU (counting only the run's allocations),
    and from polling torch.mps on an Apple GPU. "Out of memory" is an outcome, with the phase in `where`; on a CPU, a
    model whose weights exceed the available memory is not started. Afterwards, the global random state is restored, and
    nothing stays allocated.

    Raises NotAvailable for a run that is impossible on this machine, SpecError for an impossible run, and UnknownName
    for an unknown model.
    """
    need_packages("measuring", "torch", "transformers", "tokenizers")
    from .measurement.report import measured

    return measured(model, run, device, repeats)


def records(
    model: ModelLike | None = None,
    run: Run | None = None,
    gpu: GPU | str | None = None,
    source: str | None = None,
    folder: Path | str | None = None,
) -> list[Report]:
    """Return the recorded reports that match all given arguments, newest first; reports without a date come last.

    `model` and `gpu` may have any of their names ("Tesla T4" is "T4", and a preset's aliases are the preset); `run` is
    compared field by field. `source` is "measured" or "published"; `folder` replaces the package's and the user's
    folders of records. A RecordWarning names a file or record that cannot be read, and the others still load. Raises
    UnknownName for an unknown GPU, or for a name of neither a preset nor a recorded model; for a model without records,
    the list is empty.
    """
    from .archive.lookup import records as found

    return found(model, run, gpu, source, folder)


_measured = measure  # for compare, which has an argument of this name


def meter(device: str | torch.device | None = None) -> AbstractContextManager[CPUMeter | CUDAMeter | MPSMeter]:
    """Return a context manager that meters the memory of its block on `device` (default: as for `measure`).

    It yields a meter with these attributes, in bytes: `allocated`, `reserved`, `peak_allocated`, `peak_reserved`, and
    `timeline`; `reset_peak()` resets the peaks. Raises NotAvailable inside another meter, or if `device` is missing.
    """
    need_packages("measuring", "torch")
    from .measurement.meters import metered

    return metered(device)


def compare(
    model: ModelLike,
    run: Run,
    gpu: GPU | str | None = None,
    *,
    measure: bool = False,
    cluster: Cluster | None = None,
    stacks: Sequence[StackOptions | str] = (),
) -> Comparison:
    """Return the estimate, the simulation and the records of one run, side by side; with `measure`, also run it now.

    `gpu` is a GPU or its name; None is this machine's. The records are the newest of exactly this run on that GPU, ours
    and published, each with its provenance. With `measure`, which is only for this machine and excludes `gpu`, the new
    measurement replaces them. `cluster` is that of `estimate`. If the run cannot be simulated or torch is missing, the
    simulation is left out, and the estimate's notes say why. Raises SpecError if both `gpu` and `measure` are given,
    and errors as `estimate` and `measure` do.

    With `stacks`, return predictions of the same run with each of them instead: given fields stay as they are, and
    fields that were not given get the values that each stack sets.
    """
    if stacks:
        if measure or isinstance(run, Inference):
            raise SpecError(
                "stacks= compares predictions of a training step; give a lab.Training and leave out measure"
            )
        return _across(model, run, gpu or host().gpu or "cpu", cluster, stacks)
    device = (host().gpu or "cpu") if gpu is None else gpu
    if measure:
        if gpu is not None:
            raise SpecError(f"measure=True with gpu={gpu!r}: this machine is what is measured; give one of the two")
        return Comparison((*_predicted(model, run, device, cluster), _measured(model, run)))
    newest = {report.source: report for report in reversed(records(model, run, device))}
    return Comparison((*_predicted(model, run, device, cluster), *newest.values()))


def _across(
    model: ModelLike, run: Training, gpu: GPU | str, cluster: Cluster | None, stacks: Sequence[StackOptions | str]
) -> Comparison:
    """Return the predictions of `run` with each of `stacks`."""
    runs = [replace(run, stack=stack) for stack in stacks]
    return Comparison(tuple(report for stack_run in runs for report in _predicted(model, stack_run, gpu, cluster)))


def plan(
    model: ModelLike,
    gpus: str,
    global_batch: int,
    *,
    method: str = "full",
    allow: Sequence[str] = (),
    tokens: int | None = None,
    goal: str = "fastest",
    fixed: Mapping[str, Any] | None = None,
    within: float | None = None,
    stack: StackOptions | str = "transformers",
    executor: Executor | None = None,
) -> Plan:
    """Return the best runs that train `model` on `gpus`, the best first: found by estimates, confirmed by simulations.

    `gpus`: "T4", "8xH100-80GB", "2x8xA100-80GB" (nodes, GPUs per node). `global_batch`: sequences per update, over all
    ranks and micro-batches, which is the same for every run. `method`: "full", "lora" or "qlora". A plan varies mixed
    precision, micro-batch and accumulation, checkpointing, compile, ZeRO and its replicas (HSDP), offload, tensor,
    pipeline, context and expert parallelism, and the pipeline's schedule if `stack` has several. `allow` lists further
    fields that it may vary. "optimizer" (8-bit AdamW, Adafactor, Lion, Muon), "precision" (everything in bf16), "fp8",
    "lora" and "seq_len" (shorter sequences, with as many tokens per update) change the trained model, and "kernels"
    needs Liger.
    `fixed`: fields of Training with their fixed values, such as {"seq_len": 4096}.

    `goal`: "fastest", "smallest" (in memory), or "cheapest". The cheapest run has the lowest rent per update on any GPU
    with a price, in any number up to that of `gpus`. `tokens`: the number of tokens to train on; `within`: the days
    that this may take.

    With "transformers", the default of `stack`, a plan has only runs that one of the files of `write` can start: the
    training script, torchtitan's job config, or Megatron-LM's arguments. Another stack has its own program.

    Simulations run in `executor`, by default in processes on this machine, one per core and at most four. A run whose
    simulation runs out of memory is replaced by the next; a run fits if it leaves 4 % of the GPU free. A run that
    cannot be simulated is listed if its estimate is sure to fit, with the reason. Ctrl-C returns the best runs so far.
    If nothing fits, the plan is empty, and its `nearest` lists the nearest runs that would fit, with their prices.

    Raises SpecError for invalid or contradicting arguments, UnknownName for an unknown model or GPU, and NotAvailable
    without torch and transformers.
    """
    need_packages("planning", "torch", "transformers")
    from .planning.plan import plan as planned

    return planned(model, gpus, global_batch, method, allow, tokens, goal, fixed, within, stack, executor)


def write(model: ModelLike, run: Training, gpus: str, folder: str | os.PathLike[str], force: bool = False) -> Written:
    """Write the files that train `model` with `run` on `gpus` ("8xH100-80GB") into `folder`, all of them or none.

    They are train.py, ds_config.json, accelerate.yaml, torchtitan.toml, megatron_args.txt, axolotl.yaml,
    llama_factory.yaml, launch.sh, job.sbatch, sky.yaml, and model/config.json if the model is no preset. A file that
    cannot express the run is left out, and the result says why. The learning rate is set when the run starts. Raises
    SpecError if a file exists already and `force` is False, if no file can start the run, or if the run is for another
    number of GPUs, and UnknownName for an unknown model or GPU.
    """
    from .planning.files.write import write_files
    from .planning.machines import machines

    where = machines(gpus)
    return write_files(find_model(model), run, where.gpu.name, where.nodes, where.per_node, folder, force)


@overload
def fix(model: ModelLike, run: Run, gpu: GPU | str, cluster: Cluster | None = None) -> Fix: ...
@overload
def fix(model: str | Path, *, against: str | Path | None = None) -> OutOfMemory | DriverError | SnapshotReport: ...
def fix(
    model: ModelLike | Path,
    run: Run | None = None,
    gpu: GPU | str | None = None,
    cluster: Cluster | None = None,
    *,
    against: str | Path | None = None,
) -> Fix | OutOfMemory | DriverError | SnapshotReport:
    """Return the changes that reduce the memory of `run` of `model` on `gpu`: each with the bytes per GPU that it saves
    and the time that it costs.

    Everything is computed by formulas. If `estimate` has to derive them first, that takes seconds for each change.
    Given only torch's out-of-memory message, return its numbers one by one, and whether expandable_segments would have
    prevented the error. Given only the path of a snapshot that torch.cuda.memory._dump_snapshot wrote, return its peak
    by part and by place, its holes and its growth between steps, compared with the snapshot `against` if that is given.
    No code in the file is run.
    Raises SpecError for any other text, for a file that is no snapshot, and as `estimate` does.
    """
    from .planning.levers import derived
    from .planning.levers import fix as fixed
    from .planning.out_of_memory import explained
    from .planning.snapshot import snapshot_report
    from .recording.snapshot import is_snapshot

    if run is None and gpu is None and isinstance(model, (str, Path)):
        if is_snapshot(model):
            return snapshot_report(model, against)
        return explained(str(model))
    if run is None or gpu is None or isinstance(model, Path):
        raise SpecError("fix needs a model, a run and a GPU, or only the text of torch's out-of-memory error, or the "
                        "path of a memory snapshot")  # fmt: skip
    if isinstance(run, Training) and run.objective.generates:
        raise SpecError(f"fix with method={run.method!r}: no lever knows the phase that generates; give the run as "
                        "method='sft', or ask lab.estimate for each change")  # fmt: skip
    changes = fixed(model, run, gpu, cluster, derived)
    return replace(changes, report=_assuming(changes.report, find_model(model), run, gpu))


def solve(
    model: ModelLike, run: Run, gpu: GPU | str | None = None, name: str = "seq_len", *, simulate: bool = True
) -> Solution:
    """Return the largest value of `name` with which `run` of `model` fits `gpu`, or the smallest NVIDIA GPU on which it
    fits.

    `name` is "seq_len", "micro_batch" or "lora_rank" of a Training, "seq_len" (prompt and new tokens) or "batch" of an
    Inference, or "gpu", without `gpu`. Sequence lengths are multiples of 128 tokens. Estimates bracket the answer, and
    simulations that leave 4 % of the GPU free find it in steps of 1/32. Without `simulate`, or without torch, it is the
    largest value that is sure to fit by its estimate. The solution's `value` is None if nothing fits, and its notes
    then say what would. Raises SpecError for a `name` that the run does not have, and as `estimate` does.
    """
    from .planning.solve import solved

    spec = find_model(model)
    solution = solved(spec, run, None if gpu is None else find_gpu(gpu), name, simulate)
    return replace(solution, notes=(*solution.notes, *_assumptions(spec, solution.run or run, gpu)))


def _assuming(report: Report, spec: ModelSpec, run: Run, gpu: GPU | str | None) -> Report:
    """Return `report` with the notes of `_assumptions` after its first note."""
    assumed = _assumptions(spec, run, gpu)
    return replace(report, notes=(*report.notes[:1], *assumed, *report.notes[1:])) if assumed else report


def _assumptions(spec: ModelSpec, run: Run, gpu: GPU | str | None) -> tuple[Note, ...]:
    """Return notes on a GPU whose name does not determine its memory, on a run with more tokens than the model's config
    has positions, and on frozen weights that autocast leaves in fp32."""
    assumed = assumed_memory(gpu)
    if run.seq_len > spec.max_positions:
        limit = f"The config of {spec.name} has {spec.max_positions:,} positions, and the run has {run.seq_len:,}"
        assumed += (Note("beyond-positions", f"{limit}. Memory and time do not depend on this limit."),)
    if isinstance(run, Training) and run.lora and not (run.quantization or run.half_layers):
        half = run.compute_dtype
        if run.precision.startswith("autocast"):
            usual = f"If the script loads them in {half}, as the Trainer's {half}=True leaves them, give "
            half_size = f"{usual}half_layers='all'; they then take half of the memory."
            assumed += (Note("frozen-in-fp32", f"precision={run.precision!r} has frozen weights in fp32. {half_size}"),)
    return assumed


def _with_generation(report: Report, spec: ModelSpec, run: Run, gpu: GPU | str | None) -> Report:
    """Return `report` with the phase in which an engine generates, if the method trains on its own completions."""
    if not isinstance(run, Training) or not run.objective.generates or gpu is None or gpu == "cpu":
        return report
    from .serving.rollout import with_generation

    return with_generation(report, spec, run, find_gpu(gpu))


def _predicted(model: ModelLike, run: Run, gpu: GPU | str, cluster: Cluster | None) -> tuple[Report, ...]:
    """Return the estimate and the simulation; without a simulation, the estimate with a note that says why."""
    formulas = estimate(model, run, gpu, cluster)
    try:
        return formulas, simulate(model, run, gpu)
    except NotAvailable as error:
        return (replace(formulas, notes=(*formulas.notes, Note("not-simulated", f"There is no simulation: {error}."))),)
