"""PyTorch's message about memory, of each release and backend, and those of drivers."""

import textwrap

import pytest

import llmlab as lab

MIB, GIB = 2**20, 2**30
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.56 GiB "
    "of which 13.81 MiB is free. Including non-PyTorch memory, this process has 14.54 GiB memory in use. Of the "
    "allocated memory 13.71 GiB is allocated by PyTorch, and 720.35 MiB is reserved by PyTorch but unallocated."
)
OLD = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 14.76 GiB total capacity; 13.10 GiB already allocated; "
    "21.75 MiB free; 13.36 GiB reserved in total by PyTorch)"
)


def test_a_message_of_torch_is_read_number_by_number():
    found = lab.fix(NEW)
    assert (found.requested, found.free, found.unallocated) == (20 * MIB, round(13.81 * MIB), round(720.35 * MIB))
    assert found.outside == found.capacity - found.free - found.allocated - found.unallocated > 100 * MIB
    assert found.short == 0 and "expandable_segments:True" in found.advice
    assert " GPU                      14.56 GiB   total memory\n" in str(found)


def test_a_message_of_an_older_torch_is_read_too():
    found = lab.fix(OLD)
    assert found.unallocated == round(13.36 * GIB) - round(13.10 * GIB)
    assert found.short == found.requested - found.free - found.unallocated > GIB
    assert "would not have prevented" in found.advice


@pytest.mark.parametrize("text", ["", "segmentation fault", "CUDA out of memory. Tried to allocate 20.00 MiB."])
def test_what_is_no_message_is_refused(text):
    with pytest.raises(lab.SpecError, match="not a message of torch"):
        lab.fix(text)


def test_a_message_may_be_wrapped_as_a_terminal_does():
    assert lab.fix("[rank0]: " + "\n".join(textwrap.wrap(NEW, 40))) == lab.fix(NEW)


@pytest.mark.parametrize("message", [NEW, OLD])
def test_a_message_that_was_copied_by_hand_may_have_lost_or_gained_white_space(message):
    lost = "".join(textwrap.wrap(message, 37))  # a blank is lost at each end of a line
    gained = "\n".join(message[start : start + 37] for start in range(0, len(message), 37))  # in the middle of words
    assert lab.fix(lost) == lab.fix(gained) == lab.fix(message)


def test_a_process_larger_than_its_gpu_is_a_number_that_torch_did_not_have():
    without = lab.fix(NEW.replace("has 14.54 GiB", "has 17179869184.00 GiB"))  # as torch prints under WSL
    assert without.process is None and without.outside == lab.fix(NEW).outside and lab.fix(NEW).process


END = "If reserved but unallocated memory is large try setting"
OF_RELEASES = {  # as they stand in public issues
    "1.0": ("CUDA out of memory. Tried to allocate 32.00 MiB (GPU 0; 7.79 GiB total capacity; 6.64 GiB already "
            "allocated; 21.00 MiB free; 150.86 MiB cached)",
            {"free": 21 * MIB, "unallocated": 150.86 * MIB, "short": 0}, "PYTORCH_CUDA_ALLOC_CONF=expandable"),
    "2.1": ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 0 has a total capacty of "
            "6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is allocated by PyTorch, and 2.30 GiB "
            f"is reserved by PyTorch but unallocated. {END} max_split_size_mb to avoid fragmentation. See "
            "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF",
            {"capacity": 6 * GIB, "free": 0, "unallocated": 2.3 * GIB, "short": 0}, "PYTORCH_CUDA_ALLOC_CONF=expand"),
    "2.1, two processes": ("CUDA out of memory. Tried to allocate 138.00 MiB. GPU 0 has a total capacty of 15.90 GiB "
            "of which 8.44 MiB is free. Process 1246069 has 577.00 MiB memory in use. Including non-PyTorch memory, "
            "this process has 15.32 GiB memory in use. Of the allocated memory 14.12 GiB is allocated by PyTorch, and "
            f"410.41 MiB is reserved by PyTorch but unallocated. {END} max_split_size_mb to avoid fragmentation.",
            {"process": 15.32 * GIB, "short": 0}, "Fragmentation"),
    "2.9, ROCm, a limit": ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 200.00 MiB. GPU 0 has a total "
            "capacity of 255.98 GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB "
            "is allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is "
            f"reserved by PyTorch but unallocated. {END} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            {"allowed": 1.05 * GIB, "private": 17 * MIB, "room": 1.05 * GIB - 1072 * MIB}, "A limit caused"),
    "2.4, ROCm": ("HIP out of memory. Tried to allocate 6.64 GiB. GPU 0 has a total capacity of 19.92 GiB of which "
            "6.22 GiB is free. Of the allocated memory 5.34 GiB is allocated by PyTorch, and 7.10 GiB is reserved by "
            f"PyTorch but unallocated. {END} PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",
            {"short": 0}, "PYTORCH_HIP_ALLOC_CONF=expandable"),
    "a driver with enough": ("HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB "
            "of which 203.49 GiB is free. Of the allocated memory 68.63 GiB is allocated by PyTorch, and 14.93 GiB is "
            "reserved by PyTorch but unallocated.", {"short": 0}, "another process or a driver limit"),
    "cudaMallocAsync": ("torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of "
            "memory)\nCurrently allocated     : 3.41 GiB\nRequested               : 50.00 MiB\nDevice limit            "
            ": 4.00 GiB\nFree (according to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory fraction)\n"
            "                        : 17179869184.00 GiB",
            {"capacity": 4 * GIB, "allocated": 3.41 * GIB, "unallocated": 0, "short": 50 * MIB}, "too little memory"),
}  # fmt: skip


