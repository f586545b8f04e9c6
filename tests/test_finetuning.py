"""A training begins with the weights of a file, and leaves alone what is frozen."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.data.prepared import Dataset, Split
from pipeline.environment import code
from pipeline.errors import ConfigError, PipelineError
from pipeline.models.finetuning import INDEX, WeightsError
from pipeline.models.optimizers import optimizer_of
from pipeline.params import check_names, parse
from pipeline.plans import plan as plan_of
from pipeline.training.checkpoints import state_sha256
from pipeline.training.loop import Training
from pipeline.training.measured import conditions_of
from tests.commands import printed
from tests.nets import ALONE
from tests.pages import ROOT
from tests.parallel import CPU
from tests.trainings import (
    DATA,
    LENGTH,
    TRAIN,
    VOCABULARY,
    learned,
    ledgers,
    make_training,
    needs_library,
    resumes_exactly,
    settings_of,
)


def steps_of_three(split: str) -> Split:
    """Return windows of tokens, each of which is its predecessor plus three."""
    windows = getattr(DATA["language_model"], split).arrays["inputs"].long()
    return Split({"inputs": ((windows[:, :1] + 3 * torch.arange(LENGTH + 1)) % VOCABULARY).to(torch.uint16)})


CAUSAL = settings_of("language_model")


@pytest.fixture(scope="module")
def pretrained() -> dict[str, torch.Tensor]:
    """The weights of a language model that has been trained; its last layer is tied to its first."""
    training = make_training(DATA["language_model"], train=CAUSAL, seed=7)
    learned(training)
    return training.weights()


def begun(weights: Path, **changes: Any) -> dict[str, torch.Tensor]:
    job = CAUSAL.model_copy(update={"weights": str(weights)} | changes)
    return make_training(DATA["language_model"], train=job).model.state_dict()


def untied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state as safetensors keeps it: of tensors that share memory, only one."""
    return {name: values.contiguous() for name, values in state.items() if name != "4.weight"}


