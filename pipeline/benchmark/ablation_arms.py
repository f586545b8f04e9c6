"""The arms that isolate each technique of a variant: the baseline with it alone, and the variant without it."""

from __future__ import annotations

from pipeline.benchmark.server import ArmSpec, Server
from pipeline.params import Config, Machine, misplaced
from pipeline.params import techniques as techniques_of
from pipeline.plans import plan


def isolating(config: Config, machine: Machine, server: Server) -> tuple[list[ArmSpec], dict[str, dict[str, str]]]:
    """Return the arms that isolate each technique of the variants to ablate, and why some techniques have no arms."""
    arms: list[ArmSpec] = []
    without: dict[str, dict[str, str]] = {}
    base = plan(config, config.compare.baseline, machine).applied
    for name in config.bench.ablate:
        ours = plan(config, name, machine)
        requested, applied = techniques_of(ours.requested), techniques_of(ours.applied)
        without[name] = {key: reason for key, reason in ours.skipped.items() if key in requested}
        techniques = {
            technique: keys
            for technique, keys in applied.items()
            if any(getattr(ours.applied, key) != getattr(base, key) for key in keys)
        }
        shared = applied.keys() - techniques.keys()
        without[name] |= dict.fromkeys(sorted(shared), f"{config.compare.baseline} applies it too")
        if len(techniques) < 2:
            without[name] |= dict.fromkeys(techniques, f"it is all that {name} changes: the variant itself shows it")
            continue
        for technique, keys in techniques.items():
            added = base.model_copy(update={key: getattr(ours.applied, key) for key in keys})
            if misplaced(added):
                without[name][technique] = (
                    f"it goes with the variant's parallelism, which {config.compare.baseline} lacks"
                )
                continue
            reduced = ours.applied.model_copy(update={key: getattr(base, key) for key in keys})
            alone, rest = f"{config.compare.baseline} with {technique} of {name}", f"{name} without {technique}"
            arms += [
                ArmSpec(alone, "with", name, technique, server, added.model_dump(mode="json")),
                ArmSpec(rest, "without", name, technique, server, reduced.model_dump(mode="json")),
            ]
    return arms, without
