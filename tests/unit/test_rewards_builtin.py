"""The built-in graders, each by a table of cases; and the reward server."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from colloid import Sample
from colloid.rewards import deepscaler, ifbench
from colloid.rewards.dapo import dapo_reward
from colloid.rewards.extract import last_boxed
from colloid.rewards.f1 import f1_reward
from colloid.rewards.gpqa import gpqa_reward
from colloid.rewards.pool import GradingFailed
from colloid.rewards.registry import REWARDS, GradeInput, get_reward, graded_part
from colloid.rewards.remote import RemoteReward
from colloid.rollout.grading import Grader
from tests.serving import serving


@pytest.mark.parametrize(
    ("response", "label", "right", "prediction"),
    [
        ("so\nAnswer: 34", "34", True, "34"),
        ("Answer: 34", 34, True, "34"),
        ("answer : \\boxed{34}", "34", True, "34"),
        ("Answer: $x=34$", "034", True, "34"),
        ("Answer: 1,234 dollars<|im_end|>", "1234", True, "1234"),
        ("Answer: 1\nAnswer: -3", "-3.0", True, "-3"),
        ("Answer: \\frac12", "\\frac{1}{2}", True, "\\frac{1}{2}"),
        ("Answer: 33", "34", False, "33"),
        ("34", "34", False, "[INVALID]"),
        ("", "34", False, "[INVALID]"),
        ("Answer: 34" + " " * 400, "34", False, "[INVALID]"),
    ],
)
def test_dapo_compares_what_follows_answer(response, label, right, prediction):
    assert dapo_reward(response, label) == {"score": 1.0 if right else -1.0, "acc": right, "pred": prediction}


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("x</think>\\boxed{42}", "42", True),
        ("x</think>\\boxed{42.0}", 42, True),
        ("###Response \\boxed{50\\%}", "50", True),
        ("\\boxed{42}", "42", False),
        ("\\boxed{42}</think>42", "42", False),
        ("</think>\\boxed{1} \\boxed{2}", "2", True),
        ("</think>\\boxed{11}", "\\boxed{11}", True),
        ("</think>\\boxed{\\frac12}", "0.5", True),
        ("</think>\\boxed{2/4}", "\\frac{1}{2}", False),
        ("</think>\\boxed{\\sqrt{8}}", "2\\sqrt{2}", True),
        ("</think>\\boxed{x^2+2x+1}", "(x+1)^2", True),
        ("</think>\\boxed{2^{10}}", "1024", False),
        ("</think>\\boxed{6\\pi}", "\\pi\\cdot 6", True),
        ("</think>\\boxed{(1,\\frac{1}{4})}", "(1,0.25)", True),
        ("</think>\\boxed{[1,2)}", "(1,2)", False),
        ("</think>\\boxed{7 3/4}", "31/4", True),
        ("</think>\\boxed{5\\text{ cm}}", "5", True),
        ("</think>\\boxed{1,000}", "1000", True),
        ("</think>\\boxed{\\text{east}}", "East", True),
        ("</think>\\boxed{}", "5", False),
        ("</think>\\boxed{5", "5", False),
        ("</think>\\boxed{5}", "", False),
        ("</think>\\boxed{__import__('os').getpid()}", "5", False),
        ("</think>\\boxed{9^{9^{9^9}}}", "x", False),
    ],
)
def test_deepscaler_compares_what_is_boxed_after_the_thinking(response, label, right):
    assert deepscaler.verify(response, label, {}) == float(right)
    assert deepscaler.quick_verdict(response, label) in (None, float(right))


CHOICES = {"choices": ["Nucleus", "Mitochondria"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "right"),
    [
        ("The answer is B.", "B", {}, True),
        ("The answer is B.", "A", {}, False),
        ("<think>answer is A</think> (B) is correct", "B", {}, True),
        ("**Answer: C**", "c", {}, True),
        ("\\boxed{\\text{D}}", "D", {}, True),
        ("the answer is a matter of B", "B", {}, True),
        ("first option A, but the final answer is B", "B", {}, True),
        ("It is the mitochondria.", "B", CHOICES, True),
        ("option B", "Mitochondria", CHOICES, True),
        ("B", 1, CHOICES, True),
        ("I pick C", "C", CHOICES, False),
        ("B", None, {"correct_letter": "B"}, True),
        ("", "A", {}, False),
    ],
)
def test_gpqa_finds_the_chosen_letter(response, label, metadata, right):
    assert gpqa_reward(response, label, metadata) == float(right)


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat", "cat sat", 2 / 3),
        ("cat cat dog", "cat", 0.5),
        ("yes", "yes it is", 0.0),
        ("<think>no</think> Yes!", "yes", 1.0),
        ("", "cat", 0.0),
        ("Paris", ["London", "Paris"], 1.0),
    ],
)
def test_f1_counts_tokens(response, label, value):
    assert f1_reward(response, label) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{1} \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\fbox{3}", "3"),
        ("$\\boxed 7$", "7"),
        ("none", None),
        ("\\boxed{1", None),
    ],
)
def test_the_last_box(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("name", "right", "label"),
    [("math", "\\frac{1}{2}", "0.5"), ("dapo", "34", "34"), ("deepscaler", "34", "34"), ("gpqa", "B", "B")]
    + [("f1", "a cat", "cat")],
)
def test_boxed_grades_the_box_alone(name, right, label):
    entry = get_reward(f"boxed_{name}")

    def reward(response):
        given = graded_part(f"boxed_{name}", GradeInput(response, label))
        value = entry.quick(given)
        if value is None:
            module, _, function = entry.slow.partition(":")
            value = getattr(__import__(module, fromlist=["x"]), function)(given.response, label, {})
        return value["score"] if isinstance(value, dict) else value

    assert reward(f"Let me see, dog 99, A \\boxed{{{right}}} is it") == 1.0
    assert reward(right) < 1.0 or name == "none"
    assert set(REWARDS) == {"math", "dapo", "deepscaler", "gpqa", "f1", "ifbench", "remote_rm", "random"}


FOLLOWED = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat and a dog.", "A cat."),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a b", "a a"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "a catalog", "a cat"),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "zZ", "z"),
    ("language:response_language", {"language": "de"}, "Das ist ein sehr schönes Haus am See.", "This is a house."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        "Dr. May goes.",
        "One. Two.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "hello"},
        "a\n\nHello there",
        "hello\n\nb",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "x\nP.P.S. bye", "x\nP.S. bye"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a\n* b\n- c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a*"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1 SECTION 2",
        "S",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "a: 1"),
    ("detectable_format:title", {}, "<<Joy>>", "Joy"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why?"}, "why? Because", "Because"),
    ("startend:end_checker", {"end_phrase": "That is all."}, "So. That is all.", "That is all. No."),
    ("startend:quotation", {}, '"a"', '"a'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "AB CD e", "AB c"),
    ("change_case:english_capital", {}, "THIS IS ALL IN CAPITALS.", "This is not."),
    ("change_case:english_lowercase", {}, "this is all in small letters.", "This is not."),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b", "a"),
    ("count:unique_word_count", {"N": 2}, "a b a", "a a"),
    ("count:conjunctions", {"small_n": 2}, "a and b, but c", "a and b and c"),
    ("count:person_names", {"N": 2}, "Emma met Leo", "Emma met Emma"),
    ("count:numbers", {"N": 2}, "1,000 and 2.5", "1 2 3"),
    ("count:punctuation", {}, "a, b; c: d. e! f? g?!", "a, b; c: d. e! f?"),
    ("count:pronouns", {"N": 2}, "She saw him.", "She saw."),
    ("count:words_japanese", {"N": 2}, "a 猫 b 犬", "a 猫 b c"),
    (
        "count:keywords_multiple",
        {f"keyword{number}": name for number, name in enumerate("vwxyz", 1)},
        "v w w x x x y y y y y z z z z z z z",
        "v w x y z",
    ),
    ("ratio:stop_words", {"percentage": 50}, "the cat", "the cat is on the mat"),
    ("ratio:sentence_type", {}, "Go. Do. So?", "Go. Do?"),
    ("ratio:sentence_balance", {}, "Go. Go? Go!", "Go. Go?"),
    ("ratio:overlap", {"reference_text": "abcdef", "percentage": 100}, "abcde", "xyzxy"),
    ("ratio:sentence_words", {}, "Go on. Be it. So do.", "Go on. Be it. Go do."),
    ("words:alphabet", {}, "yes zebras are big", "a c"),
    ("words:vowel", {}, "banana pit hot", "a e i o"),
    ("words:consonants", {}, "blend strong", "blend a"),
    ("words:palindrome", {}, "level radar civic refer rotor kayak madam tenet solos stats", "level radar"),
    ("words:prime_lengths", {}, "is the seven", "a four"),
    ("words:repeats", {"small_n": 1}, "a b", "a b a"),
    ("words:odd_even_syllables", {}, "cat water cat", "cat dog"),
    ("words:last_first", {}, "I see you. You see me.", "I see you. He sees me."),
    ("words:paragraph_last_first", {}, "go and go\nup is up.", "go and stay"),
    ("words:no_consecutive", {}, "a big cat", "big bad"),
    ("words:keywords_specific_position", {"keyword": "fox", "n": 2, "m": 2}, "Yes. The fox.", "The fox. Yes."),
    ("words:words_position", {"keyword": "so"}, "and so it is so good", "so and"),
    ("sentence:keyword", {"word": "fox", "N": 2}, "Yes. A Fox.", "A fox. Yes."),
    ("sentence:alliteration_increment", {}, "One two. Big bad four. Six silly sad sacks.", "Big bad. One two."),
    ("sentence:increment", {"small_n": 1}, "Go. Go on. Go on now.", "Go. Go on now."),
    ("format:parentheses", {}, "(a [b {c (d [e])}])", "((((a))))"),
    ("format:quotes", {}, '"a \'b "c" d\' e"', '"a"'),
    ("format:options", {"options": "yes/no/maybe"}, "Yes.", "Yes, it is"),
    ("format:newline", {}, "a\nb", "a b"),
    ("format:emoji", {}, "Hi there 😀. Bye ❤️.", "Hi. Bye 😀."),
    ("format:line_indent", {}, "a\n b\n  c", "a\nb"),
    ("format:quote_unquote", {}, '"a" means b.', '"a"'),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", "- a"),
    ("format:thesis", {}, "<i>This.</i> More.", "This."),
    ("format:sub-bullets", {}, "* a\n  - b\n* c\n  - d", "* a\n  - b\n* c"),
    ("format:no_bullets_bullets", {}, "One. Two.\n* a\n* b", "One.\n* a\n* b"),
    ("format:title_case", {}, "All Is Well", "All is Well"),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a"),
    ("format:no_whitespace", {}, "ab", "a b"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Tell me why"}, "Say me why", "Tell me why"),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "No."),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 3}, "b c", "a b"),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14"),
    (
        "custom:mcq_count_length",
        {},
        "\n".join(
            f"Question {n}: {'Who' * n}?\n" + "\n".join(f"{letter}) x" for letter in "ABCDE") for n in range(1, 5)
        ),
        "Question 1: Who?",
    ),
    ("custom:reverse_newline", {}, None, "Zambia\nZimbabwe"),
    ("custom:word_reverse", {}, "Eagle bald the is it.", "The bald eagle."),
    ("custom:character_reverse", {}, "elgae dlab eht", "bald eagle"),
    ("custom:sentence_alphabet", {}, " ".join(f"{chr(97 + n)}x goes." for n in range(26)), "A goes. C goes."),
    ("custom:european_capitals_sort", {}, None, "Paris, Oslo"),
    ("custom:csv_city", {}, "ID,Country,City,Year,Count\n" + "1,a,b,2,3\n" * 7, "a,b"),
    (
        "custom:csv_special_character",
        {},
        'ProductID,Category,Brand,Price,Stock\n1,a,"b&c",2,3\n' + "1,a,b,2,3\n" * 13,
        "ProductID,Category,Brand,Price,Stock\n" + "1,a,b,2,3\n" * 14,
    ),
    (
        "custom:csv_quotes",
        {},
        "\n".join(['"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"'] + ["\t".join(['"x"'] * 5)] * 3),
        "StudentID\tSubject",
    ),
    ("custom:date_format_list", {}, "1796-04-12, 1815-06-18", "1815-6-18"),
]


def test_each_instruction_is_followed_or_not():
    assert {row[0] for row in FOLLOWED} == set(ifbench.INSTRUCTIONS)
    for name, given, good, bad in FOLLOWED:
        row = {"instruction_id_list": [name], "kwargs": [{**given, "unused": None}]}
        if good is not None:
            assert ifbench.grade(good, None, row) == 1.0, (name, good)
        assert ifbench.grade(bad, None, row) == 0.0, (name, bad)


def test_all_instructions_of_a_row_must_be_followed():
    row = {"instruction_id_list": ["punctuation:no_comma", "count:numbers"], "kwargs": [{}, {"N": 1}]}
    assert [ifbench.grade(text, None, row) for text in ("a 1", "a, 1", "a", "")] == [1.0, 0.0, 0.0, 0.0]
    assert ifbench.grade("a 1", '{"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 1.0}]}', {}) == 1.0


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "instruction_id_list"),
        ({"instruction_id_list": ["count:stars"]}, "unknown instruction 'count:stars'"),
        ({"instruction_id_list": ["words:start_verb"]}, "part-of-speech"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": [{}]}, "'N'"),
        ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 1}, {}]}, "1 instructions"),
    ],
)
def test_a_row_that_cannot_be_checked_says_why(row, words):
    assert words in ifbench.row_problem(None, row)


def finished(response, label="4", **fields):
    return Sample(index=0, response=response, label=label, status=Sample.Status.COMPLETED, **fields)


@pytest.mark.timeout(60)
def test_samples_are_graded_by_the_reward_that_they_name():
    rows = {
        "dapo": ("Answer: 4", {"score": 1.0, "acc": True, "pred": "4"}),
        "boxed_dapo": ("4", {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
        "deepscaler": ("</think>\\boxed{\\sqrt{16}}", 0.0),
        "gpqa": ("D", 0.0),
        "f1": ("4", 1.0),
        "ifbench": ("4", 1.0),
    }
    extra = {"instruction_id_list": ["punctuation:no_comma"]}
    samples = [finished(response, metadata={"rm_type": name, **extra}) for name, (response, _) in rows.items()]

    async def body():
        grader = Grader(rm_type="math", workers=1)
        await asyncio.gather(*(grader.grade(sample) for sample in samples))
        await grader.close()

    asyncio.run(body())
    assert [sample.reward for sample in samples] == [reward for _, reward in rows.values()]
    assert samples[0].get_reward_value() == 1.0 and samples[0].get_reward_value("acc") == 1.0


@pytest.mark.timeout(60)
def test_the_reward_server_is_asked_again_where_that_helps_and_its_errors_are_named(monkeypatch):
    monkeypatch.setattr("colloid.rewards.remote.FIRST_PAUSE", 0.01)
    asked = []

    async def judge(request):
        body = await request.json()
        asked.append(body["response"])
        kind = body["response"]
        if kind == "busy" and asked.count("busy") < 3:
            return web.Response(status=503, text="loading")
        if kind == "sleep":
            await asyncio.sleep(100)
        if kind == "bad":
            return web.Response(status=422, text="no such field")
        if kind == "html":
            return web.Response(text="<html>")
        return web.json_response({"score": 0.5} if kind == "dict" else None if kind == "none" else body["label"])

    async def body():
        app = web.Application()
        app.router.add_post("/judge", judge)
        async with serving(app) as address:
            url = f"{address}/judge"
            grader = Grader(rm_type="remote_rm", rm_url=url)
            grader._remote = RemoteReward(url, deadline=1.0, attempt_timeout=0.3)
            kinds = ["good", "busy", "dict", "sleep", "bad", "html", "none"]
            samples = [finished(kind, label=0.25) for kind in kinds]
            await asyncio.gather(*(grader.grade(sample) for sample in samples))
            with pytest.raises(GradingFailed, match="127.0.0.1:9"):
                await RemoteReward("http://127.0.0.1:9", deadline=0.2).reward("q", "r", None, {})
            await grader.close()
        return samples

    samples = asyncio.run(body())
    assert [sample.reward for sample in samples] == [0.25, 0.25, {"score": 0.5}, None, None, None, None]
    errors = [sample.metadata.get("error", "") for sample in samples]
    for error, words in zip(errors[3:], ["1 s", "status 422: no such field", "JSON", "None"], strict=True):
        assert words in error
    assert asked.count("busy") == 3 and asked.count("bad") == 1
