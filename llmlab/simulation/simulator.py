"""`with lab.simulator("A100-40GB") as sim:` runs any code written for "cuda" unchanged, on a machine without CUDA.

Inside the block, this thread has one simulated GPU. Tensors on "cuda" are fake tensors, whose memory a model of the
caching allocator counts. They have a shape and a dtype, but no values. Tensors on the host are real (data sets,
samplers, token ids), except parameters, which are fake there too and need no memory.

Reading a float that the GPU computed returns a placeholder, so that loops that log a loss run to their end. Code that
branches on a placeholder causes a warning, and code that would use one as a size gets NotAvailable, with the operator
and the line; `simulator` describes the rules. This module imports torch only at the first call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..base.errors import NotAvailable, SpecError
from ..base.notes import Note
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import GPUS_PER_NODE
from .capability import capability_of

if TYPE_CHECKING:
    from os import PathLike

    from torch import Tensor

    from .profile.operator_log import Operators
    from .profile.timeline import Phases, Timeline
    from .simulated_gpu import SimulatedGPU

EAGER_TOO_LARGE = Note(
    "counted-eager",
    "The step does not fit when it runs eagerly; the compiled step fuses operators and may still fit.",
)


class Simulator:
    """The simulated GPU's memory, in bytes: the current figures inside the block, and the last ones after it.

    `gpu` is the GPU that is simulated. `allocated`, `reserved`, their peaks since the block began or since the last
    `reset_peak()`, and `timeline`, the bytes after each allocation and each free, mean the same as in `lab.meter`.
    """

    def __init__(self, gpu: SimulatedGPU, phases: Phases) -> None:
        self._simulated, self._phases = gpu, phases
        self.gpu: GPU = gpu.gpu

    @property
    def ranks(self) -> int:
        """The number of ranks in the process group that the code created; 1 if it created none."""
        return self._simulated.ranks

    def launch(self, world_size: int, per_node: int = GPUS_PER_NODE, rank: int = 0) -> None:
        """Continue as `rank` of `world_size` ranks, on nodes of `per_node` GPUs. Environment variables stay set until
        the caller restores os.environ."""
        from .distributed.process_group import launch

        launch(self._simulated, world_size, per_node, rank)

    @property
    def allocated(self) -> int:
        """Bytes of the tensors on the GPU, rounded up to blocks: torch.cuda.memory_allocated."""
        return self._simulated.memory.allocated

    @property
    def reserved(self) -> int:
        """Bytes of the allocator's segments: torch.cuda.memory_reserved."""
        return self._simulated.memory.reserved

    @property
    def peak_allocated(self) -> int:
        """The most allocated bytes, even if the code inside calls torch.cuda.reset_peak_memory_stats."""
        return self._simulated.peaks[0]

    @property
    def peak_reserved(self) -> int:
        """The most reserved bytes, even if the code inside calls torch.cuda.reset_peak_memory_stats."""
        return self._simulated.peaks[1]

    @property
    def host_peak(self) -> int:
        """The most bytes of this rank's simulated tensors on the host: parameters before they move, offloaded states,
        and copies from the GPU. Tensors with values, such as data sets, are not counted."""
        return self._simulated.engine.on_host.peak

    @property
    def host_pinned(self) -> int:
        """The bytes of `host_peak` in pinned memory."""
        return self._simulated.engine.on_host.pinned_at_peak

    @property
    def host_lines(self) -> dict[str, int]:
        """The bytes of `host_peak` by the line of code that created the tensors, the most first."""
        return self._simulated.engine.on_host.lines_at_peak

    @property
    def timeline(self) -> Timeline:
        """Bytes allocated after each allocation and each free, in order; `timeline.plot()` shows their categories."""
        return self._phases.timeline(f"{self.gpu.name}, simulated", self.gpu.memory)

    @contextmanager
    def kept_files(self) -> Iterator[None]:
        """Patch the current functions of os and shutil so that they find checkpoints that were not written to disk."""
        from .checkpoints.virtual_files import VirtualFiles

        with VirtualFiles(self._simulated.kept_files).patched():
            yield

    @property
    def has_upper_sizes(self) -> bool:
        """Whether torch.compile ran some code eagerly, so that the sizes are upper bounds."""
        return self._simulated.engine.has_upper_sizes

    @property
    def notes(self) -> tuple[Note, ...]:
        """Assumptions and omissions: a sentence each, whose `code` names its kind."""
        from .engine.engine import notes_of

        return notes_of(self._simulated.engine)

    @property
    def out_of_memory(self) -> str | None:
        """The operator whose request last exceeded the GPU's memory, and by how much; None if all requests fit."""
        from ..base.units import show_bytes

        error, place = self._simulated.engine.refused, self._simulated.engine.asked
        return None if error is None else f"{place}, whose request lacked {show_bytes(error.lacked)}"

    @property
    def counts_all_kernels(self) -> bool:
        """Whether `operators` are all that a GPU would run, because no Triton kernel of unknown time was launched."""
        return not self._simulated.engine.launches

    def reset_peak(self) -> None:
        """Reset the peaks to the bytes that are allocated and reserved now."""
        self._simulated.memory.reset_peak()
        self._simulated.peaks_before = 0, 0

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has memory on the simulated GPU."""
        return self._simulated.engine.address(tensor) is not None

    @property
    def events(self) -> int:
        """The number of the allocator's events so far, a time for `end_step`."""
        return len(self._simulated.history.entries)

    def end_step(self, events: int | None = None) -> None:
        """Mark the end of a training step, now or after `events`, so that `growth` can compare two steps."""
        self._simulated.history.steps.append(self.events if events is None else events)

    @property
    def growth(self) -> dict[str, int]:
        """Bytes by which memory grows with each step, by module and line; empty before the second `end_step()`."""
        return self._simulated.history.growth()

    @contextmanager
    def operators(self) -> Iterator[Operators]:
        """Yield a list of the operators that run on the GPU inside the block, with their FLOP, bytes and `seconds`.

            with sim.operators() as operators:
                step()
            print(operators.flops, operators.seconds)
        """
        from .profile.operator_log import Operators

        seen = Operators(self.gpu)
        engine = self._simulated.engine
        before, engine.watch = engine.watch, seen
        try:
            yield seen
        finally:
            engine.watch = before

    def save_snapshot(self, path: str | PathLike[str]) -> None:
        """Write the segments and the history to `path` as torch.cuda.memory._dump_snapshot does.

        https://pytorch.org/memory_viz and `python -m torch.cuda._memory_viz` open it. Each allocation has its operator
        and module, followed by the Python stack. After a crash, the file is the old one or missing.
        """
        from .profile.snapshot import write_snapshot

        write_snapshot(path, self._simulated.snapshot())

    def __repr__(self) -> str:
        from ..base.units import show_bytes

        state = f"{show_bytes(self.peak_allocated)} allocated, {show_bytes(self.peak_reserved)} reserved"
        return f"<simulated {self.gpu.name}: at most {state}>"


