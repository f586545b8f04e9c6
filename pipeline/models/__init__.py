"""Builds single-device models by name, for the shape of the data."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from itertools import pairwise
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
from torch.utils._pytree import tree_leaves, tree_map

from pipeline import factories
from pipeline.errors import PipelineError
from pipeline.models import from_config, keeping
from pipeline.models.from_config import FromConfig
from pipeline.models.gpt import GPT
from pipeline.params import unknown_model
from pipeline.processes import randomness

_SMALL_IMAGE = 64
"""If an image's shorter side has fewer pixels than this, a ResNet's ImageNet stem would leave too few pixels."""


_FILLED_IN = {"image_size", "input_size", "dropout"}
"""Arguments that torchvision's model classes require, but that a user may leave out or set, because the builders have
defaults for them. The builders set all other required arguments."""


class ModelError(PipelineError):
    """The model of train.model and train.model_options cannot be built or does not fit the data."""


def build(
    name: str, options: dict[str, Any], data: dict[str, Any], *, inputs: Any, outputs: tuple[int, ...]
) -> nn.Module:
    """Build a single-device float32 model that maps n samples like ``inputs`` [n, ...] to outputs [n, *``outputs``]. If
    the inputs are tensors by name, the model passes them to its ``forward`` by name.

    ``name`` is a key of ``_OWN``, the name of a torchvision classification model (without trained weights, see
    ``torchvision_model``), or the user's own ``module:factory``. The function that makes the model gets ``options`` and
    ``data``. ``data`` is the task's description of inputs and outputs, such as ``channels``, ``height``, ``width`` and
    ``classes``. The initial weights depend only on the process's random state. Each part keeps the mode, training or
    evaluation, in which the factory returned it. But if all parts are in evaluation mode, as pretrained models are when
    they are loaded, all are put into training mode. Raises ModelError for an invalid name, option or output, and for a
    model that cannot be trained, evaluated or saved.
    """
    factory = _factory(name) if ":" in name else _OWN.get(name, partial(torchvision_model, name))
    random_state = randomness.state()

    def made() -> nn.Module:
        randomness.restore(random_state)
        model = factories.call(factory, name, "train.model", options, error=ModelError, **data)
        if not isinstance(model, nn.Module):
            raise ModelError(f"train.model: {name} returned {model!r}; expected a torch.nn.Module.")
        if isinstance(inputs, dict):  # a hook, because a wrapper would change the names in the state dict
            model.register_forward_pre_hook(_by_name, with_kwargs=True)
        _make_ready(name, model, inputs)
        return model

    model = made()
    sets_weights = _check(name, model, inputs, outputs)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"train.model: {name} has no parameter to train; expected parameters that require a gradient.")
    return made() if sets_weights else model


def library_of(name: str) -> str:
    """Return the library that the model ``name`` comes from; empty for this package's models and the user's own."""
    if name == "transformers":
        return name
    return "" if ":" in name or name in _OWN else "torchvision"


def load(name: str) -> None:
    """Import the modules that building ``name`` needs, so that their memory is not counted as the training's.

    Raises ModelError for an unknown name.
    """
    if ":" in name:
        _factory(name)
    elif name == "transformers":
        from_config.load()
    elif name not in _OWN:
        from torchvision import models

        if problem := unknown_model(name, models.list_models(module=models)):
            raise ModelError(problem)


def small_cnn(*, channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Two 5x5 convolutions of 20 channels and two linear layers (320-50-10 for 28x28x1 images): a textbook model.

    If both sides have at least 16 pixels, the convolutions are not padded, as in textbooks. On smaller images, the
    convolutions are padded by 2 and keep the image's size. Pooling comes before the ReLU, so that the ReLU processes
    only a quarter of the values. Both are monotone, so their order does not change the outputs. Raises ModelError for
    sides below 4 pixels.
    """
    if min(height, width) < 4:
        raise ModelError(f"train.model: small_cnn needs images of at least 4x4 pixels; found {height}x{width}.")
    padding = 0 if min(height, width) >= 16 else 2

    def block(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, 20, 5, padding=padding), nn.MaxPool2d(2), nn.ReLU(inplace=True))

    def side(pixels: int) -> int:
        for _ in range(2):
            pixels = (pixels - 4 + 2 * padding) // 2
        return pixels

    features = 20 * side(height) * side(width)
    head = nn.Sequential(nn.Flatten(), nn.Linear(features, 50), nn.ReLU(inplace=True), nn.Linear(50, classes))
    return nn.Sequential(block(channels), block(20), head)


