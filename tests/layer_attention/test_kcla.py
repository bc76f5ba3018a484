"""KCLA alone, in plain PyTorch."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kcla_mm.layer_attention import KCLA, BaseLayerAttention, DepthMemory, create_layer_attention


def chain(dtype=torch.float32, channels=128, **options):
    """Six layers of two stages, the first with a stage transition to twice the channels."""
    return nn.ModuleList([KCLA(c, block, previous, stride=2, **options).to(dtype)
                          for c, block, previous in [(channels, 0, None), (channels, 1, None), (channels, 2, None),
                                                     (2 * channels, 0, channels), (2 * channels, 1, channels),
                                                     (2 * channels, 11, channels)]])


def run(layers, x):
    """Feeds the layers by each other; a strided slice stands for the blocks of the second stage."""
    memory = None
    for layer in layers:
        if x.shape[1] != layer.channels:
            x = torch.cat([x, x], 1)[:, :, ::2, ::2]
        x, memory = layer(x, memory)
    return x


@pytest.mark.parametrize('image', [torch.zeros(2, 128, 6, 6), torch.rand(2, 128, 6, 6) * torch.tensor([0., 1.])[
    torch.arange(128) // 64, None, None]], ids=['all-zero image', 'dead head'])
@pytest.mark.parametrize('training', [False, True])
def test_zero_keys_give_finite_outputs_and_gradients(image, training):
    layers = chain(init_scale=1.).train(training)
    image = image.clone().requires_grad_()
    y = run(layers, image)
    y.square().sum().backward()
    assert y.isfinite().all() and image.grad.isfinite().all() and image.grad.abs().max() < 1e6
    for name, parameter in layers.named_parameters():
        assert parameter.grad.isfinite().all(), name


def skip_unless_cpu_can(dtype):
    try:
        F.conv2d(torch.rand(1, 1, 3, 3, dtype=dtype), torch.rand(1, 1, 3, 3, dtype=dtype))
        F.batch_norm(torch.rand(2, 1, 3, 3, dtype=dtype), None, None, training=True)
    except RuntimeError as error:
        pytest.skip(f'this PyTorch has no {dtype} on the CPU: {error}')


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_with_scores_that_overflow(dtype):
    skip_unless_cpu_can(dtype)
    layers = chain(dtype).train()
    image = (torch.rand(2, 128, 6, 6) * 3e4).to(dtype).requires_grad_()
    y = run(layers, image)
    y.float().mean().backward()
    assert y.dtype == dtype and y.isfinite().all() and image.grad.isfinite().all()
    for name, parameter in layers.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_autocast_agrees_with_float32(dtype):
    skip_unless_cpu_can(dtype)
    layers = chain(init_scale=1.).eval()
    image = torch.rand(2, 128, 8, 8)
    expected = run(layers, image)
    with torch.autocast('cpu', dtype):
        assert (image @ image).dtype == dtype
        y = run(layers, image)
        from_half = run(layers, image.to(dtype))
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(from_half.float(), expected, rtol=0.02, atol=0.05)


def test_autocast_trains():
    layers = chain(init_scale=1.).train()
    with torch.autocast('cpu', torch.bfloat16):
        loss = run(layers, torch.rand(2, 128, 8, 8)).square().mean()
    loss.backward()
    for name, parameter in layers.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name


def test_channels_last_in_channels_last_out():
    layers = chain(init_scale=1.).eval()
    image = torch.rand(2, 128, 8, 10)
    y = run(layers[:3], image.contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, run(layers[:3], image))


@pytest.mark.parametrize('size', [(7, 5), (1, 1), (2, 9)])
def test_odd_sizes(size):
    y = run(chain().train(), torch.rand(2, 128, *size))
    assert y.shape == (2, 256, -(-size[0] // 2), -(-size[1] // 2)) and y.isfinite().all()


def test_samples_and_passes_do_not_mix():
    layers = chain(init_scale=1.).eval()
    images = torch.rand(3, 128, 8, 8)
    together = run(layers, images)
    for image, y in zip(images, together):
        torch.testing.assert_close(run(layers, image[None])[0], y)
    assert torch.equal(run(layers, images), together)


@pytest.mark.parametrize('training', [True, False])
def test_memory_of_another_batch(training):
    layers = chain().train(training)
    x, memory = layers[0](torch.rand(4, 128, 4, 4))
    with pytest.raises(ValueError, match='memory is of 4 samples and x of 1: every pass .* with memory=None'):
        layers[1](x[:1], memory)


def test_drop_path_drops_whole_samples_in_training_only():
    torch.manual_seed(0)
    layer = KCLA(64, drop_path=0.25, init_scale=1.)
    layer.norm.eval()
    x = torch.rand(1, 64, 4, 4).expand(4000, -1, -1, -1)
    attention = (layer(x)[0] - x).detach()
    dropped = (attention == 0).flatten(1).all(1)
    assert abs(dropped.float().mean() - 0.25) < 0.03
    kept = attention[~dropped]
    layer.eval()
    torch.testing.assert_close(kept[0], (layer(x[:1])[0] - x[:1])[0] / 0.75)
    torch.testing.assert_close(kept, kept[:1].expand_as(kept))


def test_temperatures_are_log_uniform():
    layer = KCLA(256, temperatures=(0.5, 4.))
    torch.testing.assert_close(layer.log_temperature.exp(), torch.tensor([0.5, 1., 2., 4.]))
    assert 'log_temperature' not in layer.state_dict(), "constants are the config's affair"
    torch.testing.assert_close(KCLA(64).log_temperature.exp(), torch.tensor([0.7]))


def test_learnable_temperature_is_a_parameter_that_learns():
    layers = nn.ModuleList([KCLA(128, block, learnable_temperature=True, init_scale=1.) for block in range(2)])
    run(layers, torch.rand(2, 128, 4, 4)).square().sum().backward()
    assert layers[1].log_temperature.grad.abs().min() > 0
    assert 'log_temperature' in layers[1].state_dict()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_learnable_temperature_under_autocast(dtype):
    skip_unless_cpu_can(dtype)
    layers = chain(init_scale=1., learnable_temperature=True, drop_path=0)
    temperatures = [layer.log_temperature for layer in layers]
    image = 4 * torch.rand(4, 128, 8, 8)
    expected = torch.cat(torch.autograd.grad(run(layers, image).square().mean(), temperatures[1:]))
    with torch.autocast('cpu', dtype):
        loss = run(layers, image).square().mean()
    found = torch.cat(torch.autograd.grad(loss, temperatures[1:]))
    assert found.dtype == torch.float32 and expected.norm() > 1e-3
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_without_refresh_a_deep_stage_keeps_its_memory():
    layer = KCLA(128, 11, refresh=False).eval()
    assert not any(name.startswith('memory') for name, _ in layer.named_parameters())
    memory = DepthMemory(torch.rand(1, 128, 4, 4), torch.tensor([[1., 2.]]))
    x = torch.rand(1, 128, 4, 4)
    _, after = layer(x, memory)
    weight = 1 - torch.exp(memory.log_normaliser - after.log_normaliser).repeat_interleave(64, 1)[..., None, None]
    torch.testing.assert_close(after.mean, torch.lerp(memory.mean, x, weight))
    other = KCLA(256, 0, 128, refresh=False)
    assert other.memory_conv is not None, 'what the stages do is left alone'


def test_without_cross_stage_a_stage_starts_anew():
    layer = KCLA(256, 0, 128, stride=2, cross_stage=False).eval()
    assert not any(name.startswith('memory') for name, _ in layer.named_parameters())
    x = torch.rand(1, 256, 4, 4)
    _, earlier = KCLA(128).eval()(torch.rand(1, 128, 8, 8))
    assert torch.equal(layer(x, earlier)[0], layer(x)[0])


def test_recomputation_changes_nothing():
    images = torch.rand(4, 128, 8, 8)
    results = []
    for with_cp in (False, True):
        torch.manual_seed(0)
        layers = chain(init_scale=1., with_cp=with_cp).train()
        torch.manual_seed(1)
        run(layers, images).square().mean().backward()
        results.append({**{name: p.grad for name, p in layers.named_parameters()}, **dict(layers.named_buffers())})
    assert results[0].keys() == results[1].keys() and any('running_mean' in name for name in results[0])
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, msg=lambda m: f'{name}: {m}')


@pytest.mark.parametrize('options, message', [
    (dict(head_channels=48), 'head_channels=48 does not divide the 128 channels'),
    (dict(block=-1), 'block must be an integer of at least 0, got -1'),
    (dict(stride=0), 'stride must be an integer of at least 1, got 0'),
    (dict(head_channels=0), 'head_channels must be a positive integer, got 0'),
    (dict(head_channels=64.), 'head_channels must be a positive integer, got 64.0'),
    (dict(init_scale=-1), 'init_scale must be a positive number, got -1'),
    (dict(init_scale=0), 'init_scale must be a positive number, got 0'),
    (dict(init_scale='small'), "init_scale must be a positive number, got 'small'"),
    (dict(init_scale=math.nan), 'init_scale must be a positive number, got nan'),
    (dict(drop_path=1), r'drop_path must be a number in \[0, 1\), got 1'),
    (dict(drop_path=None), r'drop_path must be a number in \[0, 1\), got None'),
    (dict(temperatures=(0.7, -1)), r'temperatures must be two positive numbers, got \(0.7, -1\)'),
    (dict(temperatures=(0.7, )), 'temperatures must be two positive numbers'),
    (dict(temperatures=0.7), 'temperatures must be two positive numbers, got 0.7'),
    (dict(temperatures='ab'), 'temperatures must be two positive numbers'),
    (dict(norm_layer=lambda c: nn.BatchNorm2d(c, affine=False)), 'a normalisation with a learnable weight'),
])
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        KCLA(128, **options)


def test_create_layer_attention():
    class Twice(BaseLayerAttention):
        def __init__(self, *args, head_channels=8, drop_path=0., init_scale=1., with_cp=False, norm_layer, extra=0):
            super().__init__(*args, head_channels=head_channels, drop_path=drop_path, init_scale=init_scale,
                             with_cp=with_cp, norm_layer=norm_layer)
            self.extra = extra

        def attend(self, x, state, shortcut):
            return 2 * x, state

    assert isinstance(create_layer_attention('KCLA', 64), KCLA)
    assert create_layer_attention(Twice, 64, extra=3).extra == 3
    with pytest.raises(ValueError, match=r"attention type must be one of .*'KCLA', .*, got 'KLCA'"):
        create_layer_attention('KLCA', 64)
    with pytest.raises(TypeError, match="KCLA has no argument 'heads'; it accepts cross_stage, drop_path"):
        create_layer_attention('KCLA', 64, heads=4)
