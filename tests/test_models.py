from __future__ import annotations

import inspect
import io
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torchvision import models as torchvision_models
from torchvision.models.regnet import BlockParams

from pipeline import factories
from pipeline.data.prepared import Dataset, Statistics
from pipeline.models import ModelError, build, keeping
from pipeline.models.gpt import GPT
from pipeline.tasks.base import Normalise
from pipeline.tasks.batches import evaluation_batches
from tests.commands import printed
from tests.conftest import ROOT
from tests.factories import known
from tests.nets import OfFirstBatch, labelled, task_of


def build_for(name: str, shape: tuple[int, int, int], classes: int = 10, **options: Any) -> nn.Module:
    channels, height, width = shape
    sizes = {"channels": channels, "height": height, "width": width, "classes": classes}
    return build(name, options, sizes, inputs=torch.zeros(2, *shape), outputs=(classes,))


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def weight_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim > 1]


def test_small_cnn_computes_what_the_textbook_does() -> None:
    model = build_for("small_cnn", (1, 28, 28))
    assert weight_shapes(model) == [(20, 1, 5, 5), (20, 20, 5, 5), (50, 320), (10, 50)]
    w1, b1, w2, b2, w3, b3, w4, b4 = model.parameters()
    images = torch.randn(4, 1, 28, 28)
    hidden = F.max_pool2d(F.relu(F.conv2d(images, w1, b1)), 2)
    hidden = F.max_pool2d(F.relu(F.conv2d(hidden, w2, b2)), 2)
    hidden = F.relu(F.linear(hidden.flatten(1), w3, b3))
    torch.testing.assert_close(model(images), F.linear(hidden, w4, b4))


def test_small_cnns_first_linear_layer_follows_the_image() -> None:
    for shape, pixels in {(1, 8, 8): 4, (3, 15, 40): 30, (1, 16, 16): 1, (3, 32, 32): 25, (3, 20, 64): 26}.items():
        assert weight_shapes(build_for("small_cnn", shape))[2] == (50, 20 * pixels)


def test_resnet9_is_the_known_net() -> None:
    assert parameter_count(build_for("resnet9", (3, 32, 32))) == 6_573_120
    model = build_for("resnet9", (1, 8, 8), base_width=4)
    pairs = [part for name, part in model.named_children() if f"{name}.1.0.weight" in model.state_dict()]
    assert len(pairs) == 2
    images = torch.randn(2, 8, 4, 4)
    assert not torch.equal(pairs[0](images), images)
    nn.init.zeros_(pairs[0].get_parameter("1.1.weight"))
    assert torch.equal(pairs[0](images), images)