def resnet9(*, channels: int, height: int, width: int, classes: int, base_width: int = 64) -> nn.Module:
    """Eight 3x3 convolutions (four in two residual pairs) and a linear layer: the model of the CIFAR-10 speed records.

    Source: Page, "How to Train Your ResNet", 2018. ``base_width`` is the number of channels of the first
    convolution. The last pooling covers all remaining pixels: 4x4 for 32x32 images, as in the original.
    Raises ModelError for sides below 8 pixels, because three poolings would leave no pixel.
    """
    if min(height, width) < 8:
        raise ModelError(f"train.model: resnet9 needs images of at least 8x8 pixels; found {height}x{width}.")

    def block(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.MaxPool2d(2)) if pool else nn.Sequential(*layers)

    c1, c2, c3, c4 = (base_width * factor for factor in (1, 2, 4, 8))
    return nn.Sequential(
        block(channels, c1),
        block(c1, c2, pool=True),
        _Residual(block(c2, c2), block(c2, c2)),
        block(c2, c3, pool=True),
        block(c3, c4, pool=True),
        _Residual(block(c4, c4), block(c4, c4)),
        nn.MaxPool2d((height // 8, width // 8)),
        nn.Flatten(),
        nn.Linear(c4, classes, bias=False),
        _Scale(0.125),
    )


def mlp(*, features: int, classes: int = 0, outputs: int = 0, width: int = 64, depth: int = 2) -> nn.Module:
    """Maps table rows to ``classes`` logits or, if ``classes`` is 0, to ``outputs`` numbers. There are ``depth`` hidden
    ReLU layers of ``width`` units."""
    sizes = [features, *[width] * depth]
    hidden = [nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(sizes)]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], classes or outputs))


class _Residual(nn.Sequential):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first, second = self
        residual: torch.Tensor = second(first(images))
        return images + residual


class _Scale(nn.Module):
    """Multiplies the logits by a factor, so that a freshly initialised model gives no class a large probability."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.factor


_OWN: dict[str, Any] = {"small_cnn": small_cnn, "resnet9": resnet9, "mlp": mlp, "gpt": GPT, "transformers": FromConfig}


def torchvision_model(name: str, *, channels: int, height: int, width: int, classes: int, **options: Any) -> nn.Module:
    """Return a torchvision classification model without trained weights, adapted to the data.

    - The first convolution takes ``channels`` channels.
    - ResNets (also ResNeXt and Wide ResNet) for images whose shorter side is below 64 pixels: the stem is a 3x3
      convolution of stride 1 without max-pooling, as is usual for CIFAR. Source: He et al., "Deep Residual
      Learning for Image Recognition", 2016, section 4.2.
    - Vision transformers and MaxViT: images are resized to the size in the option ``image_size`` or ``input_size``
      (224 by default), because these models take images of one size only.
    - All other models: an image below the model's smallest size (``min_size`` of torchvision's published weights)
      is enlarged to this size, and keeps its proportions.
    - Inception and GoogLeNet have no auxiliary classifiers, and do not normalise the input a second time.

    A forward pre-hook of the model resizes the images on the device, bilinearly. Raises ModelError for an unknown name
    and for options that the model does not take.
    """
    from torchvision import models  # imported here: the import takes a second, and only these models need it

    load(name)
    builder = models.get_model_builder(name)
    fixed = {"weights": None, "num_classes": classes}
    if name in ("inception_v3", "googlenet"):
        fixed |= {"aux_logits": False, "transform_input": False, "init_weights": options.get("init_weights", True)}
    parameters = inspect.signature(inspect.signature(builder).return_annotation).parameters.values()
    accepted = {p.name for p in parameters if p.default is not p.empty or p.name in _FILLED_IN}
    accepted -= {"num_classes", "aux_logits", "transform_input"}
    if unknown := options.keys() - accepted:
        raise ModelError(
            f"train.model_options: found {', '.join(sorted(unknown))}, which {name} does not take; allowed: "
            f"{', '.join(sorted(accepted))}."
        )
    model: nn.Module = builder(**{**options, **fixed})

    if isinstance(model, models.ResNet) and min(height, width) < _SMALL_IMAGE:
        _replace_first_convolution(model, channels, kernel_size=3, stride=1, padding=1)
        model.maxpool = nn.Identity()
    elif channels != 3:
        _replace_first_convolution(model, channels)

    if isinstance(model, models.VisionTransformer):
        size = (model.image_size, model.image_size)
    elif isinstance(model, models.MaxVit):
        size = tuple(options.get("input_size", (224, 224)))
    else:
        least = min(tuple(weights.meta["min_size"]) for weights in models.get_model_weights(name))
        growth = max(Fraction(1), Fraction(least[0], height), Fraction(least[1], width))
        size = (math.ceil(height * growth), math.ceil(width * growth))
    if size != (height, width):
        # A hook, because a wrapper module would change the names in the state dict and the modules that techniques
        # find.
        model.register_forward_pre_hook(partial(_resized, size, size[0] < height or size[1] < width))
    return model


def _replace_first_convolution(model: nn.Module, channels: int, **changes: int) -> None:
    """Replace the first convolution by one with ``channels`` input channels. Its new weights are scaled to keep the
    variance of the outputs."""
    name, old = next((name, part) for name, part in model.named_modules() if isinstance(part, nn.Conv2d))
    kept = {
        key: getattr(old, key) for key in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    }
    new = nn.Conv2d(channels, old.out_channels, **(kept | {"bias": old.bias is not None} | changes))
    with torch.no_grad():
        spread = old.weight.std() * math.sqrt(old.weight[0].numel() / new.weight[0].numel())
        new.weight.copy_(torch.randn_like(new.weight) * spread)
        if old.bias is not None and new.bias is not None:
            new.bias.copy_(old.bias)
    model.set_submodule(name, new)


def _resized(size: tuple[int, ...], antialias: bool, _: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return F.interpolate(inputs[0], size, mode="bilinear", antialias=antialias)


def _factory(name: str) -> Callable[..., Any]:
    """Return the function that ``module:factory`` names."""
    return factories.find(name, "train.model", "a model", example="nets:my_net", error=ModelError)


def _by_name(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a dict of inputs on by name."""
    return ((), {**given[0], **named}) if given else (given, named)


