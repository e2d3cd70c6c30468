"""Converts a checkpoint in Megatron's torch_dist format to a Hugging Face directory.

python tools/convert_torch_dist_to_hf.py --input-dir outputs/RUN/checkpoints --output-dir DIR --origin-hf-dir DIR
torchrun --nproc-per-node 8 tools/convert_torch_dist_to_hf.py …     # each rank holds a part of the model
"""

import argparse

from colloid.entry import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", required=True, help="checkpoints (the last is taken, or --ckpt-step), or one")
    parser.add_argument("--output-dir", required=True, help="directory that is written")
    parser.add_argument("--origin-hf-dir", required=True, help="Hugging Face directory: config, tokenizer, precision")
    arguments, options = parser.parse_known_args()
    from colloid.training.megatron.convert import torch_dist_to_hf

    torch_dist_to_hf(arguments.input_dir, arguments.output_dir, arguments.origin_hf_dir, options)


if __name__ == "__main__":
    run_tool(main)
