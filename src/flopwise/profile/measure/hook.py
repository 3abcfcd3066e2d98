"""Within a profiled program: what counts as a step, and the recorder that is told of each.

A step ends with `step` of an optimizer, of the one that was stepped first where there are several. A program that
steps none has a step for every call of its outermost module. Imports torch only once the program has, and no other
package.

Of several threads the first that takes a step is watched until it ends; torch's profiler must be stopped by the thread
that started it. What goes on is told to the profiling process in a file, never on the program's own output.

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
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .recording import Recorder, uses_cuda
from .start_up.sitecustomize import tell

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
STEP_OF_OPTIMIZER = "Optimizer.step#"
"""How torch's mark round the step of an optimizer begins."""
CALL = "_compiled_call_impl"
"""What a module looks up about itself first when it is called."""
PATIENCE_S = 2.0
"""How long a program's own profiler waits for the end of a step in another thread."""


def install(told: str, *, warm_up: int, steps: int, at_most_s: float) -> None:
    """Watch this process's steps, record some of them beside the file `told`, and say there how far it came."""
    Watcher(Path(told), warm_up=warm_up, steps=steps, at_most_s=at_most_s).watch()


class _Here(threading.local):
    """What belongs to a thread."""

    acting = False
    """Whether what happens now is ours."""
    marks = 0
    """Of steps of optimizers, how many are open: a subclass may call the step of its parent."""
    life: _Life | None = None


class _Life:
    """Lives as long as the thread that is watched."""


