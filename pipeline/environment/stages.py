"""The code and the settings, including defaults, that each stage and each variant of params.yaml would use.

dvc.yaml names their digests as parameters of its stages. The fingerprint's hash does not cover them, so
a change of one stage's code or settings does not make DVC run the other stages again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any, Literal

from pipeline.environment import code, fingerprint, hash_of, last_written, machine
from pipeline.files import PREPARED, file_sha256, json_sha256
from pipeline.params import Config, Train, Variant, catalogue, load
from pipeline.plans import Plan, plans, relied_on
from pipeline.results.figures import FIGURES

MEASURING = ("prepare", "train", "bench")


def described(
    config: Config,
    plans: Mapping[str, Plan],
    only: Collection[str] | None = None,
    script: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``{"stages": {stage: {"code", "settings"}}, "variants": {variant: {"code", "plan"}}, "digests": {"stages":
    {stage: digest}, "variants": {variant: digest}}, "teachers": {variant: digest}, "rulers": {setting: digest}}`` as
    plain values. A teacher's digest is that of its file of weights; None without such a file. A ruler's digest is that
    of the user's own task or metric (``code.of_function``). ``{"script": script}`` is added, if it is given.

    "code" is file -> digest (``code``). dvc.yaml names "digests", so that dvc.lock does not repeat the code's files for
    each stage. ``plans``: the plan of every variant on this machine. ``only``: the stages to
    describe; None: all. ``script``: what was seen of ``config.script`` (``script.training``); None: what
    environment.json says.
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
    settings["compare"]["figures"] = json_sha256([vars(figure) for figure in FIGURES])
    for stage in ("train", "bench"):
        settings[stage]["figures"] = json_sha256([figure.joins for figure in FIGURES])
    own = {"fetch": [config.fetch.own_module]} if config.fetch.own_module else {}
    files = {"fetch": code.of_files(code.listed(config.fetch))}
    parts = {
        "stages": {
            stage: {
                "code": code.of_stage(stage, own.get(stage, ()), of_script=config.script is not None)
                | files.get(stage, {}),
                "settings": stage_settings,
            }
            for stage, stage_settings in settings.items()
            if only is None or stage in only
        },
        "variants": {name: _of_variant(plan) | _of_script(config, name, script) for name, plan in plans.items()},
    }
    return parts | {
        "digests": {section: {name: json_sha256(about) for name, about in parts[section].items()} for section in parts},
        "teachers": {name: _given_weights(plan) for name, plan in plans.items()},
        "rulers": {
            key: code.of_function(name, code.listed(config.train))
            for key in ("task", "metric")
            if ":" in (name := getattr(config.train, key))
        },
        **({"script": script} if script else {}),
    }


HOW_LONG = frozenset({"max_minutes", "max_rounds", "hard_limit", "ablate"})
"""Settings of the bench that change how much is measured, but not what is measured."""


def key(content: Mapping[str, Any], stage: Literal["train", "bench"], variant: str, **replaced: object) -> str:
    """Return a digest of everything, except the data, that the variant's figures from this stage depend on. Sessions
    with the same key and the same data can be combined.

    ``content``: the content of environment.json, including the values from ``described``. ``replaced``: other settings.
    """
    about = content["stages"][stage]
    decisive = (about["settings"] | replaced).items()
    settings = {name: value for name, value in decisive if stage == "train" or name not in HOW_LONG}
    made_of = [hash_of(content, "variants", variant), about["code"], settings, content["variants"][variant]]
    if stage == "train":  # the bench needs no trained teacher
        made_of.append(content.get("teachers", {}).get(variant))
    return json_sha256(made_of)


def made_of(content: Mapping[str, Any]) -> str | None:
    """Return one digest of the code, settings, plans and given weights of all stages and variants; None if ``content``
    has no stages, because an older version wrote it."""
    if "stages" not in content:
        return None
    return json_sha256([content.get(part) for part in ("stages", "variants", "teachers")])


def training(plan: Plan) -> dict[str, Any]:
    """Return what a training depends on, except its seed, the data and the environment's hash."""
    return {"code": code.of_stage("train"), "variant": _of_variant(plan)}


def _of_variant(plan: Plan) -> dict[str, Any]:
    """Return the variant's code, and the part of its plan that numbers depend on, including the job. Reasons are left
    out, because they are only texts. Settings of unused techniques are left out too: otherwise, each technique that is
    added to the catalogue would cause a retraining of all variants."""
    decisive = {
        **_plain(plan, but=frozenset({"requested", "applied", "skipped", "decided", "train"})),
        "requested": _settings(plan.requested),
        "applied": _settings(plan.applied),
        "techniques": [entry.name for entry in catalogue.in_order(plan.applied)],
        "skipped": sorted(plan.skipped),
        "job": _plain(plan.train, but=Train.OF_RUNS | Train.OF_RESUMING),
    }
    return {"code": code.of_variant(plan), "plan": decisive}


def script_seen(config: Config, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what ``content`` (environment.json) says of the script; None if it says nothing of the command of a
    variant, or if a file that the script reads has changed since."""
    seen: dict[str, Any] = content.get("script") or {}
    known = seen.get("commands", [])
    if config.script is None or not all(command in known for command in commands_of(config).values()):
        return None
    return seen if seen["files"] == code.of_opened([*map(Path, seen["files"])]) else None


def commands_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return variant -> what it runs, as plain values."""
    commands = {name: config.command_of(name) for name in config.variants}
    return {name: {"words": [*words], "variables": variables} for name, (words, variables, *_) in commands.items()}


def record() -> dict[str, Any]:
    """Return what several hosts must have in common, as plain values: settings, code, data, hardware and software.

    They are computed, not read from environment.json, which hosts with one file system share. Raises PipelineError.
    """
    config, own = load(), machine()
    about = fingerprint(relied_on(config)) | described(config, plans(config, own))
    parts = [*about["stages"].values(), *about["variants"].values()]
    return {
        **config.model_dump(mode="json", exclude={"launch", "publish"}),
        "code": {file: digest for part in parts for file, digest in part["code"].items()},
        "data": {file.name: file_sha256(file) for file in PREPARED.glob("*.json")},
        "machine": own.model_dump(mode="json", exclude={"installed"}) | {"installed": sorted(own.installed)},
        "hardware": about["hardware"],
        "software": about["software"] | about["relied_on"],
        "environment": about["settings"],
    }


def _of_script(config: Config, name: str, seen: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what the variant of a script runs, and the digests of the files that the script reads; without a script,
    nothing."""
    if config.script is None:
        return {}
    files = (last_written().get("script") or {} if seen is None else seen).get("files", {})
    return {
        "script": _plain(config.script, but=config.script.OF_MEASURING),
        "command": commands_of(config)[name],
        "opened": code.of_opened([*map(Path, files)]),
    }


def _given_weights(plan: Plan) -> str | None:
    given = plan.applied.distillation and plan.applied.distillation.file
    return file_sha256(given) if given and given.is_file() else None  # the training reports a missing file


def _settings(variant: Variant) -> dict[str, Any]:
    """Return the settings of the techniques that the variant asks for, default values included."""
    used = {key for entry in catalogue.requested(variant) for key in catalogue.keys(entry)}
    return _plain(variant, only=used)


def _plain(section: Any, only: Set[str] | None = None, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    values: dict[str, Any] = section.model_dump(mode="json", include=only and set(only), exclude=set(but))
    return values