@pytest.mark.parametrize("release", OF_RELEASES)
def test_the_messages_of_each_release_are_read(release):
    message, numbers, advice = OF_RELEASES[release]
    found = lab.fix(message)
    assert {name: getattr(found, name) for name in numbers} == {name: round(size) for name, size in numbers.items()}
    assert advice in found.advice
    assert not found.allowed or "allowed" in str(found)


OF_OTHERS = {  # as they stand in public issues
    "XPU": ("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of "
            "63.98 GiB. Of the allocated memory 62.10 GiB is allocated by PyTorch, and 512.00 MiB is reserved by "
            "PyTorch but unallocated.",
            {"free": (63.98 - 62.10 - 0.5) * GIB, "unallocated": GIB / 2}, "too little memory"),
    "MPS": ("RuntimeError: MPS backend out of memory (MPS allocated: 17.68 GB, other allocations: 1.20 GB, max "
            "allowed: 18.13 GB). Tried to allocate 500.00 MB on private pool.",
            {"capacity": 18.13 * GIB, "requested": 500 * MIB, "free": 0, "allocated": 17.68 * GIB}, "too little"),
    "by hand": ("CUDA out of memory. Tried to allocate 98 MiB. (GPU 0; 44.32GiB total capacity; 9.29 GiB already "
                "allocated; 41.00 MiB free; 9.29 GiB reserved in total by PyTorch)",
                {"capacity": 44.32 * GIB, "unallocated": 0}, "outside PyTorch"),
    "XPU, in use elsewhere": ("torch.OutOfMemoryError: XPU out of memory. Tried to allocate 1.96 GiB (GPU 0; 15.91 GiB "
                "total capacity; 13.10 GiB already allocated; 13.50 GiB reserved in total by PyTorch)",
                {"free": 2.41 * GIB, "requested": 1.96 * GIB}, "at least 460.80 MiB were in use outside PyTorch"),
}  # fmt: skip


@pytest.mark.parametrize("backend", OF_OTHERS)
def test_the_messages_of_other_backends_are_read(backend):
    message, numbers, advice = OF_OTHERS[backend]
    found = lab.fix(message)
    for name, size in numbers.items():
        assert getattr(found, name) == pytest.approx(size, abs=2), name
    assert advice in found.advice


def test_holes_and_free_memory_are_added_up_where_only_both_hold_the_request():
    message = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.15 GiB. GPU 0 has a total capacity of "
               "47.54 GiB of which 188.75 MiB is free. Process 1 has 47.34 GiB memory in use. Of the allocated memory "
               "45.83 GiB is allocated by PyTorch, and 1.07 GiB is reserved by PyTorch but unallocated.")  # fmt: skip
    found = lab.fix(message)
    assert found.unallocated < found.requested < found.unallocated + found.free
    assert "Together this is 1.25 GiB" in found.advice


@pytest.mark.parametrize("message", [
    "torch.AcceleratorError: CUDA error: out of memory", "HIP error: out of memory", "XPU error: out of memory",
    "RuntimeError: Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: Triton Error [CUDA]: out of memory",
    "torch.distributed.DistBackendError: ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'",
])  # fmt: skip
def test_the_drivers_own_error_is_told_apart(message):
    found = lab.fix(message)
    assert "not the message of PyTorch's allocator" in found.advice and found.advice in str(found)
    assert found.to_dict() == {"advice": found.advice}


def test_an_error_about_host_memory_is_no_error_about_a_gpu():
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 26214400000 bytes. Error code 12"
    with pytest.raises(lab.SpecError, match="RAM was full"):
        lab.fix(message)


def test_of_a_log_the_first_message_is_read():
    two = "\n".join(OF_RELEASES[release][0] for release in ("2.4, ROCm", "2.9, ROCm, a limit"))
    assert lab.fix("Traceback (most recent call last):\n" + two) == lab.fix(OF_RELEASES["2.4, ROCm"][0])
