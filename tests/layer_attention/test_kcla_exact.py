"""KCLA against its formula written out plainly and against the published numbers, in float64."""
import math
import re

import pytest
import torch
import torch.nn.functional as F

from kcla_mm.layer_attention import KCLA
from tests.golden import golden

pytestmark = pytest.mark.usefixtures('float64')


def assert_close(actual, expected, rtol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * 1e-3)


def randomised(layer):
    """The layer with every parameter and statistic drawn at random."""
    layer.eval()
    for name, value in layer.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.5 if 'norm' in name else torch.randn_like(value))
    return layer


def summed_form(layers, xs):
    """The outputs by the published sums: nothing is normalised before it is read, every step written out."""
    outputs, total, normaliser = [], 0, 0
    for layer, x in zip(layers, xs):
        n, c, _, _ = x.shape
        tau = torch.logspace(math.log10(0.7), math.log10(1 / 0.7), layer.heads, dtype=x.dtype)
        g = F.adaptive_avg_pool2d(x, 1).view(n, 1, c)
        q = F.conv1d(g, layer.query, padding=layer.query.shape[-1] // 2).view(n, layer.heads, -1)
        k = F.conv1d(g, layer.key, padding=layer.key.shape[-1] // 2).view(n, layer.heads, -1)
        length = k.pow(2).sum(-1).sqrt()
        exponential = torch.minimum(tau * length, torch.tensor(10.)).exp()
        heads = x.view(n, layer.heads, -1, *x.shape[2:])
        total = total + exponential[..., None, None, None] * heads
        normaliser = normaliser + exponential
        mean = (total / (normaliser + 1e-3)[..., None, None, None]).view_as(x)
        gate = torch.sigmoid(F.linear((q * k).sum(-1) / length, layer.gate))
        value = F.conv2d(mean, layer.value, padding=1, groups=c).view_as(heads) * gate[..., None, None, None]
        norm = layer.norm
        value = F.batch_norm(value.view_as(x), norm.running_mean, norm.running_var, norm.weight, norm.bias)
        outputs.append(x + value.relu())
    return outputs


@pytest.mark.parametrize('channels, head_channels', [(128, 64), (64, 64), (64, 16)])
def test_the_depth_memory_is_the_softmax_weighted_sum(channels, head_channels):
    layers = [randomised(KCLA(channels, block, head_channels=head_channels)) for block in range(4)]
    xs = [torch.rand(2, channels, 5, 7, requires_grad=True) for _ in layers]
    memory, outputs = None, []
    for layer, x in zip(layers, xs):
        y, memory = layer(x, memory)
        outputs.append(y)
    expected = summed_form(layers, xs)
    assert_close(outputs, expected)
    loss = lambda ys: sum((y * y).sum() for y in ys)  # noqa: E731
    assert_close(torch.autograd.grad(loss(outputs), xs), torch.autograd.grad(loss(expected), xs))


def published_name(name):
    names = {'query': 'Wq.weight', 'key': 'Wk.weight', 'value': 'Wv.weight', 'gate': 'head_att.weight',
             'memory_conv': 'adjust_channel.weight', 'memory_key': 'u_Wk.weight'}
    return names.get(name) or re.sub('^norm', 'bn_attention', re.sub('^memory_norm', 'u_bn', name))


def test_golden_layers():
    expected, weights = golden.expected('kcla_layers'), golden.state_dict('kcla_layers')
    source = golden.spec('kcla_layers')['input']
    memory = None
    for i, (channels, size) in enumerate(zip(source['channels'], source['hw'])):
        layer = KCLA(channels, block=i % 3, previous_channels=128 if i > 2 else None, stride=2).eval()
        assert (layer.memory_conv is not None) == (i == 3)
        layer.load_state_dict({name: weights[f'{i}.{published_name(name)}'] for name in layer.state_dict()})
        x = golden.image(source['first_seed'] + i, (source['batch'], channels, *size)).abs()
        y, memory = layer(x, memory)
        every = (slice(None), slice(None, None, 8), slice(None, None, 2), slice(None, None, 2))
        assert_close((y - x)[every], expected[f'out{i}'])
        assert_close(memory.mean[every], expected[f'mean{i}'])
        assert_close(memory.log_normaliser, expected[f'logz{i}'])


def test_without_the_gate_only_the_normaliser_scales():
    layer = randomised(KCLA(128, gate=False))
    x = torch.rand(2, 128, 4, 4)
    y, memory = layer(x)
    assert layer.query is None and layer.gate is None
    z = memory.log_normaliser.exp().repeat_interleave(64, 1)[..., None, None]
    norm = layer.norm
    attention = F.batch_norm(F.conv2d(x * z / (z + 1e-3), layer.value, padding=1, groups=128), norm.running_mean,
                             norm.running_var, norm.weight, norm.bias).relu()
    assert_close(y, x + attention)
