"""MMSegmentation's ResNets with layer attention, and the UNet encoder."""
import pytest
import torch

pytest.importorskip('mmseg.models')
from mmseg.registry import MODELS  # noqa: E402

from tests.backbones.networks import attentions, evaluating, randomised  # noqa: E402

IMAGE = torch.rand(2, 3, 64, 96)
DILATED = dict(strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4))


def build(type, **kwargs):
    return MODELS.build(dict(type=type, **kwargs))


def plain_weights(network):
    return {name: value for name, value in network.state_dict().items() if 'layer_attention' not in name}


def assert_all_trains(network):
    network.train()
    sum(y.square().mean() for y in network(IMAGE)).backward()
    assert all((p.grad is not None) == p.requires_grad for p in network.parameters())
    assert attentions(network)


VARIANTS = {
    'ResNet': dict(type='ResNet', depth=18),
    'V1c': dict(type='ResNetV1c', depth=18),
    'V1c, dilated': dict(type='ResNetV1c', depth=50, contract_dilation=True, **DILATED),
    'V1d, dilated, multi-grid': dict(type='ResNetV1d', depth=50, multi_grid=(1, 2, 4), **DILATED),
    'ResNeXt': dict(type='ResNeXt', depth=50, groups=32),
    'ResNeSt, dilated': dict(type='ResNeSt', depth=50, radix=2, stem_channels=64, **DILATED),
}


@pytest.mark.parametrize('config', VARIANTS.values(), ids=VARIANTS)
def test_variant_is_the_plain_network_plus_attention_and_all_of_it_trains(config):
    torch.manual_seed(0)
    plain = build(**config)
    plain.init_weights()
    torch.manual_seed(0)
    network = build(**{**config, 'type': 'KCLA' + config['type']})
    network.init_weights()
    assert list(plain_weights(network)) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(network.state_dict()[name], value), name
    assert [y.shape for y in network(IMAGE)] == [y.shape for y in plain(IMAGE)]
    assert_all_trains(network)


@pytest.mark.parametrize('name', ['ResNet', 'V1c, dilated'])
def test_plain_weights_give_plain_features(name):
    config = VARIANTS[name]
    torch.manual_seed(0)
    plain = evaluating(randomised(build(**config)))
    network = evaluating(build(**{**config, 'type': 'KCLA' + config['type']}))
    missing, unexpected = network.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all('layer_attention' in key for key in missing)
    with torch.no_grad():
        for expected, y in zip(plain(IMAGE), network(IMAGE)):
            assert 0 < (y - expected).norm() / expected.norm() < 1e-2


def test_frozen_stages_freeze_a_deep_stem_and_their_attention():
    network = build('KCLAResNetV1c', depth=18, frozen_stages=1)
    assert_all_trains(network)
    frozen = {name.split('.')[0] for name, p in network.named_parameters() if not p.requires_grad}
    assert frozen == {'stem', 'layer1'}
    for name, attention in attentions(network).items():
        assert attention.training != name.startswith('layer1')


def test_icnet_which_runs_the_stages_by_hand_says_so():
    def icnet(**backbone):
        return evaluating(build('ICNet', layer_channels=(128, 512), norm_cfg=dict(type='BN'),
                                backbone_cfg=dict(type='KCLAResNetV1c', depth=18, **backbone)))
    with pytest.raises(RuntimeError, match='a stage of KCLAResNetV1c was called by hand, which would go round layer '
                                           'attention: .* or build it with attention=None'):
        icnet()(IMAGE)
    assert len(icnet(attention=None)(IMAGE)) == 3


@pytest.mark.parametrize('size', [(64, 96), (45, 70), (33, 17)])
@pytest.mark.parametrize('attention', [dict(type='KCLA'), dict(gate=False), None])
def test_unet_encoder_halves_the_size_four_times(size, attention):
    features = evaluating(build('KCLAResNetUNet', attention=attention, in_channels=1))(torch.rand(2, 1, *size))
    expected = []
    for channels in 16, 32, 64, 128, 128:
        expected.append((2, channels, *size))
        size = [(length + 1) // 2 for length in size]
    assert [tuple(y.shape) for y in features] == expected


def test_unet_encoder_joins_attention_to_all_blocks_and_all_of_it_trains():
    network = build('KCLAResNetUNet')
    assert list(attentions(network)) == [f'layer{s}.{b}.layer_attention' for s in (1, 2, 3, 4) for b in (0, 1)]
    assert {a.head_channels for a in attentions(network).values()} == {16}
    assert [a.heads for a in attentions(network).values()] == [2, 2, 4, 4, 8, 8, 8, 8]
    assert_all_trains(network)
    wide = build('KCLAResNetUNet', attention=dict(head_channels=32))
    assert {a.head_channels for a in attentions(wide).values()} == {32}


def test_unet_encoder_starts_as_the_plain_one():
    def draw(attention):
        torch.manual_seed(3)
        network = build('KCLAResNetUNet', attention=attention)
        network.init_weights()
        return network, torch.rand(3)

    (plain, after_plain), (network, after) = draw(None), draw(dict(type='KCLA'))
    assert not attentions(plain) and list(plain.state_dict()) == list(plain_weights(network))
    for name, value in plain.state_dict().items():
        assert torch.equal(network.state_dict()[name], value), name
    assert torch.equal(after, after_plain), 'what is drawn next, such as the decoder, starts the same too'
    plain.eval(), network.eval()
    for expected, y in zip(plain(IMAGE), network(IMAGE)):
        assert (y - expected).norm() <= 1e-2 * expected.norm()


def features_with_another_memory(network, block):
    """The features where what a block's attention hands on, and nothing else, is changed."""
    def change(module, args, output):
        x, memory = output
        return x, memory._replace(mean=memory.mean + 1)

    handle = network.get_submodule(f'{block}.layer_attention').register_forward_hook(change)
    with torch.no_grad():
        features = network(IMAGE)
    handle.remove()
    return features


@pytest.mark.parametrize('block, changed', [('layer1.0', 1), ('layer1.1', 2), ('layer2.1', 3), ('layer3.0', 3),
                                            ('layer3.1', 4)])
def test_unet_encoder_carries_memory_within_and_between_stages(block, changed):
    torch.manual_seed(0)
    network = evaluating(randomised(build('KCLAResNetUNet', attention=dict(init_scale=1.))))
    with torch.no_grad():
        expected = network(IMAGE)
    differs = [not torch.equal(a, b) for a, b in zip(features_with_another_memory(network, block), expected)]
    assert differs == [False] * changed + [True] * (5 - changed)

    apart = evaluating(randomised(build('KCLAResNetUNet', attention=dict(init_scale=1., cross_stage=False))))
    with torch.no_grad():
        expected = apart(IMAGE)
    within = block.endswith('.0')
    assert within != all(torch.equal(a, b) for a, b in zip(features_with_another_memory(apart, block), expected))


@pytest.mark.parametrize('kwargs, message', [
    (dict(depth=50), 'KCLAResNetUNet always has depth=18, got 50: leave it out'),
    (dict(out_indices=(0, 1)), r'KCLAResNetUNet always has out_indices=\(0, 1, 2, 3\), got \(0, 1\): leave it out'),
    (dict(dept=50), "unexpected keyword argument 'dept'; KCLAResNetUNet accepts attention, "),
])
def test_unet_encoder_rejects_what_it_fixes_or_does_not_know(kwargs, message):
    with pytest.raises(TypeError, match=message):
        build('KCLAResNetUNet', **kwargs)