def test_gpt_computes_what_its_sources_say() -> None:
    """Rotary positions multiply a pair of components, taken as a complex number, by exp(1j * position * rate)."""
    width, heads = 8, 2
    model = GPT(vocabulary=11, length=6, width=width, depth=1, heads=heads)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    block: Any
    embedding, block, norm, _ = model
    tokens = torch.randint(11, (3, 5))
    hidden = embedding(tokens)
    parts = block.attention.query_key_value(block.attention_norm(hidden))
    query, key, value = parts.reshape(3, 5, heads, 3, width // heads).unbind(3)
    query, key = (torch.complex(*rotated.chunk(2, -1)) for rotated in (query, key))
    distances = torch.arange(5)[:, None] - torch.arange(5)
    turns = torch.exp(1j * distances[..., None] * 10_000.0 ** -(torch.arange(2) / 2))
    scores = torch.einsum("bqhd,bkhd,qkd->bhqk", query, key.conj(), turns).real / (width // heads) ** 0.5
    weights = scores.masked_fill(distances < 0, -torch.inf).softmax(-1)
    hidden = hidden + block.attention.out(torch.einsum("bhqk,bkhd->bqhd", weights, value).flatten(2))
    hidden = hidden + block.mlp(block.mlp_norm(hidden))
    torch.testing.assert_close(model(tokens), norm(hidden) @ embedding.weight.T, rtol=1e-4, atol=1e-4)


def assert_trains(model: nn.Module, shape: tuple[int, int, int]) -> None:
    """Assert that every parameter gets a finite gradient from a batch of two."""
    F.cross_entropy(model(torch.randn(2, *shape)), torch.tensor([1, 2])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(("name", "least"), [("small_cnn", 4), ("resnet9", 8)])
def test_our_models_train_on_any_allowed_size(name: str, least: int) -> None:
    for shape in ((1, least, least), (3, 47, 33)):
        assert_trains(build_for(name, shape), shape)
    with pytest.raises(ModelError, match=f"{name} needs images of at least {least}x{least} pixels; found {least}x3"):
        build_for(name, (1, least, 3))


def test_small_images_get_the_stem_of_cifar() -> None:
    assert parameter_count(build_for("resnet18", (3, 224, 224), classes=1000)) == 11_689_512
    model = build_for("resnet18", (1, 28, 28))
    assert parameter_count(model) == 11_689_512 - 64 * (3 * 49 - 1 * 9) - 990 * 513
    assert model.get_submodule("conv1")(torch.zeros(1, 1, 28, 28)).shape == (1, 64, 28, 28)
    assert isinstance(model.get_submodule("maxpool"), nn.Identity)


@pytest.mark.parametrize("shape", [(1, 28, 28), (6, 64, 64)])
def test_a_replaced_convolution_keeps_its_variance(shape: tuple[int, int, int]) -> None:
    def spread(model: nn.Module, channels: int) -> float:
        outputs: torch.Tensor = model.get_submodule("conv1")(torch.randn(8, channels, 64, 64))
        return outputs.std().item()

    original = torchvision_models.resnet18()
    assert spread(build_for("resnet18", shape), shape[0]) == pytest.approx(spread(original, 3), rel=0.15)


class Shapes(TorchFunctionMode):
    """Skips BatchNorm and functions that work in place, as initialisation does: they are slow on the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func is F.batch_norm or (name.endswith("_") and not name.endswith("__")):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def all_of_torchvision() -> Iterator[Any]:
    """Yield every model of torchvision; all but the first of each family are marked slow."""
    families = set()
    for name in torchvision_models.list_models(module=torchvision_models):
        family = inspect.signature(torchvision_models.get_model_builder(name)).return_annotation
        yield pytest.param(name, marks=[pytest.mark.slow] if family in families else [])
        families.add(family)


@pytest.mark.parametrize("name", list(all_of_torchvision()))
def test_every_torchvision_model_takes_small_grey_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = BlockParams.from_init_params

    def on_cpu(**parameters: Any) -> BlockParams:  # RegNet computes its layers' widths with tensors
        with torch.device("cpu"):
            return widths(**parameters)

    monkeypatch.setattr(BlockParams, "from_init_params", on_cpu)
    with torch.device("meta"), Shapes():
        model = build_for(name, (1, 20, 28), classes=7)  # build checks the output's shape
    assert weight_shapes(model)[0][1] == 1


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "regnet_x_400mf", "squeezenet1_1", "googlenet"])
def test_torchvision_models_train_on_digits(name: str) -> None:
    assert_trains(build_for(name, (1, 8, 8)), (1, 8, 8))


@pytest.mark.parametrize(
    ("name", "options", "shape", "seen"),
    [
        ("squeezenet1_1", {}, (1, 8, 12), (17, 26)),  # enlarged to at least 17x17, in proportion
        ("squeezenet1_1", {}, (1, 30, 17), (30, 17)),
        ("vit_b_32", {"image_size": 64}, (1, 28, 80), (64, 64)),
    ],
)
def test_images_are_resized_to_what_the_model_needs(
    name: str, options: dict[str, Any], shape: tuple[int, int, int], seen: tuple[int, int]
) -> None:
    sizes = []
    with torch.device("meta"), Shapes():
        model = build_for(name, shape, **options)
        first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
        first.register_forward_pre_hook(lambda _, inputs: sizes.append(tuple(inputs[0].shape[-2:])))
        model(torch.zeros(2, *shape))
    assert sizes == [seen]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet81", {}, r"train\.model: found 'resnet81'\. Did you mean resnet18 or "),
        ("small_cn", {}, r"Did you mean small_cnn"),
        ("qqqq", {}, r"Allowed: small_cnn, resnet9, mlp, gpt, transformers, a torchvision classification model"),
        ("small_cnn", {"size": 3}, r"and train\.model_options \(size\), but its signature is .*argument 'size'"),
        ("resnet9", {"width": 3}, r"model_options: found width, which resnet9 gets from the data; remove width"),
        ("resnet18", {"dropuot": 0.1}, r"found dropuot, which resnet18 does not take; allowed: groups, norm_layer"),
        ("resnet18", {"weights": "DEFAULT"}, r"found weights, which resnet18 does not take"),
        ("inception_v3", {"aux_logits": True}, r"found aux_logits, which inception_v3 does not take; allowed: dropout"),
        ("vit_b_16", {"image_size": 50}, r"train\.model: vit_b_16 raised .*indivisible"),
    ],
)
def test_an_unknown_name_is_answered_with_known_ones(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_for(name, (1, 28, 28), **options)


NETS = """
import torch
from torch import nn

def flat(*, channels, height, width, classes, hidden=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, hidden), nn.Linear(hidden, classes))

def with_dropout(channels, height, width, classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(channels * height * width, classes), nn.Dropout())

def one_class_too_many(channels, height, width, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes + 1))

def for_other_images(**data):
    return nn.Sequential(nn.Flatten(), nn.Linear(99, data["classes"]))

class Pair(nn.Module):
    def __init__(self, **data):
        super().__init__()

    def forward(self, images):
        return images, images

def nothing_to_train(channels, height, width, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes).requires_grad_(False))

