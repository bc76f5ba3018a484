import os
import re
from argparse import Namespace

import pytest
import torch
from mmengine.runner import load_checkpoint

from kcla_mm.backbones.mmdet import KCLAResNet
from tests.golden.golden import expected, image, spec, state_dict

NORM = 'weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked'


def published(backbone):
    """The state dict of a backbone in the published code's names, and all that it has besides, by reason."""
    attention = {'query': 'Wq.weight', 'key': 'Wk.weight', 'value': 'Wv.weight', 'gate': 'head_att.weight',
                 'memory_conv': 'adjust_channel.weight', 'memory_key': 'u_Wk.weight',
                 **{f'norm.{name}': f'bn_attention.{name}' for name in NORM},
                 **{f'memory_norm.{name}': f'u_bn.{name}' for name in NORM}}
    source = {}
    for key, value in backbone.state_dict().items():
        stage, block, *rest = key.split('.')
        if not stage.startswith('layer'):
            source[key] = value
        elif rest[0] == 'layer_attention':
            source[f'{stage}.attention.{block}.{attention[".".join(rest[1:])]}'] = value
        else:
            source['.'.join([stage, 'layers', block, *rest])] = value
    constants = {re.sub('Wq.weight$', 'norm_d', key): torch.ones(4) for key in source if key.endswith('Wq.weight')}
    unused = {f'layer1.attention.0.{name}': torch.ones(1)
              for name in ('adjust_channel.weight', 'u_Wk.weight', *(f'u_bn.{name}' for name in NORM))}
    if backbone.depth > 50:
        unused['layer3.attention.11.adjust_channel.weight'] = torch.ones(1)
    classifier = {'fc.weight': torch.ones(10, backbone.feat_dim), 'fc.bias': torch.ones(10)}
    return source, {**constants, **unused, **classifier}


def draw(backbone):
    """Gives all entries of the state dict values of their own."""
    for value in backbone.state_dict().values():
        value.copy_(torch.randn(value.shape) if value.is_floating_point() else torch.tensor(7))
    return backbone


WRAPPERS = {
    'bare': lambda weights: weights,
    'training': lambda weights: dict(epoch=99, state_dict=weights, best_acc1=torch.tensor(77.), optimizer={}),
    'model': lambda weights: dict(model=weights, epoch=99),
    'DataParallel': lambda weights: dict(state_dict={f'module.{key}': value for key, value in weights.items()}),
}


@pytest.mark.parametrize('depth, wrapper', [(50, name) for name in WRAPPERS] + [(18, 'bare'), (101, 'training')])
def test_backbone_loads_what_was_converted(tool, monkeypatch, capsys, tmp_path, depth, wrapper):
    original = draw(KCLAResNet(depth))
    source, dropped = published(original)
    torch.save(WRAPPERS[wrapper]({**source, **dropped}), tmp_path / 'source.pth')
    run(tool, monkeypatch, tmp_path, 'source.pth', 'converted.pth')
    printed = capsys.readouterr().out
    assert re.findall(r'^dropped (\S+)', printed, re.M) == list(dropped)
    assert f"type='KCLAResNet', depth={depth}" in printed

    converted = torch.load(tmp_path / 'converted.pth', weights_only=True)['state_dict']
    KCLAResNet(depth).load_state_dict(converted, strict=True)
    assert all(torch.equal(converted[key], value) for key, value in original.state_dict().items())


def run(tool, monkeypatch, folder, *args):
    monkeypatch.chdir(folder)
    monkeypatch.setattr('sys.argv', ['convert_checkpoint.py', *args])
    tool('convert_checkpoint').main()


def test_config_that_is_printed_starts_from_the_weights(tool, monkeypatch, capsys, tmp_path):
    original = draw(KCLAResNet(18, attention=dict(type='KCLA', head_channels=32)))
    torch.save(published(original)[0], tmp_path / 'source.pth')
    run(tool, monkeypatch, tmp_path, 'source.pth', 'converted.pth')
    config = capsys.readouterr().out.partition('backbone=')[2]
    backbone = KCLAResNet(**{key: value for key, value in eval(config).items() if key != 'type'})
    backbone.init_weights()
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in backbone.state_dict().items())


@pytest.mark.parametrize('depth', [50, 101])
def test_names_of_the_published_code(tool, depth):
    """The names that the published code itself gives."""
    source = state_dict(f'kcla_resnet{depth}')
    backbone, converted, dropped = tool('convert_checkpoint').convert(source)
    assert backbone == dict(type='KCLAResNet', depth=depth)
    assert not KCLAResNet(depth).load_state_dict(converted, strict=False).missing_keys
    assert {key for key in dropped if 'running' not in key and 'num_batches' not in key} == \
        set(spec(f'kcla_resnet{depth}')['unused_by_source'])


@pytest.mark.parametrize('name, config', [
    ('mrla_light_resnet50', dict(attention=dict(type='MRLALight'))),
    ('mrla_base_resnet50', dict(deep_stem=True, attention=dict(type='MRLABase'))),
    ('dla_light_resnet50', dict(attention=dict(type='DLALight'))),
])
def test_mrla_and_dla(tool, monkeypatch, capsys, tmp_path, name, config):
    source = {**state_dict(name), 'fc.weight': torch.ones(1000, 2048), 'fc.bias': torch.ones(1000)}
    torch.save(dict(state_dict=source), tmp_path / 'source.pth')
    run(tool, monkeypatch, tmp_path, 'source.pth', 'converted.pth')
    printed = capsys.readouterr().out
    assert re.findall(r'^dropped (\S+)', printed, re.M) == ['fc.weight', 'fc.bias']
    backbone = eval(printed.partition('backbone=')[2])
    init_cfg = backbone.pop('init_cfg')
    assert backbone == dict(type='KCLAResNet', depth=50, **config)
    assert torch.load(tmp_path / 'converted.pth', weights_only=True)['meta'] == dict(backbone=backbone)

    del backbone['type']
    network = KCLAResNet(**backbone, init_cfg=init_cfg).double()
    network.init_weights()
    network.eval()
    with torch.no_grad():
        outputs = network(image(**spec(name)['source_input']))
    torch.testing.assert_close(torch.stack([y.norm() for y in outputs]), torch.stack(
        [expected(name)[f'eval_stage{stage}_norm'] for stage in (1, 2, 3, 4)]), rtol=1e-9, atol=0)


