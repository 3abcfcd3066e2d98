"""Training on several ranks: the numbers of one process, whatever is sharded; and how ranks start, meet and end.

The ranks are processes of `tests.support.distributed_worker`, started once for many cases.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from flopwise.base.errors import FlopwiseError
from flopwise.engine.executable import check_executed
from flopwise.engine.launch import Group, Rank, first_host, rank_of
from flopwise.engine.sharded.distributed import share_of
from flopwise.engine.spawning import spawn
from flopwise.setup.parallel import Parallel
from tests.support.distributed_worker import (
    CHANCE_CASES,
    EXACT_CASES,
    FP32_CASES,
    GRADIENT_CASES,
    HYBRID_CASES,
    LLAMA_CASES,
    NARROW_CASES,
    PARTLY_CASES,
    PLAN,
    RESUMED,
    SAVED_AFTER,
    STEPS,
    Case,
    CaseOutcome,
    Reference,
    checkpoint_in,
    expected,
)
from tests.support.tiny_models import LLAMA, TINY

ROOT = Path(__file__).parents[2]
WORKER = "tests.support.distributed_worker"


def by_name(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


SPAWN = f"""
import sys
from flopwise.engine.spawning import spawn
sys.exit(spawn(sys.argv[2:], int(sys.argv[1]), module={WORKER!r}))
"""


def run_ranks(command: str, folder: Path, ranks: int) -> None:
    """Let ranks work; what they wrote is told where they fail."""
    spawned = [sys.executable, "-c", SPAWN, str(ranks), command, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(spawned, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]


def outcome_of(folder: Path, name: str) -> CaseOutcome:
    return CaseOutcome(
        **json.loads((folder / f"{name}.json").read_text()) | {"tensors": load_file(folder / f"{name}.safetensors")}
    )


# What takes long is paid by whichever test asks first: all that ask are slow.
@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran_once(tmp_path_factory, "all", 2)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran_once(tmp_path_factory, "narrow", 1)


def ran_once(tmp_path_factory: pytest.TempPathFactory, cases: str, ranks: int) -> Path:
    """The folder of what ranks found, for all processes that these tests are spread over."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / f"{ranks}_ranks"
    with (root / f"{ranks}_ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            run_ranks(cases, folder, ranks)
            (folder / "done").touch()
    return folder


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * float(value.abs().max()))


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@by_name(GRADIENT_CASES)
def test_the_ranks_gradients_are_those_of_the_whole_batch(two_ranks: Path, case: Case) -> None:
    found, wanted = outcome_of(two_ranks, case.name), expected(case)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert found.with_loss == wanted.with_loss
    gradients = {name: value for name, value in found.tensors.items() if name.startswith("first/")}
    # Where nothing but rounding is left, as of the bias of keys, it is measured by the largest gradient of all.
    largest = max(float(value.abs().max()) for value in gradients.values())
    for name, value in gradients.items():
        torch.testing.assert_close(value, wanted.tensors[name], rtol=1e-12, atol=1e-12 * largest)


def check_follows(found: CaseOutcome, case: Case) -> None:
    wanted = expected(case)
    assert len(found.losses) == STEPS and found.with_loss == wanted.with_loss
    assert found.losses == pytest.approx(wanted.losses, rel=1e-10)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-10)
    assert found.evaluated == pytest.approx(wanted.evaluated, rel=1e-10)
    assert_near(found.tensors, wanted.tensors, 1e-9)


@pytest.mark.slow
@by_name(LLAMA_CASES)
def test_training_in_fp64_follows_one_process(two_ranks: Path, case: Case) -> None:
    check_follows(outcome_of(two_ranks, case.name), case)


@pytest.mark.slow
@by_name(EXACT_CASES)
def test_training_of_others_in_fp64_follows_one_process(two_ranks: Path, case: Case) -> None:
    check_follows(outcome_of(two_ranks, case.name), case)


@pytest.mark.slow
@by_name(PARTLY_CASES)
def test_training_of_parts_in_fp64_follows_one_process(two_ranks: Path, case: Case) -> None:
    check_follows(outcome_of(two_ranks, case.name), case)


