"""Every optimizer against torch's own or its published formula, in any residency, and as planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, dtype  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

from flopwise.engine.kernels import blocks  # noqa: E402
from flopwise.engine.kernels.adamw_8bit import borders, dequantise, quantise, table  # noqa: E402
from flopwise.engine.kernels.dispatch import Codes, Seed, UpdateSettings, adamw_8bit  # noqa: E402
from flopwise.records.plan import Plan  # noqa: E402
from flopwise.setup.training import Training  # noqa: E402
from flopwise.work.optimizers import OPTIMIZERS, Optimizer  # noqa: E402
from flopwise.work.transformer import Transformer  # noqa: E402
from tests.engine.test_streaming_memory import assert_as_planned  # noqa: E402
from tests.engine.test_streaming_state import batch_for, plans, state_of_weights  # noqa: E402
from tests.support.optimizers import SIGNED_VALUES, BlockwiseAdamW, TorchTrainer, nearest  # noqa: E402
from tests.support.tiny_models import LLAMA, TOKENS, parameters, random_module  # noqa: E402
from tests.support.training_plans import CPU, FP64, assert_same_bits, executor_for, state_of  # noqa: E402

TABLES = (table(CPU, signed=True), table(CPU, signed=False))
SETTINGS = UpdateSettings(rate=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, step=1)
TRAINING = Training(steps=9, learning_rate=1e-2)
MODEL = replace(LLAMA, layers=3, hidden=64, heads=4, head_dim=16, ffn=96, vocab=1031)
"""Matrices of more than 4,096 numbers, tables that pass in pieces, and norms that are small."""


# -- codes of 8 bits ---------------------------------------------------------------------------------------------------


def test_tables_are_bitsandbytes() -> None:
    assert {place: float(TABLES[0][place]) for place in SIGNED_VALUES} == SIGNED_VALUES
    # Twice as many values without signs: at the ends of a decade they are half as far from its limits.
    halves = {1: 3.25e-7 * 1.0, 2: 7.75e-7, 127: 0.1 + 0.9 / 256, 254: 1 - 0.9 / 256}
    assert {place: float(TABLES[1][place]) for place in halves} == pytest.approx(halves, rel=1e-6)
    for values in TABLES:
        assert (values.diff() > 0).all() and len(values) == 256
        assert 0.0 in values and 1.0 in values


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_become_the_nearest_value(signed: bool) -> None:
    values = TABLES[0 if signed else 1]
    halfway = borders(CPU, signed=signed)
    drawn = torch.rand(2048, generator=torch.Generator().manual_seed(1)) * (2 if signed else 1) - int(signed)
    # In every block the largest is 1, so that the scale changes nothing.
    numbers = torch.cat([values, halfway, torch.ones(1), drawn])
    numbers[255::256] = 1.0
    codes, scales = torch.zeros(len(numbers), dtype=torch.uint8), torch.zeros(-(-len(numbers) // 256))
    quantise(numbers, codes, scales, signed=signed)
    assert torch.equal(scales, torch.ones_like(scales))
    assert torch.equal(codes[:255], torch.arange(255, dtype=torch.uint8))
    off = codes.long() != nearest(numbers, values)
    # Two that are as near but for rounding.
    chosen = values[codes.long()][off]
    assert torch.allclose((numbers[off] - chosen).abs(), (values[:, None] - numbers[off]).abs().amin(0), rtol=1e-4)
    assert torch.equal(dequantise(codes, scales, signed=signed), values[codes.long()])


@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("exact", [torch.float32, torch.float64])
def test_blockwise_adamw_is_the_plain_one_exactly(count: int, exact: dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 12 * 256 * exact.itemsize * 3)
    generator = torch.Generator().manual_seed(count)
    weights = torch.randn(count, dtype=exact, generator=generator)
    reference, expected = BlockwiseAdamW(count, TABLES), weights.clone()
    scales = [torch.zeros(-(-count // 256)) for _ in range(2)]
    moments = [torch.zeros(count, dtype=torch.uint8) for _ in range(2)]
    codes = Codes(moments[0], scales[0], moments[1], scales[1])
    for step in range(1, 6):
        gradients = torch.randn(count, dtype=exact, generator=generator) * 10.0 ** (step - 3)
        gradients[: count // 3] = 0.0
        expected = reference.step(expected, gradients, step=step, rate=0.01, betas=(0.9, 0.95))
        adamw_8bit(weights, gradients, codes, None, settings=replace(SETTINGS, step=step), offset=0)
        torch.testing.assert_close(weights, expected, rtol=2e-6 if exact == torch.float32 else 1e-13, atol=1e-7)
        for mine, other in zip([*moments, *scales], [*reference.codes, *reference.scales], strict=True):
            assert torch.equal(mine, other)


def test_a_master_and_chance_are_as_in_adamw() -> None:
    generator = torch.Generator().manual_seed(5)
    exact, gradients = (torch.randn(700, generator=generator) for _ in range(2))
    made = []
    for master in (exact.clone(), None):
        weights = exact.clone() if master is None else exact.bfloat16()
        codes = Codes(*(torch.zeros(700, dtype=torch.uint8), torch.zeros(3)) * 2)
        settings = replace(SETTINGS, rounding=Seed(3))
        adamw_8bit(weights, gradients, codes, master, settings=settings, offset=0)
        made.append(weights if master is None else master)
        if master is not None:
            assert torch.equal(weights, master.bfloat16())
    assert torch.equal(made[0], made[1])


# -- in the executor ---------------------------------------------------------------------------------------------------


def trained(plan: Plan, model: Transformer, steps: int = 2) -> dict[str, Tensor]:
    executor = executor_for(plan, model, parameters(random_module(model)), TRAINING)
    for step in range(steps):
        executor.step(batch_for(plan, model, step), step)
        assert_as_planned(plan, model, executor)
    return state_of(executor)


RATES: dict[Optimizer, float] = {"sgd": 0.1, "sgd-momentum": 0.1, "lion": 1e-3, "adafactor": 3e-2}


@pytest.mark.parametrize(
    ("optimizer", "nesterov", "clip"),
    [
        *((each, False, 0.5) for each in OPTIMIZERS if each != "adamw-8bit"),
        ("sgd-momentum", True, None),
        ("muon", False, None),
    ],
)
def test_every_step_is_torchs(optimizer: Optimizer, nesterov: bool, clip: float | None) -> None:
    """Ten steps of torch's own optimizers (Lion: of its paper) over a plain module, packed matrices apart."""
    training = Training(
        steps=10,
        learning_rate=RATES.get(optimizer, 1e-2),
        weight_decay=0.1,
        clip_norm=clip,
        warmup_steps=3,
        nesterov=nesterov,
        momentum=0.9,
    )
    module = random_module(MODEL)
    update_when = "end" if clip else "backward"
    plan = list(plans(MODEL, optimizer=optimizer, precision=FP64, update_when=update_when))[2]
    executor = executor_for(plan, MODEL, parameters(module), training)
    plain = TorchTrainer(module, MODEL, TOKENS, optimizer, training)
    for step in range(10):
        batch = batch_for(plan, MODEL, step % 4)
        assert executor.step(batch, step).loss == pytest.approx(
            plain.step(batch, step), rel=1e-6 if optimizer == "muon" else 1e-9
        )
    expected = parameters(module)
    off = {name: float((values - expected[name]).abs().max()) for name, values in executor.weights().items()}
    # Muon's products are in bf16, where the last bit of a sum may round another way.
    assert max(off.values()) < (1e-4 if optimizer == "muon" else 1e-8), off


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [*((each, "bf16-mixed") for each in OPTIMIZERS), ("adamw", "fp32"), ("adamw-8bit", "fp32"), ("adafactor", "fp32")],
)
def test_every_residency_gives_the_same_bits(optimizer: Optimizer, precision: str) -> None:
    every = list(plans(MODEL, optimizer=optimizer, precision=precision))
    # Two cuts alternate.
    expected = [trained(plan, MODEL) for plan in every[:2]]
    for number, plan in enumerate(every[2:]):
        assert_same_bits(trained(plan, MODEL), expected[number % 2])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_goes_on_in_another_residency(optimizer: Optimizer) -> None:
    every = list(plans(MODEL, optimizer=optimizer, precision="bf16-mixed"))
    for plan, other in ((every[0], every[2]), (every[2], every[6])):
        first = executor_for(plan, MODEL, parameters(random_module(MODEL)), TRAINING)
        batches = [batch_for(plan, MODEL, seed) for seed in range(3)]
        for step in range(2):
            first.step(batches[step], step)
        second = executor_for(other, MODEL, state_of_weights(first), TRAINING)
        for name, moment, values in first.moments():
            second.set_moment(name, moment, values)
        assert_same_bits(state_of(second), state_of(first))
        assert {(each.name, field.name) for each, field in first.remembered()} == {
            (name, moment) for name, moment, _ in first.moments()
        }
        first.step(batches[2], 2)
        second.step(batches[2], 2)
        assert_same_bits(state_of(second), state_of(first))


