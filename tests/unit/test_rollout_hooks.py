"""Users' sources and hooks around a rollout: what each is given, what it may change, and how its mistakes are named."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from colloid import RolloutDataSource, RolloutDataSourceWithBuffer, Sample
from colloid.config import parse, resolve_num_rollout
from colloid.errors import ConfigError, DataError, HookError
from colloid.rollout.group_hooks import call_group_hooks
from colloid.rollout.manager import RolloutManager
from colloid.rollout.source_calls import check_groups, keeps_samples
from tests.fake_engine import FakeEngine, seeded

STATUS = Sample.Status


@pytest.fixture
def run_args(tiny_model_dir, tmp_path):
    """`run_args(*flags)` -> the options of a small run with its data."""

    def make(*flags, data=True, batch="3", samples="2", rollouts="2"):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"What is {i}?", "label": str(i)}) + "\n" for i in range(10)))
        base = [
            *("--hf-checkpoint", str(tiny_model_dir()), "--rollout-batch-size", batch),
            *("--n-samples-per-prompt", samples, "--rollout-max-response-len", "6"),
            *(("--num-rollout", rollouts) if rollouts else ()),
            *("--outputs-dir", str(tmp_path / "outputs")),
            *(("--prompt-data", str(path)) if data else ()),
        ]
        return parse([*base, *map(str, flags)], "train")

    return make


def with_manager(args, body, engine=None):
    engine = engine or FakeEngine(lambda payload: [40 + seeded(payload, 5), 50])

    async def run():
        async with engine.serve():
            manager = RolloutManager(args)
            await manager.start(engine.url, [engine.url], "key")
            try:
                return await body(manager)
            finally:
                await manager.close()

    return asyncio.run(run())


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


SOURCES = {
    "dataset of its own": """
import random
from colloid import RolloutDataSource, Sample

class Rows:
    def sample(self, n):
        return [Sample(prompt=f"What is {random.randrange(9)}?", label="1") for _ in range(n)]

class MySource(RolloutDataSource):
    def __init__(self):
        self.dataset = Rows()

    def get_samples(self, num_samples):
        return self.dataset.sample(num_samples)
""",
    "groups": """
from colloid import RolloutDataSource, Sample

class MySource(RolloutDataSource):
    def get_samples(self, num_samples):
        rows = [self.dataset.rows[i] for i in range(num_samples)]
        return [[Sample(prompt=row.prompt, label=row.label) for _ in range(2)] for row in rows]
""",
    "the run's data set": """
from colloid import RolloutDataSource

class MySource(RolloutDataSource):
    def get_samples(self, num_samples):
        return self.dataset.sample(num_samples)
""",
    "a buffer filter": """
from colloid import RolloutDataSourceWithBuffer

class MySource(RolloutDataSourceWithBuffer):
    def buffer_filter(self, args, buffer, num_samples):
        return sorted(buffer, key=lambda group: -group[0].index)[:num_samples]
""",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_data_source_of_ones_own(run_args, tmp_path, name):
    path = write(tmp_path, "my_source.py", SOURCES[name])
    args = run_args("--data-source-path", path, "--over-sampling-batch-size", "5")

    async def body(manager):
        results = [await manager.generate(rollout_id, 3) for rollout_id in range(2)]
        manager.save(tmp_path, 1)
        manager.load(tmp_path, 1)
        return results

    ids = []
    for result in with_manager(args, body):
        columns = result.batches[0].samples
        assert columns.num_samples == 6 and len(set(columns.group_ids.tolist())) == 3
        ids += columns.sample_ids.tolist()
        lost, kept = result.metrics["rollout/num_discarded_groups"], result.metrics["rollout/num_carried_groups"]
        assert (lost == 0) == (name == "a buffer filter") and lost + kept > 0
    assert len(set(ids)) == 12


class Plain:
    def get_samples(self, number):
        return []


class Empty(RolloutDataSource):
    def add_samples(self, groups):
        """Nothing is kept."""
        raise NotImplementedError


class Keeping(RolloutDataSource):
    def add_samples(self, groups):
        self.kept = groups


class Undone(RolloutDataSourceWithBuffer):
    def add_samples(self, groups):
        pass


class Saying(RolloutDataSourceWithBuffer):
    keeps_samples = False


@pytest.mark.parametrize(
    ("kind", "keeps"),
    [
        *((RolloutDataSource, False), (RolloutDataSourceWithBuffer, True), (Plain, False), (Empty, False)),
        *((Keeping, True), (Undone, False), (Saying, False)),
    ],
)
def test_whether_a_source_keeps_what_it_is_given(kind, keeps):
    assert keeps_samples(kind.__new__(kind)) is keeps


def test_what_needs_a_buffer_is_refused_without_one_before_anything_starts(run_args, tmp_path):
    source = ("--data-source-path", "colloid.RolloutDataSource")
    with pytest.raises(ConfigError, match="--partial-rollout: the data source RolloutDataSource keeps no samples"):
        RolloutManager(run_args(*source, "--partial-rollout"))
    chooses = write(tmp_path, "f.py", "def buffer_filter(args, rollout_id, buffer, num_samples):\n    return []\n")
    with pytest.raises(ConfigError, match="no RolloutDataSourceWithBuffer, and so has no buffer to filter"):
        RolloutManager(run_args(*source, "--buffer-filter-path", chooses))


def test_a_class_that_could_not_be_saved_is_refused_before_anything_starts(run_args, tmp_path):
    path = write(tmp_path, "plain.py", "class Plain:\n    def get_samples(self, number):\n        return []\n")
    with pytest.raises(ConfigError, match="the class Plain lacks save, load, __len__"):
        RolloutManager(run_args("--data-source-path", path))


def test_a_source_that_raises_is_named(run_args, tmp_path):
    path = write(
        tmp_path,
        "broken.py",
        "from colloid import RolloutDataSource\n\n\nclass Broken(RolloutDataSource):\n"
        "    def get_samples(self, number):\n        return 1 / 0\n",
    )
    with pytest.raises(HookError, match=r"--data-source-path .*broken.py: Broken.get_samples raised ZeroDivisionError"):
        with_manager(run_args("--data-source-path", path), lambda manager: manager.generate(0, 3))


HOOKS = """
import json

