"""MMPretrain's ResNets with layer attention."""
import pytest
import torch
from mmengine.logging import MMLogger
from torch import nn

pytest.importorskip('mmpretrain.models')
from mmpretrain.models.backbones import ResNet_CIFAR  # noqa: E402
from mmpretrain.registry import MODELS  # noqa: E402

from kcla_mm.backbones import LayerAttentionMixin  # noqa: E402
from kcla_mm.layer_attention import BaseLayerAttention  # noqa: E402
from tests.backbones.networks import attentions, evaluating, randomised  # noqa: E402

IMAGE = torch.rand(2, 3, 48, 64)
TYPES = 'KCLAResNet', 'KCLAResNetV1c', 'KCLAResNetV1d', 'KCLAResNeXt', 'KCLASEResNet', 'KCLAResNet_CIFAR'


@pytest.fixture(autouse=True, scope='module')
def quiet():
    """Without this, `init_weights` logs every parameter."""
    MMLogger.get_instance('test_mmpretrain', log_level='WARNING')


def build(type='KCLAResNet', **kwargs):
    smallest = dict(KCLAResNeXt=50, ResNeXt=50, KCLASEResNet=50, SEResNet=50, KCLAResNet_CIFAR=20)
    kwargs.setdefault('depth', smallest.get(type, 18))
    if kwargs['depth'] == 50:  # narrow, to be fast
        kwargs = dict(base_channels=16, stem_channels=16, **kwargs)
    return MODELS.build(dict(type=type, **kwargs))


def plain_twin(type='KCLAResNet', **kwargs):
    if type == 'KCLAResNet_CIFAR':  # MMPretrain has no such network
        return build(type, **{**kwargs, 'attention': None})
    kwargs.pop('attention', None)
    return build(type[len('KCLA'):], **kwargs)


VARIANTS = {
    'R-18': dict(),
    'R-50, all stages': dict(depth=50, out_indices=(0, 1, 2, 3)),
    'caffe style': dict(depth=50, style='caffe', norm_cfg=dict(type='BN', requires_grad=False)),
    'stochastic depth': dict(drop_path_rate=0.5),
    'with_cp': dict(depth=50, with_cp=True),
    'GN': dict(norm_cfg=dict(type='GN', num_groups=32)),
    'dilated': dict(strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4)),
    'two stages': dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(1, )),
    'narrow heads': dict(attention=dict(head_channels=16)),
    'V1c': dict(type='KCLAResNetV1c'),
    'V1d': dict(type='KCLAResNetV1d', depth=50),
    'ResNeXt': dict(type='KCLAResNeXt'),
    'SEResNet': dict(type='KCLASEResNet'),
    'CIFAR': dict(type='KCLAResNet_CIFAR'),
}


