"""The gate: its decision, what a promotion checks, the copies, both sides simulated, and complete gates."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import environment, gate
from pipeline.benchmark import rounds
from pipeline.benchmark.rounds import Calibration, Rounds
from pipeline.benchmark.server import ArmSpec, BenchError, Server
from pipeline.comparison.planning import RoundCost
from pipeline.comparison.stats import Difference
from pipeline.environment import checked_out, hash_of, imports, stages
from pipeline.errors import PipelineError
from pipeline.files import write_text
from pipeline.gate import COMPARISON_FILE, copies, decision, markdown, settings, side_by_side
from pipeline.gate.copies import Copy, check_arms, commit_of
from pipeline.gate.decision import (
    EXIT_CODES,
    Gated,
    GateError,
    Judged,
    Side,
    judge,
    memory_known,
    rounds_of_sides,
    settled,
)
from pipeline.gate.side_by_side import Described, accuracies_in
from pipeline.params import Compare, Config, Margins, Variant, load, parse
from pipeline.plans import plans
from pipeline.results import Arm, DatasetFacts, ScoreName, Unit
from pipeline.results.rejections import rejection
from tests.conftest import Clone
from tests.factories import ENVIRONMENT, known, make_accuracy, make_arm, make_window, write_wheel
from tests.timed import Known, Timed

SPEED, PEAK = 20_000.0, 200 * 2**20
COST = RoundCost("gate.max_minutes", 14, 600.0)


def arm(
    name: str = "head baseline",
    *,
    throughput: float = 1.0,
    memory: float = 1.0,
    noise: float = 0.01,
    drift: float = 0.1,
    rounds: int = 14,
    rejected: Sequence[int] = (),
    known: bool = True,
    **changes: Any,
) -> Arm:
    """Return an arm of a machine whose speed drifts. Each name draws its own ``noise``. If not ``known``, memory is
    unknown."""
    draw = random.Random(name)
    samples = [
        make_window(
            samples_per_second=SPEED * throughput * (1 + drift * math.sin(index)) * math.exp(draw.gauss(0, noise)),
            peak_memory_bytes=round(PEAK * memory),
            rejections=(rejection("told", text="another process took half of the CPU"),) if index in rejected else (),
        ).model_copy(update={} if known else {"peak_memory_bytes": None})
        for index in range(rounds)
    ]
    return make_arm(**{"name": name, "variant": name.split()[1], "samples": tuple(samples)} | changes)


def control_of(baseline: str, **changes: Any) -> Arm:
    return arm(f"base {baseline}, A/A control", variant=baseline, role="aa_control", **changes)


def judged(
    *heads: Arm,
    noise: float = 0.01,
    drift: float = 0.1,
    accuracies: Mapping[str, Difference] | None = None,
    rejected: Mapping[str, Sequence[int]] = {},
    margins: Margins | None = None,
    look: bool = False,
) -> Judged:
    """Judge ``heads`` against bases of the same variants, on a machine with this noise and drift. ``rejected``: variant
    -> rounds in which the base's sample was rejected."""

    first = heads[0].samples
    usual: dict[str, Any] = {"noise": noise, "drift": drift, "rounds": len(first)}
    usual["known"] = first[0].peak_memory_bytes is not None
    base = [arm(f"base {head.variant}", rejected=rejected.get(head.variant, ()), **usual) for head in heads]
    base.append(control_of("baseline", rejected=rejected.get("baseline", ()), **usual))
    compare = Compare(margins=margins or Margins())
    return judge(rounds_of_sides(base, heads, compare, COST), accuracies or {}, compare, 0.1, look=look)


def decisions(judgement: Judged) -> dict[str, tuple[str, str | None]]:
    """Return variant -> the decisions on throughput and on memory."""
    rows = [*judgement.variants, *([judgement.together] if judgement.together else [])]
    return {row.variant: (row.throughput.decision, row.memory.decision if row.memory else None) for row in rows}


# The decision


def gated_of(*heads: Arm, accuracies: dict[str, dict[int, float]] | None = None, **changes: Any) -> Gated:
    """Return the gate's decision on ``heads``, the baseline first, and on bases that are equal until a test changes
    them. ``accuracies``: those of the head, if they are not the base's."""
    bases = [arm(f"base {head.variant}", rounds=len(head.samples)) for head in heads]
    scores_of_base = {head.variant: {0: 0.9, 1: 0.91, 2: 0.89} for head in heads}
    scores_of_head = accuracies or scores_of_base
    control = control_of("baseline", rounds=len(heads[0].samples))
    compared = decision.accuracies(10_000, scores_of_base, scores_of_head, 0.01)
    measured = rounds_of_sides((control, *bases), heads, Compare(), COST)
    about: dict[str, Any] = {"environment": hash_of(ENVIRONMENT, "variants"), "made_of": None}
    usual: dict[str, Any] = {
        "against": "main", "margins": Margins(), "seconds": 60.0, "budget": "gate.max_minutes", "remarks": (),
        "dataset": DatasetFacts(name="d", sha256="d" * 64, train_count=60_000, test_count=10_000),
        "score": ScoreName(name="accuracy"), "unit": Unit(),
    }  # fmt: skip
    return Gated(
        **dict(judge(measured, compared, Compare(), 0.1)),
        base=Side(commit="b" * 40, arms=(control, *bases), test_accuracies=scores_of_base, **about),
        head=Side(commit="c" * 40 + "+", arms=heads, test_accuracies=scores_of_head, **about),
        **usual | changes,
    )


def written_gate(*names: str) -> dict[str, Any]:
    """Return the content of gate.json for two equal sides with the variants ``names``. The baseline must be first."""
    gated = gated_of(*(arm(f"head {name}") for name in names))
    assert gated.outcome == "passed"
    content: dict[str, Any] = json.loads(gated.to_json())
    return content


