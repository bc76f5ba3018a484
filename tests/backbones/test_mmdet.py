"""MMDetection's ResNets with layer attention."""
import threading

import pytest
import torch
from mmdet.models.backbones import RegNet, ResNet, TridentResNet
from mmdet.models.backbones.resnext import Bottleneck as ResNeXtBottleneck
from mmdet.registry import MODELS
from mmengine.logging import MMLogger
from torch import nn

import kcla_mm
from kcla_mm.backbones import LayerAttentionMixin
from kcla_mm.layer_attention import KCLA, BaseLayerAttention
from tests.backbones.networks import attentions, evaluating, randomised

IMAGE = torch.rand(2, 3, 96, 128)


def build(type='KCLAResNet', **kwargs):
    kwargs.setdefault('init_cfg', None)
    if 'RegNet' not in type:
        kwargs.setdefault('depth', 18)
    return MODELS.build(dict(type=type, **kwargs))


VARIANTS = {
    'R-18': dict(),
    'R-34': dict(depth=34),
    'R-50': dict(depth=50),
    'R-101, refreshed at block 11': dict(depth=101),
    'caffe style': dict(depth=50, style='caffe', norm_cfg=dict(type='BN', requires_grad=False)),
    'deep stem, avg_down': dict(depth=50, deep_stem=True, avg_down=True),
    'DCN': dict(depth=50, dcn=dict(type='DCN', deform_groups=1), stage_with_dcn=(False, True, True, True)),
    'plugins': dict(depth=50, plugins=[dict(cfg=dict(type='ContextBlock', ratio=1 / 16), position='after_conv3')]),
    'with_cp': dict(depth=50, with_cp=True),
    'GN': dict(norm_cfg=dict(type='GN', num_groups=32)),
    'dilated': dict(depth=50, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4)),
    'three stages': dict(depth=50, num_stages=3, strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2, )),
    'narrow': dict(base_channels=16, stem_channels=64, attention=dict(head_channels=16)),
    'attention.with_cp': dict(attention=dict(with_cp=True)),
    'V1d': dict(type='KCLAResNetV1d', depth=50),
    'ResNeXt': dict(type='KCLAResNeXt', depth=50, groups=32),
    'Res2Net': dict(type='KCLARes2Net', depth=50),
    'ResNeSt': dict(type='KCLAResNeSt', depth=50),
    'RegNet': dict(type='KCLARegNet', arch='regnetx_400mf'),
}


@pytest.mark.parametrize('config', VARIANTS.values(), ids=VARIANTS)
def test_variant_is_the_plain_network_plus_attention_and_all_of_it_trains(config):
    config = dict(config)
    network = build(**config, norm_eval=False)
    config.pop('attention', None)
    plain = build(**{**config, 'type': config.pop('type', 'KCLAResNet')[4:]}, norm_eval=False)
    plain_names = list(plain.state_dict())
    assert [name for name in network.state_dict() if 'layer_attention' not in name] == plain_names

    network.init_weights()
    network.train()
    outputs = network(IMAGE)
    assert [y.shape for y in outputs] == [y.shape for y in plain(IMAGE)]
    sum(y.square().mean() for y in outputs).backward()
    untrained = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    assert not untrained
    for name, attention in attentions(network).items():
        assert attention.norm.weight.requires_grad, f'the norm of {name} is new: it has to learn'


def test_without_attention_it_is_the_plain_network():
    torch.manual_seed(0)
    plain = randomised(build('ResNet'))
    network = build(attention=None)
    network.load_state_dict(plain.state_dict(), strict=True)
    plain.eval(), network.eval()
    for expected, y in zip(plain(IMAGE), network(IMAGE)):
        assert torch.equal(y, expected)


@pytest.mark.parametrize('depth', [18, 50, 101])
def test_plain_weights_give_plain_features(depth):
    torch.manual_seed(0)
    plain = randomised(build('ResNet', depth=depth))
    network = build(depth=depth)
    missing, unexpected = network.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all('layer_attention' in key for key in missing)
    plain.eval(), network.eval()
    with torch.no_grad():
        for expected, y in zip(plain(IMAGE), network(IMAGE)):
            assert 0 < (y - expected).norm() / expected.norm() < 1e-2


