"""Weights, images and expected numbers of the golden networks, all float64: see README.md."""
import json
import zlib
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent


def spec(name):
    """Input, names and shapes of the state dict, and unused parameters of a network."""
    return json.loads((FOLDER / f'{name}.json').read_text())


def expected(name):
    """The published code's numbers: a dict of tensors."""
    with np.load(FOLDER / f'{name}.npz') as numbers:
        return {key: torch.from_numpy(numbers[key]) for key in numbers.files}


def image(seed, shape):
    """A standard-normal image."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(shape)))


def state_dict(name):
    """The network's weights, each drawn from its own name."""
    return {key: torch.from_numpy(np.asarray(_value(key, tuple(shape))))
            for key, shape in spec(name)['state_dict'].items()}


def _value(key, shape):
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    leaf = key.rpartition('.')[2]
    if leaf == 'num_batches_tracked':
        return np.zeros(shape, np.int64)
    if leaf == 'running_var' or leaf == 'weight' and len(shape) == 1:
        return 0.5 + rng.random(shape)
    if leaf in ('running_mean', 'bias'):
        return 0.1 * rng.standard_normal(shape)
    if len(shape) == 3:  # filters along the channels
        return 0.5 * rng.standard_normal(shape)
    fan_in = int(np.prod(shape[1:]))
    return rng.standard_normal(shape) * np.sqrt(1.0 / max(fan_in, 1))
