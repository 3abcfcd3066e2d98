"""Within a profiled program: what counts as a step, and the recorder that is told of each.

A step ends with `step` of an optimizer, of the one that was stepped first where there are several. A program that
steps none has a step for every call of its outermost module. Imports torch only once the program has, and no other
package.

What it does not see: the steps of an optimizer that is compiled, captured in a CUDA graph, run within the backward pass
or no `torch.optim.Optimizer`; calls of the outermost module stand in for them. Where a framework updates the parameters
piece by piece, each piece looks like a step. A program that uses torch's profiler itself is left alone: there can be
only one.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flopwise.profile.recording import Recorder, uses_cuda

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def install(settings: Mapping[str, Any]) -> None:
    """Watch this process's steps. `settings` are those that `outside` put into the environment."""
    watcher = Watcher(
        Path(settings["folder"]),
        warm_up=settings["warm_up"],
        steps=settings["steps"],
        at_most_s=settings["at_most_s"],
    )
    watcher.watch()


class Watcher:
    """One process of the program."""

    def __init__(self, folder: Path, *, warm_up: int, steps: int, at_most_s: float) -> None:
        self._new_recorder = functools.partial(
            Recorder, folder, warm_up=warm_up, steps=steps, at_most_s=at_most_s, with_memory=True, replace=False
        )
        self._alive = True
        self._acting = False
        self._thread: int | None = None
        self._recorder: Recorder | None = None
        self._optimizer: weakref.ref[Any] | None = None
        self._within_step = False
        self._root: weakref.ref[Any] | None = None
        self._forget_root: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Begin; ends with the process."""
        self._wrap_optimizers()
        self._find_root()
        self._watch_profilers()
        atexit.register(self._guarded, self._close)
        os.register_at_fork(after_in_child=self._forked)

    def _wrap_optimizers(self) -> None:
        """Every optimizer's `step` passes through `profile_hook_step`, which also calls torch's own step hooks.

        Those hooks run within the mark that torch sets round a step in the trace, so a step that ended there would
        cross that mark; viewers drop what crosses.
        """
        import torch

        original = torch.optim.Optimizer.profile_hook_step
        compiling = torch.compiler.is_compiling

        def profile_hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
            marked = original(step)

            @functools.wraps(marked)
            def watched(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever an optimizer takes
                # A subclass may call the step of its parent, which is wrapped as well; a compiler sees through this.
                if compiling() or self._within_step or not self._alive:
                    return marked(*arguments, **named)
                self._within_step = True
                try:
                    result = marked(*arguments, **named)
                finally:
                    self._within_step = False
                self._guarded(self._optimizer_stepped, arguments[0])
                return result

            return watched

        torch.optim.Optimizer.profile_hook_step = staticmethod(profile_hook_step)  # type: ignore[assignment]

    def _optimizer_stepped(self, optimizer: Any) -> None:  # noqa: ANN401 - torch is not imported here
        import torch

        within_backward = torch._C._current_graph_task_id() != -1
        if within_backward or _capturing() or not self._same_thread():
            return
        counted = None if self._optimizer is None else self._optimizer()
        if counted is None:
            self._forget_root()
            if self._optimizer is None and self._recorder is not None:
                # What looked like a program that only computes forward was an evaluation before the training.
                self._recorder.discard()
                self._recorder = None
            self._optimizer = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        self._step()

    def _find_root(self) -> None:
        """Watch all modules until the first that has parameters is called, and from then on only that one.

        A hook on all modules for longer would slow each of them and make compiled ones compile again.
        """
        import torch

        compiling = torch.compiler.is_compiling

        def first_call(module: Any, _: Any) -> None:  # noqa: ANN401 - torch is not imported here
            # Transforms of data and losses are modules, too.
            if not compiling() and next(module.parameters(), None) is not None:
                handle.remove()
                self._guarded(self._watch_root, module)

        # A compiled module would complain of this hook, which is gone before it compiles.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        handle = torch.nn.modules.module.register_module_forward_pre_hook(first_call)

    def _watch_root(self, module: Any) -> None:  # noqa: ANN401 - torch is not imported here
        if self._optimizer is not None:
            return
        import torch

        self._root = weakref.ref(module)
        called = functools.partial(self._guarded, self._root_called)
        handle = module.register_forward_pre_hook(_Call(called, torch.compiler.is_compiling))
        self._forget_root = handle.remove

    def _watch_profilers(self) -> None:
        import torch

        profiler = torch.autograd.profiler.profile
        original = profiler._prepare_trace

        def _prepare_trace(of: Any) -> None:  # noqa: ANN401 - torch is not imported here
            if not self._acting:
                self._guarded(self._give_way)
            original(of)  # type: ignore[no-untyped-call]

        profiler._prepare_trace = _prepare_trace  # type: ignore[method-assign]

    def _give_way(self) -> None:
        if self._recorder is not None and self._recorder.written:
            self._recorder.close()
        else:
            sys.stderr.write("flopwise: this program uses torch's profiler itself, so it is left alone\n")
            if self._recorder is not None:
                self._recorder.discard()
        self._end()

    def _root_called(self, module: Any) -> None:  # noqa: ANN401 - torch is not imported here
        # A copy of the module has no such hook, but may share the table of hooks.
        if self._root is None or self._root() is not module:
            return
        if _capturing() or not self._same_thread():
            return
        if self._recorder is None:
            self._recorder = self._new_recorder(rank=_rank())
        else:
            self._step()

    def _step(self) -> None:
        if self._recorder is None:
            self._recorder = self._new_recorder(rank=_rank())
        self._recorder.step()
        if self._recorder.done:
            self._forget_root()
            # A program that has only computed forward may still begin to train, which counts for more.
            self._alive = self._optimizer is None

    def _same_thread(self) -> bool:
        """The profiler sees what its own thread does, so steps of others are not counted."""
        if self._thread is None:
            self._thread = threading.get_ident()
        return self._thread == threading.get_ident()

    def _close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def _forked(self) -> None:
        """A copy of the process records on its own account, unless its parent has begun to."""
        if self._recorder is not None:
            self._recorder = None
            self._end()

    def _end(self) -> None:
        self._alive = False
        self._forget_root()

    def _guarded(self, action: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 - those of the action
        """A failure of ours ends the watching, not the program."""
        if not self._alive:
            return
        self._acting = True
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001,RUF100 - see above
            self._alive = False
            sys.stderr.write(f"flopwise: profiling has stopped: {type(error).__name__}: {error}\n")
        finally:
            self._acting = False


class _Call:
    """A hook on a module. Its copies, also those in a file of the module, do nothing and need no flopwise."""

    def __init__(self, called: Callable[[Any], None], compiling: Callable[[], bool]) -> None:
        self._called = called
        self._compiling = compiling

    def __call__(self, module: Any, _: Any) -> None:  # noqa: ANN401 - torch is not imported here
        if not self._compiling():
            self._called(module)

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes any arguments and returns None, as a hook without effect has to.
        return getattr, (nullcontext(), "__exit__")


def _capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may wait for the device."""
    import torch

    return uses_cuda() and torch.cuda.is_current_stream_capturing()


def _rank() -> int:
    """As torch.distributed has it, else as the launcher says; 0 where there is none."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    told = (os.environ.get(name, "") for name in RANK_VARIABLES)
    return next((int(text) for text in told if text.isdecimal()), 0)
