"""The layer attentions that KCLA is compared with, against their formulas and the published numbers, in float64."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kcla_mm.layer_attention import DLALight, LayerAttention, LinearLayerAttention, MRLABase, MRLALight
from tests.golden import golden

pytestmark = pytest.mark.usefixtures('float64')


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def gap(x):
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


def heads(layer, name, x):
    weight = getattr(layer, name)
    return F.conv1d(gap(x)[:, None], weight, padding=weight.shape[-1] // 2).view(len(x), layer.heads, -1)


def depthwise(weight, x):
    return F.conv2d(x, weight, padding=1, groups=x.shape[1])


def weighted(weight, value):
    """Weights of heads, (N, heads), times their maps."""
    return torch.einsum('nh,nhdyx->nhdyx', weight, value.unflatten(1, (weight.shape[1], -1))).flatten(1, 2)


def normalised(layer, x):
    norm = layer.norm
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)


def softmax_attention(layer, x, keys, values):
    query = heads(layer, 'query', x)
    scores = torch.stack([(query * key).sum(2) for key in keys]) / layer.head_channels**0.5
    total = sum(weighted(weight, value) for weight, value in zip(scores.softmax(0), values))
    return x + normalised(layer, total).relu()


def layer_attention(layers, xs, shortcuts):
    return [softmax_attention(layer, x, [heads(layer, 'key', before) for before in xs[:t + 1]],
                              [depthwise(layer.value, before) for before in xs[:t + 1]])
            for t, (layer, x) in enumerate(zip(layers, xs))]


def mrla_base(layers, xs, shortcuts):
    keys = [heads(layer, 'key', x) for layer, x in zip(layers, xs)]
    values = [depthwise(layer.value, x) for layer, x in zip(layers, xs)]
    return [softmax_attention(layer, x, keys[:t + 1], values[:t + 1]) for t, (layer, x) in enumerate(zip(layers, xs))]


def linear_layer_attention(layers, xs, shortcuts):
    outputs = []
    for t, (layer, x) in enumerate(zip(layers, xs)):
        query = F.elu(heads(layer, 'query', x)) + 1
        total = sum(weighted((query * (F.elu(heads(layer, 'key', before)) + 1)).sum(2), depthwise(layer.value, before))
                    for before in xs[:t + 1])
        outputs.append(x + normalised(layer, total))
    return outputs


def mrla_light(layers, xs, shortcuts):
    outputs = []
    for layer, x, shortcut in zip(layers, xs, shortcuts):
        gate = ((heads(layer, 'query', x) * heads(layer, 'key', x)).sum(2) / layer.head_channels**0.5).sigmoid()
        total = weighted(gate, depthwise(layer.value, x)) + layer.shortcut_weight.view(-1, 1, 1) * shortcut
        outputs.append(x + normalised(layer, total))
    return outputs


def dla_light(layers, xs, shortcuts):
    unit = layers[0].unit

    def perceptron(linear, x):
        hidden = (x @ linear.reduce_weight.T + linear.reduce_bias).relu()
        return hidden @ linear.expand_weight.T + linear.expand_bias

    def step(x, hidden, cell):
        i, f, g = (perceptron(unit.input, gap(x)) + perceptron(unit.hidden, hidden)).chunk(3, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        return cell.sigmoid(), cell

    hidden = cell = torch.zeros(xs[0].shape[:2])
    dynamic = []
    for x, shortcut in zip(xs, shortcuts):
        hidden, cell = step(x, hidden, cell)
        dynamic.append(shortcut * step(shortcut, hidden, cell)[0][:, :, None, None] + depthwise(unit.value, shortcut))
    return mrla_light(layers, xs, dynamic)


@pytest.mark.parametrize('cls, formula', [
    (LayerAttention, layer_attention), (LinearLayerAttention, linear_layer_attention), (MRLABase, mrla_base),
    (MRLALight, mrla_light), (DLALight, dla_light)])
def test_formula_over_two_stages(cls, formula):
    stages = [[cls(64, block) for block in range(4)], [cls(128, block, 64, 2) for block in range(2)]]
    layers = nn.ModuleList(sum(stages, [])).eval()
    for name, value in layers.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.5 if 'norm' in name else torch.randn_like(value) / 2)
    shapes = [(2, 64, 5, 7)] * 4 + [(2, 128, 3, 4)] * 2
    xs, shortcuts = ([torch.randn(shape, requires_grad=True) for shape in shapes] for _ in range(2))
    outputs, state = [], None
    for layer, x, shortcut in zip(layers, xs, shortcuts):
        y, state = layer(x, state, shortcut)
        outputs.append(y)
    expected = formula(stages[0], xs[:4], shortcuts[:4]) + formula(stages[1], xs[4:], shortcuts[4:])
    assert_close(outputs, expected)

    leaves = xs + (shortcuts if cls.needs_shortcut else []) + list(layers.parameters())
    loss = lambda ys: sum((y * y).sum() for y in ys)  # noqa: E731
    assert_close(torch.autograd.grad(loss(outputs), leaves), torch.autograd.grad(loss(expected), leaves))


def load(layer, weights, prefix=''):
    """Loads published weights; returns a list in which what the layer hands its normalisation is collected."""
    names = dict(query='Wq', key='Wk', value='Wv')
    layer.load_state_dict({ours: weights[f'{prefix}{name}.weight'] for ours, name in names.items()}, strict=False)
    before_norm = []
    layer.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    return before_norm


class PublishedOrder(LayerAttention):
    """Deals out keys and values to the heads as the published code does.

    It lines up the slices of d channels of all T layers, layer after layer, and gives each head the next T of them. So
    from the second layer on a head doesn't compare its own channels throughout the layers: the first of four heads
    reads of two layers only slices of the first one. `LayerAttention` gives a head its own channels of every layer.
    """

    def look_back(self, x, layers):
        layers, query, keys = super().look_back(x, layers)
        return layers, query, keys.reshape(len(x), self.heads, -1, self.head_channels).transpose(1, 2)

    def read(self, layers, weights):
        values = torch.stack([depthwise(self.value, x) for x in layers.maps], 1)
        values = values.reshape(len(values), self.heads, -1, self.head_channels, *values.shape[3:])
        return torch.einsum('nth,nhtdyx->nhdyx', weights, values).flatten(1, 2)


@pytest.mark.parametrize('cls, stored', [(LayerAttention, 1), (PublishedOrder, 3), (PublishedOrder, 5)])
def test_golden_layer_attention(cls, stored):
    """Exact but for the order, which makes a difference as soon as there are two layers."""
    layers = [cls(64, block, head_channels=16) for block in range(stored)]
    before_norm = load(layers[-1], golden.state_dict('layer_attention'))
    state = None
    for layer, x in zip(layers, golden.image(50 + stored, (2, stored, 64, 6, 7)).abs().unbind(1)):
        _, state = layer(x, state)
    assert_close(before_norm[0], golden.expected('layer_attention')[f'out_t{stored}'])


def test_golden_linear_layer_attention():
    expected, state = golden.expected('linear_layer_attention'), None
    for i in range(3):
        layer = LinearLayerAttention(64, i)
        before_norm = load(layer, golden.state_dict('linear_layer_attention'), f'{i}.')
        _, state = layer(golden.image(60 + i, (2, 64, 6, 7)).abs(), state)
        assert_close(before_norm[0], expected[f'out{i}'])
