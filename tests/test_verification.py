"""Claims hold where they should, and planted faults are found."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipeline import cli, params
from pipeline.data.prepared import Dataset, Split, read
from pipeline.distributed import World
from pipeline.params import Config, Machine, Train, Variant, parse
from pipeline.plans import plan as plan_of
from pipeline.tasks.batches import evaluation_batches
from pipeline.tools import verification
from pipeline.tools.verification.claims import (
    LEAST,
    UNMEASURABLE,
    UNPROMISED,
    UNTRIED,
    Claim,
    beside_nf4,
    differing_values,
    evaluated,
    loss_difference,
    way_difference,
)
from pipeline.tools.verification.observing import (
    PLAIN_SGD,
    Nature,
    Observed,
    Trial,
    _spoilt,
    make_per_sample,
    miniature,
    nature,
    observe,
    statistics,
)
from pipeline.tools.verification.verifier import Verifier
from pipeline.training import outcomes
from tests.nets import assembly_of, batch, conv_net, task_of
from tests.outside import on_path, write_techniques
from tests.ranks import run_ranks
from tests.trainings import make_training, needs_library

MACHINE = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True, installed=frozenset({"bitsandbytes"}))

OWN_NETS = """
import torch
from torch import nn

def noisy(*, channels, height, width, classes):
    # dropout, BatchNorm, and blocks to checkpoint
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3)),
        nn.Sequential(nn.Flatten(), nn.Linear(8 * height * width, classes)),
    )

def flat(first, linear=nn.Linear, *, channels, height, width, classes):
    block = nn.Sequential(linear(channels * height * width, 16), nn.ReLU())
    return nn.Sequential(nn.Flatten(), first, block, nn.Linear(16, classes))

class Putting(nn.Linear):
    def forward(self, images):
        torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
        return super().forward(images)

def putting(**sizes):
    return flat(nn.Identity(), Putting, **sizes)

def within_a_million(logits, labels):
    return torch.where(logits.abs().amax(1) < 1e6, 1.0, torch.nan)

class Detached(nn.Module):
    def forward(self, logits):
        return logits.detach().requires_grad_()

def detached(**sizes):
    return nn.Sequential(noisy(**sizes), Detached())

class Greedy(nn.Module):
    def forward(self, images):
        if self.training and torch.is_grad_enabled() and len(images) > 16:
            raise torch.OutOfMemoryError("more than 16 samples")
        return images

def greedy(**sizes):
    return flat(Greedy(), **sizes)

class Hungry(nn.Module):
    def forward(self, images):
        if not self.training and len(images) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return images

def hungry(**sizes):
    return flat(Hungry(), **sizes)

class Lifted(nn.Module):
    # the normalisation takes away what is added, so the true gradient of `lift` is zero
    def __init__(self):
        super().__init__()
        self.lift = nn.Parameter(torch.zeros(1))

    def forward(self, images):
        return nn.functional.layer_norm(images + self.lift, images.shape[1:])

def lifted(**sizes):
    return flat(Lifted(), **sizes)

class Centred(nn.Module):
    def forward(self, images):
        return images - images.mean(0) if self.training else images

def mixing(**sizes):
    return flat(Centred(), **sizes)
"""

NAMES = {
    "drops_gradient": "rounding",
    "doubles_gradients": "rounding",
    "loses_a_rank": "rounding",
    "skips_a_micro_batch": "rounding",
    "explodes": "rounding",
    "nearly_nothing": "nothing",
    "forgets_decay": "rounding",
    "differs_by_process": "rounding",
    "refuses_to_train": "rounding",
    "clips_alone": "rounding",
    "thaws": "rounding",
    "loses_muon": "rounding",
    "mixes_scales": "rounding",
}
"""Faulty technique -> what it promises to change."""

FAULTS = """
import os

from pipeline.models import optimizers
from pipeline.params import Entry
from pipeline.techniques import Technique

def entry(name, changes):
    return Entry(name=name, does="", pays="", costs="", source="", changes=changes)

rough = entry("rough", "rounding").model_copy(update={"roundoff": 2.0**20})

class Rough(Technique):
    name = "rough"

class DropsGradient(Technique):
    name = "drops_gradient"

    def change_step(self, setup):
        step = setup.step
        update, parameters = step.update, step.optimizer.param_groups[0]["params"]
        def dropped():
            parameters[-1].grad.zero_()  # the last bias
            update()
        step.update = dropped

class Scales(Technique):
    taken = 0  # losses so far

    def change_step(self, setup):
        step = setup.step
        backward = step.backward
        def scaled(loss):
            self.taken += 1
            backward(loss * self.factor())
        step.backward = scaled

