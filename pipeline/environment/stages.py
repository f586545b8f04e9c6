"""What each stage and each variant of params.yaml would run: its code, and its settings with their defaults.

dvc.yaml names these as parameters of its stages, beside the fingerprint's hash and never inside it, so that DVC runs a
stage again when what it runs has changed, and only then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Set
from typing import Any, Literal

from pipeline.environment import code, hash_of
from pipeline.params import Config, Train, Variant, catalogue
from pipeline.plans import Plan

MEASURING = ("prepare", "train", "bench")


def described(config: Config, plans: Mapping[str, Plan], only: Collection[str] | None = None) -> dict[str, Any]:
    """``{"stages": {stage: {"code", "settings"}}, "variants": {variant: {"code", "plan"}}}``, plain values.

    ``code`` is file -> digest (``code``). ``plans``: of every variant, on this machine. ``only``: of these stages.
    """
    settings: dict[str, Any] = {
        "fetch": _plain(config.fetch),
        "prepare": {"dataset": config.fetch.dataset, **_plain(config.prepare)},
        "train": _plain(config.train, only=Train.OF_RUNS),
        "bench": {"baseline": config.compare.baseline, **_plain(config.bench)},
        "profile": {"steps": config.profile.steps},
        "infer": {"max_spread": config.compare.max_spread, **_plain(config.infer, but=frozenset({"variants"}))},
        "compare": _plain(config.compare),
    }
    return {
        "stages": {
            stage: {"code": code.of_stage(stage), "settings": each}
            for stage, each in settings.items()
            if only is None or stage in only
        },
        "variants": {name: _of_variant(plan) for name, plan in plans.items()},
    }


HOW_LONG = frozenset({"max_minutes", "max_rounds", "hard_limit", "ablate"})
"""Settings of the bench that change how much is measured, and not what."""


def key(content: Mapping[str, Any], stage: Literal["train", "bench"], variant: str) -> str:
    """Digest of what the variant's figures of this stage depend on beside the data: sessions of one key add up.

    ``content``: of environment.json, with what was ``described``.
    """
    about = content["stages"][stage]
    settings = {name: value for name, value in about["settings"].items() if stage == "train" or name not in HOW_LONG}
    made_of = [hash_of(content, "variants", variant), about["code"], settings, content["variants"][variant]]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def training(plan: Plan) -> dict[str, Any]:
    """What a training depends on, beyond its seed, the data and the environment's hash."""
    return {"code": code.of_stage("train"), "variant": _of_variant(plan)}


def _of_variant(plan: Plan) -> dict[str, Any]:
    """Its code, and what of its plan numbers depend on, with the job at its scale: not the reasons, which are texts,
    nor settings of what it does not apply, or a technique that is new would train again what knows nothing of it."""
    decisive = {
        **_plain(plan, but=frozenset({"requested", "applied", "skipped", "decided", "train"})),
        "requested": _settings(plan.requested),
        "applied": _settings(plan.applied),
        "techniques": [each.name for each in catalogue.in_order(plan.applied)],
        "skipped": sorted(plan.skipped),
        "job": _plain(plan.train, but=Train.OF_RUNS | Train.OF_RESUMING),
    }
    return {"code": code.of_variant(plan), "plan": decisive}


def _settings(variant: Variant) -> dict[str, Any]:
    """Of what it asks for, values that are the defaults among them."""
    used = {key for each in catalogue.asked(variant) for key in catalogue.keys(each)}
    return _plain(variant, only=used)


def _plain(section: Any, only: Set[str] | None = None, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    found: dict[str, Any] = section.model_dump(mode="json", include=only and set(only), exclude=set(but))
    return found
