"""A variant of params.yaml: the settings of all techniques, with their types and defaults.

In the schema, a setting's description also says what its techniques do (``catalogue.yaml``). So the docstring under a
setting says only what no technique says.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from pipeline.params.sections import Count, Fraction, Pattern, PositiveInt, ProperFraction, Section

PARALLELISMS = ("ddp", "zero1", "fsdp", "pipeline", "tensor")
"""Values of ``parallelism`` that use several processes."""
ONE_BATCH = ("pipeline", "tensor")
"""Values of ``parallelism`` with which the processes that hold one model together take the same samples."""


class Distillation(Section):
    """A teacher, and how much a student learns from it."""

    teacher: Annotated[str, Field(min_length=1)]
    """VARIANT: the weights of that variant, trained with the same seed. Or a file of weights (a state dict), whose path
    contains a dot or a slash."""
    temperature: PositiveFloat = 4.0
    """Divides the logits of teacher and student, so that the teacher's small probabilities count. Unused in tasks
    without logits."""
    alpha: Fraction = 0.5
    """Weight of the distance to the teacher in the loss; the job's own loss has weight 1 - alpha."""
    model: str | None = None
    """The teacher's model. null: the model of the teacher's variant, or, for a file of weights, the job's model."""
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the teacher."""

    def __str__(self) -> str:
        return self.teacher

    @property
    def variant(self) -> str | None:
        """The teacher's name if the teacher is a variant; None if it is a file of weights."""
        return None if is_file(self.teacher) else self.teacher

    @property
    def file(self) -> Path | None:
        """The file of the teacher's weights; None if the teacher is a variant."""
        return Path(self.teacher).expanduser() if is_file(self.teacher) else None


class Lora(Section):
    """Which linear layers get low-rank changes, and of which rank."""

    rank: Count = 8
    """The rank of a layer's change."""
    alpha: PositiveFloat = 16.0
    """The change is multiplied by alpha / rank."""
    targets: Annotated[list[Pattern], Field(min_length=1)]
    """Patterns of the names of linear layers, such as "*.attention.*". What train matches is left out."""
    train: list[Pattern] = Field(default_factory=list)
    """Patterns of the names of parameters that are trained as without lora, such as a new head: "head.*"."""

    def __str__(self) -> str:
        return str(self.rank)


def is_file(teacher: str) -> bool:
    """Return whether ``teacher`` is the path of a file of weights. Otherwise it is the name of a variant."""
    return "." in teacher or "/" in teacher


class Variant(Section):
    """One way to train the job: a choice of techniques. An empty variant trains on one device in fp32."""

    # models
    model: str | None = None
    model_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for this model."""
    distillation: Distillation | None = None
    """A variant whose teacher is a variant belongs under students."""
    lora: Lora | None = Field(None, exclude_if=operator.not_)
    base_weights: Literal["nf4"] | None = Field(None, exclude_if=operator.not_)

    # parallelism
    parallelism: Literal["none", "data_parallel", "ddp", "zero1", "fsdp", "pipeline", "tensor"] = "none"
    processes: Count | Literal["auto"] = "auto"
    """Number of processes for the parallelism. auto: one per GPU; without a GPU, two per replica."""
    replicas: Count | Literal["hosts"] = 1
    """With fsdp, pipeline or tensor: number of complete models that the processes hold together. Each model takes a
    share of the batch, as in ddp. hosts: one on each host."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """Schedule of a pipeline. gpipe: all forward passes, then all backward passes. 1f1b: forward and backward passes
    alternate, so that at most as many micro-batches are in memory as there are stages."""
    reshard_after_forward: bool = True
    """Used only with parallelism: fsdp."""
    parameter_precision: Literal["fp32", "bf16"] = "fp32"
    """Used only with parallelism: fsdp."""
    cpu_offload: bool = False
    """Used only with parallelism: fsdp on GPUs."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: the processes share train.batch_size."""

    # precision
    precision: Literal["fp32", "tf32", "bf16", "fp16", "float8"] = "fp32"

    # communication between a variant's processes
    bucket_mb: Annotated[float, Field(gt=0.0, le=2.0**20)] | None = None
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    sync_batchnorm: bool = False
    communication_hook: Literal["none", "fp16", "bf16", "powersgd", "post_local_sgd"] = "none"

    # speed
    optimizer: Literal["muon"] | None = Field(None, exclude_if=operator.not_)
    """null: train.optimizer. muon replaces adamw, so it needs train.optimizer: adamw."""
    attention: Literal["auto", "flash", "efficient", "math", "cudnn", "flex"] = "auto"
    channels_last: bool = False
    compile: Literal["none", "default", "blocks", "reduce-overhead", "max-autotune"] = "none"
    cuda_graph: bool = False
    cudnn_benchmark: bool = False
    optimizer_kernel: Literal["fused", "foreach", "for_loop"] = "fused"

    # memory
    activation_checkpointing: bool | Literal["selective"] | ProperFraction = False
    activation_offload: bool = False
    gradient_accumulation: PositiveInt | Literal["auto"] = 1
    """Micro-batches per optimizer step. With a pipeline, 1 means up to four per stage."""
    loss_chunks: Count = 1
    optimizer_in_backward: bool = False
    optimizer_state: Literal["fp32", "8bit", "factored"] = "fp32"
    """The optimizer's state. 8bit and factored replace adamw, so they need train.optimizer: adamw."""
    set_to_none: bool = True
    expandable_segments: bool = False
    release_cache: bool = False

    # data loading
    data_loading: Literal["auto", "resident", "streamed", "dataloader"] = "auto"
    """Where batches come from. auto: train.placement decides."""
    loader_workers: Annotated[int, Field(ge=0, le=1024)] = 2
    """Number of the DataLoader's worker processes for each training process; 0: the training process itself loads the
    data."""

    extra: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Techniques of other installed packages: name -> its options."""

    # with a script
    arguments: str = Field("", exclude_if=operator.not_)
    """With script: further arguments of the command, after variables, as in a shell: OMP_NUM_THREADS=2 --bf16."""
    command: str | None = Field(None, exclude_if=operator.not_)
    """With script: a whole command in place of script.command, such as torchrun --nproc-per-node 2 train.py."""

    @property
    def copies(self) -> int:
        """``replicas`` of a variant whose plan has put a number in place of ``hosts``."""
        assert self.replicas != "hosts"
        return self.replicas
