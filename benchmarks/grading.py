"""How many answers a second `math` grades, beside math-verify alone.

    python benchmarks/grading.py

Responses that end in a box, as reasoning models write them: first such whose answer matches the label exactly, then
such whose answer is written differently or is another one, so that both must do the algebra. One process, one core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

from colloid.rewards.math import fast_verdict, verify, warm_up

SECONDS = 5.0
EXACT = ["42", "-7", "3.14", r"\frac{1}{2}", r"2\sqrt{3}", "x^2+2x+1", "(1,2)", r"\frac{\sqrt{3}}{2}", r"6\pi", "1,000"]
REST = [(r"\frac{2}{4}", r"\frac{1}{2}"), ("0.5", r"\frac{1}{2}"), (r"\sqrt{12}", r"2\sqrt{3}"), ("7", "x+1")]
RESPONSE = """Let $x$ be the number. From $x + a = {number}$ and $a > 0$ it follows that
$$x = {number} - a,$$ and since \\(a = 1\\) is the only case left, the result is

$$\\boxed{{{answer}}}$$"""


def math(response: str, label: str) -> float:
    """What `--rm-type math` does with an answer, without the worker process around its slow part."""
    verdict = fast_verdict(response, label)
    return verify(response, label) if verdict is None else float(verdict)


def pairs(answers: list[tuple[str, str]]):
    """Endless (response, label) pairs, no two responses alike, so that no cache answers."""
    number = 0
    while True:
        for answer, label in answers:
            number += 1
            yield RESPONSE.format(number=number, answer=answer), label


def speed(grade: Callable[[str, str], float], answers: list[tuple[str, str]]) -> float:
    """Answers a second."""
    source, count, start = pairs(answers), 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        for _ in range(len(answers)):
            grade(*next(source))
            count += 1
    return count / (time.perf_counter() - start)


def main() -> None:
    """Prints one line a kind of answers."""
    warm_up()
    print(f"{'answers':<24}{'math-verify /s':>16}{'math /s':>12}{'ratio':>8}")
    for name, answers in (("match exactly", [(one, one) for one in EXACT]), ("the rest", REST)):
        slow, fast = speed(verify, answers), speed(math, answers)
        print(f"{name:<24}{slow:>16.0f}{fast:>12.0f}{fast / slow:>8.1f}")


if __name__ == "__main__":
    main()
