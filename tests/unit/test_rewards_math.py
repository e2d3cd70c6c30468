"""`math` gives math-verify's verdicts: a table of several hundred pairs, most of them without math-verify's work."""

from __future__ import annotations

import pytest

from colloid.rewards.math import fast_verdict, verify

ANSWERS = [
    *("42", "-7", "3.14", "0", "007", "1,000", "10000000000000000000000", "+3", "5.", "12 apples", "1e5"),
    *(r"\frac{1}{2}", r"-\frac{3}{4}", r"\frac12", r"\dfrac{22}{7}", r"1\frac{1}{2}", "1/2", "3:4"),
    *(r"2\sqrt{3}", r"\sqrt[3]{5}", r"\frac{\sqrt{3}}{2}", r"\pi", r"6\pi", r"e^{i\pi}", r"2^{10}", "3i", "1+2i"),
    *("x^2+2x+1", "(x+1)(x-2)", "x=5", "y = 2x + 3", "n!", r"\binom{5}{2}", r"\log_2 8", "a_n = 2^n", "|x|"),
    *("(1,2)", "[0,1)", r"(-\infty, 3]", "1, 2, 3", r"\{1,2\}", r"x \leq 3", "-1 < x < 1", r"\pm 3"),
    *(r"\text{east}", "A", r"\text{(A)}", "yes", "hello world", "50\\%", "50%", r"10^\circ", r"5\text{ cm}", "10:30"),
    *(r"\emptyset", r"\infty", r"\ldots", r"\$5", "", "}", "{3}", "3}", "½", "π"),
]
WAYS = [
    "\\boxed{%s}",
    "so it is $\\boxed{%s}$.",
    "First $1+1=2$, and [see] \\$5.\n\n\\[ x = \\boxed{ %s } \\]",
    "We have $a=3$ so \\boxed{%s} and then $c$",
    "the answer is 7, hence \\boxed{%s}<|im_end|>",
    "\\boxed{%s}\\%%",
    "\\boxed{%s} percent",
    "The final answer is $9$. I hope it is correct. \\boxed{%s}",
]
OTHER = ["42", "43", r"\frac{1}{2}", "A"]


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_matches_exactly_gets_math_verifys_verdict(way):
    decided = 0
    for answer in ANSWERS:
        response = way % answer
        verdict = fast_verdict(response, answer)
        decided += verdict is not None
        assert verdict in (None, verify(response, answer) == 1.0), (response, answer)
    unusual = "final" in way or "ercent" in way or way.endswith("%%")
    assert decided > 0.8 * len(ANSWERS) or unusual


@pytest.mark.timeout(120)
def test_the_fast_path_finds_no_answer_right_that_math_verify_does_not():
    pairs = 0
    for answer in ANSWERS:
        for label in OTHER:
            for way in ("\\boxed{%s}", "It is %s.", "%s"):
                response = way % answer
                verdict = fast_verdict(response, label)
                if verdict is not None:
                    pairs += 1
                    assert verdict == (verify(response, label) == 1.0), (response, label)
    assert pairs >= 50


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("\\boxed{42} or \\boxed{43}", "42"),
        ("\\boxed{42", "42"),
        ("\\boxed{425}", "42"),
        ("\\boxed{4 2}", "42"),
        ("\\boxed{x}", "X"),
        ("\\boxed{\\frac{1}{2}", "\\frac{1}{2}"),
        ("\\fbox{42}", "42"),
        ("\\boxed{\\boxed{42}}", "42"),
        ("final answer is 3. \\boxed{42}", "42"),
    ],
)
def test_what_is_not_plainly_the_same_is_left_to_math_verify(response, label):
    assert fast_verdict(response, label) in (None, verify(response, label) == 1.0)
