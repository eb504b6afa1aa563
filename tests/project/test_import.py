import subprocess
import sys
from importlib.metadata import version

import olla

SCRIPT = """
import time
start = time.process_time()
import olla
seconds = time.process_time() - start
import sys
print(seconds, *sorted({"torch", "numba", "highspy", "rich"} & sys.modules.keys()))
"""


def test_import_is_quick_and_loads_no_heavy_library() -> None:
    seconds = []  # of processor time: other processes do not count
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
        elapsed, *loaded = run.stdout.split()
        assert loaded == []
        seconds.append(float(elapsed))
    assert min(seconds) < 0.4


def test_all_names_are_there_and_the_version_is_the_installed_one() -> None:
    assert all(hasattr(olla, name) for name in olla.__all__)
    assert olla.__version__ == version("olla-planner")


def test_dir_lists_the_public_names_and_nothing_else() -> None:
    assert dir(olla) == sorted(olla.__all__)
