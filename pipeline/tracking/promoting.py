"""Make the best variant's model the registry's champion, if the commit that is checked out has passed the gate."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.comparison.comparison_file import Champion, Comparison
from pipeline.errors import PipelineError, count, say
from pipeline.files import PREPARED, read_json
from pipeline.params import Config
from pipeline.processes import importing
from pipeline.results import REPORTS
from pipeline.tracking import comparisons, contents, stores
from pipeline.tracking.comparisons import COMPARISON, RUN, Child, Wanted
from pipeline.tracking.stores import Store, StoredRun

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

GATE = (REPORTS / "gate.json", REPORTS / "gate.md")
ALIAS = "champion"
GATE_AGAIN = "Run `python -m pipeline gate --against REVISION`."
FEWEST_SESSIONS = 3
"""The number of sessions that a promotion needs, because fewer sessions say too little about whether a gain lasts."""
TOO_FEW = 3
"""Exit code: nothing was promoted, because more sessions are needed, or a gate with a change."""


class PromotionError(PipelineError):
    """No champion can be named. The message says why and what to do."""


def promote(config: Config, commit: str | None, root: Path = Path()) -> int:
    """Register the model of the best variant as ``publish.registered_model``, and give it the alias ``champion``.

    If no variant pays, the baseline is the best variant.

    The model is logged anew, because somebody else may have logged the model that is in the store. The new model is
    built from the local weights, whose digest the result names. The version's tags and description hold the evidence:
    the gate's decision and commits, the verdict, the gain (from measurements that were not used to choose the variant),
    and links to the variant's run and to the comparison. The gate's report is added to the comparison's run. Each call
    creates another version.

    ``commit``: the commit checked out, with "+" if files differ from it. Raises PromotionError unless the gate passed
    for this very commit and MLflow holds the comparison. Raises ResultError for files that do not match their record.

    Returns 0 after a promotion. In three cases it prints a message, changes nothing and returns ``TOO_FEW``: too few
    sessions measured the gain, or the gain is not decided if some sessions choose the best variant and the other
    sessions measure its gain.
    """
    gate = _passed(root, commit)
    if gate.get("sides_are_equal"):
        say(f"not promoted: {gate['against']} has the same code and settings. {GATE_AGAIN}", file=sys.stderr)
        return TOO_FEW
    wanted = comparisons.wanted(config, root)
    if wanted is None or wanted.comparison is None:
        stale = ", ".join(wanted.stale) if wanted else ""
        why = f" (reports/comparison.json was made from other inputs: {stale})" if stale else ""
        raise PromotionError(
            f"there is no comparison of the results that are here{why}; run `dvc repro`, which makes it."
        )
    comparison = wanted.comparison
    best = comparison.champion
    variant = best.variant if best else comparison.baseline
    if best and (lacking := _undecided(comparison, best)):
        again = "Run `python -m pipeline bench --again` on another day."
        say(f"not promoted: {lacking} {again}", file=sys.stderr)
        return TOO_FEW
    # Take the first seed. The seed with the highest test accuracy would be chosen partly by luck, and look too good.
    child = next((child for child in wanted.children.values() if child.variant == variant), None)
    if child is None:
        raise PromotionError(f"the comparison names {variant!r}, which is not under variants; run `dvc repro`.")
    data = child.result.dataset
    if data is None or gate["dataset"]["sha256"] != data.sha256:
        raise PromotionError(f"the gate measured on another data set than that of {child.result_file}. {GATE_AGAIN}")
    if variant not in (measured := [row["variant"] for row in gate["variants"]]):
        raise PromotionError(
            f"the gate measured {', '.join(measured)}, but not {variant}: set gate.variants. {GATE_AGAIN}"
        )
    if child.model_file is None:
        raise PromotionError(
            f"the model of {child.name} cannot be made here: publish.models must be true, and its weights and "
            f"{PREPARED} must exist; `dvc pull` or `dvc repro` restores both."
        )
    uri = stores.address(root)
    stores.set_defaults()  # first, because MLflow reads some of these settings when it is imported
    with importing():
        from pipeline.tracking import logged_models
    try:
        with stores.locked(uri):
            store = stores.open_store(uri, root, config.publish.experiment)
            parent, run = _stored(store, wanted, child)
            verdict = contents.verdicts(comparison)[variant]
            tags = _evidence(gate, child, verdict, parent, run) | contents.champion(comparison)
            model = logged_models.log(store, run.run_id, child)
            version = _registered(store, config.publish.registered_model, model, tags)
            for file in GATE:
                if (root / file).exists():
                    store.log_file(parent.run_id, root / file, "gate")
    except PipelineError:
        raise
    except logged_models.NotLoggable as error:
        raise PromotionError(f"the model of {child.name} cannot be made: {error}") from error
    except Exception as error:  # any error of MLflow, its database or its server
        raise PromotionError(f"{stores.describe(uri, error)} Run `python -m pipeline promote` again.") from error
    name = config.publish.registered_model
    say(f"MLflow: {child.name} is version {version} of {name} and its {ALIAS}: {stores.page(uri)}/#/models/{name}")
    return 0


def _undecided(comparison: Comparison, best: Champion) -> str | None:
    """Return why the gain of the best variant is not sure yet; None if it is sure."""
    sessions = sessions_of(comparison, best.variant)
    if sessions < FEWEST_SESSIONS:
        return (
            f"{best.variant} pays in {count(sessions, 'session')} of the bench, but {FEWEST_SESSIONS} sessions are "
            f"required, each with all {best.among} variants that pay."
        )
    if best.quantity and not (best.ratio and best.ratio.decision == "better"):
        return (
            f"{best.among} variants pay by {best.quantity}. If some sessions choose the best variant and the "
            "other sessions measure its gain, this gain is not decided."
        )
    return None


def sessions_of(comparison: Comparison, variant: str) -> int:
    """Return the smallest number of sessions behind any trusted ratio of the variant, the champion's gain included; 0
    if no ratio is trusted."""
    gain = comparison.champion and comparison.champion.ratio
    return min(
        (
            ratio.session_count
            for compared in comparison.variants
            for ratio in (compared.throughput, compared.memory, gain)
            if compared.variant == variant and ratio and not ratio.why_untrusted
        ),
        default=0,
    )


def _passed(root: Path, commit: str | None) -> dict[str, Any]:
    """Return the gate's decision. Raises PromotionError unless ``commit`` passed the gate."""
    try:
        gate: dict[str, Any] = read_json(root / GATE[0])
        outcome, judged, against = gate["outcome"], gate["head"]["commit"], gate["against"]
        _ = gate["dataset"]["sha256"], gate["base"]["commit"], [row["variant"] for row in gate["variants"]]
    except FileNotFoundError:
        raise PromotionError(
            f"{GATE[0]} is missing, but only a commit that passed the gate is promoted. {GATE_AGAIN}"
        ) from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise PromotionError(f"{GATE[0]} cannot be read ({error!r}). {GATE_AGAIN}") from None
    if outcome != "passed":
        raise PromotionError(f"the gate did not pass against {against}: {outcome}. {GATE[1]} says why.")
    if commit is None:
        raise PromotionError(
            "no commit is checked out here, so the champion's code could not be found again: commit the files."
        )
    if judged != commit:
        raise PromotionError(f"the gate judged commit {judged}, but {commit} is checked out. {GATE_AGAIN}")
    if commit.endswith("+"):
        raise PromotionError(f"files differ from commit {commit[:-1]}: commit them, then run the gate again.")
    return gate


