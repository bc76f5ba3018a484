"""Depth weights, beside what the layers in fact read: each block lights a pixel of its own."""
import pytest
import torch
from torch import nn

from kcla_mm.analysis import recorded
from kcla_mm.layer_attention import LAYER_ATTENTIONS, create_layer_attention


def chain(type, stages, **options):
    """Layers of stages, [(channels, [block, ...]), ...], of one size, whose normalisations do nothing."""
    layers, previous = nn.ModuleList(), None
    for channels, blocks in stages:
        layers.extend(create_layer_attention(type, channels, block, previous, 1,
                                             lambda c: nn.BatchNorm2d(c, eps=0), init_scale=1., **options)
                      for block in blocks)
        previous = channels
    return layers.double().eval()


def light(layers, brightness):
    """What each block gives: zero but for one pixel."""
    xs = []
    for index, (layer, value) in enumerate(zip(layers, brightness)):
        x = torch.zeros(1, layer.channels, 1, len(layers)).double()
        x[0, :, 0, index] = value
        xs.append(x)
    return xs


def run(layers, xs):
    """Records of the layers, and what each returned."""
    state, outputs = None, []
    with recorded(layers) as records, torch.no_grad():
        for layer, x in zip(layers, xs):
            outputs.append(layer(x, state, x if layer.needs_shortcut else None))
            state = outputs[-1][1]
    return records, outputs


STAGES = {
    'two stages': ([(64, [0, 1, 2]), (128, [0, 1])], 16),
    'as many heads': ([(64, [0, 1]), (64, [0, 1])], 16),
    'a refresh': ([(64, [0, 1, 2, 11, 12]), (128, [0])], 16),
    'groups that span heads': ([(96, [0, 1]), (192, [0, 1]), (432, [0, 1])], 48),  # RegNetX-3.2GF's
}


@pytest.mark.parametrize('stages, head_channels', STAGES.values(), ids=STAGES)
def test_kclas_are_what_is_in_its_memory(stages, head_channels):
    layers = chain('KCLA', stages, head_channels=head_channels)
    for layer in layers:
        if layer.memory_conv is not None:  # averages what a group reads
            nn.init.constant_(layer.memory_conv, 1 / layer.memory_conv.shape[1])
    brightness = 20 * torch.rand(len(layers)).double() + 5
    records, outputs = run(layers, light(layers, brightness))
    assert [record.stage for record in records] == [s for s, (_, blocks) in enumerate(stages, 1) for _ in blocks]
    for index, (record, (_, memory)) in enumerate(zip(records, outputs)):
        in_memory = (memory.mean[0, :, 0] / brightness)[:, :index + 1]
        heads = in_memory.unflatten(0, (record.layer.heads, -1)).mean(1)
        torch.testing.assert_close(record.weights[0], heads, rtol=1e-5, atol=1e-7)
        assert record.weights[0].std(0).max() > 1e-5 or not index, 'heads differ'
        torch.testing.assert_close(record.weights.sum(2), torch.ones(1, record.layer.heads).double())


def test_kclas_temperatures_near_zero_weigh_alike():
    layers = chain('KCLA', [(64, [0, 1, 2]), (128, [0, 1])], head_channels=16, temperatures=(1e-9, 1e-9)).float()
    records, _ = run(layers, [50 * torch.rand(2, layer.channels, 4, 4) for layer in layers])
    assert records[-1].key.abs().max() > 1
    # All that a stage takes over counts as one block.
    for record, weights in zip(records, ([1], [1 / 2] * 2, [1 / 3] * 3, [1 / 6] * 3 + [1 / 2], [1 / 9] * 3 + [1 / 3] * 2)):
        torch.testing.assert_close(record.weights, torch.tensor(weights).double().expand_as(record.weights))


def test_kclas_memory_is_the_weighted_mean_of_its_stage():
    layers = chain('KCLA', [(64, [0, 1, 2, 3])], head_channels=16)
    xs = [torch.rand(3, 64, 5, 6).double() for _ in layers]
    records, outputs = run(layers, xs)
    for index, (record, (_, memory)) in enumerate(zip(records, outputs)):
        weights = record.weights.repeat_interleave(16, 1)[..., None, None]
        expected = sum(weights[:, :, i] * xs[i] for i in range(index + 1))
        torch.testing.assert_close(memory.mean, expected)


@pytest.mark.parametrize('type', ['LayerAttention', 'LinearLayerAttention', 'MRLABase'])
def test_attentions_over_a_stage_are_what_they_add(type):
    layers = chain(type, [(64, [0, 1, 2]), (64, [0, 1])], head_channels=16)
    for layer in layers:
        nn.init.zeros_(layer.value)
        layer.value.data[:, :, 1, 1] = 1
    brightness = 20 * torch.rand(len(layers), 64).double() + 5
    xs = light(layers, brightness)
    records, outputs = run(layers, xs)
    for index, (record, x, (y, _)) in enumerate(zip(records, xs, outputs)):
        added = (y - x)[0, :, 0].T[:index + 1] / brightness[:index + 1]
        heads = (added / added.sum(0)).unflatten(1, (4, 16)).mean(2).T
        torch.testing.assert_close(record.weights[0], heads)
        seen = record.layer.block + 1
        assert (record.weights[0, :, :-seen] == 0).all() and (record.weights[0, :, -seen:] > 0).all()


def test_mrla_lights_decay_with_lambda():
    layers = chain('MRLALight', [(64, [0, 1, 2, 3]), (64, [0, 1])], head_channels=32)
    records, _ = run(layers, [torch.rand(2, 64, 4, 4).double() for _ in layers])
    left = torch.zeros(64, len(layers)).double()
    for index, record in enumerate(records):
        if record.layer.block == 0:
            left.zero_()
        left *= record.layer.shortcut_weight.detach().abs()[:, 0]
        left[:, index] = 1
        expected = (left / left.sum(1, keepdim=True))[:, :index + 1].unflatten(0, (2, 32)).mean(1)
        torch.testing.assert_close(record.weights, expected.expand(2, -1, -1))


def test_dla_light_has_none():
    layers = chain('DLALight', [(64, [0, 1])])
    records, _ = run(layers, [torch.rand(2, 64, 4, 4).double() for _ in layers])
    assert [record.weights for record in records] == [None, None]
    assert records[1].key.shape == (2, 2, 32) and records[1].gate.shape == (2, 2)


@pytest.mark.parametrize('type', set(LAYER_ATTENTIONS) - {'DLALight'})
def test_rows_sum_to_one_in_single_precision_and_of_dead_layers(type):
    layers = chain(type, [(64, [0, 1, 2]), (128, [0, 1])]).float()
    xs = [torch.rand(2, layer.channels, 4, 4) * 3**i for i, layer in enumerate(layers)]
    xs[1].zero_()
    records, _ = run(layers, xs)
    for record in records:
        assert (record.weights >= 0).all()
        torch.testing.assert_close(record.weights.sum(2), torch.ones(2, record.layer.heads).double())
