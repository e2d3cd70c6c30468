"""Reinforcement learning of a language model, synchronously. `python train.py --help` lists the options."""

from colloid.entry import run_entry

if __name__ == "__main__":
    run_entry("train")