seen = []

def sample_filter(args, data):
    for group in data:
        group[0].remove_sample = True

def process_all_samples(args, all_samples, data_source):
    indices = [[sample.index for sample in group] for group in all_samples]
    print("ALL", json.dumps([indices, type(data_source).__name__]))
    args.seen = indices

async def later(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["hooks"] = [rollout_id, evaluation]

def sample_hook(args, sample):
    sample.metadata["hooks"].append("second")
    sample.reward = 10.0 + sample.index
    return sample

def dynamic_filter(args, samples):
    return samples[0].index % 4 == 0
"""


def test_hooks_see_every_sample_once_and_what_they_change_is_trained(run_args, tmp_path):
    path = write(tmp_path, "hooks.py", HOOKS)
    held_out = write(tmp_path, "e.jsonl", json.dumps({"prompt": "a", "label": "1"}))
    args = run_args(
        *("--rollout-sample-hook-path", f"{path}:later", "--rollout-sample-hook-path", f"{path}:sample_hook"),
        *("--rollout-sample-filter-path", f"{path}:sample_filter"),
        *("--rollout-all-samples-process-path", f"{path}:process_all_samples"),
        *("--dynamic-sampling-filter-path", f"{path}:dynamic_filter"),
        *("--eval-prompt-data", "one", held_out),
    )

    async def body(manager):
        return await manager.generate(0, 3), await manager.evaluate(0)

    result, evaluation = with_manager(args, body)
    columns = result.batches[0].samples
    assert columns.raw_rewards.tolist() == [10.0 + index for index in columns.sample_ids]
    assert result.metrics["rollout/num_removed_samples"] == 3.0
    assert (columns.loss_weights == 0).tolist() == (columns.sample_ids % 2 == 0).tolist()
    assert result.metrics["rollout/dynamic_filter/drop_filtered"] == result.metrics["rollout/num_filtered_groups"] > 0
    decided = [index for group in args.seen for index in group]
    assert set(columns.sample_ids.tolist()) < set(decided) and len(set(decided)) == len(decided)
    assert len(decided) == 6 + 2 * result.metrics["rollout/num_filtered_groups"]
    assert evaluation["eval/one"] == 10.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def sample_hook(args, sample):\n    return sample.label + 1", "bad.py.*TypeError"),
        ("def sample_hook(args, sample):\n    return 3", "must return a Sample or None, and returned 3"),
    ],
)
def test_a_sample_hook_that_fails_costs_its_samples_and_is_named(run_args, tmp_path, text, message):
    path = write(tmp_path, "bad.py", text)
    with pytest.raises(HookError, match=f"all 6 samples of rollout 0 FAILED.*sample hook .*({message})"):
        with_manager(run_args("--rollout-sample-hook-path", path), lambda manager: manager.generate(0, 3))


def test_a_sample_filter_that_takes_samples_away_is_an_error(tmp_path):
    path = write(tmp_path, "f.py", "def sample_filter(args, data):\n    del data[0][0]\n")
    args = SimpleNamespace(rollout_sample_filter_path=path, rollout_all_samples_process_path=None)
    with pytest.raises(HookError, match="changed the lists.*remove_sample = True"):
        call_group_hooks(args, [[Sample(index=0), Sample(index=1)]], [], None)


ROLLOUT = """
from colloid import Sample

def generate_rollout(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        assert sample.prompt == "" and sample.tokens == []
        sample.prompt, sample.tokens = "x", [5]
        sample.append_response_tokens([1, 2], log_probs=[-1.0, -2.0], weight_version=3)
        sample.reward = float(sample.index)
    return groups
"""


def test_a_rollout_function_with_prompts_of_its_own_returns_a_bare_list(run_args, tmp_path):
    path = write(tmp_path, "own.py", ROLLOUT)
    args = run_args("--rollout-function-path", path, "--disable-rollout-global-dataset", data=False)
    result = with_manager(args, lambda manager: manager.generate(0, 3))
    assert sorted(result.batches[0].samples.raw_rewards.tolist()) == list(range(6))


@pytest.mark.parametrize("groups", [[], [Sample()], [[]], [["x"]], None])
def test_a_rollout_function_that_returns_no_groups_is_named(groups):
    with pytest.raises(HookError, match="own.py must return groups, a list of lists of Samples"):
        check_groups(groups, "--rollout-function-path own.py")


def test_an_aborted_sample_is_not_trained():
    with pytest.raises(HookError, match="returned sample 4, which was aborted.*data_source.add_samples"):
        check_groups([[Sample(index=4, status=STATUS.ABORTED)]], "f")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--mask-offpolicy-in-partial-rollout",), "only with --partial-rollout"),
        (("--disable-rollout-global-dataset",), "without prompts.*--rollout-function-path"),
        (("--start-rollout-id", "2"), "--start-rollout-id 2 leaves nothing to do: --num-rollout 2"),
        (("--rollout-sample-filter-path", "no.py"), "no.py: there is no file"),
        (("--partial-rollout", "--loss-type", "sft_loss"), "leave out --partial-rollout"),
    ],
)
def test_options_that_do_not_go_together(run_args, flags, message):
    with pytest.raises(ConfigError, match=message):
        run_args(*flags)


def test_what_another_rollout_function_may_leave_undone_is_said(run_args, tmp_path):
    path = write(tmp_path, "own.py", ROLLOUT)
    warnings = run_args("--rollout-function-path", path, "--partial-rollout").warnings
    assert any("--partial-rollout only has an effect where the function sees to it" in text for text in warnings)
    assert not any("sees to it" in text for text in run_args("--partial-rollout").warnings)


def test_all_equal_rewards_of_a_rollout_raise_an_alarm_with_a_samples_text(run_args, caplog):
    with_manager(run_args(), lambda manager: manager.generate(0, 3))
    assert "nothing can be learned" in caplog.text and "What is" in caplog.text


def test_all_failed_says_so_with_a_samples_text(run_args, tmp_path, caplog):
    path = write(tmp_path, "reward.py", "async def reward_func(args, sample):\n    raise ValueError('judge is down')\n")
    with pytest.raises(HookError, match="all 6 samples of rollout 0 FAILED.*judge is down"):
        with_manager(run_args("--custom-rm-path", path), lambda manager: manager.generate(0, 3))
    assert "all 6 samples FAILED" in caplog.text and "What is" in caplog.text


def test_a_source_must_return_as_many_groups_as_asked(run_args, tmp_path):
    text = SOURCES["groups"].replace("range(num_samples)", "range(num_samples - 1)")
    path = write(tmp_path, "short.py", text)
    with pytest.raises(DataError, match=r"MySource.get_samples\(3\) must return 3 groups.*returned 2"):
        with_manager(run_args("--data-source-path", path), lambda manager: manager.generate(0, 3))


def test_a_source_without_a_length_needs_a_number_of_rollouts(run_args, tmp_path):
    path = write(tmp_path, "my_source.py", SOURCES["dataset of its own"])
    args = run_args("--data-source-path", path, data=False, rollouts=None)
    with pytest.raises(ConfigError, match="my_source.py has no length.*give --num-rollout"):
        resolve_num_rollout(args, RolloutManager(args).dataset_length())


ROOT = Path(__file__).resolve().parents[2]


def snippet(page, heading):
    """The first Python block under a heading of a page."""
    text = (ROOT / "docs" / page).read_text()
    return re.search(rf"^## {heading}\n.*?```python\n(.*?)```", text, re.DOTALL | re.MULTILINE).group(1)


@pytest.mark.parametrize(
    ("page", "headings"),
    [
        ("customization.md", {"Sample hook": "--rollout-sample-hook-path", "Data source": "--data-source-path"}),
        (
            "customization.md",
            {
                "Sample filter": "--rollout-sample-filter-path",
                "All samples": "--rollout-all-samples-process-path",
                "Buffer filter": "--buffer-filter-path",
                "Train data": "--custom-convert-samples-to-train-data-path",
            },
        ),
        ("customization.md", {"Rollout function": "--rollout-function-path"}),
        ("rollout.md", {"Partial rollouts": "--custom-generate-function-path"}),
    ],
)
def test_what_the_pages_show_runs(run_args, tmp_path, page, headings):
    flags = []
    for number, (heading, option) in enumerate(headings.items()):
        flags += [option, write(tmp_path, f"shown_{number}.py", snippet(page, heading))]
    if "--data-source-path" not in flags:
        flags += ["--over-sampling-batch-size", "5", "--partial-rollout"]
    args = run_args(*flags, "--rm-type", "random")
    engine = FakeEngine(lambda payload: [40 + seeded(payload, 5)] * 3, lambda payload: seeded(payload, 3) * 0.01)

    async def body(manager):
        return [await manager.generate(rollout_id, 3) for rollout_id in range(2)], manager._source.metadata

    results, metadata = with_manager(args, body, engine)
    for result in results:
        assert result.batches[0].samples.num_samples == 6
        assert result.metrics["rollout/num_failed_samples"] == 0
    assert ("solved" in metadata) == ("All samples" in headings)