def test_eight_bits_learn_as_well_as_thirty_two() -> None:
    """A tiny model learns one batch by heart; the losses stay close to each other."""
    losses = {}
    for optimizer in ("adamw", "adamw-8bit"):
        plan = next(plans(MODEL, optimizer=optimizer, precision="fp32"))
        executor = executor_for(plan, MODEL, parameters(random_module(MODEL)), replace(TRAINING, steps=20))
        batch = batch_for(plan, MODEL, 0)
        losses[optimizer] = [executor.step(batch, step).loss for step in range(20)]
    assert losses["adamw"][-1] < 0.5 * losses["adamw"][0]
    assert losses["adamw-8bit"] == pytest.approx(losses["adamw"], rel=0.02, abs=0.005)


# -- a mean of the weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_mean_of_the_weights_is_torchs(optimizer: Optimizer) -> None:
    """In any residency; it begins as the weights that were given."""
    training = replace(TRAINING, ema=0.9)
    for plan in list(plans(MODEL, optimizer=optimizer, precision=f"{FP64},average=fp64"))[::3]:
        module = random_module(MODEL)
        executor = executor_for(plan, MODEL, parameters(module), training)
        averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        averaged.update_parameters(module)
        for step in range(3):
            executor.step(batch_for(plan, MODEL, step), step)
            assert_as_planned(plan, MODEL, executor)
            with torch.no_grad():
                for name, value in module.named_parameters():
                    value.copy_(executor.weights()[name])
            averaged.update_parameters(module)
        found = {name: values for name, moment, values in executor.moments() if moment == "average"}
        for name, value in averaged.module.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-12, atol=1e-12)
