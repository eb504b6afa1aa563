"""Build the stand-in for CUDA against the torch of this Python, a CUDA build, and say how to run under it.

    eval "$(python tests/cuda/standin.py)"   # sets LD_PRELOAD and LD_LIBRARY_PATH
    python -m pytest tests/cuda

Needs a C++20 compiler. What it builds lies in the folder that OLLA_STANDIN names, or build/standin.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "runtime"
NUMBERS = HERE / "numbers"
FLAGS = ["-std=c++20", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-shared"]
LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so")
PREFIXES = ("cublas", "cudnn", "cusolver", "cusparse", "cufft", "curand", "cuda", "__cuda")
REAL = {  # functions of the real libraries that need no device
    *("cudnnGetVersion", "cudnnGetErrorString", "cudnnGetLastErrorString", "cudnnGetCudartVersion", "cudnnGetProperty"),
    *(
        "cublasLtGetVersion",
        "cublasGetVersion_v2",
        "cusparseGetErrorString",
        "cusparseGetVersion",
        "cusolverGetVersion",
    ),
}


class Standin:
    """The stand-in that this process runs under.

    Args:
        numbers: the library that gives torch's operators the numbers of a CPU.
    """

    def __init__(self, numbers: Path) -> None:
        self._runtime = ctypes.CDLL(None)
        self._runtime.standin_peak.restype = self._runtime.standin_used.restype = ctypes.c_size_t
        self._runtime.standin_num_events.restype = self._runtime.standin_num_queries.restype = ctypes.c_longlong
        self._numbers = ctypes.CDLL(str(numbers))
        self._numbers.standin_numbers_missing.restype = ctypes.c_char_p
        self._numbers.standin_numbers_install()

    def schedule(self, name: str) -> None:
        """Let work run as a schedule has it from now on: "now", "late", "early", "random:SEED"; see work.hpp."""
        self._runtime.standin_schedule(name.encode())

    def fail_after(self, allocations: int) -> None:
        """Let allocations of devices fail after so many others, until a negative number is given."""
        self._runtime.standin_fail_after(ctypes.c_longlong(allocations))

    def fail_events(self, error: int) -> None:
        """Let events of all devices answer with an error of CUDA, as after a kernel that went wrong; 0: no more."""
        self._runtime.standin_fail_events(error)

    def num_events(self) -> int:
        """Return how many events were made so far."""
        return int(self._runtime.standin_num_events())

    def num_queries(self) -> int:
        """Return how often it was asked so far whether an event has passed."""
        return int(self._runtime.standin_num_queries())

    def used_bytes(self, device: int = 0) -> int:
        """Return the memory of a device that is used now."""
        return int(self._runtime.standin_used(device))

    def peak_bytes(self, device: int = 0, *, reset: bool = False) -> int:
        """Return the most memory of a device that was used since the last reset."""
        return int(self._runtime.standin_peak(device, int(reset)))

    def without_numbers(self) -> list[str]:
        """Return the operators that were called and compute nothing."""
        return self._numbers.standin_numbers_missing().decode().split()


def is_present() -> bool:
    """Return whether this process runs under the stand-in."""
    return hasattr(ctypes.CDLL(None), "standin_schedule")


@functools.cache
def with_numbers() -> Standin | None:
    """Let torch's operators have a CPU's numbers, where this process runs under the stand-in; return it, if it does."""
    if not is_present():
        return None
    import torch

    torch.empty(1, device="cuda")
    return Standin(Path(os.environ["LD_LIBRARY_PATH"].split(":")[0]) / "numbers.so")


def build(folder: Path) -> Path:
    """Build libcuda.so.1, libnvidia-ml.so.1 and numbers.so where one is missing or older than its sources.

    Returns:
        The library to load before all others.
    """
    site = Path(sysconfig.get_paths()["purelib"])
    headers = [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include"]
    if not (headers[0] / "cuda_runtime_api.h").is_file():
        raise SystemExit(f"{sys.executable} has no CUDA build of torch: {headers[0]} holds no headers of CUDA 13")
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "libcuda.so.1"
    if _outdated(made, SOURCES):
        _build_runtime(made, headers, site / "torch/lib")
        _compile(folder / "libnvidia-ml.so.1", [], [SOURCES / "nvml.cpp"])
    numbers = folder / "numbers.so"
    if _outdated(numbers, NUMBERS):
        headers += [site / "torch/include", site / "torch/include/torch/csrc/api/include"]
        libraries = [
            f"-L{site / 'torch/lib'}",
            *(f"-l{name}" for name in ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda")),
        ]
        _compile(numbers, headers, sorted(NUMBERS.glob("*.cpp")), *libraries)
    return made


def _outdated(made: Path, sources: Path) -> bool:
    newest = max(path.stat().st_mtime for path in [*sources.iterdir(), Path(__file__)])
    return not made.exists() or made.stat().st_mtime < newest


def _build_runtime(made: Path, headers: list[Path], torch_libraries: Path) -> None:
    """Build the runtime and the driver, with functions that do nothing for all else that torch imports."""
    parts = sorted(path for path in SOURCES.glob("*.cpp") if path.name != "nvml.cpp")
    with tempfile.TemporaryDirectory() as scratch:
        first = Path(scratch) / "first.so"
        _compile(first, headers, parts)
        missing = _imported(torch_libraries) - REAL - _names(first, "--defined-only")
        stubs = Path(scratch) / "stubs.cpp"
        stub = 'extern "C" __attribute__((visibility("default"))) int {}() {{ return 0; }}\n'
        stubs.write_text("".join(stub.format(name) for name in sorted(missing)))
        _compile(made, headers, [*parts, stubs])


def _compile(made: Path, headers: list[Path], sources: list[Path], *libraries: str) -> None:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    includes = [part for header in headers for part in ("-isystem", str(header))]
    files = [str(path) for path in sources]
    command = [*compiler, *FLAGS, f"-Wl,-soname,{made.name}", *includes, *files, "-o", str(made), *libraries]
    subprocess.run(command, check=True)


def _imported(folder: Path) -> set[str]:
    """Return the functions of CUDA's libraries that torch's import."""
    names = {name for library in LIBRARIES for name in _names(folder / library, "--undefined-only")}
    return {name for name in names if name.startswith(PREFIXES)}


def _names(library: Path, which: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


if __name__ == "__main__" and not Path("/proc/driver/nvidia/version").exists():  # a GPU needs none
    library = build(Path(os.environ.get("OLLA_STANDIN", HERE.parents[1] / "build" / "standin")).resolve())
    print(f"export LD_PRELOAD={shlex.quote(str(library))} LD_LIBRARY_PATH={shlex.quote(str(library.parent))}")
