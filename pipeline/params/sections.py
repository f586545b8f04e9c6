"""The sections of params.yaml as frozen, validated pydantic models. A variant's section is ``variants.Variant``."""

from __future__ import annotations

import operator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
ProperFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1, le=2**16)]
"""Number of things, such as processes, that each take memory. A number above the limit is a mistake."""
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
"""From 0 to the largest signed 32-bit integer."""
Side = Annotated[int, Field(gt=0, le=2**13)]
"""Side of an image, in pixels."""
LONGEST = 1e6
"""Most seconds or minutes. Much larger numbers would overflow a timer."""
Duration = Annotated[float, Field(gt=0.0, le=LONGEST)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # valid for every random generator
DataSetName = Literal[
    "fashion_mnist", "mnist", "cifar10", "digits", "image_folder", "synthetic", "arrays", "text_folder", "python_source"
]
InferenceForm = Literal["eager", "compiled", "bf16", "fp16", "int8", "exported"]
Pattern = Annotated[str, Field(min_length=1)]
"""Pattern of the names of parameters in the model's state dict, with * and ? as in file names."""
VariantName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=100)]  # becomes a file's name


class Section(BaseModel):
    """A part of params.yaml. It is immutable, refuses unknown keys, and converts no types except integers to floats."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


TASKS = {
    "classification": ("cross_entropy", "accuracy"),
    "language_model": ("cross_entropy", "token_accuracy"),
    "multi_label": ("binary_cross_entropy", "label_accuracy"),
    "regression": ("mean_squared_error", "within_tolerance"),
}
"""Built-in task -> the name of its loss and the name of its score."""
WEIGH_CLASSES = (("classification", "cross_entropy"), ("multi_label", "binary_cross_entropy"))
"""Task and loss that can take weights of classes."""
OF_OWN_TASK = ("loss", "score")
"""The name of the loss and the name of the score if the task is the user's own."""


class Synthetic(Section):
    """The generated data set."""

    train: PositiveInt = 10_000
    """Training samples."""
    test: PositiveInt = 1_000
    """Test samples."""
    shape: Annotated[list[PositiveInt], Field(min_length=1, max_length=8)] = [3, 32, 32]
    """Shape of a sample's inputs: [channels, height, width] for images, [features] for rows of a table, [length + 1]
    for tokens."""
    dtype: Literal["uint8", "float32"] = "uint8"
    """Type of the inputs; float32 values are from 0 to 1. Tokens are always integers."""
    targets: Literal["labels", "floats", "tokens"] = "labels"
    """labels: classes. floats: numbers to predict. tokens: each token predicts the next token."""
    classes: Annotated[int, Field(ge=2, le=2**16)] = 10
    """Number of classes; each class is a texture with noise. With floats: the number of values to predict; each value
    is the strength of a texture. With tokens: the size of the vocabulary."""
    seed: Seed = 0
    """Seed of the samples."""


class Fetch(Section):
    """The data set, and the source of its raw files."""

    dataset: DataSetName = "fashion_mnist"
    """The data set. Three data sets need neither a network nor files of yours: digits comes with scikit-learn,
    python_source is Python's standard library as text, and synthetic is generated. A score on synthetic images means
    nothing."""
    mirror: str | None = None
    """A directory with the raw files, or its file:// address. It is tried before other sources."""
    image_folder: str | None = None
    """For dataset image_folder: the directory with train/CLASS/* and, for a test split, test/CLASS/*."""
    arrays: str | None = None
    """For dataset arrays: the source of the arrays, in one of five forms. (1) A folder with inputs.npy and, optionally,
    targets.npy, test_inputs.npy and test_targets.npy. (2) An .npz or .safetensors file with these arrays. (3) A
    .parquet table. (4) A folder that save_to_disk of the library datasets wrote, with the columns inputs and targets.
    (5) module:function of your own, which is called with the argument split and yields dicts of arrays."""
    arrays_options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of your function in fetch.arrays."""
    files: list[str] = Field([], exclude_if=operator.not_)
    """For a function of your own: the files, and folders of files, of the work tree that it reads, such as table.csv. A
    change of such a file fetches again. A file of the work tree that is not listed here is refused."""
    text_folder: str | None = None
    """For dataset text_folder: the directory of UTF-8 files."""
    synthetic: Synthetic = Synthetic()
    timeout_seconds: Duration = 20.0
    """Longest wait for a server's answer."""
    attempts: PositiveInt = 3
    """Attempts for each source, with growing pauses between them."""

    @property
    def own_module(self) -> str:
        """The module of the user's function that yields the arrays; an empty string if there is no such function."""
        return (self.arrays or "").partition(":")[0] if self.dataset == "arrays" and ":" in (self.arrays or "") else ""


