"""`rollouts/*.parquet`: one schema for a whole run, read by the common tools; and the options of data and storage."""

import pyarrow.parquet
import pytest

from colloid.config import parse
from colloid.config.prompt_files import parse_prompt_file, unreadable
from colloid.data.sample import Sample, Status
from colloid.errors import ConfigError
from colloid.rollout.record import write_samples

PLAN = ["--dry-run", "--num-layers", "2", "--device", "cpu"]


def make_sample(index, reward, label="7"):
    sample = Sample(group_index=index // 2, index=index, prompt="Wie weit?", tokens=[5, 6], label=label)
    sample.append_response_tokens([7, 8], log_probs=[-1.0, -0.5], weight_version=index)
    sample.response, sample.reward, sample.status = "7 м", reward, Status.COMPLETED
    return sample


@pytest.fixture
def files(tmp_path):
    """A usual rollout; one without labels whose judge failed everywhere; an evaluation set, without shaped rewards."""
    write_samples(tmp_path / "000000.parquet", [make_sample(0, 1.0), make_sample(1, 0)], [0.5, -0.5])
    write_samples(tmp_path / "000001.parquet", [make_sample(2, None, label=None)], [0.0])
    write_samples(tmp_path / "eval_x_000001.parquet", [])
    return tmp_path


def test_all_files_of_a_run_have_the_same_types(files):
    first, second = (pyarrow.parquet.read_schema(files / f"00000{number}.parquet") for number in range(2))
    assert (
        first == second and str(first.field("reward").type) == "double" and str(first.field("label").type) == "string"
    )
    assert pyarrow.parquet.read_schema(files / "eval_x_000001.parquet") == first.remove(len(first) - 1)


def test_dict_rewards_are_texts(tmp_path):
    write_samples(tmp_path / "0.parquet", [make_sample(0, {"score": 1}), make_sample(1, None)])
    assert pyarrow.parquet.read_table(tmp_path / "0.parquet")["reward"].to_pylist() == ['{"score": 1}', None]


def test_pandas_reads_it(files):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(files / "000000.parquet")
    assert frame["reward"].tolist() == [1.0, 0.0] and frame["response"][0] == "7 м"


def test_duckdb_reads_all_files_at_once(files):
    duckdb = pytest.importorskip("duckdb")
    query = f"select count(*), sum(reward), max(newest_weight_version) from '{files}/0*.parquet'"
    assert duckdb.sql(query).fetchall() == [(3, 1.0, 2)]


def test_datasets_reads_all_files_and_saves_what_is_read_as_prompts(files, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    from colloid.config.prompt_files import PromptFile
    from colloid.data.files import Columns, open_rows

    paths = [str(files / f"00000{number}.parquet") for number in range(2)]
    found = datasets.Dataset.from_parquet(paths, cache_dir=str(tmp_path / "cache"))
    assert found["index"][:] == [0, 1, 2]
    found.select([2, 0]).save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.DatasetDict({"train": found}).save_to_disk(tmp_path / "split")
    columns = Columns((("index", "--input-key"),))
    read = [
        [row.data["index"] for row in open_rows(PromptFile(str(tmp_path / name)), columns)]
        for name in ("saved", "split")
    ]
    assert read == [[2, 0], [0, 1, 2]]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--prompt-data a.jsonl@[1]", "is no slice of rows"),
        ("--prompt-data a.jsonl b.jsonl --prompt-data-weights 1", "has 1 values for 2 files"),
        ("--prompt-data a.jsonl --prompt-data-weights 0", "weight 0 is never read"),
        ("--streaming-window 9", "needs --streaming-data"),
        ("--num-data-workers 65", "at most 64"),
        ('--multimodal-keys {"a":"b"}', "read text alone"),
    ],
)
def test_options_of_data_that_make_no_sense_are_errors(argv, words):
    with pytest.raises(ConfigError) as caught:
        parse([*PLAN, *argv.split()])
    assert words in str(caught.value)


def test_names_under_which_there_is_nothing_to_read_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}')
    for name, words in {
        "a.jsonl@[:1]": None,
        "b.parquet@[:1]": "b.parquet: there is no such file (looked for /",
        ".": "is a directory without a state.json or dataset_dict.json; give JSONL",
    }.items():
        text = unreadable(parse_prompt_file(f"{tmp_path}/{name}"), "--prompt-data")
        assert text is None if words is None else words in text


def test_details_are_dumped_to_files_that_were_not_named():
    def saved(*argv):
        args = parse([*PLAN, *argv])
        return args.save_debug_rollout_data, args.save_debug_train_data

    details = saved("--dump-details", "d{x}")
    assert details[0] == "d{{x}}/rollout_data/{rollout_id}.jsonl"
    assert details[1] in (None, "d{{x}}/train_data/{rollout_id}_{rank}.pt")
    assert saved("--dump-details", "d", "--save-debug-rollout-data", "e{rollout_id}")[0] == "e{rollout_id}"
    assert saved("--dump-details", "d", "--debug-rollout-only")[1] is None
    assert saved("--dump-details", "d", "--load-debug-rollout-data", "x", "--num-rollout", "1")[0] is None