FACTORS = {
    "doubles_gradients": lambda self: 2,
    "loses_a_rank": lambda self: os.environ["RANK"] != "1",
    "skips_a_micro_batch": lambda self: self.taken % 2,
    "explodes": lambda self: 1e30,
    "nearly_nothing": lambda self: 1 + 2.0 ** -22,
    "differs_by_process": lambda self: 1 + 1e-5 * (os.getpid() % 1000),
}
for name, factor in FACTORS.items():
    kind = name.title().replace("_", "")
    globals()[kind] = type(kind, (Scales,), {"name": name, "factor": factor, "__module__": __name__})

class ForgetsDecay(Technique):
    name = "forgets_decay"

    def change_step(self, setup):
        for group in setup.step.optimizer.param_groups:
            group["weight_decay"] = 0.0

class Thaws(Technique):
    name = "thaws"

    def change_model(self, setup):
        setup.model.train().requires_grad_(True)

class LosesMuon(Technique):
    name = "loses_muon"

    def change_optimizer(self, setup):
        setup.optimizer_choice = optimizers.of_job(self.plan.train)

class MixesScales(Technique):
    name = "mixes_scales"

    def change_model(self, setup):
        for name, values in setup.model.named_buffers():
            if name.endswith("lora_scales"):
                values.copy_(values.roll(1))

class ClipsAlone(Technique):
    name = "clips_alone"

    def change_step(self, setup):
        setup.shard_group = None  # each rank clips to the norm of its own shards

class RefusesToTrain(Technique):
    name = "refuses_to_train"

    def change_model(self, setup):
        raise RuntimeError("not today")

""" + "\n".join(f'{name} = entry("{name}", "{changes}")' for name, changes in NAMES.items())

Claimed = Callable[..., list[Claim]]


@pytest.fixture(scope="module", autouse=True)
def own_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a directory with a user's own models and faulty techniques, from which they can be imported."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_nets.py").write_text(OWN_NETS)
    write_techniques(folder, "faulty", FAULTS, [*NAMES, "rough"])
    with on_path(folder):
        yield folder


def job(variants: dict[str, Any], **train: Any) -> Config:
    values = {"model": "small_cnn", "batch_size": 32, "learning_rate": 0.05, "seeds": [0]} | train
    return parse({"train": values, "variants": {"baseline": {}} | variants})


@pytest.fixture
def claimed(digits_folder: Path, digits: Dataset, tmp_path: Path) -> Claimed:
    """Return a function that returns the claims of ``variants``; its other arguments are settings of ``train``."""

    def claims(variants: dict[str, Any], *, quick: bool = False, **train: Any) -> list[Claim]:
        asked = job(variants, **train)
        verifier = Verifier(asked, MACHINE, digits_folder, task_of(digits, asked.train), tmp_path, quick=quick)
        return [claim for name in variants for claim in verifier.claims(plan_of(asked, name, MACHINE))]

    return claims


def of(claims: list[Claim], variant: str, beginning: str) -> Claim:
    (claim_found,) = [claim for claim in claims if claim.variant == variant and claim.claim.startswith(beginning)]
    return claim_found


def test_the_claims_of_sound_variants_hold(claimed: Claimed) -> None:
    variants = {
        "stack": {"parallelism": "ddp", "gradient_accumulation": 2, "activation_checkpointing": True},
        "bf16": {"precision": "bf16"},
    }
    claims = claimed({"baseline": {}} | variants)
    # In 20 steps, rounding to 16 bits can hide a fault, and a few steps at a small rate hardly change the losses.
    undecided = [claim for claim in claims if not claim.holds]
    assert {(claim.variant, claim.undecided) for claim in undecided} <= {("bf16", UNMEASURABLE)}, undecided
    assert {(claim.variant, claim.claim.split(":")[0]) for claim in claims if claim not in undecided} >= {
        ("baseline", "the same seed in new processes"),
        ("baseline", "evaluation by one process"),
        ("bf16", "gradients of a step"),
        *(("stack", claim) for claim in ("gradients of a step", "losses of 20 steps", "weights after 20 steps")),
        *((name, "the same seed in new processes") for name in variants),
        ("stack", "evaluation by 2 processes"),
        ("bf16", "evaluation by one process"),
    }
    for claim in claims:
        if claim.unit == "relative" and claim.holds:
            measured, bound, fault = (figure or 0.0 for figure in (claim.measured, claim.bound, claim.fault))
            assert 0 < measured <= bound <= fault / 2  # compared with itself, it would differ by 0
            assert bound < (0.3 if claim.variant == "bf16" else 5e-3)
    assert of(claims, "stack", "weights after 20 steps: equal to those without activation_checkpointing").bound == 0
    assert of(claims, "bf16", "gradients").measured > 1e-4, "bf16 is in effect"  # type: ignore[operator]


def test_dropout_and_batchnorm_raise_no_false_alarm(claimed: Claimed) -> None:
    variants = {"both": {"parallelism": "ddp", "activation_checkpointing": True}, "parts": {"gradient_accumulation": 2}}
    claims = claimed(variants, model="own_nets:noisy")
    assert all(claim.holds for claim in claims), claims
    for name in variants:
        for beginning in ("gradients", "losses", "weights after 20 steps: equal to those of a single"):
            assert of(claims, name, beginning).note == "with dropout off and BatchNorm's statistics fixed"
    assert of(claims, "both", "weights after 20 steps: equal to those without activation_checkpointing").note == ""


def test_rounding_errors_of_a_gradient_hide_nothing(claimed: Claimed) -> None:
    how = {"model": "own_nets:lifted", "optimizer": "adamw", "learning_rate": 1e-3}
    weights = of(claimed({"split": {"gradient_accumulation": 2}}, **how), "split", "weights after")
    assert weights.holds, weights
    assert weights.note == "without 1.lift, whose gradients are rounding errors"


@pytest.mark.parametrize(("difference", "holds"), [(2.5, True), (3.5, False), (11.0, False)])
def test_a_close_difference_gets_more_draws(difference: float, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the noise's draws, the third is the largest; a fault makes 20. At half of this, no further draw is needed."""
    monkeypatch.setattr(verification.verifier, "way_difference", lambda *_: 0.0)
    tried: list[int] = []

    def reference(_: Any, trials: Sequence[Trial]) -> list[Observed]:
        tried[:] = [trial.draw for trial in trials if trial.noise]
        sizes = (20.0 if trial.forgets else {2: 1.6}.get(trial.draw, 1.0) * (trial.noise > 0) for trial in trials)
        return [Observed(Path(), losses=(size,)) for size in sizes]

    verifier = object.__new__(Verifier)
    verifier.steps = 1
    monkeypatch.setattr(verifier, "_reference", reference)
    monkeypatch.setattr(verifier, "_observe", lambda *_: [Observed(Path(), losses=(difference,))])
    trial, plan = Trial("step"), SimpleNamespace(name="a")
    trials = [trial, *(replace(trial, noise=0.1, draw=draw) for draw in range(2)), replace(trial, forgets=2)]
    apart = {"near": lambda ours, theirs: abs(ours.losses[0] - theirs.losses[0])}
    (claim,) = verifier._compared(plan, plan, "", [trials], apart)  # type: ignore[arg-type]
    assert claim.holds is holds
    assert len(tried) == (2 if difference > 10 else 8)