def log_of(action, capsys):
    MMLogger.get_instance('test_mmdet')
    capsys.readouterr()
    action()
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_the_log_says_when_a_checkpoint_has_no_attention(tmp_path, capsys):
    checkpoint = tmp_path / 'plain.pth'
    torch.save(build('ResNet').state_dict(), checkpoint)
    network = build(init_cfg=dict(type='Pretrained', checkpoint=str(checkpoint)))
    log = log_of(network.init_weights, capsys)
    assert 'no layer attention: that of KCLAResNet starts at init_scale=0.001, near the plain network' in log
    strong = build(attention=dict(init_scale=1.))
    log = log_of(lambda: strong.load_state_dict(torch.load(checkpoint), strict=False), capsys)
    assert 'starts at init_scale=1.0, far from the plain network' in log
    assert torch.equal(network.conv1.weight, torch.load(checkpoint)['conv1.weight'])
    for attention in attentions(network).values():
        assert (attention.norm.weight == 1e-3).all()

    for name, value in network.state_dict().items():
        if name.endswith('norm.weight'):
            value.fill_(0.5)
    torch.save({'state_dict': {f'backbone.{k}': v for k, v in network.state_dict().items()}}, checkpoint)
    pretrained = build(init_cfg=dict(type='Pretrained', checkpoint=str(checkpoint), prefix='backbone.'))
    assert 'layer attention' not in log_of(pretrained.init_weights, capsys)
    for attention in attentions(pretrained).values():
        assert (attention.norm.weight == 0.5).all()


def test_the_same_seed_starts_the_same_plain_network():
    def draw(type):
        torch.manual_seed(3)
        network = build(type, depth=50)
        network.init_weights()
        return network.state_dict(), torch.rand(3)

    (plain, after_plain), (network, after) = draw('ResNet'), draw('KCLAResNet')
    assert all(torch.equal(network[name], value) for name, value in plain.items())
    assert torch.equal(after, after_plain), 'what is drawn next, such as a head, starts the same too'
    values = [v for name, v in network.items() if name.endswith('layer_attention.value')]
    assert all(a.shape != b.shape or not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])


def test_frozen_stages_freeze_their_attention():
    network = build(frozen_stages=2, norm_eval=False)
    network.train()
    for name, attention in attentions(network).items():
        frozen = name.startswith(('layer1', 'layer2'))
        assert attention.training != frozen and attention.norm.training != frozen
        assert all(p.requires_grad != frozen for p in attention.parameters()), name
    sum(y.square().mean() for y in network(IMAGE)).backward()
    assert all((p.grad is not None) == p.requires_grad for p in network.parameters())


def test_norm_eval_covers_the_attention():
    network = build(norm_eval=True)
    network.train()
    for attention in attentions(network).values():
        assert attention.training and not attention.norm.training
    assert not attentions(network)['layer2.0.layer_attention'].memory_norm.training


def test_norms_are_of_the_backbones_kind_unless_told():
    assert all(isinstance(a.norm, nn.SyncBatchNorm)
               for a in attentions(build(norm_cfg=dict(type='SyncBN'))).values())
    network = build(attention=dict(norm_cfg=dict(type='GN', num_groups=8)))
    assert all(isinstance(a.norm, nn.GroupNorm) for a in attentions(network).values())
    assert isinstance(network.bn1, nn.BatchNorm2d)


def test_a_stage_called_by_hand_is_an_error():
    network = evaluating(build())
    network(IMAGE)
    with pytest.raises(RuntimeError, match='a stage of KCLAResNet was called by hand, which would go round layer'):
        network.layer1(torch.rand(1, 64, 8, 8))
    plain = build(attention=None)
    assert plain.layer1(torch.rand(1, 64, 8, 8)).shape == (1, 64, 8, 8)


def test_passes_samples_and_threads_do_not_mix():
    network = evaluating(randomised(build(attention=dict(init_scale=1.))))
    images = torch.rand(4, 3, 64, 64)
    with torch.no_grad():
        expected = [network(image[None])[-1] for image in images]
        torch.testing.assert_close(network(images)[-1], torch.cat(expected), rtol=1e-4, atol=1e-4)
        with pytest.raises(RuntimeError):
            network(torch.rand(1, 4, 64, 64))  # one channel too many: fails within the pass
        with pytest.raises(RuntimeError, match='by hand'):
            network.layer1(torch.rand(1, 64, 8, 8))
        results = [None] * len(images)

        def work(index):
            with torch.no_grad():
                for _ in range(5):
                    results[index] = network(images[index][None])[-1]

        threads = [threading.Thread(target=work, args=(index, )) for index in range(len(images))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    torch.testing.assert_close(torch.cat(results), torch.cat(expected))


def test_channels_last_and_bfloat16_autocast():
    network = randomised(build(attention=dict(init_scale=1.))).to(memory_format=torch.channels_last)
    network.train()
    image = IMAGE.contiguous(memory_format=torch.channels_last)
    with torch.autocast('cpu', torch.bfloat16):
        outputs = network(image)
    assert all(y.is_contiguous(memory_format=torch.channels_last) and y.isfinite().all() for y in outputs)
    sum(y.float().square().mean() for y in outputs).backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize('arch, head_channels', [('regnetx_400mf', 32), ('regnetx_3.2gf', 48), ('regnetx_4.0gf', 40),
                                                 ('regnetx_12gf', 56)])
def test_regnet_takes_the_widest_heads_that_fit(arch, head_channels):
    network = evaluating(build('KCLARegNet', arch=arch))
    assert {a.head_channels for a in attentions(network).values()} == {head_channels}
    assert network(torch.rand(1, 3, 32, 32))[-1].shape[1] == network.stage_widths[-1]


def test_regnet_leaves_resnext_whole_when_it_fails():
    with pytest.raises(ValueError, match='head_channels=64 does not divide the 32 channels'):
        build('KCLARegNet', arch='regnetx_400mf', attention=dict(head_channels=64))
    assert ResNeXtBottleneck.expansion == 4


class AddShortcut(BaseLayerAttention):
    """Adds the block's identity branch to its output once more."""
    needs_shortcut = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, head_channels=1, drop_path=0., init_scale=1., with_cp=False, **kwargs)

    def attend(self, x, state, shortcut):
        return x + shortcut, state


