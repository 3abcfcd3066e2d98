"""What a user would pick instead, under the same step: transformers, and plain modules that torch compiles.

A step is a batch in micro-batches, their gradients summed, and AdamW (torch's fused one) with bf16 state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_cells import Settings, ceiling_name, hardware_of, model_of, quantile, reasons_text
from flopwise.engine import modules
from flopwise.engine.modules import ReferenceModel, build
from flopwise.engine.weights.huggingface import config_of
from flopwise.profile.measure.sampling import sampler_for
from flopwise.work.describe import describe
from flopwise.work.transformer import Transformer

LOSS_TOKENS = 4096
"""Tokens whose logits are there at once where the loss is chunked."""
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A model trained without flopwise."""

    name: str
    kind: str
    """transformers, compiled or eager (plain modules, not compiled)."""
    model: str
    sequence_tokens: int
    batch_tokens: int
    micro_sequences: int = 1
    checkpointed: float = 0.0
    """Share of the blocks that run again in backward."""
    step_s: float = 15.0
    set_up_s: float = 60.0

    @property
    def ceiling(self) -> str:
        return ceiling_name(self.model, self.sequence_tokens, "bf16")


EIGHT = Peer(name="", kind="", model="llama-3-8b", sequence_tokens=8192, batch_tokens=131072, set_up_s=40)
GPU_PEERS = (
    replace(EIGHT, name="transformers-8k", kind="transformers"),
    replace(EIGHT, name="transformers-ckpt-8k", kind="transformers", micro_sequences=2, checkpointed=1.0, step_s=18),
    replace(
        EIGHT, name="transformers-ckpt-64k", kind="transformers", sequence_tokens=65536, checkpointed=1.0, step_s=35
    ),
    replace(EIGHT, name="compiled-8k", kind="compiled", set_up_s=90),
    replace(EIGHT, name="compiled-half-8k", kind="compiled", micro_sequences=2, checkpointed=0.5, set_up_s=90),
    replace(
        EIGHT, name="compiled-ckpt-64k", kind="compiled", sequence_tokens=65536, checkpointed=1.0, step_s=31,
        set_up_s=90,
    ),
    Peer(
        name="compiled-1b-8k", kind="compiled", model="llama-3-1b", sequence_tokens=8192, batch_tokens=262144,
        micro_sequences=4, step_s=6,
    ),
)  # fmt: skip
CPU_PEERS = tuple(
    Peer(name=name, kind=kind, model="tiny", sequence_tokens=64, batch_tokens=256, micro_sequences=2,
         checkpointed=checkpointed, step_s=0.1, set_up_s=10)
    for name, kind, checkpointed in (
        ("tiny-transformers", "transformers", 0.0),
        ("tiny-transformers-ckpt", "transformers", 1.0),
        ("tiny-eager", "eager", 0.5),
    )
)  # fmt: skip


