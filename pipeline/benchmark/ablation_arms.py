"""The arms that isolate a technique of a variant: the baseline with the technique, and the variant without it."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.benchmark.server import ArmSpec, Server
from pipeline.params import Config, misplaced
from pipeline.params import techniques as techniques_of
from pipeline.plans import Plan


def isolating(
    config: Config, plans: Mapping[str, Plan], server: Server
) -> tuple[list[ArmSpec], dict[str, dict[str, str]]]:
    """Return the arms that isolate techniques of the variants in ``bench.ablate``.

    Also return why other techniques of these variants get no arms: variant -> technique -> reason.
    ``plans``: variant -> plan.
    """
    arms: list[ArmSpec] = []
    without: dict[str, dict[str, str]] = {}
    base = plans[config.compare.baseline].applied
    for name in config.bench.ablate:
        ours = plans[name]
        requested, applied = techniques_of(ours.requested), techniques_of(ours.applied)
        without[name] = {key: reason for key, reason in ours.skipped.items() if key in requested}
        techniques = {
            technique: keys
            for technique, keys in applied.items()
            if any(getattr(ours.applied, key) != getattr(base, key) for key in keys)
        }
        shared = applied.keys() - techniques.keys()
        without[name] |= dict.fromkeys(sorted(shared), f"{config.compare.baseline} applies this technique too")
        if len(techniques) < 2:
            alone = f"{name} changes nothing else, so its own figures show the effect"
            without[name] |= dict.fromkeys(techniques, alone)
            continue
        for technique, keys in techniques.items():
            added = base.model_copy(update={key: getattr(ours.applied, key) for key in keys})
            if misplaced(added):
                without[name][technique] = (
                    f"it works only with the variant's parallelism, which {config.compare.baseline} lacks"
                )
                continue
            reduced = ours.applied.model_copy(update={key: getattr(base, key) for key in keys})
            alone, rest = f"{config.compare.baseline} with {technique} of {name}", f"{name} without {technique}"
            made = [server.plan(arm, each.model_dump(mode="json")) for arm, each in ((alone, added), (rest, reduced))]
            arms += [
                ArmSpec(alone, "with", name, technique, server, made[0]),
                ArmSpec(rest, "without", name, technique, server, made[1]),
            ]
    return arms, without