class Prepare(Section):
    """How raw files are converted to packed arrays."""

    image_size: Annotated[list[Side], Field(min_length=2, max_length=2)] | None = None
    """For image_folder: [height, width] to which every image is resized."""
    broken_images: Literal["fail", "skip"] = "fail"
    """For image_folder. fail: stop at an unreadable image. skip: leave the image out. In both cases, a message names
    the image."""
    image_range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """For image_folder: the range [low, high] that becomes 0 to 255 in images of more than 8 bits, such as 16-bit PNG
    or float TIFF; null: such images are refused."""
    test_fraction: ProperFraction = 0.2
    """Share held out for testing if the data set has no test split. With classes, it is a share of each class; without
    classes, a share of all samples; for text, a share of the files."""
    train_limit: PositiveInt | None = None
    """For trials: number of training samples to keep: the first ones; of arrays, which may be sorted, samples from all
    over, every class among them. null: all."""
    test_limit: PositiveInt | None = None
    """For trials: number of test samples to keep, as for train_limit; null: all."""
    tokenizer: str | None = None
    """For text: a tokenizer.json, read by the library tokenizers; null: the bytes are the tokens. If you change the
    file, run `dvc repro --force prepare`."""
    window: PositiveInt = 128
    """For text: number of tokens that a sample predicts."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Decoding processes; auto: one per CPU core."""


class Augment(Section):
    """Random changes of the training images, drawn anew in each epoch."""

    crop_padding: NonNegativeInt = 0
    """Pad with this many zeros on each side, then crop to the original size at a random position."""
    flip: bool = False
    """Mirror left-right with probability one half."""
    cutout: NonNegativeInt = 0
    """Side in pixels of a square that is set to the mean; 0: no square."""


