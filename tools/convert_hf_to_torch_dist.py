"""Converts a Hugging Face model to Megatron's torch_dist format, for `--load` and `--ref-load`.

python tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" --hf-checkpoint DIR --save DIR
torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py …     # each rank holds a part of the model
"""

import argparse

from colloid.entry import run_tool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-checkpoint", required=True, help="Hugging Face directory of the model")
    parser.add_argument("--save", required=True, help="directory that gets the checkpoint")
    arguments, options = parser.parse_known_args()
    from colloid.training.megatron.convert import hf_to_torch_dist

    hf_to_torch_dist(arguments.hf_checkpoint, arguments.save, options)


if __name__ == "__main__":
    run_tool(main)
