"""Private names of torch: all that are used are there, and one that is gone is found with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.private_names import gone, lacks, uses

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_the_installed_torch_has_all_that_the_package_uses() -> None:
    newer = ("inductor/compat/host.py",) if TORCH < (2, 13) else ()  # tensors in host memory need torch 2.13
    assert [f"{use.file}:{use.line}: {use.name}" for use in gone() if use.file not in newer] == []


def test_the_names_of_every_place_are_found() -> None:
    names = {use.name for use in uses()}
    assert "torch._inductor.compile_fx.compile_fx_inner" in names  # taken by text
    assert "torch._functorch.partitioners.fx_graph_cse" in names  # by a constant of the file
    assert "torch._inductor.codecache.PyCodeCache.load_by_key_path" in names  # to be replaced for a while
    assert "torch._subclasses.fake_tensor.FakeTensorMode" in names  # imported
    assert "torch._C._len_torch_dispatch_stack" in names  # an attribute
    assert len(names) > 100


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import torch._no_such_module as m", "torch._no_such_module"),
        ("from torch._inductor import no_such_name", "torch._inductor.no_such_name"),
        ("from torch.utils import _no_such\n_no_such.thing", "torch.utils._no_such"),
        ("import torch\ntorch._C._no_such(1).then", "torch._C._no_such"),
        ("private('torch._inductor.ir', 'NoSuch')", "torch._inductor.ir.NoSuch"),
        ("_place = 'torch._inductor.ir'\nx = private(_place, 'NoSuch')", "torch._inductor.ir.NoSuch"),
        ("x = {'a': ('torch._inductor.codecache', 'NoSuch.load')}", "torch._inductor.codecache.NoSuch.load"),
    ],
)
def test_a_name_that_is_gone_is_found(line: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert [use.name for use in gone(tmp_path)][:1] == [name]


@pytest.mark.parametrize(
    "line",
    [
        "x = private('torch._inductor.ir', 'NoSuch') if hasattr(ir, 'NoSuch') else object",
        "import torch\nx = getattr(torch._C, '_no_such', None)",
        "import torch\nx = torch.nn.no_such_public_name",
        "import torch\nx = torch._C._get_tracing_state().no_such",
    ],
)
def test_what_is_taken_only_where_it_is_there_does_not_count(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert list(gone(tmp_path)) == []


@pytest.mark.parametrize("name", ["torch.ops.aten._local_scalar_dense", "torch._inductor.config", "torch._C"])
def test_operators_modules_and_functions_are_found(name: str) -> None:
    assert not lacks(name)
    assert lacks(f"{name}_no_such")
