from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline import params
from pipeline.errors import ConfigError, redacted
from pipeline.params import Config, Machine, load, parse
from pipeline.plans import plan, plans

ROOT = Path(__file__).parent.parent
SHIPPED: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))

PLAIN_CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=False)
NEW_CPU = Machine(gpus=0, gpu_native_bf16=False, cpu_native_bf16=True)
OLD_GPUS = Machine(gpus=2, gpu_native_bf16=False, cpu_native_bf16=True)
NEW_GPUS = Machine(gpus=8, gpu_native_bf16=True, cpu_native_bf16=False)


def with_key(dotted: str, value: Any) -> dict[str, Any]:
    """Return the content of the shipped params.yaml with one key changed."""
    values = copy.deepcopy(SHIPPED)
    *parents, last = (int(part) if part.isdigit() else part for part in dotted.split("."))
    section: Any = values
    for parent in parents:
        section = section[parent]
    section[last] = value
    return values


def complaint(values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(values)
    return str(caught.value)


def test_the_shipped_params_say_what_the_defaults_are() -> None:
    """params.yaml shows the defaults; only the variants and the lists of some variants have no default."""
    lists = {section: {"variants": SHIPPED[section]["variants"]} for section in ("profile", "infer")}
    assert parse(SHIPPED) == parse({"variants": SHIPPED["variants"], **lists})


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(SHIPPED).train.epochs = 5  # type: ignore[misc]


MISTAKES = [
    ("trian", {}, "unknown key. Did you mean 'train'? Allowed: fetch, prepare,", ""),
    ("train.augment.flp", True, "unknown key. Did you mean 'flip'? Allowed: crop_padding, flip, cutout.", ""),
    ("train.augment.xyz", True, "unknown key. Allowed: crop_padding, flip, cutout.", ""),
    ("variants.memory.activation_checkpoint", True, "unknown key", "Did you mean 'activation_checkpointing'?"),
    ("variants.memory.activation_checkpointing", 1.5, "found 1.5;", "'selective' or a number below 1."),
    ("variants.memory.activation_checkpointing", "some", "found 'some';", "true or false or 'selective' or a number."),
    ("train.model", "my_models.mlp", "found 'my_models.mlp';", "module:factory of your own, such as my_models:mlp."),
    ("train.epochs", "three", "found 'three';", "a whole number."),
    ("train.epochs", 2.5e20, "found 2.5e+20;", "a whole number."),
    ("train.epochs", True, "found true;", "a whole number."),
    ("train.epochs", 0, "found 0;", "above 0."),
    ("train.warmup_fraction", 2, "found 2;", "up to 1."),
    ("compare.target_accuracy", 1, "found 1;", "below 1."),
    ("train.learning_rate", float("inf"), "found inf;", "a finite number."),
    ("train.augment.flip", "yes", "found 'yes';", "true or false."),
    ("train.optimizer", "adam", "found 'adam';", "'sgd' or 'adamw'. Did you mean 'adamw'?"),
    ("train.seeds", [], "found [];", "1 or more entries."),
    ("train.seeds", [0, 0], "found [0, 0];", "allowed: each seed once."),
    ("train.seeds.1", -1, "found -1;", "from 0."),
    ("train", None, "found null;", "a mapping, such as {}"),
    ("variants", None, "found null;", "a mapping."),
    ("fetch.mirror", False, "found false;", "text."),
    ("publish.experiment", "", "found '';", "text that is not empty."),
    ("publish.registered_model", "a/b", "found 'a/b';", "text that matches ^[^/:]+$."),
    ("prepare.image_size", [8], "found [8];", "2 or more entries."),
    ("prepare.image_size", [8, 9, 9], "found [8, 9, 9];", "2 or fewer entries."),
    ("prepare.image_size", 8, "found 8;", "a list."),
    ("compare.baseline", "base", "found 'base',", "allowed: baseline, ddp, memory."),
    ("compare.margins.energy", 0.05, "found 0.05,", "set bench.energy: true."),
    ("variants", {}, "found {};", "1 or more entries."),
    ("variants.new", None, "found null;", "a mapping, such as {}"),
    ("variants.Big Name", {}, "found 'Big Name';", "text that matches ^[a-z0-9][a-z0-9_-]*$."),
    ("variants.memory.processes", 2, "found 2;", "processes needs parallelism 'ddp' or 'zero1' or "),
    ("variants.ddp.processes", 0, "found 0;", "a number from 1 or 'auto'."),
    ("variants.ddp.processes", [1], "found [1];", "a whole number or 'auto'."),
    ("variants.ddp.7", True, "found 7;", "text: write the key in quotes."),
]


@pytest.mark.parametrize(("key", "value", "found", "allowed"), MISTAKES)
def test_a_mistake_is_named_with_what_was_found_and_what_is_allowed(
    key: str, value: Any, found: str, allowed: str
) -> None:
    [line] = complaint(with_key(key, value)).splitlines()
    assert line.startswith(f"params.yaml: {key}: {found}")
    assert allowed in line


def test_an_image_folder_needs_its_directory_and_a_size() -> None:
    directory, size = complaint(with_key("fetch.dataset", "image_folder")).splitlines()
    assert directory.startswith("params.yaml: fetch.image_folder: found null; ")
    assert size.startswith("params.yaml: prepare.image_size: found null; ")


@pytest.mark.parametrize(
    ("key", "value"), [("processes", 10**9), ("replicas", 10**30), ("loader_workers", 10**6), ("bucket_mb", 1e300)]
)
def test_what_no_machine_has_is_refused_at_once(key: str, value: float) -> None:
    assert f"variants.ddp.{key}: found {value}; expected " in complaint(with_key(f"variants.ddp.{key}", value))
    assert "infer.batch_sizes.1: found 1000000000; expected " in complaint(with_key("infer.batch_sizes", [1, 10**9]))


def test_every_mistake_is_listed() -> None:
    values = with_key("train.epochs", 0)
    values["variants"]["ddp"]["proceses"] = 2
    values["fetch"]["dataset"] = "mnits"
    assert len(complaint(values).splitlines()) == 3


@pytest.mark.parametrize(
    ("key", "text", "written"),
    [
        ("train.learning_rate", "1e-3", "0.001"),
        ("train.learning_rate", "5E-6", "5.0e-06"),
        ("bench.max_minutes", "1.5e3", "1500"),
        ("train.epochs", "1e2", "100"),
    ],
)
def test_a_number_that_yaml_reads_as_text_is_explained(key: str, text: str, written: str) -> None:
    message = complaint(with_key(key, yaml.safe_load(text)))
    assert f"{key}: found {text!r}; " in message
    assert message.endswith(f"write the number as {written}.")
    parse(with_key(key, yaml.safe_load(written)))


def test_no_variants_at_all() -> None:
    assert complaint({"train": {}}).startswith("params.yaml: variants: missing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found null; expected a mapping"),
        ("- a\n- b", r"found \['a', 'b'\]; expected a mapping"),
        ("train: [", "is not YAML"),
        ("when: 2024-13-01", "is not YAML: month"),
        ("variants:\n  ddp: {}\n  ddp: {}\n", "(?s)the key 'ddp' occurs twice.*line 3, column 3"),
        ("\0", "is not YAML"),
    ],
)
def test_a_file_that_is_no_params_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))


