"""torch.compile takes a whole backbone in one graph, which serves batches of any size."""
import pytest
import torch
from mmengine.registry import MODELS

from kcla_mm.backbones import FRAMEWORKS
from kcla_mm.layer_attention import LAYER_ATTENTIONS

TORCH_2_1 = torch.__version__.startswith('2.1.')
SMALL = dict(num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(0, 1))
NETWORKS = {
    'mmdet.KCLAResNet': dict(depth=18), 'mmdet.KCLAResNetV1d': dict(depth=18), 'mmdet.KCLAResNeXt': dict(depth=50),
    'mmdet.KCLARes2Net': dict(depth=50), 'mmdet.KCLAResNeSt': dict(depth=50),
    'mmseg.KCLAResNet': dict(depth=18), 'mmseg.KCLAResNetV1c': dict(depth=18), 'mmseg.KCLAResNetV1d': dict(depth=18),
    'mmseg.KCLAResNeXt': dict(depth=50), 'mmseg.KCLAResNeSt': dict(depth=50),
    'mmpretrain.KCLAResNet': dict(depth=18), 'mmpretrain.KCLAResNetV1c': dict(depth=18),
    'mmpretrain.KCLAResNetV1d': dict(depth=18), 'mmpretrain.KCLAResNeXt': dict(depth=50),
    'mmpretrain.KCLASEResNet': dict(depth=50)}
NETWORKS = {name: {**options, **SMALL} for name, options in NETWORKS.items()}
NETWORKS.update({'mmdet.KCLARegNet': dict(arch='regnetx_400mf'), 'mmseg.KCLAResNetUNet': {},
                 'mmpretrain.KCLAResNet_CIFAR': dict(depth=20)})


def build(name, **attention):
    if name.split('.')[0] not in FRAMEWORKS:
        pytest.skip(f'{name.split(".")[0]} is not installed')
    return MODELS.build(dict(type=name, init_cfg=None, **NETWORKS[name],
                             attention=dict(dict(type='KCLA', init_scale=1., drop_path=0.), **attention)))


def outputs(network, images):
    found = network(images)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def compiled(network):
    """The network in one graph for each mode, made for the batches of any size, without code being generated."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(network, fullgraph=True, dynamic=True, backend='eager')


def graphs():
    return torch._dynamo.utils.counters['stats']['unique_graphs']


@pytest.mark.parametrize('name', NETWORKS)
def test_one_graph_for_all_batch_sizes(name):
    network = build(name)
    network.eval()
    function = compiled(network)
    with torch.no_grad():
        for size in (2, 3, 5):
            images = torch.rand(size, 3, 64, 64)
            for y, expected in zip(outputs(function, images), outputs(network, images)):
                torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    if not TORCH_2_1:  # which makes more, though whole ones, too
        assert graphs() == 1


@pytest.mark.parametrize('type', LAYER_ATTENTIONS)
def test_training_step(type):
    if TORCH_2_1 and type == 'DLALight':
        pytest.skip('torch.compile of PyTorch 2.1 knows no module, such as the shared cell, within a tuple')
    network = build('mmdet.KCLAResNet', type=type)
    network.norm_eval = False
    network.train()
    images = torch.rand(2, 3, 64, 64)
    start = {name: buffer.clone() for name, buffer in network.named_buffers()}
    results = []
    for function in (network, compiled(network)):
        network.load_state_dict(start, strict=False)
        network.zero_grad()
        sum(y.square().mean() for y in outputs(function, images)).backward()
        results.append({**{name: p.grad.clone() for name, p in network.named_parameters()},
                        **{name: buffer.clone() for name, buffer in network.named_buffers()}})
    assert graphs() == 1
    assert any('layer_attention' in name for name in results[0])
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-3, atol=1e-4, msg=lambda m: f'{name}: {m}')
