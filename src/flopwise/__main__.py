"""Run as `python -m flopwise`."""

from __future__ import annotations

from flopwise.cli import main

if __name__ == "__main__":
    main()
