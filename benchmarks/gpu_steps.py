"""Measure training steps of plain compiled modules on this machine's GPU: `python -m benchmarks.gpu_steps OUT.csv`.

Each case is a model in bf16 with AdamW (fused, bf16 state), random weights and tokens, blocks and loss compiled by
torch, attention by cuDNN: what an engineer would write first. `benchmarks.steps` compares the times with predictions.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flopwise.catalog.load import load_model
from flopwise.work.transformer import Transformer
from tests.support.torch_reference import Reference


@dataclass(frozen=True, slots=True)
class Case:
    """One set-up to measure."""

    model: str
    sequence_tokens: int
    batch_sequences: int
    recompute: str = "none"


CASES = (
    Case("gpt2", 1024, 32),
    Case("gpt2-xl", 1024, 8),
    Case("bert-large", 512, 64),
    Case("mpt-1b", 2048, 8),
    Case("mpt-7b", 2048, 4),
    Case("llama-3-1b", 2048, 8),
    Case("llama-3-1b", 8192, 2),
    Case("llama-3-3b", 4096, 4),
    Case("qwen3-4b", 4096, 2),
    Case("llama-3-8b", 4096, 2),
    Case("llama-3-8b", 8192, 1),
    Case("llama-3-8b", 8192, 2, "checkpoint"),
    Case("llama-3-1b", 32768, 1, "checkpoint"),
)


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def build(case: Case) -> tuple[Reference, Callable[[Tensor, Tensor], Tensor]]:
    """The module, and the function from ids and labels to the loss."""
    model = load_model(case.model)
    assert isinstance(model, Transformer)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        module = Reference(model, case.sequence_tokens, cudnn_attention)
        torch.set_default_dtype(torch.float32)
    for block in module.blocks:
        block.compile()
    if case.recompute == "checkpoint":
        for block in module.blocks:
            inner = block.forward
            block.forward = lambda value, inner=inner: checkpoint(inner, value, use_reentrant=False)

    def head_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        logits = module.logits(hidden).float()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    compiled = torch.compile(head_loss)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = compiled(module.hidden(ids), labels)
        return result

    return module, loss


def measure(case: Case) -> dict[str, object]:
    """Median seconds of a step over about six seconds after warm-up, and the peak of allocated memory."""
    torch.manual_seed(0)
    module, loss = build(case)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    vocab = module.model.vocab
    ids = torch.randint(vocab, (case.batch_sequences, case.sequence_tokens), device="cuda")
    classifier = module.model.head == "classifier"
    labels = ids[:, 0] % (module.model.labels or 1) if classifier else torch.roll(ids, -1, 1)

    def one_step() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss(ids, labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(4):
        one_step()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 6 and len(times) < 200):
        times.append(one_step())
    ordered = sorted(times)
    return {
        "model": case.model,
        "sequence_tokens": case.sequence_tokens,
        "batch_sequences": case.batch_sequences,
        "recompute": case.recompute,
        "step_s": statistics.median(times),
        "step_s_p20": ordered[len(ordered) // 5],
        "step_s_p80": ordered[len(ordered) * 4 // 5],
        "steps": len(times),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> None:
    path = Path(sys.argv[1])
    budget_s = float(sys.argv[2]) if len(sys.argv) > 2 else 540.0
    started = time.perf_counter()
    rows: list[dict[str, object]] = []
    for case in CASES:
        if time.perf_counter() - started > budget_s:
            print(f"{case}: left out, the time is up")
            continue
        try:
            rows.append(measure(case))
            print(rows[-1], f"{time.perf_counter() - started:.0f} s", flush=True)
        except RuntimeError as error:
            print(f"{case}: {str(error)[:300]}", flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else ["model"])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