class Code:
    """An object that runs code when it is loaded: it makes the folder ``made``."""

    def __reduce__(self):
        return os.mkdir, ('made',)


def small():
    return published(KCLAResNet(18))[0]


def broken(**changes):
    weights = small()
    weights.update(changes)
    return {key: value for key, value in weights.items() if value is not None}


@pytest.mark.parametrize('content, message', [
    (lambda: dict(state_dict=small(), args=Namespace(lr=0.1)), 'holds argparse.Namespace besides weights'),
    (lambda: dict(state_dict=small(), code=Code()), r'holds \S*mkdir besides weights.*--unsafe-load'),
    (lambda: dict(epoch=3, weights=small()), 'no state dict, bare or under'),
    (lambda: [1, 2], 'no state dict, bare or under'),
    (lambda: {}, 'no state dict, bare or under'),
    (lambda: {1: torch.ones(1)}, 'no state dict, bare or under'),
    (lambda: KCLAResNet(18, attention=None).state_dict(), 'it has no layer attention'),
    (lambda: KCLAResNet(18).state_dict(), 'it has [0-9]+ unknown entries such as layer1.0.layer_attention.query'),
    (lambda: broken(**{'layer1.attention.0.Wo.weight': torch.ones(1)}), 'such as layer1.attention.0.Wo.weight'),
    (lambda: broken(**{'layer2.attention.1.Wq.weight': None}), 'Missing key.*layer2.1.layer_attention.query'),
    (lambda: broken(**{'layer2.attention.1.Wq.weight': torch.ones(1, 1, 9)}), 'size mismatch for layer2.1'),
    (lambda: broken(**{'layer2.layers.2.conv1.weight': torch.ones(1)}),
     r'no ResNet has stages of \[2, 3, 2, 2\] basic blocks'),
    (lambda: {key: value for key, value in small().items() if 'attention' not in key}, 'it has no layer attention'),
])
def test_unsuitable_files(mistake, tmp_path, content, message):
    torch.save(content(), tmp_path / 'source.pth')
    error = mistake('convert_checkpoint', 'source.pth', 'converted.pth', cwd=tmp_path)
    assert error.startswith('error: source.pth ') and re.search(message, error, re.S)
    assert os.listdir(tmp_path) == ['source.pth']


def test_override_for_a_file_that_runs_code(tool, monkeypatch, tmp_path):
    torch.save(dict(state_dict=small(), code=Code()), tmp_path / 'source.pth')
    run(tool, monkeypatch, tmp_path, 'source.pth', 'converted.pth', '--unsafe-load')
    assert sorted(os.listdir(tmp_path)) == ['converted.pth', 'made', 'source.pth']


@pytest.mark.parametrize('zip_format', [True, False])
@pytest.mark.parametrize('share', [0, 0.01, 0.5, 0.99])
def test_truncated_files(mistake, tmp_path, zip_format, share):
    torch.save(small(), tmp_path / 'source.pth', _use_new_zipfile_serialization=zip_format)
    content = (tmp_path / 'source.pth').read_bytes()
    (tmp_path / 'source.pth').write_bytes(content[:int(share * len(content))])
    error = mistake('convert_checkpoint', 'source.pth', 'converted.pth', cwd=tmp_path)
    assert error.startswith('error: source.pth is not a PyTorch checkpoint, or not all of it')
    assert os.listdir(tmp_path) == ['source.pth']


def test_no_file_is_replaced_unasked(tool, mistake, monkeypatch, tmp_path):
    torch.save(small(), tmp_path / 'source.pth')
    (tmp_path / 'converted.pth').write_text('precious')
    assert 'converted.pth exists' in mistake('convert_checkpoint', 'source.pth', 'converted.pth', cwd=tmp_path)
    assert (tmp_path / 'converted.pth').read_text() == 'precious'
    run(tool, monkeypatch, tmp_path, 'source.pth', 'converted.pth', '--force')
    assert load_checkpoint(KCLAResNet(18), str(tmp_path / 'converted.pth'), strict=True)


@pytest.mark.parametrize('src, dst, message', [
    ('no.pth', 'converted.pth', 'error: SRC, no.pth, does not exist'),
    ('.', 'converted.pth', 'error: SRC, ., does not exist'),
    ('no.pth', 'no/converted.pth', 'error: the folder of DST, no, does not exist'),
    ('no.pth', '.', 'error: DST must be a file'),
])
def test_paths(mistake, tmp_path, src, dst, message):
    assert mistake('convert_checkpoint', src, dst, cwd=tmp_path).startswith(message)


def test_nothing_is_left_where_writing_fails(tool, monkeypatch, tmp_path):
    def fail(checkpoint, path):
        path.write_text('half')
        raise OSError('disk full')
    torch.save(small(), tmp_path / 'source.pth')
    monkeypatch.setattr(torch, 'save', fail)
    with pytest.raises(SystemExit, match='disk full'):
        run(tool, monkeypatch, tmp_path, 'source.pth', 'converted.pth')
    assert os.listdir(tmp_path) == ['source.pth']