class Train(Section):
    """The job that every variant trains."""

    OF_RUNS: ClassVar = frozenset({"seeds", "history_every_steps"})
    """Settings that decide which runs there are and what is recorded. A seed's training does not depend on them."""
    OF_RESUMING: ClassVar = frozenset({"checkpoint_every_steps"})
    """Settings for resuming a run; no result depends on these settings."""

    task: str = "classification"
    """classification, language_model, multi_label, regression, or module:class of your own, derived from
    pipeline.tasks.Task."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task. regression takes tolerance: the largest error, in standard deviations of the training
    targets, that its score counts as correct (0.5 by default)."""
    model: str = "small_cnn"
    """For images: small_cnn, resnet9, or the name of a torchvision classification model. For rows of a table: mlp. For
    tokens: gpt or transformers. For any data: module:factory of your own."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the model."""
    weights: str | None = Field(None, exclude_if=operator.not_)
    """The weights with which training begins: a .safetensors file, a state dict that torch.save wrote, or a folder of
    transformers. They must fit the model. null: new weights. A variant with a model of its own begins with new
    weights."""
    allow_new: list[Pattern] = Field([], exclude_if=operator.not_)
    """Patterns of names that the weights may lack or have in another shape; they begin with new values."""
    frozen: list[Pattern] = Field([], exclude_if=operator.not_)
    """Parameters that are not trained: patterns of names, such as "backbone.*". Parts of the model that are frozen as a
    whole stay in evaluation mode."""
    loss: str = Field(default_factory=lambda data: TASKS.get(data.get("task"), OF_OWN_TASK)[0])
    """Default: the task's loss, such as cross_entropy for classification. Or module:factory of your own: the factory is
    called with loss_options and with arguments that describe the task's outputs, such as classes. It returns a function
    that maps outputs and targets to the mean loss of the samples."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for your own loss."""
    class_weights: Literal["balanced"] | list[NonNegativeFloat] | None = Field(None, exclude_if=operator.not_)
    """For classification: the weight of each class in the training's loss, in the order of the labels. balanced: the
    number of labels, divided by the number of classes and by the number of the class's labels. The loss of a global
    batch is divided by the sum of its labels' weights. For multi_label: for each label, the weight of samples that have
    it, when those without it weigh 1; balanced: their number, divided by that of those with it. null: all weigh the
    same."""
    metric: str = Field(default_factory=lambda data: TASKS.get(data.get("task"), OF_OWN_TASK)[1])
    """Default: the task's score, such as accuracy for classification. Or module:function of your own, which maps
    outputs and targets to a score from 0 to 1 per sample. Results, margins and target_accuracy use the mean score."""
    metric_over: Literal["samples", "test_set"] = Field("samples", exclude_if="samples".__eq__)
    """test_set: your metric is a function of all outputs and targets of the test set, such as macro-F1, and returns a
    number from 0 to 1. Or it is an object of torchmetrics, or a class with update and compute."""
    files: list[str] = Field([], exclude_if=operator.not_)
    """Files, and folders of files, that code of your own reads, such as settings.json. A change of such a file trains
    and measures again. Training and bench refuse to read a file of the work tree that is not listed here."""
    seeds: Annotated[list[Seed], Field(min_length=1)] = [0, 1, 2]
    """One run per seed; every variant has the same seeds."""
    epochs: PositiveInt = 2
    """Passes over the training set."""
    batch_size: PositiveInt = 256
    """Global batch: samples per optimizer step, over all devices and micro-batches. For a variant with scaling: weak,
    batch_size is the number of samples per data-parallel process."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd (with Nesterov momentum) or adamw."""
    learning_rate: PositiveFloat = 0.1
    """Peak learning rate."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """SGD's momentum, or AdamW's beta1."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0, exclude_if=lambda beta2: beta2 == 0.999)
    """AdamW's beta2."""
    epsilon: float = Field(1e-8, gt=0.0, exclude_if=lambda epsilon: epsilon == 1e-8)
    """AdamW's epsilon, which is added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 5e-4
    """Weight decay."""
    no_decay: list[Pattern] = Field([], exclude_if=operator.not_)
    """Parameters without weight decay: patterns of names, such as "*.bias". The word vectors stands for all parameters
    with at most one dimension, such as biases and the weights of norms."""
    lr_factors: dict[Pattern, PositiveFloat] = Field({}, exclude_if=operator.not_)
    """Pattern of names -> factor of these parameters' learning rate, such as "head.*": 10. If several patterns match a
    name, the factors multiply."""
    clip_norm: PositiveFloat | None = Field(None, exclude_if=operator.not_)
    """Largest norm of the gradients of a step, over all parameters, micro-batches and processes; longer gradients are
    scaled down to it. null: no limit."""
    ema_decay: ProperFraction | None = Field(None, exclude_if=operator.not_)
    """After each step, an average of the weights becomes ema_decay times itself plus (1 - ema_decay) times the weights.
    The average, with the model's current buffers, is evaluated and kept. null: the weights themselves."""
    schedule: Literal["one_cycle", "cosine", "constant"] = "one_cycle"
    """The learning rate after the warm-up. one_cycle: falls linearly to zero. cosine: falls to zero along half a
    cosine. constant: stays the same."""
    warmup_fraction: Fraction = 0.2
    """Share of all steps in which the learning rate rises from zero."""
    lr_warmup_steps: NonNegativeInt | None = Field(None, exclude_if=lambda steps: steps is None)
    """The number of these steps, in place of the share."""
    label_smoothing: Fraction = 0.0
    """Label smoothing of cross_entropy in training."""
    augment: Augment = Augment()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    placement: Literal["auto", "resident", "streamed"] = "auto"
    """Where the training data are. resident: on the device. streamed: in the prepared files, from which batches are
    read. auto: resident if the data take at most a quarter of the device's free memory."""
    without_native: Literal["leave_out", "refuse", "run"] = "leave_out"
    """What to do with a technique that this machine only emulates. leave_out: skip the technique, and report that it
    was skipped. refuse: stop with an error. run: use the emulation."""
    deterministic: bool = True
    """Use PyTorch's deterministic algorithms, so that a seed gives the same result again. If an operation has no
    deterministic algorithm, the run and its report name the operation."""
    warmup_steps: PositiveInt = 5
    """Steps before the measured window, for compilation, autotuning and filling caches."""
    history_every_steps: PositiveInt = 50
    """Number of steps from one row of the history to the next. Each epoch ends with a row, too."""
    checkpoint_every_steps: PositiveInt | None = None
    """Number of steps from one checkpoint to the next. Each epoch ends with a checkpoint, too. null: one per epoch."""


