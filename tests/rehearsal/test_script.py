"""The hook of a script on a simulated GPU: events, the allocator's peak, and no wait inside a step."""

from __future__ import annotations

import pytest
import torch

from pipeline.script import hook
from tests.as_if_cuda import NAME, as_if_cuda
from tests.hooked import hooked

MIB = 2**20


def test_events_time_a_script_s_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = {"device": 0, "segment_pool_id": (0, 1), "total_size": 5 * MIB, "allocated_size": 2 * MIB}
    others: list[dict[str, object]] = [graph | {"device": 1}, graph | {"segment_pool_id": (0, 0)}]
    with as_if_cuda() as gpus, hooked() as bed:
        serving = bed.requests(2, 4)
        model = torch.nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs = torch.ones(8, 512, device="cuda")
        for step in range(7):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            if step == 4:  # in the second request's steps
                torch.ones(MIB, device="cuda")
                monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [graph, *others])
                torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        serving.join()
    about, first, second = bed.answers
    assert (about["gpu"], about["uuid"], about["conditions"]["parameter_count"]) == (NAME, f"{0:032x}", 512 * 513)
    assert [len(answer["clock"]["step_seconds"]) for answer in (first, second)] == [2, 4]
    before, memory = first["memory"], second["memory"]
    assert memory["peak_bytes"] - before["peak_bytes"] == pytest.approx((4 + 3) * MIB, abs=1024)
    assert memory["reserved_bytes"] >= memory["peak_bytes"] - 7 * MIB
    assert (memory["retries"], gpus.waits) == (0, [])


def test_a_training_to_its_end_is_timed_by_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead of a GPU that takes 20 ms a step."""
    monkeypatch.setattr(hook, "MOST_EVENTS", 4)
    most = 0
    with as_if_cuda(), hooked() as bed:
        device_seconds = 0.0
        monkeypatch.setattr(torch.cuda.Event, "record", lambda event: setattr(event, "_seconds", device_seconds))
        serving = bed.requests(None)
        model = torch.nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(11):
            model(torch.ones(8, 8, device="cuda")).sum().backward()
            device_seconds += 0.02 * (step > 0)
            optimizer.step()
            most = max(most, len(bed.rank.clock._steps))
        bed.rank.end()
        serving.join()
    answer = bed.answers[1]
    assert answer["clock"]["step_seconds"] == pytest.approx([0.0, *[0.02] * 10])
    assert (answer["steps"], most) == (11, 4)
    assert answer["memory"]["peak_bytes"] > 0
