"""The metrics writer: whole lines, cut on resume, the same values in TensorBoard."""

import errno
import json
import logging
import math

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from colloid.observe.metrics import METRICS_FILE, MetricsWriter, cut_metrics, has_logged, read_metrics


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def scalars(run_dir, name):
    accumulator = EventAccumulator(str(run_dir)).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_a_line_a_call_with_exact_values_of_every_kind_of_number(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(0, {"a": 0.1, "b": 3, "c": np.float64(1 / 3), "d": torch.tensor(0.5), "e": np.int64(7), "f": True})
        writer.log(1, {"a": 1e-300})
    assert lines(tmp_path) == [
        {"step": 0, "a": 0.1, "b": 3, "c": 1 / 3, "d": 0.5, "e": 7, "f": 1},
        {"step": 1, "a": 1e-300},
    ]


def test_a_line_is_on_disk_when_log_returns(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(0, {"a": 1.0})
        assert lines(tmp_path) == [{"step": 0, "a": 1.0}]
        assert scalars(tmp_path, "a") == [(0, 1.0)]


def test_non_finite_values_are_null_in_json_kept_in_tensorboard_and_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path) as writer:
        writer.log(4, {"loss": math.nan, "norm": math.inf, "fine": 1.0})
    assert lines(tmp_path) == [{"step": 4, "loss": None, "norm": None, "fine": 1.0}]
    assert math.isnan(scalars(tmp_path, "loss")[0][1])
    assert "loss is nan at step 4" in caplog.text and "norm is inf at step 4" in caplog.text


@pytest.mark.parametrize(
    ("metrics", "error"), [({"step": 1}, ValueError), ({"a": "text"}, TypeError), ({"a": torch.ones(2)}, TypeError)]
)
def test_what_is_no_metric_is_refused_and_nothing_written(tmp_path, metrics, error):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(error, match="'step'|metric a"):
            writer.log(0, metrics)
        assert (tmp_path / METRICS_FILE).read_bytes() == b""


def test_resume_cuts_later_steps_and_a_torn_line_and_goes_on(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(5):
            writer.log(step, {"a": float(step)})
    with open(tmp_path / METRICS_FILE, "ab") as file:
        file.write(b'{"step": 5, "a": 5')
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.log(3, {"a": 30.0})
    assert [(record["step"], record["a"]) for record in lines(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert scalars(tmp_path, "a") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]


def test_events_may_go_elsewhere_and_those_of_an_earlier_run_there_are_put_away(tmp_path):
    run, events = tmp_path / "run", tmp_path / "tensorboard/project/name"
    for step in (0, 5):
        with MetricsWriter(run / str(step), events_dir=events) as writer:
            writer.log(step, {"a": 1.0})
    assert scalars(events / "earlier-1", "a") == [(0, 1.0)]
    for path in (events / "earlier-1").iterdir():
        path.unlink()
    assert scalars(events, "a") == [(5, 1.0)] and not list(run.rglob("*tfevents*"))


def test_resume_before_the_first_step_leaves_nothing(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(0, {"a": 1.0})
    with MetricsWriter(tmp_path, resume_step=-1):
        assert lines(tmp_path) == []


def test_cutting_says_how_many_lines_went_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 1, 1, 2)))
    assert cut_metrics(path, 5) == 0
    assert cut_metrics(path, 0) == 3
    assert [file.name for file in tmp_path.iterdir()] == [METRICS_FILE]
    assert cut_metrics(tmp_path / "none.jsonl", 0) == 0


def test_a_torn_last_line_is_not_read(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 0}\n{"step": 1')
    assert read_metrics(tmp_path) == [{"step": 0}]
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_new_run_in_a_used_directory_moves_the_earlier_metrics_aside(tmp_path, caplog):
    for run in range(3):
        with MetricsWriter(tmp_path) as writer:
            writer.log(0, {"a": float(run)})
    assert lines(tmp_path) == [{"step": 0, "a": 2.0}]
    assert lines(tmp_path / "earlier-1") == [{"step": 0, "a": 0.0}]
    assert scalars(tmp_path / "earlier-2", "a") == [(0, 1.0)]
    assert scalars(tmp_path, "a") == [(0, 2.0)]
    assert "earlier-2" in caplog.text


def test_a_full_disk_names_the_file_and_leaves_no_half_line(tmp_path, monkeypatch):
    import colloid.observe.metrics as module

    writer = MetricsWriter(tmp_path)
    writer.log(0, {"a": 1.0})
    real_write, calls = module.os.write, []

    def full(descriptor, data):
        calls.append(data)
        if len(calls) == 1:
            return real_write(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", full)
        with pytest.raises(OSError, match="No space left.*metrics.jsonl"):
            writer.log(1, {"a": 2.0})
    writer.close()
    writer.close()
    assert lines(tmp_path) == [{"step": 0, "a": 1.0}]


def test_what_is_noted_stands_in_the_next_line_alone(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.note({"perf/restarts": 1})
        writer.note({"perf/restart_time": 2.5})
        writer.log(0, {"a": 1.0})
        writer.log(1, {"a": 2.0})
    assert lines(tmp_path) == [
        {"step": 0, "a": 1.0, "perf/restarts": 1, "perf/restart_time": 2.5},
        {"step": 1, "a": 2.0},
    ]
    assert has_logged(tmp_path, 0, "perf/restarts") and not has_logged(tmp_path, 1, "perf/restarts")
    assert has_logged(tmp_path, 1) and not has_logged(tmp_path, 2)
