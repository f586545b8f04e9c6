"""README.md and the pages under docs/ are checked against the commands, settings, links and files that they name."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.cli.parser import get_main_parser

from pipeline.cli import _parser
from pipeline.params import parse
from pipeline.params.loading import read_yaml
from tests.imports import modules, tree
from tests.pages import DOCS, PAGES, ROOT, blocks, commands

PARAMS: dict[str, Any] = read_yaml(ROOT / "params.yaml")
SECTIONS = set(PARAMS) - {"variants"}


def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def inline_code(page: Path) -> list[str]:
    """Return the inline code of the page's prose, including code in link texts."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


def test_the_pages_name_the_version_of_pyproject() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    named = [
        match for page in PAGES for match in re.findall(r"pipeline-([\w.]+)-py3|download/v([\w.]+)/", page.read_text())
    ]
    assert len(named) == 3
    assert {part for match in named for part in match if part} == {version}


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = re.findall(r"\]\((\w[\w/-]*\.md)\)", index.read_text(encoding="utf-8"))
    assert sorted([*linked, index.name]) == sorted(str(page.relative_to(index.parent)) for page in DOCS[1:])


def simple_commands(page: Path) -> Iterator[list[str]]:
    """Yield the commands that a reader can copy, without leading assignments of environment variables."""
    sentences = [shlex.split(code) for code in inline_code(page) if re.match(r"(python|make|dvc) [-\w]", code)]
    for command in (*commands(page), *sentences):
        for joined, words in groupby(command, key="&&".__eq__):
            rest = list(words)
            while rest and re.match(r"[A-Z_]+=", rest[0]):
                del rest[0]
            if rest and not joined:
                yield rest


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def with_changes(values: Any, change: Any) -> Any:
    """Return ``values`` with the keys of ``change`` replaced, section by section; variants replace all variants."""
    if not isinstance(change, dict) or not isinstance(values, dict):
        return change
    changed = {key: part if key == "variants" else with_changes(values.get(key), part) for key, part in change.items()}
    return values | changed


def variants_of(page: Path) -> set[str]:
    """Return the names of variants that the page's commands may use."""
    shown = (yaml.safe_load(block) for block in blocks(page, "yaml"))
    return {"VARIANT", *PARAMS["variants"], *(name for section in shown for name in section.get("variants", {}))}


def test_the_readme_has_at_most_180_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    for command in simple_commands(page):
        match command:
            case ["python", "-m", "pipeline", *arguments]:
                parsed = vars(_parser().parse_args(arguments))
                named = {parsed.get("variant"), *parsed.get("variants", [])} - {None}
                assert named <= variants_of(page), command
            case ["python", "-m", "pytest", *arguments]:
                assert all((ROOT / part).is_file() for part in arguments if part.startswith("tests")), command
            case ["python", "-m", module, *_]:
                path = ROOT.joinpath(*module.split("."))
                assert path.is_dir() or path.with_suffix(".py").is_file(), command
            case ["python", script, *_]:
                assert (ROOT / script).is_file(), command
            case ["cp" | "cat", *words]:
                taken = [word.removeprefix("../pipeline/") for word in words if word.startswith("../pipeline/")]
                assert all((ROOT / path).exists() for path in taken), command
            case ["make", target, *_]:
                assert target in targets(), command
            case ["dvc", *arguments]:
                parsed = vars(get_main_parser().parse_args(arguments))
                for target in parsed["targets"] if parsed["cmd"] == "repro" else ():
                    stage, _, variant = target.partition("@")
                    assert stage in stages, command
                    assert not variant or variant in variants_of(page), command


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_exist(page: Path) -> None:
    settings = parse(PARAMS)
    changes: list[Any] = [yaml.safe_load(block) for block in blocks(page, "yaml")]
    for code in inline_code(page):
        path, colon, value = code.partition(": ")
        keys = path.split(".")
        if keys[0] in SECTIONS and re.fullmatch(r"\w+(\.\w+)+(?<!\.json)", path):
            functools.reduce(getattr, keys, settings)
            if colon:
                changes.append(functools.reduce(lambda inner, key: {key: inner}, keys[::-1], yaml.safe_load(value)))
    for change in changes:
        parse(with_changes(PARAMS, change))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, formed as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    for code in inline_code(page):
        if re.fullmatch(r"(pipeline|tests|benchmarks|docker|examples|variants|docs)/[\w./-]*", code):
            assert (ROOT / code).exists(), code


def test_the_architecture_page_lists_the_stages_of_dvc() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## The stages")[2].partition("\n## ")[0]
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(stages)


def test_the_page_lists_every_hook_in_order() -> None:
    page = (ROOT / "docs" / "adding-a-technique.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`\w+`.*?) \|", page, re.MULTILINE)))
    classes = [node for node in tree("pipeline.techniques.base").body if isinstance(node, ast.ClassDef)]
    (technique,) = (class_ for class_ in classes if class_.name == "Technique")
    methods = [node.name for node in technique.body if isinstance(node, ast.FunctionDef)]
    assert named == [name for name in methods if name not in ("__init__", "where")]


def private_names() -> set[str]:
    """Return the private names of other projects that the package imports or reads from an object."""
    nodes = [node for module in modules() for node in ast.walk(tree(module))]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)} | {
        ast.unparse(node).partition(".")[2] or ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self")
        if isinstance(node.ctx, ast.Store)
    }
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and not (module := getattr(node, "module", "")).startswith(
            "pip"
        ):
            names |= {part for name in (module, *(alias.name for alias in node.names)) for part in name.split(".")}
    return {name for name in names - ours if re.match("_[^_]", name)}


def test_the_page_on_developing_lists_every_private_interface() -> None:
    page = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8").partition("## Private interfaces")[2]
    table = " ".join(re.findall(r"^\| (`_.*?) \|", page, re.MULTILINE))
    named, documented = set(re.findall(r"`(\w+)`", table)), {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
    assert private_names() - documented <= named
    source = " ".join(path.read_text(encoding="utf-8") for path in modules().values())
    assert not {name for name in named if name not in source}
