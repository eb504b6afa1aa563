"""Steps of torchtitan's models: run by its trainers on a CPU, or traced for ranks that do not exist."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be the first of some ranks whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.distributed import parallel_dims
    from torchtitan.experiments.graph_trainer import simple_fsdp

    device = parallel_dims.device_type
    parallel_dims.device_type = "cpu"
    simple_fsdp._wrap_class_cache.clear()  # of classes that gather over the ranks of before
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        parallel_dims.device_type = device


def trained(policy: str | None, *, is_sharded: bool = False) -> tuple[Any, list[Any], Any]:
    """Return loss, gradients and traced graph of one step of its Llama 3 debug model.

    Args:
        policy: of memory, in its GraphTrainer; None: eager, in its Trainer.
        is_sharded: whether parameters are sharded over all ranks.
    """
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.experiments.graph_trainer import common_utils
    from torchtitan.experiments.graph_trainer.llama3 import model_registry
    from torchtitan.experiments.graph_trainer.tests._trainer_test_utils import build_minimal_trainer
    from torchtitan.experiments.graph_trainer.trainer import GraphTrainer
    from torchtitan.trainer import Trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils.set_spmd_backend("partial_dtensor")
        spec = model_registry("debugmodel", attn_backend="sdpa")
        torch.manual_seed(0)
        model = spec.model.build()
        with torch.no_grad():
            model.init_states(buffer_device=None)
        common_utils.annotate_module_fqns(model)
        if is_sharded:
            size = dist.get_world_size()
            dims = ParallelDims(
                dp_replicate=1, dp_shard=size, cp=1, tp=1, pp=1, ep=1, world_size=size, spmd_backend="partial_dtensor"
            )
            with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
                common_utils.apply_simple_fsdp(model, parallel_dims=dims, training=_training("float32"))
        left_out = ["cudagraph_pass"] + ["joint_transformer_block_bucketing_reordering_pass"] * (not is_sharded)
        trainer = build_minimal_trainer(
            model.train(), spec.model, Trainer if policy is None else GraphTrainer, compile_disable_passes=left_out
        )
        trainer.device = torch.device("cpu")
        if policy is not None:
            trainer.config.compile.memory_policy = policy
        tokens, labels = torch.randint(2048, (2, 8, 256))
        positions = torch.arange(256, dtype=torch.int32).expand(8, 256)
        with _known_gpu():
            loss = trainer.forward_backward_step(
                input_dict={"input": tokens, "positions": positions},
                labels=labels,
                global_valid_tokens=torch.tensor(float(labels.numel())),
            )
    step = getattr(trainer, "_traced_step", None)
    return loss.detach(), [p.grad for p in model.parameters()], step.gm if step else None


def _training(dtype: str) -> Any:
    from torchtitan.config.configs import TrainingConfig

    return TrainingConfig(mixed_precision_param=dtype, mixed_precision_reduce="float32")


@contextlib.contextmanager
def _known_gpu() -> Iterator[None]:
    """Let torch estimate what runs beside what without a GPU to ask: as on an A100."""
    from torch.utils import _runtime_estimation as estimation

    asks = {"get_gpu_dram_gbps": lambda: 2039.0, "get_device_tflops": lambda dtype: 312.0}
    with mock.patch.multiple(estimation, **asks):
        yield


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Let meshes be joined while tensors are fake: torch reads their numbers."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._python_dispatch import _disable_current_modes

    join = DeviceMesh._concatenate

    def joined(meshes: Any) -> DeviceMesh:
        with _disable_current_modes():
            return join(meshes)

    with mock.patch.object(DeviceMesh, "_concatenate", staticmethod(joined)):
        yield


class Traced:
    """A step of a decoder under FSDP and tensor parallel: forward, loss, backward; nothing is computed.

    Args:
        config: of the model; its registry's.
        shard: its function that says what tensor parallel does.
        ranks: of FSDP and of tensor parallel.
        batch: sequences of a rank, and their length.

    Attributes:
        module: the graph as a memory policy of GraphTrainer gets it.
    """

    def __init__(self, config: Any, shard: Any, ranks: tuple[int, int], batch: tuple[int, int]) -> None:
        from torchtitan.components.loss import CrossEntropyLoss
        from torchtitan.distributed import ParallelDims, utils
        from torchtitan.experiments.graph_trainer import common_utils, fsdp_passes, passes
        from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer
        from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

        utils.set_spmd_backend("partial_dtensor")
        fsdp, tensor = ranks
        dims = ParallelDims(
            dp_replicate=1, dp_shard=fsdp, cp=1, tp=tensor, pp=1, ep=1, world_size=fsdp * tensor,
            spmd_backend="partial_dtensor",
        )  # fmt: skip
        dims.build_mesh()
        shard(config, enable_sp=tensor > 1)
        with FakeTensorMode(allow_non_fake_inputs=True), _real_meshes():
            model = config.build()
            common_utils.annotate_module_fqns(model)
            if tensor > 1:
                model.parallelize(dims)
            model = common_utils.apply_simple_fsdp(model, parallel_dims=dims, training=_training("bfloat16")).train()
            tokens = torch.zeros(batch, dtype=torch.long)
            positions = torch.zeros(batch, dtype=torch.int32)
        step = make_fwd_bwd_step(model, CrossEntropyLoss.Config().build())
        traced = minimal_fx_tracer(step, module=model)(
            tokens, tokens.clone(), torch.tensor(float(tokens.numel())), {"positions": positions}
        )
        self.module = traced.gm
        self._inputs = traced.example_inputs
        self._bucketed = fsdp_passes.joint_transformer_block_bucketing_reordering_pass
        self._plans = common_utils.get_default_transformer_block_buckets(len(config.layers))
        self._order = fsdp_passes.get_fsdp_param_module_order(traced.state_fqns)
        for run in (
            passes.eliminate_dead_code_pass,
            passes.canonicalize_graph_pass,
            fsdp_passes.deduplicate_fsdp_unshard_chains_pass,
        ):
            self.module = run(self.module, self._inputs) or self.module

    def recomputed(self, module: Any) -> Any:
        """Return a marked graph with what is recomputed."""
        from torchtitan.experiments.graph_trainer.remove_noop_passes import eliminate_dead_code_pass
        from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass

        return eliminate_dead_code_pass(selective_activation_remat_pass(module), self._inputs)

    def gathered(self, module: Any) -> Any:
        """Return a graph in which the parameters of a block are gathered as one, ahead of it."""
        with _known_gpu():
            return self._bucketed(
                module, self._inputs, module_bucket_plans=self._plans, fsdp_param_module_order=self._order
            )
