"""Every layer attention in a backbone."""
import copy

import pytest
import torch
from mmdet.registry import MODELS

import kcla_mm  # noqa: F401
from kcla_mm.layer_attention import LAYER_ATTENTIONS, BaseLayerAttention
from tests.backbones.networks import randomised

every_type = pytest.mark.parametrize('type', LAYER_ATTENTIONS)
IMAGE = torch.rand(2, 3, 64, 96)


def build(type=None, **options):
    backbone = dict(type='ResNet') if type is None else dict(type='KCLAResNet', attention=dict(type=type, **options))
    return MODELS.build(dict(depth=18, norm_eval=False, init_cfg=None, **backbone))


def attentions(network):
    return [m for m in network.modules() if isinstance(m, BaseLayerAttention)]


@every_type
def test_all_of_it_trains_a_step(type):
    network = build(type, init_scale=1., drop_path=0.)
    network.init_weights()
    network.train()
    assert {m.__class__.__name__ for m in attentions(network)} == {type}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    before = copy.deepcopy(network.state_dict())
    sum(y.square().mean() for y in network(IMAGE)).backward()
    assert not [name for name, p in network.named_parameters() if p.grad is None]
    optimizer.step()
    after = network.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    name = 'layer1.0.layer_attention.norm.weight'
    assert not torch.equal(after[name], before[name])


@every_type
def test_plain_weights_give_plain_features(type):
    torch.manual_seed(0)
    plain = randomised(build())
    network = build(type)
    missing, unexpected = network.load_state_dict(plain.state_dict(), strict=False)
    assert missing and not unexpected and all('layer_attention' in key for key in missing)
    plain.eval(), network.eval()
    with torch.no_grad():
        for expected, y in zip(plain(IMAGE), network(IMAGE)):
            # Linear attention has no normaliser: its BatchNorm still has to learn the size of what it is given.
            assert 0 < (y - expected).norm() / expected.norm() < (0.1 if type == 'LinearLayerAttention' else 1e-2)


@every_type
def test_the_same_seed_starts_the_same_plain_network(type):
    def draw(type):
        torch.manual_seed(3)
        network = build(type)
        drawn = copy.deepcopy(network.state_dict())
        network.init_cfg = [dict(type='Kaiming', layer=['Conv2d', 'Linear', 'Conv1d']),
                            dict(type='Constant', val=1, layer=['_BatchNorm', 'GroupNorm'])]
        network.init_weights()
        return network.state_dict(), drawn

    (plain, _), (network, drawn) = draw(None), draw(type)
    assert all(torch.equal(network[name], value) for name, value in plain.items())
    own = [name for name in network if 'layer_attention' in name]
    assert own and all(torch.equal(network[name], drawn[name]) for name in own), 'initialisers of the network reset it'


@every_type
def test_a_stage_starts_anew_but_for_kclas_memory(type):
    """The third stage knows of the second only in KCLA: its attention gives the same without the state of before."""
    network = build(type, init_scale=1.)
    network.eval()
    first = network.layer3[0].layer_attention
    calls = []
    first.register_forward_hook(lambda module, args, outputs: calls.append((args, outputs)))
    with torch.no_grad():
        network(IMAGE)
        ((x, state, shortcut), (y, _)), = calls
        alone, _ = first(x, None, shortcut)
    assert torch.equal(alone, y) == (type != 'KCLA') and (state is None) == (type == 'MRLALight')


@every_type
def test_samples_do_not_mix(type):
    torch.manual_seed(0)
    network = randomised(build(type, init_scale=0.1))
    network.eval()
    with torch.no_grad():
        together = network(IMAGE)[-1]
        for image, y in zip(IMAGE, together):
            torch.testing.assert_close(network(image[None])[-1][0], y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('type', ['LayerAttention', 'MRLABase', 'MRLALight', 'DLALight'])
def test_recomputation_of_blocks_and_attention_changes_nothing(type):
    gradients = []
    for with_cp in (False, True):
        torch.manual_seed(0)
        network = build(type, with_cp=with_cp).double()
        for block in (block for name in network.res_layers for block in getattr(network, name)):
            block.with_cp = with_cp
        network.train()
        sum(y.square().mean() for y in network(IMAGE[..., :64].double())).backward()
        gradients.append({name: p.grad for name, p in network.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=lambda m: f'{name}: {m}')


def test_dla_shares_a_unit_in_each_stage():
    network = build('DLALight')
    units = [name for name in network.state_dict() if name.endswith('.layer_attention.unit.value')]
    assert units == [f'layer{stage}.0.layer_attention.unit.value' for stage in (1, 2, 3, 4)]

    copied = copy.deepcopy(network)
    read = []
    for owner, of in ((network, 'original'), (copied, 'copy')):
        owner.layer2[0].layer_attention.unit.register_forward_hook(lambda *_, of=of: read.append(of))
    copied.eval()
    copied(IMAGE)
    assert read == ['copy'] * 2 * len(copied.layer2), 'x and shortcut of each block, by the unit of the same network'