class Metric(Section):
    """Where a script leaves its test score, and how it becomes a share from 0 to 1."""

    file: str | None = None
    """A JSON file that the script writes, such as out/metrics.json; key names the value in it. {seed} is filled in."""
    key: str | None = None
    """The value's place in the file: accuracy, or eval.accuracy for a value inside another."""
    pattern: str | None = None
    """In place of file and key: a regular expression with one group. Its last match in the output counts."""
    name: str = "accuracy"
    """The score's name in the report."""
    scale: PositiveFloat = 1.0
    """The value that counts as 100%: 1 for a fraction, 100 for percent; for a loss, more than it ever is."""
    higher_is_better: bool = True
    """false: the score is 100% minus the scaled value."""

    @property
    def direction(self) -> Literal["higher is better", "lower is better"]:
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def is_share(self) -> bool:
        """True if the script's own value is the score already."""
        return self.higher_is_better and self.scale == 1.0

    def score(self, value: float) -> float:
        """Return the share of 1 that ``value`` counts as; outside of 0 to 1, the scale does not fit."""
        return value / self.scale if self.higher_is_better else 1.0 - value / self.scale


class Script(Section):
    """A training script of your own, which runs unchanged in place of the job under train."""

    command: str
    """The command, as in a shell, such as python train.py --seed {seed}. It may begin with variables: SEED={seed}."""
    metric: Metric
    outputs: list[str] = []
    """Files and folders that the script writes, such as out; each seed's are kept under models/VARIANT/seed-N."""
    samples_per_step: PositiveInt | None = None
    """Samples of one optimizer step over all processes, if they cannot be seen; null: they are counted."""
    batch_differs: bool = False
    """The variants' batches differ on purpose: compare samples per second."""
    optimizer: NonNegativeInt = 0
    """The number of the optimizer whose steps count, as they are made; 0: the first that takes a step."""
    in_place: bool = False
    """Run in this directory instead of a copy of it for each run."""
    timeout_seconds: Duration = 600.0
    """Longest silence until the first step, and of a variant in the bench."""

    OF_MEASURING: ClassVar = frozenset({"timeout_seconds"})
    """Settings on which no figure depends."""


