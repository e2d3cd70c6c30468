"""Old weights are found by the version that generated a rollout."""

import pytest
import torch

from colloid.training.synced_weights import SyncedWeights


def value_of(kept, version, parameter):
    before = parameter.item()
    with kept.of(version).swapped_in():
        found = parameter.item()
    assert parameter.item() == before
    return found


@pytest.mark.parametrize(
    ("keeps", "found"),
    [
        (1, {0: 3.0, 2: 3.0, 3: 3.0, 9: 3.0}),
        (2, {0: 2.0, 1: 2.0, 2: 2.0, 3: 3.0, 9: 3.0}),
        (4, {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 9: 3.0}),
    ],
)
def test_the_copy_of_a_version_has_the_weights_that_were_sent_as_it(keeps, found):
    parameter = torch.nn.Parameter(torch.tensor([0.0]))
    kept = SyncedWeights([("weight", parameter)], 0, keeps)
    assert value_of(kept, 5, parameter) == 0.0
    for version in (1, 2, 3):
        parameter.data.fill_(float(version))
        kept.synced(version)
        parameter.data.fill_(-1.0)
    assert {version: value_of(kept, version, parameter) for version in found} == found
