"""The dispatch mode: runs each operator on fake tensors, and allocates memory for every new storage until it dies.

The real step runs on fake tensors, which have a shape, a dtype and a storage without bytes. `Engine` is a dispatch mode
over them. It sees every operator below autograd, in the order in which a GPU would run them. It allocates memory for
each new storage, frees it at the moment the storage dies, and allocates the workspace of the operator's CUDA kernel
(workspaces/).

The simulated GPU is the device "cpu:0", and the host is "cpu". A torch without CUDA has no guard for CUDA devices, so
fake tensors cannot be on "cuda" there. To torch, "cpu" and "cpu:0" are two devices with the same kernels: tensors must
be copied between them, and mixing them raises an error, as it does for "cpu" and "cuda".
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...base.compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
    current_autograd_node,
    current_graph_task_id,
    disable_current_modes,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from ...base.notes import Note
from ...hardware.gpu import GPU
from ...recording.parts import Event
from ..allocator.memory import AllocatorOutOfMemory, Memory
from ..devices import GPU_DEVICE, HOST, Shown
from ..host_tensors import HostTensors
from ..values.collectives import COLLECTIVES, exchange
from ..values.counts import BALANCED, BINS, DISTINCT, balance, counts_of, distinct_of
from ..values.known import SMALL, VALUES_LIMIT, follow, known, sized_by_value
from ..values.placeholders import asked_by_torch, initializing, needs_values, value_for
from ..workspaces.none import has_known_workspace
from ..workspaces.registry import CPU_WORKSPACES, WORKSPACES, Operator, Workspace
from .inplace_autograd import CANDIDATES, counts_alone, plain_form
from .operators import cast_copies, changes_values_alone, decomposed, is_composite, mixed_devices
from .real_host import RealHost
from .scratch import Observer, Scratch
from .shape_cache import Repeats
from .unsupported import random_again

DEVICE_OF = torch.ops.prim.device.default
VALUE_OF = torch.ops.aten._local_scalar_dense.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
# of torch.profiler.record_function, which FSDP calls for each layer: they have no tensors
ENTER_RANGE = torch.ops.profiler._record_function_enter_new.default
EXIT_RANGE = torch.ops.profiler._record_function_exit._RecordFunction
LENT = Note(  # c10/cuda/CUDACachingAllocator.cpp, insert_events
    "record-stream",
    "Tensor.record_stream delays when freed blocks can be used again, for as long as the GPU runs behind the script. "
    "A real GPU can therefore reserve more than `peak reserved` says; `peak allocated` is exact.",
)
DEVICES_DIFFER = "Expected all tensors to be on the same device, but found at least two devices, {} and {}!"  # torch's


class _Storage(weakref.ref):
    """A reference to a storage with memory at `address`; `made_by`: its creating autograd node's number, or None."""

    __slots__ = ("address", "key", "made_by", "size")
    address: int
    key: int  # of the storage, by which the engine finds it
    made_by: int | None
    size: int


