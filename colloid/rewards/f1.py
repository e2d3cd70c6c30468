"""Token-level F1 of an answer, as in SQuAD (Rajpurkar et al., 2016) and open-domain question answering.

Lower case, without punctuation and articles; tokens are what spaces separate, counted with multiplicity. `yes`, `no`
and `noanswer` must match as a whole (HotpotQA).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from colloid.rewards.extract import after_thinking

_WHOLE = ("yes", "no", "noanswer")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1_reward(response: str, label: str | Sequence[str]) -> float:
    """The best F1, 0.0 to 1.0, over the labels."""
    labels = [label] if isinstance(label, str) else [str(one) for one in label]
    answer = after_thinking(response)
    return max((f1(answer, one) for one in labels), default=0.0)


def f1(answer: str, label: str) -> float:
    """F1 of precision and recall over the tokens of both."""
    answer, label = normalized(answer), normalized(label)
    if answer != label and (answer in _WHOLE or label in _WHOLE):
        return 0.0
    given, wanted = answer.split(), label.split()
    if not given or not wanted:
        return float(given == wanted)
    same = sum((Counter(given) & Counter(wanted)).values())
    return 2 * same / (len(given) + len(wanted))


def normalized(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