def no_parameter(channels, height, width, classes):
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(classes))

def no_model(**data):
    return 42

def too_few_arguments(channels):
    return nn.Identity()

def careless(**data):
    raise RuntimeError("my own mistake")

class Rows(nn.Sequential):
    def __init__(self, channels, height, width, classes):
        super().__init__(nn.Flatten(), nn.Linear(channels * height * width, classes))

class Squeezed(Rows):
    def forward(self, images):
        return super().forward(images).squeeze()

class PairInEvaluation(Rows):
    def forward(self, images):
        return super().forward(images) if self.training else (super().forward(images), images)

class Extra(Rows):
    extra = staticmethod(lambda: {"seen": 3, "scale": torch.ones(2)})

    def get_extra_state(self):
        return self.extra()

    def set_extra_state(self, state):
        assert state["seen"] == 3

class ExtraObject(Extra):
    extra = Pair

class ExtraThatCannotBeSet(Rows):
    def get_extra_state(self):
        return 1

def low_bit(**data):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = flat(**data)
    quantize_(net, Int8WeightOnlyConfig(), lambda part, name: name == "1")
    return net

def lazy(classes, **data):
    return nn.Sequential(nn.LazyConv2d(3, 2), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(classes))

def with_expanded(**sizes):
    model = Rows(**sizes)
    model.register_buffer("mask", torch.ones(1).expand(4))
    model.weights = nn.Parameter(torch.ones(1).expand(4))
    return model

def with_generators(**sizes):
    model = Rows(**sizes)
    model.own, model.drawn = torch.Generator(), {"masks": [torch.Generator()]}
    return model

def of_pixels(channels, height, width, classes):
    class Pixels(nn.Module):
        def forward(self, images):
            return (images.flatten(1) > 0).long()
    return nn.Sequential(Pixels(), nn.EmbeddingBag(2, classes, mode="sum", sparse=True))

SIZE = 28
"""


@pytest.fixture
def my_nets(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, which is not on the path, with the user's own module ``my_nets``."""
    (here / "my_nets.py").write_text(NETS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)
    return here