def _make_ready(name: str, model: nn.Module, inputs: Any) -> None:
    """Change what training, or the techniques, could not deal with; see ``build`` for the modes.

    Lazy modules get their shapes. Tensors whose elements share memory get memory of their own. Sparse gradients become
    dense, because momentum and weight decay change all rows, and fused optimizers take no sparse gradients.
    """
    if not any(module.training for module in model.modules()):
        model.train()
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        with torch.no_grad(), keeping.evaluating(model):
            _output(f"train.model: {name}", model, inputs)
    for tensor in (*model.parameters(), *model.buffers()):
        if keeping.overlaps(tensor):
            tensor.data = tensor.data.contiguous()
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            module.sparse = False
            warnings.warn(f"train.model: {name}: an embedding with sparse=True gets dense gradients.", stacklevel=2)
        for key, value in vars(module).items():
            generators = {type(leaf) for leaf in tree_leaves(value)} & randomness.OBJECTS.keys()
            if generators and type(value) not in generators:
                warnings.warn(
                    f"train.model: {name}: the random generators in {type(module).__name__}.{key} are not saved, so a "
                    "resumed run may end with other weights; make each of them an attribute by itself.",
                    stacklevel=2,
                )
    if any(map(torch.is_complex, model.parameters())):
        warnings.warn(f"train.model: {name}: complex parameters have no fused optimizer.", stacklevel=2)


def _check(name: str, model: nn.Module, inputs: Any, outputs: tuple[int, ...]) -> bool:
    """Raise ModelError unless the model returns an output of shape ``outputs`` for each of several samples in training
    mode, and for one sample in evaluation mode, and its state can be saved and loaded.

    Return whether a forward pass set weights, which only a pass of the training may do. Runs forward passes, which take
    less time than a training step. For a small model, a pass on the meta device would take longer, because it imports
    torch._dynamo. The model and the random state stay unchanged.
    """
    versions = [parameter._version for parameter in model.parameters()]
    with torch.no_grad(), keeping.trial(model) as tried:
        for rows, mode in ((inputs, "training"), (tree_map(lambda values: values[:1], inputs), "evaluation")):
            where, expected = f"train.model: {name} in {mode} mode", (len(tree_leaves(rows)[0]), *outputs)
            with nullcontext() if mode == "training" else keeping.evaluating(tried):
                made = _output(where, tried, rows)
            if not isinstance(made, torch.Tensor) or (tuple(made.shape), made.dtype) != (expected, torch.float32):
                shape = f"{made.dtype} of shape {list(made.shape)}" if isinstance(made, torch.Tensor) else ""
                raise ModelError(
                    f"{where} on a batch of shape {_shapes(rows)} returns {shape or type(made).__name__}; expected "
                    f"a tensor, torch.float32 of shape {list(expected)}."
                )
        sets_weights = versions != [parameter._version for parameter in model.parameters()]
        state = tried.state_dict(keep_vars=True)
        # A wrapper keeps numbers in a form of its own, such as 8 bits.
        tensors = {key for key, value in state.items() if torch.is_tensor(value) and not is_wrapper(value)}
        others = {key: value for key, value in state.items() if key not in tensors and not keeping.is_plain(value)}
        if others:
            raise ModelError(
                f"train.model: the state dict of {name} has {shorten(str(others), 99)}, which no checkpoint can hold; "
                "expected plain tensors, and from get_extra_state also numbers, text, and lists and dicts of these."
            )
        try:
            tried.load_state_dict(state)
        except Exception as error:
            raise ModelError(
                f"train.model: {name} cannot load its own state dict: {shorten(str(error), 250)}"
            ) from error
    return sets_weights


def _shapes(inputs: Any) -> Any:
    return tree_map(lambda values: list(values.shape), inputs)


def _output(where: str, model: nn.Module, inputs: Any) -> object:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    try:
        return model(tree_map(lambda values: values.to(device), inputs))
    except Exception as error:
        raise ModelError(f"{where} on a batch of shape {_shapes(inputs)} fails: {error}") from error