@pytest.mark.parametrize('config', VARIANTS.values(), ids=VARIANTS)
def test_variant_is_the_plain_network_plus_attention_and_all_of_it_trains(config):
    network, plain = build(**config), plain_twin(**config)
    assert [name for name in network.state_dict() if 'layer_attention' not in name] == list(plain.state_dict())
    assert len(attentions(network)) == sum(network.stage_blocks)

    network.init_weights()
    network.train()
    outputs = network(IMAGE)
    assert [y.shape for y in outputs] == [y.shape for y in plain(IMAGE)]
    sum(y.square().mean() for y in outputs).backward()
    assert not [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    for name, attention in attentions(network).items():
        assert attention.norm.weight.requires_grad, f'the norm of {name} is new: it has to learn'


@pytest.mark.parametrize('type', TYPES)
def test_the_same_seed_starts_the_same_plain_network(type):
    def draw(make):
        torch.manual_seed(3)
        network = make(type)
        network.init_weights()
        return network.state_dict(), torch.rand(3)

    (plain, after_plain), (network, after) = draw(plain_twin), draw(build)
    assert [name for name, value in plain.items() if not torch.equal(network[name], value)] == []
    assert torch.equal(after, after_plain), 'what is drawn next, such as a head, starts the same too'
    scales = [value for name, value in network.items() if name.endswith('layer_attention.norm.weight')]
    assert scales and all((scale == 1e-3).all() for scale in scales)


@pytest.mark.parametrize('type', TYPES)
def test_plain_weights_give_plain_features(type):
    torch.manual_seed(0)
    plain, network = randomised(plain_twin(type)), build(type)
    missing, unexpected = network.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all('layer_attention' in key for key in missing)
    with torch.no_grad():
        expected, y = evaluating(plain)(IMAGE)[-1], evaluating(network)(IMAGE)[-1]
    assert 0 < (y - expected).norm() / expected.norm() < 1e-2


def test_residuals_start_from_zero_and_attention_does_not():
    network = build(zero_init_residual=True, attention=dict(init_scale=1.))
    network.init_weights()
    for name in network.res_layers:
        for block in getattr(network, name):
            assert (block.norm2.weight == 0).all()
            assert (block.layer_attention.norm.weight == 1).all()


def test_frozen_stages_freeze_their_attention():
    network = build(frozen_stages=2)
    network.train()
    for name, attention in attentions(network).items():
        frozen = name.startswith(('layer1', 'layer2'))
        assert attention.training != frozen and attention.norm.training != frozen
        assert all(p.requires_grad != frozen for p in attention.parameters()), name
    network(IMAGE)[-1].square().mean().backward()
    assert all((p.grad is not None) == p.requires_grad for p in network.parameters())


@pytest.mark.parametrize('norm_eval', [False, True])
def test_norm_eval_covers_the_attention(norm_eval):
    network = build(norm_eval=norm_eval)
    network.train()
    for attention in attentions(network).values():
        assert attention.training and attention.norm.training != norm_eval
    assert attentions(network)['layer2.0.layer_attention'].memory_norm.training != norm_eval


@pytest.mark.parametrize('type', ['KCLAResNet', 'KCLASEResNet', 'KCLAResNet_CIFAR'])
def test_recomputation_changes_nothing(type):
    def run(**kwargs):
        torch.manual_seed(0)
        network = build(type, **kwargs)
        network.train()
        torch.manual_seed(1)
        image = IMAGE.clone().requires_grad_()
        y = network(image)[-1]
        y.sum().backward()
        return [y, image.grad] + [p.grad for p in network.parameters()]

    expected = run(attention=dict(init_scale=1.))
    for block, attention in ((True, False), (False, True)):
        recomputed = run(with_cp=block, attention=dict(init_scale=1., with_cp=attention))
        torch.testing.assert_close(recomputed, expected)


def test_a_stage_called_by_hand_is_an_error():
    network = build()
    with pytest.raises(RuntimeError, match='a stage of KCLAResNet was called by hand'):
        network.layer1(torch.rand(1, 64, 8, 8))


def test_an_unknown_argument_lists_the_known():
    with pytest.raises(TypeError, match=r"argument 'drop_path'; KCLAResNeXt accepts attention, .*drop_path_rate, "
                                        r'.*groups, .*width_per_group'):
        build('KCLAResNeXt', drop_path=0.1)


class AddShortcut(BaseLayerAttention):
    """Adds the block's identity branch to its output once more."""
    needs_shortcut = True

    def __init__(self, *args, head_channels=1, **kwargs):
        super().__init__(*args, head_channels=head_channels, drop_path=0., init_scale=1., with_cp=False, **kwargs)

    def attend(self, x, state, shortcut):
        return x + shortcut, state


@pytest.mark.parametrize('type', ['KCLAResNetV1d', 'KCLASEResNet'])
@pytest.mark.parametrize('with_cp', [False, True])
def test_an_attention_that_needs_the_shortcut_gets_it(type, with_cp):
    torch.manual_seed(0)
    network = evaluating(randomised(build(type, with_cp=with_cp, attention=dict(type=AddShortcut))).double())
    stem = network.stem if network.deep_stem else nn.Sequential(network.conv1, network.bn1, network.relu)
    image = IMAGE.double().requires_grad_()
    y = network(image)[-1]
    y.sum().backward()

    x = image.detach().requires_grad_()
    expected = network.maxpool(stem(x))
    for name in network.res_layers:
        for block in getattr(network, name):
            block.with_cp = False
            shortcut = expected if block.downsample is None else block.downsample(expected)
            expected = block(expected) + shortcut
    torch.testing.assert_close(y, expected)
    expected.sum().backward()
    torch.testing.assert_close(image.grad, x.grad)


@pytest.mark.parametrize('depth, blocks', [(11, 1), (20, 2), (56, 6), (110, 12)])
def test_cifar_networks_are_those_of_he_et_al(depth, blocks):
    network = evaluating(build('KCLAResNet_CIFAR', depth=depth, out_indices=(0, 1, 2)))
    convolutions = [name for name, m in network.named_modules()
                    if isinstance(m, nn.Conv2d) and 'downsample' not in name]
    assert len(convolutions) + 1 == depth, 'the layers with weights, a classifier among them'
    assert [len(getattr(network, name)) for name in network.res_layers] == [blocks] * 3
    with torch.no_grad():
        shapes = [tuple(y.shape) for y in network(torch.rand(2, 3, 32, 32))]
    assert shapes == [(2, 64, 32, 32), (2, 128, 16, 16), (2, 256, 8, 8)]
    assert network.conv1.weight.shape == (16, 3, 3, 3)


def test_cifar_networks_give_their_last_stage_unless_told():
    network = build('KCLAResNet_CIFAR')
    assert [tuple(y.shape) for y in network(torch.rand(2, 3, 32, 32))] == [(2, 256, 8, 8)]
    wide = build('KCLAResNet_CIFAR', base_channels=32, in_channels=1)
    assert [tuple(y.shape) for y in wide(torch.rand(2, 1, 28, 28))] == [(2, 512, 7, 7)]


def test_cifar_heads_have_16_channels_unless_told():
    assert {layer.head_channels for layer in attentions(build('KCLAResNet_CIFAR')).values()} == {16}
    network = build('KCLAResNet_CIFAR', attention=dict(head_channels=32))
    assert {layer.head_channels for layer in attentions(network).values()} == {32}
    network = build('KCLAResNet_CIFAR', attention=dict(type='MRLALight'))
    assert {layer.head_channels for layer in attentions(network).values()} == {32}, 'its own default'


@pytest.mark.parametrize('depth, renewed', [(56, []), (110, ['layer1.11', 'layer2.11', 'layer3.11'])])
def test_deep_cifar_stages_renew_their_memory_at_block_11(depth, renewed):
    layers = attentions(build('KCLAResNet_CIFAR', depth=depth))
    names = [name[:-len('.layer_attention')] for name, layer in layers.items() if layer.memory_norm is not None]
    assert sorted(names) == sorted(['layer2.0', 'layer3.0', *renewed])


@pytest.mark.parametrize('depth', [2, 18, 50, -7, 20., '20', None])
def test_cifar_depths_and_stages_that_do_not_fit(depth):
    with pytest.raises(ValueError, match=rf'depth of KCLAResNet_CIFAR must be 9n \+ 2.* 20, 56 or 110, got {depth!r}'):
        build('KCLAResNet_CIFAR', depth=depth)
    with pytest.raises(ValueError, match='num_stages of KCLAResNet_CIFAR must be 3, got 4'):
        build('KCLAResNet_CIFAR', depth=101, num_stages=4, strides=(1, 2, 2, 2), dilations=(1, 1, 1, 1))


def test_the_wide_cifar_network_of_mmpretrain_can_have_it_too():
    class WideCIFAR(LayerAttentionMixin, ResNet_CIFAR):
        pass

    network = evaluating(WideCIFAR(depth=18))
    assert len(attentions(network)) == 8
    assert network(torch.rand(1, 3, 32, 32))[0].shape == (1, 512, 4, 4)