def test_samples_that_mix_promise_nothing(claimed: Claimed) -> None:
    claims = claimed({"parts": {"gradient_accumulation": 2}}, model="own_nets:mixing")
    claim = of(claims, "parts", "gradients")
    assert (claim.bound, claim.holds, claim.undecided) == (None, None, UNPROMISED)
    assert claim.measured is not None
    assert claim.measured > LEAST, "with a bound, this would be a false alarm"
    assert "only statistically equal, because the model still mixes the samples of a batch" in claim.note
    assert of(claims, "parts", "the same seed").holds


def test_without_a_deterministic_form_no_bit_is_promised(claimed: Claimed) -> None:
    variants: dict[str, Any] = {"kept": {"activation_checkpointing": True}}
    claims = claimed(variants, model="own_nets:putting")
    for beginning in ("the same seed", "weights after 20 steps: equal to those without activation_checkpointing"):
        claim = of(claims, "kept", beginning)
        assert (claim.bound, claim.holds, claim.undecided) == (None, None, UNPROMISED)
        assert "not promised: put_ has no deterministic form" in claim.note


def test_what_cannot_be_promised_says_why(claimed: Claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MACHINE", MACHINE.model_copy(update={"cpu_native_bf16": False}))
    how = {"parallelism": "ddp", "communication_hook": "powersgd", "precision": "bf16"}
    claims = claimed({"hooked": how}, deterministic=False)
    assert of(claims, "hooked", "bf16 is skipped").note.startswith("this CPU has no native bf16")
    against = of(claims, "hooked", "gradients")
    assert (against.holds, against.undecided) == (None, UNTRIED)
    assert "cannot run without some of its techniques: variants.hooked.communication_hook: found" in against.note
    again = of(claims, "hooked", "the same seed")
    assert (again.holds, again.undecided) == (None, UNPROMISED)
    assert "train.deterministic: false" in again.note


def test_a_quick_check_compiles_nothing(claimed: Claimed) -> None:
    compiled, plain = claimed({"a": {"compile": "default"}}, quick=True), claimed({"a": {}}, quick=True)
    assert all(claim.holds for claim in compiled)
    assert [claim.claim for claim in compiled] == [claim.claim for claim in plain]


def test_planted_faults_are_found(claimed: Claimed) -> None:
    variants: dict[str, Any] = {name.replace("_", "-"): {"extra": {name: {}}} for name in NAMES}
    del variants["clips-alone"], variants["thaws"], variants["loses-muon"], variants["mixes-scales"]
    variants["loses-a-rank"]["parallelism"] = "ddp"
    variants["skips-a-micro-batch"]["gradient_accumulation"] = 2
    claims = claimed(variants, model="own_nets:noisy")
    broken = {(claim.variant, claim.claim.split(":")[0]) for claim in claims if claim.holds is False}
    assert broken == {
        *(
            (name, claim)
            for name in ("drops-gradient", "doubles-gradients", "loses-a-rank", "skips-a-micro-batch", "explodes")
            for claim in ("gradients of a step", "losses of 20 steps", "weights after 20 steps")
        ),
        ("forgets-decay", "weights after 20 steps"),
        *(broken & {("forgets-decay", "losses of 20 steps")}),  # a small rate can hide the missing decay
        ("nearly-nothing", "weights after 20 steps"),
        ("differs-by-process", "the same seed in new processes"),
        *((variant, claim) for variant, claim in broken if variant == "differs-by-process"),  # chance decides how many
        ("refuses-to-train", "the variant trains"),
    }
    assert "not today" in of(claims, "refuses-to-train", "the variant trains").note
    assert of(claims, "explodes", "the variant trains").undecided == UNTRIED


@pytest.mark.slow
def test_a_recipe_holds_and_a_local_clip_is_found(claimed: Claimed) -> None:
    alone: dict[str, Any] = {"parallelism": "fsdp", "extra": {"clips_alone": {}}}
    recipe: dict[str, Any] = {"clip_norm": 0.3, "ema_decay": 0.8, "lr_warmup_steps": 1000, "lr_factors": {"2.*": 2.0}}
    claims = claimed({"sound": {"parallelism": "fsdp"}, "alone": alone}, **recipe)
    assert all(claim.holds for claim in claims if claim.variant == "sound"), claims
    assert [claim.claim.split(":")[0] for claim in claims if claim.holds is False] == [
        "losses of 20 steps",
        "weights after 20 steps",
    ]


def test_what_is_frozen_stays_or_is_found(claimed: Claimed) -> None:
    thaws: dict[str, Any] = {"extra": {"thaws": {}}}
    claims = claimed({"sound": {}, "thawed": thaws}, model="own_nets:noisy", frozen=["0.*"])
    assert [of(claims, name, "7 frozen tensors").holds for name in ("sound", "thawed")] == [True, False]
    adapted = {"lora": {"targets": ["2.*"], "rank": 2, "train": ["2.1.bias"]}}
    claims = claimed({"sound": adapted, "thawed": thaws | adapted}, model="own_nets:noisy")
    for claim in ("8 frozen tensors", "the changes of 1 layer have rank 2"):
        assert [of(claims, name, claim).holds for name in ("sound", "thawed")] == [True, False]


@needs_library
def test_weights_begin_at_the_nearest_of_16_levels_or_it_is_found(claimed: Claimed) -> None:
    applied = {"lora": {"targets": ["2.*"], "rank": 2}, "base_weights": "nf4"}
    claims = claimed({"sound": applied, "mixed": applied | {"extra": {"mixes_scales": {}}}}, model="own_nets:noisy")
    assert [of(claims, name, "weights in 4 bits").holds for name in ("sound", "mixed")] == [True, False]
    assert all(claim.holds for claim in claims if claim.variant == "sound"), claims
    weights = torch.linspace(-3, 4, 128)
    assert beside_nf4(weights, weights) > 0.1, "weights that are not rounded are no levels"


def test_a_layer_that_is_trained_itself_gets_no_factors(claimed: Claimed) -> None:
    applied = {"lora": {"targets": ["*"], "rank": 2, "train": ["3.*"]}}
    claims = claimed({"lora": applied}, model="own_nets:mixing")
    assert of(claims, "lora", "the changes of 1 layer").holds


def test_muon_s_updates_are_orthogonal_or_it_is_found(claimed: Claimed) -> None:
    lost: dict[str, Any] = {"extra": {"loses_muon": {}}}
    recipe: dict[str, Any] = {"weight_decay": 0.1, "ema_decay": 0.5, "lr_factors": {"2.*": 2.0}}
    train = {"model": "tests.nets:normed_net", "optimizer": "adamw", "learning_rate": 0.003} | recipe
    claims = claimed({"sound": {"optimizer": "muon"}, "lost": {"optimizer": "muon"} | lost}, **train)
    sound, without = (of(claims, name, "the first updates of") for name in ("sound", "lost"))
    assert (sound.holds, without.holds) == (True, False)
    assert (without.measured or 0.0) > 1, "AdamW's first update, of signs, is far larger in some direction"


def test_a_bound_without_a_fault_beyond_answers_nothing(claimed: Claimed) -> None:
    claims = claimed({"rough": {"extra": {"rough": {}}}})
    assert [(claim.holds, claim.undecided) for claim in claims] == [(None, UNMEASURABLE)] * 3 + [(True, "")] * 3
    claim = of(claims, "rough", "gradients")
    assert claim.measured == 0
    assert (claim.fault or 0.0) < (claim.bound or 0.0)


def test_a_smaller_rate_is_tried_where_training_diverges(claimed: Claimed) -> None:
    variants: dict[str, Any] = {"parts": {"gradient_accumulation": 2}, "doubled": {"extra": {"doubles_gradients": {}}}}
    train = {"model": "own_nets:noisy", "learning_rate": 2.0}
    claims = claimed(variants, **train)
    for beginning in ("losses", "weights"):
        assert "3 steps" in of(claims, "parts", beginning).claim, claims
        assert "at 1/8 of the learning rate" in of(claims, "parts", beginning).note
        assert of(claims, "parts", beginning).holds, claims
        assert of(claims, "doubled", beginning).holds is False


def test_what_diverges_everywhere_could_not_be_tried(claimed: Claimed) -> None:
    claims = claimed({"ddp": {"parallelism": "ddp"}}, learning_rate=1e30)
    assert [(claim.claim.split(":")[0], claim.holds, claim.undecided) for claim in claims] == [
        ("the variant trains", None, UNTRIED),
        ("gradients of a step", True, ""),
        ("losses of 3 steps", None, UNTRIED),
        ("weights after 3 steps", None, UNTRIED),
    ]
    assert "the loss became" in claims[0].note


def test_a_model_without_gradients_does_not_train(claimed: Claimed) -> None:
    (claim,) = claimed({"baseline": {}}, model="own_nets:detached")
    assert (claim.claim, claim.holds) == ("the variant trains", False)
    assert "no weight changed" in claim.note


def test_a_diverging_reference_blames_no_variant(claimed: Claimed) -> None:
    variants: dict[str, Any] = {"first": {"precision": "bf16"}, "second": {"precision": "bf16", "channels_last": True}}
    claims = claimed(variants, learning_rate=1e9)
    notes = [claim.note for claim in claims if claim.variant == "second" and "the reference" in claim.note]
    assert notes
    assert all(note.startswith("the reference, seed 0, epoch ") for note in notes)


def test_a_failing_reference_is_told(claimed: Claimed) -> None:
    variants: dict[str, Any] = {
        "parts": {"gradient_accumulation": 2},
        "both": {"gradient_accumulation": 2, "activation_checkpointing": True},
    }
    claims = claimed({"baseline": {}} | variants, model="own_nets:greedy")
    trains = of(claims, "baseline", "the variant trains")
    assert (trains.holds, trains.undecided) == (None, UNTRIED)
    for name in variants:
        against = of(claims, name, "gradients")
        assert (against.holds, against.undecided) == (None, UNTRIED)
        assert against.note.startswith("the reference, a training without some of the techniques, fails: rank 0: ")
        assert "more than 16 samples" in against.note
        assert of(claims, name, "the same seed").holds
        assert of(claims, name, "evaluation").holds
    assert of(claims, "both", "weights after 20 steps: equal to those without activation_checkpointing").holds


def test_lack_of_memory_is_no_fault(claimed: Claimed) -> None:
    (claim,) = claimed({"baseline": {}}, model="own_nets:hungry")
    assert (claim.holds, claim.undecided) == (None, UNTRIED)
    assert "can't allocate memory" in claim.note


def test_the_step_that_shows_the_gradients_is_not_evaluated(claimed: Claimed) -> None:
    train = {"batch_size": 1000, "metric": "own_nets:within_a_million"}  # one step an epoch
    claims = claimed({"parts": {"gradient_accumulation": 2}}, **train)
    assert of(claims, "parts", "gradients").holds, claims


def _padded(joined: World, config: Config, folder: Path, file: Path) -> Observed:
    """Observe a training whose evaluation pads every rank's share to the same size."""

    def padded(*arguments: Any, **options: Any) -> Iterator[Any]:
        batches = list(evaluation_batches(*arguments, **options))
        if options["rank"] == 0:  # the smaller share
            images, labels = batches[-1]
            batches[-1] = torch.cat([images, images[-1:]]), torch.cat([labels, labels[-1:]])
        return iter(batches)

    vars(outcomes)["evaluation_batches"] = padded  # this process ends with the test
    plan = plan_of(config, "ddp", MACHINE)
    return observe(Trial("run"), file, assembly_of(plan, joined, read(folder)))


def test_an_evaluation_that_pads_is_found(digits_folder: Path, tmp_path: Path) -> None:
    config = job({"ddp": {"parallelism": "ddp"}})
    seen = run_ranks(_padded, config, digits_folder, tmp_path / "state.pt")[0]
    claim = evaluated(plan_of(config, "ddp", MACHINE), seen)
    assert claim.holds is False
    assert claim.note == f"{seen.expected_count + 1} samples were counted"


def test_the_miniature_is_whole_batches(digits: Dataset) -> None:
    small = miniature(digits, 32)
    assert len(small.train) == 320
    assert all(len(small.test) % ranks for ranks in range(2, 20))
    assert len(miniature(digits, 1000).train) == 1000


def test_a_sorted_miniature_has_every_class(digits: Dataset) -> None:
    splits = {name: getattr(digits, name) for name in ("train", "test")}
    ordered = {name: split[split.targets.argsort()] for name, split in splits.items()}
    small = miniature(replace(digits, **ordered), 16)
    for split in (small.train, small.test):
        assert split.targets.bincount().min() >= len(split) / 10 - 2
    assert len(set(small.train.targets[:32].tolist())) >= 8, "in random order"
    small = miniature(digits, 16)
    for name, split in splits.items():
        part = getattr(small, name)
        assert part.inputs.data_ptr() == split.inputs.data_ptr(), "no copy of mixed data"


def test_a_rare_class_is_in_the_miniature(digits: Dataset) -> None:
    """Its share of the miniature is less than one sample."""
    targets = torch.arange(len(digits.train)) % 9
    targets[-len(targets) // 100 :] = 9
    small = miniature(replace(digits, train=Split({**digits.train.arrays, "targets": targets})), 16)
    assert small.train.targets.bincount(minlength=10).min() >= 1


def test_a_sorted_miniature_has_all_quarters(digits: Dataset) -> None:
    numbers = torch.linspace(-1, 1, len(digits.train))[:, None]
    for order, is_drawn in ((numbers, True), (numbers[torch.randperm(len(numbers))], False)):
        train = Split({"inputs": digits.train.inputs, "targets": order})
        small = miniature(replace(digits, train=train), 16).train
        assert small.targets.flatten().quantile(torch.tensor([0.25, 0.75])).tolist() == pytest.approx(
            [-0.5, 0.5], abs=0.2
        )
        assert (small.inputs.data_ptr() != train.inputs.data_ptr()) is is_drawn


def test_a_miniature_of_texts_is_from_all_over(digits: Dataset) -> None:
    """Their windows follow each other, and have no targets of their own."""
    windows = Split({"inputs": torch.arange(len(digits.train))[:, None]})
    small = miniature(replace(digits, train=windows, test=windows), 16)
    for split in (small.train, small.test):
        assert split.inputs.max() > 0.9 * len(windows)


def write(path: Path, **values: torch.Tensor) -> Path:
    torch.save(values, path)
    return path


def test_a_gradient_s_difference_is_relative_to_its_norm(tmp_path: Path) -> None:
    def seen(weight: Sequence[float], **bias: torch.Tensor) -> Observed:
        observed = Observed(tmp_path / f"{len(list(tmp_path.iterdir()))}.pt")
        write(observed.way, weight=torch.tensor(weight), **bias)
        return observed

    none = {"bias": torch.tensor([0.0])}
    expected = seen([3.0, 4.0], **none)
    # The root mean square is sqrt(25 / 3). A tenth of it, per value, is added to each norm.
    assert way_difference(seen([3.0, 4.5], **none), expected) == pytest.approx(0.5 / (5 + 0.1 * math.sqrt(25 * 2 / 3)))
    shifted = seen([3.0, 4.0], bias=torch.tensor([0.1]))
    assert way_difference(shifted, expected) == pytest.approx(0.1 / (0.1 * math.sqrt(25 / 3)))
    assert way_difference(expected, expected) == 0
    for wrong in (seen([math.nan, 4.0], **none), seen([math.inf, 4.0], **none), seen([3.0, 4.0])):
        assert way_difference(wrong, expected) == math.inf


def test_a_curve_s_difference_is_the_largest() -> None:
    curve, expected, short = (Observed(Path(), losses) for losses in ((2.0, 1.5, 0.5), (2.0, 1.0, 0.0), (1.0,)))
    assert loss_difference(curve, expected) == pytest.approx(0.5)
    assert loss_difference(short, expected) == math.inf


def test_differing_values_are_counted_by_their_bits(tmp_path: Path) -> None:
    first = write(tmp_path / "a", weight=torch.tensor([[0.0, 1.0], [math.nan, 3.0]]), steps=torch.tensor(3))
    assert differing_values(first, first) == 0, "equal NaN values do not differ"
    second = write(tmp_path / "b", weight=torch.tensor([[-0.0, 1.0], [math.nan, 3.0000002]]), steps=torch.tensor(4))
    assert differing_values(first, second) == 3
    half = write(tmp_path / "c", weight=torch.zeros(2, 2, dtype=torch.float16), other=torch.zeros(5))
    assert differing_values(first, half) == 4 + 1 + 5


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, Nature(False, False)),
        ({"norm": True}, Nature(False, True)),
        ({"dropout": True}, Nature(True, False)),
        ({"norm": True, "dropout": True}, Nature(True, False)),
    ],
)
def test_a_model_can_be_made_per_sample(parts: dict[str, bool], expected: Nature) -> None:
    images, _ = batch()
    model = conv_net(**parts)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert nature(model, images) == expected
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    kept = make_per_sample(model, statistics(copy.deepcopy(model), [images]))
    assert nature(kept, images).per_sample
    assert list(kept.state_dict()) == list(state)
    assert torch.equal(random, torch.get_rng_state())