def test_each_form_of_weights_is_where_training_begins(pretrained: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(pretrained, tmp_path / "state.pt")
    save_file(untied(pretrained), tmp_path / "state.safetensors")
    for folder in ("whole", "sharded"):
        (tmp_path / folder).mkdir()
    save_file(untied(pretrained), tmp_path / "whole" / "model.safetensors")
    parts: dict[str, dict[str, torch.Tensor]] = {"first": {}, "second": {}}
    for number, (name, values) in enumerate(untied(pretrained).items()):
        parts["second" if number % 2 else "first"][name] = values
    for part, state in parts.items():
        save_file(state, tmp_path / "sharded" / f"{part}.safetensors")
    places = {name: f"../{part}.safetensors" for part, state in parts.items() for name in state}
    (tmp_path / "sharded" / INDEX).write_text(json.dumps({"weight_map": places}))
    for form in ("state.pt", "state.safetensors", "whole", "sharded"):
        assert state_sha256(begun(tmp_path / form)) == state_sha256(pretrained), form
    half = {name: values.bfloat16() for name, values in pretrained.items()}
    torch.save({name.removeprefix("net."): values for name, values in half.items()}, tmp_path / "half.pt")
    assert {values.dtype for values in begun(tmp_path / "half.pt").values()} == {torch.float32}


@pytest.mark.slow
def test_a_folder_of_transformers_is_where_training_begins(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    about = transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY, tie_word_embeddings=True)
    theirs = transformers.AutoModelForCausalLM.from_config(about)
    theirs.save_pretrained(tmp_path, max_shard_size=4096)
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    options = {"model": "transformers", "model_options": {"config": str(tmp_path / "config.json")}}
    begins = begun(tmp_path, **options)
    expected = {f"net.{name}": values for name, values in theirs.state_dict().items()}
    assert state_sha256(begins) == state_sha256(expected)


def test_weights_must_fit_but_for_what_is_new(pretrained: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path, name = tmp_path / "state.pt", "1.mlp.0.bias"
    for changes, problem in (
        ({name: None}, f"{name} is missing"),
        ({name: torch.ones(3)}, rf"{name} has shape \[3\], not \[64\]"),
        ({"1.mlp.9.bias": torch.ones(3)}, "1.mlp.9.bias is not in the model"),
    ):
        changed = {key: value for key, value in (pretrained | changes).items() if value is not None}
        torch.save(changed, path)
        with pytest.raises(WeightsError, match=rf"does not fit gpt: {problem}\. Set train.allow_new"):
            begun(path)
        kept = begun(path, allow_new=["1.mlp.?.bias"])
        assert torch.equal(kept["1.mlp.0.weight"], pretrained["1.mlp.0.weight"])
    assert torch.equal(kept[name], pretrained[name])
    for content in (nn.Linear(2, 2), {"model": pretrained}, {"epoch": 3}):  # a pickle's code must not run
        torch.save(content, path)
        with pytest.raises(WeightsError, match=rf"{path} cannot be read as weights"):
            begun(path)
    with pytest.raises(ConfigError, match=r"train.weights: found '.*none.pt', which is neither"):
        check_names(CAUSAL.model_copy(update={"weights": str(tmp_path / "none.pt")}))


def test_other_weights_are_another_training(pretrained: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    job = {"task": "language_model", "model": "gpt", "weights": str(path)}
    config = parse({"train": job, "variants": {"baseline": {}, "own": {"model": "mlp"}}})
    plans = {name: plan_of(config, name, CPU) for name in config.variants}
    digests = []
    for factor in (1.0, 2.0):
        torch.save({name: factor * values for name, values in pretrained.items()}, path)
        digests.append({name: code.of_variant(plan) for name, plan in plans.items()})
    assert digests[0]["baseline"] != digests[1]["baseline"]
    assert digests[0]["own"] == digests[1]["own"], "a variant's own model begins with new weights"


def test_full_and_low_rank_tuning_learn_from_weights(pretrained: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(pretrained, tmp_path / "state.pt")
    begins = {"weights": str(tmp_path / "state.pt"), "epochs": 10, "history_every_steps": 1, "learning_rate": 0.02}
    rank, every_layer = 4, {"targets": ["*"], "rank": 4}
    data = replace(DATA["language_model"], train=steps_of_three("train"), test=steps_of_three("test"))

    def tuned(**applied: Any) -> Training:
        return make_training(data, train=CAUSAL.model_copy(update=begins), **applied)

    full, low = tuned(), tuned(lora=every_layer)
    starts = full.evaluate().loss
    assert low.evaluate().loss == starts, "B begins with zeros"
    losses = [learned(training) for training in (full, low)]
    assert losses[0][0][0] == losses[1][0][0]
    assert losses[0][1] < losses[1][1] < 0.8 * starts

    kept, names = (
        low.weights(),
        {f"{n}.{part}" for n in (1, 2) for part in ("attention.query_key_value", "attention.out")},
    )
    names |= {f"{n}.mlp.{part}" for n in (1, 2) for part in (0, 2)}
    assert kept.keys() == pretrained.keys()
    changed = {name for name in kept if not torch.equal(kept[name], pretrained[name])}
    assert changed == {f"{name}.weight" for name in names}, "the tied head, norms and biases are as before"
    for name in changed:
        values = torch.linalg.svdvals((kept[name] - pretrained[name]).double())
        assert values[rank] < 1e-4 * values[0] < values[rank - 1]
    sizes = {kept[name].shape for name in changed}
    assert sizes == {(48, 16), (16, 16), (64, 16), (16, 64)}
    assert conditions_of(low, "a CPU").trained_count == 2 * rank * (64 + 32 + 80 + 80)

    deployed = make_training(data, train=CAUSAL)
    deployed.model.load_state_dict(kept)
    assert deployed.evaluate() == low.score
    assert resumes_exactly(*(tuned(lora=every_layer) for _ in range(3)))
    plain, adapted = ledgers(full), ledgers(low)
    for measured, foreseen in (plain, adapted):
        assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)
    assert adapted[0].optimizer_state_bytes < 0.5 * plain[0].optimizer_state_bytes


def test_low_rank_tuning_is_that_of_peft() -> None:
    peft = pytest.importorskip("peft")
    changes = {"schedule": "constant", "warmup_fraction": 0.0, "epochs": 4, "history_every_steps": 1}
    train = CAUSAL.model_copy(update=changes)
    plain = make_training(DATA["language_model"], train=train)
    ours = make_training(DATA["language_model"], train=train, lora={"targets": ["*"], "rank": 4, "alpha": 8})
    state = ours.model.state_dict()
    layers = [name.removesuffix(".lora_a") for name in state if name.endswith(".lora_a")]
    theirs = peft.get_peft_model(plain.model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers))
    for layer in layers:
        adapted = theirs.get_submodule(f"base_model.model.{layer}")
        for factors, own in ((adapted.lora_A, "lora_a"), (adapted.lora_B, "lora_b")):
            factors["default"].weight.data.copy_(state[f"{layer}.{own}"])
    optimizer, losses = optimizer_of(train, theirs), []
    for inputs, targets in chain(*map(plain.batches.epoch, range(train.epochs))):
        optimizer.zero_grad()
        loss = plain.task.objective.loss(theirs(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert learned(ours)[0] == losses
    assert state_sha256(ours.weights()) == state_sha256(theirs.merge_and_unload().state_dict())


IN_BITS: dict[str, Any] = {"lora": {"targets": ["*"], "rank": 4}, "base_weights": "nf4"}
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""The levels, as appendix E of the paper has them."""


def rounded(weights: torch.Tensor) -> torch.Tensor:
    """Return the nearest of 16 levels, times the largest of 64 weights that follow each other."""
    blocks = weights.view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    return (NF4[((blocks / largest).unsqueeze(-1) - NF4).abs().argmin(-1)] * largest).view_as(weights)


@needs_library
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_in_4_bits_are_the_numbers_that_they_stand_for(
    precision: str, pretrained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(pretrained, tmp_path / "state.pt")
    train = CAUSAL.model_copy(update={"weights": str(tmp_path / "state.pt"), "history_every_steps": 1})
    how: dict[str, Any] = {"train": train, "precision": precision}
    ours = make_training(DATA["language_model"], **how, **IN_BITS)
    plain = make_training(DATA["language_model"], **how, lora=IN_BITS["lora"])
    state = ours.model.state_dict()
    adapted, in_bits = (
        [name.removesuffix(ending) for name in state if name.endswith(ending)] for ending in ("lora_a", "lora_scales")
    )
    assert (len(adapted), in_bits) == (8, ["1.mlp.2.", "2.mlp.2."]), "the others have 16 inputs"
    begun = {name: values.clone() for name, values in pretrained.items()}
    for layer in in_bits:
        weight = plain.model.get_parameter(f"{layer}weight").data
        begun[f"{layer}weight"] = weight.copy_(rounded(weight)).clone()
        held_bytes = state[f"{layer}weight"].nbytes + state[f"{layer}lora_scales"].nbytes
        assert held_bytes == weight.numel() // 2 + 4 * weight.numel() // 64
    torch.testing.assert_close(ours.weights(), begun, rtol=1e-6, atol=1e-7)
    assert list(ours.weights()) == list(pretrained)

    for training in (ours, plain):
        generator = torch.Generator().manual_seed(1)
        for layer in adapted:
            factor = training.model.get_parameter(f"{layer}lora_b").data
            factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
        training.step.forward(*next(training.batches.epoch(0))).backward()
    gradients = [
        {name: weight.grad for name, weight in training.model.named_parameters() if weight.grad is not None}
        for training in (ours, plain)
    ]
    assert gradients[0].keys() == {f"{layer}{factor}" for layer in adapted for factor in ("lora_a", "lora_b")}
    close = (1e-4, 1e-6) if precision == "fp32" else (0.05, 1e-3)
    torch.testing.assert_close(*gradients, rtol=close[0], atol=close[1])

    losses = [learned(training) for training in (ours, plain)]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4 if precision == "fp32" else 0.02)
    for layer in adapted:
        first, second = (ours.model.get_parameter(f"{layer}{factor}").detach() for factor in ("lora_a", "lora_b"))
        begun[f"{layer}weight"] += 16 / 4 * second @ first
    torch.testing.assert_close(ours.weights(), begun, rtol=1e-6, atol=1e-6)
    deployed = make_training(DATA["language_model"], **how)
    deployed.model.load_state_dict(ours.weights())
    assert deployed.evaluate() == ours.score


@needs_library
@pytest.mark.parametrize("changes", [{}, {"ema_decay": 0.8}])
def test_a_training_in_4_bits_resumes_exactly(changes: dict[str, Any]) -> None:
    train = CAUSAL.model_copy(update={"epochs": 10} | changes)
    assert resumes_exactly(*(make_training(DATA["language_model"], train=train, **IN_BITS) for _ in range(3)))


@needs_library
def test_other_numbers_of_inputs_and_trained_layers_stay_as_they_are(digits: Dataset) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 10))
    settings = IN_BITS | {"lora": IN_BITS["lora"] | {"train": ["3.*"]}}
    training = make_training(digits, model=net, **settings)
    state = training.model.state_dict()
    assert state["1.weight"].dtype == torch.uint8
    assert {name for name in state if "lora" in name} == {
        *(f"1.lora_{part}" for part in ("a", "b", "scales")),
        *("2.lora_a", "2.lora_b"),
    }
    training.advance(2)
    assert training.weights().keys() == {f"{n}.{part}" for n in (1, 2, 3) for part in ("weight", "bias")}
    with pytest.raises(
        ConfigError, match=r"base_weights: found 'nf4', but lora adapts no layer whose number of inputs"
    ):
        make_training(
            digits,
            model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 10)),
            **settings | {"lora": {"targets": ["2"]}},
        )


@needs_library
@pytest.mark.parametrize("before", ["", "import kernels; "])
def test_bitsandbytes_fetches_no_kernel_and_says_nothing(before: str, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("def get_kernel(*_, **__): print('fetched')")
    load = "from pipeline.processes import load_bitsandbytes; load_bitsandbytes()"
    program = f"import sys; sys.stderr = sys.stdout; {before}{load}"
    assert printed(program, PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT)))) == ""


def test_patterns_of_adapters_must_match(digits: Dataset) -> None:
    for settings, problem in (
        (
            {"targets": ["*.attention"]},
            r"variants.\w+.lora.targets: '\*.attention' matches no linear .* in Sequential, which has 2.1, in its",
        ),
        (
            {"targets": ["2.1"], "train": ["2.*"]},
            r"lora.targets: '2.1' matches no linear .* in Sequential, which has none",
        ),
        ({"targets": ["*"], "train": ["head.*"]}, "lora.train: 'head.*' matches no parameter of Seq.*2.1.bias, in"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make_training(digits, lora=settings)


FROZEN = TRAIN.model_copy(update={"model": "shufflenet_v2_x0_5", "frozen": ["conv?.*", "stage*"]})


def test_a_frozen_backbone_stays_as_it_is(digits: Dataset) -> None:
    training = make_training(digits, train=FROZEN)
    before = {name: values.clone() for name, values in training.model.state_dict().items()}
    training.advance(5)
    training.evaluate()
    training.advance(1)
    changed = {name for name, values in training.model.state_dict().items() if not torch.equal(values, before[name])}
    assert changed == {"fc.weight", "fc.bias"}
    assert {name for name, part in training.model.named_modules() if part.training} == {"", "maxpool", "fc"}
    conditions = conditions_of(training, "a CPU")
    assert (conditions.trained_count, conditions.parameter_count) == (1024 * 10 + 10, training.parameter_count)

    measured, foreseen = ledgers(training)
    assert foreseen.peak_bytes == pytest.approx(measured.tensors_bytes, rel=0.05)
    assert measured.optimizer_state_bytes == 4 * (1024 * 10 + 10)
    plain = make_training(digits, train=FROZEN.model_copy(update={"frozen": []}))
    assert conditions_of(plain, "a CPU").trained_count is None


def test_what_cannot_be_frozen_is_refused(digits: Dataset) -> None:
    for patterns, problem in (
        (["backbone.*"], "train.frozen: 'backbone.\\*' matches no parameter of small_cnn.* in its parts 0, "),
        (["*"], "leaves no parameter of small_cnn to train"),
    ):
        with pytest.raises(PipelineError, match=problem):
            make_training(digits, ALONE, train=TRAIN.model_copy(update={"model": "small_cnn", "frozen": patterns}))