class Engine(TorchDispatchMode):
    """Follows the storages on `device` and allocates for them in `memory`; `events` are its allocations and frees.

    `workspaces` has, by operator name, functions that list the allocations of its kernel on `gpu`, in addition to
    outputs; without a `gpu`, the device is the CPU. Without a `host`, every tensor inside the block is simulated; with
    one, tensors on the host are real.
    """

    supports_higher_order_operators = True  # to refuse them by name

    def __init__(
        self,
        device: torch.device,
        memory: Memory,
        gpu: GPU | None = None,
        workspaces: Mapping[str, Workspace] | None = None,
        host: RealHost | None = None,
    ) -> None:
        super().__init__()
        self.device, self.memory, self.gpu, self.host = device, memory, gpu, host
        self.workspaces = workspaces if workspaces is not None else WORKSPACES if gpu else CPU_WORKSPACES
        self.observer: Observer | None = None
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.repeats = Repeats(self.fake)
        counts_alone()
        self.events: list[Event] = []
        # Addresses of handles' workspaces by library, whether the handle belongs to autograd's thread, and stream.
        self.handles: dict[tuple[str, bool, int], int] = {}
        self.casts = device == HOST  # whether operands are copied to a common dtype
        self.operator = None  # the operator that runs
        self.lends = False  # whether a stream used a block of another stream (record_stream)
        self.launches: Counter[str] = Counter()  # of Triton kernels whose time is not known
        self.uncounted: dict[str, str] = {}  # by library: the first operator whose workspace is not counted
        self.notes: dict[Note, None] = {}  # assumptions, a sentence each
        self.met: set[Any] = set()  # operators of which only the output is counted
        self.placeholder: float | None = None  # the result of reading an unknown float; None raises NotAvailable
        self.watch: Any = None  # a log that sees each operator (profile/operator_log.py)
        self.in_graph = False  # whether a graph from torch.compile runs
        self.has_upper_sizes = False  # whether code that torch.compile should have fused ran eagerly
        self.follows = VALUES_LIMIT if host else SMALL  # the most elements of a float tensor with followed values
        self.refused: AllocatorOutOfMemory | None = None  # the last request that exceeded the memory
        self.stream = 0  # the CUDA stream in use; only this stream reuses blocks that it freed
        self.place: Callable[[], Any] | None = None  # returns the place of the operator that runs
        self.places: dict[int, Any] = {}  # places by the time of an allocation
        self.requests: dict[int, int] = {}  # requested bytes by the time of an allocation
        self.asked: Any = None  # the place of the last request, granted or not
        self.defers: frozenset[type] = frozenset()  # wrapper tensors (DTensor): operators are seen on their inner ones
        self.on_host = HostTensors()
        self.busiest = 1.0, 1  # the tokens of the busiest expert-parallel rank over the mean, and the number of ranks
        self._time = 0
        self._live: dict[int, _Storage] = {}
        self._sizes: dict[int, int] = {}
        self._born: dict[int, int] = {}

    # ---- the mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap `__torch_dispatch__` (utils/_python_dispatch.py).

        The wrapper is for torch.compile, which skips our frames anyway (compiled/dynamo.py). Two of three calls ask for
        a tensor's device, and there the wrapper would be most of the cost.
        """
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile compiles inside this mode, and compiled code runs on the engine."""
        return True

    def __enter__(self) -> Engine:
        self.fake.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.fake.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is DEVICE_OF:
            return args[0].fake_device
        if isinstance(func, HigherOrderOperator):
            return random_again(func, args, kwargs or {})
        if _of_others(types):
            return NotImplemented
        if self.host is not None:
            return self.host.run(self.simulate, self.fake, func, args, kwargs or {})
        return self.simulate(func, args, kwargs or {})

    def simulate(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors; those on the device use memory."""
        self.operator = func
        if func is VALUE_OF:
            return self.read(args[0])
        if func is WAIT:  # returns its argument (torch/csrc/distributed/c10d/Functional.cpp), unlike its fake kernel
            return args[0]
        if func is ENTER_RANGE or func is EXIT_RANGE:
            with disable_current_modes():
                return func(*args, **kwargs)
        if is_composite(func) and func.name() not in self.workspaces:  # inference mode does not decompose it
            with self:
                return decomposed(func, args, kwargs)
        if func in CANDIDATES and current_graph_task_id() != -1:
            func = plain_form(func, args, self._made_by(args[0]))
        copies = cast_copies(func, args) if self.casts else ()
        if not copies:
            return self._dispatch(func, args, kwargs)
        scratch = [self.malloc(size) for size in copies]
        try:
            return self._dispatch(func, args, kwargs)
        finally:
            for address in reversed(scratch):
                self.free(address)

    def _dispatch(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if mixed := mixed_devices(func, args):
            raise RuntimeError(DEVICES_DIFFER.format(*mixed).replace(str(GPU_DEVICE), str(Shown.device)))
        workspace = self.workspaces.get(func.name())
        op = Operator(func, args, kwargs)
        try:
            if workspace is not None:
                faked = self._run_with(workspace, op)
            else:
                op.out, faked = None if changes_values_alone(func, args) else self._computed(op), False
        except RuntimeError as error:
            if "two" not in str(error) or str(GPU_DEVICE) not in str(error):
                raise
            shown = str(error).replace(str(GPU_DEVICE), str(Shown.device))
            raise RuntimeError(shown) from None  # two devices do not mix
        if func.namespace in COLLECTIVES:
            exchange(func, args, op.out)
        elif func in BINS and known(args[0]) is None:
            balance(op.out, args[0].numel(), *self.busiest)
            if self.busiest[0] == 1:
                self.remark(BALANCED)
        elif not faked:
            follow(func, args, kwargs, op.out, self.follows)
        if workspace is None:
            self.hold(op.out)
            self.met.add(func)
        if self.watch is not None:
            self.watch(func, args, kwargs, op.out, self.in_graph)
        return op.out

    def _computed(self, op: Operator) -> Any:
        """Return the outputs of `op`. If their sizes depend on values, their memory is already allocated."""
        try:
            return self.repeats.run(op.func, op.args, op.kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            out = sized_by_value(self._run, op.func, op.args, op.kwargs)
            if out is NotImplemented and op.func in BINS:
                return counts_of(self._run, op.func, op.args, op.kwargs)
            if out is NotImplemented and op.func == DISTINCT:
                return distinct_of(self._run, op.func, op.args, op.kwargs)
            if out is NotImplemented:
                raise needs_values(op.func) from error
            return out

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `func` as part of another operator."""
        return self.__torch_dispatch__(func, (), args, kwargs)

    def _run_with(self, workspace: Workspace, op: Operator) -> bool:
        """Run `op` as its workspace function says; return whether that function created the outputs, too."""
        scratch, steps = Scratch(self, op), iter(workspace(op, self.gpu))
        try:
            outputs = scratch.take(steps)
            assert outputs is not None, f"the workspace function of {op.func} yields no OUTPUTS"
            if (fake := outputs.fake) is not None:
                out = op.out = self.repeats.run(op.func, op.args, op.kwargs, lambda: fake(op))
            else:
                out = op.out = self._computed(op)
            self.hold([out[position] for position in outputs.order] if outputs.order else out)
            scratch.take(steps)
        finally:  # even without enough memory, because code may catch the error and continue
            scratch.free()
        return outputs.fake is not None

    # ---- storages

    def hold(self, out: Any) -> None:
        """Allocate memory for the tensors in `out` whose storages are on the device and new."""
        if isinstance(out, Tensor):
            storage = out.untyped_storage()
            key = storage._cdata
            record = self._live.get(key)
            if record is not None:
                if record.size != storage.nbytes():
                    self._resize(record, storage.nbytes())
            elif out.device == self.device and (size := storage.nbytes()):
                node = current_autograd_node()
                self.hold_at(out, self.malloc(size)).made_by = node._sequence_nr() if node is not None else None
            elif self.host is not None and out.device == HOST and isinstance(out, FakeTensor):
                self.on_host.hold(out)
        elif isinstance(out, (tuple, list)):
            for tensor in out:
                self.hold(tensor)

    def hold_at(self, tensor: Tensor, address: int) -> _Storage:
        """Record that the storage of `tensor` is at `address`, which is freed when it dies; 0 is not allocated."""
        storage = tensor.untyped_storage()
        record = self._live[storage._cdata] = _Storage(storage, self._died)
        record.key, record.size, record.address, record.made_by = storage._cdata, storage.nbytes(), address, None
        return record

    def storage_of(self, tensor: Tensor) -> _Storage:
        """Return the record of `tensor`'s storage, which must have memory."""
        return self._live[tensor.untyped_storage()._cdata]

    def forget(self, tensor: Tensor) -> int:
        """Return the address of `tensor`'s storage. From now on, it stays allocated when the storage dies."""
        return self._live.pop(tensor.untyped_storage()._cdata).address

    def _made_by(self, tensor: Tensor) -> int | None:
        record = self._live.get(tensor.untyped_storage()._cdata)
        return record.made_by if record else None

    def address(self, tensor: Tensor) -> int | None:
        """Return the simulated address of `tensor`'s storage; None if it has no memory on the device."""
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        while is_functorch_wrapped_tensor(tensor):  # torch.func wraps the real one
            tensor = get_unwrapped(tensor)
        return self.storage_address(tensor.untyped_storage())

    def storage_address(self, storage: torch.UntypedStorage) -> int | None:
        """Return the simulated address of `storage`; None if it has no memory on the device."""
        record = self._live.get(storage._cdata)
        return record.address if record else None

    def belongs(self, tensor: Tensor, module: str) -> None:
        """Attribute the memory of `tensor` to `module`, whichever module requested it."""
        born = self._born.get(self.address(tensor) or 0)
        if born is not None:
            self.places[born] = self.places[born]._replace(module=module)

    def _died(self, record: _Storage) -> None:
        if self._live.pop(record.key, None) is record:
            self.free(record.address)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the memory of a storage that was resized without an operator."""
        record = self._live.get(storage._cdata)
        if record is not None and record.size != storage.nbytes():
            self._resize(record, storage.nbytes())

    def _resize(self, record: _Storage, size: int) -> None:
        # native/cuda/Resize.cpp, resize_bytes_cuda: the new memory is allocated before the old is freed.
        old, record.address, record.size = record.address, self.malloc(size), size
        self.free(old)

    def malloc(self, size: int) -> int:
        """Allocate `size` bytes and return their address, 0 for 0 bytes. Raises torch.OutOfMemoryError with torch's
        message."""
        if size <= 0:
            return 0
        if self.place is not None:
            self.asked = self.place()
        before = self.memory.allocated
        address = self._request(size)
        block = self.memory.allocated - before
        self._sizes[address] = block
        self._time += 1
        self.events.append(Event(self._time, address, block))
        if self.place is not None:
            self.places[self._time], self._born[address] = self.asked, self._time
            self.requests[self._time] = size
        if self.observer is not None:
            self.observer.allocated(address, size)
        return address

    def _request(self, size: int) -> int:
        try:
            return self.memory.malloc(size, self.stream)
        except AllocatorOutOfMemory as error:
            self.refused = error.with_traceback(None)
        # Raised outside of `except`, so that `error` and its frames are not its context.
        raise torch.OutOfMemoryError(self.refused.as_torch_says())

    def free(self, address: int) -> None:
        """Free the memory at `address`, which `malloc` returned."""
        if not address:
            return
        if self.observer is not None:
            self.observer.freed(address)
        self.memory.free(address)
        self._time += 1
        self.events.append(Event(self._time, address, -self._sizes.pop(address)))

    def stop(self) -> None:
        """Stop following storages: tensors that die later change no figures."""
        self._live.clear()

    def remark(self, note: Note) -> None:
        """Add `note` to the notes, once."""
        self.notes[note] = None

    def ran_eager(self, place: str, error: Exception) -> None:
        """Note that torch.compile could not compile the code at `place`."""
        self.has_upper_sizes = True
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        self.remark(Note(
            "ran-eager",
            f"torch.compile could not compile {place}, which ran eagerly instead: the sizes are upper bounds, because "
            f"compiled code fuses operators ({type(error).__name__}: {reason}).",
        ))  # fmt: skip

    def launched(self, name: str, moved: int | None = None) -> None:
        """Note that a Triton kernel is launched; `moved` is the number of bytes that it moves, None if unknown."""
        if moved is None:
            self.launches[name] += 1
        elif self.watch is not None:
            self.watch.launched(name, moved)

    def pass_to(self, time: int) -> None:
        """Set the clock so that the next event comes right after `time`."""
        self._time = time

    def now(self) -> int:
        """Return a moment after all events so far."""
        self._time += 1
        return self._time

    # ---- values

    def read(self, tensor: Tensor) -> Any:
        """Return the number in a tensor of one element, as `.item()` does.

        If it is not known, return `placeholder` for a float, or `value_for` its dtype if one of torch's optimizers
        reads it. For others, raise NotAvailable.
        """
        value = known(tensor)
        if value is None:
            if tensor.dtype == torch.bool and initializing():  # by way of DTensor
                return False
            if self.placeholder is not None and tensor.is_floating_point():
                return self.placeholder
            if asked_by_torch().startswith("torch.optim."):  # LBFGS scales by dot products of its directions
                return value_for(tensor.dtype, None)
            raise needs_values(VALUE_OF)
        with disable_current_modes():
            return value.item()


@cache
def _of_others(types: tuple[type, ...]) -> bool:
    """Whether one of these types of an operator's tensors wraps inner tensors (DTensor, torchao's). It runs the
    operator on these, where the engine sees it. Nested tensors, which are refused, do not count."""
    kinds = (kind for kind in types if kind is not FakeTensor and not kind.__module__.startswith("torch.nested"))
    return any(hasattr(other, "__tensor_flatten__") for other in kinds)


def notes_of(engine: Engine) -> tuple[Note, ...]:
    """Return the assumptions and omissions of `engine`, a sentence each."""
    met = engine.met if engine.device == GPU_DEVICE else ()
    unknown = sorted(str(func) for func in met if not has_known_workspace(func, engine.workspaces))
    launched = ", ".join(f"{name} ({count})" for name, count in engine.launches.most_common(3))
    triton = f"Neither the time nor the FLOP of these Triton kernels is known (number of launches): {launched}."
    return (
        *engine.notes,
        *([LENT] * engine.lends),
        *([Note("triton-kernels", triton)] if launched else ()),
        *(
            Note("library-workspace", f"{operator}: the workspace of {library} is not counted, because {library} "
                 "chooses its size at run time.")
            for library, operator in engine.uncounted.items()
        ),
        *(Note("scratch-unknown", f"{func}: only its output is counted; its scratch memory is unknown.")
          for func in unknown),
    )  # fmt: skip