class Bench(Section):
    """Measurement of the steady-state speed and memory of all variants."""

    max_minutes: Duration = 2.5
    """Longest time for the rounds. At least six rounds are measured even if they take longer, because fewer give no
    verdict."""
    hard_limit: bool = False
    """Stop at max_minutes (in the gate: at gate.max_minutes) even before the sixth round."""
    max_rounds: PositiveInt | None = None
    """Stop after this many rounds; null: no limit."""
    window_seconds: Duration = 1.5
    """Length of the baseline's measured window in a round. Every variant takes as many steps as the baseline. If
    variants take long to start, the window is longer."""
    turns: PositiveInt = 10
    """On a CPU, each variant's window is divided into this many turns, and the variants run their turns alternately. So
    a disturbance of a few seconds affects all variants equally. On a GPU, there is one turn."""
    ablate: list[VariantName] = []
    """Variants whose techniques are measured one by one: for each technique, the baseline with it and the variant
    without it."""
    max_input_wait: Fraction = 0.5
    """Largest share of a window spent waiting for input. A window with a larger share measures the input, not the
    technique, and is rejected."""
    max_foreign_load: Fraction = 0.1
    """Largest share of the CPU's time that other processes may take in a window. A window with a larger share is
    rejected."""
    energy: bool = Field(False, exclude_if=operator.not_)
    """Also measure the energy per sample, with the energy counters of the GPUs or the CPU. GPUs need windows of at
    least a second."""


class Profile(Section):
    """Profiling of steps with torch's profiler, to show where their time goes."""

    variants: list[VariantName] = []
    """Variants that the stage profile@VARIANT profiles."""
    steps: PositiveInt = 10
    """Steps in the profiled window, after the warm-up."""


class Infer(Section):
    """Measurement of the trained model in the forms in which it can be deployed."""

    variants: list[VariantName] = []
    """Variants whose model the stage infer@VARIANT measures."""
    forms: list[InferenceForm] = ["eager", "compiled", "bf16", "fp16", "int8", "exported"]
    """Forms that are made and measured. eager is always measured; other forms are compared with eager."""
    batch_sizes: Annotated[list[Count], Field(min_length=1, max_length=7)] = [1, 16, 256]
    """Throughput is measured with batches of each of these sizes; latency with one sample."""
    rounds: PositiveInt = 8
    """Number of rounds; each round measures every form. With fewer than six, no ratio gets an interval."""
    window_seconds: Duration = 0.1
    """Length of a measured window. In a round, each form has one window for latency, and one for each batch size."""
    energy: bool = Field(False, exclude_if=operator.not_)
    """Also measure the energy per sample."""


class Margins(Section):
    """The largest differences that do not matter."""

    throughput: ProperFraction = 0.03
    """Margin of the ratio of samples per second."""
    memory: ProperFraction = 0.03
    """Margin of the ratio of peak memories."""
    accuracy: ProperFraction = 0.01
    """Margin of the test accuracy: 0.01 is one percentage point."""
    energy: ProperFraction | None = Field(None, exclude_if=operator.not_)
    """Margin of the ratio of energies per sample (bench.energy); null: no verdict uses energy."""


class Compare(Section):
    """How results are compared."""

    baseline: VariantName = "baseline"
    """The variant with which all others are compared."""
    target_accuracy: ProperFraction = 0.85
    """The comparison includes the time until a variant reaches this test accuracy."""
    margins: Margins = Margins()
    max_spread: PositiveFloat = 0.15
    """The verdict is *untrusted* if the interval of the baseline's ratio to itself is wider than this."""
    price_per_device_hour: PositiveFloat | dict[str, PositiveFloat] | None = Field(None, exclude_if=operator.not_)
    """What an hour of a GPU costs or, without GPUs, of a host, in any currency; or such a price for each kind, by a
    part of its name: {H100: 2.5, EPYC: 0.4}. The report then has the price of an epoch, and `python -m pipeline scale`
    that of a training."""

    def price_on(self, device: str) -> float | None:
        """Return the price of an hour of ``device``, such as "NVIDIA H100 PCIe"; None if it has no price."""
        prices = self.price_per_device_hour
        if isinstance(prices, dict):
            return next((price for part, price in prices.items() if part in device), None)
        return prices


class Scale(Section):
    """How many devices pay: `python -m pipeline scale`."""

    worth: PositiveFloat = 0.1
    """How much more throughput twice the devices must bring, as a fraction, so that they pay."""