@pytest.mark.usefixtures("my_nets")
def test_a_factory_of_the_users_own_is_found() -> None:
    torch.manual_seed(5)
    build_for("my_nets:with_dropout", (1, 4, 4))
    after_build = torch.rand(3)
    torch.manual_seed(5)
    nn.Linear(16, 10)
    assert torch.equal(after_build, torch.rand(3))
    assert weight_shapes(build_for("my_nets:flat", (3, 5, 4))) == [(8, 60), (10, 8)]
    assert weight_shapes(build_for("my_nets:flat", (1, 5, 4), hidden=2)) == [(2, 20), (10, 2)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_nets_here:flat", r"found 'no_nets_here:flat', but importing no_nets_here failed: No module"),
        ("my_nets.sub:flat", r"importing my_nets\.sub failed: No module named 'my_nets\.sub'"),
        ("my_nets:flatt", r"my_nets\.py has no 'flatt'\. Did you mean flat\?"),
        ("my_nets:", r"found 'my_nets:'; expected module:function"),
        (":flat", r"found ':flat'; expected module:function"),
        (".my_nets:flat", r"found '\.my_nets:flat'; expected module:function"),
        ("my_nets:SIZE", r"which is 28; expected a function"),
        ("my_nets:no_model", r"my_nets:no_model returned 42; expected a torch\.nn\.Module"),
        ("my_nets:too_few_arguments", r"with channels, height, width, classes .*signature is \(channels\)"),
        ("my_nets:one_class_too_many", r"\[2, 1, 4, 4\] returns torch\.float32 of shape \[2, 11\]; .*\[2, 10\]"),
        ("my_nets:for_other_images", r"on a batch of shape \[2, 1, 4, 4\] fails: .*2x16 and 99x10"),
        ("my_nets:nothing_to_train", r"my_nets:nothing_to_train has no parameter to train"),
        ("my_nets:no_parameter", r"my_nets:no_parameter has no parameter to train"),
        ("my_nets:Pair", r"returns tuple; expected a tensor, torch.float32 of shape \[2, 10\]"),
        ("my_nets:PairInEvaluation", r"in evaluation mode on a batch of shape \[1, 1, 4, 4\] returns tuple"),
        ("my_nets:Squeezed", r"in evaluation mode on .* returns torch\.float32 of shape \[10\]; .* of shape \[1, 10\]"),
        ("my_nets:ExtraObject", r"of my_nets:ExtraObject has .*_extra_state.*Pair.*, which no checkpoint"),
        ("my_nets:ExtraThatCannotBeSet", r"cannot load its own state dict: .*_extra_state"),
        ("my_nets:low_bit", r"my_nets:low_bit has \{'1\.weight': Int8Tensor\(.*, which no checkpoint can hold"),
    ],
)
@pytest.mark.usefixtures("my_nets")
def test_what_is_wrong_with_a_factory_is_said(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_for(name, (1, 4, 4))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.usefixtures("my_nets")
def test_lazy_modules_get_shapes_and_no_statistics() -> None:
    model = build_for("my_nets:lazy", (1, 4, 4))
    assert weight_shapes(model) == [(3, 1, 2, 2), (10, 27)]
    assert model.get_buffer("1.num_batches_tracked").item() == 0
    assert all(module.training for module in model.modules())


@pytest.mark.usefixtures("my_nets")
def test_expanded_tensors_get_memory_of_their_own() -> None:
    model = build_for("my_nets:with_expanded", (1, 4, 4))
    assert [tensor.stride() for tensor in (model.get_buffer("mask"), model.get_parameter("weights"))] == [(1,), (1,)]
    assert build_for("my_nets:Extra", (1, 4, 4)).state_dict()["_extra_state"]["seen"] == 3


@pytest.mark.usefixtures("my_nets")
def test_a_generator_that_is_not_saved_is_named() -> None:
    with pytest.warns(
        UserWarning, match=r"with_generators: the random generators in Rows\.drawn are not saved"
    ) as told:
        build_for("my_nets:with_generators", (1, 4, 4))
    assert len(told) == 1


@pytest.mark.usefixtures("my_nets")
def test_a_sparse_embedding_gets_dense_gradients_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"my_nets:of_pixels: an embedding with sparse=True gets dense gradients"):
        model = build_for("my_nets:of_pixels", (1, 4, 4))
    model(torch.zeros(2, 1, 4, 4)).sum().backward()
    gradient = known(model.get_parameter("1.weight").grad)
    assert not gradient.is_sparse


