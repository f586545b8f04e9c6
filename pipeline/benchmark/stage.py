"""The bench stage: steady-state speed and memory of all variants, side by side, with an A/A arm; and sessions of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pipeline import environment, files
from pipeline.benchmark import ablation_arms, sitting
from pipeline.benchmark.calibration import Calibration, calibrate, steps_of
from pipeline.benchmark.outlook import outlook
from pipeline.benchmark.rounds import FEWEST_ROUNDS, fewest_rounds, measure, turns_on
from pipeline.benchmark.server import ArmSpec, Server
from pipeline.environment import stages
from pipeline.params import Config, Machine
from pipeline.plans import plans
from pipeline.results import (
    BENCH_FILE,
    KEPT_BENCHES,
    SESSIONS,
    Bench,
    Dataset,
    Flops,
    Ledgers,
    R,
    read_sessions,
    rejections,
)


def run(config: Config, machine: Machine, *, again: bool = False) -> None:
    """Measure all variants and write ``bench.json``; with ``again``, write one more session into its own file.

    If interrupted, write the complete rounds and raise KeyboardInterrupt. Raises PipelineError.
    """
    settings, baseline = config.bench, config.compare.baseline
    seconds, max_rounds, fewest = 60 * settings.max_minutes, settings.max_rounds, fewest_rounds(settings)
    ended = sitting.begin()
    # Read before anything is measured: code that is edited during the bench was not measured.
    made = plans(config, machine)
    commit, content = environment.checked_out(), environment.read() | stages.described(config, made)
    with Server() as server:
        about = server.describe()
        sent = {name: server.plan(name, each.model_dump(mode="json")) for name, each in config.variants.items()}
        specs = [ArmSpec(name, "variant", name, None, server, plan) for name, plan in sent.items()]
        # This is also a warm-up: from here on the files are in the page cache.
        samples = {}
        for number, spec in enumerate(specs, 1):
            print(f"bench: a first look at {spec.name}, {number} of {len(specs)}", flush=True)
            samples[spec.name] = calibrate(spec, ledgers=not again)
        ledgers = _known(samples, "ledgers", Ledgers)
        flops = _known(samples, "flops", Flops)
        ablated, not_ablated = ablation_arms.isolating(config, made, server)
        control = ArmSpec(f"{baseline}, A/A control", "aa_control", baseline, None, server, sent[baseline])
        arms = [*specs, *ablated, control]
        others = [samples[arm.variant] for arm in arms if arm.variant != baseline]  # the first also started the server
        steps, samples[baseline] = steps_of(control, settings.window_seconds, others)
        round_seconds = sum(samples[arm.variant].seconds(steps) for arm in arms)
        said = outlook(len(arms), steps, round_seconds, seconds=seconds, max_rounds=max_rounds, fewest=fewest)
        print(f"bench: {said}", flush=True)
        turns = turns_on(about["device"], settings)
        rounds = measure(
            arms,
            seconds=seconds,
            max_rounds=max_rounds,
            steps=steps,
            turns=turns,
            fewest=fewest,
            # Like max_minutes, the margins change how much is measured, not what. dvc.yaml does not name them, so a
            # changed margin is applied to the rounds that exist.
            margins={
                "samples_per_second": config.compare.margins.throughput,
                "peak_memory_bytes": config.compare.margins.memory,
                **({"joules_per_sample": margin} if (margin := config.compare.margins.energy) else {}),
            },
            max_spread=config.compare.max_spread,
        )
    session = ended()
    bench = Bench(
        environment=about["environment"],
        commit=commit,
        config={"train": about["train"], "bench": about["bench"], "variants": about["variants"]},
        dataset=Dataset.model_validate(about["dataset"]),
        baseline=baseline,
        steps=rounds.steps,
        turns=rounds.turns,
        seconds=rounds.seconds,
        interrupted=rounds.interrupted,
        arms=rounds.arms,
        ledgers=ledgers,
        flops=flops,
        not_ablated=not_ablated,
        session=session,
        keys={name: stages.key(content, "bench", name) for name in config.variants},
    )
    file = SESSIONS / _name(bench) if again else BENCH_FILE
    files.write_text(file, bench.to_json())
    if again:
        for earlier in recalled(bench):
            print(f"bench: an earlier bench of the same counts as a session too: {earlier}", flush=True)
    else:  # not a session unless asked for: an interval over two sessions can leave open what one session decides
        files.write_text(KEPT_BENCHES / _name(bench), bench.to_json())
    print(f"bench: {bench.rounds} rounds in {rounds.seconds:.0f} s, in {file}", flush=True)
    for arm in rounds.arms:
        if arm.role == "variant" and arm.settled:
            print(f"bench: {arm.name} was settled after {len(arm.samples)} rounds", flush=True)
        for line in rejections(arm):
            print(f"bench: {arm.name} {line}", flush=True)
    if why := next((each.why_no_energy for arm in rounds.arms for each in arm.samples if each.why_no_energy), None):
        print(f"bench: energy is unknown, at least in a round: {why}", flush=True)
    if rounds.interrupted:
        raise KeyboardInterrupt


def recalled(bench: Bench) -> list[Path]:
    """Move the kept benches that measured the baseline and a variant as ``bench`` did to the sessions; return their new
    files. A bench with too few rounds to bound a ratio stays where it is."""
    found = []
    for kept in read_sessions(KEPT_BENCHES):
        same = {name for name, key in bench.keys.items() if kept.keys.get(name) == key}
        if bench.baseline in same and len(same) > 1 and kept.dataset == bench.dataset and kept.rounds >= FEWEST_ROUNDS:
            found.append(SESSIONS / _name(kept))
            files.write_text(found[-1], kept.to_json())
            (KEPT_BENCHES / _name(kept)).unlink()
    return found


def _name(bench: Bench) -> str:
    """Return the name of the bench's file among other sessions: the time at which the bench started."""
    return f"{re.sub('[^0-9T]', '', bench.session.start_utc)[:15]}.json"


def _known(samples: Mapping[str, Calibration], key: str, record: type[R]) -> dict[str, R]:
    """Return the records under ``key`` by variant, without the variants that have none."""
    found = {name: sample.answer[key] for name, sample in samples.items()}
    return {name: record.model_validate(values) for name, values in found.items() if values is not None}
