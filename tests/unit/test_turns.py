"""Turn by turn or as a whole: the same ids, family by family; and where a template rewrites history, that is said."""

import pytest

from colloid.data.ledger import TokenLedger
from colloid.data.sample import Sample
from colloid.data.turns import TurnRenderer
from tests.templates import FAMILIES, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def tool(text, number=0):
    return {"role": "tool", "content": text, "tool_call_id": f"functions.add:{number}"}


CALL = "calls add"
"""A turn that ends with a call of a tool; its text as the model writes it is the message's content."""

SCRIPTS = {
    "two questions": (None, [[SYSTEM, user("What is 7 + 8?")], "It is 15.", [user("And 1 + 1? 🎈")], "Two 🎈.\nYes."]),
    "no system": (None, [[user(" 1 + 1?\n")], "  2", [user("Sure?")], "Yes", [user("Really?")], "Yes!"]),
    "a tool": (
        TOOLS,
        [[SYSTEM, user("7 + 8?")], CALL, [tool("15")], "15.", [user("And 2 + 2?")], CALL, [tool("4")], "4."],
    ),
    "two tool messages in a row": (
        TOOLS,
        [[user("7 + 8?")], CALL, [tool("15"), tool("fifteen", 1)], CALL, [tool("15")], "15.", [user("Thanks")], "Bye"],
    ),
    "thoughts": (
        None,
        [[user("1 + 1?")], "<think>\nEasy.\n</think>\n\n2", [user("2 + 2?")], "<think>\nToo.\n</think>\n\n4"],
    ),
    "thoughts and tools": (
        TOOLS,
        [[user("1 + 1?")], "<think>\nI ask.\n</think>\n\ncalls add", [tool("2")], "<think>\nGood.\n</think>\n\n2"],
    ),
}
REWRITTEN = {
    # The next question drops the thoughts before it.
    ("qwen3", "thoughts"),
    ("glm4.5", "thoughts"),
    ("deepseek-v3", "thoughts"),
    ("deepseek-v3", "thoughts and tools"),
    ("deepseek-v3.1", "thoughts"),
    ("deepseek-v3.1", "thoughts and tools"),
    # Generation begins with <think>, and no earlier turn is shown with it.
    *(("deepseek-r1", script) for script in SCRIPTS),
    # Leading white space of a turn is trimmed.
    ("llama3", "no system"),
    ("glm4.5", "no system"),
}
"""Family and script where the whole rendering is not what was sampled."""


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), name)
        return made[name]

    return get


def sampled_text(family, text):
    """What the model writes for a message, behind the generation prompt."""
    if family.thinks and text.startswith("<think>\n"):
        return text.removeprefix("<think>\n")
    if family.opening and text.startswith("<think>\n"):  # GLM-4.5 writes thoughts without line ends around them.
        thought, _, said = text.removeprefix("<think>\n").partition("\n</think>\n\n")
        return f"\n<think>{thought}</think>\n{said}"
    return family.opening + text


def play(make, name, script, keep_end=True):
    """The ledger after a script; of each request its ids, those of the whole rendering, and the texts sampled."""
    family, tokenizer = FAMILIES[name], make(name)
    renderer = TurnRenderer(
        tokenizer, end_ids=tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])[: 2 * bool(family.call_end)]
    )
    ledger, messages, said, requests = TokenLedger(renderer), [], [], []
    tools, steps = SCRIPTS[script]
    for place, step in enumerate(steps):
        if isinstance(step, list):
            messages += step
            continue
        request = ledger.request(messages, tools)
        whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        requests.append((request, tokenizer(whole, add_special_tokens=False)["input_ids"]))
        following = steps[place + 1][0]["role"] if place + 1 < len(steps) else "user"
        end = (family.call_end or family.end) if following == "tool" else family.end
        text = sampled_text(family, step)
        said.append(text + (end if keep_end else ""))
        ids = renderer.text_ids(said[-1])
        assert renderer.text(ids) == text
        message = {"role": "assistant", "content": text}
        ledger.record(request, ids, [-1.0] * len(ids), 1, message)
        messages = [*messages, message]
    return ledger, requests, said


@pytest.mark.parametrize("script", list(SCRIPTS))
@pytest.mark.parametrize("name", list(FAMILIES))
def test_ids_turn_by_turn_are_those_of_the_whole_rendering_or_the_difference_is_said(make, name, script):
    ledger, requests, _ = play(make, name, script)
    assert ledger.num_branches == 1
    for request, whole in requests:
        assert request.rewritten == (request.ids != whole), (
            make(name).decode(request.ids) + "\n---\n" + make(name).decode(whole)
        )
    assert any(request.rewritten for request, _ in requests) == ((name, script) in REWRITTEN)


@pytest.mark.parametrize("script", list(SCRIPTS))
@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("keep_end", [True, False])
def test_masks_decode_to_exactly_what_was_sampled(make, name, script, keep_end):
    ledger, requests, said = play(make, name, script, keep_end)
    tokenizer = make(name)
    (sample,) = ledger.samples(Sample(index=0))
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    runs, before = [], 0
    for token, trained in zip(response, sample.loss_mask, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    assert [tokenizer.decode(run) for run in runs] == said
    # A turn that was cut off is closed by the template, and one that ended is not closed twice.
    shown = tokenizer.decode(response)
    assert FAMILIES[name].end * 2 not in shown
    if not keep_end and not FAMILIES[name].call_end and len(said) > 1:
        assert said[0] + FAMILIES[name].end in shown


def test_a_turn_that_ended_with_another_end_token_is_not_closed_twice(make):
    tokenizer = make("llama3")
    renderer = TurnRenderer(tokenizer)
    messages = [user("1 + 1?"), {"role": "assistant", "content": "x"}, tool("2")]
    (other,) = tokenizer.convert_tokens_to_ids(["<|eom_id|>"])
    assert not renderer.appended(messages, 1, other).text.startswith("<|eot_id|>")
    assert renderer.appended(messages, 1, 40).text.startswith("<|eot_id|>")


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3", "glm4.5", "deepseek-v3", "deepseek-v3.1", "kimi-k2"])
def test_calls_of_tools_are_shown_whether_their_arguments_are_text_or_an_object(make, name):
    renderer = TurnRenderer(make(name))
    texts = []
    for arguments in ('{"a": 1}', {"a": 1}):
        call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        texts.append(renderer.prompt([user("?"), message, tool("1")], TOOLS)[1])
    assert texts[0] == texts[1] and "add" in texts[0]
