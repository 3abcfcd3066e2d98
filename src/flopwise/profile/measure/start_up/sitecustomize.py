"""What Python runs at the start of a profiled program: this folder is at the front of its PYTHONPATH.

Waits for the program to import torch, then hands over to `hook`, which is loaded by its place and under a name of its
own: the program's `import flopwise` finds what it would find without us, or nothing. Imports nothing that Python has
not imported by then, and leaves the path, the modules and the caches of imports as if it had never been there.
"""

# Annotations are texts, since `__future__` is a module that a program may not have imported.
import _frozen_importlib
import _frozen_importlib_external
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VARIABLE = "FLOPWISE_PROFILE"
"""Warm-up, steps, the longest recording in seconds and the file of TOLD, with blanks between; else nothing happens."""
TOLD = ".told-"
"""How the file begins in which the processes of a program say how far they came, in lines that `told` reads. It lies in
the folder of the profile, one for each profiling."""
PRIVATE = "_flopwise_profile"
"""What flopwise's profile package is called within a program."""


class TorchFinder:
    """Finds torch where everybody else does, and is told when it is imported."""

    def __init__(self, then: "Callable[[], None]") -> None:
        self._then = then

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """None but for torch. Programs also ask only whether torch is there, so this may be called many times."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._change(spec.loader)
                return spec
        return None

    def _change(self, loader: object) -> None:
        """Each search makes a fresh loader, and the change ends with the import."""
        execute: Callable[[ModuleType], None] = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: "ModuleType") -> None:
            execute(module)
            del loader.exec_module  # type: ignore[attr-defined]
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = exec_module  # type: ignore[attr-defined]


def tell(told: str, words: str) -> None:
    """Add a line about this process. Where that fails there is nobody left to tell."""
    line = f"{os.getpid()} {' '.join(words.split())}\n".encode(errors="backslashreplace")
    try:
        place = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(place, line)
        finally:
            os.close(place)
    except OSError:
        pass


def begin(settings: str) -> None:
    """Hand over to the hook now or when torch is imported."""
    warm_up, steps, at_most_s, told = settings.split(" ", 3)
    tell(told, "python")

    def then() -> None:
        hand_over(told, int(warm_up), int(steps), float(at_most_s))

    if "torch" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, TorchFinder(then))


def hand_over(told: str, warm_up: int, steps: int, at_most_s: float) -> None:
    """Torch is imported: watch its steps. Whatever goes wrong, the program goes on."""
    tell(told, "torch")
    try:
        hook = _load_hook(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100,PTH120
        hook.install(told, warm_up=warm_up, steps=steps, at_most_s=at_most_s)
    except Exception as error:  # noqa: BLE001,RUF100 - never the program's problem
        tell(told, f"failed {type(error).__name__}: {error}")


def _load_hook(package: str) -> "ModuleType":
    """`hook` and what it needs, which live on without a place among the program's modules."""
    parent = type(sys)(PRIVATE)
    parent.__path__ = [package]
    sys.modules[PRIVATE] = parent
    try:
        __import__(f"{PRIVATE}.hook")
        return sys.modules[f"{PRIVATE}.hook"]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == PRIVATE]:
            del sys.modules[name]
        for folder in [folder for folder in sys.path_importer_cache if folder.startswith(package)]:
            del sys.path_importer_cache[folder]


def step_aside(folder: str) -> None:
    """Leave the path as if this had never been on it, and run the `sitecustomize` that it stood in front of."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]  # noqa: PTH100
    sys.path_importer_cache.pop(folder, None)
    spec = _frozen_importlib_external.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        # What Python says to itself, and passes over, where there is none; it then forgets this module, too.
        raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
    module = _frozen_importlib.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _settings = os.environ.get(VARIABLE)
    if _settings:
        begin(_settings)
    step_aside(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100,PTH120
