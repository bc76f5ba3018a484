"""A small backbone with layer attention, and its images."""
import torch
from mmdet.registry import MODELS
from torch import nn

import kcla_mm  # noqa: F401
from tests.backbones.networks import randomised

IMAGES = torch.rand(2, 3, 64, 48)


def build(type='KCLA', **options):
    """A ResNet-18 of narrow stages, in eval mode, whose statistics are those of the images."""
    options = dict(dict(init_scale=1., head_channels=16), **options)
    network = randomised(MODELS.build(dict(
        type='KCLAResNet', depth=18, base_channels=32, stem_channels=32, init_cfg=None, norm_eval=False,
        attention=dict(type=type, **options))))
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.
    network.train()
    with torch.no_grad():
        network(IMAGES)
    for norm in norms:
        norm.momentum = 0.1
    network.eval()
    return network
