"""flopwise: how fast can this model train on this hardware, will it fit, and where does the time go?"""

from __future__ import annotations

__version__ = "0.1.0"
