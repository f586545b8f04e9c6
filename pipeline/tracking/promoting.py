"""The best variant's model as the registry's champion, once the gate has let its commit pass."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import Config, PipelineError
from pipeline.results import REPORTS
from pipeline.tracking import comparisons, labels, stores, views
from pipeline.tracking.comparisons import COMPARISON, RUN, Child, Wanted
from pipeline.tracking.reconciliation import StoredRun
from pipeline.tracking.stores import Store

GATE = (REPORTS / "gate.json", REPORTS / "gate.md")
ALIAS = "champion"


class PromotionError(PipelineError):
    """There is no champion to name. The message says why and what to do."""


def promote(config: Config, commit: str | None, root: Path = Path()) -> None:
    """Register the model of the best variant as ``publish.registered_model``, and give it the alias ``champion``.

    Its version carries the evidence: the gate's decision and commits, the verdict, links to its run and to the
    comparison, which gets the gate's report. Again, it changes nothing. ``commit``: what is checked out, with "+" if
    files differ from it. Raises PromotionError unless the gate let this very commit pass and MLflow holds the model.
    """
    gate = _passed(root, commit)
    wanted = comparisons.wanted(config, root)
    compared = labels.compared(root)
    if wanted is None or not compared:
        raise PromotionError("there is no comparison of the results that are here; run `dvc repro`, which makes it.")
    variant = best(compared)
    # The first seed: the one with the highest test accuracy would be chosen by luck, and its accuracy flatter it.
    child = next(each for each in wanted.children.values() if each.variant == variant)
    uri = stores.address(root)
    stores.set_defaults()
    try:
        with stores.locked(uri):
            store = stores.open_store(uri, root, config.publish.experiment)
            parent, run = _stored(store, wanted, child)
            tags = _evidence(gate, child, labels.verdicts(compared)[variant], parent, run)
            version = _registered(store, config.publish.registered_model, run, tags, gate, parent)
            for file in GATE:
                if (root / file).exists():
                    store.client.log_artifact(parent.run_id, str(root / file), "gate")
    except PipelineError:
        raise
    except Exception as error:  # whatever MLflow, its database or its server raises
        raise PromotionError(f"{stores.describe(uri, error)} Run `python -m pipeline promote` again.") from error
    name = config.publish.registered_model
    print(f"MLflow: {child.name} is version {version} of {name}, its {ALIAS}: {views.page(uri)}/#/models/{name}")


def best(compared: Mapping[str, Any]) -> str:
    """Of the variants that pay, and so lose no accuracy, the one that gains most speed, then memory; else the baseline.

    ``compared``: the content of ``reports/comparison.json``. Gains that are not decided count for nothing.
    """

    def gains(each: Mapping[str, Any]) -> tuple[float, float]:
        speed, memory = (
            ratio["estimate"] if ratio and ratio["decision"] == "better" else 1.0
            for ratio in (each["throughput"], each["memory"])
        )
        return speed, -memory

    paying = [each for each in compared["variants"] if each["verdict"] == "pays"]
    return str(max(paying, key=gains)["variant"] if paying else compared["baseline"])


def _passed(root: Path, commit: str | None) -> dict[str, Any]:
    """The gate's decision, if it let ``commit`` pass."""
    again = "Run `python -m pipeline gate --against REVISION`."
    try:
        gate: dict[str, Any] = json.loads((root / GATE[0]).read_text(encoding="utf-8"))
        outcome, judged = gate["outcome"], gate["head"]["commit"]
    except FileNotFoundError:
        raise PromotionError(f"{GATE[0]} is missing: only what has passed the gate is promoted. {again}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise PromotionError(f"{GATE[0]} cannot be read ({error!r}). {again}") from None
    if outcome != "passed":
        raise PromotionError(f"the gate did not pass against {gate['against']}: {outcome}. {GATE[1]} says why.")
    if commit is None:
        raise PromotionError("no commit is checked out here, so nobody could find the champion's code again.")
    if judged != commit:
        raise PromotionError(f"the gate judged commit {judged}, but {commit} is checked out. {again}")
    if commit.endswith("+"):
        raise PromotionError(f"files differ from commit {commit[:-1]}: commit them, then run the gate again.")
    return gate


def _stored(store: Store, wanted: Wanted, child: Child) -> tuple[StoredRun, StoredRun]:
    """The runs of the comparison and of ``child`` in the store."""
    stored = [run for run in store.runs(wanted.key) if run.tags.get(COMPARISON) == wanted.key and run.is_complete]
    parents = [run for run in stored if RUN not in run.tags]
    runs = [run for run in stored if run.tags.get(RUN) == child.key]
    if not parents or not runs:
        raise PromotionError(f"MLflow does not hold {wanted.name} yet: run `python -m pipeline publish`.")
    model = runs[0].tags.get("model", "publish.models is false")
    if not model.startswith("models:/"):
        raise PromotionError(f"the model of {child.name} is not in MLflow: {model}. Put that right, and publish again.")
    return parents[0], runs[0]


def _evidence(gate: Mapping[str, Any], child: Child, verdict: str, parent: StoredRun, run: StoredRun) -> dict[str, str]:
    return {
        "commit": gate["head"]["commit"],
        "variant": child.variant,
        "seed": str(child.run.seed),
        "verdict": verdict,
        "model_sha256": child.run.model_sha256,
        "environment": child.result.environment,
        "gate": gate["outcome"],
        "gate.against": gate["against"],
        "gate.base_commit": gate["base"]["commit"] or "not known",
        "gate.mode": gate["mode"],
        "run_id": run.run_id,
        "comparison_run_id": parent.run_id,
    }


def _registered(
    store: Store, name: str, run: StoredRun, tags: Mapping[str, str], gate: Mapping[str, Any], parent: StoredRun
) -> str:
    """Register the model of ``run``, unless that was done before; tag the version and name it the champion."""
    from mlflow.exceptions import MlflowException

    client, model_id = store.client, run.tags["model"].removeprefix("models:/")
    try:
        client.create_registered_model(
            name, description=f"Models that passed the gate; `{ALIAS}` is the latest of them."
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = client.get_logged_model(model_id).artifact_location
    known = [each for each in client.search_model_versions(f"name = '{name}'") if each.source == source]
    version = (
        known[0]
        if known
        else client.create_model_version(name, source, run.run_id, await_creation_for=0, model_id=model_id)
    )
    for key, value in tags.items():
        client.set_model_version_tag(name, version.version, key, value)
    runs = f"{views.page(store.uri)}/#/experiments/{store.experiment_id}/runs"
    client.update_model_version(
        name,
        version.version,
        f"Variant **{tags['variant']}**: {tags['verdict']}. Commit `{tags['commit']}` passed the gate against "
        f"{gate['against']}. [Its run]({runs}/{run.run_id}), [the comparison]({runs}/{parent.run_id}) with the report "
        "and the gate's decision among its artifacts.",
    )
    client.set_registered_model_alias(name, ALIAS, version.version)
    return str(version.version)
