"""Programs with odd habits, and how each is run with `flopwise profile run` and without it.

Exit code, stdout and stderr, less the lines that flopwise puts its name before, have to be the same.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "flopwise: "
READY = "ready\n"
PROFILED = "wrote "
"""What flopwise says of a program that it has a profile of."""
PATIENCE_S = 300.0
_TIMES = re.compile(r"(?<=USDT:)[-0-9: ]+|(?<=pid=)[0-9]+")
"""When and in which process torch's tracing library wrote a line."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program. `says`: what flopwise must say of it in the end."""

    text: str
    says: str = PROFILED
    options: tuple[str, ...] = ()
    """Of Python."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Beside it; PYTHONPATH points to `site`."""
    sends: Callable[[int], None] | None = None
    """To the process that was started, once the program has said that it is ready."""
    rare: bool = False
    """Left to the benchmark."""
    command: tuple[str, ...] | None = None
    """Instead of Python and the program's file; `python` is ours."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What is to be the same, and what flopwise said."""

    exit_code: int
    stdout: str
    stderr: str
    said: str = ""


def prepare(program: Program, folder: Path) -> None:
    """Write its files."""
    for name, text in {"program.py": program.text, **program.files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
        (folder / name).chmod(0o755)


def run(program: Program, folder: Path, profile: Path | None = None) -> Ran:
    """Run it in the folder in which it was prepared; profiled into `profile`, where one is named."""
    command = [word.replace("python", sys.executable) for word in program.command or ()]
    command = command or [sys.executable, *program.options, "program.py"]
    if profile is not None:
        wanted = ("--folder", str(profile), "--steps", "2", "--warm-up", "2")
        command = [sys.executable, "-P", "-m", "flopwise", "profile", "run", *wanted, "--", *command]
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        before = ""
        if program.sends is not None:
            before = process.stdout.readline()
            program.sends(process.pid)
        try:
            stdout, stderr = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    lines = stderr.splitlines(keepends=True)
    ours = [line for line in lines if line.startswith(PREFIX) or line.rstrip() == PREFIX.rstrip()]
    others = [line for line in lines if line not in ours]
    return Ran(
        exit_code=process.returncode, stdout=before + stdout, stderr=_TIMES.sub("", "".join(others)), said="".join(ours)
    )


def differences(program: Program, plain: Ran, profiled: Ran) -> list[str]:
    """In words; none where both agree and flopwise said what it should."""
    found = [
        f"{name} {getattr(plain, name)!r} became {getattr(profiled, name)!r}"
        for name in ("exit_code", "stdout", "stderr")
        if getattr(plain, name) != getattr(profiled, name)
    ]
    if program.says not in profiled.said:
        found.append(f"{program.says!r} is not in {profiled.said!r}")
    return found


IMPORTS = """
import os, signal, sys, threading, types, warnings
import torch
"""
NOT_COMPILED = """
# Optimizers and torch's profiler import torch's compiler, which takes as long as torch itself, to ask it nothing.
for name in ("_dynamo", "_inductor", "_inductor.config"):
    sys.modules[f"torch.{name}"] = types.ModuleType(name)
torch._dynamo, torch._inductor = sys.modules["torch._dynamo"], sys.modules["torch._inductor"]
torch._dynamo.graph_break, torch._dynamo.disable = lambda: None, lambda function, *_, **__: function
torch._inductor.config = sys.modules["torch._inductor.config"]
torch._inductor.config.triton = types.SimpleNamespace(cudagraphs=False)
"""
BEGINNING = """
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
def step(model=model, optimizer=optimizer):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    return f"{loss.item():.6f}"
"""


def training(text: str, *, compiler: bool = False) -> str:
    """`compiler`: with torch's own."""
    return IMPORTS + ("" if compiler else NOT_COMPILED) + BEGINNING + textwrap.dedent(text)


PROGRAMS: dict[str, Program] = {
    # The thread that is watched ends within its recording, and its number is given to another one.
    "threads that share an optimizer": Program(
        text=training("""
            import copy
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            def work(steps):
                twin = copy.deepcopy(model)
                for _ in range(steps):
                    twin(torch.ones(4, 8, device=device)).square().mean().backward()
                    optimizer.step()
            def together(*counts):
                threads = [threading.Thread(target=work, args=(count,)) for count in counts]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            model(torch.ones(4, 8, device=device))
            for _ in range(6):
                together(1)
            together(3, 3, 3, 3)
            together(12, 12, 12, 12)
            print("all have ended")
        """),
    ),
    "its own modules flopwise and sitecustomize, and a scripted module": Program(
        text=training("""
            import sitecustomize
            print(sitecustomize.WORD, sitecustomize.__file__ == os.path.abspath("site/sitecustomize.py"))
            import flopwise
            import flopwise.profile
            print(flopwise.WORD, flopwise.profile.WORD, flopwise.__file__ == os.path.abspath("flopwise/__init__.py"))
            scripted = torch.jit.script(model)
            own = torch.optim.SGD(scripted.parameters(), lr=0.1)
            step(scripted, own)
            print(sorted(name for name in sys.modules if "flopwise" in name or "customize" in name))
            print(sys.path, [getattr(finder, "__qualname__", type(finder)) for finder in sys.meta_path])
            print([place for place in sys.path_importer_cache if "flopwise" in place])
            print(sys.orig_argv, warnings.filters, torch.__loader__.exec_module.__name__)
            print([step(scripted, own) for _ in range(8)])
            traced = torch.jit.trace(model, torch.ones(4, 8, device=device))
            print(traced.code)
        """),
        # Scripting warns that it is deprecated.
        options=("-W", "ignore"),
        files={
            "flopwise/__init__.py": "WORD = 'theirs'",
            "flopwise/profile.py": "WORD = 'theirs, too'",
            "site/sitecustomize.py": "import sys\nWORD = 'theirs', sys.path[:2]\n",
        },
    ),
    "os._exit": Program(
        text=training("""
            print([step() for _ in range(3)], flush=True)
            os._exit(3)
        """),
        says="a process that had begun to take steps was ended by a signal, os._exit or exec",
    ),
    # It ends itself by that signal.
    "SIGINT to the process that was started alone": Program(
        text=training("""
            import time
            def stop(number, frame):
                stops.append(number)
            stops = []
            signal.signal(signal.SIGINT, stop)
            for _ in range(8):
                step()
            print("ready", flush=True)
            while not stops:
                time.sleep(0.01)
            time.sleep(0.5)
            print("stopped by", stops)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        """),
        sends=lambda pid: os.kill(pid, signal.SIGINT),
    ),
    "SIGTERM to the whole group": Program(
        text="""
            import os, signal, time
            stops = []
            signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
            print("ready", flush=True)
            while not stops:
                time.sleep(0.01)
            time.sleep(0.5)
            print("stopped by", stops)
        """,
        sends=lambda pid: os.killpg(pid, signal.SIGTERM),
        says="it never imported torch",
    ),
    "fork": Program(
        text=training("""
            torch.cuda.is_available() or step()
            child = os.fork()
            if child == 0:
                # A GPU that its parent has used cannot be used by a copy.
                device = "cpu"
                twin = torch.nn.Linear(8, 1)
                own = torch.optim.SGD(twin.parameters(), lr=0.1)
                print([step(twin, own) for _ in range(6)], flush=True)
                os._exit(5)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            print([step() for _ in range(6)])
        """),
    ),
    "workers that are spawned": Program(
        text=training("""
            import multiprocessing
            def work(rank):
                print("worker", rank, [step() for _ in range(6)])
            if __name__ == "__main__":
                loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=1)
                print([batch.tolist() for batch in loader], flush=True)
                worker = multiprocessing.get_context("spawn").Process(target=work, args=(1,))
                worker.start()
                worker.join()
                print(worker.exitcode)
                sys.exit("said at the end")
        """),
    ),
    "several optimizers": Program(
        text=training(
            """
            import copy, inspect, io, pickle
            class Own(torch.optim.SGD):
                def step(self, closure=None):
                    return super().step(closure)
            second = Own(model[2].parameters(), lr=0.1)
            schedules = [torch.optim.lr_scheduler.StepLR(each, 1) for each in (optimizer, second)]
            for number in range(8):
                print(step())
                if number % 2:
                    second.step()
                for schedule in schedules:
                    schedule.step()
                print(b"flopwise" in pickle.dumps(model), sorted(model.__dict__), sorted(optimizer.__dict__))
                copy.deepcopy((model, optimizer, second))
            kept = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
            kept.seek(0)
            print(sorted(torch.load(kept, weights_only=True)))
            print(inspect.signature(second.step), inspect.signature(torch.optim.AdamW.step))
            print(inspect.getsource(torch.optim.Optimizer.profile_hook_step).count("def "))
            print(model._forward_pre_hooks, torch.nn.modules.module._global_forward_pre_hooks)
        """,
            compiler=True,
        ),
    ),
    "torch's profiler": Program(
        text=training("""
            from torch.profiler import ProfilerActivity, profile
            for _ in range(3):
                step()
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as theirs:
                for _ in range(3):
                    step()
            print({row.key: row.count for row in theirs.key_averages()}["Optimizer.step#AdamW.step"])
        """),
        says="it uses torch's profiler itself",
    ),
    "warnings as errors, and an exception within a step": Program(
        text=training("""
            import time
            for _ in range(8):
                step()
            def closure():
                raise ValueError("theirs")
            try:
                warnings.warn("theirs as well")
            except UserWarning as error:
                print(repr(error))
            optimizer.step(closure)
        """),
        options=("-W", "error", "-X", "faulthandler"),
    ),
    "an exception within a module": Program(
        rare=True,
        text=training(
            """
            with torch.inference_mode():
                for _ in range(6):
                    model(torch.ones(4, 8, device=device))
                compiled = torch.compile(model, backend="eager", fullgraph=True)
                print(compiled(torch.ones(4, 8, device=device)).shape)
                model(torch.ones(4, 9, device=device))
        """,
            compiler=True,
        ),
    ),
    "killed by a signal": Program(
        rare=True,
        text=training("""
            print([step() for _ in range(8)], flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        """),
    ),
    "exec of another program": Program(
        rare=True,
        text=training("""
            print(step(), flush=True)
            os.execv(sys.executable, [sys.executable, "-c", "import sys; print(sys.argv); sys.exit(9)", "word"])
        """),
        says="a process that had begun to take steps was ended by a signal, os._exit or exec",
    ),
    "a thread that is never joined": Program(
        rare=True,
        text=training("""
            enough, never = threading.Event(), threading.Event()
            def work():
                print([step() for _ in range(3)])
                enough.set()
                never.wait()
            threading.Thread(target=work, daemon=True).start()
            enough.wait()
        """),
        says="there is no profile",
    ),
    "torch's profiler in another thread": Program(
        rare=True,
        text=training("""
            from torch.profiler import ProfilerActivity, profile
            steps = []
            enough = threading.Event()
            def work():
                while not enough.is_set():
                    steps.append(step())
            thread = threading.Thread(target=work)
            thread.start()
            while len(steps) < 3:
                pass
            twin = torch.nn.Linear(8, 8)
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as theirs:
                twin(torch.ones(2, 8))
            enough.set()
            thread.join()
            print({row.key: row.count for row in theirs.key_averages()}["aten::addmm"])
        """),
        # Whichever is first: ours is done, or gives way.
        says=PREFIX,
    ),
    "no torch": Program(
        text="""
            import sys
            print(sorted(sys.modules), sys.path, sys.flags, sys.argv)
            sys.stderr.write("at the end\\n")
            sys.exit(7)
        """,
        says="it never imported torch",
    ),
    "python -I": Program(
        text="print('alone')",
        options=("-I",),
        says="with `-I` Python runs nothing but the program itself",
    ),
    "a script of a shell": Program(
        text="print(input())",
        files={"both.sh": "#!/bin/sh\necho words | $PYTHON program.py; exec 2>&-; kill -TERM $$\n"},
        command=("./both.sh",),
        says="it never imported torch",
    ),
    "no Python": Program(
        text="",
        command=("/bin/ls", "no-such-file"),
        says="flopwise's start-up file ran in none of its processes",
    ),
}
