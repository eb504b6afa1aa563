"""The fused nodes of Inductor's scheduler and the memory their code will take, as a Graph.

A tensor is a storage that the generated code allocates or frees: a buffer, several of them (views, the parts of a
concatenation, buffers that one kernel overwrites in place), or an input that the code may free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from olla.errors import CaptureError
from olla.graph import Graph
from olla.inductor.compat import compat
from olla.inductor.kernels import scheduler as inductor

Overwritten = Callable[[Any, Callable[[str], bool]], Iterator[tuple[str, str]]]


class Storages:
    """What is known of the buffers of Inductor's fused nodes.

    Inputs that the code cannot free (parameters, tangents, saved views of parameters) are no part of it: they cost
    the same in every order. Buffers inside of a fused kernel cost nothing. Sizes of symbolic shapes are hints. Where
    there is an accelerator, only its memory counts.

    Args:
        nodes: scheduler nodes, while Inductor compiles their graph.
        overwritten: yields what a kernel writes over, and with what; by default by Inductor's own rules.

    Raises:
        CaptureError: rule "inductor_graph"; the nodes are something this model does not cover.
    """

    def __init__(self, nodes: Sequence[Any], overwritten: Overwritten = inductor.overwritten) -> None:
        if inductor.uses_streams():
            raise CaptureError("its kernels run on several streams", rule="inductor_graph")
        self.nodes, self.overwritten = nodes, overwritten
        self.owner: dict[str, int] = {}  # of a buffer: the node that writes it
        self.buffers: dict[str, Any] = {}
        self.aside: dict[str, str] = {}  # buffer without memory of its own -> the one it lies in
        self.tensor: dict[str, int] = {}  # of a buffer or an input that has memory of its own
        self.tensor_bytes: list[int] = []
        self.tensor_names: list[str] = []
        self.donated: list[bool] = []
        self.writes: list[list[int]] = [[] for _ in nodes]
        self.reads: list[set[int]] = [set() for _ in nodes]
        self.after: list[set[int]] = [set() for _ in nodes]
        self.used = [[*node.used_or_aliased_buffer_names()] for node in nodes]  # Inductor takes long to say
        self.taken: dict[str, str] = {}  # of a buffer or input that a kernel overwrites: the buffer it then is
        for i, node in enumerate(nodes):
            for buffer in node.get_outputs():
                self.owner[buffer.get_name()] = i
                self.buffers[buffer.get_name()] = buffer

    def graph(self, name: str) -> Graph:
        """Return the graph of the nodes, in the order given; op i is node i.

        Args:
            name: what the graph is called.

        Raises:
            GraphError: the nodes are not in an order they can run in.

        Complexity:
            O(nodes + dependencies + buffers), apart from Inductor's own preparation.
        """
        self.aside = {part: whole for part, b in self.buffers.items() if (whole := inductor.whole_of(b)) is not None}
        parts = list(self.aside)
        self.aside |= inductor.scheduler().mutation_real_name  # of the result of a mutation: what holds it
        self._storages()
        for i, node in enumerate(self.nodes):
            self.after[i].update(self.owner[dep.name] for dep in node.unmet_dependencies if dep.name in self.owner)
        self._share_wholes(parts)
        self._keep_copies()
        self._share_in_place()
        for reads, used in zip(self.reads, self.used, strict=True):
            reads.update(self._tensors(used))
        self._hold_results()
        self._keep_overlap()
        return Graph.from_arrays(
            name=name,
            tensor_bytes=self.tensor_bytes,
            tensor_names=self.tensor_names,
            donated=self.donated,
            reads=[sorted(reads.difference(writes)) for reads, writes in zip(self.reads, self.writes, strict=True)],
            writes=self.writes,
            after=[sorted(before - {i}) for i, before in enumerate(self.after)],
            op_names=[node.get_name() for node in self.nodes],
            random=[inductor.keeps_order(node) for node in self.nodes],
            outputs=sorted(set(self._tensors(inductor.output_names()))),
        )

    def tell(self, ordered: Sequence[Any]) -> None:
        """Give Inductor olla's sizes of buffers: none inside of kernels, none for results written over an input.

        Inductor holds buffers back for reuse as long as memory stays below its own estimate of the peak.

        Args:
            ordered: the nodes in the order in which they will run.
        """
        for name in self.buffers.keys() & inductor.output_names():
            self.buffers[name].mpi_buffer.size_free = 0  # torch 2.11 takes results to be freed at the start
        following = dict(zip((node.get_name() for node in ordered), ordered[1:], strict=False))
        for name, buffer in self.buffers.items():
            if name not in self.tensor and name not in self.aside and inductor.has_storage(buffer):
                buffer.mpi_buffer.size_alloc = buffer.mpi_buffer.size_free = 0
        for old, new in self.taken.items():
            if old in self.buffers:
                self.buffers[old].mpi_buffer.size_free = 0
                self.buffers[new].mpi_buffer.size_alloc = 0
                continue
            # An input counts as freed behind the kernel that overwrites it: the result counts from the next one on.
            behind = following.get(self.nodes[self.owner[new]].get_name())
            if behind is not None and behind.get_outputs():
                behind.get_outputs()[0].mpi_buffer.size_alloc += self.buffers[new].mpi_buffer.size_alloc
                self.buffers[new].mpi_buffer.size_alloc = 0

    def _root(self, name: str) -> str:
        while name in self.aside:
            name = self.aside[name]
        return name

    def _tensors(self, names: Iterable[str]) -> Iterator[int]:
        """Yield the tensors that buffers lie in; inputs that stay have none."""
        return (self.tensor[root] for root in map(self._root, names) if root in self.tensor)

    def _storages(self) -> None:
        """Make a tensor of every input that is freed and of every buffer with memory of its own."""
        device = inductor.planned_device(self.buffers.values())
        used = {self._root(name) for names in self.used for name in names}
        for name, num_bytes in inductor.freed_inputs(device):
            if name in used:  # the code does not free what no kernel reads
                self._add(name, num_bytes, None)
        for name, buffer in self.buffers.items():
            if name in self.aside or not inductor.has_storage(buffer):
                continue
            parent = inductor.parent_name(buffer)  # a kernel with several results makes them all at once
            writer = self.owner[name if parent is None else parent]
            if not inductor.is_inside(self.nodes[writer], buffer):
                counts = buffer.node.get_device() == device
                self._add(name, int(buffer.mpi_buffer.size_free) if counts else 0, writer)

    def _add(self, name: str, num_bytes: int, writer: int | None) -> None:
        self.tensor[name] = len(self.tensor_bytes)
        self.tensor_bytes.append(num_bytes)
        self.tensor_names.append(name)
        self.donated.append(writer is None)
        if writer is not None:
            self.writes[writer].append(self.tensor[name])

    def _share_wholes(self, parts: list[str]) -> None:
        """Let the first kernel that writes a part of a concatenation allocate the whole; it stays the first of them."""
        first: dict[str, int] = {}
        for part in parts:
            root = self._root(part)
            first[root] = min(first.get(root, self.owner[part]), self.owner[part])
        for whole, maker in first.items():
            if whole in self.tensor:
                self.writes[self.owner[whole]].remove(self.tensor[whole])
                self.writes[maker].append(self.tensor[whole])
                self.after[self.owner[whole]].add(maker)
        for part in parts:
            self.after[self.owner[part]].add(first[self._root(part)])

    def _share_in_place(self) -> None:
        """Let a kernel that may overwrite a buffer, and is its last reader in every order, take over its memory."""
        before: list[int] = []  # of each kernel: those that run before it in every order, as bits of a number
        for i, after in enumerate(self.after):
            before.append(functools.reduce(lambda bits, dep: bits | before[dep] | 1 << dep, after - {i}, 0))
        kernel = {inner.get_name(): i for i, node in enumerate(self.nodes) for inner in node.get_nodes()}
        for i, node in enumerate(self.nodes):

            def precedes(name: str, i: int = i) -> bool:
                return bool(before[i] >> kernel.get(name, i) & 1)

            for old, new in self.overwritten(node, precedes):
                if old in self.taken or old not in self.tensor or self.tensor.get(new, -1) not in self.writes[i]:
                    continue
                self.taken[old] = new
                self.writes[i].remove(self.tensor[new])
                self.tensor_bytes[self.tensor[new]] = 0  # nobody's now
                self.tensor[new] = self.tensor[old]

    def _hold_results(self) -> None:
        """Keep all results of a multi-output kernel alive until the last of them has been unpacked."""
        for name, buffer in self.buffers.items():
            parent = inductor.parent_name(buffer)
            if parent is None or name not in self.tensor:
                continue
            for user in inductor.user_nodes(self.buffers[parent]):
                for taken in user.get_outputs():
                    self.reads[self.owner[taken.get_name()]].add(self.tensor[name])

    def _keep_copies(self) -> None:
        """Keep what runs before and behind each start of a copy to or from host memory, and each wait for one."""
        kept = 0  # the last of these
        for i, node in enumerate(self.nodes):
            if kept:
                self.after[i].add(kept - 1)
            if inductor.copies_to_host(node):
                self.after[i].update(range(kept, i))
                kept = i + 1

    def _keep_overlap(self) -> None:
        """Keep what runs between a collective and its wait there, so that communication stays overlapped."""
        started: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            names = {self._root(name) for name in self.used[i]}
            if compat.is_wait(node):
                start = max((started[name] for name in names if name in started), default=i)
                for between in range(start + 1, i):
                    self.after[between].add(start)
                    self.after[i].add(between)
            elif compat.is_collective(node):
                started.update(dict.fromkeys(names, i))