def test_merge_keys_and_anchors_still_work(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(
        "variants:\n  baseline: {}\n  ddp: &ddp {parallelism: ddp}\n  both: {<<: *ddp, channels_last: true}\n",
        encoding="utf-8",
    )
    both = load(path).variants["both"]
    assert (both.parallelism, both.channels_last) == ("ddp", True)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"params\.yaml is missing: run from the top of the checkout"):
        load(tmp_path / "params.yaml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load(tmp_path / "binary")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load(tmp_path)


# Plans on a machine


def changed(**keys: Any) -> Config:
    """Return the shipped configuration with changed keys of ``train``, and with further ``variants``."""
    values = copy.deepcopy(SHIPPED)
    values["variants"] |= keys.pop("variants", {})
    values["train"] |= keys
    return parse(values)


@pytest.mark.parametrize(
    ("machine", "device", "applied", "reason"),
    [
        (PLAIN_CPU, "auto", "fp32", "this CPU has no native bf16"),
        (NEW_CPU, "auto", "bf16", None),
        (OLD_GPUS, "auto", "fp32", "this GPU has no native bf16"),
        (OLD_GPUS, "cpu", "bf16", None),
        (NEW_GPUS, "auto", "bf16", None),
        (NEW_GPUS, "cpu", "fp32", "this CPU has no native bf16"),
    ],
)
def test_bf16_where_the_machine_only_emulates_it(
    machine: Machine, device: str, applied: str, reason: str | None
) -> None:
    made = plan(changed(device=device), "memory", machine)
    assert made.requested.precision == "bf16"
    assert made.applied == made.requested.model_copy(update={"precision": applied})
    assert list(made.skipped) == (["bf16"] if reason else [])
    assert reason is None or made.skipped["bf16"].startswith(reason)


def test_bf16_run_all_the_same() -> None:
    made = plan(changed(without_native="run"), "memory", PLAIN_CPU)
    assert (made.applied.precision, made.skipped) == ("bf16", {})


def test_an_unknown_variant() -> None:
    with pytest.raises(ConfigError, match=r"variants.dpd: no such variant; there are: baseline, ddp, memory"):
        plan(changed(), "dpd", PLAIN_CPU)


def test_plans_list_every_variant_that_cannot_run() -> None:
    wrong = changed(variants={"half": {"precision": "fp16"}, "three": {"parallelism": "ddp", "processes": 3}})
    with pytest.raises(ConfigError) as caught:
        plans(wrong, PLAIN_CPU)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["variants.half.precision", "train.batch_size"]
    assert list(plans(changed(), PLAIN_CPU)) == ["baseline", "ddp", "memory"]


# The schema for editors


def test_the_schema_file_is_in_step() -> None:
    written = (ROOT / params.SCHEMA_FILE).read_text(encoding="utf-8")
    assert written == params.schema(), "run `python -m pipeline schema`"


def test_the_schema_takes_the_shipped_params_and_refuses_mistakes() -> None:
    checked = jsonschema.Draft202012Validator(json.loads(params.schema()))
    checked.check_schema(checked.schema)
    checked.validate(SHIPPED)
    for key, value in [("trian", {}), ("train.epochs", "3"), ("variants.ddp.x", 1), ("variants.A b", {})]:
        assert not checked.is_valid(with_key(key, value)), key


def test_params_yaml_names_its_schema() -> None:
    first = (ROOT / "params.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# yaml-language-server: $schema={params.SCHEMA_FILE}"


# Invalid values and text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no address", "no address"),
        ("mlflow at http://mlflow:5000 is down", "mlflow at http://mlflow:5000 is down"),
        ("https://me:secret@host/x", "https://***@host/x"),
        ("https://ghp_token@host/x", "https://***@host/x"),
        ("https://me:p@ss:word@host", "https://***@host"),
        ("postgresql+psycopg2://me:pw@db:5432/mlflow", "postgresql+psycopg2://***@db:5432/mlflow"),
        ("s3://key:pw@bucket/a and s3://b/c", "s3://***@bucket/a and s3://b/c"),
        ("found 'https://host/x?sig=1&se=2'; expected", "found 'https://host/x?***'; expected"),
        ("https://host/x#access_token=1", "https://host/x#***"),
        ("http://host/#/experiments/1/runs?x=y", "http://host/#/experiments/1/runs?x=y"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("git@github.com:owner/name.git", "git@github.com:owner/name.git"),
    ],
)
def test_addresses_are_shown_without_what_may_be_secret(text: str, shown: str) -> None:
    assert redacted(text) == shown


def places(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.none(), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(place=st.sampled_from(places(SHIPPED)), junk=JUNK, key=st.none() | st.text() | st.integers() | st.booleans())
def test_junk_anywhere_raises_nothing_but_config_errors(place: tuple[Any, ...], junk: Any, key: Any) -> None:
    """Replace the value at a random place, or add a random key there."""
    values: Any = {"root": copy.deepcopy(SHIPPED)}
    parent, last = values, "root"
    for part in place:
        parent, last = parent[last], part
    if isinstance(parent[last], dict) and key is not None:
        parent[last][key] = junk
    else:
        parent[last] = junk
    with contextlib.suppress(ConfigError):
        plans(parse(values["root"]), PLAIN_CPU)


@given(text=st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_junk_text_raises_nothing_but_config_errors(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError):
        load(path)