def _stored(store: Store, wanted: Wanted, child: Child) -> tuple[StoredRun, StoredRun]:
    """Return the runs of the comparison and of ``child`` in the store. Raises PromotionError if one is missing."""
    stored = [run for run in store.runs(wanted.key) if run.tags.get(COMPARISON) == wanted.key and run.is_complete]
    parents = [run for run in stored if RUN not in run.tags]
    runs = [run for run in stored if run.tags.get(RUN) == child.key]
    if not parents or not runs:
        raise PromotionError(f"MLflow does not hold {wanted.name} yet: run `python -m pipeline publish`.")
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
        "run_id": run.run_id,
        "comparison_run_id": parent.run_id,
    }


def _registered(store: Store, name: str, model: LoggedModel, tags: Mapping[str, str]) -> str:
    """Register ``model`` as a version with ``tags``, make it the champion, and return its number."""
    from mlflow.exceptions import MlflowException

    client = store.client
    try:
        client.create_registered_model(
            name, description=f"Models that passed the gate; `{ALIAS}` is the latest of them."
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        name, model.artifact_location, tags["run_id"], dict(tags), await_creation_for=0, model_id=model.model_id
    )
    runs = stores.page(store.uri, store.experiment_id)
    client.update_model_version(
        name,
        version.version,
        f"Variant **{tags['variant']}**: {tags['verdict']}. Commit `{tags['commit']}` passed the gate against "
        f"{tags['gate.against']}. [Its run]({runs}/{tags['run_id']}), [the comparison]({runs}/"
        f"{tags['comparison_run_id']}) with the report and the gate's decision among its artifacts.",
    )
    client.set_registered_model_alias(name, ALIAS, version.version)
    return str(version.version)
