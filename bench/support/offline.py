"""An environment on a machine without network: wheels that travel, and an environment upon another's packages.

    python bench/support/offline.py wheels wheelhouse/gpu   # where there is a network
    python bench/support/offline.py environment .venv-gpu   # where there is none

Needs nothing but Python and pip.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPOSITORY / "bench" / "requirements-gpu.txt"
PYTHON_VERSION = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)]
PLATFORMS += [f"manylinux{name}_x86_64" for name in ("1", "2010", "2014")]
MOST_BYTES = 64 * 2**20  # wheels and repository


def download(folder: Path) -> None:
    """Download the wheels for Python 3.12 on Linux x86-64.

    Raises:
        SystemExit: together with the repository they are larger than what may travel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    target = ["--python-version", PYTHON_VERSION, "--implementation", "cp", "--only-binary", ":all:"]
    target += [part for platform in PLATFORMS for part in ("--platform", platform)]
    files = ["--requirement", str(REQUIREMENTS), "--constraint", str(REPOSITORY / "constraints.txt")]
    subprocess.run([*pip, *target, *files, "--dest", str(folder)], check=True)
    wheels = sum(path.stat().st_size for path in folder.glob("*.whl"))
    ours = sum(path.stat().st_size for path in travelling() if path.is_file())
    print(f"{folder}: {wheels / 2**20:.1f} MiB of wheels, beside {ours / 2**20:.1f} MiB of the repository")
    if wheels + ours > MOST_BYTES:
        raise SystemExit(f"that is more than {MOST_BYTES / 2**20:.0f} MiB: take something out of {REQUIREMENTS.name}")


def travelling() -> list[Path]:
    """Return the files of the repository that git does not ignore."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [REPOSITORY / name for name in listed.split("\0") if name]


def make(folder: Path) -> None:
    """Make an environment that has the packages of this Python too, be that an environment itself or not."""
    venv.create(folder, with_pip=False, clear=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    site.joinpath("beneath.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in seen))


def main() -> int:
    """Run it; see the module."""
    ways = {"wheels": download, "environment": make}
    if len(sys.argv) != 3 or sys.argv[1] not in ways:
        raise SystemExit((__doc__ or "").strip())
    ways[sys.argv[1]](Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
