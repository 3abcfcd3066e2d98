"""The numbers that training begins with: the same ones for every executor and every number of devices."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import sqrt

import torch
from torch import Tensor, nn

from flopwise.work.adapters import DOWN, UP
from flopwise.work.parameters import Parameter, parameters_of
from flopwise.work.state_ops import DECAY, STEP_BIAS
from flopwise.work.transformer import Transformer

LEAST_DEVIATION = 0.02
"""Of the first numbers of wide models; narrow ones need larger ones for their inputs to tell: √(2 ÷ 5·width), by Nguyen
and Salazar (arXiv 1910.05895), which is 0.02 at a width of 1,000."""
LOOK_AHEAD_BYTES = 4 << 30
"""What is drawn ahead and waits may take so much of the host's memory, or one parameter where that is larger."""
INTO_THE_STREAM = ("output.weight", "mix_out.weight", "down.weight")
"""Matrices whose products are added to the residual stream, 2 in a layer."""


def initial_values(parameter: Parameter, seed: int, layers: int) -> Tensor:
    """A parameter's first numbers, in fp32 on the CPU; they depend on the seed and its name alone.

    Normal for matrices and tables, smaller where a product is added to the stream, so that the stream's variance does
    not grow with the number of layers. Norms begin as 1, biases as 0.
    """
    if parameter.weight.module in (DECAY, STEP_BIAS):
        return _of_states(parameter)
    if parameter.role == "norm":
        return torch.ones(parameter.shape)
    if parameter.role == "bias" or parameter.local.endswith(f"_{UP}.weight"):
        # Adapters begin as nothing: their second matrix is zero.
        return torch.zeros(parameter.shape)
    digest = hashlib.sha256(f"{seed} {parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if parameter.local.endswith(f"_{DOWN}.weight"):
        # As PEFT has them, in the bounds of torch's own linear layers.
        return torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1).div_(sqrt(parameter.shape[-1]))
    deviation = max(LEAST_DEVIATION, sqrt(2 / (5 * parameter.shape[-1])))
    if isinstance(parameter.part, int) and parameter.local in INTO_THE_STREAM:
        deviation /= sqrt(2 * layers)
    return torch.randn(parameter.shape, generator=generator).mul_(deviation)


def _of_states(parameter: Parameter) -> Tensor:
    """As Mamba-2 begins: a token of heads' states fades by 1 to 16 times a step, and steps are from 0.001 to 0.1.

    Evenly spread over the heads, where it draws them.
    """
    heads = parameter.shape[0]
    if parameter.weight.module == DECAY:
        return torch.linspace(1.0, 16.0, heads).log()
    sizes = torch.logspace(-3.0, -1.0, heads)
    # Of which softplus makes these sizes.
    return sizes + torch.log(-torch.expm1(-sizes))


def all_initial_values(
    parameters: Iterable[Parameter], seed: int, layers: int, *, threads: int | None = None
) -> Iterator[tuple[Parameter, Tensor]]:
    """Every parameter with its first numbers, in order, drawn by several threads at once (None: as many as torch uses).

    Each parameter is one thread's work from a generator of its own, so that the numbers are those of `initial_values`
    whatever the threads. What waits is bounded: a host has no room for a second copy of billions of parameters.
    """
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 2:
        for parameter in parameters:
            yield parameter, initial_values(parameter, seed, layers)
        return
    waiting: deque[tuple[Parameter, Future[Tensor]]] = deque()
    ahead_bytes = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="flopwise-initial")
    try:
        for parameter in parameters:
            while waiting and ahead_bytes + _drawn_bytes(parameter) > LOOK_AHEAD_BYTES:
                ahead_bytes -= _drawn_bytes(waiting[0][0])
                yield _first_of(waiting)
            waiting.append((parameter, pool.submit(initial_values, parameter, seed, layers)))
            ahead_bytes += _drawn_bytes(parameter)
        while waiting:
            yield _first_of(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _drawn_bytes(parameter: Parameter) -> int:
    return 4 * parameter.elements


def _first_of(waiting: deque[tuple[Parameter, Future[Tensor]]]) -> tuple[Parameter, Tensor]:
    # Nothing of it is kept: its numbers are freed as soon as they have been taken over.
    parameter, drawn = waiting.popleft()
    return parameter, drawn.result()


@torch.no_grad()
def fill(module: nn.Module, model: Transformer, sequence_tokens: int, seed: int) -> None:
    """Set every parameter of a module to its first numbers, in the type that it has."""
    places = dict(module.named_parameters())
    for parameter, values in all_initial_values(parameters_of(model, sequence_tokens), seed, model.layers):
        places[parameter.name].copy_(values)
