"""The memory of a program: one slab on the device, one on the host, and in them every buffer that it names.

What the plan keeps for libraries (their workspaces, what attention kernels allocate for themselves) is not in the slab:
it is left free for them.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from flopwise.base.errors import FlopwiseError, OutOfMemory
from flopwise.records.program import ALIGNMENT_BYTES, OWNERS, Program, Role
from flopwise.work.parameters import Place


class Slabs:
    """Buffers of a program by their number, as bytes."""

    def __init__(self, program: Program, device: torch.device, *, left_to_libraries: Mapping[Role, int]) -> None:
        self.program, self.device = program, device
        self.left_to_libraries = left_to_libraries
        self._size: dict[int, int] = {}
        for index, buffer in enumerate(program.buffers):
            own = buffer.bytes - left_to_libraries.get(buffer.role, 0)
            self._size[index] = max(0, own)
        self.buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * len(program.buffers)
        self.device_slab = self._slab("device")
        self.host_slab = self._slab("host")
        self._unpin: weakref.finalize[[int], Slabs] | None = None

    def _slab(self, place: Place) -> Tensor:
        """One piece of memory for a place, cut into its buffers; what is borrowed lies over the activations."""
        chosen = [index for index, buffer in enumerate(self.program.buffers) if buffer.place == place]
        own = [index for index in chosen if not self.program.buffers[index].borrowed]
        # By owner, so that what borrows from an owner finds its memory in one piece.
        own.sort(key=lambda index: OWNERS.index(self.program.buffers[index].owner))
        total = sum(self._size[index] for index in own)
        slab = _allocate(total, self.device) if place == "device" else _on_host(total, self.device)
        start, lent = 0, None
        for index in own:
            if self.program.buffers[index].owner == "activations" and lent is None:
                lent = start
            self.buffers[index] = slab[start : start + self._size[index]]
            start += self._size[index]
        place_of_borrowed = lent or 0
        for index in chosen:
            if self.program.buffers[index].borrowed:
                self.buffers[index] = slab[place_of_borrowed : place_of_borrowed + self._size[index]]
                place_of_borrowed += self._size[index]
        return slab

    def bytes_by_owner(self, place: Place) -> dict[str, int]:
        """What was really allocated, by owner."""
        found: dict[str, int] = {}
        for index, buffer in enumerate(self.program.buffers):
            if buffer.place == place and not buffer.borrowed:
                found[buffer.owner] = found.get(buffer.owner, 0) + self.buffers[index].numel()
        return {owner: size for owner, size in found.items() if size}

    def pin(self) -> None:
        """Lock the host's slab into memory, so that copies run beside the processor: exactly its bytes, no more."""
        if not self.host_slab.numel():
            return
        # Pages that were never touched are made while they are locked, by one thread; all of torch's make them here.
        self.host_slab.zero_()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        outcome = runtime.cudaHostRegister(self.host_slab.data_ptr(), self.host_slab.numel(), 0)
        if int(outcome) != 0:
            raise FlopwiseError(
                f"{self.host_slab.numel() / 2**30:.1f} GiB of host memory cannot be pinned",
                why="the system refuses to lock so much",
                hint="a plan with a smaller --host-mem, or a higher limit for locked memory (`ulimit -l`)",
            )
        self._unpin = weakref.finalize(self, _unpin, self.host_slab.data_ptr())

    def close(self) -> None:
        """Unlock the host's slab."""
        if self._unpin is not None:
            self._unpin()

    def with_role(self, role: Role) -> list[int]:
        """The buffers of a role, in order."""
        return [index for index, buffer in enumerate(self.program.buffers) if buffer.role == role]


def _unpin(address: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)


def _allocate(size: int, device: torch.device) -> Tensor:
    """So many bytes, beginning at a whole line."""
    with _tell_failure(size, "device"):
        raw = torch.empty(size + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    first = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[first : first + size]


def _on_host(size: int, device: torch.device) -> Tensor:
    """The host's bytes: for a GPU in pages of their own, since whole pages are locked."""
    if device.type != "cuda" or not size:
        return _allocate(size, torch.device("cpu"))
    with _tell_failure(size, "host"):
        # Memory that is not shared may come in large pages: they are made and locked in a fourth of the time.
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child process that shared them would part this one from the pages that the GPU reads.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with contextlib.suppress(OSError):
            pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8)


@contextlib.contextmanager
def _tell_failure(size: int, place: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise OutOfMemory(
            f"{size / 2**30:.2f} GiB of {place} memory cannot be had",
            why="the plan takes all of its memory at the start, and there is not so much free now",
            hint=f"plan again with a smaller --{place}-mem, or end what else uses it",
        ) from None
