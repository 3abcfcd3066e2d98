"""Random plans for small models that really run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.modules import Dropper, ReferenceModel
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.engine.streaming.gated import GatedKernels
from flopwise.plan.program.compile import compile_plan
from flopwise.records.plan import Plan, Residency
from flopwise.setup.training import Training
from flopwise.work.parameters import ENDS
from flopwise.work.transformer import Transformer

FP64 = "fp32,matrix=fp64,compute=fp64,weights=fp64,gradients=fp64,moments=fp64"
CPU = torch.device("cpu")
GRADIENTS = Training(steps=1, beta1=0.0, weight_decay=0.0, learning_rate=1e-3)
"""With these the first moment after a step is the gradient."""

Pick = Callable[[Sequence[Any]], Any]


def everything_stays(model: Transformer, *, sequence: int, sequences: int = 1, **changes: Any) -> Plan:
    """One chunk of whole sequences, kept whole on the device."""
    stays = Residency(blocks=model.layers, ends=ENDS)
    settled: dict[str, Any] = {
        "hardware": "this-cpu",
        "device_memory_bytes": 1 << 40,
        "host_memory_bytes": 1 << 40,
        "sequence_tokens": sequence,
        "chunk_tokens": sequence * sequences,
        "chunks_per_round": 1,
        "rounds_per_step": 1,
        "head_chunk_tokens": 7,
        "attention": "chunk",
        "weights": stays,
        "gradients": stays,
        "optimizer_state": stays,
        "saves": ("F",) * model.layers,
        "precision": FP64,
    }
    settled |= changes
    whole = "".join(settled["saves"]).count("F")
    return Plan(**{"activation_slots": whole + 1, **settled})


def cut_plan(model: Transformer, *, sequence: int, chunk: int, letters: str, attention: str, **changes: Any) -> Plan:
    """A sequence in parts, all of them at the levels that `letters` repeats."""
    parts = -(-sequence // chunk)
    groups = changes.pop("groups", 1)
    count = parts * groups
    rows = tuple(
        "".join(letters[(layer + place) % len(letters)] for place in range(count)) for layer in range(model.layers)
    )
    return everything_stays(
        model, sequence=sequence, chunk_tokens=chunk, chunks_per_round=count, attention=attention, saves=rows, **changes
    )


def any_residency(plan: Plan, pick: Pick) -> Plan:
    """The same cuts with state that stays, passes, or is updated elsewhere."""
    layers = plan.layers

    def residency() -> Residency:
        ends = pick(((), ("embedding",), ("head",), ENDS))
        return Residency(blocks=pick(range(layers + 1)), passing=pick((1, 2, 3)), ends=ends)

    return replace(
        plan,
        weights=residency(),
        gradients=residency(),
        optimizer_state=residency(),
        update_place=pick(("device", "host")),
        fetch=pick(("by need", "at once")),
        host_copies=pick((False, True)),
    )


def any_levels(plan: Plan, pick: Pick) -> Plan:
    """The same cuts at other save levels."""
    letters = pick(("faciFACI", "fi", "ac", "i", "f", "F", "AC", "fI", "c"))
    saves = tuple("".join(pick(letters) for _ in range(plan.chunks_per_round)) for _ in range(plan.layers))
    return replace(plan, saves=saves, activation_slots="".join(saves).count("F") + pick((1, 2)))


def random_batch(
    model: Transformer, sequences: int, tokens: int, seed: int, *, masked: bool = True, ragged: bool = False
) -> Batch:
    """Random tokens and labels, some of them without a loss; a classifier's sequences are of any length."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, model.vocab, (sequences, tokens), dtype=np.int32)
    lengths = draw.integers(1, tokens + 1, sequences).astype(np.int32)
    # Every other time the texts are pairs.
    types = (
        np.random.default_rng(seed).integers(0, model.token_types, ids.shape, dtype=np.int32)
        if (model.token_types > 1 and seed % 2)
        else None
    )
    if model.head == "classifier":
        labels = draw.integers(0, model.labels or 1, sequences, dtype=np.int32)
        return Batch(ids, labels, lengths, types=types)
    labels = draw.integers(0, model.vocab, (sequences, tokens), dtype=np.int32)
    if masked:
        labels[draw.random((sequences, tokens)) < 0.3] = NO_LABEL
    if not ragged:
        return Batch(ids, labels, types=types)
    labels[np.arange(tokens) >= lengths[:, None]] = NO_LABEL
    return Batch(ids, labels, lengths, types=types)


def executor_for(
    plan: Plan,
    model: Transformer,
    weights: dict[str, torch.Tensor],
    training: Training = GRADIENTS,
    *,
    device: torch.device = CPU,
    deterministic: bool = False,
    packs: bool | None = None,
    gated: GatedKernels | None = None,
) -> StreamingExecutor:
    """An executor with these weights."""
    program = compile_plan(plan, model)
    executor = StreamingExecutor(
        plan, program, model, training, device=device, deterministic=deterministic, packs=packs, gated=gated
    )
    executor.clear_moments()
    executor.set_weights(weights)
    return executor


def first_gradients(executor: StreamingExecutor) -> dict[str, torch.Tensor]:
    """After one step with `GRADIENTS`."""
    return {name: values.clone() for name, moment, values in executor.moments() if moment == "first"}


def state_of(executor: StreamingExecutor) -> dict[str, torch.Tensor]:
    """Weights and moments as they are now."""
    found = {name: values.cpu().clone() for name, values in executor.weights().items()}
    found |= {f"{moment} of {name}": values.cpu().clone() for name, moment, values in executor.moments()}
    return found


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every tensor, bit for bit."""
    assert found.keys() == expected.keys()
    different = [name for name, values in expected.items() if not torch.equal(found[name], values)]
    assert not different


def reference_gradients(
    module: ReferenceModel, batch: Batch, drops: Dropper | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of a batch and its gradients by autograd; zeros where a parameter has no part in it."""
    module.zero_grad()
    lengths = None if batch.lengths is None else torch.from_numpy(batch.lengths).long()
    labels = torch.from_numpy(batch.labels).long()
    types = None if batch.types is None else torch.from_numpy(batch.types).long()
    loss = module.loss(torch.from_numpy(batch.ids).long(), labels, lengths, drops, types) / max(1, batch.with_loss)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {
        name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
        for name, value in module.named_parameters()
    }
    return float(loss.detach()), found


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest error of any parameter's gradient, in relation to that gradient."""
    assert found.keys() == expected.keys()
    whole = max(float(values.norm()) for values in expected.values())
    # What should be zero (a key's bias under a softmax) is what rounding of larger numbers leaves of it.
    return max(
        float((found[name].cpu().double() - values).norm()) / (float(values.norm()) + 1e-5 * whole + 1e-30)
        for name, values in expected.items()
    )


def total_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The error of all gradients together, in relation to their norm."""
    off = sum(float((found[name].cpu().double() - values).norm()) ** 2 for name, values in expected.items())
    return float((off / sum(float(values.norm()) ** 2 for values in expected.values())) ** 0.5)