class Gate(Section):
    """How the gate compares two commits."""

    max_minutes: Duration = 10.0
    """Longest time for the rounds of both commits; at least six rounds are measured even if they take longer. If it is
    still unclear after this time whether a figure became worse by must_see, the time is doubled."""
    must_see: PositiveFloat = 0.1
    """The gate passes only if it can exclude that throughput or memory became worse by this fraction."""
    variants: list[str] = Field(default_factory=list)
    """Variants to measure in addition to compare.baseline; empty: all variants of the commit that the gate compares
    against."""
    accuracy: bool = True
    """Also train both commits and compare their accuracies."""


class Publish(Section):
    """Publication of the results in MLflow."""

    experiment: Annotated[str, Field(min_length=1)] = "training-performance"
    """MLflow's experiment."""
    live: bool = True
    """Show trainings in MLflow while they run; finished runs are published in any case."""
    models: bool = True
    """Log each run's trained model, ready for mlflow.pyfunc."""
    registered_model: Annotated[str, Field(pattern="^[^/:]+$")] = "training-performance"
    """Name in MLflow's registry for the model that `python -m pipeline promote` registers."""


Word = Annotated[str, Field(pattern=r"^\S+$")]
"""A text without spaces and line ends, which stands in a line of its own in a batch script."""


class Slurm(Section):
    """What a job that is submitted to Slurm asks for."""

    nodes: Count = 1
    """Number of nodes."""
    gpus: NonNegativeInt = 0
    """GPUs of each node."""
    cpus: Count | None = None
    """Processors of each node; null: whole nodes, which no other job uses meanwhile."""
    time: Word | None = None
    """Longest time of a start, such as 04:00:00. Two minutes before its end the job is put back into the queue, and
    goes on from its checkpoint. null: the partition's."""
    restarts: NonNegativeInt = 10
    """How often the job goes back into the queue when its time is nearly over; after that, its time-out ends it."""
    partition: Word | None = None
    """null: Slurm's default."""
    account: Word | None = None
    """null: your default."""
    options: list[Annotated[str, Field(pattern=r"^-\S+$")]] = []
    """Further options of sbatch, such as --qos=high."""
    setup: list[str] = []
    """Lines of shell that run before the command, such as module load cuda."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = {}
    """Environment variables of the command."""
    container: str | None = None
    """An image in which the command runs, on one node; null: without a container."""
    runtime: Literal["apptainer", "pyxis"] = "apptainer"
    """What starts the container: Apptainer, or Slurm's plugin Pyxis."""


class Kubernetes(Section):
    """The pods in which a job runs on Kubernetes."""

    pods: Count = 1
    """Number of pods, each a host."""
    secret: str | None = None
    """The Secret whose entry "key" lets pods start commands in each other; needed for several pods."""
    image: str
    """The image; it needs the project's packages, as the one of `make image` has them."""
    claim: str
    """The PersistentVolumeClaim with the checkout, which becomes the /workspace of all pods."""
    resources: dict[str, int | str] = {}
    """What each pod gets, such as nvidia.com/gpu: 4 and memory: 64Gi."""
    environment: dict[str, str] = {}
    """Environment variables of the command."""


class Launch(Section):
    """Where the processes run that train together. No figure depends on this section: what it changes of a plan or of
    the environment is recorded there."""

    hosts: Literal["auto"] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = "auto"
    """The hosts among which processes are divided, the one that runs the commands first. auto: the nodes of the Slurm
    allocation in whose batch script a command runs, or the pods of `submit kubernetes`; elsewhere this host alone."""
    on_host: str = "srun --overlap -N1 -n1 -w {host}"
    """The words that run a command on another host, in the same directory: {host} and {directory} are filled in. With
    ssh: "ssh {host} env -C {directory}". In pods of `submit kubernetes`, this setting is not used."""
    address: str | None = None
    """The IP address of this host at which the other hosts reach it; null: that of the route to the second host."""
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes | None = None
