"""Names of models, losses and metrics, checked without importing the named objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import cli, models
from pipeline.errors import ConfigError
from pipeline.params import OWN_MODELS, Train, check_names, parse, torchvision_models

ROOT = Path(__file__).parent.parent


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with modules of the user's own; most of them cannot be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(
        "import missing\n"
        "from elsewhere import taken as borrowed\n"
        "def mlp(*, classes): ...\n"
        "class Focal: ...\n"
        "alias = lambda: mlp\n"
        "annotated: object = mlp\n"
        "first, second = mlp, mlp\n"
        "if missing:\n    def on_some(): ...\n"
        "try:\n    import quick\nexcept ImportError:\n    quick = None\n",
        encoding="utf-8",
    )
    for package in ("package", "plain"):
        (tmp_path / package / "inner").mkdir(parents=True)
        (tmp_path / package / "inner" / "deep.py").write_text("def net(): ...", encoding="utf-8")
    (tmp_path / "package" / "__init__.py").write_text("raise ImportError('never imported')", encoding="utf-8")
    (tmp_path / "package" / "inner" / "__init__.py").touch()  # the other folders have no __init__.py
    (tmp_path / "stars.py").write_text("from nets import *", encoding="utf-8")
    (tmp_path / "made.py").write_text("for n in (1, 2):\n    globals()[f'net{n}'] = print", encoding="utf-8")
    (tmp_path / "lazy.py").write_text("def __getattr__(name): ...", encoding="utf-8")
    return tmp_path


def test_our_models_and_torchvisions_are_known_as_they_are() -> None:
    from torchvision import models as theirs

    assert tuple(models._OWN) == OWN_MODELS
    assert torchvision_models() == theirs.list_models(module=theirs)


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    "name",
    [
        *("small_cnn", "resnet18", "vit_b_16", "nets:mlp", "nets:Focal", "nets:alias", "nets:annotated", "nets:second"),
        *("nets:on_some", "nets:quick", "nets:borrowed", "package.inner.deep:net", "stars:anything", "made:net1"),
        *("plain.inner.deep:net", "lazy:anything", "torch.nn:Linear", "math:sqrt"),
    ],
)
def test_what_is_there_is_accepted(name: str) -> None:
    check_names(Train(model=name))


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ({"model": "resent18"}, r"train\.model: found 'resent18'\. Did you mean resnet18"),
        ({"model": "nets:mpl"}, r"train\.model: found 'nets:mpl', but \S+nets\.py has no 'mpl'\. Did you mean mlp\?"),
        ({"model": "nest:mlp"}, r"train\.model: found 'nest:mlp', but there is no module 'nest', neither"),
        ({"model": "package.innner.deep:net"}, r"there is no module 'package\.innner'"),
        ({"model": "plain.inner.deeep:net"}, r"there is no module 'plain\.inner\.deeep'"),
        ({"model": "package.inner.deep:nett"}, r"has no 'nett'\. Did you mean net\?"),
        ({"metric": "scores:top"}, r"train\.metric: found 'scores:top', but there is no module 'scores'"),
        (
            {"model": "x", "loss": "nets:x", "metric": "x:x"},
            r"train\.model: .*\n.* train\.loss: .*\n.* train\.metric",
        ),
    ],
)
def test_what_is_not_there_is_refused(train: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_names(Train(**train))


def test_a_teacher_s_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse({"variants": {"baseline": {}, "taught": {"distillation": {"teacher": "./given"}}}})
    with pytest.raises(ConfigError, match=r"variants\.taught\.distillation\.teacher: found 'given', which is not a"):
        check_names(config.train, config.variants)
    Path("given").touch()
    check_names(config.train, config.variants)


def test_without_torchvision_its_names_are_left_to_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.params.names.torchvision_models", list)
    check_names(Train(model="resent18"))


def test_the_first_stage_refuses_a_misspelt_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(text.replace("model: small_cnn", "model: small_cn"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["environment"]) == 2
    assert "train.model: found 'small_cn'. Did you mean small_cnn?" in capsys.readouterr().err
    assert not (tmp_path / "environment.json").exists()
