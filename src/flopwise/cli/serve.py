"""`flopwise serve`: the page, live."""

from __future__ import annotations

from typing import Annotated

import typer

from flopwise.base.errors import FlopwiseError
from flopwise.cli.options import PriceOption, StoreOption

PORT = 8642


def serve(
    port: Annotated[str, typer.Option(help="Port. 0: any that is free.")] = str(PORT),
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    store: StoreOption = "",
    price: PriceOption = "",
) -> None:
    """Serve the page of all runs, which follows the store, on this machine alone."""
    from flopwise.base.files import entry_kind
    from flopwise.base.units import parse_count, read_option
    from flopwise.cli.report import read_price
    from flopwise.cli.serving import Live, listening, run_server, tell
    from flopwise.store.runs import VARIABLE, store_folder

    number = read_option(port, "port", parse_count(0, f"--port {PORT}"))
    wanted = PORT if number is None else number
    if wanted >= 2**16:
        raise FlopwiseError(f"--port {wanted} does not exist", why="the last one is 65535", hint=f"--port {PORT}")
    folder = store_folder(store)
    if entry_kind(folder) not in ("folder", "nothing"):
        raise FlopwiseError(f"{folder} is not a folder of runs", hint=f"--store FOLDER, or {VARIABLE}, names the store")
    if entry_kind(folder) == "nothing":
        tell(f"note: there is no {folder} yet; its runs are shown as they come")
    run_server(listening(Live(folder, price=read_price(price)), wanted), open_browser=open_browser)
