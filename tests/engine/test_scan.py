"""States carried in chunks are those of the rules token by token, in so much room as is planned, by so many FLOPs."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from flopwise.base.errors import FlopwiseError  # noqa: E402
from flopwise.engine.executable import check_adapters, check_trainable  # noqa: E402
from flopwise.engine.kernels.scan import PerHead, scan  # noqa: E402
from flopwise.engine.streaming import carrying  # noqa: E402
from flopwise.plan.program.compile import compile_plan  # noqa: E402
from flopwise.work.describe import describe  # noqa: E402
from flopwise.work.formats import parse_formats  # noqa: E402
from flopwise.work.held import heads_at_once  # noqa: E402
from flopwise.work.op import Scan  # noqa: E402
from flopwise.work.recurrence import Recurrence  # noqa: E402
from flopwise.work.transformer import Dropout  # noqa: E402
from tests.support.tiny_models import TINY, parameters, random_module  # noqa: E402
from tests.support.training_plans import (  # noqa: E402
    cut_plan,
    everything_stays,
    executor_for,
    first_gradients,
    random_batch,
)

MAMBA2 = Recurrence(rule="mamba2", heads=6, head_dim=4, key_heads=2, key_dim=5, chunk=8, least_step=0.05, most_step=1.5)
DELTA = Recurrence(rule="gated_delta", heads=6, head_dim=4, key_heads=3, key_dim=5, chunk=8)


def drawn(states: Recurrence, tokens: int, dtype: Any) -> tuple[Tensor, Tensor, PerHead]:
    """What a scan reads, at random."""
    torch.manual_seed(tokens)
    sides = ((2, tokens, states.channels), (2, tokens, states.steps), *(3 * [(states.heads,)]))
    mixed, steps, bias, decay, skip = (0.7 * torch.randn(side, dtype=dtype) for side in sides)
    return mixed, steps, PerHead(bias, decay, skip if states.rule == "mamba2" else None)


def token_by_token(states: Recurrence, mixed: Tensor, steps: Tensor, heads: PerHead) -> Tensor:
    """The rules as their papers have them: one state for each head, changed and read by each token."""
    tokens, run = mixed.shape[1], states.heads // states.key_heads
    widths = [states.key_width, states.key_width, states.width]
    delta = states.rule == "gated_delta"
    if delta:
        query, key, value = torch.split(mixed, widths, -1)
        share, size = torch.split(steps, states.heads, -1)
    else:
        value, key, query = torch.split(mixed, widths[::-1], -1)
        size = steps
    size = functional.softplus(size + heads.bias)
    size = size if delta else size.clamp(states.least_step, states.most_step)
    query, key = (part.unflatten(-1, (states.key_heads, -1)).repeat_interleave(run, 2) for part in (query, key))
    value = value.unflatten(-1, (states.heads, -1))
    if delta:
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        query = query * states.key_dim**-0.5
    state = mixed.new_zeros(mixed.shape[0], states.heads, states.key_dim, states.head_dim)
    read = []
    for token in range(tokens):
        now = key[:, token, :, :, None]
        state = state * (-heads.decay.exp() * size[:, token]).exp()[..., None, None]
        gained = value[:, token]
        if delta:
            gained = (gained - (state * now).sum(-2)) * share[:, token].sigmoid()[..., None]
        else:
            gained = gained * size[:, token, :, None]
        state = state + now * gained[..., None, :]
        read.append((state * query[:, token, :, :, None]).sum(-2))
    result: Tensor = torch.stack(read, 1)
    if heads.skip is not None:
        result = result + value * heads.skip[:, None]
    flat: Tensor = result.flatten(-2)
    return flat


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 37])
@pytest.mark.parametrize("states", [MAMBA2, DELTA], ids=lambda states: states.rule)
def test_chunks_make_what_tokens_one_by_one_do(states: Recurrence, tokens: int) -> None:
    mixed, steps, heads = drawn(states, tokens, torch.float64)
    leaves = [each.requires_grad_() for each in (mixed, steps, *heads) if each is not None]
    expected = token_by_token(states, mixed, steps, heads)
    above = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, above)
    for chunk in (1, 3, 8, 64):
        found = scan(replace(states, chunk=chunk), mixed, steps, heads)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        for one, other in zip(torch.autograd.grad(found, leaves, above), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that tensors made within take at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.seen:
                size = tensor.untyped_storage().nbytes()
                self.seen.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor.untyped_storage(), self._gone, key, size)
        return made

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize(
    ("states", "tokens"),
    [
        (Recurrence(rule="gated_delta", heads=2, head_dim=128, key_heads=1, key_dim=128), 1024),
        (Recurrence(rule="gated_delta", heads=4, head_dim=64, key_heads=4, key_dim=128), 500),
        (Recurrence(rule="mamba2", heads=4, head_dim=64, key_heads=1, key_dim=128, chunk=256), 2048),
        (Recurrence(rule="mamba2", heads=2, head_dim=64, key_heads=2, key_dim=256, chunk=128), 1000),
    ],
    ids=str,
)
def test_what_autograd_holds_of_a_scan_is_within_what_is_planned(states: Recurrence, tokens: int) -> None:
    mixed, steps, heads = drawn(states, tokens, torch.float32)
    mixed, steps = mixed[:1].clone().requires_grad_(), steps[:1].clone().requires_grad_()
    with Allocated() as allocated:
        made = scan(states, mixed, steps, heads)
        torch.autograd.grad(made, (mixed, steps), torch.ones_like(made))
    (count, sequences), each = heads_at_once(states, tokens, 1 << 40, 4), allocated.peak / states.heads
    assert count == states.heads
    planned = (1 << 40) / (count * sequences)
    assert 0.4 * planned < each < planned


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "nemotron_h"])
def test_pieces_are_added_up(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one head, some channels and one sequence the same gradients come out."""
    model = TINY[family]
    plan = everything_stays(model, sequence=19, sequences=3)
    batch = random_batch(model, 3, 19, 0)
    weights = parameters(random_module(model))
    whole = executor_for(plan, model, weights)
    loss, expected = whole.step(batch, 0).loss, first_gradients(whole)
    monkeypatch.setattr(carrying, "carrying_room_bytes", lambda *_: 40_000)
    parted = executor_for(plan, model, weights)
    assert parted.step(batch, 0).loss == pytest.approx(loss, rel=1e-12)
    for name, gradient in first_gradients(parted).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def test_heads_with_a_key_in_common_stay_together_or_are_equal_parts() -> None:
    states = Recurrence(rule="gated_delta", heads=12, head_dim=8, key_heads=3, key_dim=8)
    one = (1 << 40) // (12 * heads_at_once(states, 64, 1 << 40, 4)[1])
    assert [heads_at_once(states, 64, room, 4) for room in (1, one - 1, one)] == 3 * [(1, 1)]
    sizes = [heads_at_once(states, 64, count * one, 4)[0] for count in range(2, 13)]
    assert sizes == [2, 2, 4, 4, 4, 4, 4, 4, 4, 4, 12]