def test_a_norm_in_evaluation_is_per_sample() -> None:
    images, _ = batch()
    model = conv_net(norm=True).eval()
    model[2].train()
    assert nature(model, images).per_sample
    assert statistics(model, [images]) == {}
    assert not model.get_submodule("0.1").training
    assert model.get_buffer("0.1.running_mean").eq(0).all()


def test_a_norm_starts_with_the_batch_s_statistics() -> None:
    images, _ = batch()
    plain, kept = conv_net(norm=True), make_per_sample(conv_net(norm=True), statistics(conv_net(norm=True), [images]))
    torch.testing.assert_close(kept.train()(images), plain.train()(images), rtol=1e-2, atol=1e-2)  # n / (n - 1)
    kept(images).sum().backward()
    assert kept.get_parameter("0.1.weight").grad is not None


def test_dropout_inside_attention_is_switched_off() -> None:
    images, _ = batch()
    attention = nn.TransformerEncoderLayer(64, 2, 8, dropout=0.5, batch_first=True, layer_norm_eps=0.25)
    model = nn.Sequential(nn.Flatten(2), attention)
    assert nature(model, images).stochastic
    assert nature(make_per_sample(model, {}), images).per_sample
    assert attention.norm1.eps == 0.25


def test_noise_reaches_layers_that_return_tuples(digits: Dataset) -> None:
    layers: list[nn.Module] = [nn.GRU(8, 4), nn.LSTM(8, 4), nn.MultiheadAttention(8, 2)]
    images = batch()[0].flatten(0, 1)
    training = make_training(digits, model=nn.ModuleList(layers))
    with _spoilt(training, Trial("step", noise=1e-3)):
        for layer in layers:
            inputs = (images,) * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
            for plain, noisy in zip(tree_leaves(layer.forward(*inputs)), tree_leaves(layer(*inputs)), strict=True):
                assert 2e-4 < (noisy - plain).norm() / plain.norm() < 2e-3


