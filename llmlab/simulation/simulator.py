"""`with lab.simulator("A100-40GB") as sim:` any code written for "cuda" runs unchanged, on a machine without CUDA.

Inside the block this thread has one simulated card. What goes to "cuda" becomes a fake tensor, whose memory the model
of the caching allocator counts; it has a shape and a dtype and no values. What stays on the host is real (data sets,
samplers, token ids), but for parameters, which are fake there too and take no memory.

Reading a float that the card computed gives a placeholder, so that loops which log a loss run to their end. Code that
branches on such a value, or takes a size from it, gets NotAvailable with the operator and its own line; `simulator`
says all of it. Light to import: torch comes with the first call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..base.errors import NotAvailable
from ..base.notes import Note
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from .capability import capability_of

if TYPE_CHECKING:
    from os import PathLike

    from torch import Tensor

    from .card import Card
    from .profile.operator_log import Operators
    from .profile.timeline import Phases, Timeline

EAGER_TOO_LARGE = Note(
    "counted-eager",
    "The step does not fit when it runs eagerly; the compiled step fuses operators and may still fit.",
)


class Simulator:
    """The memory of the simulated card, in bytes: inside the block as it is now, after it as it was at its end.

    `gpu` is the card. `allocated`, `reserved`, their peaks since the block began or `reset_peak()` was last called, and
    `timeline`, what was allocated after each allocation and each free, are those of `lab.meter`.
    """

    def __init__(self, card: Card, phases: Phases) -> None:
        self._card, self._phases = card, phases
        self.gpu: GPU = card.gpu

    @property
    def allocated(self) -> int:
        """Bytes of the tensors on the card, rounded up to blocks: torch.cuda.memory_allocated."""
        return self._card.memory.allocated

    @property
    def reserved(self) -> int:
        """Bytes of the allocator's segments: torch.cuda.memory_reserved."""
        return self._card.memory.reserved

    @property
    def peak_allocated(self) -> int:
        """The most that was allocated, whatever torch.cuda.reset_peak_memory_stats the code inside calls."""
        return self._card.peaks[0]

    @property
    def peak_reserved(self) -> int:
        """The most that was reserved, likewise."""
        return self._card.peaks[1]

    @property
    def timeline(self) -> Timeline:
        """Bytes allocated after each allocation and each free, in order; `timeline.plot()` says what for."""
        return self._phases.timeline(f"{self.gpu.name}, simulated", self.gpu.memory)

    @contextmanager
    def kept_files(self) -> Iterator[None]:
        """Let functions of os and shutil, as they are now, find the checkpoints that were not written."""
        from .checkpoints.virtual_files import VirtualFiles

        with VirtualFiles(self._card.kept_files).patched():
            yield

    @property
    def has_upper_sizes(self) -> bool:
        """Whether torch.compile ran some code eager, so that the sizes are upper bounds."""
        return self._card.engine.has_upper_sizes

    @property
    def notes(self) -> tuple[Note, ...]:
        """What was assumed or is not counted: a sentence each, whose `code` names its kind."""
        from .engine.engine import notes_of

        return notes_of(self._card.engine)

    @property
    def out_of_memory(self) -> str | None:
        """Which operator last asked for more than the card had, and by how much; None where all found room."""
        from ..base.units import show_bytes

        error, place = self._card.engine.refused, self._card.engine.asked
        if error is None:
            return None
        return f"{place}: {show_bytes(error.segment - (error.capacity - error.reserved))} short"

    @property
    def counts_all_kernels(self) -> bool:
        """Whether `operators` are all that a card would run: no kernel of Triton's."""
        return not self._card.engine.launches

    def reset_peak(self) -> None:
        """Let the peaks start again from what is allocated and reserved now."""
        self._card.memory.reset_peak()
        self._card.peaks_before = 0, 0

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` has memory on the simulated card."""
        return self._card.engine.address(tensor) is not None

    def end_step(self) -> None:
        """Say that a step of the training loop has ended, so that `growth` can compare two of them."""
        self._card.history.steps.append(len(self._card.history.entries))

    @property
    def growth(self) -> dict[str, int]:
        """Bytes that the last step left behind, by module and line; empty before the second `end_step()`."""
        return self._card.history.growth()

    @contextmanager
    def operators(self) -> Iterator[Operators]:
        """Give a list of the operators that run on the card inside the block, with their FLOP, bytes and `seconds`.

            with sim.operators() as operators:
                step()
            print(operators.flops, operators.seconds)
        """
        from .profile.operator_log import Operators

        seen = Operators(self.gpu)
        engine = self._card.engine
        before, engine.watch = engine.watch, seen
        try:
            yield seen
        finally:
            engine.watch = before

    def save_snapshot(self, path: str | PathLike[str]) -> None:
        """Write the segments and the history to `path` as torch.cuda.memory._dump_snapshot does.

        https://pytorch.org/memory_viz opens it, and `python -m torch.cuda._memory_viz`. Each allocation has its
        operator and module, then the stack of the Python code that made it. A crash leaves the old file or none.
        """
        from .profile.snapshot import write_snapshot

        write_snapshot(path, self._card.snapshot())

    def __repr__(self) -> str:
        from ..base.units import show_bytes

        state = f"{show_bytes(self.peak_allocated)} allocated, {show_bytes(self.peak_reserved)} reserved"
        return f"<simulated {self.gpu.name}: at most {state}>"


@contextmanager
def simulator(gpu: GPU | str, *, assume: float | None = None, world_size: int | None = None) -> Iterator[Simulator]:
    """Simulate `gpu` as this thread's only CUDA device until the block ends; nothing stays patched, whatever happens.

    PYTORCH_CUDA_ALLOC_CONF is read when the block begins, and again at its first request for memory. Above the card's
    memory torch.cuda.OutOfMemoryError is raised, as by torch, and code that catches it can go on.

    Values. Tensors on the card have none. What a healthy run shows is taken for granted: everything is finite, the
    GradScaler never skips a step, and generate() draws no end-of-sequence token. `.item()` and `.tolist()` of floats
    give a number that prints as "?", can be computed with and stored. Where it is compared, and for `float()`, NumPy
    and tensors on the host that such values are written to, it is 1.0, or 0 for integers, with a warning once for each
    line. `assume=2.5` makes every single number that is read 2.5 (2, True) and every time between two events, without
    a word. Known, and followed: integers and masks that come from the host or from torch.arange and its like, token ids
    that torch.randint draws on the card, floats of the host, and what collectives make of them. What these size
    (x[mask], nonzero, repeat_interleave) is right; what the card's own results would size raises NotAvailable, with the
    operator and the line.

    Checkpoints. torch.save and safetensors write no file that would hold simulated tensors: it is kept in memory until
    the block ends, where torch.load and load_file find it, and os and shutil rename, copy and remove it. So do
    torch.distributed.checkpoint's save, async_save and load, of this rank's files. Files that are there load for real.

    Several cards. With `world_size` this process is rank 0 of as many: RANK, LOCAL_RANK and WORLD_SIZE are set as
    torchrun sets them, and init_process_group makes a group whose other ranks are not there. DDP, FSDP (both),
    DeepSpeed's ZeRO, DTensor, pipeline stages, context parallelism, accelerate and the Trainer run as they are, and the
    card holds what rank 0's would, but for NCCL's own buffers, which are not the allocator's. All ranks have this
    rank's values, and collectives make of those what they would. A router's tokens are counted as even among its
    experts, and a note says so.

    torch.compile compiles, up to the kernels: what Inductor fuses, saves and makes again is its choice for the card,
    and its buffers are the card's. That takes seconds for each graph, and Triton. A graph that cannot be compiled here
    runs eager, and a note names it; its autotuning and its CUDA graphs are left out, with a note.

    Not simulated: CUDA graphs, kernels compiled for the card, DeepSpeed's pipelines and compiled operators (all are
    refused), cuDNN's workspaces, which belong to the algorithm it picks, LSTM and GRU as one cuDNN kernel (a note says
    so), sparse tensors, and time: events give "?", and so do the card's sensors. Triton's kernels are launched and do
    nothing: they write into tensors that they are given.
    A DataLoader's workers run in this thread. Streams have blocks of their own, but backward runs on the stream that is
    current when it is called. Parameters on the host have no values either. Names bound before the block, as by `from
    torch.cuda import is_available`, stay what they were. Names that a module first imported inside it took are torch's
    after it, and so are the script's own; what was answered inside, as `CUDA = is_available()`, is not asked again.

    Raises UnknownName for a card that is not known, NotAvailable without torch, for a card without CUDA and inside a
    meter, and SpecError inside another simulator and in a second thread.
    """
    device = find_gpu(gpu)
    if find_spec("torch") is None:
        raise NotAvailable("simulating needs torch: pip install 'llmlab[torch]'")
    capability_of(device)
    from .allocator.caching import Allocator
    from .allocator.config import AllocatorConfig
    from .card import Card
    from .engine.real_host import RealHost
    from .patching.install import script_on

    host = RealHost(assume)
    memory = Allocator(device.room(), AllocatorConfig.from_environment(), device.memory)
    memory.late_config = AllocatorConfig.from_environment  # a script may set it in its first lines
    card = Card(device, memory, host)
    with script_on(card, host, world_size) as phases:
        yield Simulator(card, phases)
