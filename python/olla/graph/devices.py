"""Costs of a step on a device: seconds per op, measured or estimated, and the speed of the link to host memory."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from olla.graph.graph import Graph


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A roofline: an op takes as long as its arithmetic or its memory traffic, whichever is longer, and its launches.

    Attributes:
        name: what the device is called.
        flops_per_second: of matrix products, convolutions and attention, the only ops whose arithmetic is counted;
            numbers of 32 bits, multiplied in whatever short form the device has for them (TF32).
        single_flops_per_second: the same where 32 bits are multiplied in full; 0: as fast.
        half_flops_per_second: of numbers of 16 bits or fewer; 0: as fast.
        bytes_per_second: bandwidth of the device's memory.
        launch_seconds: of starting one kernel.
        draw_seconds: of drawing one random number in fused code, beyond its memory traffic.
        truth_seconds: of writing and reading one truth value in fused code, the same.
        to_host_bytes_per_second, from_host_bytes_per_second: speed of the link in each direction, both busy at once.
        peer_bytes_per_second: speed of the link between the devices of a process group, in each direction; 0: that of
            the link to the host.
        peer_latency_seconds: until a message between two of them begins to arrive.

    Source:
        Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (2009).

    Example:
        >>> PROFILES["a100"].bytes_per_second
        1500000000000.0
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    to_host_bytes_per_second: float
    from_host_bytes_per_second: float
    draw_seconds: float = 0.0
    truth_seconds: float = 0.0
    single_flops_per_second: float = 0.0
    half_flops_per_second: float = 0.0
    peer_bytes_per_second: float = 0.0
    peer_latency_seconds: float = 5e-6

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:  # all but the name
            least = sys.float_info.min if field.default is MISSING else 0.0  # what may be left out may be zero
            value = getattr(self, field.name)
            if not least <= value < float("inf"):
                expected = "a finite number above 0" if least else "a finite number, 0 or more"
                raise ValueError(f"{field.name} of device profile {self.name!r} is {value}, expected {expected}")

    def op_seconds(self, graph: Graph) -> NDArray[np.float64]:
        """Return the seconds of every op.

        Returns:
            float64[num_ops], seconds: of op i, as recorded in the graph, else estimated; of one that communicates, of
            starting it: what is on the link runs beside other ops, see `olla.graph.timeline`.
        """
        estimated = self.estimate(graph.flops, graph.moved_bytes, graph.launches)
        seconds = np.where(graph.seconds > 0, graph.seconds, estimated)
        return np.where(graph.communicates, graph.launches * self.launch_seconds, seconds)

    def estimate(
        self, flops: NDArray[np.int64], moved_bytes: NDArray[np.int64], launches: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the seconds of ops with these counts, one per op."""
        arithmetic, traffic = flops / self.flops_per_second, moved_bytes / self.bytes_per_second
        return np.asarray(np.maximum(arithmetic, traffic) + launches * self.launch_seconds, dtype=np.float64)


def _profile(
    name: str,
    teraflops: float,
    gigabytes: float,
    launch_microseconds: float,
    link: float,
    single: float = 0.0,
    half: float = 0.0,
    peers: float = 0.0,
    **fused: float,
) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        flops_per_second=teraflops * 1e12,
        bytes_per_second=gigabytes * 1e9,
        launch_seconds=launch_microseconds * 1e-6,
        to_host_bytes_per_second=link * 1e9,
        from_host_bytes_per_second=link * 1e9,
        single_flops_per_second=single * 1e12,
        half_flops_per_second=half * 1e12,
        peer_bytes_per_second=peers * 1e9,
        **fused,
    )


# Published peaks: dense TF32 arithmetic, memory bandwidth, arithmetic of 32 bits in full and of 16 bits; the link is
# what pinned copies reach over the card's bus. Peers: what NVLink moves in one direction; without it, the bus.
# gtx1080: what that card reached in published steps of VGG-16 and ResNet-50 (github.com/jcjohnson/cnn-benchmarks: 232.6
# and 153.9 ms for 16 images), 0.7 of its peak arithmetic and half its bandwidth.
# cpu: Inductor's vector code draws random numbers, and packs and unpacks truth values, one by one:
# sixteen cores as bench/inductor/bench_fused_costs.py finds them.
PROFILES = {
    profile.name: profile
    for profile in (
        _profile("h100", 494.0, 3350.0, 5.0, 50.0, single=67.0, half=989.0, peers=450.0),
        _profile("h200", 494.0, 4800.0, 5.0, 50.0, single=67.0, half=989.0, peers=450.0),
        _profile("a100", 156.0, 1500.0, 5.0, 25.0, single=19.5, half=312.0, peers=300.0),
        _profile("rtx4090", 82.6, 1008.0, 5.0, 25.0, single=82.6, half=165.2),
        _profile("gtx1080ti", 11.3, 484.0, 5.0, 12.0),
        _profile("gtx1080", 6.5, 155.0, 5.0, 12.0),
        _profile("cpu", 1.0, 100.0, 1.0, 10.0, draw_seconds=0.8e-9, truth_seconds=1.2e-9),
    )
}


def profile_of(device: str | DeviceProfile) -> DeviceProfile:
    """Return a profile by name, or the profile itself.

    Raises:
        ValueError: no profile has that name.
    """
    if isinstance(device, DeviceProfile):
        return device
    if device not in PROFILES:
        raise ValueError(f"device is {device!r}, expected a DeviceProfile or one of {', '.join(PROFILES)}")
    return PROFILES[device]
