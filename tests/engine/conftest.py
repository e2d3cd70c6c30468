import pytest
import torch

from tests.engine.models import VARIANTS, make_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_paths(tmp_path_factory):
    """{variant: directory} of all small models."""
    base = tmp_path_factory.mktemp("models")
    return {variant: make_model(variant, base / variant) for variant in VARIANTS}
