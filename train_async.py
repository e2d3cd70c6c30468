"""Reinforcement learning of a language model, asynchronously: it generates while it trains. Options as of train.py."""

from colloid.entry import run_entry

if __name__ == "__main__":
    run_entry("train_async")
