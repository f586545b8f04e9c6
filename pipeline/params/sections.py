"""The sections of params.yaml as frozen, validated models. A variant's is put together by ``catalogue``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
ProperFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1, le=2**16)]
"""Of what takes memory or a process each: more is a mistake, and better refused than tried."""
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
"""What C takes for a count."""
Side = Annotated[int, Field(gt=0, le=2**13)]
"""Of a picture, in pixels."""
Duration = Annotated[float, Field(gt=0.0, le=1e6)]
"""Seconds or minutes: more overflow a timer."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what every generator takes
InferenceForm = Literal["eager", "compiled", "bf16", "fp16", "int8", "exported"]
VariantName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=100)]  # a file's name, with an ending


class Section(BaseModel):
    """A part of params.yaml: read once, never changed, no unknown key, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Synthetic(Section):
    """Images that are made up."""

    train: PositiveInt = Field(10_000, description="Training images.")
    test: PositiveInt = Field(1_000, description="Test images.")
    shape: Annotated[list[PositiveInt], Field(min_length=3, max_length=3)] = Field(
        [3, 32, 32], description="Of an image: [channels, height, width]."
    )
    classes: Annotated[int, Field(ge=2, le=2**16)] = Field(10, description="Each is a texture, under noise.")
    seed: Seed = Field(0, description="Of textures and noise.")


class Fetch(Section):
    """Which data set, and where its raw files come from."""

    dataset: Literal["fashion_mnist", "mnist", "cifar10", "digits", "image_folder", "synthetic"] = Field(
        "fashion_mnist",
        description="The data set. digits comes with scikit-learn, synthetic is made up: neither needs a network. What "
        "a model scores on made-up images means nothing.",
    )
    mirror: str | None = Field(
        None,
        description="A directory, or a file:// address of one, that holds the raw files; tried first.",
    )
    image_folder: str | None = Field(
        None,
        description="For dataset image_folder: the directory with train/CLASS/* and, if there is one, test/CLASS/*.",
    )
    synthetic: Synthetic = Synthetic()
    timeout_seconds: Duration = Field(20.0, description="Longest wait for a server's answer.")
    attempts: PositiveInt = Field(3, description="Attempts for each source, with growing pauses between.")


class Prepare(Section):
    """How raw files become packed arrays."""

    image_size: Annotated[list[Side], Field(min_length=2, max_length=2)] | None = Field(
        None, description="For image_folder: [height, width] to which every image is resized."
    )
    broken_images: Literal["fail", "skip"] = Field(
        "fail", description="For image_folder: what an unreadable image does; either way it is named."
    )
    test_fraction: ProperFraction = Field(
        0.2, description="Share of each class held out for testing where the data set has no test split."
    )
    train_limit: PositiveInt | None = Field(None, description="Keep only the first N training samples (for tries).")
    test_limit: PositiveInt | None = Field(None, description="Keep only the first N test samples (for tries).")
    workers: PositiveInt | Literal["auto"] = Field("auto", description="Decoding processes; auto: one a CPU core.")


class Augment(Section):
    """Random changes of the training images, drawn for a whole batch at once on the device."""

    crop_padding: NonNegativeInt = Field(0, description="Zero-pad by this many pixels, then crop back at random.")
    flip: bool = Field(False, description="Mirror left-right with probability one half.")
    cutout: NonNegativeInt = Field(0, description="Side in pixels of a square set to the mean; 0: none.")


class Train(Section):
    """The job. Every variant trains exactly this."""

    OF_RUNS: ClassVar = frozenset({"seeds", "history_every_steps"})
    """Of how many runs are made and what is noted of them: no step depends on these."""
    OF_RESUMING: ClassVar = frozenset({"checkpoint_every_steps"})
    """No number depends on these."""

    model: str = Field(
        "small_cnn",
        description="small_cnn, resnet9, a torchvision classification model's name, or module:factory of your own.",
    )
    model_options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for the model.")
    loss: str = Field(
        "cross_entropy",
        description="cross_entropy, or module:factory of your own: called with classes and loss_options, it returns a "
        "function of logits and labels, the mean of the samples' losses.",
    )
    loss_options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for your own loss.")
    metric: str = Field(
        "accuracy",
        description="accuracy, or module:function of your own: of logits and labels, a score from 0 to 1 a sample. "
        "Results, margins and target_accuracy then mean its mean.",
    )
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(
        [0, 1, 2], description="One run a seed; every variant runs the same."
    )
    epochs: PositiveInt = Field(2, description="Passes over the training set.")
    batch_size: PositiveInt = Field(
        256,
        description="Global batch: samples an optimizer step, over all devices and micro-batches. With a variant's "
        "scaling: weak, each process's share of it.",
    )
    optimizer: Literal["sgd", "adamw"] = Field("sgd", description="sgd (with Nesterov momentum) or adamw.")
    learning_rate: PositiveFloat = Field(0.1, description="Peak learning rate.")
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="SGD's momentum, or AdamW's beta1.")
    weight_decay: NonNegativeFloat = Field(5e-4, description="Weight decay.")
    schedule: Literal["one_cycle", "cosine", "constant"] = Field(
        "one_cycle", description="After the warm-up: linear to zero, half a cosine to zero, or constant."
    )
    warmup_fraction: Fraction = Field(0.2, description="Share of all steps over which the rate rises from zero.")
    label_smoothing: Fraction = Field(0.0, description="Label smoothing of cross_entropy in training.")
    augment: Augment = Augment()
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is a GPU.")
    placement: Literal["auto", "resident", "streamed"] = Field(
        "auto",
        description="Data set on the device, or streamed from the memory map; auto: resident when it fits.",
    )
    without_native: Literal["leave_out", "refuse", "run"] = Field(
        "leave_out",
        description="A technique that this machine only emulates: left out (and reported as such), refused, or run.",
    )
    deterministic: bool = Field(
        True,
        description="PyTorch's deterministic algorithms, so that a seed repeats exactly; an operation that has none is "
        "named by the run and its report.",
    )
    warmup_steps: PositiveInt = Field(
        10, description="Steps before the measured window: compilation, autotuning and caches settle here."
    )
    history_every_steps: PositiveInt = Field(50, description="A row of history every N steps, besides one an epoch.")
    checkpoint_every_steps: PositiveInt | None = Field(
        None, description="A resume point every N steps, besides one an epoch; null: only every epoch."
    )


class Bench(Section):
    """Steady-state speed and memory of all variants, side by side."""

    max_minutes: Duration = Field(
        2.5,
        description="Rounds are measured until this time is spent, and at least six, fewer than which decide nothing.",
    )
    hard_limit: bool = Field(False, description="Stop at max_minutes also before the sixth round; the gate as well.")
    max_rounds: PositiveInt | None = Field(None, description="Stop after this many rounds; null: time alone decides.")
    window_seconds: Duration = Field(
        1.5,
        description="Measured window of the baseline in a round; every variant takes as many steps as it does. Longer "
        "where variants take long to start.",
    )
    turns: PositiveInt = Field(
        10,
        description="On a CPU, a window's steps are taken in so many turns, between those of the other variants, so "
        "that what the machine does for some seconds hits all alike; 1: in one go. On a GPU always 1.",
    )
    ablate: list[VariantName] = Field(
        [], description="Variants whose techniques are measured one by one: added to the baseline, and left out."
    )
    max_input_wait: Fraction = Field(
        0.5, description="A sample that waits longer for input measures the input, not the technique, and is refused."
    )
    max_foreign_load: Fraction = Field(
        0.1, description="A sample beside which other processes took a larger share of the CPU's time is refused."
    )


class Profile(Section):
    """Where a step's time goes, under torch's profiler."""

    variants: list[VariantName] = Field([], description="Variants that the stage profile@VARIANT looks at.")
    steps: PositiveInt = Field(10, description="Steps in the profiled window, after the warm-up.")


class Infer(Section):
    """The trained model in the forms in which it can be deployed."""

    variants: list[VariantName] = Field([], description="Variants whose model the stage infer@VARIANT measures.")
    forms: list[InferenceForm] = Field(
        ["eager", "compiled", "bf16", "fp16", "int8", "exported"],
        description="Forms that are made and measured; eager, with which they are compared, always is.",
    )
    batch_sizes: Annotated[list[Count], Field(min_length=1, max_length=7)] = Field(
        [1, 16, 256], description="Throughput is measured with batches of each of these sizes; latency with one image."
    )
    rounds: PositiveInt = Field(8, description="In each, every form takes its turns; fewer than six bound no ratio.")
    window_seconds: Duration = Field(0.1, description="Of one form with one batch size in a round.")


class Margins(Section):
    """Differences up to here do not matter."""

    throughput: ProperFraction = Field(0.03, description="Of the ratio of samples a second.")
    memory: ProperFraction = Field(0.03, description="Of the ratio of peak memories.")
    accuracy: ProperFraction = Field(0.01, description="Of the test accuracy, absolute: 0.01 is one percentage point.")


class Compare(Section):
    """How results become a comparison."""

    baseline: VariantName = Field("baseline", description="The variant that the others are compared with.")
    target_accuracy: ProperFraction = Field(0.85, description="Time to this test accuracy is compared.")
    margins: Margins = Margins()
    max_spread: PositiveFloat = Field(
        0.15, description="Relative width of the baseline's interval against itself above which nothing is believed."
    )


class Gate(Section):
    """How a commit is held against another."""

    max_minutes: Duration = Field(
        10.0,
        description="Rounds of both commits are measured until this time is spent, and at least six; twice as long "
        "where a loss of must_see is neither shown nor excluded then.",
    )
    must_see: PositiveFloat = Field(
        0.1, description="A loss this large, of throughput or memory, must be excluded: what allows for it is no pass."
    )
    accuracy: bool = Field(True, description="Also compare accuracies, which both commits must have been trained for.")


class Publish(Section):
    """MLflow: the mirror of the files."""

    experiment: Annotated[str, Field(min_length=1)] = Field("training-performance", description="MLflow's experiment.")
    live: bool = Field(True, description="Follow training live; the final runs are published either way.")
    models: bool = Field(True, description="Log each run's trained model, ready for mlflow.pyfunc.")
    registered_model: Annotated[str, Field(pattern="^[^/:]+$")] = Field(
        "training-performance", description="The registry's name for what `python -m pipeline promote` registers."
    )