def of_first_batch(channels: int, height: int, width: int, classes: int) -> nn.Module:
    return nn.Sequential(OfFirstBatch(), nn.Flatten(), nn.Linear(channels * height * width, classes))


def is_fresh(part: OfFirstBatch) -> bool:
    drawn = torch.equal(part.generator.get_state(), torch.Generator().manual_seed(1).get_state())
    same = part.own.getstate() == random.Random(1).getstate()
    return drawn and same and (part.spread, part.calls, part.shapes, part.ema.tolist()) == (None, 0, [0], [0.0, 0.0])


def test_the_check_leaves_no_trace() -> None:
    before = random.getstate(), str(np.random.get_state())
    model: Any = build_for("tests.test_models:of_first_batch", (1, 4, 4))
    assert is_fresh(model[0])
    assert (random.getstate(), str(np.random.get_state())) == before


@pytest.mark.parametrize("copies", [True, False])
def test_a_trial_leaves_no_trace(copies: bool) -> None:
    model: Any = of_first_batch(1, 4, 4, 10)
    model.lock = None if copies else threading.Lock()
    tried: Any
    with keeping.trial(model) as tried:
        assert (tried is model) is not copies
        tried(torch.randn(2, 1, 4, 4))
        assert not is_fresh(tried[0])
    assert is_fresh(model[0])


class ScaledByFirstBatch(nn.Linear):
    scaled = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.scaled:
            with torch.no_grad():
                self.weight.div_(super().forward(inputs).std())
            self.scaled = True
        return super().forward(inputs)


def scaled_by_first_batch(channels: int, height: int, width: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), ScaledByFirstBatch(channels * height * width, classes))


def made_count(name: str) -> int:
    """Return how often ``build`` calls the factory."""
    with mock.patch.object(factories, "call", wraps=factories.call) as calls:
        build_for(name, (1, 4, 4))
    return calls.call_count


def test_the_training_sets_data_dependent_weights() -> None:
    torch.manual_seed(3)
    model: Any = build_for("tests.test_models:scaled_by_first_batch", (1, 4, 4))
    after = torch.rand(1)
    assert made_count("tests.test_models:scaled_by_first_batch") == 2
    assert made_count("tests.test_models:partly_frozen") == 1
    torch.manual_seed(3)
    untouched: Any = scaled_by_first_batch(1, 4, 4, 10)
    assert torch.equal(model[1].weight, untouched[1].weight)
    assert not model[1].scaled
    assert torch.equal(torch.rand(1), after)


