"""The verifiable instructions of IFEval (Zhou et al., 2023) and IFBench (Pyatkin et al., 2025), a function each."""