def slow(values: dict[str, Any]) -> None:
    for sample in values["head"]["arms"][1]["samples"]:
        sample["samples_per_second"] *= 0.8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: None, None),  # noqa: ARG005
        (slow, "says passed, but its samples say worse"),
        (lambda values: values["head"]["test_accuracies"].update(ddp={0: 0.5, 1: 0.5, 2: 0.5}), "samples say worse"),
        (lambda values: values["head"].update(environment="e" * 64), "in environment eeeeeeeeeeee, but"),
        (lambda values: values["head"].update(made_of="m" * 64), "the head ran with other code, settings or plans"),
        (lambda values: values["base"]["arms"].pop(), "its arms do not fit together"),
        (lambda values: values.update(outcome="perfect"), "is not a file that this version can read"),
    ],
)
def test_a_gate_without_support_is_not_confirmed(
    change: Callable[[dict[str, Any]], None], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse({"variants": {"baseline": {}, "ddp": {"parallelism": "ddp"}}})
    gate.confirm(config)  # does nothing without gate.json
    values = written_gate("baseline", "ddp")
    change(values)
    write_text(gate.JSON_FILE, json.dumps(values))
    write_text(environment.ENVIRONMENT_FILE, json.dumps(ENVIRONMENT))
    with pytest.raises(PipelineError, match=message) if message else nullcontext():
        gate.confirm(config)


def test_what_no_variant_shows_all_together_do_not_show() -> None:
    """Each variant lacks more than half of its rounds, but not the same ones."""
    base = [arm("base baseline", rejected=range(4)), arm("base ddp", rejected=range(4, 8))]
    head = [arm("head baseline", rejected=range(4, 8)), arm("head ddp", rejected=range(8, 12))]
    sides = rounds_of_sides([*base, control_of("baseline", rejected=range(4))], head, Compare(), COST)
    judgement = judge(sides, {}, Compare(), 0.1)
    assert [speed for speed, _ in decisions(judgement).values()] == ["untrusted", "untrusted", "same"]
    assert (judgement.outcome, judgement.hidden, judgement.unseen) == ("untrusted", (), ())


@pytest.mark.parametrize(
    ("head", "decided", "outcome"),
    [
        ({}, ("same", "same"), "passed"),
        ({"throughput": 0.9}, ("worse", "same"), "worse"),
        ({"memory": 1.1}, ("same", "worse"), "worse"),
        ({"throughput": 1.1, "memory": 0.9}, ("better", "better"), "passed"),
        ({"throughput": 1.2, "memory": 1.2}, ("better", "worse"), "worse"),
        ({"throughput": 0.97}, ("undecided", "same"), "passed"),  # what is undecided is no alarm
        ({"known": False}, ("same", None), "passed"),
        ({"rounds": 5}, ("untrusted", "same"), "untrusted"),  # three rounds decide memory, six decide speed
        ({"throughput": 0.5, "noise": 0.5}, ("untrusted", "same"), "untrusted"),
        ({"memory": 1.5, "noise": 0.5}, ("untrusted", "worse"), "worse"),  # a leak shows on a noisy machine too
    ],
)
def test_what_counts_as_worse(head: dict[str, Any], decided: tuple[str, str | None], outcome: str) -> None:
    judgement = judged(arm(**head), noise=head.get("noise", 0.01))
    assert (decisions(judgement)["baseline"], judgement.outcome) == (decided, outcome)


def test_one_seed_decides_no_accuracy() -> None:
    lost = make_accuracy([-0.03, -0.031, -0.029])
    assert judged(arm(), accuracies={"baseline": lost}).outcome == "worse"
    judgement = judged(arm(), accuracies={"baseline": make_accuracy([-0.03])})
    assert judgement.outcome == "passed"
    assert known(judgement.variants[0].accuracy).decision == "undecided"
    of_base, of_head = {0: 0.5, 1: 0.9, 2: 0.7}, {0: 0.99, 1: 0.8, 2: 0.98}
    wide = decision.accuracies(1000, {"baseline": of_base}, {"baseline": of_head}, 0.01)
    assert wide["baseline"].high == pytest.approx(0.3), "the head's accuracy cannot be above 1"
    of_base, of_head = {2: 0.99, 0: 0.5, 1: 0.9}, {0: 0.47, 1: 0.87, 2: 0.96}
    paired = decision.accuracies(1000, {"baseline": of_base}, {"baseline": of_head}, 0.01)["baseline"]
    assert paired.estimate == pytest.approx(-0.03)
    assert paired.decision == "worse", "the differences are not of the same seed"


@pytest.mark.parametrize(
    ("noise", "margins", "outcome"),
    [
        (0.025, Margins(), "passed"),  # the interval's lower end is 0.913; a loss of 10% would be 0.909
        (0.03, Margins(), "undecided"),  # the lower end is 0.906
        (0.03, Margins(throughput=0.2), "passed"),  # losses below the margin do not matter
    ],
)
def test_a_loss_that_is_not_excluded_is_no_pass(noise: float, margins: Margins, outcome: str) -> None:
    judgement = judged(arm(throughput=0.95, noise=noise), noise=noise, margins=margins)
    assert judgement.outcome == outcome
    assert len(judgement.unseen) == (outcome == "undecided")
    assert EXIT_CODES["undecided"] == 3


@pytest.mark.parametrize(
    ("head", "noise", "expected"),
    [
        ({}, 0.005, True),
        ({"throughput": 0.97}, 0.005, False),  # the outcome is "passed", but a small loss is not excluded
        ({"throughput": 0.8}, 0.005, True),
        ({"throughput": 0.95}, 0.03, False),  # the interval of an interim test is wider, and contains 0.909
        ({"rounds": 5}, 0.005, False),  # too few rounds for an interval
        ({"name": "head ddp", "rejected": range(10)}, 0.005, False),  # samples of later rounds may be trusted
    ],
)
def test_an_interim_test_may_end_the_gate(head: dict[str, Any], noise: float, expected: bool) -> None:
    head_arm = arm(**{"noise": noise} | head)
    heads = [head_arm] if head_arm.variant == "baseline" else [arm(noise=noise), head_arm]
    rejected = {"ddp": range(10)}
    assert settled(judged(*heads, noise=noise, rejected=rejected, look=True)) is expected


@pytest.mark.parametrize(
    ("rounds", "grows_in", "known"),
    [(2, 1, False), (3, 1, True), (6, 3, False)],
    ids=["too few rounds", "equal growth", "growth in some rounds"],
)
def test_memory_is_measured_until_it_is_decided(rounds: int, grows_in: int, known: bool) -> None:
    grown = [
        sample.model_copy(update={"peak_memory_bytes": round(PEAK * (1.15 if index % grows_in == 0 else 1.0))})
        for index, sample in enumerate(arm(rounds=rounds).samples)
    ]
    assert memory_known(judged(arm(samples=tuple(grown)), look=True)) is known


def test_memory_of_three_rounds_decides() -> None:
    def of_three_rounds(measured: Arm) -> Arm:
        samples = arm(rounds=14).samples
        left_out = {"peak_memory_bytes": None, "peak_memory_rank_bytes": ()}
        later = [sample.model_copy(update=left_out) for sample in samples[3:]]
        return measured.model_copy(update={"samples": (*samples[:3], *later)})

    head, *base = map(of_three_rounds, (arm(), arm("base baseline"), control_of("baseline")))
    judgement = judge(rounds_of_sides(base, [head], Compare(), COST), {}, Compare(), 0.1)
    assert (decisions(judgement)["baseline"], judgement.outcome) == (("same", "same"), "passed")


def test_a_growth_that_is_not_excluded_is_no_pass() -> None:
    grown = [
        sample.model_copy(update={"peak_memory_bytes": round(PEAK * (1.15 if index % 3 == 0 else 1.0))})
        for index, sample in enumerate(arm().samples)
    ]
    judgement = judged(arm(samples=tuple(grown)))
    assert (decisions(judgement)["baseline"][1], judgement.outcome) == ("undecided", "undecided")
    assert "peak memory" in judgement.unseen[0]


def test_an_untrusted_variant_does_not_stop_the_others() -> None:
    refused = arm("head ddp", rejected=range(10))
    judgement = judged(arm(), refused, rejected={"ddp": range(10)})
    assert (judgement.outcome, judgement.hidden) == ("passed", ())
    assert decisions(judgement)["ddp"] == ("untrusted", "same")
    assert judged(arm(throughput=0.8), refused, rejected={"ddp": range(10)}).outcome == "worse"


def test_a_figure_that_the_head_lacks_is_no_pass() -> None:
    """If a change makes a variant wait for its input or recompile, its samples are rejected and have no speed."""
    judgement = judged(arm(), arm("head ddp", rejected=range(10)))
    assert judgement.outcome == "untrusted"
    assert decisions(judgement)["ddp"] == ("untrusted", "same")
    [said] = judgement.hidden
    assert said.startswith("ddp: most samples of the base have a throughput, but most samples of the head have none")
    assert judged(arm(), arm("head ddp"), rejected={"ddp": range(10)}).outcome == "passed", "only the base lacks it"


def test_an_unknown_speed_is_no_pass() -> None:
    def silent(made: Arm) -> Arm:
        unknown = tuple(sample.model_copy(update={"samples_per_second": None}) for sample in made.samples)
        return made.model_copy(update={"samples": unknown})

    head, *base = map(silent, (arm(), arm("base baseline"), control_of("baseline")))
    judgement = judge(rounds_of_sides(base, [head], Compare(), COST), {}, Compare(), 0.1)
    assert (judgement.outcome, decisions(judgement)["baseline"]) == ("untrusted", ("untrusted", "same"))


@pytest.mark.parametrize(("more_mib", "expected"), [(0.98, "same"), (1.02, "worse")])
def test_a_heap_s_free_blocks_are_no_difference(
    more_mib: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PEAK", 10 * 2**20)
    judgement = judged(arm(memory=1 + more_mib / 10))
    assert decisions(judgement)["baseline"][1] == expected


def test_a_change_of_all_variants_shows_in_their_mean() -> None:
    """With this noise, the interval of each single variant overlaps with the margin; the interval of their mean does
    not."""
    names = ("baseline", "ddp", "memory", "fourth")
    slower = judged(*(arm(f"head {name}", throughput=0.94, noise=0.03) for name in names), noise=0.03)
    assert {decisions(slower)[name] for name in names} == {("undecided", "same")}
    assert decisions(slower)[known(slower.together).variant] == ("worse", "same")
    assert slower.outcome == "worse"
    assert judged(arm()).together is None, "a single variant has no mean over variants"


def test_the_mean_over_variants_uses_the_known_figures() -> None:
    heads = [arm(throughput=0.8, noise=0.0), arm("head ddp", throughput=1.25, noise=0.0, rejected=(0, 1))]
    speed = known(judged(*heads, noise=0.0).together).throughput
    assert speed.estimate == pytest.approx(1.0)  # mean of 0.8 and 1.25; in two rounds only 0.8
    assert speed.rejected == 0


# What a promotion checks


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make ``tmp_path`` a checkout in which nothing changed, neither according to digests nor according to DVC."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gate, "output", lambda *_: "{}")
    write_text(environment.ENVIRONMENT_FILE, json.dumps(ENVIRONMENT))
    monkeypatch.setattr(stages, "described", lambda *_: ENVIRONMENT)
    return tmp_path


def configured(**sections: Any) -> Config:
    return parse({"variants": {"baseline": {}, "ddp": {"parallelism": "ddp"}}} | sections)


@pytest.mark.parametrize("broken", ["dvc.yaml", "no stage", "no repository", "words"])
def test_a_failed_dvc_status_is_a_refusal(checkout: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    gate.check_current(configured())
    if broken == "words":
        monkeypatch.setattr(gate, "output", lambda *_: "")
    else:
        monkeypatch.setattr(gate, "output", copies.output)
        if broken != "no repository":
            (checkout / ".dvc").mkdir()
            (checkout / ".dvc" / "config").write_text("[core]\n    no_scm = true\n", encoding="utf-8")
            (checkout / "dvc.yaml").write_text("stages: [" if broken == "dvc.yaml" else "stages: {}", encoding="utf-8")
    with pytest.raises(GateError, match=r"(?s)`dvc status` failed, so reports/comparison\.json .*: \S"):
        gate.check_current(configured())


def test_code_and_settings_must_be_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests decide this, and not only DVC. They cover the user's own code and weights too."""
    monkeypatch.chdir(tmp_path)
    asked: list[list[str]] = []

    def status(command: list[str], _: str) -> str:
        asked.append(command)
        return "{}"

    monkeypatch.setattr(gate, "output", status)
    own = {"students": {"taught": {"distillation": {"teacher": "baseline"}}}}
    own |= {"variants": {"baseline": {}, "by-file": {"distillation": {"teacher": "given.pt"}}}}
    config, net = configured(train={"model": "nets:net"}, **own), tmp_path / "nets.py"
    (tmp_path / "given.pt").write_bytes(b"some")

    def refused(changed: Config, text: str = "slow = False\n") -> str:
        net.write_text(text, encoding="utf-8")
        imports.source_of.cache_clear()
        imports.located.cache_clear()
        with pytest.raises(GateError, match=r"since it was made, .* changed\. Run `dvc repro`") as raised:
            gate.check_current(changed)
        return str(raised.value)

    net.write_text("slow = False\n", encoding="utf-8")
    described = stages.described(config, plans(config, environment.machine()))
    environment.write(environment.fingerprint() | described)
    net.write_text("# A remark.\nslow = False\n", encoding="utf-8")
    gate.check_current(config)
    assert asked[0][-5:] == ["train@baseline", "train@by-file", "distil@taught", "bench", "compare"]
    assert "baseline.code.nets.py" in refused(config, "slow = True\n")
    (tmp_path / "given.pt").write_bytes(b"others")
    assert "since it was made, by-file changed" in refused(config)
    (tmp_path / "given.pt").write_bytes(b"some")
    assert "baseline.plan.job.batch_size" in refused(config.with_train(batch_size=128))
    environment.ENVIRONMENT_FILE.write_text('{"hash": "of an older version"}', encoding="utf-8")
    assert "train" in refused(config)


def test_a_comparison_of_other_code_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "output", copies.output)
    write_text(COMPARISON_FILE, "{}")
    (checkout / "code.py").write_text("slow = False", encoding="utf-8")
    (checkout / "params.yaml").write_text("bench:\n  max_minutes: 2.5\n", encoding="utf-8")
    (checkout / "gone.py").touch()
    stage = "{cmd: 'true', deps: [code.py, gone.py], params: [bench, environment.json: [hash]]}"
    (checkout / "dvc.yaml").write_text(
        f"stages:\n  train:\n    foreach: [baseline, ddp]\n    do: {stage}\n"
        f"  bench: {stage}\n  compare: {stage[:-1]}, outs: [reports/comparison.json: {{persist: true}}]}}\n",
        encoding="utf-8",
    )
    dvc = (sys.executable, "-m", "dvc")
    run(*dvc, "init", "--no-scm", "--quiet")
    run(*dvc, "repro", "--quiet")
    gate.check_current(configured())
    (checkout / "code.py").write_text("slow = True", encoding="utf-8")
    (checkout / "params.yaml").write_text("bench:\n  max_minutes: 9.0\n", encoding="utf-8")
    recorded = json.loads((checkout / "environment.json").read_text(encoding="utf-8"))
    (checkout / "environment.json").write_text(json.dumps(recorded | {"hash": "other"}), encoding="utf-8")
    (checkout / "gone.py").unlink()
    with COMPARISON_FILE.open("a", encoding="utf-8") as file:
        file.write("\n")
    stages = (checkout / "dvc.yaml").read_text(encoding="utf-8")
    (checkout / "dvc.yaml").write_text(stages.replace("compare: {cmd: 'true'", "compare: {cmd: ':'"), encoding="utf-8")
    with pytest.raises(GateError, match=r"is out of date: since it was made, (.*) changed") as refused:
        gate.check_current(configured())
    differing = str(refused.value).partition("made, ")[2].partition(" changed")[0].split(", ")
    assert sorted(differing) == [
        "code.py", "command", "environment.json (hash)", "gone.py", "params.yaml (bench)", "reports/comparison.json",
    ]  # fmt: skip


# The copies


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a git and DVC repository with one commit and uncommitted changes, and make it the current directory."""
    path = tmp_path / "repository"
    (path / ".dvc").mkdir(parents=True)
    (path / ".dvc" / "config").touch()
    (path / ".gitignore").write_text("/ignored\n/.dvc/tmp\n/.dvc/config.local\n", encoding="utf-8")
    for name in ("kept", "changed", "deleted"):
        (path / name).write_text("old", encoding="utf-8")
    monkeypatch.chdir(path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "test")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "test@example.org")
    run("git", "init", "--quiet")
    run("git", "add", "--all")
    run("git", "commit", "--quiet", "--message", "first")
    (path / "changed").write_text("new", encoding="utf-8")
    (path / "deleted").unlink()
    (path / "untracked").write_text("new", encoding="utf-8")
    (path / "ignored").write_text("new", encoding="utf-8")
    run("git", "add", "changed")
    (path / "changed").write_text("newest", encoding="utf-8")
    return path


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def contents(root: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in root.iterdir() if path.is_file()}


def test_the_copies_are_the_commit_and_the_work_tree(repository: Path) -> None:
    ours = {".gitignore": (repository / ".gitignore").read_text(encoding="utf-8"), "kept": "old"}
    with copies.copies(commit_of("HEAD")) as (base, head):
        assert contents(base.root) == ours | {"changed": "old", "deleted": "old"}
        assert contents(head.root) == ours | {"changed": "newest", "untracked": "new"}
        for root in (base.root, head.root):
            cache = copies.output([sys.executable, "-m", "dvc", "cache", "dir"], "no cache", root=root)
            assert cache == str(repository / ".dvc" / "cache"), "the copies share the cache"
            known = (root / imports.GATE_COPY).read_text(encoding="utf-8").splitlines()
            assert known == [str(root), str(repository)], "code of the work tree is refused in a copy"
    assert list((repository / ".dvc" / "tmp").iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, GateError])
def test_nothing_is_left_behind_or_touched(repository: Path, error: type[BaseException]) -> None:
    def state() -> tuple[object, ...]:
        git = [path for path in (repository / ".git").rglob("*") if path.is_file()]
        return contents(repository), {path: path.read_bytes() for path in git}, run("git", "worktree", "list")

    run("git", "status")  # refreshes git's index now, so that no later command changes the index
    before, commit = state(), commit_of("HEAD")

    def fail() -> None:
        with copies.copies(commit) as (_, head):
            (head.root / "changed").write_text("in the copy", encoding="utf-8")
            raise error

    with pytest.raises(error):
        fail()
    assert state() == before
    assert list((repository / ".dvc" / "tmp").iterdir()) == []


def test_the_project_may_be_part_of_the_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "project").mkdir()
    for name in (".dvc", "kept"):
        (repository / name).rename(repository / "project" / name)
    run("git", "add", "--all")
    run("git", "commit", "--quiet", "--message", "second")
    monkeypatch.chdir(repository / "project")
    monkeypatch.setenv("GIT_DIR", "elsewhere")  # git sets these variables for a hook
    monkeypatch.setenv("GIT_INDEX_FILE", "elsewhere")
    with copies.copies(commit_of("HEAD")) as roots:
        assert [contents(side.root) for side in roots] == [{"kept": "old"}] * 2


def test_the_head_says_whether_it_is_a_commit(repository: Path) -> None:
    commit = run("git", "rev-parse", "HEAD").strip()
    assert checked_out() == f"{commit}+"
    run("git", "add", "--all")
    run("git", "commit", "--quiet", "--message", "second")
    assert checked_out() == run("git", "rev-parse", "HEAD").strip() != commit == commit_of("HEAD~1")
    for written in ("dvc.lock", "reports/loss.csv"):  # `dvc repro` writes such files
        (repository / written).parent.mkdir(exist_ok=True)
        (repository / written).touch()
        assert not str(checked_out()).endswith("+")
    (repository / "untracked too").touch()
    assert str(checked_out()).endswith("+")


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(("against", "why"), [("no-such", "a shallow clone"), ("kept", "the gate compares with a rev")])
def test_what_is_no_revision_is_refused(against: str, why: str) -> None:
    for file in (gate.JSON_FILE, gate.MARKDOWN_FILE):
        write_text(file, "of an earlier gate")
    with pytest.raises(GateError, match=f"found '{against}', which is no revision in this repository: {why}"):
        gate.run(configured(), against)
    assert not gate.JSON_FILE.exists(), "a promotion would rely on it"
    assert not gate.MARKDOWN_FILE.exists()


def test_an_unforeseen_error_is_no_decision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "measured", lambda *_: 1 / 0)
    with pytest.raises(GateError, match="division by zero"):
        gate.run(configured(), "main")
    assert "Traceback" in capsys.readouterr().err


def test_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(GateError, match=r"not a git repository"):
        gate.run(configured(), "main")


@pytest.mark.usefixtures("repository")
def test_no_dvc_repository(repository: Path) -> None:
    (repository / ".dvc" / "config").unlink()
    (repository / ".dvc").rmdir()
    with pytest.raises(GateError, match=r"^this is not a DVC repository: "):
        gate.run(configured(), "HEAD")


@pytest.mark.usefixtures("repository")
def test_a_side_that_is_no_dvc_repository() -> None:
    """Otherwise DVC would use the repository that contains the copy."""
    run("git", "rm", "-r", "--quiet", "--cached", ".dvc")
    run("git", "commit", "--quiet", "--message", "without")
    with pytest.raises(GateError, match=r"^the base is not a DVC repository"):
        gate.run(configured(), "HEAD")


def test_a_base_that_cannot_measure_itself(repository: Path) -> None:
    commit = run("git", "rev-parse", "HEAD").strip()
    message = rf"^HEAD \({commit[:12]}\) cannot be measured: it has no `python -m pipeline arms`"
    with pytest.raises(GateError, match=message):
        gate.run(configured(), "HEAD")
    (repository / "pipeline").mkdir()
    (repository / "pipeline" / "__main__.py").write_text("raise SystemExit(2)", encoding="utf-8")
    with pytest.raises(GateError, match="older than the gate"):
        check_arms(Copy(repository), "main")
    (repository / "pipeline" / "__main__.py").write_text("", encoding="utf-8")
    check_arms(Copy(repository), "main")


def test_a_base_may_run_the_installed_package(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(copies.__file__).parents[2]))
    with pytest.raises(GateError, match="older than the gate"):
        check_arms(Copy(repository), "main")
    (repository / "dvc.yaml").touch()
    check_arms(Copy(repository), "main")


def test_a_stage_that_fails_is_named(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GateError, match=r"^`dvc repro prepare` failed in .*repository; its output is above"):
        copies.dvc(Copy(repository), "repro", "prepare")
    captured = capfd.readouterr()
    assert (captured.out, "dvc.yaml" in captured.err) == ("", True)


# The page


def test_the_markdown_names_the_score_of_the_job() -> None:
    page = markdown(gated_of(arm(), score=ScoreName(name="token_accuracy")))
    assert "| test token accuracy, points |" in page


@pytest.mark.parametrize(("baseline", "advised"), [(1.0, True), (0.8, False)])
def test_where_something_is_worse_no_more_minutes_are_advised(baseline: float, advised: bool) -> None:
    page = markdown(gated_of(arm(throughput=baseline), arm("head ddp", throughput=0.975)))
    assert ("gate.max_minutes" in page) is advised


@pytest.mark.parametrize(
    ("peak_mib", "expected"), [(200, "3% of memory, 1"), (10, "3% of memory (but at least 1 MiB a process), 1")]
)
def test_memory_s_smallest_difference_is_named_if_it_counts(
    peak_mib: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PEAK", peak_mib * 2**20)
    assert expected in markdown(gated_of(arm()))


def test_a_figure_that_the_head_hides_is_reported() -> None:
    page = markdown(gated_of(arm(), arm("head ddp", rejected=range(14))))
    said = "**Not decided, because the measurement is not to be trusted: throughput (ddp).**\n"
    assert page.startswith(said)
    assert "* ddp: most samples of the base have a throughput, but most samples of the head have none" in page
    assert "\n| ddp | not known untrusted | 1.000" in page


# What the two sides say of themselves


def described(commit: str, correct: int = 9000, train: dict[str, Any] | None = None, **fingerprint: Any) -> Described:
    """Return a side with the variants baseline and ddp, which differs from other sides in its commit alone."""
    own = configured().model_dump(mode="json", include={"variants", "bench", "compare", "gate"})
    about: dict[str, Any] = {
        "device": "cpu",
        "requests": ["describe", "plan", "open", "turn", "close"],
        "environment": "e" * 64,
        "dataset": {"name": "digits", "sha256": "d", "train_count": 60_000, "test_count": 10_000},
        "train": {"epochs": 3, "seeds": [0, 1, 2]} | (train or {}),
    }
    known: dict[str, Any] = {
        "stages": {"train": {}, "bench": {"settings": {"side": commit}}},
        "variants": {"baseline": {}, "ddp": {}},
    }
    accuracies = {name: {seed: (correct + seed) / 10_000 for seed in (0, 1, 2)} for name in own["variants"]}
    return Described(commit, about | own, {"hash": "e" * 64, "relied_on": {}} | known | fingerprint, accuracies)


def decided(
    base: Described,
    head: Described,
    speeds: Mapping[str, float] | None = None,
    *,
    rounds: int = 14,
    interrupted: bool = False,
    packages: Sequence[str] = (),
    **sections: Any,
) -> Gated:
    """Return the decision on both sides as they would be measured. ``speeds``: arm -> its speed. ``sections``: of the
    head's params.yaml."""
    config = configured(**sections)
    effective = settings.judging(config, base.about, "main")
    side_by_side.check(base, head, effective, "main")
    names = side_by_side.chosen(effective, base)
    if not effective.gate.accuracy:
        base, head = base._replace(test_accuracies={}), head._replace(test_accuracies={})
    arms = [
        control_of(names[0], rounds=rounds),
        *(
            arm(f"{side} {name}", throughput=(speeds or {}).get(f"{side} {name}", 1.0), rounds=rounds)
            for name in names
            for side in ("base", "head")
        ),
    ]
    measured = Rounds(arms=tuple(arms), steps=1, turns=1, seconds=299.0, interrupted=interrupted)
    return side_by_side.gated(base, head, measured, config, effective, Unit(), against="main", packages=packages)


def test_the_decision_holds_what_was_measured_on_which_side() -> None:
    base, head = described("a"), described("b+")
    values = json.loads(decided(base, head).to_json())
    assert (values["against"], values["outcome"], values["budget"]) == ("main", "passed", "gate.max_minutes")
    assert [values[side]["commit"] for side in ("base", "head")] == ["a", "b+"]
    assert [arm_["name"] for arm_ in values["base"]["arms"]] == [
        "base baseline, A/A control",
        "base baseline",
        "base ddp",
    ]
    assert [arm_["name"] for arm_ in values["head"]["arms"]] == ["head baseline", "head ddp"]
    assert len(values["head"]["arms"][0]["samples"]) == 14
    assert values["head"]["test_accuracies"]["ddp"] == {"0": 0.9, "1": 0.9001, "2": 0.9002}
    assert values["margins"] == Margins().model_dump()
    for side, of in (("base", base), ("head", head)):
        assert values[side]["made_of"] == stages.made_of(of.fingerprint)


def test_a_variant_that_the_head_lacks_is_added(tmp_path: Path) -> None:
    job = "train: {learning_rate: 1e-3, model: 'my:net', model_options: {'no': '1e-3', 'é': 1e-5}}\n"
    (tmp_path / "params.yaml").write_text(f"{job}variants: {{baseline: {{}}}}\n", encoding="utf-8")
    before = load(tmp_path / "params.yaml").train
    own = {"by-file": {"distillation": {"teacher": "./weights"}}}
    students = {"taught": {"distillation": {"teacher": "baseline"}}}
    effective = configured(variants={"baseline": {}} | own, students=students)
    assert settings.require(tmp_path, effective, effective.model_dump(), ["by-file", "taught"])
    written = yaml.safe_load((tmp_path / "params.yaml").read_text(encoding="utf-8"))
    assert (list(written["variants"]), list(written["students"])) == (["baseline", "by-file"], ["taught"])
    assert load(tmp_path / "params.yaml").train == before


def test_each_side_trains_by_its_own_stage() -> None:
    base, head = described("a"), described("b")
    base.about["variants"]["ddp"] |= {"distillation": {"teacher": "baseline", "model": "small_cnn"}}
    assert side_by_side.trained_by(base, ["baseline", "ddp"]) == ["train@baseline", "distil@ddp"]
    assert side_by_side.trained_by(head, ["baseline", "ddp"]) == ["train@baseline", "train@ddp"]


@pytest.mark.parametrize("differing", ["nothing", "weights", "environment", "packages"])
def test_a_gate_of_equal_sides_says_so(differing: str) -> None:
    base, head = (described("a", teachers={"ddp": differing == weights}) for weights in ("", "weights"))
    if differing == "environment":
        head = head._replace(about={**head.about, "environment": "f" * 64})
    gated = decided(base, head, packages=["torch 1 -> 2"] if differing == "packages" else [])
    assert gated.sides_are_equal is (differing == "nothing")
    assert (side_by_side.EQUAL in gated.remarks) is (differing == "nothing")


def test_what_differs_between_the_sides_is_named() -> None:
    base, head = described("a"), described("b", train={"epochs": 4})
    base.about["gate"]["accuracy"] = False
    del head.about["train"]["seeds"]
    head.about["variants"]["ddp"]["processes"] = 4
    gated = decided(base, head, gate={"accuracy": False}, variants={"baseline": {}, "ddp": {}, "new": {}})
    assert list(gated.remarks) == [
        "Only the head has: new.",
        "train.epochs: base 3, head 4",
        "train.seeds: base [0, 1, 2], head null",
        'variants.ddp.processes: base "auto", head 4',
        "Accuracy was not compared: gate.accuracy is false on both sides.",
    ]
    assert [row.variant for row in gated.variants] == ["baseline", "ddp"]


LOOSE: dict[str, Any] = {
    "compare": {"margins": {"throughput": 0.9, "memory": 0.9, "accuracy": 0.9}, "max_spread": 99.0},
    "gate": {"max_minutes": 0.1, "accuracy": False},
    "bench": {"max_rounds": 1, "turns": 1, "window_seconds": 0.1, "max_foreign_load": 1.0, "max_input_wait": 1.0},
}
SLOWER = {"head baseline": 0.8, "head ddp": 0.8}


def test_a_change_cannot_loosen_its_own_gate(tmp_path: Path) -> None:
    gated = decided(described("a"), described("b", correct=8000), SLOWER, **LOOSE)
    assert (gated.outcome, gated.margins, gated.noise_throughput.margin) == ("worse", Margins(), 0.15)
    assert known(gated.variants[0].accuracy).decision == "worse"
    assert [line for line in gated.remarks if line.endswith(" counts")] == [
        "compare.margins.accuracy: base 0.01, head 0.9; 0.01 counts",
        "compare.margins.memory: base 0.03, head 0.9; 0.03 counts",
        "compare.margins.throughput: base 0.03, head 0.9; 0.03 counts",
        "compare.max_spread: base 0.15, head 99.0; 0.15 counts",
        "gate.accuracy: base true, head false; true counts",
        "gate.max_minutes: base 10.0, head 0.1; 10.0 counts",
        "bench.max_foreign_load: base 0.1, head 1.0; 0.1 counts",
        "bench.max_input_wait: base 0.5, head 1.0; 0.5 counts",
        "bench.max_rounds: base null, head 1; null counts",
        "bench.turns: base 10, head 1; 10 counts",
        "bench.window_seconds: base 1.5, head 0.1; 1.5 counts",
    ]
    effective = settings.judging(configured(**LOOSE), described("a").about, "main")
    assert (effective.gate, effective.bench, effective.compare) == (
        (usual := configured()).gate,
        usual.bench,
        usual.compare,
    )
    (tmp_path / "params.yaml").write_text("variants: {baseline: {}}\n", encoding="utf-8")
    assert settings.require(tmp_path, effective, configured(**LOOSE).model_dump())
    asked = yaml.safe_load((tmp_path / "params.yaml").read_text(encoding="utf-8"))
    assert asked == {"variants": {"baseline": {}}, "bench": {"max_foreign_load": 0.1, "max_input_wait": 0.5}}


def test_a_change_may_be_stricter_than_its_base() -> None:
    base = described("a")
    for section, values in LOOSE.items():
        base.about[section] |= values
    assert decided(base, described("b"), SLOWER).margins == Margins()
    effective = settings.judging(configured(), base.about, "main")
    assert (effective.gate, effective.bench) == (configured().gate, configured().bench)


class Arms(ExitStack):
    """A server that knows the limit of its params.yaml, as read at its start."""

    def __init__(self, root: Path, _: Path) -> None:
        super().__init__()
        self.root = root
        self.restart()

    def restart(self) -> None:
        self.limit = load(self.root / "params.yaml").bench.max_foreign_load

    def describe(self) -> dict[str, Any]:
        about = described(self.root.name).about
        return about | {"bench": about["bench"] | {"max_foreign_load": self.limit}}


@pytest.mark.parametrize(("base", "head"), [(0.5, 0.2), (0.2, 0.5)])
def test_both_sides_reject_by_the_stricter_limit(
    base: float, head: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    sides = tuple(Copy(tmp_path / side) for side in ("base", "head"))
    for (root, _), limit in zip(sides, (base, head), strict=True):
        write_text(root / "params.yaml", f"variants: {{baseline: {{}}}}\nbench: {{max_foreign_load: {limit}}}\n")
    unused = ("checked_out", "commit_of", "check_arms", "dvc", "check", "_compared", "_rounds", "gated")
    fakes: dict[str, Any] = dict.fromkeys(unused, lambda *_, **__: "") | {
        "copies": lambda _: nullcontext(sides),
        "Server": Arms,
        "accuracies_in": lambda *_: ({}, Unit()),
        "arms_of": lambda _, of: limits.extend(server.limit for server, _ in of.values()),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(side_by_side, name, fake)
    monkeypatch.setattr(environment, "read", lambda *_: {})
    side_by_side.measured(configured(bench={"max_foreign_load": head}), "main")
    assert limits == [0.2, 0.2]


def test_rounds_of_both_sides_end_once_a_slowdown_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["baseline", "ddp"]
    arms = {f"{side} {name}": Known() for side in ("base", "head") for name in names} | {"head ddp": Known(step=0.06)}
    server, effective = Timed(arms), configured()
    monkeypatch.setattr("time.monotonic", lambda: server.now)
    base, head = described("a"), described("b")
    specs = side_by_side.arms_of(names, {"base": (server, base.about), "head": (server, head.about)})
    rounds = side_by_side._rounds(effective, specs, 10, side_by_side._compared(base, head, effective, Unit()))
    assert "gate: 5 arms of " in capsys.readouterr().err
    gated = side_by_side.gated(base, head, rounds, effective, effective, Unit(), against="main")
    assert (gated.outcome, len(gated.head.arms[0].samples), rounds.interrupted) == ("worse", 6, False)
    assert decisions(gated)["ddp"] == ("worse", "same")
    assert known(gated.variants[1].throughput.estimate) == pytest.approx(5 / 6, rel=0.02)


@pytest.mark.parametrize(
    ("base", "head", "measured"),
    [
        (["baseline"], ["baseline"], ["baseline"]),
        (["ddp"], ["ddp"], ["baseline", "ddp"]),  # the baseline is always measured, because its noise counts
        (["ddp"], ["baseline"], ["baseline", "ddp"]),
        ([], ["baseline"], ["baseline", "ddp"]),
        (["baseline"], [], ["baseline", "ddp"]),
    ],
)
def test_chosen_variants_are_those_that_either_side_chooses(
    base: list[str], head: list[str], measured: list[str]
) -> None:
    side = described("a")
    side.about["gate"]["variants"] = base
    gated = decided(side, described("b"), gate={"variants": head})
    assert [row.variant for row in gated.variants] == measured
    assert ("Not measured, because gate.variants leaves out: ddp." in gated.remarks) is (measured == ["baseline"])


def test_a_variant_of_the_base_is_measured_on_both() -> None:
    base, head = described("a"), described("b")
    gone = Variant(channels_last=True).model_dump(mode="json")
    for side in (base, head):
        side.about["variants"]["gone"], side.test_accuracies["gone"] = gone, side.test_accuracies["ddp"]
        side.fingerprint["variants"]["gone"] = {}
    base.about["compare"]["baseline"] = "gone"
    gated = decided(base, head, {"head gone": 0.8})
    assert gated.outcome == "worse"
    assert "Only the base has: gone; the head was measured with the base's definition." in gated.remarks
    assert 'compare.baseline: base "gone", head "baseline"; "gone" counts' in gated.remarks
    assert gated.base.arms[0].name == "base gone, A/A control", "the noise of the base's baseline counts"


@pytest.mark.parametrize("section", ["compare", "gate", "bench", "train", "variants"])
def test_a_side_that_does_not_describe_itself_is_refused(section: str) -> None:
    about = {key: value for key, value in described("a").about.items() if key != section}
    with pytest.raises(GateError, match=rf"^main does not report its {section}"):
        side_by_side.complete(about, "main")


@pytest.mark.parametrize(
    ("side", "changed", "message"),
    [
        (0, {"variants": {"gone": {"removed_technique": True}}},
         r"the stricter requirements of main: variants\.gone\.removed_technique: unknown key"),
        (1, {"dataset": {"name": "mnist"}}, r'(?s)trains on other data.*dataset\.name: base "digits", head "mnist"'),
        (1, {"train": {"metric": "scores:mine"}}, r'^train\.metric: base "accuracy", head "scores:mine"'),
        (1, {"train": {"task_options": {"tolerance": 1.0}}}, r"^train\.task_options\.tolerance: base null, head 1\.0"),
        (1, {"train": {"seeds": [0]}}, r"^train\.seeds: the base has \[0, 1, 2\] and the head \[0\]"),
    ],
)  # fmt: skip
def test_sides_that_cannot_be_compared_are_refused(side: int, changed: dict[str, Any], message: str) -> None:
    sides = described("a"), described("b")
    for section, values in changed.items():
        sides[side].about[section] |= values
    with pytest.raises(PipelineError, match=message):
        decided(*sides)


@pytest.mark.parametrize(
    ("base", "head", "told"),
    [
        ((), (), None),
        ((64, 64, False), (64, 64, False), None),
        ((None, None, False), (None, None, False), None),
        ((64, 64, True), (128, 128, True), None),
        ((64, None, False), (64, 64, False), None),
        ((64, 512, False), (64, 512, False), None),
        (
            (64, 64, False),
            (128, 64, False),
            "^ddp: a step of the base has 64 samples, and a step of the head has 128 samples, .* give both the same",
        ),
        ((64, 64, False), (128, 128, True), "both need script.batch_differs: true"),
        ((64, 64, True), (128, 64, False), "both need script.batch_differs: true"),
        ((64, 64, False), (64, 32, False), "base has 64 samples, and a step of the head has 32 samples"),
        (
            (None, None, False),
            (64, 64, False),
            "unknown number of samples, .* 64 samples, so .*script.samples_per_step, for the gate in a",
        ),
        (
            (64, 64, False),
            (None, None, False),
            "64 samples, .* an unknown number of samples, so .*script.samples_per_step, for the gate in a",
        ),
        (
            (None, None, True),
            (None, None, True),
            "the samples of both must be seen; take it out, for the gate in a commit",
        ),
    ],
)
def test_a_speed_needs_equal_steps_on_both_sides(
    base: tuple[Any, ...], head: tuple[Any, ...], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the arms of one variant report; (): nothing, as where the batch is a setting of train."""
    keys = "samples_per_step", "samples_seen", "batch_differs"
    reported = {"base ddp": dict(zip(keys, base, strict=False)), "head ddp": dict(zip(keys, head, strict=False))}
    arms = [
        ArmSpec.of_variant(name, Server(), {}, f"{side} {name}")
        for name in ("baseline", "ddp")
        for side in ("base", "head")
    ]
    control = arms[0]
    monkeypatch.setattr(rounds, "calibrate", lambda arm: Calibration(reported.get(arm.name, {}), 1.0, 0.1))
    monkeypatch.setattr(rounds, "steps_of", lambda *_: (10, Calibration({}, 1.0, 0.1)))
    if told is None:
        assert side_by_side.steps_of([control, *arms], 1.0) == (10, 10.0)
    else:
        with pytest.raises(BenchError, match=told):
            side_by_side.steps_of([control, *arms], 1.0)


def test_another_metric_s_accuracy_is_not_compared() -> None:
    base, head = (described(side, train={"metric": "scores:mine"}, rulers={"metric": side}) for side in "ab")
    base.about["gate"]["accuracy"] = False
    decided(base, head, gate={"accuracy": False})
    with pytest.raises(
        GateError, match=r"^train\.metric: the code of scores:mine differs: the two accuracies are diff"
    ):
        decided(base, head)
    decided(described("a", train={"metric": "scores:mine"}), head)  # an older version has no rulers


@pytest.mark.parametrize(
    ("written", "named"),
    [
        (None, "FileNotFoundError"),
        ("", "JSONDecodeError"),
        ("{}", "KeyError"),
        ('{"runs": [{"seed": 0, "test_correct": NaN, "test_count": 9}]}', "found nan correct of 9"),
        ('{"runs": [{"seed": 0, "test_correct": 0, "test_count": 0}]}', "found 0 correct of 0"),
        ('{"runs": [{"seed": 0, "test_correct": 10, "test_count": 9}]}', "found 10 correct of 9"),
        (
            '{"runs": [{"seed": 0, "test_correct": 8, "test_count": 9}]}',
            r"train\.seeds: the base has \[0, 1, 2\] and the head \[0\]",
        ),
        ('{"runs": []}', r"train\.seeds: the base has \[0, 1, 2\] and the head \[\]"),
    ],
)
def test_results_without_accuracies_are_refused(tmp_path: Path, written: str | None, named: str) -> None:
    (tmp_path / "results").mkdir()
    if written is not None:
        (tmp_path / "results" / "ddp.json").write_text(written, encoding="utf-8")
    with pytest.raises(GateError, match=named):
        decision.accuracies(9, {"ddp": dict.fromkeys(range(3), 0.9)}, accuracies_in(tmp_path, ["ddp"])[0], 0.01)


def test_one_image_a_seed_is_no_loss_of_accuracy() -> None:
    """One of ninety images is more than the margin. If each of three seeds loses one image, the deviation is 0."""
    base, head = ({"baseline": {seed: (81 - lost + seed) / 90 for seed in range(3)}} for lost in (0, 1))
    assert decision.accuracies(90, base, head, 0.01)["baseline"].decision == "undecided"


def test_sides_that_measure_by_different_code_get_a_remark() -> None:
    def told(**codes: str) -> list[str]:
        base, head = (
            described(side, stages={"train": {}, "bench": {"code": {"pipeline/step.py": "a"} | of_side}})
            for side, of_side in (("a", {}), ("b", codes))
        )
        return [remark for remark in decided(base, head).remarks if "with different code" in remark]

    assert told() == []
    [said] = told(**{"pipeline/step.py": "b", "pipeline/data/reader.py": "new"})
    assert said.endswith("come from the measurement: pipeline/data/reader.py, pipeline/step.py.")


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize(("speed", "decision"), [(1.5, "better"), (0.5, "worse")])
def test_a_figure_without_a_changed_digest_is_remarked(speed: float, decision: str, changed: bool) -> None:
    base, head = (
        described(side, stages={"train": {}, "bench": {"settings": {"turns": turns}}})
        for side, turns in (("a", 1), ("b", 1 + changed))
    )
    asked = [remark for remark in decided(base, head, {"head ddp": speed}).remarks if "Find the cause" in remark]
    assert [remark.startswith(f"ddp: throughput {decision}, ") for remark in asked] == ([] if changed else [True])


def test_equal_data_with_different_keys_is_compared() -> None:
    head = described("b")
    head.about["dataset"]["test_repeated_count"] = 3
    assert decided(described("a"), head).outcome == "passed"


def test_an_interrupted_measurement_counts_from_six_rounds_on() -> None:
    gated = decided(described("a"), described("b"), rounds=6, interrupted=True)
    assert "Interrupted after 6 rounds." in gated.remarks
    with pytest.raises(GateError, match=r"^interrupted after 5 rounds; a decision needs at least 6.$"):
        decided(described("a"), described("b"), rounds=5, interrupted=True)


# Complete gates


PLANTED = """
def planted(step, rate):
    import itertools
    import time

    kept = []

    def slow_and_leaking(self, micro_batches):
        batch = next(micro_batches)
        kept.append(batch[0].repeat(200, 1, 1, 1))
        started = time.perf_counter()
        step(self, itertools.chain([batch], micro_batches))
        until = 3 * time.perf_counter() - 2 * started
        while time.perf_counter() < until:
            pass

    return slow_and_leaking, lambda *arguments: 1e-4 * rate(*arguments)
"""
"""A package that makes each step take three times as long, keep its batch in memory, and learn too slowly."""

USED = """
import planted

from pipeline.step import TrainingStep

TrainingStep.__call__, optimizers.learning_rate = planted.planted(TrainingStep.__call__, optimizers.learning_rate)
"""
"""Code that uses the package. A test appends it to training/loop.py."""


@pytest.fixture(scope="module")
def earnest(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone that trains the digits in seconds. It accepts any noise, bias and drift, so that a busy machine
    does not fail a test; the planted losses are far larger."""
    margins = {"throughput": 0.3, "memory": 0.3, "accuracy": 0.02}
    params = {
        "fetch.dataset": "digits",
        "train.epochs": 3,
        "train.seeds": [0, 1, 2],
        "train.batch_size": 64,
        "publish.live": False,
        "bench": {"max_rounds": 7, "window_seconds": 0.2, "max_foreign_load": 1.0, "max_input_wait": 1.0},
        "compare.margins": margins,
        "compare.max_spread": 1000.0,
        "gate": {"max_minutes": 10.0, "must_see": 0.5},
        "variants": {"baseline": {}},
    }
    made = Clone(tmp_path_factory.mktemp("earnest"), params)
    for file, rule in (("results/bench_file.py", "NEGLIGIBLE = 0.001"), ("comparison/stats.py", "LARGEST_DRIFT = 2.6")):
        code = made.path / "pipeline" / file
        plain = code.read_text(encoding="utf-8")
        assert f"\n{rule}\n" in plain
        code.write_text(plain.replace(f"\n{rule}\n", f"\n{rule.split()[0]} = 1000.0\n"), encoding="utf-8")
    made.commit()
    return made


def against_head(clone: Clone, exit_code: int, **variables: Any) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, "-m", "pipeline", "gate", "--against", "HEAD"]
    output = clone.run("sh", "-c", '"$@"; echo "exit code $?"', "gate", *command, **variables)
    assert output.endswith(f"exit code {exit_code}\n"), output
    values: dict[str, Any] = json.loads((clone.path / gate.JSON_FILE).read_text(encoding="utf-8"))
    return output, values["variants"][0]


@pytest.mark.weekly
@pytest.mark.timeout(900)  # takes three minutes on two busy cores
def test_a_comment_passes(earnest: Clone) -> None:
    training = earnest.path / "pipeline" / "training" / "loop.py"
    plain = training.read_text(encoding="utf-8")
    training.write_text(f"{plain}\n# A comment.\n", encoding="utf-8")
    before = earnest.run("git", "status", "--short")
    output, baseline = against_head(earnest, 0)
    assert re.search("with uncommitted changes; side by side, [67] rounds", output), "a look can end it after six"
    assert side_by_side.EQUAL in output
    assert (baseline["accuracy"]["decision"], baseline["accuracy"]["estimate"]) == ("same", 0.0)
    assert earnest.run("git", "status", "--short") == before == " M pipeline/training/loop.py\n"
    assert not (earnest.path / "results").exists(), "the gate wrote results into the work tree"
    training.write_text(plain, encoding="utf-8")


@pytest.mark.weekly
@pytest.mark.timeout(900)  # takes three minutes on two busy cores
def test_a_bad_package_is_caught_by_its_lock_file(earnest: Clone, tmp_path: Path) -> None:
    """Each side runs with the packages of its own lock file, and finds the packages of this Python on PYTHONPATH."""
    lock = earnest.path / "requirements.lock"
    with (earnest.path / "pipeline" / "training" / "loop.py").open("a", encoding="utf-8") as file:
        file.write(USED)
    lock.write_text(write_wheel(tmp_path, "planted", "1.0", "def planted(*given): return given\n"), encoding="utf-8")
    earnest.commit()
    lock.write_text(write_wheel(tmp_path, "planted", "2.0", PLANTED), encoding="utf-8")
    shared = str(Path(pytest.__file__).parents[1])
    output, baseline = against_head(earnest, 1, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path), PYTHONPATH=shared)
    assert "**Worse than the base: throughput (baseline), peak memory (baseline), accuracy (baseline).**\n" in output
    assert "the packages of its own requirements.lock: planted ==1.0 -> ==2.0." in output
    assert {key: baseline[key]["decision"] for key in ("throughput", "memory", "accuracy")} == dict.fromkeys(
        ("throughput", "memory", "accuracy"), "worse"
    )
    assert baseline["throughput"]["estimate"] < 0.5  # about 1/3, because each step takes three times as long
    assert list((earnest.path / ".dvc" / "tmp").glob("gate-*/base")) == []
