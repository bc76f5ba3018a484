"""The backbones compute what the published implementation computes, forward and backward."""
import re

import pytest
import torch
from mmdet.registry import MODELS

import kcla_mm  # noqa: F401
from tests.golden import golden

PARTS = {'Wq.weight': 'query', 'Wk.weight': 'key', 'Wv.weight': 'value', 'head_att.weight': 'gate',
         'adjust_channel.weight': 'memory_conv', 'u_Wk.weight': 'memory_key'}


def our_name(key):
    key = re.sub(r'^(layer\d)\.layers\.', r'\1.', key)
    match = re.match(r'(layer\d\.\d+|layer\d)\.attention\.(\d+)\.(.+)', key)
    if not match:
        return key
    stage, block, part = match.groups()
    part = PARTS.get(part, part).replace('bn_attention.', 'norm.').replace('u_bn.', 'memory_norm.')
    return f'{stage}.{block}.layer_attention.{part}'


@pytest.fixture(scope='module', params=[50, 101])
def network(request, float64):
    name = f'kcla_resnet{request.param}'
    backbone = MODELS.build(dict(type='KCLAResNet', depth=request.param, norm_eval=False, init_cfg=None,
                                 attention=dict(type='KCLA', drop_path=0)))
    unused = golden.spec(name)['unused_by_source']
    unused += [key.replace('.weight', end) for key in unused if key.endswith('u_bn.weight')
               for end in ('.running_mean', '.running_var', '.num_batches_tracked')]
    backbone.load_state_dict({our_name(key): value for key, value in golden.state_dict(name).items()
                              if key not in unused}, strict=True)
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
    norms = {our_name(key.split('/', 1)[1]): norm for key, norm in expected.items() if key.startswith('gradnorm/')}
    parameters = dict(backbone.named_parameters())
    assert norms.keys() == parameters.keys()
    for name, norm in norms.items():
        assert_same(parameters[name].grad.norm(), norm, f'gradient of {name}')