def test_what_a_technique_leaves_behind_goes_with_it() -> None:
    assert params.without(Variant(parallelism="ddp", processes=2), [params.entry("ddp")]) == Variant()


def test_plain_sgd_shows_gradients_but_for_other_optimizers() -> None:
    plain = Train().model_copy(update=PLAIN_SGD)
    refused = {technique.name for technique in params.CATALOGUE if technique.why_not_with(plain)}
    assert refused == {"low_bit_optimizer", "factored_optimizer", "muon"}


def test_the_command_s_exit_code_is_the_answer(
    digits_folder: Path,
    own_code: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (here / "data").mkdir()
    (here / "data/prepared").symlink_to(digits_folder)
    params = {
        "train": {"batch_size": 32, "learning_rate": 0.05, "model": "own_nets:mixing"},
        "variants": {"baseline": {}, "nearly": {"extra": {"nearly_nothing": {}}}},
    }
    (here / "params.yaml").write_text(json.dumps(params))
    (here / "own_nets.py").write_text(OWN_NETS + "\nprint('a word of mine')\n")
    monkeypatch.setattr(sys, "path", [str(own_code), *sys.path])
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)

    assert cli.main(["verify", "baseline", "--json"]) == 0
    shown = capfd.readouterr()
    assert "3 of 3 claims" in shown.err
    answer = json.loads(shown.out)
    assert answer["holds"] is True
    assert (answer["steps"], answer["batch_dependent"], answer["stochastic"]) == (20, True, False)
    assert [claim["bound"] for claim in answer["claims"]] == [0, 0, 0]

    assert cli.main(["verify"]) == 1
    out = capfd.readouterr().out
    assert "own_nets:mixing on digits, seed 0: 20 steps of 32 samples, and 359 of 359 test samples" in out
    assert ". The model mixes the samples" in out
    (line,) = [line for line in out.splitlines() if "without nearly_nothing" in line]
    assert line.startswith("nearly")
    assert line.endswith("NO")
    assert ", 1 false. " in out

    assert cli.main(["verify", "--quick"]) == 0  # the claim that is false takes longer
    shown = capfd.readouterr()
    assert "3 steps of 32 samples, and 89 of 359 test samples (a prime number" in shown.out
    assert "--quick leaves out: losses and weights after several steps" in shown.out
    assert "evaluation by one process: each of 89 samples counts once" in shown.out
    assert "verify: 4 of 4 claims" in shown.err
    variants = {"accumulated": {"gradient_accumulation": 2}, "baseline": {}}
    (here / "params.yaml").write_text(json.dumps({**params, "variants": variants}))
    cli.main(["verify", "--quick"])
    claims = capfd.readouterr().out.splitlines()[4:-1]
    rows = [(row.split()[0], "gradients of a step" in row) for row in claims if not row.startswith(" ")]
    own = [("accumulated", False)] * 2 + [("baseline", False)] * 2
    assert rows == [*own, ("accumulated", True)]  # what needs a reference comes last
    (here / "params.yaml").write_text(json.dumps(params))
    monkeypatch.setattr(verification, "QUICK_SECONDS", 0.0)
    assert cli.main(["verify", "--quick"]) == 1
    assert "the time of --quick is over" in capfd.readouterr().out

    (here / "params.yaml").write_text(json.dumps({**params, "train": {"batch_size": 5000}}))
    assert cli.main(["verify"]) == 2
    assert "train.batch_size: found 5000, but digits has" in capfd.readouterr().err
    (here / "params.yaml").write_text(json.dumps(params))

    assert cli.main(["verify", "there-is-none"]) == 2
    assert "variants.there-is-none: no such variant" in capfd.readouterr().err