@pytest.mark.slow
@by_name(FP32_CASES)
def test_training_in_fp32_follows_one_process(two_ranks: Path, case: Case) -> None:
    found, wanted = outcome_of(two_ranks, case.name), expected(case)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-4)
    assert found.evaluated["loss"] == pytest.approx(wanted.evaluated["loss"], rel=1e-5)


@pytest.mark.slow
@by_name(NARROW_CASES)
def test_training_in_narrow_formats_follows_one_rank(two_ranks: Path, one_rank: Path, case: Case) -> None:
    found, wanted = outcome_of(two_ranks, case.name), outcome_of(one_rank, case.name)
    assert found.losses == pytest.approx(wanted.losses, rel=0.02)
    types = {name: value.dtype for name, value in found.tensors.items()}
    assert types == {name: value.dtype for name, value in wanted.tensors.items()}
    exact = replace(case, precision="fp32", training=replace(case.training, stochastic_rounding=False))
    assert found.losses == pytest.approx(expected(exact).losses, rel=0.02)


@pytest.mark.slow
def test_a_master_is_what_weights_are_rounded_from(two_ranks: Path) -> None:
    tensors = outcome_of(two_ranks, "mixed zero3").tensors
    masters = {name.removeprefix("master/"): value for name, value in tensors.items() if name.startswith("master/")}
    assert set(masters) == {name.removeprefix("weights/") for name in tensors if name.startswith("weights/")}
    for name, value in masters.items():
        assert value.dtype == torch.float32 and tensors[f"first/{name}"].dtype == torch.float32
        assert torch.equal(tensors[f"weights/{name}"], value.to(torch.bfloat16))


@pytest.mark.slow
@by_name(CHANCE_CASES)
def test_rounding_by_chance_gives_the_same_bits_on_one_and_two_ranks(
    two_ranks: Path, one_rank: Path, case: Case
) -> None:
    found, wanted = outcome_of(two_ranks, case.name).tensors, outcome_of(one_rank, case.name).tensors
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert value.dtype == torch.bfloat16 and torch.equal(found[name], value)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_elsewhere(two_ranks: Path) -> None:
    case = LLAMA_CASES[-1]
    whole = outcome_of(two_ranks, case.name)
    plain = Reference(case)
    plain.restore(checkpoint_in(two_ranks))
    losses = [plain.step(number)[0] for number in range(SAVED_AFTER, STEPS)]
    assert losses == pytest.approx(whole.losses[SAVED_AFTER:], rel=1e-10)
    run_ranks("resume", two_ranks, 1)
    resumed = outcome_of(two_ranks, RESUMED)
    assert resumed.losses == pytest.approx(whole.losses[SAVED_AFTER:], rel=1e-10)
    assert_near(resumed.tensors, whole.tensors, 1e-9)


@pytest.mark.slow
def test_memory_is_told_by_owner(two_ranks: Path) -> None:
    tensors = outcome_of(two_ranks, "llama zero3").tensors
    whole = sum(value.nbytes for name, value in tensors.items() if name.startswith("weights/"))
    for case in LLAMA_CASES:
        rows = outcome_of(two_ranks, case.name).memory
        halved = {"weights": case.zero == 3, "gradients": case.zero >= 2, "optimizer": case.zero >= 1}
        for owner, half in halved.items():
            planned, measured = rows[owner]
            size = (2 if owner == "optimizer" else 1) * whole // (2 if half else 1)
            gathered = whole // 2 if owner == "weights" and case.zero in (1, 2) else 0
            assert planned == size
            # A rank has up to a row more than its half of every parameter.
            assert size <= measured - gathered <= 1.1 * size
        assert sum(planned for planned, _ in rows.values()) == 1 << 20
        assert rows["activations"][1] == 0 and rows["unaccounted"] == [0, 0]


@pytest.mark.slow
def test_copies_of_shards_follow_one_process(tmp_path: Path) -> None:
    run_ranks("hybrid", tmp_path, 4)
    for case in HYBRID_CASES:
        check_follows(outcome_of(tmp_path, case.name), case)