@contextmanager
def simulator(
    gpu: GPU | str, *, assume: float | None = None, world_size: int | None = None, rank: int = 0
) -> Iterator[Simulator]:
    """Simulate `gpu` as this thread's only CUDA device until the block ends. All patches are then undone, even after an
    error.

    PYTORCH_CUDA_ALLOC_CONF is read when the block begins, and again at the first request for memory. If the GPU's
    memory runs out, torch.cuda.OutOfMemoryError is raised, as by torch, and code that catches it can continue.

    Values. Tensors on the GPU have none. The simulator assumes a healthy run: everything is finite, the GradScaler
    never skips a step, and generate() draws no end-of-sequence token. `.item()` and `.tolist()` of floats return a
    number that prints as "?" and can be used in arithmetic and stored. When it is compared, or passed to `float()`,
    NumPy or a tensor on the host, it is 1.0, or 0 for integers, with one warning per line. With `assume=2.5`, every
    single number that is read and every time between two events is 2.5 (2 for integers, True for flags), without a
    warning. The simulator knows and follows integers and masks that come from the host or from functions like
    torch.arange, token ids that torch.randint draws on the GPU, floats on the host, and results of collectives on
    these. Sizes that depend on known values (x[mask], nonzero, repeat_interleave) are right. A size that depends on the
    GPU's own results raises NotAvailable, with the operator and the line.

    Checkpoints. torch.save and safetensors write no file that would contain simulated tensors. Its content stays in
    memory until the block ends, where torch.load and load_file find it, and os and shutil rename, copy and remove it.
    The same applies to torch.distributed.checkpoint's save, async_save and load, for this rank's files. Existing files
    load for real.

    Several GPUs. With `world_size`, this process is `rank` of that many ranks: RANK, LOCAL_RANK and WORLD_SIZE are set
    as torchrun sets them, and init_process_group creates a group whose other ranks do not exist. DDP, FSDP (both),
    DeepSpeed's ZeRO, DTensor, pipeline stages, context parallelism, accelerate and the Trainer run unchanged. The
    memory is that of this rank's GPU, except NCCL's own buffers, which the allocator does not manage. All ranks have
    this rank's values, and collectives compute their results from them. A router's tokens are counted as split evenly
    among its experts, and a note says so.

    torch.compile compiles everything except the kernels. Inductor decides for this GPU which operators to fuse and
    which tensors to save or recompute, and its buffers are counted. This needs Triton, and seconds for each graph. A
    graph that cannot be compiled here runs eagerly, and a note names it. Autotuning and CUDA graphs are left out, with
    a note.

    Not simulated: CUDA graphs, kernels compiled for the GPU, DeepSpeed's pipelines and compiled operators (all of these
    are refused), cuDNN's workspaces, which depend on the algorithm it picks, LSTM and GRU as one cuDNN kernel (a note
    says so), sparse tensors, and time: events return "?", and so do the GPU's sensors. Triton kernels are launched and
    do nothing, because they write only into existing tensors.
    A DataLoader's workers run in this thread. Each stream has its own blocks, but the backward pass runs on the stream
    that is current when it is called. Parameters on the host have no values either. Names bound before the block, as by
    `from torch.cuda import is_available`, are not patched. Names that the script, or a module first imported inside the
    block, took from torch are torch's own again after the block. An answer stored inside the block, such as
    `CUDA = is_available()`, keeps its value.

    Raises UnknownName for an unknown GPU, NotAvailable without torch, for a GPU without CUDA and inside a meter, and
    SpecError inside another simulator and in a second thread.
    """
    device = find_gpu(gpu)
    if not 0 <= rank < (world_size or 1):
        raise SpecError(f"rank={rank} with world_size={world_size}: ranks are 0 to world_size - 1")
    if find_spec("torch") is None:
        raise NotAvailable("simulating needs torch: pip install 'llmlab[torch]'")
    capability_of(device)
    from .allocator.caching import Allocator
    from .allocator.config import AllocatorConfig
    from .engine.real_host import RealHost
    from .patching.install import script_on
    from .simulated_gpu import SimulatedGPU

    host = RealHost(assume)
    memory = Allocator(device.room(), AllocatorConfig.from_environment(), device.memory)
    memory.late_config = AllocatorConfig.from_environment  # a script may set it in its first lines
    simulated = SimulatedGPU(device, memory, host)
    with script_on(simulated, host, world_size, rank) as phases:
        yield Simulator(simulated, phases)
