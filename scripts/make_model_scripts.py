"""Makes `scripts/models/*.sh` from `colloid/models/facts.json`. `--check` only lists those that are out of date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from colloid.models.facts import model_facts  # noqa: E402

CHECKPOINTS = {
    "qwen3-4B": "Qwen/Qwen3-4B",
    "smollm2-135M": "${COLLOID_CACHE:-$HOME/.cache/colloid}/smollm2-135M-instruct",
}
"""Models that have a script, and where `--hf-checkpoint` points unless `HF_CHECKPOINT` is set: a name in the local
Hugging Face cache, or the directory that `scripts/fetch_smollm2.py` makes."""

TEMPLATE = """\
# Model arguments of {name}; `source` it, then `python train.py … ${{MODEL_ARGS[@]}} ${{CKPT_ARGS[@]}}`.
# HF_CHECKPOINT names the model's directory. Made by scripts/make_model_scripts.py.

MODEL_ARGS=(
    --hf-checkpoint "${{HF_CHECKPOINT:-{checkpoint}}}"
{arguments}
)

CKPT_ARGS=()
"""


def script(name: str) -> str:
    """The text of a model's script."""
    lines = []
    for flag, value in model_facts()[name].items():
        words = [flag] if value is True else [flag, *(value if isinstance(value, list) else [value])]
        lines.append("    " + " ".join(words))
    return TEMPLATE.format(name=name, checkpoint=CHECKPOINTS[name], arguments="\n".join(lines))


def main() -> int:
    outdated = []
    for name in CHECKPOINTS:
        path = ROOT / "scripts" / "models" / f"{name}.sh"
        if not path.exists() or path.read_text() != script(name):
            outdated.append(path.name)
            if "--check" not in sys.argv[1:]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(script(name))
    print("\n".join(outdated) or "up to date")
    return 1 if outdated and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
