from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import params
from pipeline.errors import ConfigError
from pipeline.params import Config, Machine, load, parse
from pipeline.plans import plan, plans
from tests.factories import SHIPPED, places
from tests.workspaces import CPU_ONLY

ROOT = Path(__file__).parent.parent

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
    """Only the variants, and the lists of variants in sections profile and infer, may differ from the defaults."""
    lists = {section: {"variants": SHIPPED[section]["variants"]} for section in ("profile", "infer")}
    assert parse(SHIPPED) == parse({"variants": SHIPPED["variants"], **lists})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("trian", {}, "unknown key. Did you mean train or variants? Allowed: fetch, prepare, train, "),
        ("train.augment.flp", True, "unknown key. Did you mean flip? Allowed: crop_padding, flip, cutout."),
        ("train.augment.xyz", True, "unknown key. Allowed: crop_padding, flip, cutout."),
        ("variants.memory.activation_checkpoint", True, "unknown key. Did you mean activation_checkpointing or "),
        ("variants.memory.activation_checkpointing", 1.5, "found 1.5; input should be a valid boolean or 'selective' "),
        ("variants.memory.processes", 2, "found 2; processes needs parallelism 'ddp' or 'zero1' or "),
        ("variants.ddp.processes", 0, "found 0; input should be greater than or equal to 1 or 'auto'."),
        ("variants.ddp.processes", 10**9, "found 1000000000; "),
        ("variants.ddp.replicas", 10**30, "found 1000"),
        ("variants.ddp.loader_workers", 10**6, "found 1000000; "),
        ("variants.ddp.bucket_mb", 1e300, "found 1e+300; "),
        ("variants.ddp.7", True, "found 7; keys should be strings."),
        ("variants.Big Name", {}, "found 'Big Name'; string should match pattern '^[a-z0-9][a-z0-9_-]*$'."),
        ("variants.new", None, "found null; input should be a mapping, such as {}."),
        ("variants", {}, "found {}; "),
        ("train.model", "my_models.mlp", "found 'my_models.mlp'; expected a model's name, or module:factory of "),
        ("train.epochs", "three", "found 'three'; input should be a valid integer."),
        ("train.epochs", 2.5e20, "found 2.5e+20; "),
        ("train.epochs", True, "found true; "),
        ("train.epochs", 0, "found 0; input should be greater than 0."),
        ("train.warmup_fraction", 2, "found 2; "),
        ("train.learning_rate", float("inf"), "found inf; input should be a finite number."),
        ("train.optimizer", "adam", "found 'adam'; input should be 'sgd' or 'adamw'. Did you mean adamw?"),
        ("train.seeds", [], "found []; "),
        ("train.seeds", [0, 0], "found [0, 0]; allowed: each seed once."),
        ("train.seeds.1", -1, "found -1; "),
        ("publish.registered_model", "a/b", "found 'a/b'; "),
        ("prepare.image_size", [8], "found [8]; "),
        ("infer.batch_sizes.1", 10**9, "found 1000000000; "),
        ("compare.baseline", "base", "found 'base', which is not under variants; allowed: baseline, ddp, memory."),
        ("compare.margins.energy", 0.05, "found 0.05, which needs bench.energy: true."),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(key: str, value: Any, says: str) -> None:
    [line] = complaint(with_key(key, value)).splitlines()
    assert line.startswith(f"params.yaml: {key}: {says}")


def test_an_image_folder_needs_its_directory_and_a_size() -> None:
    directory, size = complaint(with_key("fetch.dataset", "image_folder")).splitlines()
    assert directory.startswith("params.yaml: fetch.image_folder: found null; ")
    assert size.startswith("params.yaml: prepare.image_size: found null; ")


def test_every_mistake_is_listed() -> None:
    values = with_key("train.epochs", 0)
    values["variants"]["ddp"]["proceses"] = 2
    values["fetch"]["dataset"] = "mnits"
    assert len(complaint(values).splitlines()) == 3


def test_no_variants_at_all() -> None:
    assert complaint({"train": {}}).startswith("params.yaml: variants: missing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found null; expected a mapping"),
        (b"- a\n- b", r"found \['a', 'b'\]; expected a mapping"),
        (b"train: [", "is not YAML"),
        (b"when: 2024-13-01", "is not YAML: month"),
        (b"variants:\n  ddp: {}\n  ddp: {}\n", "(?s)the key 'ddp' occurs twice.*line 3, column 3"),
        (b"variants:\n  no: {}\n", "(?s)the key 'no' is of type bool in YAML; quote it.*line 2, column 3"),
        (b"variants:\n  16: {}\n", "the key '16' is of type int in YAML; quote it"),
        (
            b"variants: {'16': {}, baseline: {}}\ncompare: {baseline: 16}\n",
            r"compare.baseline: found 16; input should be a valid string\. If it is a name, quote it\.$",
        ),
        (b"variants:\n  a: &a {}\n  b: {<<: *a, compile: none, compile: default}\n", "key 'compile' occurs twice"),
        (b"variants: {<<: {}, <<: {}}\n", "the key '<<' occurs twice"),
        (b"\0", "is not YAML"),
        (b"\xff\xfe\x00", "cannot be read as text"),
        (None, "is missing: run in the folder that has it, or run `python -m pipeline init`"),
    ],
)
def test_a_file_that_is_no_params_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "params.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))


def test_anchors_merge_keys_and_short_numbers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(
        "train: {learning_rate: 1e-3, weight_decay: 5E-6}\n"
        "compare: {baseline: no}\n"
        "variants:\n  'no': {}\n  ddp: &ddp {parallelism: ddp}\n  both: {<<: *ddp, channels_last: true}\n",
        encoding="utf-8",
    )
    config = load(path)
    assert (config.train.learning_rate, config.train.weight_decay) == (0.001, 5e-6)
    assert (config.variants["both"].parallelism, config.variants["both"].channels_last) == ("ddp", True)


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
        (CPU_ONLY, "auto", "fp32", "this CPU has no native bf16"),
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
    made = plan(changed(without_native="run"), "memory", CPU_ONLY)
    assert (made.applied.precision, made.skipped) == ("bf16", {})


def test_an_unknown_variant() -> None:
    with pytest.raises(ConfigError, match=r"variants.dpd: no such variant; there are: baseline, ddp, memory"):
        plan(changed(), "dpd", CPU_ONLY)


def test_plans_list_every_variant_that_cannot_run() -> None:
    wrong = changed(variants={"half": {"precision": "fp16"}, "three": {"parallelism": "ddp", "processes": 3}})
    with pytest.raises(ConfigError) as caught:
        plans(wrong, CPU_ONLY)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["variants.half.precision", "train.batch_size"]
    assert list(plans(changed(), CPU_ONLY)) == ["baseline", "ddp", "memory"]


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
        plans(parse(values["root"]), CPU_ONLY)
