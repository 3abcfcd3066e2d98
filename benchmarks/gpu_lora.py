"""LoRA on one GPU beside transformers with PEFT, in one command: `python -m benchmarks.gpu_lora`.

    python -m benchmarks.gpu_lora                                         Llama-3-8B, rank 16 on all linear layers, 4k
    python -m benchmarks.gpu_lora --model llama-3-70b --base nf4 --no-peer                  the uncapped card
    python -m benchmarks.gpu_lora --model llama-3-70b --base nf4 --device-mem 24 --host-mem 110 --no-peer

The peer has its weights in bf16, adapters in fp32 under autocast, sdpa, torch's fused AdamW over the adapters, and no
gradient checkpointing unless it runs out of memory; with liger-kernel, where that is installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_cells import GIB, draw_weights, quantile
from benchmarks.gpu_kernels import profiled
from benchmarks.gpu_small import run_for
from flopwise.catalog.load import load_model
from flopwise.engine.batch import NO_LABEL, Batch
from flopwise.engine.streaming.executor import StreamingExecutor
from flopwise.engine.weights.adapter_files import adapter_config
from flopwise.engine.weights.huggingface import config_of
from flopwise.plan.device.explain import make_plan
from flopwise.plan.program.compile import compile_plan
from flopwise.predict.choose import usual_formats
from flopwise.profile.measure.this_machine import find_hardware
from flopwise.setup.setup import CappedSetup
from flopwise.setup.trained import TrainedWords
from flopwise.setup.training import Training
from flopwise.work.formats import with_base
from flopwise.work.transformer import Transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--on", default="h200")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora-on", default="all-linear")
    parser.add_argument("--base", default="bf16")
    parser.add_argument("--device-mem", type=float, default=120.0, help="GiB")
    parser.add_argument("--host-mem", type=float, default=0.0, help="GiB")
    parser.add_argument("--layers", type=int, default=0, help="fewer, to try it out")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--least", type=int, default=5, help="steps measured at least; so many less two before them")
    parser.add_argument("--profile", type=Path, default=None, help="a folder for the kernels of one more step")
    parser.add_argument("--no-peer", action="store_true")
    given = parser.parse_args()
    model = TrainedWords(lora=given.rank, lora_on=given.lora_on).of(load_model(given.model))
    assert isinstance(model, Transformer)
    if given.layers:
        model = replace(model, layers=given.layers)
    rows = [run_flopwise(given, model)]
    gc.collect()
    torch.cuda.empty_cache()
    rows += [] if given.no_peer else [run_peer(given, model)]
    for row in rows:
        print(json.dumps(row), flush=True)


def batches(given: argparse.Namespace, model: Transformer) -> Callable[[], Batch]:
    """Random tokens, new ones for each step."""
    draw = np.random.default_rng(0)

    def batch() -> Batch:
        ids = draw.integers(0, model.vocab, (given.batch, given.seq), dtype=np.int32)
        labels = np.concatenate([ids[:, 1:], np.full((given.batch, 1), NO_LABEL, dtype=np.int32)], axis=1)
        return Batch(ids, labels)

    return batch


def measured(step: Callable[[], float], given: argparse.Namespace) -> list[float]:
    """Seconds of steps, behind a warm-up."""
    run_for(step, given.seconds / 4, least=max(1, given.least - 2))
    return run_for(step, given.seconds, least=given.least)


def told(way: str, given: argparse.Namespace, seconds: list[float], losses: list[float]) -> dict[str, object]:
    step_s = quantile(seconds, 0.5)
    return {
        "way": way,
        "tokens_per_s": given.batch * given.seq / step_s,
        "step_s": step_s,
        "p20_s": quantile(seconds, 0.2),
        "p80_s": quantile(seconds, 0.8),
        "steps": len(seconds),
        "gib": torch.cuda.max_memory_allocated() / GIB,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def run_flopwise(given: argparse.Namespace, model: Transformer) -> dict[str, object]:
    """The plan that the caps allow, measured beside its forecast."""
    hardware = find_hardware(given.on)
    setup = CappedSetup(
        model=model,
        hardware=hardware,
        sequence_tokens=given.seq,
        device_cap_bytes=int(given.device_mem * GIB),
        host_cap_bytes=int(given.host_mem * GIB),
        formats=with_base(usual_formats(hardware, model), given.base),
        batch_sequences=given.batch,
    )
    found = make_plan(setup, helps=False)
    plan = found.plan
    training = Training(steps=100_000, learning_rate=1e-5)
    executor = StreamingExecutor(plan, compile_plan(plan, model), model, training, device=torch.device("cuda"))
    draw_weights(executor, "cuda")
    made, losses = batches(given, model), list[float]()

    def step() -> float:
        batch = made()
        begun = time.perf_counter()
        losses.append(executor.step(batch, len(losses)).loss)
        return time.perf_counter() - begun

    row = told("flopwise", given, measured(step, given), losses)
    if given.profile is not None:
        profiled(f"{given.model}-lora", step, "cuda", given.profile)
    predicted = found.forecast.tokens_per_s
    row |= {"predicted_tokens_per_s": predicted, "predicted_per_measured": predicted / float(str(row["tokens_per_s"]))}
    row |= {"planned_gib": found.forecast.device_total / GIB, "planned_host_gib": found.forecast.host_total / GIB}
    row |= {"chunks": f"{plan.rounds_per_step}×{plan.chunks_per_round}×{plan.chunk_tokens}", "saves": plan.saves[0]}
    executor.close()
    return row


def run_peer(given: argparse.Namespace, model: Transformer) -> dict[str, object]:
    """transformers and PEFT; the micro-batch is one sequence, recomputed where nothing else fits."""
    try:
        return _run_peer(given, model, checkpointing=False)
    except torch.OutOfMemoryError:
        gc.collect()
        torch.cuda.empty_cache()
    return _run_peer(given, model, checkpointing=True)


def _run_peer(given: argparse.Namespace, model: Transformer, *, checkpointing: bool) -> dict[str, object]:
    import peft  # type: ignore[import-not-found, unused-ignore]
    import transformers

    torch.cuda.reset_peak_memory_stats()
    plain = replace(model, adapters=None)
    liger = _with_liger()
    settings = {name: value for name, value in config_of(plain, given.seq).items() if name != "architectures"}
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("cuda"):
        kind: Any = transformers.AutoModelForCausalLM
        module: Any = kind.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    table = adapter_config(model, None)
    chosen = {name: table[name] for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "bias", "task_type")}
    module = peft.get_peft_model(module, peft.LoraConfig(**chosen))
    module.train()
    module.config.use_cache = False
    if checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module.enable_input_require_grads()
    trained = [value for value in module.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    made, losses = batches(given, model), list[float]()

    def step() -> float:
        batch = made()
        begun = time.perf_counter()
        total = 0.0
        for row in batch.ids:
            ids = torch.from_numpy(row).pin_memory().to("cuda", non_blocking=True).long()[None]
            with torch.autocast("cuda", torch.bfloat16):
                loss = module(input_ids=ids, labels=ids).loss / given.batch
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        return time.perf_counter() - begun

    row = told("transformers + PEFT", given, measured(step, given), losses)
    return {**row, "checkpointing": checkpointing, "liger": liger, "trained": sum(each.numel() for each in trained)}


def _with_liger() -> bool:
    """Whether liger-kernel is there; its kernels then take the places of Llama's own."""
    try:
        from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
            apply_liger_kernel_to_llama,
        )
    except ImportError:
        return False
    apply_liger_kernel_to_llama()
    return True


if __name__ == "__main__":
    main()