@pytest.mark.parametrize('depth', [18, 50])
@pytest.mark.parametrize('with_cp', [False, True])
def test_an_attention_that_needs_the_shortcut_gets_it_computed_once(depth, with_cp):
    torch.manual_seed(0)
    network = build(depth=depth, with_cp=with_cp, norm_eval=False, attention=dict(type=AddShortcut))
    network = randomised(network).double()
    calls = []
    for module in network.modules():
        if getattr(module, 'downsample', None) is not None:
            module.downsample.register_forward_hook(lambda *_: calls.append(1))
    network.eval()
    image = IMAGE.double().requires_grad_()
    y = network(image)[-1]
    assert len(calls) == (3 if depth == 18 else 4)
    y.sum().backward()

    x = image.detach().requires_grad_()
    expected = network.maxpool(network.relu(network.bn1(network.conv1(x))))
    for name in network.res_layers:
        for block in getattr(network, name):
            block.with_cp = False
            shortcut = expected if block.downsample is None else block.downsample(expected)
            expected = block(expected) + shortcut
    torch.testing.assert_close(y, expected)
    expected.sum().backward()
    torch.testing.assert_close(image.grad, x.grad)


def test_ones_own_resnet():
    class MyResNet(ResNet):
        def __init__(self, times=2, **kwargs):
            super().__init__(**kwargs)
            self.times = times

        def forward(self, x):
            return [self.times * y for y in super().forward(x)]

    class MyNet(LayerAttentionMixin, MyResNet):
        pass

    network = evaluating(MyNet(depth=18, times=3, init_cfg=None))
    reference = evaluating(build())
    reference.load_state_dict(network.state_dict())
    for y, expected in zip(network(IMAGE), reference(IMAGE)):
        torch.testing.assert_close(y, 3 * expected)
    with pytest.raises(TypeError, match=r"argument 'tims'; MyNet accepts attention, .*depth, .*times"):
        MyNet(depth=18, tims=3)

    with pytest.raises(TypeError, match=r'before the network: class Swapped\(LayerAttentionMixin, MyResNet\)'):
        class Swapped(MyResNet, LayerAttentionMixin):
            pass

    class NoStages(LayerAttentionMixin, nn.Module):
        pass

    with pytest.raises(TypeError, match='NoStages does not build its stages with make_res_layer'):
        NoStages()

    class MyTrident(LayerAttentionMixin, TridentResNet):
        pass

    with pytest.raises(TypeError, match='MyTrident does not build its stages with make_res_layer'):
        MyTrident(depth=50, num_branch=3, test_branch_idx=1, trident_dilations=(1, 2, 3), num_stages=3,
                  strides=(1, 2, 2), dilations=(1, 1, 1), out_indices=(2, ))


@pytest.mark.parametrize('attention, error, message', [
    (dict(type='KLCA'), ValueError, r"attention type must be one of .*'KCLA', .*, got 'KLCA'"),
    (dict(type=nn.Conv2d), ValueError, 'attention type must be one of'),
    (dict(heads=2), TypeError, "KCLA has no argument 'heads'; it accepts cross_stage, drop_path"),
    (dict(channels=2), TypeError, "KCLA has no argument 'channels'; it accepts"),
    (dict(init_scale=-1.), ValueError, 'init_scale must be a positive number, got -1.0'),
    (dict(head_channels=48), ValueError, 'head_channels=48 does not divide the 64 channels of a stage'),
    ('KCLA', TypeError, "attention must be None or a dict such as dict.type='KCLA'., got 'KCLA'"),
])
def test_bad_attention(attention, error, message):
    with pytest.raises(error, match=message):
        build(attention=attention)


def test_the_default_attention_is_kcla():
    layers = attentions(build(depth=50))
    assert len(layers) == 16 and all(type(layer) is KCLA for layer in layers.values())
    assert {layer.drop_path for layer in attentions(build(attention=dict(drop_path=0.1))).values()} == {0.1}
    assert kcla_mm.backbones.LayerAttentionMixin is LayerAttentionMixin


def test_regnet_is_a_regnet():
    assert isinstance(build('KCLARegNet', arch='regnetx_400mf'), RegNet)
