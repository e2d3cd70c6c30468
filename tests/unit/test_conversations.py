"""What of a conversation is trained: exactly the assistant's text, for every kind of chat template."""

import pytest

from colloid.data.conversations import conversation
from colloid.errors import DataError
from tests.tiny import CHAT_TEMPLATE, make_tiny_tokenizer

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- set reasoning = m.reasoning_content or '' %}"
    "{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- content.lstrip('\n') }}"
    "{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>' + call.name + '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content"
    " + '\n</tool_response><|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
TEMPLATES = {
    "chatml": (CHAT_TEMPLATE, "<|im_end|>", []),
    "llama3": (LLAMA3, "<|eot_id|>", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "qwen3": (QWEN3, "<|im_end|>", []),
    "glm": (GLM, "<|endoftext|>", ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"]),
    "deepseek": (DEEPSEEK_R1, "<｜end▁of▁sentence｜>", ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]),
    "plain": (PLAIN, "<|endoftext|>", []),
}
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            template, end, special = TEMPLATES[name]
            tokenizer = make_tiny_tokenizer(tmp_path_factory.mktemp(name))
            tokenizer.add_special_tokens({"additional_special_tokens": [*special, end]})
            tokenizer.add_special_tokens({"eos_token": end, "bos_token": special[0] if special else end})
            tokenizer.chat_template = template
            made[name] = tokenizer
        return made[name]

    return get


def turns_of(tokenizer, found):
    """The text of each run of trained tokens."""
    runs, before = [], 0
    for token, trained in zip(found.token_ids, found.loss_mask, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def trained_text(make, name, messages, **options):
    tokenizer = make(name)
    if name == "glm":
        names = ["<|user|>", "<|observation|>"]
        options["end_ids"] = tokenizer.convert_tokens_to_ids(names)
    return turns_of(tokenizer, conversation(messages, tokenizer, **options))


CHAT = [SYSTEM, user("What is 7 + 8?"), says("It is 15."), user("And 1 + 1? 🎈"), says("Two 🎈, of course.\nYes.")]


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("chatml", "{}<|im_end|>", "{}<|im_end|>"),
        ("llama3", "{}<|eot_id|>", "{}<|eot_id|>"),
        ("qwen3", "{}<|im_end|>", "<think>\n\n</think>\n\n{}<|im_end|>"),
        ("glm", "\n{}<|user|>", "\n{}<|endoftext|>"),
        ("deepseek", "{}<｜end▁of▁sentence｜>", "{}<｜end▁of▁sentence｜>"),
        ("plain", " {}", " {}<|endoftext|>"),
    ],
)
def test_exactly_what_the_assistant_says_is_trained_with_the_token_that_ends_it(make, name, first, last):
    expected = [first.format("It is 15."), last.format("Two 🎈, of course.\nYes.")]
    if name == "glm":
        expected = [text.lstrip("\n") for text in expected]
    assert trained_text(make, name, CHAT) == expected


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_turn_can_be_turned_off(make, name):
    on = trained_text(make, name, CHAT)
    off = [*CHAT[:2], says("It is 15.", step_loss_mask=0), *CHAT[3:]]
    assert trained_text(make, name, off) == on[1:]
    off = [*CHAT[:4], says("Two 🎈, of course.\nYes.", step_loss_mask=0)]
    assert trained_text(make, name, off) == on[:1]
    off = [*CHAT[:2], says("It is 15.", step_loss_mask=0), CHAT[3], says("No.", step_loss_mask=0)]
    with pytest.raises(DataError, match="no message of the assistant's is to be trained"):
        trained_text(make, name, off)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_the_tokens_are_those_of_the_whole_rendering(make, name):
    tokenizer = make(name)
    found = conversation(CHAT, tokenizer)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    shown = tokenizer.decode(found.token_ids, skip_special_tokens=False)
    assert text.startswith(shown.removesuffix("<|endoftext|>"))
    assert found.loss_mask[-1] == 1 and found.prompt_length == found.loss_mask.index(1) > 0
    # As in generation: the prompt's tokens are those that the engine gets.
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=name != "deepseek")
    if name != "deepseek":
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert found.token_ids[: found.prompt_length] == ids


def test_thoughts_are_trained_in_the_turn_that_shows_them(make):
    thought = "<think>\nEasy.\n</think>\n\n"
    messages = [user("1 + 1?"), says(thought + "2"), user("2 + 2?"), says(thought + "4")]
    tokenizer = make("qwen3")
    found = conversation(messages, tokenizer)
    assert found.rewritten
    assert turns_of(tokenizer, found) == ["2<|im_end|>", thought + "4<|im_end|>"]
    found = conversation(messages[:2], tokenizer)
    assert not found.rewritten and turns_of(tokenizer, found) == [thought + "2<|im_end|>"]
    apart = [user("1 + 1?"), says("2", reasoning_content="Easy.")]
    assert trained_text(make, "qwen3", apart) == [thought + "2<|im_end|>"]
    assert trained_text(make, "qwen3", [user("1 + 1?"), says("2")], enable_thinking=False) == ["2<|im_end|>"]
    assert conversation(messages[:2], make("deepseek")).rewritten, (
        "generation begins with <think>, and the text does not"
    )
    assert trained_text(make, "deepseek", messages) == ["\n\n2<｜end▁of▁sentence｜>", "\n\n4<｜end▁of▁sentence｜>"]


def test_calls_of_tools_are_trained_and_their_answers_are_not(make):
    call = says("I look.", tool_calls=[{"name": "search"}])
    answer = {"role": "tool", "content": "found it"}
    messages = [user("Where?"), call, answer, answer, says("There.")]
    thinks = "<think>\n\n</think>\n\n"
    assert trained_text(make, "qwen3", messages) == [
        "I look.\n<tool_call>search</tool_call><|im_end|>",
        thinks + "There.<|im_end|>",
    ]


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("text", ["  spaces around  ", "\n\nlines", "ends in a line\n", "user assistant", "x"])
def test_white_space_and_look_alikes_change_nothing_else(make, name, text):
    messages = [user(text), says(text), user(text), says("ok")]
    runs = trained_text(make, name, messages)
    assert len(runs) == 2 and text.strip() in runs[0] and "ok" in runs[1]
    assert "user\n" not in runs[0].replace(text, "") and "<|im_start|>" not in "".join(runs)


def test_a_template_that_hides_the_text_is_an_error(make):
    tokenizer = make("chatml")
    hides = "{% for m in messages %}{{ m.role }}{{ m.content | upper }}{{ messages | length }}{% endfor %}"
    with pytest.raises(DataError, match="message 1 in a way in which the assistant's text cannot be found"):
        conversation(CHAT[1:], tokenizer, chat_template=hides)
    with pytest.raises(DataError, match="step_loss_mask must be 0 or 1"):
        conversation([user("a"), says("b", step_loss_mask=2)], tokenizer)