@given(sequences=st.integers(0, 40), world=st.integers(1, 9))
def test_shares_are_neighbours_that_differ_by_one_at_most(sequences: int, world: int) -> None:
    shares = [share_of(sequences, rank, world) for rank in range(world)]
    assert shares[0][0] == 0 and shares[-1][1] == sequences
    assert all(before[1] == after[0] for before, after in pairwise(shares))
    sizes = [last - first for first, last in shares]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (Parallel(tensor=2), ("tensor parallelism", "--gpus 2 --parallel zero3")),
        (Parallel(pipeline=2, data=2), ("pipeline parallelism", "data = 4")),
        (Parallel(context=2), ("context parallelism",)),
        (Parallel(data=2, expert=2), ("expert parallelism",)),
        (Parallel(data=2, tensor=2, context=2), ("tensor and context parallelism",)),
        (Parallel(data=2, zero=1, offload_optimizer=True), ("memory of the host", "--offload")),
        (Parallel(data=2, offload_activations=True), ("memory of the host",)),
        (Parallel(data=3, zero=3), ("for 3 devices, and 2 ranks", "--gpus 3")),
    ],
)
def test_what_is_not_executed_is_told(parallel: Parallel, words: tuple[str, ...]) -> None:
    plan = replace(PLAN, parallel=parallel, devices=parallel.devices)
    with pytest.raises(FlopwiseError) as caught:
        check_executed(plan, LLAMA, 2)
    assert all(word in str(caught.value) for word in words) and caught.value.hint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "fp16-mixed"}, "cannot be trained in"),
        ({"precision": "fp8"}, "no kernels"),
        ({"precision": "bf16,gradients=fp32"}, "gradients in fp32 beside weights in bf16"),
        ({"optimizer": "muon"}, "muon"),
    ],
)
def test_formats_and_optimizers_that_are_not_executed_are_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FlopwiseError, match=words):
        check_executed(replace(PLAN, **changes), LLAMA, 2)


def test_other_models_are_refused_and_all_that_can_be_trained_are_not() -> None:
    with pytest.raises(FlopwiseError, match="mixture"):
        check_executed(PLAN, replace(LLAMA, experts=4, experts_per_token=2, head="classifier", labels=2), 2)
    for model in TINY.values():
        check_executed(PLAN, model, 2)


# -- which rank this is -----------------------------------------------------------------------------------------------

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "first.node",
    "MASTER_PORT": "29511",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_JOB_ID": "123456",
}


def test_a_rank_of_torchrun() -> None:
    rank = Rank(rank=5, world=8, local_rank=1, address="first.node", port=29511, launched_by="torchrun")
    assert rank_of(TORCHRUN) == rank
    # What Slurm says beside it is about the process that started torchrun.
    assert rank_of({**SLURM, **TORCHRUN}) == rank
    assert rank_of({**TORCHRUN, "FLOPWISE_SPAWNED": "1"}) == replace(rank, launched_by="flopwise")


def test_a_rank_of_slurm() -> None:
    rank = rank_of(SLURM)
    assert (rank.rank, rank.world, rank.local_rank, rank.launched_by) == (3, 4, 1, "slurm")
    assert rank.address == "node01" and 1024 < rank.port < 32768
    assert rank_of({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port == rank.port
    assert rank_of({**SLURM, "SLURM_JOB_ID": "123457"}).port != rank.port
    older = {key.replace("JOB_NODELIST", "NODELIST"): value for key, value in SLURM.items()}
    assert rank_of(older) == rank
    chosen = rank_of({**SLURM, "MASTER_ADDR": "elsewhere", "MASTER_PORT": "4711"})
    assert (chosen.address, chosen.port) == ("elsewhere", 4711)


@pytest.mark.parametrize("environment", [{}, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, {"SLURM_PROCID": "0"}])
def test_a_process_alone(environment: dict[str, str]) -> None:
    # The second is the shell of salloc, the third that of a batch script without -n.
    rank = rank_of(environment)
    assert (rank.rank, rank.world, rank.local_rank, rank.launched_by) == (0, 1, 0, "alone")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[01-04,7]", "node01"),
        ("node[7,01-04]", "node7"),
        ("gpu-[003,005-007],x1", "gpu-003"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]node[3-4].cluster", "rack1node3.cluster"),
        ("node[09]", "node09"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "node[01", "node[]", "[1-2", "node[a-b]", ",node1", "node 1"])
def test_nodes_that_cannot_be_read(nodes: str) -> None:
    with pytest.raises(FlopwiseError, match="first node"):
        first_host(nodes)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        *(({key: value for key, value in TORCHRUN.items() if key != name}, name) for name in TORCHRUN),
        *(({key: value for key, value in SLURM.items() if key != name}, name) for name in list(SLURM)[2:]),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS and SLURM_LOCALID"),
        ({**TORCHRUN, "RANK": "8"}, "none of 8"),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, "none of 8"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "none of 0"),
        ({**TORCHRUN, "RANK": "-1"}, "no number"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "no number"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "no port"),
        ({**SLURM, "SLURM_PROCID": "4"}, "none of 4"),
        ({**SLURM, "SLURM_JOB_ID": "x"}, "no number"),
    ],
)
def test_variables_that_are_missing_or_contradict_each_other(environment: dict[str, str], words: str) -> None:
    with pytest.raises(FlopwiseError, match=words):
        rank_of(environment)


