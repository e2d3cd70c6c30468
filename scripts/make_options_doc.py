"""Makes `docs/options.md` from the option tables."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from colloid.config.help import markdown  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "options.md").write_text(markdown())
