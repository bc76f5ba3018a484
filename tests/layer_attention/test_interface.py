"""What every layer attention promises, alone in plain PyTorch."""
import copy
import io

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kcla_mm.layer_attention import LAYER_ATTENTIONS, DLALight, create_layer_attention
from tests.layer_attention.test_kcla import skip_unless_cpu_can

every_type = pytest.mark.parametrize('type', LAYER_ATTENTIONS)


def chain(type, **options):
    """Three blocks of 128 channels, then two of 256."""
    places = [(128, 0, None), (128, 1, None), (128, 2, None), (256, 0, 128), (256, 1, 128)]
    return nn.ModuleList([create_layer_attention(type, *place, 2, **options) for place in places])


def run(layers, x):
    """Feeds the layers by each other; a strided slice stands for the blocks of the second stage."""
    state = None
    for layer in layers:
        if x.shape[1] != layer.channels:
            x = torch.cat([x, x], 1)[:, :, ::2, ::2]
        x, state = layer(x, state, x.flip(1) if layer.needs_shortcut else None)
    return x


def difference(y, expected):
    return (y - expected).float().norm() / expected.float().norm()


@every_type
def test_defaults_start_near_the_plain_network_and_every_parameter_trains(type):
    layers = chain(type)
    assert all(layer.drop_path == 0.2 and (layer.norm.weight == 1e-3).all() for layer in layers)
    x = torch.rand(64, 128, 7, 5)  # some of so many samples are not dropped
    y, _ = layers[0](x, None, x)
    assert 0 < (y - x).abs().max() < 0.02
    y = run(layers, x)
    assert y.shape == (64, 256, 4, 3)
    y.square().sum().backward()
    assert not [name for name, parameter in layers.named_parameters() if parameter.grad is None]


@every_type
@pytest.mark.parametrize('training', [False, True])
def test_zeros_give_finite_outputs_and_gradients(type, training):
    layers = chain(type, init_scale=1.).train(training)
    image = torch.zeros(2, 128, 6, 6, requires_grad=True)
    y = run(layers, image)
    y.sum().backward()
    assert y.isfinite().all() and image.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in layers.parameters())


@every_type
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(type, dtype):
    skip_unless_cpu_can(dtype)
    layers = chain(type).to(dtype).train()
    # Products of queries and keys overflow at 1000. Linear attention multiplies the maps with them.
    scale = 3 if type == 'LinearLayerAttention' else 1000
    image = (torch.rand(2, 128, 6, 6) * scale).to(dtype).requires_grad_()
    y = run(layers, image)
    y.float().mean().backward()
    assert y.dtype == dtype and y.isfinite().all() and image.grad.isfinite().all()
    for name, parameter in layers.named_parameters():
        assert parameter.grad.isfinite().all(), name


@every_type
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_autocast_agrees_with_float32(type, dtype):
    skip_unless_cpu_can(dtype)
    layers = chain(type, init_scale=0.1).eval()
    image = torch.rand(2, 128, 8, 8)
    expected = run(layers, image)
    with torch.autocast('cpu', dtype):
        y, from_half = run(layers, image), run(layers, image.to(dtype))
    assert from_half.dtype == dtype
    assert difference(y, expected) < 0.02 and difference(from_half, expected) < 0.02


@every_type
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_autocast_trains_where_products_of_queries_and_keys_overflow(type, dtype):
    skip_unless_cpu_can(dtype)
    layers = chain(type).train()
    with torch.autocast('cpu', dtype):
        y = run(layers, torch.rand(2, 128, 6, 6) * 1000)
    y.float().mean().backward()
    assert y.isfinite().all()
    for name, parameter in layers.named_parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all(), name


@every_type
def test_samples_do_not_mix(type):
    layers = chain(type, init_scale=1.).eval()
    images = torch.randn(3, 128, 8, 8)
    for image, y in zip(images, run(layers, images)):
        assert difference(run(layers, image[None])[0], y) < 1e-5


@every_type
def test_channels_last_in_channels_last_out(type):
    layers = chain(type, init_scale=1.).eval()[:3]
    image = torch.rand(2, 128, 8, 10)
    y = run(layers, image.contiguous(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert difference(y, run(layers, image)) < 1e-5


@every_type
def test_recomputation_changes_nothing(type):
    images = torch.rand(4, 128, 8, 8)
    results = []
    for with_cp in (False, True):
        torch.manual_seed(0)
        layers = chain(type, with_cp=with_cp).train()
        run(layers, images).square().mean().backward()
        results.append({**{name: p.grad for name, p in layers.named_parameters()}, **dict(layers.named_buffers())})
    assert results[0].keys() == results[1].keys() and any('running_mean' in name for name in results[0])
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, msg=lambda m: f'{name}: {m}')


@every_type
def test_copies_are_whole_and_independent(type):
    layers = chain(type, init_scale=1.).eval()
    x = torch.randn(1, 128, 4, 4)
    expected = run(layers, x)
    buffer = io.BytesIO()
    torch.save(layers, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layers), torch.load(buffer, weights_only=False)):
        assert torch.equal(run(other, x), expected)
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        assert torch.equal(run(layers, x), expected) and not torch.equal(run(other, x), expected)


class MapElementsRead(TorchDispatchMode):
    """Counts the elements of the 4-d tensors that operations read: proportional to their multiply-adds on maps."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += sum(arg.numel() for arg in args if torch.is_tensor(arg) and arg.ndim == 4)
        return func(*args, **(kwargs or {}))


def elements(state):
    """Elements of the tensors that are carried from block to block."""
    if torch.is_tensor(state):
        return state.numel()
    return sum(map(elements, state)) if isinstance(state, tuple) else 0


@pytest.mark.parametrize('type, maps, grows', [
    ('KCLA', 1, False), ('LayerAttention', 1, True), ('LinearLayerAttention', 1, True), ('MRLABase', 1, True),
    ('MRLALight', 0, False), ('DLALight', 0, False)])
def test_what_depth_costs(type, maps, grows):
    """The state either has a constant size, or grows by a map a block, and what a block reads of it likewise."""
    x = torch.rand(1, 64, 32, 32)
    state, carried, read = None, [], []
    with torch.no_grad():
        for block in range(8):
            layer = create_layer_attention(type, 64, block).eval()
            with MapElementsRead() as counter:
                _, state = layer(x, state, x)
            carried.append(elements(state) / x.numel())
            read.append(counter.count / x.numel())
    more_read = [after - before for before, after in zip(read[1:], read[2:])]
    if grows:
        assert carried == pytest.approx([maps * (block + 1) for block in range(8)], rel=0.01)
        assert more_read == pytest.approx([more_read[0]] * 6) and more_read[0] >= 1
    else:
        assert carried == pytest.approx([maps] * 8, abs=0.01)
        assert more_read == [0] * 6


def test_the_shortcut_is_needed():
    x = torch.rand(1, 64, 4, 4)
    for shortcut, got in ((None, 'None'), (x[:, :32], r'\(1, 32, 4, 4\)')):
        with pytest.raises(ValueError, match=rf'MRLALight needs shortcut.* of x, \(1, 64, 4, 4\); got {got}'):
            create_layer_attention('MRLALight', 64)(x, None, shortcut)


def test_the_sharing_unit_is_that_of_the_stages_first_block():
    layers = chain('DLALight')
    assert {name.split('.')[0] for name in layers.state_dict() if '.unit.' in name} == {'0', '3'}
    x = torch.rand(1, 64, 4, 4)
    with pytest.raises(ValueError, match='DLALight of block 1 needs the state that the block before it returned'):
        DLALight(64, block=1)(x, None, x)