def test_described_products_are_those_of_a_plain_scan() -> None:
    """Mamba-2's; of tokens that fill whole chunks, and of the squares that the mask leaves the half."""
    states = replace(MAMBA2, least_step=0.0, most_step=None)
    model = replace(TINY["mamba2"], layers=1, recurrent_blocks=(0,), recurrence=states)
    op = next(op for op in describe(model, 24).ops if isinstance(op, Scan))
    mixed, steps, heads = drawn(states, 24, torch.float32)
    with FlopCounterMode(display=False) as counted:
        scan(states, mixed[:1], steps[:1], heads)
    # Beside them the states of three chunks, each the sum of what those before it add and let fade.
    between = 2 * states.heads * 3 * 3 * states.key_dim * states.head_dim
    assert counted.get_total_flops() == op.forward_flops("square") + between
    keys, values, chunk = states.key_dim, states.head_dim, states.chunk
    # By hand: scores of 2 key heads, their sums with 6 heads' values, and states written and read.
    square = 24 * chunk * (2 * keys + 6 * values)
    assert op.forward_flops("square") == 2 * square + 2 * 2 * 24 * 6 * keys * values
    assert op.forward_flops("mask") == square + 2 * 2 * 24 * 6 * keys * values
    # Backward: two for each, scores and states once more.
    again = 2 * 24 * chunk * 2 * keys + 2 * 24 * 6 * keys * values
    assert op.backward_flops("flash", "square") == 2 * op.forward_flops("square") + again


def test_what_cannot_be_is_refused() -> None:
    model = TINY["nemotron_h"]
    cut = cut_plan(model, sequence=19, chunk=9, letters="F", attention="chunk", precision="fp32")
    with pytest.raises(FlopwiseError, match="cannot be cut") as caught:
        compile_plan(cut, model)
    assert "state" in str(caught.value.why)
    whole = everything_stays(TINY["qwen3_5"], sequence=19, precision="fp32", replay=True)
    with pytest.raises(FlopwiseError, match="cannot be replayed"):
        compile_plan(whole, TINY["qwen3_5"])
    for changes in ({"head": "classifier", "labels": 2}, {"dropout": Dropout(hidden=0.1)}):
        with pytest.raises(FlopwiseError, match="cannot be trained so yet"):
            check_trainable(replace(model, **changes))
    with pytest.raises(FlopwiseError, match="cannot be trained in fp8"):
        check_adapters(model, parse_formats("fp8"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"recurrent_blocks": ()}, "come together"),
        ({"recurrent_blocks": (0, 3)}, "no blocks of 3"),
        ({"feed_blocks": (0, 1)}, "which no other list has"),
        ({"one_branch": False}, "which no other list has"),
        ({"norm": "layer"}, "cannot be described together"),
        ({"recurrence": replace(DELTA, chunk=0)}, "chunk must be at least 1"),
        ({"recurrence": replace(DELTA, key_heads=4)}, "cannot be described so"),
        ({"recurrence": replace(DELTA, conv_bias=True)}, "cannot be described so"),
        ({"recurrence": replace(MAMBA2, most_step=0.01)}, "cannot be described so"),
        ({"recurrence": replace(MAMBA2, **{"rule": "mamba3"})}, "no rule is called"),  # type: ignore[arg-type]
    ]
    for changes, words in wrong:
        with pytest.raises(FlopwiseError, match=words):
            replace(model, **changes)
