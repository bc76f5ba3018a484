"""The read-out's own passes, forward and backward, against plain operations and autograd's."""
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from kcla_mm.layer_attention import KCLA, kcla
from kcla_mm.layer_attention.read_out import ReadOut


def chain(**options):
    return nn.ModuleList([KCLA(128, 0, **options), KCLA(128, 1, **options), KCLA(128, 2, **options),
                          KCLA(256, 0, 128, 2, **options), KCLA(256, 1, **options)])


def run(layers, x):
    state, outputs = None, []
    for layer in layers:
        if x.shape[1] != layer.channels:
            x = torch.cat([x, x], 1)[:, :, ::2, ::2]
        x, state = layer(x.relu(), state)
        outputs += [x, state.mean]
    return outputs


def results(layers, image, weights):
    """Outputs, gradients and statistics of a pass whose loss reads every output and every memory."""
    image = image.clone().requires_grad_()
    outputs = run(layers, image)
    sum((output * weight).sum() for output, weight in zip(outputs, weights)).backward()
    return dict(enumerate(outputs), image=image.grad, **{f'{name}.grad': p.grad for name, p in layers.named_parameters()},
                **dict(layers.named_buffers()))


@pytest.mark.parametrize('memory_format', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('statistics', ['batch', 'running'])
@pytest.mark.parametrize('with_cp', [False, True])
def test_outputs_gradients_and_statistics_are_those_of_plain_operations(monkeypatch, memory_format, statistics, with_cp):
    image = torch.randn(3, 128, 7, 6, dtype=torch.double).contiguous(memory_format=memory_format)
    layers = chain(init_scale=1., with_cp=with_cp, learnable_temperature=True).double().train()
    for layer in layers:
        nn.init.normal_(layer.norm.weight)  # of both signs
        nn.init.normal_(layer.norm.bias)
        layer.norm.running_mean.normal_()
        if statistics == 'running':
            layer.norm.eval()
    weights = [torch.randn_like(output) for output in run(layers, image)]
    start, found = layers.state_dict(), []
    start = {name: value.clone() for name, value in start.items()}
    for lean in (True, False):
        if not lean:
            monkeypatch.setattr(kcla, 'is_lean', lambda norm, x: False)
        layers.load_state_dict(start)
        layers.zero_grad()
        torch.manual_seed(1)
        found.append(results(layers, image, weights))
        assert any(type(n.grad_fn).__name__ == 'ReadOutBackward' for n in found[-1].values()) == lean
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-9, atol=1e-9, msg=lambda m: f'{name}: {m}')


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('first', [True, False])
def test_gradients_by_finite_differences(training, first):
    norm = nn.BatchNorm2d(3).double().train(training)
    norm.running_mean.normal_()
    x, memory = torch.rand(2, 2, 3, 4, 3, dtype=torch.double)
    update, scale = torch.rand(2, 2, 3, dtype=torch.double)
    weight, norm_weight, norm_bias = torch.randn(3, 1, 3, 3), torch.randn(3), torch.randn(3)
    inputs = [None if first and i in (1, 2) else tensor.double().requires_grad_()
              for i, tensor in enumerate((x, memory, update, weight, scale, norm_weight, norm_bias))]
    for drop in (None, torch.tensor([[0.], [1.25]], dtype=torch.double)):
        assert torch.autograd.gradcheck(lambda *args: [
            output for output in ReadOut.apply(*args, drop, norm, ()) if output is not None], inputs)


def test_eval_mode_is_the_same_with_and_without_gradients():
    layers = chain(init_scale=1.).eval()
    for layer in layers:
        layer.norm.running_mean.normal_()
    image = torch.rand(2, 128, 7, 6)
    expected = run(layers, image)
    assert expected[-2].requires_grad
    with torch.no_grad():
        for memory_format in (torch.contiguous_format, torch.channels_last):
            for y, other in zip(run(layers, image.contiguous(memory_format=memory_format)), expected):
                torch.testing.assert_close(y, other, rtol=1e-4, atol=1e-5)


def test_maps_kept_for_the_backward_pass():
    """One a block, its memory; none with with_cp, which makes the memory of the blocks' outputs again."""
    x = [torch.rand(2, 64, 32, 32, requires_grad=True) for _ in range(4)]
    for with_cp, expected in ((False, 3), (True, 0)):
        layers = [KCLA(64, block, with_cp=with_cp) for block in range(4)]
        kept, state, held = {}, None, []

        def keep(tensor):
            if tensor.numel() == x[0].numel() and not any(tensor.data_ptr() == other.data_ptr() for other in x):
                kept[tensor.data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            for layer, output in zip(layers, x):  # a block keeps its output anyway, for its ReLU
                y, state = layer(output, state)
                held.append(y)
        assert len(kept) == expected


def test_one_value_a_channel_has_no_variance():
    with pytest.raises(ValueError, match='Expected more than 1 value per channel'):
        KCLA(64)(torch.rand(1, 64, 1, 1))


@pytest.mark.parametrize('norm_layer', [lambda c: nn.GroupNorm(8, c), lambda c: nn.BatchNorm2d(c, momentum=None),
                                        lambda c: nn.BatchNorm2d(c, track_running_stats=False)])
def test_other_normalisations_take_plain_operations(norm_layer):
    layers = chain(norm_layer=norm_layer, init_scale=1.)
    for training in (True, False):
        outputs = run(layers.train(training), torch.rand(2, 128, 8, 8))
        outputs[-2].sum().backward()
        assert outputs[-2].isfinite().all()
    if getattr(layers[0].norm, 'momentum', 0) is None:
        assert layers[0].norm.num_batches_tracked == 1
