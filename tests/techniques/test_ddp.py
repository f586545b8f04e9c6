from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.data.prepared import Dataset
from pipeline.distributed import WorkerError, World
from pipeline.training.losses import HostLosses
from tests.nets import ALONE, batch, changed, chosen, conv_net, gradients, make_plan, make_step, setup_of
from tests.ranks import run_ranks
from tests.test_training import make_training


def _step(joined: World, micro_batches: int) -> tuple[list[torch.Tensor], float, int]:
    """Run a step over this rank's share of 32 samples; return gradients, all ranks' loss, and number of reductions."""
    plan = make_plan(
        parallelism="ddp" if joined.size > 1 else "none", processes=joined.size, gradient_accumulation=micro_batches
    )
    model, techniques = conv_net(), chosen(plan, joined)
    wrapped = changed(model, techniques)
    reductions = []
    if joined.size > 1:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def counted(state, bucket):  # type: ignore[no-untyped-def]
            reductions.append(bucket.index())
            return allreduce_hook(state, bucket)

        wrapped.register_comm_hook(None, counted)  # type: ignore[operator]
    losses = HostLosses(joined)
    step = make_step(wrapped, techniques, losses=losses, micro_batches=micro_batches)
    images, labels = (part.chunk(joined.size)[joined.rank] for part in batch(32))
    step(zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True))
    return gradients(model), losses.read_and_reset(), len(reductions)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_two_ranks_have_the_gradients_of_one_device_and_reduce_once_a_step(micro_batches: int) -> None:
    expected, loss, _ = _step(ALONE, 1)
    for ranks_gradients, ranks_loss, reductions in run_ranks(_step, micro_batches):
        torch.testing.assert_close(ranks_gradients, expected, rtol=1e-4, atol=1e-6)
        assert ranks_loss == pytest.approx(loss, rel=1e-5)
        assert reductions == 1


def _options(joined: World) -> dict[str, Any]:
    """Return, for each set of options, what DDP does after three steps, and the gradients of the third step."""
    found: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "small": {"bucket_mb": 0.001},
        "beside": {"gradient_as_bucket_view": False},
        "static": {"static_graph": True},
    }
    for name, applied in options.items():
        plan = make_plan(parallelism="ddp", processes=joined.size, **applied)
        model, techniques = conv_net(), chosen(plan, joined)
        wrapped = changed(model, techniques)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        setup = setup_of(wrapped)
        setup.step = step = make_step(wrapped, optimizer=optimizer, losses=HostLosses(joined))
        for technique in techniques:
            technique.change_step(setup)
        for seed in range(3):
            images, labels = (part.chunk(joined.size)[joined.rank] for part in batch(32, seed))
            step(iter([(images, labels)]))
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
        logged = wrapped._get_ddp_logging_data()
        found[name] = {
            "gradients": gradients(model),
            "buckets": len(str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]).split(",")),
            "storages": len({p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}),
            "static": wrapped.static_graph,
            "kept": sum(kept() for kept in setup.kept_bytes),
            "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        }
    return found


def test_ddp_options_take_effect_and_change_no_gradient_of_two_ranks() -> None:
    for found in run_ranks(_options):
        plain = found["plain"]
        assert all(torch.equal(*pair) for other in found.values() for pair in zip(
            other["gradients"], plain["gradients"], strict=True
        ))  # fmt: skip
        assert (plain["buckets"], plain["storages"], plain["kept"]) == (1, 1, 0)
        assert found["small"]["buckets"] == found["small"]["storages"] > 2
        assert found["beside"]["storages"] == 6, "every parameter's gradient has memory of its own"
        assert found["beside"]["kept"] == plain["parameter_bytes"]
        assert [name for name, each in found.items() if each["static"]] == ["static"]


class Spare(nn.Module):
    """A model with a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = conv_net(), nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return logits


def _unused(joined: World, dataset: Dataset, static_graph: bool) -> int:
    training = make_training(dataset, joined, model=Spare(), static_graph=static_graph)
    training.advance(5)
    return training.steps


def test_a_static_graph_allows_parameters_that_no_step_uses(digits: Dataset) -> None:
    with pytest.raises(WorkerError, match=r"variants\.tried\.parallelism: found 'ddp', .* Set static_graph: true if"):
        run_ranks(_unused, digits, False)
    assert run_ranks(_unused, digits, True) == [5, 5]
