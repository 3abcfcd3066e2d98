"""What can be refused of a training on several devices, looked at once, before a process is started for each.

Every rank looks again, at what it finds on its own machine. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from flopwise.base.errors import FlopwiseError
from flopwise.base.files import entry_kind
from flopwise.catalog.load import is_plan, load_plan
from flopwise.engine.data.sources import check_beginnings, evaluation_of, find_sources
from flopwise.engine.data.tokenizer import load_tokenizer
from flopwise.engine.executable import check_executed, no_gpu
from flopwise.engine.weights.weight_files import weight_files
from flopwise.profile.measure.this_machine import Here, cpu_here, gpus_here
from flopwise.records.cluster_plan import ClusterPlan
from flopwise.records.plan import Plan
from flopwise.store.runs import PLAN, find_run, read_record, store_folder
from flopwise.train.data_checks import check_store
from flopwise.train.hardware import check_kind
from flopwise.train.preparing import Settled, plan_of_run, settle
from flopwise.train.request import TrainRequest, merge_resumed
from flopwise.work.model import Model

DRIVER_PLACES = ("/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/nvhost-gpu", "/dev/dxg")
"""Of NVIDIA's drivers: of cards, of boards that have a GPU on them, and under Windows."""
RANKS_PER_CORE = 8
"""At most, where more ranks than cores are wanted: beyond that they mostly wait, and their memory is gone."""
TORCH_BUILD = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*(\S+)", re.MULTILINE)


def check_launch(request: TrainRequest) -> None:
    """Refuse what the ranks would refuse on this machine, and more of them than it can have."""
    ranks = request.devices
    request, plan = _load_resumed(request) if request.resume else (request, _load_given_plan(request))
    here = _here(request.device)
    if here is None:
        return
    if plan is not None and not request.anywhere and request.on is None:
        check_kind(plan[0], here)
    check_ranks(here, ranks, anywhere=request.anywhere)
    settled = settle(request, here, ranks=ranks, plan=plan if request.resume else None)
    found, _ = plan_of_run(settled, settled.model, ranks)
    assert isinstance(found, ClusterPlan)
    check_executed(found, settled.model, ranks)
    _check_files(settled)
    check_store(request)


def check_plan_device(request: TrainRequest) -> None:
    """Refuse a plan for a GPU on a CPU and the other way round, where torch need not be asked what there is."""
    plan = _load_given_plan(request) if request.resume is None and not request.anywhere else None
    here = _here(request.device) if plan is not None and request.on is None else None
    if plan is not None and here is not None:
        check_kind(plan[0], here)


def _load_given_plan(request: TrainRequest) -> tuple[Plan | ClusterPlan, Model] | None:
    return load_plan(Path(request.model)) if request.model is not None and is_plan(request.model) else None


def _load_resumed(request: TrainRequest) -> tuple[TrainRequest, tuple[Plan | ClusterPlan, Model] | None]:
    """What a run was asked for, as far as it is looked at here, and its plan; the ranks tell of what is damaged."""
    assert request.resume is not None
    folder = find_run(store_folder(request.store), request.resume)
    try:
        return merge_resumed(read_record(folder), request), load_plan(folder / PLAN)
    except FlopwiseError:
        return request, None


# -- devices ---------------------------------------------------------------------------------------------------------


def _here(wanted: str) -> Here | None:
    """What torch would run on, told without it; None: that cannot be told."""
    builds = _torch_builds()
    if wanted != "cpu" and "hip" in builds:
        return None
    gpus = gpus_here() if wanted != "cpu" and "cuda" in builds else None
    if gpus is None and wanted != "cpu" and "cuda" in builds and _may_have_gpus():
        return None
    if wanted == "cuda" and gpus is None:
        raise no_gpu()
    return gpus or cpu_here()


def _may_have_gpus() -> bool:
    """Whether there is a driver though its management library shows no GPU: it is left out of some containers."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(entry_kind(Path(place)) != "nothing" for place in DRIVER_PLACES)


def _torch_builds() -> set[str]:
    """What the torch that is installed was built for, as its own file says."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return set()
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return set()
    return {name for name, value in TORCH_BUILD.findall(text) if value != "None"}


def check_ranks(here: Here, ranks: int, *, anywhere: bool) -> None:
    """Refuse more ranks than there are GPUs, or cores; of these so many more that nothing would come of it."""
    if here.device == "cuda":
        if ranks > here.count:
            raise FlopwiseError(
                f"{ranks:,} GPUs are wanted, and this machine has {here.count}",
                why="each rank has a GPU of its own",
                hint=f"--gpus {here.count}, or one rank for each GPU of several machines by torchrun or srun",
            )
        return
    most = here.count * (RANKS_PER_CORE if anywhere else 1)
    if ranks > most:
        more = f"--anywhere for up to {RANKS_PER_CORE} a core" if not anywhere else "more machines by torchrun or srun"
        raise FlopwiseError(
            f"{ranks:,} ranks are wanted, and this machine has no GPU and {here.count} "
            f"core{'s' if here.count > 1 else ''}",
            why=f"at most {most:,} are started here",
            hint=f"--gpus {most}, or {more}",
        )


# -- files -----------------------------------------------------------------------------------------------------------


def _check_files(settled: Settled) -> None:
    """Refuse data, tokenizers and weights that are not there or are of another kind, without reading them whole."""
    request = settled.request
    for named in (
        request.data,
        evaluation_of(request.evaluation_data, request.data, tokens=request.data_format is not None),
    ):
        tokens = request.data_format is not None
        sources, _ = find_sources(named, labelled=settled.task == "classification", tokens=tokens)
        check_beginnings(sources)
    load_tokenizer(request.tokenizer, settled.model.vocab, masked=settled.task == "masked")
    if settled.weights is not None and not settled.resumed:
        weight_files(settled.weights)
