"""The backbones compute what the published implementations compute, forward and backward."""
import re

import pytest
import torch
from mmdet.registry import MODELS

import kcla_mm  # noqa: F401
from tests.golden import golden

KCLA = dict(type='KCLA', drop_path=0)
NETWORKS = {
    'kcla_resnet50': dict(depth=50, attention=KCLA),
    'kcla_resnet101': dict(depth=101, attention=KCLA),
    'mrla_light_resnet50': dict(depth=50, attention=dict(type='MRLALight', drop_path=0)),
    'mrla_base_resnet50': dict(depth=50, deep_stem=True, attention=dict(type='MRLABase', drop_path=0)),
    'dla_light_resnet50': dict(depth=50, attention=dict(type='DLALight', drop_path=0)),
}
NAMES = {  # in turn
    r'^conv1\.(\d)\.': r'stem.\1.',
    r'^stages\.(\d)\.': lambda match: f'layer{int(match[1]) + 1}.',
    r'^(layer\d)\.layers\.': r'\1.',
    r'^(layer\d)\.attention\.(\d+)\.(layer_attention\.)?': r'\1.\2.layer_attention.',
    r'^(layer\d\.\d+)\.mrla\.': r'\1.layer_attention.',
    r'layer_attention\.bn_layer_attention\.|layer_attention\.bn_attention\.|bn_mrla\.': 'layer_attention.norm.',
    r'layer_attention\.mrla\.': 'layer_attention.',
    r'adjust_channel\.weight$': 'memory_conv', r'u_Wk\.weight$': 'memory_key', r'u_bn\.': 'memory_norm.',
    r'Wq\.weight$': 'query', r'Wk\.weight$': 'key', r'Wv\.weight$': 'value',
    r'head_att\.weight$': 'gate', r'lambda_t$': 'shortcut_weight',
    r'^(layer\d)\.lstm\.w_(.h)\.0\.seq\.(\d)\.':
        lambda match: f'{match[1]}.0.layer_attention.unit.{dict(ih="input", hh="hidden")[match[2]]}.'
                      f'{("reduce", None, "expand")[int(match[3])]}_',
    r'^(layer\d)\.extict\.weight$': r'\1.0.layer_attention.unit.value',
}


def our_name(key, deep_stem=False):
    if deep_stem and key.startswith('bn1.'):
        return key.replace('bn1', 'stem.7')
    for pattern, name in NAMES.items():
        key = re.sub(pattern, name, key)
    return key


@pytest.fixture(scope='module', params=NETWORKS)
def network(request, float64):
    name, config = request.param, NETWORKS[request.param]
    backbone = MODELS.build(dict(type='KCLAResNet', norm_eval=False, init_cfg=None, **config))
    unused = golden.spec(name)['unused_by_source']
    unused += [key.replace('.weight', end) for key in unused if key.endswith('u_bn.weight')
               for end in ('.running_mean', '.running_var', '.num_batches_tracked')]
    backbone.load_state_dict({our_name(key, backbone.deep_stem): value for key, value in
                              golden.state_dict(name).items() if key not in unused}, strict=True)
    source = golden.spec(name)['source_input']
    image = golden.image(source['seed'], source['shape'])
    return backbone, image, golden.expected(name)


def assert_same(actual, expected, what):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=lambda m: f'{what}: {m}')


def test_features_in_eval_mode(network):
    backbone, image, expected = network
    backbone.eval()
    with torch.no_grad():
        outputs = backbone(image)
    for stage, output in enumerate(outputs, 1):
        assert_same(output.sum(), expected[f'eval_stage{stage}_sum'], f'sum of stage {stage}')
        assert_same(output.norm(), expected[f'eval_stage{stage}_norm'], f'norm of stage {stage}')
        assert_same(output[0, :16, :2, :2], expected[f'eval_stage{stage}_corner'], f'corner of stage {stage}')


def test_gradients_in_train_mode(network):
    backbone, image, expected = network
    backbone.train()
    image.requires_grad_()
    loss = sum(output.square().mean() for output in backbone(image))
    loss.backward()
    assert_same(loss.detach(), expected['train_loss'], 'loss')
    assert_same(image.grad.norm(), expected['train_grad_x_norm'], 'gradient of the image')
    norms = {our_name(key.split('/', 1)[1], backbone.deep_stem): norm
             for key, norm in expected.items() if key.startswith('gradnorm/')}
    parameters = dict(backbone.named_parameters())
    assert norms.keys() == parameters.keys()
    for name, norm in norms.items():
        assert_same(parameters[name].grad.norm(), norm, f'gradient of {name}')