def test_the_remaining_time_is_estimated_by_variant() -> None:
    """The first variant's time, which includes the start of a server, does not count."""
    variants = {"baseline": {}, "ddp": {"parallelism": "ddp"}, "both": {"parallelism": "ddp", "compile": "default"}}
    config = job(variants | {"same": {"set_to_none": False}})
    costs = [verification.cost(plan_of(config, name, MACHINE)) for name in config.variants]
    spent = list(zip(costs, (30.0, 20.0, 100.0, 8.0), strict=True))
    assert verification.remaining(spent[:1], sum(costs[1:])) == 0
    left = [verification.remaining(spent[:number], sum(costs[number:])) for number in (2, 3)]
    assert left == [pytest.approx(108, rel=0.5), pytest.approx(8, rel=0.5)]
    assert verification.progress(2, 4, 50.0, left[0]).endswith(", 50 s; about 87 s more")
    quick = plan_of(config, "both", MACHINE)
    assert verification.cost(quick, quick=True) == costs[1]


def test_a_decided_claim_of_each_variant_must_hold() -> None:
    true, false = Claim("a", "one", 0.0, 1e-4, True), Claim("a", "two", 12, 0, False)
    undecidable = Claim("b", "three", 1e-3, 0.3, None, undecided=UNMEASURABLE)
    assert not verification.hold([true, false])
    assert verification.hold([true])
    assert not verification.hold([true, undecidable])  # no claim of b is decided
    assert verification.hold([true, Claim("a", "left out", undecided=UNTRIED)])
