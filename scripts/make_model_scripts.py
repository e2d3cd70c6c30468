"""Makes `scripts/models/*.sh` from `colloid/models/facts.py`. `--check` only lists those that are out of date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from colloid.models.facts import MODELS, Model  # noqa: E402

TEMPLATE = """\
# Model arguments of {name}; `source` it, then `python train.py … ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${{HF_CHECKPOINT:-{checkpoint}}}"
{arguments}
)

CKPT_ARGS=()
"""


def script(model: Model) -> str:
    """The text of a model's script."""
    lines = []
    for flag, value in model.flags.items():
        text = f'"{value}"' if "*" in str(value) else str(value)  # not a pattern of file names
        lines.append(f"    {flag}" if value is True else f"    {flag} {text}")
    return TEMPLATE.format(name=model.name, checkpoint=model.checkpoint, arguments="\n".join(lines))


def main() -> int:
    outdated = []
    for model in MODELS.values():
        path = ROOT / "scripts" / "models" / f"{model.name}.sh"
        if not path.exists() or path.read_text() != script(model):
            outdated.append(path.name)
            if "--check" not in sys.argv[1:]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(script(model))
    print("\n".join(outdated) or "up to date")
    return 1 if outdated and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