# -- starting, meeting, ending ----------------------------------------------------------------------------------------


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def small_module(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program that needs no torch, and so starts at once."""
    (folder / "small_rank.py").write_text(SMALL + textwrap.dedent(body))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "small_rank"


SMALL = """
import json, os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
assert os.environ["WORLD_SIZE"] == sys.argv[2] and os.environ["LOCAL_RANK"] == str(rank)
"""


def test_a_rank_that_fails_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / f"{rank}").write_text(str(os.getpid()))
        print(f"words of {rank}", flush=True)
        print(f"complaints of {rank}", file=sys.stderr, flush=True)
        while not all((folder / f"{other}").exists() for other in range(3)):
            time.sleep(0.01)
        if rank == 1:
            sys.exit(7)
        time.sleep(1200)
    """
    module = small_module(tmp_path, body, monkeypatch)
    begun = time.monotonic()
    assert spawn([str(tmp_path), "3"], 3, module=module, grace_s=0.5) == 7
    assert time.monotonic() - begun < 600
    assert not any(is_running(int((tmp_path / str(rank)).read_text())) for rank in range(3))
    output, errors = capfd.readouterr()
    assert output == "words of 0\n"
    assert errors == "complaints of 0\nrank 1: complaints of 1\n"


def test_a_rank_that_dies_of_a_signal_is_told_as_shells_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = small_module(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank else None", monkeypatch)
    assert spawn([str(tmp_path), "2"], 2, module=module) == 128 + signal.SIGKILL
    module = small_module(tmp_path, "pass", monkeypatch)
    assert spawn([str(tmp_path), "2"], 2, module=module) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_rank_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    body = """
        came = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: came.append(number))
        (folder / f"ready {rank}").touch()
        while not came:
            time.sleep(0.01)
        time.sleep(0.3)
        (folder / f"came {rank}").write_text(json.dumps(came))
    """
    module = small_module(tmp_path, body, monkeypatch)
    # A runner in the background may have left SIGINT ignored.
    script = f"""
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from flopwise.engine.spawning import spawn
        sys.exit(spawn([{str(tmp_path)!r}, "2"], 2, module={module!r}))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)]) as process:
        while process.poll() is None and not all((tmp_path / f"ready {rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(timeout=300) == 0
    for rank in range(2):
        assert json.loads((tmp_path / f"came {rank}").read_text()) == [number]


def test_a_rank_that_is_left_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert spawn(["lose", str(tmp_path)], 2, module=WORKER, grace_s=20.0) in (1, 9)
    assert "rank 0 lost the others" in capfd.readouterr().err


def test_ranks_that_do_not_come_are_not_waited_for_forever() -> None:
    rank = Rank(rank=1, world=2, local_rank=1, address="127.0.0.1", port=9, launched_by="torchrun")
    words = r"2 ranks did not meet at 127\.0\.0\.1:9 within 1 s"
    with pytest.raises(FlopwiseError, match=words), Group(rank, "cpu", meeting_s=1):
        pass