def run_peer(peer: Peer, settings: Settings) -> dict[str, Any]:
    """Its row: rates over the measured steps, memory, clock."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    model = model_of(peer.model)
    make = _transformers if peer.kind == "transformers" else _plain
    module, loss = make(peer, model, settings.device)
    trainer = Trainer(peer, module, loss, settings.device)
    set_up_s = time.perf_counter() - begun
    warm = trainer.run_for(settings.warm_up_s, least=2)
    if settings.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sampler = sampler_for(settings.device)
    sampler.start()
    seconds = trainer.run_for(settings.measure_s, least=2)
    counters = sampler.stop()
    tokens = trainer.tokens
    step_s, low_s, high_s = (quantile(seconds, share) for share in (0.5, 0.05, 0.95))
    flops = describe(model, peer.sequence_tokens).model_flops("causal") * tokens // peer.sequence_tokens
    peak = _peak_flops(settings)
    return {
        "peer": peer.name,
        "kind": peer.kind,
        "model": peer.model,
        "sequence_tokens": peer.sequence_tokens,
        "batch_tokens": tokens,
        "micro_sequences": peer.micro_sequences,
        "checkpointed_share": peer.checkpointed,
        "tokens_per_s": tokens / step_s,
        "tokens_per_s_low": tokens / high_s,
        "tokens_per_s_high": tokens / low_s,
        "step_s": step_s,
        "steps": len(seconds),
        "warm_up_steps": len(warm),
        "mfu": None if peak is None else flops / (step_s * peak),
        "peak_flops": peak,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if settings.device == "cuda" else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if settings.device == "cuda" else None,
        "clock_mhz": None if counters.clock_mean_hz is None else counters.clock_mean_hz / 1e6,
        "power_w": counters.power_w,
        "throttle_reasons": reasons_text(counters),
        "first_loss": trainer.losses[0],
        "last_loss": trainer.losses[-1],
        "set_up_s": set_up_s,
    }


def _peak_flops(settings: Settings) -> float | None:
    if not settings.compares:
        return None
    fact = hardware_of(settings).device.peak_flops.get("bf16" if settings.device == "cuda" else "fp32")
    return None if fact is None else fact.value


class Trainer:
    """Steps of a module on random tokens."""

    def __init__(self, peer: Peer, module: nn.Module, loss: Loss, device: str) -> None:
        self.peer, self.loss, self.device = peer, loss, device
        self.vocab = model_of(peer.model).vocab
        self.micro_batches = peer.batch_tokens // (peer.micro_sequences * peer.sequence_tokens)
        self.tokens = self.micro_batches * peer.micro_sequences * peer.sequence_tokens
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )  # fmt: skip
        self.losses: list[float] = []

    def one(self) -> float:
        """Seconds of a step, up to where its loss is known."""
        shape = (self.peer.micro_sequences, self.peer.sequence_tokens + 1)
        batches = [torch.randint(self.vocab, shape, device=self.device) for _ in range(self.micro_batches)]
        if self.device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        total = torch.zeros((), device=self.device)
        for ids in batches:
            loss = self.loss(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) / self.micro_batches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(total))
        return time.perf_counter() - begun

    def run_for(self, seconds: float, *, least: int) -> list[float]:
        """Steps until so much time has passed, and at least so many."""
        found: list[float] = []
        begun = time.perf_counter()
        while len(found) < least or time.perf_counter() - begun < seconds:
            found.append(self.one())
        return found


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


# -- transformers --------------------------------------------------------------------------------------------------


def _transformers(peer: Peer, model: Transformer, device: str) -> tuple[nn.Module, Loss]:
    """Its Llama with torch's attention, as its users get it; the loss is its own."""
    import transformers

    settings = {
        name: value for name, value in config_of(model, peer.sequence_tokens).items() if name != "architectures"
    }
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device(device):
        made: Any = transformers.AutoModelForCausalLM
        module: Any = made.from_config(config, attn_implementation="sdpa", dtype=_dtype(device))
    module.train()
    module.config.use_cache = False
    if peer.checkpointed:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = module(input_ids=ids, labels=ids, shift_labels=labels).loss
        return found

    return module, loss


# -- plain modules -------------------------------------------------------------------------------------------------


def _plain(peer: Peer, model: Transformer, device: str) -> tuple[nn.Module, Loss]:
    """Our plain modules, each block compiled (unless eager), cuDNN's attention on a GPU, the loss chunk by chunk."""
    module = build(model, peer.sequence_tokens, dtype=_dtype(device), device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    if device == "cuda":
        # For the whole process: what runs again in backward has to choose the same kernel.
        for others in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp):
            others(False)
        cuda.enable_cudnn_sdp(True)
    blocks: list[Callable[[Tensor], Tensor]] = list(module.layers)
    head: Loss = _head_loss(module)
    if peer.kind == "compiled":
        keep_tables(model, peer.sequence_tokens, device)
        blocks = [torch.compile(block, dynamic=False) for block in blocks]
        head = torch.compile(head, dynamic=False)
    again = round(peer.checkpointed * len(blocks))

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        stream = module.embedded(ids)
        for number, block in enumerate(blocks):
            stream = checkpoint(block, stream, use_reentrant=False) if number < again else block(stream)
        return _chunked(head, stream, labels)

    return module, loss


def keep_tables(model: Transformer, tokens: int, device: str) -> None:
    """Rotary tables are made once here: a compiler would look through their cache and make them in every block."""
    tables = modules.rotary_tables(model, tokens, torch.device(device))

    def kept(*_: object) -> tuple[Tensor, Tensor]:
        return tables

    modules.rotary_tables = kept  # type: ignore[assignment]


def _head_loss(module: ReferenceModel) -> Loss:
    def head(stream: Tensor, labels: Tensor) -> Tensor:
        logits = module.logits(stream).float()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="sum")

    return head


def _chunked(head: Loss, stream: Tensor, labels: Tensor) -> Tensor:
    """The mean loss; each chunk's logits are made again in backward, so that only one chunk's are there at a time."""
    rows, all_answers = stream.reshape(-1, stream.shape[-1]), labels.reshape(-1)
    pieces = zip(torch.split(rows, LOSS_TOKENS), torch.split(all_answers, LOSS_TOKENS), strict=True)
    total = torch.zeros((), device=stream.device)
    for piece, answers in pieces:
        total = total + checkpoint(head, piece[None], answers[None], use_reentrant=False)
    return total / labels.numel()