class Noting(nn.Module):
    """Layers that note what they did in a list and in a dict of their parent, which reads both."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Flatten(), nn.Linear(features, 10)
        self.notes: list[torch.Tensor] = []
        self.first.notes = self.notes  # type: ignore[assignment]
        self.kept: dict[str, torch.Tensor] = {}
        self.first.register_forward_hook(self._note)

    def _note(self, part: Any, _: Any, output: torch.Tensor) -> None:
        part.notes.append(output.mean())
        self.kept["hidden"] = output

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.notes.clear()
        self.first(images)
        return self.second(self.kept["hidden"]) + self.notes[0]  # type: ignore[no-any-return]


def noting(channels: int, height: int, width: int, classes: int) -> nn.Module:  # noqa: ARG001
    return Noting(channels * height * width)


def test_parts_that_share_values_survive_the_check() -> None:
    model: Any = build_for("tests.test_models:noting", (1, 4, 4))
    assert model.first.notes is model.notes
    images = torch.randn(2, 1, 4, 4)
    expected = model.second(images.flatten(1)) + images.mean()
    assert torch.equal(model(images), expected)
    kept = keeping.kept_values(model)
    model(torch.zeros(2, 1, 4, 4))
    keeping.put_back(model, kept)
    assert model.first.notes is model.notes
    assert torch.equal(model.kept["hidden"], images.flatten(1))


def partly_frozen(channels: int, height: int, width: int, classes: int) -> nn.Module:
    backbone = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4)).requires_grad_(False).eval()
    backbone.get_buffer("1.running_mean").fill_(0.5)
    return nn.Sequential(backbone, nn.Flatten(), nn.Linear(4 * (height - 2) * (width - 2), classes))


def as_if_loaded(**sizes: int) -> nn.Module:
    return partly_frozen(**sizes).eval()


def test_each_part_keeps_its_mode() -> None:
    model = build_for("tests.test_models:partly_frozen", (1, 4, 4))
    parts = {name: part.training for name, part in model.named_modules()}
    assert parts == {"": True, "0": False, "0.0": False, "0.1": False, "1": True, "2": True}
    assert all(part.training for part in build_for("tests.test_models:as_if_loaded", (1, 4, 4)).modules())


def test_a_factorys_exception_is_told_with_its_place(my_nets: Path) -> None:
    with pytest.raises(ModelError) as refused:
        build_for("my_nets:careless", (1, 4, 4))
    line = (my_nets / "my_nets.py").read_text().splitlines().index('    raise RuntimeError("my own mistake")') + 1
    place = f"my_nets.py, line {line}, in careless"
    assert str(refused.value).startswith("train.model: my_nets:careless raised RuntimeError: my own mistake (")
    assert str(refused.value).endswith(f"{place})")
    assert isinstance(refused.value.__cause__, RuntimeError)


def test_a_module_that_cannot_import_is_named(my_nets: Path) -> None:
    (my_nets / "my_broken_nets.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModelError, match="importing my_broken_nets failed: No module named 'not_installed_anywhere'"):
        build_for("my_broken_nets:net", (1, 4, 4))


def normalise(mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype = torch.uint8) -> Normalise:
    return Normalise(Statistics(mean=mean, std=std), torch.empty(0, 1, 1, 1, dtype=dtype))


def test_a_classifier_normalises_as_training_does() -> None:
    classifier = normalise((0.5, 0.2), (0.25, 0.1), torch.float32)
    images = torch.tensor([[[[255, 0]], [[51, 102]]]]) / 1.0
    torch.testing.assert_close(classifier(images), torch.tensor([[[[1018.0, -2.0]], [[508.0, 1018.0]]]]))
    every_value = torch.arange(256, dtype=torch.uint8).expand(3, 256).reshape(1, 3, 16, 16)
    split = labelled(every_value, torch.zeros(1, dtype=torch.int64))
    mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
    known = {"inputs": Statistics(mean=mean, std=std)}
    task = task_of(Dataset("grey", "0" * 64, ("a", "b"), None, known, split, split))
    batches = evaluation_batches(split, task, rank=0, world_size=1, batch_size=1)
    assert torch.equal(normalise(mean, std)(every_value), next(batches)[0])


def test_a_classifier_survives_pickling() -> None:
    model = build_for("squeezenet1_1", (3, 8, 8))
    classifier = nn.Sequential(normalise((0.5, 0.4, 0.3), (0.2, 0.2, 0.3)), model).eval()
    file = io.BytesIO()
    torch.save(classifier, file)
    file.seek(0)
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(torch.load(file, weights_only=False)(images), classifier(images))
    with pytest.raises(ValueError, match=r"found shape \[2, 1, 8, 8\]; expected \[N, 3, \.\.\., \.\.\.\]"):
        classifier(torch.zeros(2, 1, 8, 8))


def test_loading_imports_what_building_would(tmp_path: Path) -> None:
    (tmp_path / "my_own_net.py").write_text("def factory(**sizes):\n    raise RuntimeError\n")
    program = """
import sys
from pipeline import models
models.small_cnn(channels=1, height=8, width=8, classes=10)
for name in ("small_cnn", "my_own_net:factory", "resnet18"):
    models.load(name)
    print(*sorted({"torch._dynamo", "torchvision", "my_own_net"} & set(sys.modules)))
"""
    first, second, third = printed(program, cwd=tmp_path, PYTHONPATH=str(ROOT)).splitlines()
    assert (first, second, "torchvision" in third) == ("", "my_own_net", True)
