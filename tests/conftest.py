"""Fixtures, and where tests find real images, which are not part of the project."""
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SHARED = ROOT.parent / 'shared'


def _shared(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f'needs {path}, which is not part of the project')
    return path


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers every time."""
    import torch
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(scope='module')
def float64():
    """Networks built meanwhile are of float64."""
    import torch
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope='session')
def coco():
    """A folder of real COCO images in COCO's own layout."""
    return _shared('data/coco')


@pytest.fixture(scope='session')
def shared_data():
    """Gives a folder of real data by its name, such as 'Kvasir-SEG' ('': the folder of all), or skips the test."""
    return lambda name='': _shared(f'data/{name}')