class Watcher:
    """One process of the program."""

    def __init__(self, told: Path, *, warm_up: int, steps: int, at_most_s: float) -> None:
        self._new_recorder = functools.partial(
            Recorder, told.parent, warm_up=warm_up, steps=steps, at_most_s=at_most_s, with_memory=True, replace=False
        )
        self._tell = functools.partial(tell, str(told))
        self._alive = True
        self._here = _Here()
        self._lock = threading.Lock()
        """Held by whoever asks or changes which thread is watched."""
        self._recording = threading.Lock()
        """Held while the recorder is at work, which may take seconds."""
        self._watched: weakref.ref[_Life] | None = None
        self._leaving = threading.Event()
        """The program's own profiler is about to start in another thread."""
        self._left = threading.Event()
        self._recorder: Recorder | None = None
        self._steps = 0
        self._most_steps = 0
        """Of any thread that has ended."""
        self._other_steps = 0
        self._optimizer: weakref.ref[Any] | None = None
        self._root: weakref.ref[Any] | None = None
        self._forget_root: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Begin; ends with the process."""
        self._watch_marks()
        self._watch_calls()
        self._watch_profilers()
        atexit.register(self._guard, self._close)
        os.register_at_fork(after_in_child=self._begin_anew)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _watch_marks(self) -> None:
        """Torch sets a mark round every step of an optimizer; when that ends, so does the step.

        Optimizers stay as they are, and no frame of ours is among those of an error. The hooks that torch has for
        steps run within the mark: a step that ended there would cross it, and viewers drop what crosses.
        """
        import torch

        mark = torch.autograd.profiler.record_function
        enter, leave = mark.__enter__, mark.__exit__
        here = self._here

        def __enter__(of: Any) -> Any:  # noqa: ANN401,N807 - torch is not imported here
            if of.name.startswith(STEP_OF_OPTIMIZER):
                here.marks += 1
            return enter(of)  # type: ignore[no-untyped-call]

        def __exit__(of: Any, kind: Any, error: Any, trace: Any) -> None:  # noqa: ANN401,N807
            leave(of, kind, error, trace)
            if of.name.startswith(STEP_OF_OPTIMIZER):
                here.marks = max(0, here.marks - 1)
                if kind is None and here.marks == 0:
                    self._guard(self._optimizer_stepped, sys._getframe(1).f_locals.get("self"))

        mark.__enter__ = __enter__  # type: ignore[method-assign]
        mark.__exit__ = __exit__  # type: ignore[method-assign]

    def _optimizer_stepped(self, optimizer: Any) -> None:  # noqa: ANN401 - torch is not imported here
        import torch

        within_backward = torch._C._current_graph_task_id() != -1
        is_one = isinstance(optimizer, torch.optim.Optimizer)
        if within_backward or not is_one or _capturing():
            return
        # Whoever only computes forward, perhaps to look at the result, is not the one who trains.
        if not self._is_watched_thread(takes_over=self._optimizer is None):
            return
        counted = None if self._optimizer is None else self._optimizer()
        if counted is None:
            self._forget_root()
            if self._optimizer is None and self._recorder is not None:
                # What looked like a program that only computes forward was an evaluation before the training.
                self._recorder.discard()
                self._recorder, self._steps = None, 0
            self._optimizer = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        self._step()

    def _watch_calls(self) -> None:
        """Be asked when a module is called: of the first that has parameters, calls are steps.

        A module that is called looks up an attribute in its class first, which is None. Hooks would be the official
        way, but are pickled, copied and scripted with their module, and change what errors show.
        """
        import torch

        module = torch.nn.Module
        before = module.__dict__[CALL]
        calls = _StepCalls(functools.partial(self._guard, self._module_called), module, torch.compiler.is_compiling)
        setattr(module, CALL, calls)

        def forget() -> None:
            if module.__dict__[CALL] is calls:
                setattr(module, CALL, before)

        self._forget_root = forget

    def _module_called(self, module: Any) -> None:  # noqa: ANN401 - torch is not imported here
        if self._root is None:
            # Transforms of data and losses are modules, too.
            if next(module.parameters(), None) is None:
                return
            self._root = weakref.ref(module)
        if self._root() is not module or _capturing() or not self._is_watched_thread():
            return
        if self._recorder is not None:
            self._step()
            return
        with self._recording:
            self._begin()

    def _begin(self) -> None:
        if uses_cuda() and threading.current_thread().daemon:
            # It may be there when the program ends, where nobody can stop its profiler: torch 2.11 then crashes.
            self._tell("daemon")
            self._end()
            return
        self._tell("step")
        self._recorder = self._new_recorder(rank=_rank())

    def _step(self) -> None:
        if self._leaving.is_set():
            self._leave()
            return
        with self._recording:
            if self._recorder is None:
                self._begin()
            if self._recorder is None:
                return
            self._recorder.step()
        self._steps += 1
        if self._recorder.done:
            self._forget_root()
            # A program that has only computed forward may still begin to train, which counts for more.
            self._alive = self._optimizer is None

    # -- threads --------------------------------------------------------------------------------------------------

    def _is_watched_thread(self, *, takes_over: bool = False) -> bool:
        """The profiler sees what its own thread does, so steps of others are not counted.

        `takes_over`: it is this one from now on, unless the profiler runs in another.
        """
        with self._lock:
            life = None if self._watched is None else self._watched()
            if takes_over and life is not self._here.life:
                with self._recording:
                    life = life if self._recorder is not None and self._recorder.profiles else None
            if life is None:
                life = self._here.life = _Life()
                self._watched = weakref.ref(life, functools.partial(self._thread_ended, os.getpid()))
            watched = self._here.life is life
            self._other_steps += not watched
        return watched

    def _thread_ended(self, process: int, _: object) -> None:
        """Called by the thread itself with its last breath. Another that takes steps may follow it."""
        if process == os.getpid():
            self._guard(self._close_thread)

    def _close_thread(self) -> None:
        with self._lock:
            recorder, self._recorder = self._recorder, None
            self._other_steps += min(self._most_steps, self._steps)
            self._most_steps, self._steps = max(self._most_steps, self._steps), 0
            self._optimizer = None
        if recorder is not None:
            with self._recording:
                recorder.close()
            if recorder.written:
                self._end()

    def _close(self) -> None:
        """The program ends. A recording in another thread, which still runs, is lost: only that one can stop it."""
        life = None if self._watched is None else self._watched()
        if self._recorder is not None and life is self._here.life:
            self._recorder.close()
        most, fewest = max(self._most_steps, self._steps), min(self._most_steps, self._steps)
        self._tell(f"ended {most} {self._other_steps + fewest}")
        # Threads that are still there end after this, and not in an order that anything could rely on.
        self._end()

    def _begin_anew(self) -> None:
        """A copy of the process records on its own account, unless its parent has begun to."""
        self._lock, self._recording = threading.Lock(), threading.Lock()
        if self._recorder is not None:
            self._recorder = None
            self._end()

    # -- other profilers ------------------------------------------------------------------------------------------

    def _watch_profilers(self) -> None:
        import torch

        profiler = torch.autograd.profiler.profile
        original = profiler._prepare_trace

        def _prepare_trace(of: Any) -> None:  # noqa: ANN401 - torch is not imported here
            if not self._here.acting:
                self._guard(self._give_way)
            original(of)  # type: ignore[no-untyped-call]

        profiler._prepare_trace = _prepare_trace  # type: ignore[method-assign]

    def _give_way(self) -> None:
        life = None if self._watched is None else self._watched()
        with self._recording:
            profiles = self._recorder is not None and self._recorder.profiles
        if profiles and life is not self._here.life:
            # Only the thread that started ours can stop it, with its next step.
            self._leaving.set()
            self._left.wait(PATIENCE_S)
        else:
            self._leave()

    def _leave(self) -> None:
        if self._recorder is not None and self._recorder.written:
            self._recorder.close()
        else:
            self._tell("profiler")
            if self._recorder is not None:
                self._recorder.discard()
        self._end()
        self._left.set()

    # -- our own failures -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._alive = False
        self._forget_root()

    def _guard(self, action: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 - those of the action
        """A failure of ours ends the watching, not the program; nothing of ours is compiled with it."""
        if not self._alive or self._here.acting:
            return
        import torch

        self._here.acting = True
        compiler = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001,RUF100 - see above
            self._end()
            self._tell(f"failed {type(error).__name__}: {error}")
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(compiler)
            self._here.acting = False


class _StepCalls:
    """Stands for the attribute that a module looks up when it is called, and says what the module has itself."""

    def __init__(self, called: Callable[[Any], None], module: Any, compiling: Callable[[], bool]) -> None:  # noqa: ANN401
        self._called = called
        self._code = module._wrapped_call_impl.__code__
        self._compiling = compiling

    def __get__(self, module: Any, _: Any) -> Any:  # noqa: ANN401 - torch is not imported here
        if module is None:
            return None
        # A compiler follows the program into this, but no further.
        if not self._compiling() and sys._getframe(1).f_code is self._code:
            self._called(module)
        return module.__dict__.get(CALL)

    def __set__(self, module: Any, value: Any) -> None:  # noqa: ANN401 - torch is not imported here
        module.__dict__[CALL] = value


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
