"""What DPO asks of a step, counted: the head once more, and one forward pass of a reference before the first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flopwise as fw
from flopwise.catalog.load import load_model
from flopwise.plan.device.forecast import executed_flops
from flopwise.setup.trained import TrainedWords
from flopwise.work.describe import describe
from flopwise.work.transformer import Transformer
from flopwise.work.work import RECOMPUTE_POLICIES

TOKENS = 1024
LLAMA = load_model("llama-3-1b")
assert isinstance(LLAMA, Transformer)
COMPARED = TrainedWords(task="dpo").of(LLAMA)
HEAD_FLOPS = 2 * TOKENS * LLAMA.hidden * LLAMA.vocab


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
def test_the_head_runs_forward_once_more_whatever_is_kept(policy: str) -> None:
    plain, compared = (describe(model, TOKENS) for model in (LLAMA, COMPARED))
    assert compared.model_flops("causal") == plain.model_flops("causal")
    assert compared.parameters == plain.parameters
    more = [work.total_hardware_flops("causal", policy) for work in (compared, plain)]  # type: ignore[arg-type]
    assert more[0] - more[1] == HEAD_FLOPS


def test_predictions_and_plans_count_it() -> None:
    step = {
        task: fw.predict("llama-3-1b", on="h200", seq=TOKENS, batch=8, task=task, recompute="none")
        for task in ("language", "dpo")
    }
    more = step["dpo"].hardware_flops - step["language"].hardware_flops
    assert more == 8 * HEAD_FLOPS
    assert step["dpo"].step_s > step["language"].step_s
    forward = sum(describe(LLAMA, TOKENS).forward_flops(op, "causal") for op in describe(LLAMA, TOKENS).ops)
    (told,) = [note for note in step["dpo"].notes if "reference" in note]
    assert f"{8 * forward / 1e12:.1f} TFLOP" in told
    found = fw.plan("llama-3-1b", on="h200", seq=TOKENS, batch=8, task="dpo", device_mem="12GiB")
    executed = executed_flops(found.plan, COMPARED, "causal")
    assert executed["head"] == 8 * 4 * HEAD_FLOPS
    assert found.plan.chunks_per_sequence == 1


def test_a_plan_never_cuts_a_pair() -> None:
    found = fw.plan("llama-3-1b", on="h200", seq="64k", batch=1, task="dpo", lora=8)
    assert found.plan.chunks_per_sequence == 1
    assert fw.plan("llama-3-1b", on="h200", seq="64k", batch=1, lora=8).plan.chunks_per_sequence > 1


def test_only_what_writes_answers_compares_them() -> None:
    for model, words in (("bert-base", "writes none"), ("lstm-lm", "writes none")):
        with pytest.raises(fw.FlopwiseError, match=words):
            TrainedWords(task="dpo").of(load_model(model))
    with pytest.raises(fw.FlopwiseError, match="a classifier here is an encoder"):
        TrainedWords(task="classification").of(LLAMA)
    assert TrainedWords(task="dpo").of(COMPARED) == COMPARED
    assert TrainedWords(task="dpo", lora=4).of(LLAMA).name == "llama-3-1b+lora4+dpo"
    assert isinstance(LLAMA, Transformer)
    with pytest.raises(fw.FlopwiseError, match="are preferred to others by models that write them"):
        replace(LLAMA, head="classifier", labels=2, objective="preference")
