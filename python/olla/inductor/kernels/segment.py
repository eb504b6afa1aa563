"""One segment of torch's caching allocator for a compiled step, in place of a segment for each size.

The allocator splits blocks off segments, and never merges blocks of two segments: what a step frees in many sizes
serves no larger request, and new segments are reserved though enough is free. Before forward first runs, olla allocates
one block of the plan's peak and frees it, so that the allocator serves the step from that segment. Tensors above a
fifth of the whole get segments of their own, since they would rarely fit into the rest of the large one. By the second
forward an optimizer's state may lie in that segment: what is lacking since is reserved as one segment, too.
"""

from __future__ import annotations

import torch

from olla.inductor.compat import codegen, compat, fallback
from olla.inductor.kernels import scheduler as inductor

_LEAST_BYTES = 20 * 2**20  # up to this the allocator takes pieces for several requests anyway
_LARGE_BYTES = 2**20  # above this requests and blocks are large
_SETTINGS = ("expandable_segments:true", "max_split_size_mb")  # under the first no piece helps; the second wastes it
_PIECE_BY_PIECE = "torch's allocator takes memory from the device piece by piece"


class Segment:
    """Called by compiled code whenever it runs; it acts in the first two forwards and the first backward.

    Args:
        device_index: of the GPU.
        num_bytes: of the segment to reserve; 0: only release unused segments, so that memory allocated behind the first
            backward to stay, such as an optimizer's state, does not settle in segments of the step.
    """

    def __init__(self, device_index: int, num_bytes: int) -> None:
        self.device_index, self.num_bytes = device_index, num_bytes
        self._runs_left = 2 if num_bytes else 1

    def __call__(self) -> None:
        """Release unused segments, and reserve the new one if the device has that much free."""
        if not self._runs_left or torch.cuda.is_current_stream_capturing():
            return
        self._runs_left -= 1
        with fallback.tried(_PIECE_BY_PIECE):
            if _has_pieces():
                self._take()

    def _take(self) -> None:
        torch.cuda.empty_cache()  # what compilation took to measure kernels, too
        reserved_bytes = torch.cuda.memory_reserved(self.device_index)
        num_bytes = self.num_bytes - _free_bytes(self.device_index)  # a second graph shares the piece of the first
        if not _LEAST_BYTES < num_bytes <= torch.cuda.mem_get_info(self.device_index)[0]:
            return
        taken = []
        while torch.cuda.memory_reserved(self.device_index) == reserved_bytes:  # as long as what is free serves it
            taken.append(torch.cuda.caching_allocator_alloc(num_bytes, self.device_index))
        for address in taken:
            torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]


def install() -> None:
    """Let the code of the graph that is being compiled call its segment, where the partitioner noted one."""
    with fallback.tried(_PIECE_BY_PIECE):
        noted = compat.virtualized.graph.module.meta.get(codegen.SEGMENT)
        if noted is not None and not compat.config.triton.cudagraphs:  # which have memory of their own
            codegen.call_segment(inductor.wrapper(), *noted)


def _free_bytes(device_index: int) -> int:
    """Return the free bytes of a GPU that serve large requests of the current stream, outside the pools of graphs."""
    stream = torch.cuda.current_stream(device_index).cuda_stream
    return sum(
        block["size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if (segment["device"], segment["stream"]) == (device_index, stream)
        and (segment["segment_type"], segment["segment_pool_id"]) == ("large", (0, 0))
        for block in segment["blocks"]
        if block["state"] == "inactive" and block["size"] > _LARGE_BYTES
    )


def _has_pieces() -> bool:
    """Whether requests are served by torch's own allocator, from pieces that it splits."""
    settings = codegen.allocator_settings().lower().replace(" ", "")
    return torch.cuda.get_allocator_backend() == "native" and not any(name in settings for name in _SETTINGS)
