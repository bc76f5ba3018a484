"""Numbers of one forward pass, for each of its N images, from the records of its layers."""
from itertools import groupby

import torch
import torch.nn.functional as F

from kcla_mm.layer_attention import KCLA


def by_stage(records):
    """The records of each stage."""
    return [list(group) for _, group in groupby(records, lambda record: record.stage)]


def key_alignment(stage):
    """Cosine similarity of the keys of a stage's T layers: (N, heads, T, T). That of a zero key is 0."""
    keys = F.normalize(torch.stack([record.key for record in stage], 2).double(), dim=3)
    return keys @ keys.transpose(2, 3)


def mean_of_pairs(alignment, distance=None):
    """Mean over the pairs of layers, (..., T, T) -> (...), of all or of those ``distance`` apart. NaN without pairs."""
    size = alignment.shape[-1]
    rows, columns = torch.tril_indices(size, size, -1)
    if distance is not None:
        rows, columns = rows[rows - columns == distance], columns[rows - columns == distance]
    return alignment[..., rows, columns].mean(-1)


def retention(stage):
    """Weights in the last layer of a stage: of the stage's first block, and of all earlier stages; (N, ) each.

    They are means over the heads; None where depth weights are not defined, and of earlier stages where there are none,
    or none that the type of layer attention could see.
    """
    if stage[-1].weights is None:
        return None, None
    weights = stage[-1].weights.mean(1)
    start = weights.shape[1] - len(stage)
    sees_earlier = start and isinstance(stage[-1].layer, KCLA)
    return weights[:, start], weights[:, :start].sum(1) if sees_earlier else None
