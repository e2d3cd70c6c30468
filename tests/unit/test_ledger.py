"""The token ledger: each sampled token is trained once, in the context in which it was sampled."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colloid.data.ledger import FORKED, TokenLedger
from colloid.data.sample import Sample
from colloid.data.turns import TurnRenderer
from tests.tiny import make_tiny_tokenizer

ROLES = ("user", "tool")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return TurnRenderer(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def turn(ledger, renderer, messages, text, version=1, end="<|im_end|>"):
    """Records a turn; returns the messages with it, and its ids."""
    request = ledger.request(messages)
    ids = renderer.text_ids(text + end)
    ledger.record(request, ids, [-float(version)] * len(ids), version, says(text))
    return [*messages, says(text)], request.ids, ids


def test_turns_are_trained_as_sampled_and_what_is_between_is_not(renderer):
    ledger = TokenLedger(renderer)
    messages, prompt, first = turn(ledger, renderer, [user("1 + 1?")], "Let me see.", version=3)
    messages = [*messages, {"role": "tool", "content": "2"}, {"role": "tool", "content": "two"}]
    messages, context, second = turn(ledger, renderer, messages, "It is 2.", version=4)
    assert context[: len(prompt) + len(first)] == prompt + first
    between = context[len(prompt) + len(first) :]
    assert renderer._tokenizer.decode(between) == (
        "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    sample = Sample(index=7, reward=1.0)
    assert ledger.samples(sample) == [sample]
    assert sample.tokens == prompt + first + between + second
    assert sample.loss_mask == [1] * len(first) + [0] * len(between) + [1] * len(second)
    assert sample.rollout_log_probs == [-3.0] * len(first) + [0.0] * len(between) + [-4.0] * len(second)
    assert sample.weight_versions == [3] * len(first) + [-1] * len(between) + [4] * len(second)
    assert sample.response.startswith("Let me see.<|im_end|>") and sample.response.endswith("It is 2.")
    assert sample.reward == 1.0 and sample.rollout_id is None


def test_a_turn_that_was_cut_off_is_closed_by_the_template(renderer):
    ledger = TokenLedger(renderer)
    messages, prompt, first = turn(ledger, renderer, [user("1 + 1?")], "It is", end="")
    ids = ledger.request([*messages, user("Well?")]).ids
    expected = "<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    assert renderer._tokenizer.decode(ids[len(prompt) + len(first) :]) == expected


def test_a_conversation_whose_history_differs_is_a_branch_of_its_own(renderer):
    ledger = TokenLedger(renderer)
    start = [user("1 + 1?")]
    one, prompt, first = turn(ledger, renderer, start, "2", version=1)
    two, _, second = turn(ledger, renderer, [*one, user("sure?")], "Yes", version=2)
    # Leaves after the first turn; the first turn is trained where it was sampled.
    other, context, third = turn(ledger, renderer, [*one, user("really?")], "No", version=3)
    # Its first message differs: nothing is shared.
    _, unlike, fourth = turn(ledger, renderer, [user("2 + 2?")], "4", version=4)
    assert ledger.num_branches == 3 and ledger.num_turns == 4
    # A change in what the assistant said is a difference too, and white space is none.
    changed = ledger.request([start[0], says("two"), user("sure?")])
    assert changed.branch is None
    assert ledger.request([*start, says(" 2\n"), user("sure?"), says("Yes"), user("x")]).branch == 0
    # The same question again: another answer to it.
    turn(ledger, renderer, start, "3", version=5)
    sample = Sample(index=7, metadata={"a": 1})
    samples = ledger.samples(sample)
    assert len(samples) == 4 and samples[3] is sample, "the last recorded one"
    assert [s.metadata.get(FORKED) for s in samples] == [True, True, True, None]
    assert {s.rollout_id for s in samples} == {7} and {s.index for s in samples} == {7}
    assert samples[1].tokens == context + third and samples[1].loss_mask == [1] * len(third)
    assert context[: len(prompt) + len(first)] == prompt + first
    assert samples[2].tokens == unlike + fourth


def test_a_request_that_was_not_answered_leaves_nothing(renderer):
    ledger = TokenLedger(renderer)
    first = ledger.request([user("1 + 1?")])
    assert ledger.request([user("1 + 1?")]) == first
    assert ledger.num_branches == 0
    with pytest.raises(ValueError, match="no turn of sample 3"):
        ledger.samples(Sample(index=3))


def test_a_last_message_of_the_assistants_is_continued(renderer):
    ledger = TokenLedger(renderer)
    messages, prompt, first = turn(ledger, renderer, [user("1 + 1?")], "It ", end="")
    request = ledger.request(messages)
    assert request.continues and request.ids == prompt + first
    rest = renderer.text_ids("is 2.<|im_end|>")
    ledger.record(request, rest, [-1.0] * len(rest), 2, says("It is 2."))
    after = ledger.request([messages[0], says("It is 2."), user("Sure?")])
    assert after.branch == 0 and after.ids[: len(request.ids) + len(rest)] == request.ids + rest
    (sample,) = ledger.samples(Sample(index=0))
    assert sample.loss_mask == [1] * (len(first) + len(rest))
    # A beginning that the client wrote is not trained.
    ledger = TokenLedger(renderer)
    request = ledger.request([user("1 + 1?"), says("It is")])
    ledger.record(request, rest, None, None, says("It is is 2."))
    assert ledger.request([user("1 + 1?"), says("It is is 2."), user("x")]).branch == 0
    (sample,) = ledger.samples(Sample(index=0))
    assert sample.response_length == len(rest) and sample.rollout_log_probs is None


def test_answers_to_the_same_request_at_the_same_time_are_branches(renderer):
    ledger = TokenLedger(renderer)
    requests = [ledger.request([user("1 + 1?")]) for _ in range(3)]
    for number, request in enumerate(requests):
        ids = renderer.text_ids(f"{number}<|im_end|>")
        ledger.record(request, ids, [0.0] * len(ids), 1, says(str(number)))
    assert ledger.num_branches == 3
    follow = [ledger.request([user("1 + 1?"), says("1"), user(text)]) for text in ("a", "b")]
    for request in follow:
        ids = renderer.text_ids("ok<|im_end|>")
        ledger.record(request, ids, [0.0] * len(ids), 1, says("ok"))
    assert ledger.num_branches == 4
    assert [sum(s.loss_mask) for s in ledger.samples(Sample(index=0))] == [2, 5, 2, 3]


def test_calls_of_tools_match_however_they_are_written(renderer):
    ledger = TokenLedger(renderer)
    request = ledger.request([user("?")])
    ids = renderer.text_ids("call<|im_end|>")

    def call(arguments, content):
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "content": content, "tool_calls": [{"id": "1", "function": function}]}

    ledger.record(request, ids, None, 1, says("call"), call('{"a": 1, "b": 2}', None))
    tool = {"role": "tool", "content": "x", "tool_call_id": "1"}
    for message in (says("call"), call({"b": 2, "a": 1}, ""), call('{"b":2,"a":1}', None)):
        assert ledger.request([user("?"), message, tool]).branch == 0
    assert ledger.request([user("?"), call({"a": 2}, None), tool]).branch is None
    parts = [{"type": "text", "text": "?"}]
    assert ledger.request([{"role": "user", "content": parts}, says("call"), tool]).branch == 0


STEPS = st.lists(
    st.tuples(
        st.integers(0, 9),  # the conversation that is gone on with
        st.integers(0, 3),  # how many of its last turns are left out
        st.sampled_from(["a", "b", "c d"]),  # what the user says
        st.sampled_from(["x", "y", "x y\n", ""]),  # what is sampled
        st.sampled_from(["<|im_end|>", "", "<|endoftext|>"]),
        st.booleans(),  # whether it is recorded
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_each_sampled_token_is_trained_once_and_in_its_context(renderer, steps):
    ledger, conversations, recorded, value = TokenLedger(renderer), [[]], [], 0
    for which, back, said, text, end, is_recorded in steps:
        before = conversations[which % len(conversations)]
        messages = [*before[: max(0, len(before) - 2 * back)], user(said)]
        request = ledger.request(messages)
        ids = renderer.text_ids(text + end)
        if not is_recorded or not ids:
            continue
        log_probs = [-float(value + number) for number in range(len(ids))]
        value += len(ids)
        ledger.record(request, ids, log_probs, len(recorded), says(text))
        recorded.append((request.ids, ids, log_probs, len(recorded)))
        conversations.append([*messages, says(text)])
    if not recorded:
        return
    trained = []
    for sample in ledger.samples(Sample(index=5)):
        start = len(sample.tokens) - sample.response_length
        assert sample.loss_mask[0] == 1 and len(sample.weight_versions) == sample.response_length
        for place, masked in enumerate(sample.loss_mask):
            if masked:
                context = sample.tokens[: start + place]
                log_prob, version = sample.rollout_log_probs[place], sample.weight_versions[place]
                trained.append((log_prob, version, sample.tokens[start + place], context))
    expected = [
        (log_prob, version, ids[place], context + ids[:place])
        for context, ids, log_probs, version in recorded
        for place, log_prob in enumerate(log_probs)
    ]
    assert sorted(trained) == sorted(expected)
